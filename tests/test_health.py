"""The health check: launches that stopped are named, in every mode, and legal loops stay silent."""

from __future__ import annotations

import logging
from collections import Counter

import numpy as np
import pytest

import jax_kvcanary as kvc
from helpers.reports import RING_CAPACITY, make_report, row, tags_of
from jax_kvcanary import CanaryLaunchTag as Tag
from jax_kvcanary import PoolKind
from jax_kvcanary.health import CHECK_INTERVAL_STEPS, WARM_UP_STEPS, LaunchHealth

CAPACITIES = kvc.CanaryLaunchCapacities(53, 2)
CAUSES = (
    "Usual causes: a state that pre_forward, post_forward or sweep returned was dropped, the step was compiled without the canary, or "
    "the state lost a group."
)


FULL, SWA = tags_of(PoolKind.FULL), tags_of(PoolKind.SWA)
FULL_SWEEPS = tags_of(PoolKind.FULL, phases=["SWEEP"])


class Untouchable:
    """Stands for a buffer that was donated."""

    def __getattribute__(self, name):
        raise AssertionError(f"a donated buffer was asked for its {name}")


def make_state(*kinds, v=True):
    def group(kind):
        buffer = Untouchable()
        return kvc.CanaryBufferGroup(kind=kind, k_head=buffer, k_tail=buffer, v_head=buffer if v else None, v_tail=buffer if v else None)

    return kvc.CanaryState(tuple(map(group, kinds)), Untouchable())


class Synthetic:
    """A monitor that is shown reports of a loop which there is not."""

    def __init__(self, *kinds, mode="raise", sweep_interval=0, v=True):
        config = kvc.CanaryConfig(mode, ring_capacity=RING_CAPACITY, sweep_interval=sweep_interval)
        self.monitor = kvc.CanaryMonitor(kvc.Canary(config, CAPACITIES))
        self.state = make_state(*(kinds or (PoolKind.FULL,)), v=v)
        self.runs = Counter()
        self.steps = 0

    def observe(self, rows=()):
        self.monitor.observe(make_report(0, rows, runs=self.runs), self.state)

    def run(self, until, tags=FULL, *, forwards=1, rows=()):
        """Steps up to the number given; each but the last is handled."""
        while self.steps < until:
            self.steps += 1
            self.runs.update(dict.fromkeys(tags, 2 * forwards))
            self.observe(rows)

    def sweep(self, tags=FULL_SWEEPS):
        self.runs.update(tags)
        self.observe()

    def fails(self, until, tags, step, want):
        """The steps behind this number are the ones that may not run; the error comes with the report of ``step``."""
        self.run(step, tags)
        with pytest.raises(kvc.CanaryHealthError) as caught:
            self.monitor.flush()
        assert (set(caught.value.tags), caught.value.step) == (want, step)
        self.run(until, tags)
        return caught.value


def test_the_steps_of_the_check():
    assert (WARM_UP_STEPS, CHECK_INTERVAL_STEPS) == (100, 100)


# What is found.


@pytest.mark.parametrize("tag", sorted(FULL | SWA))
def test_a_launch_that_stopped_is_named(tag):
    loop = Synthetic(PoolKind.FULL, PoolKind.SWA)
    loop.run(100, FULL | SWA)
    error = loop.fails(299, (FULL | SWA) - {tag}, 200, {tag})
    assert isinstance(error, RuntimeError)
    assert error.tags == (tag,)
    names = f"{tag.name} (not since step 100)"
    assert str(error) == f"kv_canary: by step 200 these launches should have run again and did not: {names}. {CAUSES}"
    loop.fails(300, (FULL | SWA) - {tag}, 300, {tag})  # it is still so
    loop.run(401, FULL | SWA)
    loop.monitor.flush()


def test_a_launch_that_stops_between_two_checks():
    loop = Synthetic()
    loop.run(250)
    error = loop.fails(401, {Tag.TAIL_K_FULL}, 400, FULL - {Tag.TAIL_K_FULL})
    assert str(error).startswith(
        "kv_canary: by step 400 these launches should have run again and did not: HEAD_K_FULL (not since step 300), HEAD_V_FULL (not "
        "since step 300), TAIL_V_FULL (not since step 300). Usual causes: "
    )


def test_nothing_is_judged_during_warm_up():
    loop = Synthetic()
    loop.run(99, ())
    loop.run(199, FULL)
    loop.run(300, FULL)
    loop.monitor.flush()


def test_a_launch_that_never_ran():
    loop = Synthetic()
    loop.fails(201, FULL - {Tag.HEAD_V_FULL}, 200, {Tag.HEAD_V_FULL})


def test_nothing_advances():
    """The old state is passed again and again, so that all reports are the same."""
    loop = Synthetic()
    loop.run(1)
    loop.fails(299, (), 200, FULL)
    loop.fails(301, (), 300, FULL)


@pytest.mark.parametrize("left", [PoolKind.FULL, PoolKind.SWA])
def test_a_group_that_the_state_lost(left):
    loop = Synthetic(PoolKind.FULL, PoolKind.SWA)
    loop.run(150, FULL | SWA)
    loop.state = make_state(left)
    loop.run(299, tags_of(left))  # both ran between the first two checks
    loop.fails(301, tags_of(left), 300, (FULL | SWA) - tags_of(left))


def test_a_group_that_was_replaced():
    loop = Synthetic(PoolKind.FULL)
    loop.run(100)
    loop.state = make_state(PoolKind.SWA)
    loop.fails(300, SWA, 200, FULL)


def test_a_group_that_came_later_is_watched_as_well():
    loop = Synthetic(PoolKind.FULL)
    loop.run(150)
    loop.state = make_state(PoolKind.FULL, PoolKind.SWA)
    loop.run(160, FULL | SWA)
    loop.run(299, FULL)
    loop.fails(301, FULL, 300, SWA)


def test_a_v_half_that_was_lost():
    loop = Synthetic()
    loop.run(100)
    loop.state = make_state(PoolKind.FULL, v=False)
    loop.fails(200, {Tag.HEAD_K_FULL, Tag.TAIL_K_FULL}, 200, {Tag.HEAD_V_FULL, Tag.TAIL_V_FULL})


# Sweeps.


@pytest.mark.parametrize(
    ("interval", "swept_at", "found_at"),
    [
        (1, (), 200),
        (100, (), 200),
        (101, (), 300),
        (250, (), 400),
        (7, (103,), 300),
        (250, (99,), 400),
        (150, (150,), 400),  # seen at the check of step 200
    ],
)
def test_a_loop_that_does_not_sweep(interval, swept_at, found_at):
    loop = Synthetic(sweep_interval=interval)
    for at in swept_at:
        loop.run(at)
        loop.sweep()
    error = loop.fails(found_at, FULL, found_at, FULL_SWEEPS)
    assert str(error).endswith(f"the state lost a group, or the loop does not sweep that group although `sweep_interval` is {interval}.")


@pytest.mark.parametrize("interval", [1, 37, 100, 101, 150, 200, 250])
@pytest.mark.parametrize("first", [0, 60])
@pytest.mark.parametrize("observed", [True, False])
def test_sweeps_at_their_interval(interval, first, observed):
    """Behind the step that they belong to; the report of a sweep need not be shown to the monitor."""
    health = LaunchHealth(interval)
    runs = np.zeros(12, np.int64)
    for number in range(1, 1207):
        runs[list(FULL)] += 2
        assert health.take(runs.copy(), FULL | FULL_SWEEPS) is None
        if number > first and (number - first) % interval == 0:
            runs[list(FULL_SWEEPS)] += 1
            assert not observed or health.take(runs.copy(), FULL | FULL_SWEEPS) is None


def test_reports_of_sweeps_are_no_steps():
    loop = Synthetic(sweep_interval=1)
    for number in range(1, 200):
        loop.run(number, FULL - {Tag.HEAD_V_FULL})
        loop.sweep()
    loop.fails(200, FULL - {Tag.HEAD_V_FULL}, 200, {Tag.HEAD_V_FULL})


def test_sweeps_of_a_group_that_is_left_out():
    loop = Synthetic(PoolKind.FULL, PoolKind.SWA, sweep_interval=10)
    for number in range(1, 200):
        loop.run(number, FULL | SWA)
        loop.sweep()
    loop.fails(200, FULL | SWA, 200, tags_of(PoolKind.SWA, phases=["SWEEP"]))


def test_only_the_states_of_sweeps_are_kept():
    """Each forward starts from a state without forwards; what sweeps return goes on."""
    loop = Synthetic(sweep_interval=1)
    for loop.steps in range(1, 201):
        loop.runs.update(dict.fromkeys(FULL, 2))
        loop.observe()
        if loop.steps < 200:
            loop.runs.subtract(dict.fromkeys(FULL, 2))
            loop.sweep()
    loop.fails(200, (), 200, FULL)


def test_sweeps_without_an_interval_are_not_asked_for():
    loop = Synthetic()
    loop.run(50)
    loop.sweep()
    loop.run(301)
    loop.monitor.flush()


# Legal loops.


@pytest.mark.parametrize("forwards", [3, 50])
def test_several_forwards_between_two_reports(forwards):
    """Fewer reports than forwards, as of a scan: steps are reports."""
    loop = Synthetic()
    loop.run(300, forwards=forwards)
    loop.monitor.flush()
    loop.fails(400, (), 400, FULL)


def test_a_fresh_state_counts_from_zero():
    loop = Synthetic()
    loop.run(250)
    loop.runs.clear()
    loop.run(401)
    loop.monitor.flush()


@pytest.mark.parametrize(("kinds", "v"), [([PoolKind.FULL], False), ([PoolKind.SWA], True), ([PoolKind.SWA], False)])
def test_launches_that_the_pool_does_not_call_for(kinds, v):
    loop = Synthetic(*kinds, v=v)
    tags = tags_of(*kinds, halves="KV" if v else "K")
    loop.run(300, tags)
    loop.monitor.flush()
    loop.fails(400, (), 400, tags)


def test_without_states_nothing_is_expected():
    loop = Synthetic()
    known, loop.state = loop.state, None
    loop.run(301, ())
    loop.monitor.flush()
    loop.state = known
    loop.run(400)
    loop.state = None
    loop.fails(500, (), 500, FULL)  # the groups are known from the check before


# What the monitor does.


def test_log_mode_logs_once_a_check(caplog):
    loop = Synthetic(mode="log")
    loop.run(100)
    loop.run(402, FULL - {Tag.TAIL_V_FULL})
    loop.monitor.flush()
    want = [
        f"kv_canary: by step {step} these launches should have run again and did not: TAIL_V_FULL (not since step 100). {CAUSES}"
        for step in (200, 300, 400)
    ]
    assert caplog.record_tuples == [("jax_kvcanary", logging.ERROR, text) for text in want]


def test_log_mode_logs_violations_first(caplog):
    loop = Synthetic(mode="log")
    loop.run(199, ())
    loop.run(200, (), rows=[row(3)])
    loop.monitor.flush()
    assert [(record.levelname, record.getMessage().split(":")[0]) for record in caplog.records] == [
        ("WARNING", "kv_canary violation"),
        ("ERROR", "kv_canary"),
    ]
    assert len(loop.monitor.violations) == 1


def test_violations_of_the_same_report_come_first():
    loop = Synthetic()
    loop.run(199, ())
    loop.run(200, (), rows=[row(3), row(5)])
    with pytest.raises(kvc.CanaryViolationError) as caught:
        loop.run(201, (), rows=[row(3), row(5)])
    assert [found.slot_idx for found in caught.value.violations] == [3, 5]
    cause = caught.value.__cause__
    assert isinstance(cause, kvc.CanaryHealthError)
    assert (cause.tags, cause.step) == (tuple(sorted(FULL)), 200)
    loop.run(300, (), rows=[row(3), row(5)])  # neither is raised twice
    with pytest.raises(kvc.CanaryHealthError) as caught:
        loop.monitor.flush()
    assert caught.value.step == 300


def test_a_health_error_loses_no_violation():
    loop = Synthetic()
    loop.run(200, ())
    with pytest.raises(kvc.CanaryHealthError):
        loop.run(201, FULL, rows=[row(3)])
    with pytest.raises(kvc.CanaryViolationError) as caught:
        loop.run(202, FULL, rows=[row(3)])
    assert [found.slot_idx for found in caught.value.violations] == [3]
    assert caught.value.__cause__ is None
    loop.run(401, FULL, rows=[row(3)])
    loop.monitor.flush()


def test_observe_takes_the_state_of_a_canary():
    loop = Synthetic()
    report = make_report(1, [row(3)])
    for bad in (loop.state.groups, report):
        with pytest.raises(TypeError) as caught:
            loop.monitor.observe(report, bad)
        assert str(caught.value) == f"`state` is of type {type(bad).__name__}, but it must be a CanaryState."
    loop.monitor.flush()
    assert loop.monitor.violations == ()
