"""Freed slots: the next use by a stale owner is a finding of that step, and everybody else goes on in silence."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_kvcanary as kvc
from helpers.backends import host
from helpers.loops import EVERY_PHASE, NUM_SLOTS, UNWRITTEN, Loop, at, int32, tokens_of
from helpers.moving import NUM_SLOTS as ENGINE_SLOTS
from helpers.moving import SWA_SLOTS, Engine, row_out_of_range
from jax_kvcanary import CanaryLaunchTag as Tag
from jax_kvcanary import FailReason as Reason
from jax_kvcanary import PoolKind

RELEASE = jax.jit(kvc.Canary.release, static_argnums=0, static_argnames="kinds", donate_argnums=1)
FULL, SWA = (PoolKind.FULL,), (PoolKind.SWA,)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_release(jit):
    loop = Loop()
    assert loop.extend(1, 0, 5) == []
    assert loop.extend(2, 0, 4) == []
    freed = loop.requests.table[1, :5]
    before = host(loop.state)
    padded = int32([*freed, -1, 0, -NUM_SLOTS, -1])
    release = jax.jit(loop.canary.release, donate_argnums=0) if jit else loop.canary.release
    loop.state = release(loop.state, padded, loop.pool)
    for old, new in zip(jax.tree.leaves(before.groups), jax.tree.leaves(loop.state.groups), strict=True):
        want = old.copy()
        want[freed] = 0xFF
        np.testing.assert_array_equal(new, want)
    assert loop.extend(2, 4, 1) == []  # others go on
    stale = loop.requests.batch((1, 5, []))
    assert loop.step(stale) == sorted(entry for slot in freed for entry in at(EVERY_PHASE, slot, UNWRITTEN))


def test_released_slots_are_free_for_others():
    loop = Loop()
    assert loop.extend(1, 0, 5) == []
    loop.state = loop.canary.release(loop.state, loop.requests.table[1, :5].astype(np.int64), loop.pool)
    loop.requests.table[2, :5] = loop.requests.table[1, :5][::-1]
    assert loop.step(loop.requests.batch((2, 0, tokens_of(2, 0, 5)))) == []
    assert loop.extend(2, 5, 1) == []


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_slots_past_the_pool_are_findings_of_the_next_step(jit):
    """In 64 bits too, where the program takes them: with 64-bit types off, jit narrows its arguments before anything sees them."""
    loop = Loop()
    assert loop.extend(1, 0, 5) == []
    before = host(loop.state.groups)
    release = jax.jit(loop.canary.release, donate_argnums=0) if jit else loop.canary.release
    with jax.enable_x64(jit):
        loop.state = release(loop.state, np.array([NUM_SLOTS, -1, 2**31 - 1, NUM_SLOTS - 1, 2**35, -(2**35)]), loop.pool)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(loop.state.groups), strict=True):
        np.testing.assert_array_equal(new[:-1], old[:-1])
    rows = [row_out_of_range(Tag.HEAD_K_FULL, slot, NUM_SLOTS) for slot in (NUM_SLOTS, 2**31 - 1, 2**31 - 1)]
    assert loop.state.device_state.violation_log.rows().tolist() == rows
    assert loop.extend(1, 5, 1) == sorted((tag, slot, reasons) for tag, slot, *_, reasons in rows)
    assert loop.extend(1, 6, 1) == []


def test_a_bad_slot_is_in_the_report_of_the_next_step():
    loop = Loop()
    loop.state = loop.canary.release(loop.state, int32([NUM_SLOTS + 2]), loop.pool)
    monitor = kvc.CanaryMonitor(loop.canary)
    loop.requests.place(1, 0, 3)
    step = jax.jit(loop.canary.wrap(lambda batch, pool: (batch.input_ids, pool)))
    loop.state, report, _, _ = step(loop.state, loop.requests.batch((1, 0, tokens_of(1, 0, 3))), loop.pool)
    monitor.observe(report, loop.state)
    monitor.flush()
    (violation,) = monitor.violations
    assert str(violation).splitlines()[:4] == [
        "kv_canary violation: launch_tag=HEAD_K_FULL fail_reason=slot_out_of_range slot_idx=69 position=-1 stored_token=-1 "
        "expected_token=-1 stored_chain_hash=0x0000000000000000 expected_aux=0x0000000000000043",
        "  found at step 1, before the forward, in the K records of the full pool",
        "  expected: an index from 0 to 66",
        "  found: 69, among slots that were released or that records were moved to",
    ]
    assert violation.request_row is None


# Two groups.


@pytest.fixture
def engine():
    engine = Engine()
    assert engine.extend(1, 0, 7) == []
    assert engine.extend(2, 0, 6) == []
    return engine


def release(engine, slots, *, kinds=None):
    padded = np.array([*slots, -1, 0], np.int32)
    engine.state = RELEASE(engine.canary, engine.state, padded, engine.pool, kinds=kinds)


@pytest.mark.parametrize("kinds", [None, FULL, SWA, (PoolKind.SWA, PoolKind.FULL)], ids=str)
def test_groups_are_released_apart(engine, kinds):
    """Positions 2 to 6 of seven are in the window."""
    before, slots = host(engine.state), engine.slots(1, 7)
    release(engine, slots, kinds=kinds)
    for old, new in zip(before.groups, engine.state.groups, strict=True):
        own = slots if old.kind is PoolKind.FULL else engine.lut[slots]
        for name in old.buffer_names:
            want = getattr(old, name).copy()
            if kinds is None or old.kind in kinds:
                want[own] = 0xFF
            np.testing.assert_array_equal(getattr(new, name), want)
    released = [kind for kind in PoolKind if kinds is None or kind in kinds]
    stale = [row for row in engine.expect(1, 7, range(7), UNWRITTEN) if Tag(row[0]).name.endswith(tuple(kind.name for kind in released))]
    assert engine.step(1, 7, 0) == sorted(stale)
    assert engine.step(2, 6, 0) == []


def test_a_window_frees_what_it_has_left(engine):
    """Legal: the first two of seven positions leave the window, their full KV lives on, others take the window's slots."""
    left = engine.slots(1, 2)
    release(engine, left, kinds=SWA)
    engine.swa_free[:0] = engine.lut[left].tolist()
    engine.set_lut(left, 0)
    assert engine.extend(1, 7, 1) == []
    assert engine.extend(2, 6, 2) == []  # in the two slots of the window's pool
    assert engine.step(1, 8, 0) == engine.step(2, 8, 0) == []


def test_a_window_that_frees_one_slot_too_many(engine):
    """The look-alike: position 2 is still in the window. Reported in that step, with nobody in its slot yet."""
    freed = engine.slots(1, 3)
    release(engine, freed, kinds=SWA)
    engine.set_lut(freed[:2], 0)
    fresh = [row for row in engine.expect(1, 7, [2], UNWRITTEN & ~Reason.VERIFY_CHAIN_HASH_MISMATCH) if Tag(row[0]).name.endswith("SWA")]
    follower = [row for row in engine.expect(1, 7, [3], Reason.VERIFY_CHAIN_HASH_MISMATCH) if Tag(row[0]).name.endswith("SWA")]
    assert engine.step(1, 7, 0) == sorted(fresh + follower)  # the predecessor of position 2 is absent


def test_release_after_the_table_has_forgotten_wipes_the_full_pool_alone(engine):
    slots, before = engine.slots(1, 7), host(engine.state)
    engine.set_lut(slots, 0)
    release(engine, slots)
    full, swa = engine.state.groups
    assert all((np.asarray(getattr(full, name))[slots] == 0xFF).all() for name in full.buffer_names)
    for got, want in zip(jax.tree.leaves(swa), jax.tree.leaves(before.groups[1]), strict=True):
        np.testing.assert_array_equal(got, want)
    assert engine.step(1, 7, 0) == sorted(engine.expect(1, 7, range(7), UNWRITTEN))  # the absent ones are no finding
    assert engine.rows_in_between() == []


def test_bad_slots_of_each_group(engine):
    """A table entry that leaves the window's pool, and a slot that leaves pool and table."""
    broken = engine.slots(1, 1)[0]
    engine.set_lut(broken, SWA_SLOTS + 4)
    release(engine, [broken, ENGINE_SLOTS])
    assert engine.rows_in_between() == [
        row_out_of_range(Tag.HEAD_K_FULL, ENGINE_SLOTS, ENGINE_SLOTS),
        row_out_of_range(Tag.HEAD_K_SWA, SWA_SLOTS + 4, SWA_SLOTS),
        row_out_of_range(Tag.HEAD_K_SWA, 2**31 - 1, SWA_SLOTS),
    ]
    release(engine, [ENGINE_SLOTS], kinds=FULL)
    assert engine.rows_in_between() == [row_out_of_range(Tag.HEAD_K_FULL, ENGINE_SLOTS, ENGINE_SLOTS)]


def test_padding_stays_padding_whatever_the_table_has_for_it(engine):
    """Slot 0 pads; an engine whose table maps it somewhere loses nothing there."""
    engine.set_lut(0, engine.lut[engine.table[2, 5]])
    before = host(engine.state)
    release(engine, [])
    for got, want in zip(jax.tree.leaves(engine.state), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(got, want)


def test_release_in_a_scan():
    """A step of each iteration reads the six slots of a request; in the third one of them has just been freed."""
    loop = Loop()
    assert loop.extend(1, 0, 6) == []
    freed = loop.requests.table[1, 3]
    schedule = np.full((5, 2), -1, np.int32)
    schedule[2, 1] = freed
    batch = loop.requests.batch((1, 6, []))

    @partial(jax.jit, donate_argnums=0)
    def steps(state, pool, schedule):
        def body(state, slots):
            state = loop.canary.release(state, slots, pool)
            state, report, _, _ = loop.canary.wrap(lambda _, pool: (None, pool))(state, batch, pool)
            return state, report

        return jax.lax.scan(body, state, schedule)

    loop.state, reports = steps(loop.state, loop.pool, schedule)
    gained = [loop.gained(jax.tree.map(lambda leaf, i=i: leaf[i], reports)) for i in range(5)]
    found = at(EVERY_PHASE, freed, UNWRITTEN) + at(EVERY_PHASE, loop.requests.table[1, 4], Reason.VERIFY_CHAIN_HASH_MISMATCH)
    assert gained == [[], [], *[sorted(found)] * 3]


def test_kinds_may_be_a_list_and_empty(engine):
    before = host(engine.state)
    after = engine.canary.release(engine.state, engine.slots(1, 7), engine.pool, kinds=[])
    for got, want in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(got, want)
    after = engine.canary.release(engine.state, engine.slots(1, 7), engine.pool, kinds=list(PoolKind))
    both = engine.canary.release(engine.state, jnp.asarray(engine.slots(1, 7)), engine.pool)
    for got, want in zip(jax.tree.leaves(after), jax.tree.leaves(both), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_state_on_the_host_can_be_released():
    loop = Loop()
    assert loop.extend(1, 0, 5) == []
    slots = loop.requests.table[1, :2]
    on_host = dataclasses.replace(loop.state, groups=host(loop.state.groups))
    want = loop.canary.release(loop.state, slots, loop.pool)
    got = loop.canary.release(on_host, slots, loop.pool)
    for got_leaf, want_leaf in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(got_leaf, want_leaf)


def test_nothing_to_release_may_be_an_empty_list():
    loop = Loop()
    before = host(loop.state)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(host(loop.canary.release(loop.state, [], loop.pool))), strict=True):
        np.testing.assert_array_equal(new, old)
