"""Statistics of a sliding-window pool's table, against a loop over its entries."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_kvcanary as kvc
from helpers.messages import CAPACITIES, LOG, assert_message, floats, ints, make_batch, rows
from helpers.random_cases import EDGES, INT32_MAX, WIDE, sprinkle
from jax_kvcanary.swa_statistics import _saturating_sum

NAMES = ("live_entries", "diverged", "outside_window", "absent_in_window", "past_table", "without_slot")


@partial(jax.tree_util.register_dataclass, data_fields=("lut",), meta_fields=())
@dataclass(frozen=True)
class TablePool:
    """A pool as far as the statistics look at it."""

    lut: Any


def canary_of(window, **config):
    return kvc.Canary(kvc.CanaryConfig("log", **config), CAPACITIES, window, (("lut",),))


def batch_of(req, prefix, extend, table):
    return kvc.ForwardBatch(None, None, None, kvc.PlanInput(req, prefix, extend), table)


def count_by_hand(req, prefix, extend, table, lut, window):
    """The counts of int64 NumPy arrays, entry by entry."""
    counts = dict.fromkeys(NAMES, 0)
    max_reqs, max_seq_len = table.shape
    for r, cached, written in zip(req.tolist(), prefix.tolist(), extend.tolist(), strict=True):
        if r == 0 or not 0 <= r < max_reqs or not 0 <= cached <= max_seq_len or written < 0:
            continue
        for position in range(min(cached + written, max_seq_len)):
            counts["live_entries"] += 1
            inside = window == 0 or position >= cached - window
            counts["outside_window"] += not inside
            slot = int(table[r, position])
            if slot < 0:
                counts["without_slot"] += 1
            elif slot >= len(lut):
                counts["past_table"] += 1
            elif lut[slot] <= 0:
                counts["absent_in_window"] += inside
            else:
                counts["diverged"] += int(lut[slot]) != slot
    return counts


@dataclass(frozen=True)
class Shape:
    rows: int
    table: tuple[int, int]
    lut_len: int
    window: int


SHAPES = (
    Shape(5, (7, 11), 31, 0),
    Shape(3, (5, 13), 17, 4),
    Shape(13, (3, 7), 31, 1),
    Shape(1, (2, 17), 19, 17),
    Shape(4, (5, 7), 0, 3),
    Shape(0, (3, 5), 7, 2),
    Shape(3, (4, 0), 7, 2),
    Shape(3, (0, 5), 7, 2),
)


def random_case(rng, shape, wildness, *, wide):
    """int64 arrays that fit int32 unless ``wide``; half of the table maps slots to themselves."""
    max_reqs, max_seq_len = shape.table
    edges = EDGES + (WIDE if wide else ())

    def draw(low, high, size, wild=()):
        return sprinkle(rng, rng.integers(low, high + 1, size), wildness, [*edges, *wild])

    lut = draw(-1, 20, shape.lut_len)
    lut = np.where(rng.random(shape.lut_len) < 0.5, np.arange(shape.lut_len), lut)
    return (
        draw(0, max(max_reqs - 1, 0), shape.rows, [max_reqs]),
        draw(0, max_seq_len, shape.rows, [max_seq_len, max_seq_len + 1]),
        draw(0, 6, shape.rows),
        draw(1, 29, shape.table, [30, 31, -1]),
        lut,
    )


def narrow(arrays):
    return [array.astype(np.int32) for array in arrays]


def check(divergence, want):
    assert [(count.dtype, count.shape) for count in jax.tree.leaves(divergence)] == [(np.int32, (1,))] * 6
    assert divergence.on_host() == want


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_cases(shape):
    rng = np.random.default_rng(20)
    canary = canary_of(shape.window)
    compiled = jax.jit(canary.swa_divergence)
    seen = dict.fromkeys(NAMES, 0)
    for wildness in (0, 0, 0.1, 0.3, 0.6) * 4:
        case = random_case(rng, shape, wildness, wide=False)
        want = count_by_hand(*case, shape.window)
        *of_batch, lut = narrow(case)
        check(compiled(batch_of(*of_batch), TablePool(lut)), want)
        seen = {name: seen[name] + want[name] for name in NAMES}
    if shape in SHAPES[:3]:  # large enough for one of each
        missing = {"outside_window"} if shape.window == 0 else set()
        assert {name for name in NAMES if not seen[name]} == missing


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
@pytest.mark.parametrize(("place", "x64"), [(np.asarray, False), (np.asarray, True), (jnp.asarray, True)])
def test_int64(shape, x64, place):
    """Values past int32 are out of every range, not narrowed into one."""
    rng = np.random.default_rng(21)
    canary = canary_of(shape.window)
    with jax.enable_x64(x64):
        for wildness in (0, 0.2, 0.5):
            case = random_case(rng, shape, wildness, wide=True)
            *of_batch, lut = [place(array) for array in case]
            check(canary.swa_divergence(batch_of(*of_batch), TablePool(lut)), count_by_hand(*case, shape.window))
            if x64:
                check(jax.jit(canary.swa_divergence)(batch_of(*of_batch), TablePool(lut)), count_by_hand(*case, shape.window))


def test_each_count():
    """Row 1 has eight cached tokens and writes two; window 5 leaves out its first three."""
    table = np.zeros((3, 12), np.int32)
    table[1, :10] = [1, 2, 3, 4, -1, 5, 6, 99, 7, 8]
    lut = np.array([0, 1, 9, 0, 0, -1, 6, 8, 0], np.int32)
    batch = batch_of(*narrow(np.array([[0, 1, 7], [5, 8, 3], [1, 2, 1]])), table)
    want = {
        "live_entries": 10,
        "diverged": 2,  # the slots 2 and 7
        "outside_window": 3,
        "absent_in_window": 3,  # the slots 4, 5 and 8; 3 is outside
        "past_table": 1,
        "without_slot": 1,
    }
    check(canary_of(5).swa_divergence(batch, TablePool(lut)), want)
    check(canary_of(0).swa_divergence(batch, TablePool(lut)), {**want, "outside_window": 0, "absent_in_window": 4})
    # A prefix that two rows share counts for each of them.
    twice = batch_of(*narrow(np.array([[1, 1], [8, 8], [2, 2]])), table)
    check(canary_of(5).swa_divergence(twice, TablePool(lut)), {name: 2 * count for name, count in want.items()})


def test_the_table_ends_before_the_extend_does():
    batch = batch_of(*narrow(np.array([[1], [3], [INT32_MAX]])), np.ones((2, 5), np.int32))
    check(canary_of(2).swa_divergence(batch, TablePool(np.array([0, 1], np.int32))), dict(zip(NAMES, (5, 0, 1, 0, 0, 0), strict=True)))


@pytest.mark.parametrize(
    ("counts", "total"),
    [
        ([], 0),
        ([3, 5], 8),
        ([INT32_MAX - 5, 3, 2], INT32_MAX),
        ([INT32_MAX, INT32_MAX, INT32_MAX], INT32_MAX),
        ([2**30] * 7, INT32_MAX),
    ],
)
def test_sums_saturate(counts, total):
    got = jax.jit(_saturating_sum)(np.array(counts, np.int32))
    assert (got.dtype, got.tolist()) == (np.int32, [total])


def test_two_tables_are_added_up():
    batch = batch_of(*narrow(np.array([[1], [3], [1]])), np.arange(10, dtype=np.int32).reshape(2, 5))
    tables = [np.arange(10, dtype=np.int32)[::-1].copy(), np.arange(10, dtype=np.int32)]
    canary = dataclasses.replace(canary_of(2), swa_tables=(("lut", 0), ("lut", 1)))
    want = {name: canary_of(2).swa_divergence(batch, TablePool(tables[0])).on_host()[name] for name in NAMES}
    for name, count in canary_of(2).swa_divergence(batch, TablePool(tables[1])).on_host().items():
        want[name] += count
    assert want["diverged"] == 4
    check(canary.swa_divergence(batch, TablePool(tables)), want)


def test_in_a_scan():
    rng = np.random.default_rng(22)
    canary, cases = canary_of(4), [random_case(rng, SHAPES[1], 0.1, wide=False) for _ in range(5)]
    stacked = [np.stack(arrays) for arrays in zip(*map(narrow, cases), strict=True)]

    @jax.jit
    def all_of_them(stacked):
        def body(carry, case):
            return carry, canary.swa_divergence(batch_of(*case[:4]), TablePool(case[4]))

        return jax.lax.scan(body, None, stacked)[1]

    got = all_of_them(stacked)
    for i, case in enumerate(cases):
        check(jax.tree.map(lambda leaf, i=i: leaf[i], got), count_by_hand(*case, 4))


def test_no_launch_and_less_memory_than_the_slots_of_all_rows_take():
    num_rows, max_seq_len = 211, 1009
    batch = batch_of(*narrow(np.ones((3, num_rows))), np.ones((7, max_seq_len), np.int32))
    compiled = jax.jit(canary_of(3).swa_divergence).lower(batch, TablePool(np.ones(100003, np.int32))).compile()
    assert 'custom_call_target="kvcanary' not in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < num_rows * max_seq_len * 4


# Arguments.


def divergence(canary=None, lut=None, **changes):
    lut = np.ones(7, np.int32) if lut is None else lut
    canary = canary_of(3) if canary is None else canary
    return canary.swa_divergence(**{"batch": make_batch(), "pool": TablePool(lut), **changes})


def due(canary=None, **changes):
    return (canary_of(3) if canary is None else canary).stats_due(**changes)


MESSAGES = [
    (
        divergence,
        {"canary": kvc.Canary(LOG, CAPACITIES)},
        ValueError,
        "`pool` has no sliding-window group with a table from full-pool slots, so there is no divergence to count.",
    ),
    (divergence, {"batch": None}, TypeError, "`batch` is of type NoneType, but it must be a ForwardBatch."),
    (
        divergence,
        {"pool": ()},
        ValueError,
        "`pool` of class tuple has nothing at ('lut',): step 'lut' failed on a tuple.",
    ),
    (
        divergence,
        {"lut": floats(7)},
        TypeError,
        "`full_to_swa_index_mapping` has dtype float32, but it must be int32 or int64.",
    ),
    (
        divergence,
        {"lut": ints(7, 1)},
        ValueError,
        "`full_to_swa_index_mapping` has shape [7, 1], but a table from full-pool slots to the group's own needs shape [any].",
    ),
    (
        divergence,
        {"batch": make_batch(plan_input=rows(prefix_lens=ints(3)))},
        ValueError,
        "`inputs.prefix_lens` has shape [3], but the batch of 2 rows needs shape [2].",
    ),
    (
        divergence,
        {"batch": make_batch(req_to_token=ints(3))},
        ValueError,
        "`req_to_token` has shape [3], but a table of slots by request row and position needs shape [any, any].",
    ),
    (due, {"step": -1}, ValueError, "`step` is -1, but it must be between 0 and 9223372036854775807."),
    (due, {"step": 1.0}, TypeError, "`step` is 1.0 of type float, but it must be an int."),
]


@pytest.mark.parametrize(("call", "changes", "error", "text"), MESSAGES, ids=[f"{case[0].__name__}-{len(case[3])}" for case in MESSAGES])
def test_messages(call, changes, error, text):
    assert_message(call, changes, error, text)


def test_when_statistics_are_due():
    assert [step for step in range(12) if canary_of(3, stats_every_n_steps=5).stats_due(step)] == [5, 10]
    assert not any(canary_of(3).stats_due(step) for step in range(12))
