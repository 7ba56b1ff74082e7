"""Plans of sweeps: what a radix tree's nodes become, against every path from the root."""

from __future__ import annotations

import dataclasses
import re
from array import array
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import jax_kvcanary as kvc
from helpers.trees import KEYS, VALUES, Key, Node, empty_root, entries_of, expected_entries, random_tree
from jax_kvcanary import PoolKind, sweep_plan

INT32_MAX = 2**31 - 1
COLUMNS = ("verify_slot_indices", "verify_expected_tokens", "verify_expected_positions", "verify_prev_slot_indices")


def random_lut(seed):
    """A table in which some slots are absent, either way, and that ends before the last slots."""
    lut = np.random.default_rng(seed).permutation(np.arange(1, 450))
    lut[::7], lut[3::11] = 0, -1
    return lut


# Random trees.


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", list(PoolKind))
@pytest.mark.parametrize("bigrams", [False, True], ids=["tokens", "bigrams"])
def test_random_trees(seed, kind, bigrams):
    root, nodes = random_tree(seed, bigrams=bigrams)
    swa = kind is PoolKind.SWA
    for lut in (None, random_lut(seed)) if swa else (None,):
        for offset in (-1, 0, 1, 2, 7):
            for include_locked in (True, False):
                plan = sweep_plan(
                    root,
                    kind=kind,
                    full_to_swa_index_mapping=lut,
                    include_locked=include_locked,
                    kv_token_id_vs_position_offset=offset,
                )
                rules = {"swa": swa, "lut": lut, "include_locked": include_locked, "offset": offset}
                assert sorted(entries_of(plan)) == expected_entries(nodes, bigrams=bigrams, **rules)


def test_the_random_trees_contain_everything():
    nodes = [node for seed in range(20) for node in random_tree(seed)[1]]
    for name in ("evicted", "tombstone", "locked"):
        assert 50 < sum(getattr(node, name) for node in nodes) < len(nodes) - 50
    assert sum(node.parent is not None and node.parent.evicted and not node.evicted for node in nodes) > 10


@pytest.mark.parametrize("key", list(KEYS))
@pytest.mark.parametrize("value", list(VALUES))
def test_forms_of_keys_and_values(key, value):
    root = empty_root()
    root.add(KEYS[key]([11, 12, 13]), VALUES[value]([5, 9, 2]))
    assert entries_of(sweep_plan(root)) == [(5, 0, -1, 11), (9, 1, 5, 12), (2, 2, 9, 13)]


def test_types_and_padding():
    root = empty_root()
    root.add([11, 12, 13], [5, 9, 2])
    plan = sweep_plan(root, min_capacity=7)
    for name, want in zip(COLUMNS, ([5, 9, 2], [11, 12, 13], [0, 1, 2], [-1, 5, 9]), strict=True):
        column = getattr(plan, name)
        assert (type(column), column.dtype, column.tolist()) == (np.ndarray, np.int32, [*want, 0, 0, 0, 0])
    for name, want in (("verify_num_valid", 3), ("enable", 1)):
        assert (getattr(plan, name).dtype, getattr(plan, name).tolist()) == (np.int32, [want])
    assert isinstance(plan, kvc.VerifyPlan)


# Single rules.


@pytest.mark.parametrize("root", [empty_root(), Node([], None), Node((), np.zeros(0, np.int32)), Node(Key(array("q")), jnp.zeros(0))])
def test_an_empty_tree(root):
    plan = sweep_plan(root, min_capacity=3)
    assert entries_of(plan) == []
    assert [getattr(plan, name).tolist() for name in COLUMNS] == [[0, 0, 0]] * 4
    assert plan.enable.tolist() == [1]


def test_a_single_node_below_an_evicted_one():
    root = empty_root()
    root.add([1, 2, 3], None).add([4], [8])
    assert entries_of(sweep_plan(root)) == [(8, 3, 0, 4)]


def test_an_evicted_node_between_others():
    root = empty_root()
    above = root.add([1, 2], [5, 6])
    above.add([3, 4], None).add([7, 8], [9, 4])
    above.add([5], [3])
    assert sorted(entries_of(sweep_plan(root))) == [(3, 2, 6, 5), (4, 5, 9, 8), (5, 0, -1, 1), (6, 1, 5, 2), (9, 4, 0, 7)]


def test_a_tombstone_is_a_tombstone_in_the_window_group_alone():
    root = empty_root()
    root.add([1, 2], [5, 6], swa_tombstone=True).add([3], [7])
    assert entries_of(sweep_plan(root, kind=PoolKind.SWA)) == [(7, 2, 0, 3)]
    assert entries_of(sweep_plan(root)) == [(5, 0, -1, 1), (6, 1, 5, 2), (7, 2, 6, 3)]


def test_slots_of_the_window_group():
    """Absent ones leave an entry of slot 0, which is skipped; an index past the table stays a finding, a negative slot too."""
    root = empty_root()
    root.add([1, 2, 3, 4, 5, 6], [3, 1, 2, 4, -7, 0])
    lut = [0, -1, 9, 6]
    want = [(6, 0, -1, 1), (0, 1, 6, 2), (9, 2, 0, 3), (INT32_MAX, 3, 9, 4), (-7, 4, INT32_MAX, 5), (0, 5, 0, 6)]
    for dtype in (np.int32, np.int64):
        assert entries_of(sweep_plan(root, kind=1, full_to_swa_index_mapping=np.array(lut, dtype))) == want
    assert entries_of(sweep_plan(root, kind=1, full_to_swa_index_mapping=jnp.array(lut))) == want
    plan = sweep_plan(root, kind=1, full_to_swa_index_mapping=np.zeros(0, np.int32))
    assert [entry[0] for entry in entries_of(plan)] == [INT32_MAX] * 4 + [-7, INT32_MAX]


def test_wide_values_are_never_narrowed():
    root = empty_root()
    root.add(np.array([2**40, -1, 3]), np.array([2**32 + 5, -(2**40), 7]))
    assert entries_of(sweep_plan(root)) == [(INT32_MAX, 0, -1, -1), (-1, 1, INT32_MAX, -1), (7, 2, 0, 3)]


def test_locked_nodes_are_predecessors_all_the_same():
    root = empty_root()
    root.add([1, 2], [5, 6], lock_ref=2).add([3], [7])
    assert entries_of(sweep_plan(root, include_locked=False)) == [(7, 2, 6, 3)]
    assert len(entries_of(sweep_plan(root))) == 3


@pytest.mark.parametrize(("full", "swa"), [(0, 0), (1, 0), (1, 1)])
def test_lock_counts_of_each_pool(full, swa):
    node = SimpleNamespace(key=[1], value=[5], children={}, full_lock_ref=full, swa_lock_ref=swa)
    root = SimpleNamespace(key=[], value=[], children={1: node})
    assert len(entries_of(sweep_plan(root, include_locked=False))) == 1 - full
    assert len(entries_of(sweep_plan(root, include_locked=False, kind=PoolKind.SWA))) == 1 - swa


def test_a_key_object_without_a_length():
    root = empty_root()
    root.add(SimpleNamespace(token_ids=[4, 5]), [1, 2])
    root.add(SimpleNamespace(token_ids=array("q", [6, 7, 8]), is_bigram=True), [3, 4])
    plan = sweep_plan(root, kv_token_id_vs_position_offset=1)
    assert sorted(entries_of(plan)) == [(1, 0, -1, 5), (2, 1, 1, -1), (3, 0, -1, 7), (4, 1, 3, 8)]


def test_a_key_object_that_is_shorter_than_its_tokens():
    """A view of the first tokens of a longer list."""

    class View(Key):
        def __len__(self):
            return 2

    root = empty_root()
    root.add(View([4, 5, 6, 7]), [1, 2])
    root.add(View([4, 5, 6, 7], is_bigram=True), [3, 9])
    assert sorted(entries_of(sweep_plan(root, kv_token_id_vs_position_offset=1))) == [
        (1, 0, -1, 5),
        (2, 1, 1, -1),
        (3, 0, -1, 5),
        (9, 1, 3, 6),
    ]


def test_pairs_that_disagree():
    """The first of a pair is the token of its position, the second the one behind it."""
    root = empty_root()
    root.add([(1, 20), (2, 30)], [5, 6])
    assert [entry[3] for entry in entries_of(sweep_plan(root))] == [1, 2]
    assert [entry[3] for entry in entries_of(sweep_plan(root, kv_token_id_vs_position_offset=1))] == [20, 30]


def test_a_line_of_ten_thousand_nodes():
    root = node = empty_root()
    for position in range(10_000):
        node = node.add([7 * position], None if position == 5_000 else [position + 1])
    want = [(p + 1, p, {0: -1, 5_001: 0}.get(p, p), 7 * p) for p in range(10_000) if p != 5_000]
    plan = sweep_plan(root)
    assert entries_of(plan) == want
    assert plan.verify_slot_indices.shape == (16_384,)


def test_a_slot_that_the_tree_holds_twice_has_two_entries():
    root = empty_root()
    root.add([1], [5])
    root.add([2], [5])
    assert sorted(entries_of(sweep_plan(root))) == [(5, 0, -1, 1), (5, 0, -1, 2)]


@pytest.mark.parametrize(("count", "capacity"), [(0, 3), (3, 3), (4, 12), (12, 12), (13, 48), (48, 48), (49, 192)])
def test_capacities(count, capacity):
    root = empty_root()
    root.add(list(range(count)), list(range(1, count + 1)))
    plan = sweep_plan(root, min_capacity=3)
    assert {getattr(plan, name).shape for name in COLUMNS} == {(capacity,)}
    assert plan.verify_num_valid.tolist() == [count]


def test_the_default_capacity():
    assert sweep_plan(empty_root()).verify_slot_indices.shape == (256,)


def test_nothing_is_changed():
    root, _ = random_tree(3)
    lut = random_lut(3)
    before = repr(root), lut.copy()
    sweep_plan(root, kind=1, full_to_swa_index_mapping=lut)
    assert repr(root) == before[0]
    np.testing.assert_array_equal(lut, before[1])


# When a sweep is due.


@pytest.mark.parametrize(("interval", "due"), [(0, []), (1, [1, 2, 3, 4, 5, 6]), (3, [3, 6]), (6, [6]), (7, [])])
def test_sweep_due(interval, due):
    canary = kvc.Canary(kvc.CanaryConfig("log", sweep_interval=interval), kvc.CanaryLaunchCapacities(1, 1))
    assert [step for step in range(7) if canary.sweep_due(step)] == due
    assert canary.sweep_due(np.int64(6)) is (6 in due)


@pytest.mark.parametrize(
    ("step", "error", "text"),
    [
        (-1, ValueError, "`step` is -1, but it must be between 0 and 9223372036854775807."),
        (1.0, TypeError, "`step` is 1.0 of type float, but it must be an int."),
    ],
)
def test_steps_are_whole_numbers(step, error, text):
    canary = kvc.Canary(kvc.CanaryConfig("log"), kvc.CanaryLaunchCapacities(1, 1))
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        canary.sweep_due(step)


# Arguments.


def tree_with(*path, **more):
    """A tree of one line of nodes."""
    root = node = empty_root()
    for key, value in path:
        node = node.add(key, value, **more)
    return root


BAD = [
    ({"root": [1]}, TypeError, "`root` is of type list, but it must be a CacheNode, with `children`, `key` and `value`."),
    ({"root": Node([3], [1])}, ValueError, "`root` has a key of 1 tokens, but it must be the root of the tree, whose key is empty."),
    (
        {"root": tree_with(([1, 2], [5, 6]), ([3, 4, 5], [7]))},
        ValueError,
        "`root` has a node for the positions [2, 5) with 3 tokens and 1 slots, but a node has one slot for each token, or the value None.",
    ),
    (
        {"root": tree_with(([1, 2], None), ([3], np.array([7, 8])))},
        ValueError,
        "`root` has a node for the positions [2, 3) with 1 tokens and 2 slots, but a node has one slot for each token, or the value None.",
    ),
    (
        {"root": tree_with(([], [5]))},
        ValueError,
        "`root` has a node for the positions [0, 0) with 0 tokens and 1 slots, but a node has one slot for each token, or the value None.",
    ),
    ({"root": tree_with(([1.5], [5]))}, TypeError, "`node.key` has dtype float64, but it must be int32 or int64."),
    ({"root": tree_with((["a"], [5]))}, TypeError, "`node.key` has dtype <U1, but it must be int32 or int64."),
    ({"root": tree_with(([[[1]]], [5]))}, ValueError, "`node.key` has shape [1, 1, 1], but a key of tokens needs shape [any]."),
    ({"root": tree_with(([(1, 2, 3)], [5]))}, ValueError, "`node.key` has shape [1, 3], but a key of pairs needs shape [any, 2]."),
    ({"root": tree_with(([1], [5.0]))}, TypeError, "`node.value` has dtype float64, but it must be int32 or int64."),
    ({"root": tree_with(([1], [[5]]))}, ValueError, "`node.value` has shape [1, 1], but one slot for each token needs shape [any]."),
    ({"kind": 2}, ValueError, "`kind` is 2, but it must be one of FULL (0), SWA (1)."),
    (
        {"full_to_swa_index_mapping": np.zeros(3, np.int32)},
        ValueError,
        "`full_to_swa_index_mapping` is given, but it must be None when `kind` is FULL.",
    ),
    (
        {"kind": 1, "full_to_swa_index_mapping": np.zeros(3)},
        TypeError,
        "`full_to_swa_index_mapping` has dtype float64, but it must be int32 or int64.",
    ),
    ({"include_locked": 1}, TypeError, "`include_locked` is 1 of type int, but it must be True or False."),
    (
        {"kv_token_id_vs_position_offset": 0.5},
        TypeError,
        "`kv_token_id_vs_position_offset` is 0.5 of type float, but it must be an int.",
    ),
    ({"min_capacity": 0}, ValueError, "`min_capacity` is 0, but it must be between 1 and 2147483646."),
    (
        {"root": tree_with(([1], [5]), lock_ref=None), "include_locked": False, "kind": 1},
        TypeError,
        "`root` has a node without `swa_lock_ref` and `lock_ref`, but one of them is needed when `include_locked` is False.",
    ),
]


@pytest.mark.parametrize(("changes", "error", "text"), BAD, ids=[f"{i}-{'-'.join(case[0])}" for i, case in enumerate(BAD)])
def test_messages(changes, error, text):
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        sweep_plan(**{"root": empty_root(), **changes})


def test_a_plan_is_a_plan():
    """Its fields are those that a launch takes; its entries belong to no batch."""
    plan = sweep_plan(empty_root())
    assert {field.name for field in dataclasses.fields(plan)} == {*COLUMNS, "verify_num_valid", "enable", "row_offsets"}
    assert plan.row_offsets is None
