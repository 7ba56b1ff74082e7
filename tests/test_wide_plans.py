"""Plans built by hand from int64 arrays, NumPy's default: the same findings as from int32, wide values out of range."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import jax_kvcanary as kvc

NUM_SLOTS, WIDE = 7, 2**40
OPERATIONS = {"device": kvc, "reference": kvc.reference}


def fresh_state():
    return kvc.CanaryDeviceState.allocate(kvc.CanaryConfig("log", ring_capacity=13))


def verify_plan(dtype, slots=(3, 5), prevs=(-1, 3), tokens=(11, 12)):
    columns = (slots, tokens, (0, 1), prevs, (2,), (1,))
    return kvc.VerifyPlan(*(np.array(column, dtype) for column in columns))


def write_plan(dtype, seed=-1):
    return kvc.WritePlan(*(np.array(column, dtype) for column in ((0, 2), (seed,), (1,))))


def written(operations, plan):
    ids, positions, slots = (np.array(column) for column in ((11, 12), (0, 1), (3, 5)))
    return operations.write_step(kvc.fresh_records(NUM_SLOTS), plan, ids, positions, slots, fresh_state(), tag=2)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("x64", [False, True])
def test_int64_plans_are_those_of_int32(name, x64):
    operations = OPERATIONS[name]
    with jax.enable_x64(x64):
        (narrow, _), (wide, state) = (written(operations, write_plan(dtype)) for dtype in (np.int32, np.int64))
        np.testing.assert_array_equal(np.asarray(narrow), np.asarray(wide))
        state = operations.verify_step(wide, verify_plan(np.int64), state, tag=2, check_expected_token=True)
    assert state.violation_log.count() == 0
    assert kvc.to_int64(state.slot_run_counters)[2] == 4


@pytest.mark.parametrize("name", OPERATIONS)
def test_wide_values_are_findings_or_unknown(name):
    operations = OPERATIONS[name]
    buffer, state = written(operations, write_plan(np.int64, seed=WIDE))
    # The seed is reported with the first entry's position and token; the chain starts from the anchor.
    assert state.violation_log.rows()[:, [1, 2, 3, 6, 7]].tolist() == [[2**31 - 1, 0, 11, NUM_SLOTS, 64]]
    plan = verify_plan(np.int64, slots=(3, WIDE), prevs=(-1, -WIDE), tokens=(WIDE, 12))
    state = operations.verify_step(buffer, plan, fresh_state(), tag=2, check_expected_token=True)
    # The wide token is unknown, so that slot 3 is silent; the wide slot does not exist.
    assert state.violation_log.rows()[:, [1, 2, 4, 7]].tolist() == [[2**31 - 1, 1, 12, 64]]
