"""The twelve launch tags: which ones a loop runs, and that each of them checks what it should."""

from __future__ import annotations

import numpy as np
import pytest

import jax_kvcanary as kvc
from helpers.window_loop import WINDOW, cached, decode, idle, install, make_pool, step, sweep
from jax_kvcanary import CanaryLaunchTag as Tag
from jax_kvcanary import PoolKind
from jax_kvcanary.health import launch_tags

KINDS = [(PoolKind.FULL,), (PoolKind.SWA,), (PoolKind.FULL, PoolKind.SWA)]
STEPS, SWEEPS = 7, 2


def serve(canary, state, pool, kinds):
    """A request of seven tokens, a step of nothing but padding, and two sweeps of each group."""
    for position in range(STEPS):
        state, report, pool = step(canary, state, decode(position), pool)
    state, report, pool = step(canary, state, idle(), pool)
    for kind in kinds:
        for _ in range(SWEEPS):
            state, report = sweep(canary, state, cached(STEPS, kind, pool), pool, kind)
    return state, report, pool


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("pool_v", [True, False])
@pytest.mark.parametrize("enable_v_half", [True, False])
def test_each_tag_runs_where_it_should(kinds, pool_v, enable_v_half):
    pool = make_pool(*kinds, v=pool_v)
    canary, state = install(pool, enable_v_half=enable_v_half)
    state, report, _ = serve(canary, state, pool, kinds)

    halves = "KV" if pool_v and enable_v_half else "K"
    launches, slots = np.zeros((2, 12), int)
    for kind in kinds:
        window = STEPS if kind is PoolKind.FULL else WINDOW
        verified = sum(min(position, window) for position in range(STEPS))
        for half in halves:
            for phase in ("HEAD", "TAIL"):
                tag = Tag[f"{phase}_{half}_{kind.name}"]
                launches[tag], slots[tag] = 2 * (STEPS + 1), verified + STEPS
            tag = Tag[f"SWEEP_{half}_{kind.name}"]
            launches[tag], slots[tag] = SWEEPS, SWEEPS * STEPS
    counters = report.on_host()
    assert kvc.to_int64(counters["kernel_run_counters"]).tolist() == launches.tolist()
    assert kvc.to_int64(counters["slot_run_counters"]).tolist() == slots.tolist()
    assert int(report.violation_write_index[0]) == 0
    assert launch_tags(state.groups, sweeps=True) == {tag for tag in Tag if launches[tag]}
    assert launch_tags(state.groups, sweeps=False) == {tag for tag in Tag if launches[tag] and "SWEEP" not in tag.name}


def test_all_tags_of_two_groups():
    _, state = install(make_pool(PoolKind.FULL, PoolKind.SWA))
    assert launch_tags(state.groups, sweeps=True) == set(Tag)


@pytest.mark.parametrize("position", [STEPS - 1, 0])
def test_each_tag_reports_what_it_finds(position):
    """A slot that was released and is used all the same: behind the window only the full pool and the sweeps see it."""
    kinds = (PoolKind.FULL, PoolKind.SWA)
    pool = make_pool(*kinds)
    canary, state = install(pool, ring_capacity=101)
    state, _, pool = serve(canary, state, pool, kinds)
    state = canary.release(state, decode(position).out_cache_loc[:1], pool)
    state, _, pool = step(canary, state, decode(STEPS), pool)
    for kind in kinds:
        state, report = sweep(canary, state, cached(STEPS, kind, pool), pool, kind)
    reported = kvc.to_int64(report.violation_ring)[: int(report.violation_write_index[0])]
    in_window = position >= STEPS - WINDOW
    want = {tag for tag in Tag if in_window or tag.name.startswith("SWEEP") or tag.name.endswith("FULL")}
    assert {Tag(tag) for tag in reported[:, 0]} == want
    slot = int(decode(position).out_cache_loc[0])
    own = {"FULL": slot, "SWA": int(np.asarray(pool.lut)[slot])}
    fresh = {Tag(tag) for tag, slot, *record in reported[:, :4].tolist() if record == [-1, -1] and slot == own[Tag(tag).name.split("_")[2]]}
    assert fresh == want
