"""Findings that no launch makes: rows appended to the violation log by plain JAX (the contract's section 6)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from jax_kvcanary._checks import ArrayLike
from jax_kvcanary.constants import INT32_MAX, CanaryLaunchTag, FailReason
from jax_kvcanary.state import CanaryDeviceState, from_int64

_SLOT_FIELD = 1  # of a row; a slot that is logged is positive, so its high word is 0


def log_slots_out_of_range(device_state: CanaryDeviceState, slots: ArrayLike, num_slots: int, *, tag: CanaryLaunchTag) -> CanaryDeviceState:
    """Record SLOT_OUT_OF_RANGE for every slot at or past the end of a canary buffer; nothing where there is none.

    The rows are (tag, slot, -1, -1, -1, 0, num_slots, SLOT_OUT_OF_RANGE), in the order of the slots. The ring and the counters are
    updated in place under donation. No launch is counted.

    Args:
        device_state: the state whose log gets the rows.
        slots: int32 [n] in the group's own numbering; negative ones are no finding.
        num_slots: slots of the buffer (static).
        tag: under which tag the findings stand (static).
    """
    log = device_state.violation_log
    ring, counters = jnp.asarray(log.violation_ring), jnp.asarray(device_state.fail_reason_counters)
    before = jnp.asarray(log.violation_write_index)[0]
    slots = jnp.asarray(slots)
    bad = slots >= num_slots
    capacity, room = ring.shape[0], INT32_MAX - before  # the index saturates

    place = before + jnp.minimum(jnp.cumsum(bad, dtype=jnp.int32) - 1, room)
    place = jnp.where(bad & (place >= 0) & (place < capacity), place, capacity)  # past the end: dropped
    reason = FailReason.SLOT_OUT_OF_RANGE
    row = jnp.asarray(from_int64(np.array([tag, 0, -1, -1, -1, 0, num_slots, reason])))  # [8, 2]
    rows = jnp.broadcast_to(row, (*slots.shape, *row.shape)).at[:, _SLOT_FIELD, 0].set(slots.astype(jnp.uint32))

    request_rows = log.violation_request_rows
    if request_rows is not None:  # these belong to none
        request_rows = jnp.asarray(request_rows).at[place].set(-1, mode="drop")
    count = jnp.sum(bad, dtype=jnp.int32)
    column = reason.bit_length() - 1
    return dataclasses.replace(
        device_state,
        violation_log=dataclasses.replace(
            log,
            violation_ring=ring.at[place].set(rows, mode="drop"),
            violation_request_rows=request_rows,
            violation_write_index=(before + jnp.minimum(count, room))[None],
        ),
        fail_reason_counters=counters.at[int(tag), column].add(count.astype(jnp.uint32)),
    )
