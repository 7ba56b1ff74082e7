"""The health check on real loops: what their mistakes look like to it."""

from __future__ import annotations

from functools import partial

import jax
import pytest

import jax_kvcanary as kvc
from helpers.reports import tags_of
from helpers.window_loop import cached, decode, forward, idle, install, make_pool, step, sweep
from jax_kvcanary import CanaryLaunchTag as Tag
from jax_kvcanary import PoolKind

FULL, SWA = tags_of(PoolKind.FULL), tags_of(PoolKind.SWA)


@partial(jax.jit, static_argnums=0, donate_argnums=3)
def step_that_drops_the_first_state(canary, state, batch, pool):
    _, between = canary.pre_forward(state, batch, pool)
    pool = forward(batch, pool)
    state, report = canary.post_forward(state, between, batch, pool)
    return state, report, pool


@partial(jax.jit, static_argnums=0, donate_argnums=3)
def step_that_keeps_the_old_state(canary, state, batch, pool):
    _, report, pool = step(canary, state, batch, pool)
    return state, report, pool


class Real:
    """A loop that serves a request and then idles, on padding alone."""

    def __init__(self, *kinds, v=True, **config):
        self.kinds = kinds or (PoolKind.FULL,)
        self.pool = make_pool(*self.kinds, v=v)
        self.canary, self.state = install(self.pool, **config)
        self.monitor = kvc.CanaryMonitor(self.canary)

    def run(self, steps, *, step=step, first=0, sweep_every=0):
        for number in range(first, first + steps):
            batch = decode(number) if number < 17 else idle()
            self.state, report, self.pool = step(self.canary, self.state, batch, self.pool)
            self.monitor.observe(report, self.state)
            if sweep_every and number % sweep_every == 0:
                for kind in self.kinds:
                    plan = cached(min(number, 16) + 1, kind, self.pool)
                    self.state, report = sweep(self.canary, self.state, plan, self.pool, kind)
                    self.monitor.observe(report, self.state)
        self.monitor.flush(self.state)


@pytest.mark.parametrize(
    ("kinds", "v", "config"),
    [
        ([PoolKind.FULL, PoolKind.SWA], True, {"sweep_interval": 20}),
        ([PoolKind.FULL], True, {"enable_v_half": False}),
        ([PoolKind.SWA], False, {}),
    ],
)
def test_sound_loops_are_silent(kinds, v, config):
    loop = Real(*kinds, v=v, **config)
    loop.run(301, sweep_every=config.get("sweep_interval", 0))
    assert loop.monitor.violations == ()


def test_a_loop_that_drops_the_state_of_pre_forward():
    with pytest.raises(kvc.CanaryHealthError) as caught:
        Real().run(201, step=step_that_drops_the_first_state)
    assert (caught.value.tags, caught.value.step) == ((Tag.HEAD_K_FULL, Tag.HEAD_V_FULL), 200)


def test_a_loop_that_goes_on_with_the_old_state():
    loop = Real(PoolKind.FULL, PoolKind.SWA)
    with pytest.raises(kvc.CanaryHealthError) as caught:
        loop.run(200, step=step_that_keeps_the_old_state, first=17)
    assert (set(caught.value.tags), caught.value.step) == (FULL | SWA, 200)


def test_a_loop_that_does_not_sweep_at_all():
    with pytest.raises(kvc.CanaryHealthError) as caught:
        Real(sweep_interval=50).run(200)
    assert (set(caught.value.tags), caught.value.step) == (tags_of(PoolKind.FULL, phases=["SWEEP"]), 200)
