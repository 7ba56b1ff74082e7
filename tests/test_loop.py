"""The canary in a small serving loop: every way to run a step is the same, and every kind of step is known."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_kvcanary as kvc
from helpers.backends import host
from helpers.loops import (
    EVERY_PHASE,
    HEAD_DIM,
    HEADS,
    LAYERS,
    POOLS,
    STRAY_SLOT,
    TAILS,
    Loop,
    at,
    baseline,
    findings,
    forward,
    install,
    int32,
    make_pool,
    rows_of,
    run_donated,
    run_eager,
    run_jit,
    run_scan,
    run_wrapped,
    serve,
)
from helpers.states import assert_same_buffer, assert_same_state, fields, multiset
from jax_kvcanary import FailReason as Reason
from jax_kvcanary.pools import MHATokenToKVPool

# Every way to run the steps.


def assert_same_run(got, want):
    """Two runs agree in everything but the order of the rows that one launch wrote."""
    for got_report, want_report in zip(got[0], want[0], strict=True):
        for got_leaf, want_leaf in zip(jax.tree.leaves(got_report.summary), jax.tree.leaves(want_report.summary), strict=True):
            np.testing.assert_array_equal(got_leaf, want_leaf)
            assert got_leaf.dtype == want_leaf.dtype
        assert multiset(rows_of(got_report)) == multiset(rows_of(want_report))
    np.testing.assert_array_equal(got[1], want[1])
    assert_same_state(got[2].device_state, want[2].device_state)
    for got_group, want_group in zip(got[2].groups, want[2].groups, strict=True):
        for got_buf, want_buf in zip(jax.tree.leaves(got_group), jax.tree.leaves(want_group), strict=True):
            assert_same_buffer(got_buf, want_buf)
    assert_same_pool(got[3], want[3])


def assert_same_pool(got, want):
    for got_array, want_array in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (got_array.dtype, got_array.shape) == (want_array.dtype, want_array.shape)
        np.testing.assert_array_equal(np.asarray(got_array).view(np.uint8), np.asarray(want_array).view(np.uint8))


@pytest.mark.parametrize(
    ("runner", "pool_class"),
    [(run_eager, MHATokenToKVPool), *itertools.product((run_donated, run_wrapped, run_scan), POOLS)],
)
def test_every_way_to_run_a_step_is_the_same(runner, pool_class):
    pool = make_pool(pool_class)
    assert_same_run(runner(*install(pool), serve(faults=True), pool), baseline(pool_class))


@pytest.mark.parametrize("pool_class", POOLS)
def test_faults_are_found_at_their_step(pool_class):
    reports = baseline(pool_class)[0]
    table = serve(faults=True)[6].req_to_token
    mixed_up, behind = table[3, 1], table[3, 2]
    stray = at(TAILS, STRAY_SLOT, Reason.VERIFY_REAL_KV_HASH_MISMATCH)
    table_fault = at(EVERY_PHASE, mixed_up, Reason.VERIFY_CHAIN_HASH_MISMATCH | Reason.VERIFY_POSITION_MISMATCH)
    table_fault += at(EVERY_PHASE, behind, Reason.VERIFY_CHAIN_HASH_MISMATCH)
    totals = [len(rows_of(report)) for report in reports]
    got = [findings(report, before) for report, before in zip(reports, [0, *totals], strict=False)]
    assert got == [[], [], [], [], [], stray, sorted(stray + table_fault), []]


@pytest.mark.parametrize("pool_class", POOLS)
def test_sound_steps_are_silent_and_counted(pool_class):
    pool, batches = make_pool(pool_class), serve()
    reports, _, state, _ = run_donated(*install(pool), batches, pool)
    assert [int(report.violation_write_index[0]) for report in reports] == [0] * 8
    verified = sum(int(batch.plan_input.prefix_lens.sum()) for batch in batches)
    written = sum(int(batch.plan_input.extend_seq_lens.sum()) for batch in batches)
    assert kvc.to_int64(state.device_state.kernel_run_counters).tolist() == [16] * 4 + [0] * 8
    assert kvc.to_int64(state.device_state.slot_run_counters).tolist() == [verified + written] * 4 + [0] * 8
    assert not state.device_state.fail_reason_counters.any()
    assert not state.device_state.verify_skip_counters.any()
    # The records hold what was written, the same chain in all four buffers; only TAIL records fingerprint the KV.
    group = state.groups[0]
    chains = [fields(buf)[1:] for buf in (group.k_head, group.v_head, group.k_tail, group.v_tail)]
    used = np.unique(np.concatenate([batch.out_cache_loc for batch in batches]))[1:] - 1
    for chain in chains:
        np.testing.assert_array_equal(chain[:, :3], chains[0][:, :3])
        assert (np.delete(chain, used, axis=0) == -1).all()
    for chain, hashed in zip(chains, (False, False, True, True), strict=True):
        assert (chain[used, 3] != 0).all() == hashed
        assert (chain[used, 3] != 0).any() == hashed


@pytest.mark.parametrize("pool_class", POOLS)
def test_the_forward_is_left_alone(pool_class):
    """KV bytes and outputs are the same with and without a canary, with faults and without."""
    for faults in (False, True):
        batches, pool, outs = serve(faults=faults), make_pool(pool_class), []
        for batch in batches:
            out, pool = jax.jit(forward, donate_argnums=1)(batch, pool)
            outs.append(np.asarray(out))
        watched = make_pool(pool_class)
        _, watched_outs, _, watched = run_donated(*install(watched), batches, watched)
        np.testing.assert_array_equal(watched_outs, outs)
        assert_same_pool(watched, pool)


@pytest.mark.parametrize("int_dtype", [np.int32, np.int64])
def test_x64_changes_nothing(int_dtype):
    with jax.enable_x64(True):
        batches = [jax.tree.map(lambda leaf: leaf.astype(int_dtype), batch) for batch in serve(faults=True)]
        pool = make_pool(MHATokenToKVPool)
        run = run_donated(*install(pool), batches, pool)
    assert_same_run(run, baseline(MHATokenToKVPool))


def test_int64_batches_without_x64():
    """NumPy's int64 goes into the eager operations as it is; jit would narrow it on the way."""
    batches, pool = serve()[:3], make_pool(MHATokenToKVPool)
    wide = [jax.tree.map(lambda leaf: leaf.astype(np.int64), batch) for batch in batches]
    got, want = run_eager(*install(pool), wide, pool), run_jit(*install(pool), batches, pool)
    assert_same_run(got, want)


def test_pages_change_nothing():
    num_slots = 70  # whole pages
    pool = MHATokenToKVPool.allocate(num_slots=num_slots, num_layers=LAYERS, num_kv_heads=HEADS, head_dim=HEAD_DIM, page_size=5)
    flat = MHATokenToKVPool.allocate(num_slots=num_slots, num_layers=LAYERS, num_kv_heads=HEADS, head_dim=HEAD_DIM)
    states = []
    for each in (pool, flat):
        canary, state = install(each)
        slots = np.arange(1, 14, dtype=np.int32)
        batch = dataclasses.replace(serve()[0], out_cache_loc=slots)
        state, step = canary.pre_forward(state, batch, each)
        k = jnp.arange(13 * HEADS * HEAD_DIM).reshape(13, HEADS, HEAD_DIM) % 61
        state, _ = canary.post_forward(state, step, batch, each.write(0, slots, k, k + 1))
        states.append(host(state))
    for paged_leaf, flat_leaf in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(paged_leaf, flat_leaf)


# Kinds of steps.


def plan_lengths(batch):
    rows = batch.plan_input
    return [np.asarray(values).tolist() for values in (rows.req_pool_indices, rows.prefix_lens, rows.extend_seq_lens)]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_lengths_of_each_kind_of_step(dtype):
    def ints(*values):
        return np.array(values, dtype)

    tokens = {name: ints(*range(6)) for name in ("input_ids", "out_cache_loc")}
    tokens["req_to_token"] = np.zeros((5, 9), dtype)
    rows = {"req_pool_indices": ints(3, 0, 1)}
    three = {**{name: ints(5, 0, 7) for name in ("input_ids", "out_cache_loc", "positions")}, "req_to_token": tokens["req_to_token"]}
    decode = kvc.ForwardBatch.decode(**rows, **three)
    assert plan_lengths(decode) == [[3, 0, 1], [5, 0, 7], [1, 1, 1]]
    extend = kvc.ForwardBatch.extend(**rows, **tokens, positions=ints(*range(6)), prefix_lens=ints(4, 0, 2), extend_seq_lens=ints(5, 0, 1))
    assert plan_lengths(extend) == [[3, 0, 1], [4, 0, 2], [5, 0, 1]]
    verify = kvc.ForwardBatch.target_verify(**rows, **tokens, positions=ints(*range(6)), seq_lens=ints(4, 0, 8), draft_token_num=3)
    assert plan_lengths(verify) == [[3, 0, 1], [4, 0, 8], [3, 3, 3]]
    for draft_step in (2, np.array(2, dtype)):
        draft_decode = kvc.ForwardBatch.draft_decode(**rows, **three, seq_lens=ints(4, 0, 8), draft_step=draft_step)
        assert plan_lengths(draft_decode) == [[3, 0, 1], [6, 2, 10], [1, 1, 1]]
    draft = kvc.ForwardBatch.draft_extend(
        **rows, **tokens, positions=ints(*range(6)), seq_lens=ints(9, 0, 4), extend_seq_lens=ints(5, 0, 1)
    )
    assert plan_lengths(draft) == [[3, 0, 1], [4, 0, 3], [5, 0, 1]]
    for batch in (decode, extend, verify, draft_decode, draft):
        assert {leaf.dtype for leaf in jax.tree.leaves(batch)} == {np.dtype(dtype)}
        assert (batch.expected_input_tokens, batch.plan_input.expected_tokens_valid_lens) == (None, None)


@pytest.mark.parametrize("kind", ["decode", "extend", "target_verify", "draft_decode", "draft_extend"])
def test_constructors_take_the_expected_values(kind):
    given = {
        name: np.full(2, value, np.int32) for value, name in enumerate(("input_ids", "positions", "out_cache_loc", "req_pool_indices"))
    }
    given["req_to_token"] = np.zeros((3, 5), np.int32)
    given["seq_lens"] = given["prefix_lens"] = given["extend_seq_lens"] = int32([1, 1])
    given["draft_token_num"] = given["draft_step"] = 1
    own = {
        "decode": (),
        "extend": ("prefix_lens", "extend_seq_lens"),
        "target_verify": ("seq_lens", "draft_token_num"),
        "draft_decode": ("seq_lens", "draft_step"),
        "draft_extend": ("seq_lens", "extend_seq_lens"),
    }[kind]
    common = ("input_ids", "positions", "out_cache_loc", "req_pool_indices", "req_to_token")
    expected = {name: int32([value] * 2) for value, name in enumerate(("expected_input_tokens", "expected_input_positions"), 11)}
    batch = getattr(kvc.ForwardBatch, kind)(
        **{name: given[name] for name in (*common, *own)}, **expected, expected_tokens_valid_lens=int32([7, 7])
    )
    for name in ("input_ids", "positions", "out_cache_loc", "req_to_token"):
        assert getattr(batch, name) is given[name]
    assert batch.plan_input.req_pool_indices is given["req_pool_indices"]
    for name, value in expected.items():
        assert getattr(batch, name) is value
    np.testing.assert_array_equal(batch.plan_input.expected_tokens_valid_lens, [7, 7])


def test_decode_batches():
    loop = Loop()
    assert loop.extend(1, 0, 5) == []
    assert loop.extend(2, 0, 3) == []
    for length in range(3):
        for row, start in ((1, 5), (2, 3)):
            loop.requests.place(row, start + length, 1)
        positions = int32([5 + length, 3 + length, 0])
        rows = int32([1, 2, 0])
        slots = loop.requests.table[rows, positions]
        decode = kvc.ForwardBatch.decode(
            input_ids=positions * 10,
            positions=positions,
            out_cache_loc=slots,
            req_pool_indices=rows,
            req_to_token=loop.requests.table.copy(),
        )
        assert loop.step(decode) == []
    # The same step again writes over nothing that it verifies; with another row's slot it is found.
    mixed = decode.req_to_token.copy()
    mixed[1, 2] = mixed[2, 1]
    wrong = dataclasses.replace(decode, req_to_token=mixed)
    found = loop.step(wrong)
    assert {entry[1] for entry in found} == {mixed[1, 2], mixed[1, 3]}
