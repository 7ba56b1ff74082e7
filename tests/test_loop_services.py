"""What a canary offers beside its steps: installing, reports, sweeps, and the checks that are off by default."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_kvcanary as kvc
from helpers.backends import host
from helpers.loops import (
    CAPACITIES,
    CONFIG,
    EVERY_PHASE,
    HEAD_DIM,
    HEADS,
    MAX_REQS,
    MAX_SEQ_LEN,
    NUM_SLOTS,
    ROWS,
    TOKENS,
    Loop,
    at,
    baseline,
    bracket,
    install,
    int32,
    jitted_step,
    make_pool,
    rows_of,
    serve,
    tokens_of,
)
from helpers.states import multiset
from jax_kvcanary import CanaryLaunchTag as Tag
from jax_kvcanary import FailReason as Reason
from jax_kvcanary.pools import MHATokenToKVPool

# Installing.


def test_mode_none_installs_nothing():
    assert kvc.install_canary(make_pool(MHATokenToKVPool), kvc.CanaryConfig("none"), capacities=CAPACITIES) == (None, None)
    assert kvc.install_canary(object(), kvc.CanaryConfig("none"), capacities=CAPACITIES) == (None, None)


def test_installed_state():
    canary, state = kvc.install_canary(make_pool(MHATokenToKVPool), CONFIG, capacities=CAPACITIES, swa_window_size=7)
    assert canary == kvc.Canary(CONFIG, CAPACITIES, 7)
    assert len(state.groups) == 1
    log = state.device_state.violation_log
    assert (log.violation_ring.shape, log.count(), log.is_errored()) == ((101, 8, 2), 0, False)
    assert state.device_state.req_to_verify_expected_tokens is None
    assert np.asarray(state.device_state.enable_chain_position_assert).tolist() == [0]
    finished = canary.mark_init_finished(state)
    assert np.asarray(finished.device_state.enable_chain_position_assert).tolist() == [1]
    assert finished.device_state.enable_chain_position_assert.dtype == jnp.int32
    assert jax.tree.structure(finished) == jax.tree.structure(state)


def test_warm_up_is_silent_until_it_is_finished():
    loop = Loop(finished=False)
    loop.requests.place(1, 0, 8)
    jump = dataclasses.replace(loop.requests.batch((1, 4, [11, 12])), positions=int32([9, 10, *[0] * (TOKENS - 2)]))
    first = loop.requests.batch((1, 0, [1, 2, 3, 4]))
    assert loop.step(first) == []
    assert loop.step(jump) == []
    loop.state = loop.canary.mark_init_finished(loop.state)
    assert loop.step(first) == []
    assert loop.step(jump) == sorted(at(EVERY_PHASE, loop.requests.table[1, 4], Reason.WRITE_POSITION_MISMATCH))


def test_a_canary_is_static():
    canary, state = install(make_pool(MHATokenToKVPool))
    same = kvc.Canary(dataclasses.replace(CONFIG), dataclasses.replace(CAPACITIES))
    assert (canary, hash(canary)) == (same, hash(same))
    others = [
        dataclasses.replace(canary, swa_window_size=3),
        dataclasses.replace(canary, capacities=kvc.CanaryLaunchCapacities(3, ROWS)),
        dataclasses.replace(canary, config=kvc.CanaryConfig("raise")),
    ]
    assert len({canary, same, *others}) == 4
    traces = []

    @partial(jax.jit, static_argnums=0)
    def finish(canary, state):
        traces.append(canary)
        return canary.mark_init_finished(state)

    finish(canary, state)
    finish(same, state)
    finish(others[0], state)
    assert traces == [canary, others[0]]
    hash(jax.tree.structure(state))


# The report.


def test_a_report_survives_donation():
    loop = Loop()
    state, pool, kept = loop.state, loop.pool, []
    for batch in serve(faults=True):
        before = state
        state, report, _, pool = jitted_step(loop.canary, state, batch, pool)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
        kept.append(report)
    for got, want in zip(kept, baseline(MHATokenToKVPool)[0], strict=True):
        for got_leaf, want_leaf in zip(jax.tree.leaves(got.summary), jax.tree.leaves(want.summary), strict=True):
            np.testing.assert_array_equal(got_leaf, want_leaf)
        assert multiset(rows_of(got)) == multiset(rows_of(want))


consume = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf * 0, state), donate_argnums=0)


@pytest.mark.parametrize("how", ["eager", "jit", "jit twice", "sweep"])
def test_a_report_shares_nothing_with_the_state(how):
    canary, state = install(make_pool(MHATokenToKVPool))
    pool, batch = make_pool(MHATokenToKVPool), serve()[0]
    step = partial(bracket, canary)
    if how == "eager":
        state, report, _, _ = step(state, batch, pool)
        reports = [report]
    elif how == "jit":
        state, report, _, _ = jax.jit(step)(state, batch, pool)
        reports = [report]
    elif how == "jit twice":
        state, *reports = jax.jit(lambda *args: (lambda state, report, *_: (state, report, report))(*step(*args)))(state, batch, pool)
    else:
        verify_plan = kvc.plan(batch.plan_input, batch.req_to_token, verify_capacity=5).verify
        state, report = jax.jit(lambda state: canary.sweep(state, verify_plan, pool))(state)
        reports = [report]
    want = [host(report) for report in reports]
    addresses = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)}
    assert not addresses & {leaf.unsafe_buffer_pointer() for report in reports for leaf in jax.tree.leaves(report)}
    jax.block_until_ready(consume(state))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    for report, copy in zip(reports, want, strict=True):
        for leaf, want_leaf in zip(jax.tree.leaves(report), jax.tree.leaves(copy), strict=True):
            np.testing.assert_array_equal(leaf, want_leaf)


def test_the_summary_is_small():
    canary, state = install(make_pool(MHATokenToKVPool))
    state, report = bracket(canary, state, serve()[0], make_pool(MHATokenToKVPool))[:2]
    assert report.summary.nbytes < 1024
    state = state.device_state
    for name, part in report.on_host().items():
        if name not in ("violation_write_index", "num_invalid_rows", "reset_count"):
            np.testing.assert_array_equal(part, getattr(state, name))
    assert report.violation_write_index.tolist() == [0]
    assert np.asarray(report.num_invalid_rows).tolist() == [0]


def test_invalid_rows_are_in_the_report():
    loop = Loop()
    assert loop.extend(1, 0, 5) == []
    sound = loop.requests.batch((1, 2, [1]), (2, 3, [2]))
    wrong = dataclasses.replace(sound.plan_input, req_pool_indices=int32([MAX_REQS, 1, 0]), prefix_lens=int32([2, MAX_SEQ_LEN + 1, 0]))
    batch = dataclasses.replace(sound, plan_input=wrong)
    state, report, _, _ = jitted_step(loop.canary, loop.state, batch, loop.pool)
    assert np.asarray(report.num_invalid_rows).tolist() == [2]
    assert state.device_state.violation_log.count() == 0


# Sweeps.


def sweep_plan(slots, tokens=None):
    """A plan of one chain from its start."""
    count = len(slots)
    return kvc.VerifyPlan(
        verify_slot_indices=int32(slots),
        verify_expected_tokens=int32([-1] * count if tokens is None else tokens),
        verify_expected_positions=np.arange(count, dtype=np.int32),
        verify_prev_slot_indices=int32([-1, *slots[:-1]]),
        verify_num_valid=int32([count]),
        enable=int32([1]),
    )


def test_sweep():
    loop = Loop()
    assert loop.extend(1, 0, 7) == []
    slots = loop.requests.table[1, :7]
    sweep = jax.jit(loop.canary.sweep, donate_argnums=0)

    def swept(plan, pool=None):
        loop.state, report = sweep(loop.state, plan, pool or loop.pool)
        assert np.asarray(report.num_invalid_rows).tolist() == [0]
        return loop.gained(report)

    both = (Tag.SWEEP_K_FULL, Tag.SWEEP_V_FULL)
    assert swept(sweep_plan(slots)) == []
    assert swept(sweep_plan(slots, tokens_of(1, 0, 7))) == []
    wrong_token = [*tokens_of(1, 0, 6), 5]
    assert swept(sweep_plan(slots, wrong_token)) == at(both, slots[6], Reason.VERIFY_TOKEN_MISMATCH)
    swapped = slots[[0, 1, 3, 2, 4, 5, 6]]
    assert {entry[1] for entry in swept(sweep_plan(swapped))} == {slots[3], slots[2], slots[4]}
    overwritten = loop.pool.write(0, slots[3:4], jnp.ones((1, HEADS, HEAD_DIM)), jnp.ones((1, HEADS, HEAD_DIM)))
    assert swept(sweep_plan(slots), overwritten) == at(both, slots[3], Reason.VERIFY_REAL_KV_HASH_MISMATCH)
    assert swept(sweep_plan([NUM_SLOTS])) == at(both, NUM_SLOTS, Reason.SLOT_OUT_OF_RANGE)
    kernel_runs = kvc.to_int64(loop.state.device_state.kernel_run_counters)
    assert [kernel_runs[tag] for tag in both] == [6, 6]
    slot_runs = kvc.to_int64(loop.state.device_state.slot_run_counters)
    assert [slot_runs[tag] for tag in both] == [36, 36]


def test_sweep_of_a_group_that_is_not_there():
    canary, state = install(make_pool(MHATokenToKVPool))
    with pytest.raises(ValueError, match=r"^`kind` is SWA, but this canary has the groups FULL\.$"):
        canary.sweep(state, sweep_plan([1]), make_pool(MHATokenToKVPool), kind=kvc.PoolKind.SWA)


# Checks that are off by default.


def test_write_input_assert():
    loop = Loop(dataclasses.replace(CONFIG, enable_write_input_assert=True))
    loop.requests.place(1, 0, 7)
    batch = loop.requests.batch((1, 0, tokens_of(1, 0, 7)))
    tokens, positions = batch.input_ids.copy(), batch.positions.copy()

    def step():
        given = {"expected_input_tokens": tokens.copy(), "expected_input_positions": positions.copy()}
        return loop.step(dataclasses.replace(batch, **given))

    assert step() == []
    tokens[2] += 1
    assert step() == at(EVERY_PHASE, batch.out_cache_loc[2], Reason.WRITE_TOKEN_MISMATCH)
    positions[2] += 1
    assert step() == at(EVERY_PHASE, batch.out_cache_loc[2], Reason.WRITE_TOKEN_MISMATCH | Reason.WRITE_POSITION_MISMATCH)
    tokens[7] = positions[12] = 99  # padding is not compared
    tokens[2] -= 1
    assert step() == at(EVERY_PHASE, batch.out_cache_loc[2], Reason.WRITE_POSITION_MISMATCH)


TOKEN_TABLE = {"req_to_token_alloc_size": MAX_REQS, "max_context_len": MAX_SEQ_LEN}


def expected_table(shift=0):
    return int32([tokens_of(row, shift, MAX_SEQ_LEN) for row in range(MAX_REQS)])


def valid_lens(*lens):
    return {"expected_tokens_valid_lens": int32([*lens, *[0] * (ROWS - len(lens))])}


def test_verify_token_assert():
    loop = Loop(dataclasses.replace(CONFIG, enable_verify_token_assert=True), **TOKEN_TABLE)
    np.testing.assert_array_equal(loop.state.device_state.req_to_verify_expected_tokens, np.full((MAX_REQS, MAX_SEQ_LEN), -1))
    assert loop.extend(1, 0, 7, **valid_lens(7)) == []
    assert loop.extend(1, 7, 1, **valid_lens(8)) == []  # -1 is unknown
    table = expected_table()
    loop.set_expected_tokens(table)
    assert loop.extend(1, 8, 1, **valid_lens(9)) == []
    table[1, 3] = table[1, 7] = 5
    loop.set_expected_tokens(table)
    slots = loop.requests.table[1]
    both = [entry for position in (3, 7) for entry in at(EVERY_PHASE, slots[position], Reason.VERIFY_TOKEN_MISMATCH)]
    assert loop.extend(1, 9, 1, **valid_lens(10)) == sorted(both)
    assert loop.extend(1, 10, 1, **valid_lens(7)) == at(EVERY_PHASE, slots[3], Reason.VERIFY_TOKEN_MISMATCH)
    assert loop.extend(1, 11, 1, **valid_lens(0)) == []


@pytest.mark.parametrize("offset", [0, 1])
def test_draft_pools_hold_the_next_token(offset):
    """The slot of position p holds the token of position p + 1: no finding with offset 1, every slot with 0."""
    config = dataclasses.replace(CONFIG, enable_verify_token_assert=True)
    loop = Loop(config, kv_token_id_vs_position_offset=offset, **TOKEN_TABLE)
    loop.set_expected_tokens(expected_table())
    loop.requests.place(1, 0, 8)
    assert loop.step(loop.requests.batch((1, 0, tokens_of(1, 1, 5)), **valid_lens(6))) == []
    found = loop.step(loop.requests.batch((1, 5, tokens_of(1, 6, 1)), **valid_lens(7)))
    slots = loop.requests.table[1, :5]
    assert found == ([] if offset else sorted(entry for slot in slots for entry in at(EVERY_PHASE, slot, Reason.VERIFY_TOKEN_MISMATCH)))


# Plans that are too large.


def test_overflow_skips_the_verify_and_writes_on():
    loop = Loop()
    roomy, tight = loop.canary, dataclasses.replace(loop.canary, capacities=kvc.CanaryLaunchCapacities(6, ROWS))
    loop.canary = tight
    assert loop.extend(1, 0, 7) == []
    for position in (7, 8):
        assert loop.extend(1, position, 1) == []
    skips = np.asarray(loop.state.device_state.verify_skip_counters).tolist()
    assert skips == [2] * 4 + [0] * 8
    # Nothing was verified, all was written, and both kernels count as run.
    assert kvc.to_int64(loop.state.device_state.slot_run_counters).tolist() == [9] * 4 + [0] * 8
    assert kvc.to_int64(loop.state.device_state.kernel_run_counters).tolist() == [6] * 4 + [0] * 8
    loop.canary = roomy
    assert loop.extend(1, 9, 1) == []
    assert kvc.to_int64(loop.state.device_state.slot_run_counters).tolist() == [9 + 9 + 1] * 4 + [0] * 8
    assert np.asarray(loop.state.device_state.verify_skip_counters).tolist() == skips
