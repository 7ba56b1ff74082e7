"""Tokens that are known beforehand: the same on host and device, and the inputs of a batch that follow from its rows."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import jax_kvcanary as kvc
from helpers.loops import int32
from helpers.messages import assert_message, ints, make_batch

ORACLE = kvc.TokenOracle(seed=0xFEDCBA9876543210, vocab_size=32003, reserved=5)


# The tokens.


def tokens_by_hand(oracle, request_ids, positions):
    """The definition, on Python ints."""
    n = oracle.vocab_size - oracle.reserved
    hashes = [kvc.mix3(oracle.seed, int(i), int(p)) for i, p in zip(request_ids, positions, strict=True)]
    return [oracle.reserved + word * n // 2**64 for word in hashes]


def test_tokens_never_change():
    assert kvc.TokenOracle(1, 32000).prompt(7, 5).tolist() == [27208, 6033, 27835, 17257, 5395]
    largest = kvc.TokenOracle(2**64 - 1, 151936, reserved=1000)
    assert largest.prompt(-(2**40), 5, start=2**31 - 3).tolist() == [106024, 83250, 32791, 140129, 52744]


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("oracle", [ORACLE, kvc.TokenOracle(0, 1), kvc.TokenOracle(3, 2**31 - 1), kvc.TokenOracle(2**63, 7, reserved=6)])
def test_tokens_on_the_device(oracle, dtype, x64):
    info, rng = np.iinfo(dtype), np.random.default_rng(5)
    request_ids, positions = rng.integers(info.min, info.max, (2, 211), dtype, endpoint=True)
    positions[:7] = [0, 1, -1, info.max, info.min, 2**31 - 1, -(2**31)]
    with jax.enable_x64(x64):
        got = oracle.tokens(request_ids, positions)
    assert isinstance(got, jax.Array)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, tokens_by_hand(oracle, request_ids, positions))


def test_either_argument_may_be_wide():
    narrow, wide = np.arange(-3, 8, dtype=np.int32), np.arange(11) * 2**33
    for request_ids, positions in ((narrow, wide), (wide, narrow)):
        np.testing.assert_array_equal(ORACLE.tokens(request_ids, positions), tokens_by_hand(ORACLE, request_ids, positions))


@pytest.mark.parametrize("x64", [False, True])
def test_every_way_to_ask_is_the_same(x64):
    request_ids, positions = int32([9, -4, 9, 2**31 - 1, 0]), int32([0, 1, 2, 100, 7])
    want = tokens_by_hand(ORACLE, request_ids, positions)
    with jax.enable_x64(x64):
        closed_over = jax.jit(lambda ids, at: ORACLE.tokens(ids, at))
        as_argument = jax.jit(lambda oracle, ids, at: oracle.tokens(ids, at))
        as_static = jax.jit(kvc.TokenOracle.tokens, static_argnums=0)
        _, scanned = jax.lax.scan(lambda carry, pair: (carry, ORACLE.tokens(*pair)), 0, (request_ids[:, None], positions[:, None]))
        for got in (closed_over(request_ids, positions), as_argument(ORACLE, request_ids, positions), scanned[:, 0]):
            np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(as_static(ORACLE, request_ids, positions), want)
        assert ORACLE.tokens(request_ids[:0], positions[:0]).shape == (0,)


def test_int64_under_jit_with_x64():
    request_ids, positions = np.array([2**40, -(2**50), 3]), np.array([0, 2**35, -1])
    with jax.enable_x64(True):
        got = jax.jit(ORACLE.tokens)(request_ids, positions)
    np.testing.assert_array_equal(got, tokens_by_hand(ORACLE, request_ids, positions))


def test_prompts_are_the_tokens_of_the_device():
    for start in (0, 13):
        prompt = ORACLE.prompt(77, 29, start=start)
        assert (type(prompt), prompt.dtype) == (np.ndarray, np.int32)
        positions = np.arange(start, start + 29, dtype=np.int32)
        np.testing.assert_array_equal(prompt, ORACLE.tokens(np.full_like(positions, 77), positions))
    assert ORACLE.prompt(77, 0).shape == (0,)


def test_seed_request_and_position_all_count():
    base = ORACLE.prompt(1, 50).tolist()
    others = (dataclasses.replace(ORACLE, seed=1).prompt(1, 50), ORACLE.prompt(2, 50), ORACLE.prompt(1, 50, start=1))
    for other in others:
        assert sum(a == b for a, b in zip(base, other.tolist(), strict=True)) <= 1


def test_all_tokens_but_the_reserved_ones_are_equally_likely():
    oracle = kvc.TokenOracle(seed=4, vocab_size=13, reserved=2)
    positions = np.arange(11_000, dtype=np.int32)
    counts = np.bincount(oracle.tokens(positions % 7, positions), minlength=13)
    assert counts[:2].tolist() == [0, 0]
    assert (abs(counts[2:] - 1000) < 5 * np.sqrt(1000)).all()
    assert len(counts) == 13


# The inputs of a batch.


def inputs_by_hand(oracle, batch, request_ids, offset=0):
    """Row after row; padding rows have no tokens, and -1 stands behind the live ones."""
    rows = batch.plan_input
    tokens, positions = [], []
    for index, prefix, count, request in zip(rows.req_pool_indices, rows.prefix_lens, rows.extend_seq_lens, request_ids, strict=True):
        span = range(prefix, prefix + max(count, 0)) if index != 0 else ()
        tokens += tokens_by_hand(oracle, [request] * len(span), [p + offset for p in span])
        positions += span
    padding = [-1] * (len(batch.input_ids) - len(tokens))
    return tokens + padding, positions + padding


def batch_of(*rows, num_tokens=17, dtype=np.int32):
    """A batch of (request row, prefix, extend); its own tokens and positions are wrong everywhere."""
    rows = np.array(rows, dtype).reshape(-1, 3)
    wrong = np.full(num_tokens, -7, dtype)
    return kvc.ForwardBatch(wrong, wrong, wrong, kvc.PlanInput(*rows.T), np.ones((4, 9), dtype))


BATCHES = {
    "mixed": [(1, 4, 1), (2, 0, 5), (3, 2, 3)],
    "padding": [(0, 3, 2), (3, 8, 1), (0, 0, 0), (1, 0, 4), (0, 5, 9)],
    "nothing to write": [(1, 4, 0), (2, 3, 2), (3, 1, 0)],
    "all padding": [(0, 1, 1), (0, 2, 2)],
    "no rows": [],
    "invalid rows": [(9, 2, 3), (1, 0, 2), (-1, 4, 1), (2, 3, -5), (3, 1, 1)],
    "full": [(1, 0, 9), (2, 1, 8)],
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("name", BATCHES)
def test_inputs_follow_from_the_rows(name, x64, jit):
    dtype = np.int64 if x64 else np.int32
    batch = batch_of(*BATCHES[name], dtype=dtype)
    request_ids = np.arange(60, 60 + len(BATCHES[name]), dtype=dtype)
    with jax.enable_x64(x64):
        function = jax.jit(ORACLE.expected_inputs) if jit else ORACLE.expected_inputs
        tokens, positions = function(batch, request_ids)
    want_tokens, want_positions = inputs_by_hand(ORACLE, batch, request_ids)
    np.testing.assert_array_equal(tokens, want_tokens)
    np.testing.assert_array_equal(positions, want_positions)
    assert (tokens.dtype, positions.dtype) == (np.int32, dtype)


@pytest.mark.parametrize("offset", [1, 0, -1])
def test_inputs_of_a_draft_model(offset):
    batch, request_ids = batch_of(*BATCHES["mixed"]), int32([4, 5, 6])
    got = ORACLE.with_expected_inputs(batch, request_ids, kv_token_id_vs_position_offset=offset)
    tokens, positions = inputs_by_hand(ORACLE, batch, request_ids, offset)
    np.testing.assert_array_equal(got.expected_input_tokens, tokens)
    np.testing.assert_array_equal(got.expected_input_positions, positions)
    assert dataclasses.replace(got, expected_input_tokens=None, expected_input_positions=None) == batch


def test_wide_requests_without_x64():
    batch, request_ids = batch_of(*BATCHES["padding"], dtype=np.int64), np.array([1, 2**40, -1, -(2**50), 0])
    tokens, positions = ORACLE.expected_inputs(batch, request_ids)
    want_tokens, want_positions = inputs_by_hand(ORACLE, batch, request_ids)
    np.testing.assert_array_equal(tokens, want_tokens)
    np.testing.assert_array_equal(positions, want_positions)


def test_more_tokens_than_the_arrays_hold():
    """The write reports such a row; its expected inputs are those of the entries that exist."""
    batch = batch_of((1, 0, 2), (2, 5, 2**31 - 1), (3, 0, 2**31 - 1), num_tokens=7)
    tokens, positions = ORACLE.expected_inputs(batch, int32([1, 2, 3]))
    np.testing.assert_array_equal(positions, [0, 1, 5, 6, 7, 8, 9])
    np.testing.assert_array_equal(tokens, tokens_by_hand(ORACLE, [1, 1, 2, 2, 2, 2, 2], positions))


@pytest.mark.parametrize("offset", [0, 1])
def test_the_beginning_of_a_prompt_may_be_another_request_s(offset):
    batch = batch_of((1, 1, 5), (2, 0, 3), (3, 6, 1))
    tokens, _ = ORACLE.expected_inputs(
        batch, int32([7, 8, 9]), shared_ids=int32([2, 2, 2]), shared_lens=int32([4, 0, 6]), kv_token_id_vs_position_offset=offset
    )
    positions = np.array([1, 2, 3, 4, 5, 0, 1, 2, 6]) + offset
    owners = [2 if p < 4 else 7 for p in positions[:5]] + [8] * 3 + [9]
    np.testing.assert_array_equal(tokens[:9], tokens_by_hand(ORACLE, owners, positions))


# Messages.


def expected_inputs(**changes):
    return ORACLE.expected_inputs(**{"batch": make_batch(), "request_ids": ints(2), **changes})


MESSAGES = [
    (kvc.TokenOracle, {"seed": -1, "vocab_size": 3}, ValueError, f"`seed` is -1, but it must be between 0 and {2**64 - 1}."),
    (kvc.TokenOracle, {"seed": 1.0, "vocab_size": 3}, TypeError, "`seed` is 1.0 of type float, but it must be an int."),
    (kvc.TokenOracle, {"seed": 1, "vocab_size": 0}, ValueError, "`vocab_size` is 0, but it must be between 1 and 2147483647."),
    (
        kvc.TokenOracle,
        {"seed": 1, "vocab_size": 3, "reserved": 3},
        ValueError,
        "`reserved` is 3, but it must be between 0 and 2, since at least one token must be left.",
    ),
    (
        ORACLE.tokens,
        {"request_ids": np.ones(3), "positions": ints(3)},
        TypeError,
        "`request_ids` has dtype float64, but it must be int32 or int64.",
    ),
    (
        ORACLE.tokens,
        {"request_ids": ints(3, 1), "positions": ints(3)},
        ValueError,
        "`request_ids` has shape [3, 1], but one request for each token needs shape [any].",
    ),
    (
        ORACLE.tokens,
        {"request_ids": ints(3), "positions": ints(2)},
        ValueError,
        "`positions` has shape [2], but one position for each of the `request_ids` needs shape [3].",
    ),
    (
        ORACLE.prompt,
        {"request_id": 2**63, "length": 1},
        ValueError,
        f"`request_id` is {2**63}, but it must be between {-(2**63)} and {2**63 - 1}.",
    ),
    (ORACLE.prompt, {"request_id": 1, "length": -1}, ValueError, "`length` is -1, but it must be between 0 and 2147483647."),
    (
        ORACLE.prompt,
        {"request_id": 1, "length": 1, "start": None},
        TypeError,
        "`start` is None of type NoneType, but it must be an int.",
    ),
    (expected_inputs, {"batch": None}, TypeError, "`batch` is of type NoneType, but it must be a ForwardBatch."),
    (
        expected_inputs,
        {"batch": make_batch(parents=ints(5))},
        ValueError,
        "`batch.parents` is an array, but it must be None: the tokens and positions of a tree do not follow from its row.",
    ),
    (
        expected_inputs,
        {"request_ids": ints(3)},
        ValueError,
        "`request_ids` has shape [3], but the batch of 2 rows needs shape [2].",
    ),
    (expected_inputs, {"shared_ids": ints(2)}, ValueError, "`shared_lens` is None, but it must be an array when `shared_ids` is given."),
    (expected_inputs, {"shared_lens": ints(2)}, ValueError, "`shared_ids` is None, but it must be an array when `shared_lens` is given."),
    (
        expected_inputs,
        {"shared_lens": ints(2), "shared_ids": ints(1)},
        ValueError,
        "`shared_ids` has shape [1], but the batch of 2 rows needs shape [2].",
    ),
    (
        expected_inputs,
        {"shared_lens": ints(1), "shared_ids": ints(2)},
        ValueError,
        "`shared_lens` has shape [1], but the batch of 2 rows needs shape [2].",
    ),
    (
        expected_inputs,
        {"kv_token_id_vs_position_offset": 1.0},
        TypeError,
        "`kv_token_id_vs_position_offset` is 1.0 of type float, but it must be an int.",
    ),
]


@pytest.mark.parametrize("case", MESSAGES, ids=lambda case: "-".join(case[1]) + f"-{len(case[3])}")
def test_messages(case):
    assert_message(*case)
