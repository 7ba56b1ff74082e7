"""When a monitor reads its reports: one step late, or when it is flushed."""

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


def test_a_flush_in_each_step_reads_its_report():
    events = []
    monitor = make_monitor()
    for step, report in enumerate(watched_reports(events, {}, {"rows": [row(3)]}, {"rows": [row(3)]}), start=1):
        events.clear()
        handle(monitor, report)
        assert set(events) == {("copy", step), ("read", step)}
        assert steps_of(monitor) == [(2, 2)] * (step > 1)


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
