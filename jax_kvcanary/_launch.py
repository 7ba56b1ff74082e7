"""What every custom call has in common: its endpoints, the log it threads through, and the aliases between the two.

Operands of a launch: those of the operation; the log; all canary buffers; all sources, endpoint after endpoint.
Results: the log; what the operation adds. The handlers' side of this is ``ffi/bindings/unpack.h``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jax_kvcanary._checks import ArrayLike, check_canary_buffer, check_enum, on_device
from jax_kvcanary._results import results_like
from jax_kvcanary.constants import CanaryLaunchTag, RealKvHashMode
from jax_kvcanary.sources import RealKvSource, check_sources
from jax_kvcanary.state import CanaryDeviceState

#: Endpoints that one custom call takes; the handlers' limit (``kMaxEndpoints``).
MAX_ENDPOINTS = 4


@dataclass(frozen=True)
class Endpoint:
    """One canary buffer of a launch, uint8 [num_slots, 32], with its tag and the real KV of its records."""

    canary_buf: ArrayLike
    tag: CanaryLaunchTag
    sources: Sequence[RealKvSource] = ()

    def checked(self, mode: RealKvHashMode) -> Endpoint:
        """The endpoint with its buffer, tag and sources checked, and no sources where the mode hashes nothing."""
        num_slots = check_canary_buffer(self.canary_buf, "canary_buf")
        return Endpoint(self.canary_buf, check_enum(self.tag, "tag", CanaryLaunchTag), check_sources(self.sources, mode, num_slots))


def call(
    target: str,
    operands: Sequence[ArrayLike],
    endpoints: Sequence[Endpoint],
    mode: RealKvHashMode,
    state: CanaryDeviceState,
    *,
    scratch_words: int | None = None,
    writes: bool = False,
    **attributes: Any,
) -> tuple[list[jax.Array], CanaryDeviceState]:
    """One custom call over a list of endpoints.

    Args:
        target: registered name of the operation.
        operands: the operation's own operands.
        endpoints: checked endpoints, at most MAX_ENDPOINTS.
        mode: how much of the real KV is hashed.
        state: the canary's state; its log and counters are aliased to the results.
        scratch_words: uint32 words of scratch memory, or None for an operation without.
        writes: whether the canary buffers are results too, aliased to their operands.
        **attributes: the operation's own attributes.

    Returns:
        The canary buffers (empty unless it writes), and the state.
    """
    if not 1 <= len(endpoints) <= MAX_ENDPOINTS:
        raise ValueError(f"`endpoints` has {len(endpoints)} endpoints, but one launch takes between 1 and {MAX_ENDPOINTS}.")
    log = _log_arrays(state)
    buffers = [endpoint.canary_buf for endpoint in endpoints]
    sources = [source for endpoint in endpoints for source in endpoint.sources]
    arrays = [*operands, *log, *buffers, *(on_device(source.array) for source in sources)]
    geometry = [
        (source.page_size, source.bytes_read(mode), source.byte_offset, source.row_stride, source.token_stride) for source in sources
    ]

    aliased = [(len(operands) + i, array) for i, array in enumerate([*log, *buffers] if writes else log)]
    types = [(tuple(array.shape), array.dtype) for _, array in aliased]
    positions = list(range(len(aliased)))
    if scratch_words is not None:
        types.insert(len(log), ((scratch_words,), np.uint32))
        positions = [p if p < len(log) else p + 1 for p in positions]
    out = jax.ffi.ffi_call(
        target,
        results_like(types, arrays),
        input_output_aliases={operand: position for (operand, _), position in zip(aliased, positions, strict=True)},
    )(
        *arrays,
        tags=np.array([int(endpoint.tag) for endpoint in endpoints], np.int64),
        source_counts=np.array([len(endpoint.sources) for endpoint in endpoints], np.int64),
        source_geometry=np.array(geometry, np.int64).reshape(-1),
        **attributes,
    )
    return list(out[len(out) - len(buffers) :]) if writes else [], _with_log_arrays(state, out[: len(log)])


def _log_arrays(state: CanaryDeviceState) -> list[ArrayLike]:
    return [
        state.violation_log.violation_ring,
        state.violation_log.violation_write_index,
        state.kernel_run_counters,
        state.slot_run_counters,
        state.fail_reason_counters,
        state.verify_skip_counters,
    ]


def _with_log_arrays(state: CanaryDeviceState, arrays: Sequence[jax.Array]) -> CanaryDeviceState:
    ring, write_index, kernel_runs, slot_runs, fail_reasons, skips = arrays
    return dataclasses.replace(
        state,
        violation_log=dataclasses.replace(state.violation_log, violation_ring=ring, violation_write_index=write_index),
        kernel_run_counters=kernel_runs,
        slot_run_counters=slot_runs,
        fail_reason_counters=fail_reasons,
        verify_skip_counters=skips,
    )
