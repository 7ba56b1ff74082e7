"""Findings that plain JAX appends to the log, against the reference's bookkeeping."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_kvcanary as kvc
from helpers.states import assert_same_counters, fresh_state, log_rows, with_log
from jax_kvcanary.log import log_slots_out_of_range
from jax_kvcanary.reference.log import Launch

TAGS = (kvc.CanaryLaunchTag.HEAD_K_FULL, kvc.CanaryLaunchTag.HEAD_K_SWA)
CAPACITY, NUM_SLOTS = 7, 5
#: Rows so far: none, some, all but one, as many as there is room for, more, and the last ones that the index can count.
COUNTS = (0, 3, 6, 7, 23, 2**31 - 4, 2**31 - 1)
SLOTS = {
    "none": [],
    "sound": [0, 1, 4],
    "negative": [-1, -(2**31)],
    "one": [5],
    "mixed": [5, 2, -1, 2**31 - 1, 0, 6, 4],
    "many": [*range(4, 17)],
}


def reference(state, slots, tag):
    """Row by row, without the launch that the reference counts."""
    launch = Launch(state, tag)
    for slot in slots:
        if slot >= NUM_SLOTS:
            reason = kvc.FailReason.SLOT_OUT_OF_RANGE
            fields = {"slot": slot, "position": -1, "stored_token": -1, "expected_token": -1, "stored_chain_hash": 0}
            launch.record(reason, expected_aux=NUM_SLOTS, **fields)
    return dataclasses.replace(launch.finish(), kernel_run_counters=state.kernel_run_counters)


def donated(state, slots, num_slots, *, tag):
    log = jax.jit(partial(log_slots_out_of_range, num_slots=num_slots, tag=tag), donate_argnums=0)
    return log(jax.tree.map(jnp.asarray, state), slots)


@pytest.mark.parametrize("log", [log_slots_out_of_range, donated])
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
def test_rows_are_those_of_the_reference(slots, x64, log):
    for count in COUNTS:
        old = np.arange(8 * min(count, CAPACITY)).reshape(-1, 8) - 9
        state = with_log(fresh_state(CAPACITY), old, count)
        counters = np.full((12, 8), 2**32 - 2, np.uint32)  # wraps
        state = dataclasses.replace(state, fail_reason_counters=counters)
        for tag in TAGS:
            want = reference(state, slots, tag)
            with jax.enable_x64(x64):
                got = log(state, np.array(slots, np.int32), NUM_SLOTS, tag=tag)
            assert_same_counters(got, want)
            np.testing.assert_array_equal(log_rows(got), log_rows(want))


def test_the_log_is_updated_in_place():
    state = kvc.CanaryDeviceState.allocate(kvc.CanaryConfig("log", ring_capacity=1009))
    log = jax.jit(partial(log_slots_out_of_range, num_slots=3, tag=TAGS[0]), donate_argnums=0)
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
    after = log(state, jnp.arange(11, dtype=jnp.int32))
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(after)] == before
    assert after.violation_log.count() == 8
