"""A step's report: what the host needs of the log and the counters, in buffers of its own."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvcanary._checks import ArrayLike
from jax_kvcanary.constants import FAIL_REASON_COLUMNS, NUM_LAUNCH_TAGS
from jax_kvcanary.state import CanaryDeviceState

# What a summary holds, in order: name, shape and dtype of each part.
_PARTS: tuple[tuple[str, tuple[int, ...], str], ...] = (
    ("violation_write_index", (1,), "<i4"),
    ("num_invalid_rows", (1,), "<i4"),
    ("reset_count", (1,), "<i4"),
    ("kernel_run_counters", (NUM_LAUNCH_TAGS, 2), "<u4"),
    ("slot_run_counters", (NUM_LAUNCH_TAGS, 2), "<u4"),
    ("fail_reason_counters", (NUM_LAUNCH_TAGS, FAIL_REASON_COLUMNS), "<u4"),
    ("verify_skip_counters", (NUM_LAUNCH_TAGS,), "<u4"),
)

# Where each of them begins, and the last one ends.
_ENDS = (0, *itertools.accumulate(math.prod(shape) for _, shape, _ in _PARTS))

#: uint32 words of a summary; the handlers' ``kSummaryWords``.
SUMMARY_WORDS = _ENDS[-1]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("violation_ring", "violation_request_rows", "row_flags", "summary"),
    meta_fields=(),
)
@dataclass(frozen=True)
class CanaryReport:
    """A step's copy of the log and the counters. It shares no memory with the state, so that it survives its donation.

    The counters are packed into one small array, since the host fetches them at every step; the rest is fetched only when the
    summary says that there are new rows. The properties are host views: they wait for the device.

    Fields:
        violation_ring: uint32 [ring_capacity, 8, 2]; see :class:`ViolationLog`.
        violation_request_rows: int32 [ring_capacity]; likewise.
        row_flags: int32 [bs]; for each row of the batch the :class:`FailReason` bits found in this step, so that a server can abort the
            requests at fault and go on with the others. Empty for a sweep.
        summary: uint32 [159]; everything below, row-major, one after the other.
    """

    violation_ring: ArrayLike
    violation_request_rows: ArrayLike | None
    row_flags: ArrayLike
    summary: ArrayLike

    @classmethod
    def of(cls, device_state: CanaryDeviceState, num_invalid_rows: ArrayLike, row_flags: ArrayLike | None = None) -> CanaryReport:
        """The report of a state; ``num_invalid_rows`` int32 [1] counts the rows of this batch that made no sense."""
        log = device_state.violation_log
        values: dict[str, Any] = {
            **vars(device_state),
            "violation_write_index": log.violation_write_index,
            "num_invalid_rows": num_invalid_rows,
            "reset_count": jnp.zeros((1,), jnp.int32) if log.reset_count is None else log.reset_count,
        }
        words = [jax.lax.bitcast_convert_type(jnp.ravel(values[name]), jnp.uint32) for name, _, _ in _PARTS]
        return cls(
            violation_ring=jnp.copy(log.violation_ring),
            violation_request_rows=None if log.violation_request_rows is None else jnp.copy(log.violation_request_rows),
            row_flags=jnp.zeros((0,), jnp.int32) if row_flags is None else row_flags,
            summary=jnp.concatenate(words),
        )

    def copy_to_host_async(self) -> None:
        """Start the copy of the summary to the host."""
        self.summary.copy_to_host_async()

    def on_host(self) -> dict[str, np.ndarray]:
        """The parts of the summary by name: those of :class:`CanaryDeviceState`, and ``num_invalid_rows`` and ``reset_count`` int32 [1]."""
        words, places = np.asarray(self.summary), zip(_PARTS, itertools.pairwise(_ENDS), strict=True)
        return {name: words[start:end].view(dtype).reshape(shape) for (name, shape, dtype), (start, end) in places}

    @property
    def violation_write_index(self) -> np.ndarray:
        """int32 [1]; violations so far."""
        return self.on_host()["violation_write_index"]

    @property
    def num_invalid_rows(self) -> np.ndarray:
        """int32 [1]; rows of this batch that made no sense. A scan has to return every report for none to be missed."""
        return self.on_host()["num_invalid_rows"]
