"""When a monitor reads its reports: one step late, or, where it waits, each in its own step."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest

import jax_kvcanary as kvc
from helpers.reports import Watched, handle, make_monitor, make_report, row, steps_of


def watched_reports(events, *keywords):
    """Reports of the steps 1, 2 and so on whose arrays note events under the number of their step."""
    return [make_report(step, array=partial(Watched, events, step), **each) for step, each in enumerate(keywords, start=1)]


def test_observe_reads_one_step_late():
    events = []
    monitor = make_monitor()
    first, second, third = watched_reports(events, {}, {}, {})
    monitor.observe(first, None)
    assert set(events) == {("copy", 1)}
    for report, number in ((second, 2), (third, 3)):
        events.clear()
        monitor.observe(report, None)
        copies, reads = ([label for kind, label in events if kind == wanted] for wanted in ("copy", "read"))
        assert set(copies) == {number}
        assert set(reads) == {number - 1}
        assert events.index(("read", number - 1)) > max(i for i, event in enumerate(events) if event == ("copy", number))
    events.clear()
    monitor.flush()
    assert set(events) == {("read", 3)}


def test_a_monitor_that_waits_reads_each_report_in_its_own_step():
    events = []
    monitor = make_monitor(wait=True)
    for step, report in enumerate(watched_reports(events, {}, {"rows": [row(3)]}, {"rows": [row(3)]}), start=1):
        events.clear()
        monitor.observe(report, None)
        assert set(events) == {("copy", step), ("read", step)}
        assert events[0] == ("copy", step)
        assert steps_of(monitor) == [(2, 2)] * (step > 1)
    events.clear()
    monitor.flush()
    assert events == []


def test_a_monitor_that_waits_raises_and_goes_on():
    monitor = make_monitor("raise", wait=True)
    monitor.observe(make_report(1), None)
    for step in (2, 3):
        rows = [row(slot) for slot in range(3, step + 2)]
        with pytest.raises(kvc.CanaryViolationError) as found:
            monitor.observe(make_report(step, rows), None)
        assert [violation.step for violation in found.value.new] == [step]
        monitor.flush()
    monitor.observe(make_report(4, rows), None)


@pytest.mark.parametrize("bad", [1, None, "yes", np.True_])
def test_whether_a_monitor_waits_is_true_or_false(bad):
    with pytest.raises(TypeError, match=r"^`wait` is .* but it must be True or False\.$"):
        make_monitor(wait=bad)


def test_the_ring_is_read_only_when_there_is_news():
    monitor = make_monitor()
    ring_events, reports = [], []
    for step, rows in enumerate(([], [row(3)], [row(3)]), start=1):
        report = make_report(step, rows)
        reports.append(dataclasses.replace(report, violation_ring=Watched(ring_events, step, np.asarray(report.violation_ring))))
    handle(monitor, *reports)
    assert ring_events == [("read", 2)]


def test_flush_drains():
    monitor = make_monitor()
    monitor.flush()
    monitor.observe(make_report(1, [row(3)]), None)
    assert monitor.violations == ()
    monitor.flush()
    assert len(monitor.violations) == 1
    monitor.flush()
    assert len(monitor.violations) == 1
    raising = make_monitor("raise")
    raising.observe(make_report(1, [row(3)]), None)
    with pytest.raises(kvc.CanaryViolationError):
        raising.flush()
    raising.flush()
