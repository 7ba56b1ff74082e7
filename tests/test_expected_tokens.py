"""Token lists stored in the table of expected tokens, compared with a loop over them in Python."""

from __future__ import annotations

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_kvcanary as kvc
from helpers.random_cases import EDGES, INT32_MAX, WIDE, sprinkle
from jax_kvcanary.pallas import expected, scatter_tokens

#: Lists, flat tokens, rows and width: of one block and of several, and with nothing in them.
SHAPES = ((5, 29, 7, 11), (1, 7, 3, 5), (13, 701, 17, 59), (2, 1, 3, 1), (3, 37, 1, 13), (3, 0, 5, 7), (0, 5, 5, 7), (0, 0, 2, 3))


def store(table, reqs, tokens, lengths, starts):
    """What the table must hold, by Python's integers."""
    table, at = table.copy(), 0
    rows, width = table.shape
    for req, length, start in zip(reqs.tolist(), lengths.tolist(), starts.tolist(), strict=True):
        count = max(length, 0)
        for position, token in enumerate(tokens[at : at + count].tolist(), start):
            if 0 < req < rows and start >= 0 and position < width:
                table[req, position] = token if -(2**31) <= token <= INT32_MAX else -1
        at += count
    return table


def random_lists(rng, shape, *, wide=False):
    """A table and lists for it, int64: legal ones, and lists with a part of the values wild. No row is named twice."""
    lists, tokens, rows, width = shape
    wildness = rng.choice([0, 0.2, 0.6])
    edges = EDGES + (WIDE if wide else ())
    reqs = np.zeros(lists, np.int64)
    named = rng.permutation(np.arange(1, rows))[:lists]
    reqs[rng.permutation(lists)[: len(named)]] = named  # padding between
    lengths = rng.multinomial(rng.integers(0, tokens + 1), np.ones(lists) / lists) if lists else reqs
    return (
        rng.integers(-1, 99, (rows, width)),
        sprinkle(rng, reqs, wildness, [*edges, rows, rows + 1]),
        sprinkle(rng, rng.integers(-1, 9999, tokens), wildness, edges),
        sprinkle(rng, lengths, wildness / 3, [*edges, 1, tokens, width + 1]),
        sprinkle(rng, rng.integers(0, width, lists) * rng.integers(0, 2), wildness, [*edges, width, width - 1, 2**31 - width]),
    )


def with_table(table):
    """A state with a table of its own."""
    state = kvc.CanaryDeviceState.allocate(kvc.CanaryConfig("log", ring_capacity=3))
    return dataclasses.replace(state, req_to_verify_expected_tokens=jnp.array(table, jnp.int32))


def set_tokens(state, reqs, tokens, lengths, starts):
    return kvc.set_expected_tokens(state, reqs, tokens, lengths, start_positions=starts)


def scanned(state, *lists):
    """The lists again and again, as a scan."""

    def body(state, lists):
        return set_tokens(state, *lists), None

    return jax.lax.scan(body, state, jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), lists))[0]


WAYS = {"eager": set_tokens, "jit": jax.jit(set_tokens), "donated": jax.jit(set_tokens, donate_argnums=0), "scan": jax.jit(scanned)}


@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_lists(shape, way, dtype, x64):
    rng = np.random.default_rng([*shape, x64])
    for _ in range(7):
        table, *lists = random_lists(rng, shape, wide=dtype is np.int64)
        lists = [values.astype(dtype) for values in lists]
        with jax.enable_x64(True):  # NumPy's int64 would be narrowed on the way into jit
            given = [jnp.asarray(values) for values in lists]
        with jax.enable_x64(x64):
            state = with_table(table)
            got = WAYS[way](state, *given)
        assert got.req_to_verify_expected_tokens.dtype == jnp.int32
        np.testing.assert_array_equal(got.req_to_verify_expected_tokens, store(table, *lists))
        if way != "donated":
            np.testing.assert_array_equal(state.req_to_verify_expected_tokens, table)
        elif 0 not in shape:
            assert state.req_to_verify_expected_tokens.is_deleted()


def test_int64_of_numpy_is_not_narrowed():
    table = np.full((5, 7), 9)
    lists = [np.array(values) for values in ([2**32 + 1, 2, 3, 4], [11, 2**40, 13, 14, -(2**31) - 1], [1, 1, 2, 1], [0, 1, 2**32, 2])]
    got = set_tokens(with_table(table), *lists).req_to_verify_expected_tokens
    want = store(table, *lists)
    np.testing.assert_array_equal(got, want)
    assert np.argwhere(want != 9).tolist() == [[2, 1], [4, 2]]  # both unknown


# The kernel itself, interpreted.


@cache
def interpreted():
    def scatter(table, reqs, tokens, lengths, starts):
        return expected._scatter_triton(expected.TokenLists(table, expected._list_offsets(lengths), reqs, starts, tokens))

    return jax.jit(scatter)


@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if 0 not in shape], ids=str)
def test_the_kernel_interpreted(monkeypatch, shape, x64):
    monkeypatch.setattr(expected.pl, "pallas_call", partial(expected.pl.pallas_call, interpret=True))
    rng = np.random.default_rng(shape)
    for _ in range(11):
        table, *lists = random_lists(rng, shape)
        with jax.enable_x64(x64):
            got = interpreted()(*(values.astype(np.int32) for values in (table, *lists)))
        np.testing.assert_array_equal(got, store(table, *lists))


# Sizes and sums.


def test_more_lists_than_one_prefix_sum_takes():
    count = 2 * expected.MAX_ROW_BLOCK + 811
    rng = np.random.default_rng(5)
    lengths = rng.integers(-1, 3, count)
    lists = (np.arange(count) % 6007, rng.integers(0, 999, count), lengths, np.arange(count) // 6007 * 3)
    table = np.full((6007, 5), -1)
    got = WAYS["jit"](with_table(table), *(values.astype(np.int32) for values in lists)).req_to_verify_expected_tokens
    np.testing.assert_array_equal(got, store(table, *lists))


@pytest.mark.parametrize("huge", [INT32_MAX, 2**30, 2**31 // 3 + 1])
def test_sums_do_not_wrap(huge):
    """The list behind four huge ones would start among the tokens again."""
    table = np.full((7, 3), -1)
    lists = [np.array(values, np.int32) for values in ([1, 2, 3, 4, 5], range(17), [huge] * 4 + [3], [1, 0, 0, 0, 0])]
    got = WAYS["jit"](with_table(table), *lists).req_to_verify_expected_tokens
    np.testing.assert_array_equal(got, store(table, *lists))
    assert np.argwhere(np.asarray(got) != -1).tolist() == [[1, 1], [1, 2]]


def test_a_row_named_twice_keeps_one_of_the_tokens():
    table = np.full((3, 7), -1)
    lists = [np.array(values, np.int32) for values in ([2, 2], range(10, 19), [5, 4], [0, 3])]
    got = np.asarray(WAYS["jit"](with_table(table), *lists).req_to_verify_expected_tokens)
    assert got[:2].tolist() == table[:2].tolist()
    assert got[2, [0, 1, 2, 5, 6]].tolist() == [10, 11, 12, 17, 18]
    assert (got[2, 3] in (13, 15), got[2, 4] in (14, 16)) == (True, True)


# What the functions add.


def test_lists_begin_at_position_0_unless_told():
    table = np.full((4, 3), 7)
    state = kvc.set_expected_tokens(with_table(table), np.array([3, 0, 1]), np.array([11, 12, 13, 14, 15, 99]), np.array([2, 1, 2]))
    assert state.req_to_verify_expected_tokens.tolist() == [[7, 7, 7], [14, 15, 7], [7, 7, 7], [11, 12, 7]]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_append_is_a_list_of_one_token_for_each_row(jit, dtype):
    append = jax.jit(kvc.append_expected_tokens, donate_argnums=0) if jit else kvc.append_expected_tokens
    rng = np.random.default_rng(7)
    for _ in range(7):
        table, reqs, _, _, positions = random_lists(rng, (11, 0, 7, 5))
        tokens = rng.integers(0, 99, 11)
        got = append(with_table(table), *(values.astype(dtype) for values in (reqs, positions, tokens)))
        np.testing.assert_array_equal(got.req_to_verify_expected_tokens, store(table, reqs, tokens, np.ones(11, int), positions))


def test_nothing_else_of_the_state_changes():
    state = with_table(np.full((3, 5), -1))
    got = kvc.append_expected_tokens(state, np.array([1]), np.array([2]), np.array([3]))
    for name, value in vars(state).items():
        assert (getattr(got, name) is value) == (name != "req_to_verify_expected_tokens")
    assert np.argwhere(np.asarray(got.req_to_verify_expected_tokens) != -1).tolist() == [[1, 2]]


def test_methods_of_the_canary():
    pool = kvc.pools.MHATokenToKVPool.allocate(num_slots=7, num_layers=1, num_kv_heads=1, head_dim=8)
    config = kvc.CanaryConfig("log", enable_verify_token_assert=True)
    capacities = kvc.CanaryLaunchCapacities(5, 3)
    canary, state = kvc.install_canary(pool, config, capacities=capacities, req_to_token_alloc_size=3, max_context_len=5)
    lists = np.array([2, 1]), np.array([11, 12, 13]), np.array([1, 2])
    later = canary.set_expected_tokens(state, *lists, start_positions=np.array([4, 0]))
    later = jax.jit(canary.append_expected_tokens)(later, np.array([1, 0]), np.array([2, 0]), np.array([14, 15]))
    assert later.device_state.req_to_verify_expected_tokens.tolist() == [[-1] * 5, [12, 13, 14, -1, -1], [-1] * 4 + [11]]
    assert jax.tree.structure(later) == jax.tree.structure(state)
    np.testing.assert_array_equal(canary.set_expected_tokens(state, *lists).device_state.req_to_verify_expected_tokens[2], [11] + [-1] * 4)


def test_a_table_without_rows_or_positions():
    for shape in ((0, 3), (3, 0)):
        table = np.zeros(shape, np.int32)
        ones = np.ones(2, np.int32)
        assert scatter_tokens(table, ones, ones, ones, ones).shape == shape
