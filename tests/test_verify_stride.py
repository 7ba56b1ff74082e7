"""A plan with a stride verifies some of the positions; plans of consecutive phases have every entry once between them."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_kvcanary as kvc
from helpers.backends import host
from helpers.loops import CONFIG, EVERY_PHASE, Loop, at, int32, tokens_of
from helpers.random_cases import PlanShape, random_plan
from jax_kvcanary import CanaryLaunchTag as Tag
from jax_kvcanary import FailReason as Reason

STRIDE = 3
STRIDED = dataclasses.replace(CONFIG, verify_stride=STRIDE)
COLUMNS = ("verify_slot_indices", "verify_expected_positions", "verify_prev_slot_indices", "verify_expected_tokens")


def entries_by_row(plan):
    """The entries of each row, and what does not depend on the stride."""
    plan = host(plan)
    assert plan.verify.enable.tolist() == [1]
    assert plan.verify.row_offsets[-1] == plan.verify.verify_num_valid[0]
    entries = np.stack([getattr(plan.verify, name) for name in COLUMNS], axis=1).tolist()
    offsets = plan.verify.row_offsets.tolist()
    rows = [entries[begin:end] for begin, end in itertools.pairwise(offsets)]
    return rows, jax.tree.map(np.ndarray.tolist, (plan.write, plan.num_invalid_rows))


@pytest.mark.parametrize("phase_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("stride", [2, 3, 7, 41])
@pytest.mark.parametrize(
    "shape",
    [
        PlanShape(rows=5, table=(7, 29), verify_capacity=149),
        PlanShape(rows=7, table=(5, 31), verify_capacity=211, window=11, lut_len=23, expected=(4, 29), offset=1),
    ],
    ids=["plain", "window"],
)
def test_consecutive_phases_have_every_entry_once(backend, shape, stride, phase_dtype):
    rng = np.random.default_rng([stride, shape.rows])
    for begin in (0, -5, 2**31 - 1 - stride, -(2**31)):
        (inputs, table), keywords = random_plan(rng, shape, 0.1, wide=False)
        keywords |= {"verify_capacity": shape.rows * shape.table[1]}
        inputs, table, arrays = jax.tree.map(
            lambda value: backend.ints(value, value.shape),
            (inputs, table, {name: value for name, value in keywords.items() if isinstance(value, np.ndarray)}),
        )
        keywords |= arrays
        want, rest = entries_by_row(backend.plan(inputs, table, **keywords))
        got = [[] for _ in want]
        for phase in range(begin, begin + stride):
            strided = keywords | {"verify_stride": stride, "verify_phase": backend.array(np.array([phase], phase_dtype))}
            rows, rest_of_phase = entries_by_row(backend.plan(inputs, table, **strided))
            assert rest_of_phase == rest
            for all_of_row, row in zip(got, rows, strict=True):
                positions = [position for _, position, _, _ in row]
                assert positions == sorted(positions)
                assert {(position + phase) % stride for position in positions} <= {0}
                all_of_row += row
        assert [sorted(row, key=lambda entry: entry[1]) for row in got] == want


def test_a_wide_phase_keeps_its_remainder(backend):
    """Saturated to int32, or cut off, it would choose other positions."""
    phases = np.array([2**40 + 5, -(2**63), 2**63 - 1, 2**31])
    inputs, table = kvc.PlanInput(*(backend.ints(v) for v in ([1], [11], [0]))), backend.ints(np.arange(26), (2, 13))
    for phase in phases.tolist():
        plan = backend.plan(inputs, table, verify_capacity=13, verify_stride=7, verify_phase=backend.array(np.array([phase])))
        want = [p for p in range(11) if (p + phase) % 7 == 0]
        count = int(plan.verify.verify_num_valid[0])
        assert np.asarray(plan.verify.verify_expected_positions)[:count].tolist() == want


def test_a_predecessor_is_that_of_the_chain(backend):
    inputs = kvc.PlanInput(*(backend.ints(v) for v in ([1], [5], [1])))
    table = backend.ints([[0] * 6, [10, 11, -1, 13, 14, 15]], (2, 6))
    plan = host(backend.plan(inputs, table, verify_capacity=3, verify_stride=3, verify_phase=backend.ints([0])))
    assert plan.verify.verify_num_valid.tolist() == [2]
    assert [getattr(plan.verify, name)[:2].tolist() for name in COLUMNS] == [[10, 13], [0, 3], [-1, 0], [-1, -1]]
    assert plan.verify.row_offsets.tolist() == [0, 2]
    assert plan.write.write_seed_slot_indices.tolist() == [14]


def test_room_is_needed_for_the_entries_there_are(backend):
    inputs = kvc.PlanInput(*(backend.ints(v) for v in ([1, 2], [11, 10], [0, 0])))
    table = backend.ints(np.arange(33), (3, 11))
    for phase, (count, enable) in {0: (5, 0), 1: (4, 1), 2: (5, 1)}.items():
        plan = backend.plan(inputs, table, verify_capacity=5, verify_stride=4, verify_phase=backend.ints([phase]))
        assert np.asarray(plan.verify.verify_num_valid).tolist() == [count]
        assert np.asarray(plan.verify.enable).tolist() == [enable]


# Messages.


@pytest.mark.parametrize("operations", [kvc, kvc.reference], ids=["device", "reference"])
@pytest.mark.parametrize(
    ("stride", "phase", "error", "text"),
    [
        (3, None, ValueError, "`verify_phase` is None, but it must be an array when `verify_stride` is 3."),
        (1, int32([0]), ValueError, "`verify_phase` is an array, but it must be None when `verify_stride` is 1."),
        (0, None, ValueError, "`verify_stride` is 0, but it must be between 1 and 2147483647."),
        (2**31, int32([0]), ValueError, "`verify_stride` is 2147483648, but it must be between 1 and 2147483647."),
        (2.0, int32([0]), TypeError, "`verify_stride` is 2.0 of type float, but it must be an int."),
        (2, int32([0, 1]), ValueError, "`verify_phase` has shape [2], but the phase of a step, one number, needs shape [1]."),
        (2, int32(0), ValueError, "`verify_phase` has shape [], but the phase of a step, one number, needs shape [1]."),
        (2, np.zeros(1, np.uint32), TypeError, "`verify_phase` has dtype uint32, but it must be int32 or int64."),
    ],
)
def test_bad_strides_and_phases(operations, stride, phase, error, text):
    inputs = kvc.PlanInput(int32([1]), int32([1]), int32([1]))
    with pytest.raises(error) as caught:
        operations.plan(inputs, np.zeros((2, 3), np.int32), verify_capacity=3, verify_stride=stride, verify_phase=phase)
    assert str(caught.value) == text


# In the loop.


def decode(loop, row, position):
    """Findings of a step that adds one token to a request."""
    return loop.extend(row, position, 1)


@pytest.mark.parametrize("corrupted", range(3, 3 + STRIDE))
def test_a_corrupted_record_is_found_when_its_turn_comes(corrupted):
    loop = Loop(STRIDED)
    steps, length = 1, 11
    assert loop.extend(1, 0, length) == []
    slot = int(loop.requests.table[1, corrupted])
    group = loop.state.groups[0]
    buffers = {f"{half}_{end}": getattr(group, f"{half}_{end}").at[slot, 8].add(1) for half in "kv" for end in ("head", "tail")}
    loop.state = dataclasses.replace(loop.state, groups=(group.with_buffers(**buffers),))
    found = []
    while not found:
        assert steps <= STRIDE
        found = decode(loop, 1, length)
        turn = (corrupted + steps) % STRIDE == 0
        behind = (corrupted + 1 + steps) % STRIDE == 0  # its hash is of the record before it
        want = at(EVERY_PHASE, slot, Reason.VERIFY_POSITION_MISMATCH) if turn else []
        want += at(EVERY_PHASE, int(loop.requests.table[1, corrupted + 1]), Reason.VERIFY_CHAIN_HASH_MISMATCH) if behind else []
        assert found == sorted(want)
        steps, length = steps + 1, length + 1


def test_counters_count_what_was_verified():
    loop = Loop(STRIDED)
    written = verified = 0
    for step, (row, prefix, count) in enumerate([(1, 0, 11), (1, 11, 1), (2, 0, 7), (1, 12, 1), (1, 13, 1)]):
        assert loop.extend(row, prefix, count) == []
        written += count
        verified += sum((position + step) % STRIDE == 0 for position in range(prefix))
        slots = kvc.to_int64(loop.state.device_state.slot_run_counters)
        assert [slots[tag] for tag in EVERY_PHASE] == [written + verified] * 4


def test_groups_of_one_kind_share_a_phase():
    """Each counts under the same tag; the count of steps is that of the loop all the same."""
    loop = Loop(STRIDED)
    groups = (loop.state.groups[0], jax.tree.map(jnp.copy, loop.state.groups[0]))
    loop.state = dataclasses.replace(loop.state, groups=groups)
    loop.requests.place(1, 0, 11)
    state = loop.state
    for step in range(2 * STRIDE):
        batch = loop.requests.batch((1, 9, tokens_of(1, 9, 1)))
        state, planned = jax.jit(loop.canary.pre_forward)(state, batch, loop.pool)
        for plan in planned.plans:
            count = int(plan.verify.verify_num_valid[0])
            positions = np.asarray(plan.verify.verify_expected_positions)[:count].tolist()
            assert positions == [position for position in range(9) if (position + step) % STRIDE == 0]


def test_a_phase_behind_many_steps():
    """The low word of a count that has outgrown int32."""
    loop = Loop(STRIDED)
    loop.requests.place(1, 0, 11)
    counters = loop.state.device_state.kernel_run_counters.at[Tag.HEAD_K_FULL].set(jnp.array([2**32 - 10, 7], jnp.uint32))
    state = dataclasses.replace(loop.state, device_state=dataclasses.replace(loop.state.device_state, kernel_run_counters=counters))
    _, step = loop.canary.pre_forward(state, loop.requests.batch((1, 7, tokens_of(1, 7, 1))), loop.pool)
    count = int(step.plans[0].verify.verify_num_valid[0])
    positions = np.asarray(step.plans[0].verify.verify_expected_positions)[:count].tolist()
    assert positions == [position for position in range(7) if (position + (2**31 - 5)) % STRIDE == 0]


def test_without_a_stride_no_phase_is_in_the_program():
    loop = Loop()
    loop.requests.place(1, 0, 11)
    batch = loop.requests.batch((1, 7, tokens_of(1, 7, 1)))
    texts = {
        stride: jax.jit(dataclasses.replace(loop.canary, config=dataclasses.replace(CONFIG, verify_stride=stride)).pre_forward)
        .trace(loop.state, batch, loop.pool)
        .lower(lowering_platforms=("cpu",))  # on a GPU, a kernel hides its arithmetic
        .as_text()
        for stride in (1, STRIDE)
    }
    assert ["stablehlo.remainder" in text for text in texts.values()] == [False, True]
    assert ["stablehlo.divide" in text for text in texts.values()] == [False, True]
