"""What every custom call has in common: its endpoints, the log it threads through, and the aliases between the two.

Operands of a launch: those of the operation; the request rows of the batch; the log; the flags of the batch's rows; all canary
buffers; all sources, endpoint after endpoint. Results: what only this operation has (``own``); the log; the flags; the report, where
one is asked for; the canary buffers, where they are written. The handlers' side of this is ``ffi/bindings/unpack.h``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvcanary._checks import ArrayLike, check_canary_buffer, check_enum, on_device
from jax_kvcanary._results import results_like
from jax_kvcanary.constants import VIOLATION_FIELDS, CanaryLaunchTag, RealKvHashMode
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


@partial(jax.tree_util.register_dataclass, data_fields=("requests", "flags"), meta_fields=())
@dataclass(frozen=True)
class BatchRows:
    """The rows of a batch that findings are attributed to.

    Fields:
        requests: int32 [bs]; the row of ``req_to_token`` of each.
        flags: int32 [bs]; the :class:`~jax_kvcanary.FailReason` bits found for each so far.
    """

    requests: ArrayLike
    flags: ArrayLike

    @classmethod
    def none(cls) -> BatchRows:
        """One row that is no request's, for findings that belong to the launch as a whole. Handlers do not take empty arrays."""
        return cls(jnp.full((1,), -1, jnp.int32), jnp.zeros((1,), jnp.int32))


@dataclass(frozen=True)
class Results:
    """What a custom call returned.

    Fields:
        state: with the log and the counters as the launch left them.
        rows: with their flags; None where findings were not attributed.
        own: the results that only this operation has.
        report: copies of the ring, of the request rows and of the flags, and the summary; empty where no report was asked for.
        buffers: the canary buffers, where they are written.
    """

    state: CanaryDeviceState
    rows: BatchRows | None
    own: list[jax.Array]
    report: list[jax.Array]
    buffers: list[jax.Array]


def call(
    target: str,
    operands: Sequence[ArrayLike],
    endpoints: Sequence[Endpoint],
    mode: RealKvHashMode,
    state: CanaryDeviceState,
    rows: BatchRows | None,
    *,
    own_words: Sequence[int] = (),
    summary_words: int = 0,
    writes: bool = False,
    **attributes: Any,
) -> Results:
    """One custom call over a list of endpoints.

    Args:
        target: registered name of the operation.
        operands: the operation's own operands.
        endpoints: checked endpoints, at most MAX_ENDPOINTS.
        mode: how much of the real KV is hashed.
        state: the canary's state; its log and counters are aliased to the results.
        rows: the batch's rows, at least one; their flags are aliased to a result. None does not attribute findings.
        own_words: uint32 words of each result that only this operation has, scratch memory among them.
        summary_words: uint32 words of a report's summary; 0 asks for no report.
        writes: whether the canary buffers are results too, aliased to their operands.
        **attributes: the operation's own attributes.
    """
    if not 1 <= len(endpoints) <= MAX_ENDPOINTS:
        raise ValueError(f"`endpoints` has {len(endpoints)} endpoints, but one launch takes between 1 and {MAX_ENDPOINTS}.")
    marked = BatchRows.none() if rows is None else rows
    log = [*_log_arrays(state), marked.flags]
    operands = [*operands, marked.requests]
    buffers = [endpoint.canary_buf for endpoint in endpoints]
    sources = [source for endpoint in endpoints for source in endpoint.sources]
    arrays = [*operands, *log, *buffers, *(on_device(source.array) for source in sources)]
    geometry = [
        (source.page_size, source.bytes_read(mode), source.byte_offset, source.row_stride, source.token_stride) for source in sources
    ]

    capacity = state.violation_log.violation_ring.shape[0]
    report: list[tuple[tuple[int, ...], Any]] = []
    if summary_words:
        flags_shape = tuple(marked.flags.shape)
        report = [
            ((capacity, VIOLATION_FIELDS, 2), np.uint32),
            ((capacity,), np.int32),
            (flags_shape, np.int32),
            ((summary_words,), np.uint32),
        ]
    written = buffers if writes else []
    groups: list[list[tuple[tuple[int, ...], Any]]] = [
        [((words,), np.uint32) for words in own_words],
        [(tuple(array.shape), array.dtype) for array in log],
        report,
        [(tuple(array.shape), array.dtype) for array in written],
    ]
    ends = list(itertools.accumulate(len(group) for group in groups))
    aliases = {len(operands) + i: ends[0] + i for i in range(len(log))}
    aliases |= {len(operands) + len(log) + i: ends[2] + i for i in range(len(written))}
    out = jax.ffi.ffi_call(target, results_like([result for group in groups for result in group], arrays), input_output_aliases=aliases)(
        *arrays,
        tags=np.array([int(endpoint.tag) for endpoint in endpoints], np.int64),
        source_counts=np.array([len(endpoint.sources) for endpoint in endpoints], np.int64),
        source_geometry=np.array(geometry, np.int64).reshape(-1),
        **attributes,
    )
    *log_results, flags = out[ends[0] : ends[1]]
    return Results(
        state=_with_log_arrays(state, log_results),
        rows=None if rows is None else dataclasses.replace(rows, flags=flags),
        own=list(out[: ends[0]]),
        report=list(out[ends[1] : ends[2]]),
        buffers=list(out[ends[2] :]),
    )


def _log_arrays(state: CanaryDeviceState) -> list[ArrayLike]:
    log = state.violation_log
    request_rows = log.violation_request_rows
    return [
        log.violation_ring,
        log.violation_write_index,
        state.kernel_run_counters,
        state.slot_run_counters,
        state.fail_reason_counters,
        state.verify_skip_counters,
        jnp.full(log.violation_ring.shape[:1], -1, jnp.int32) if request_rows is None else request_rows,  # the handlers always fill one
    ]


def _with_log_arrays(state: CanaryDeviceState, arrays: Sequence[jax.Array]) -> CanaryDeviceState:
    ring, write_index, kernel_runs, slot_runs, fail_reasons, skips, request_rows = arrays
    log = dataclasses.replace(
        state.violation_log,
        violation_ring=ring,
        violation_write_index=write_index,
        violation_request_rows=None if state.violation_log.violation_request_rows is None else request_rows,
    )
    object.__setattr__(log, "launched", True)
    return dataclasses.replace(
        state,
        violation_log=log,
        kernel_run_counters=kernel_runs,
        slot_run_counters=slot_runs,
        fail_reason_counters=fail_reasons,
        verify_skip_counters=skips,
    )
