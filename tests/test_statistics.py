"""Lines of statistics, metrics, floods, and a log that is reset."""

from __future__ import annotations

import builtins
import dataclasses
import logging
import re

import numpy as np
import pytest

import jax_kvcanary as kvc
from helpers.loops import CONFIG, Loop, jitted_step
from helpers.messages import CAPACITIES
from helpers.reports import RING_CAPACITY, make_report, row
from jax_kvcanary import CanaryLaunchTag as Tag
from jax_kvcanary import FailReason as Reason
from jax_kvcanary.statistics import CanaryCounts

TAGS = "HEAD_K_FULL,HEAD_V_FULL,TAIL_K_FULL,TAIL_V_FULL"


def make_monitor(mode="log", every=0, **more):
    return kvc.CanaryMonitor(kvc.Canary(kvc.CanaryConfig(mode, stats_every_n_steps=every), CAPACITIES), **more)


@pytest.fixture
def lines(caplog):
    """Messages of one level since the last time."""
    caplog.set_level(logging.DEBUG, logger="jax_kvcanary")

    def take(level=logging.INFO):
        found = [record.getMessage() for record in caplog.records if record.levelno == level and record.name == "jax_kvcanary"]
        caplog.clear()
        return found

    return take


class WatchedLoop(Loop):
    """A loop whose reports a monitor observes."""

    def __init__(self, config, **more):
        super().__init__(config)
        self.monitor = kvc.CanaryMonitor(self.canary, **more)

    def step(self, batch):
        self.state, report, _, self.pool = jitted_step(self.canary, self.state, batch, self.pool)
        self.monitor.observe(report, self.state)
        return self.gained(report)


# Lines of statistics.


def test_a_line_every_n_steps(lines):
    loop = WatchedLoop(dataclasses.replace(CONFIG, stats_every_n_steps=3))
    loop.extend(1, 0, 5)
    for position in range(5, 11):
        loop.extend(1, position, 1)
    loop.monitor.flush(loop.state)
    # Prefixes 0, 5, 6 and then 7, 8, 9 are verified, and 5 + 1 + 1 and then 3 tokens written; the seventh step has no line.
    nothing = "violations=0 (+0) skipped_verifies=0 (+0) invalid_rows=0 (+0)"
    assert lines() == [
        f"kv_canary statistics: steps=3 (+3) tokens_protected=18 (+18) sweeps=0 (+0) {nothing} active_tags={TAGS}",
        f"kv_canary statistics: steps=6 (+3) tokens_protected=45 (+27) sweeps=0 (+0) {nothing} active_tags={TAGS}",
    ]


def test_what_a_line_counts(lines):
    monitor = make_monitor(every=10)
    runs = {Tag.TAIL_K_FULL: 20, Tag.SWEEP_K_FULL: 3, Tag.SWEEP_V_FULL: 3}
    monitor.observe(make_report(4, [row(3)], invalid=2, skips={Tag.HEAD_K_FULL: 1}), None)
    monitor.observe(make_report(10, [row(3), row(5)], invalid=1, runs=runs, skips={Tag.HEAD_K_FULL: 1, Tag.TAIL_K_FULL: 4}), None)
    monitor.flush()
    assert lines() == [
        "kv_canary statistics: steps=10 (+10) tokens_protected=0 (+0) sweeps=3 (+3) violations=2 (+2) skipped_verifies=5 (+5) "
        "invalid_rows=3 (+3) active_tags=TAIL_K_FULL,SWEEP_K_FULL,SWEEP_V_FULL"
    ]
    monitor.observe(
        make_report(20, [row(3), row(5)], runs=runs | {Tag.TAIL_K_FULL: 40}, skips={Tag.HEAD_K_FULL: 1, Tag.TAIL_K_FULL: 4}), None
    )
    monitor.flush()
    assert lines()[0].startswith("kv_canary statistics: steps=20 (+10) tokens_protected=0 (+0) sweeps=3 (+0) violations=2 (+0)")


@pytest.mark.parametrize(("steps", "written"), [((9, 10, 11), [10]), ((9, 25, 29), [25]), ((7, 9), []), ((10, 10), [10])])
def test_several_steps_between_two_reports(lines, steps, written):
    """A line at the first report in which another ten steps are full, and none at the report of a sweep between."""
    monitor = make_monitor(every=10)
    for step in steps:
        monitor.observe(make_report(step), None)
    monitor.flush()
    assert [int(re.search(r"steps=(\d+)", text)[1]) for text in lines()] == written


def test_no_line_unless_asked(lines):
    monitor = make_monitor()
    for step in range(1, 30):
        monitor.observe(make_report(step), None)
    assert lines() == []


def test_a_line_in_raise_mode_comes_before_the_error(lines):
    monitor = make_monitor("raise", every=1)
    monitor.observe(make_report(1, [row(3)]), None)
    with pytest.raises(kvc.CanaryViolationError):
        monitor.flush()
    assert len(lines()) == 1


def test_counters_of_the_device_may_wrap():
    summary = {name: part.copy() for name, part in make_report(1).on_host().items()}
    summary["verify_skip_counters"][3] = summary["fail_reason_counters"][3, 2] = 2**32 - 2
    counts = CanaryCounts.none().after(summary, 1)
    summary["verify_skip_counters"][3] = summary["fail_reason_counters"][3, 2] = 5
    counts = counts.after(summary, 2)
    assert (counts.skips[3], counts.reasons[3, 2]) == (2**32 + 5, 2**32 + 5)


# A flood.


def flood():
    """Five rows of one kind fill the ring; one of another kind and five hundred more find no room."""
    rows = [row(slot) for slot in range(RING_CAPACITY)]
    report = make_report(2, rows, total=RING_CAPACITY + 501)
    summary = np.asarray(report.summary).copy()
    # fail_reason_counters follow three scalars and two tables of 24 words.
    summary[3 + 48 + 8 * Tag.HEAD_V_SWA + 6] = 1
    summary[3 + 48 + 8 * Tag.TAIL_K_FULL + 0] -= 1
    return dataclasses.replace(report, summary=summary)


def test_a_flood_hides_no_other_kind():
    by_reason = "TAIL_K_FULL verify_chain_hash 505, HEAD_V_SWA slot_out_of_range 1"
    report = flood()
    counts = CanaryCounts.none().after(report.on_host(), 2)
    assert counts.reasons_text() == by_reason
    assert counts.violations == 506


def test_a_flood_in_a_loop_names_every_kind(lines):
    """A ring of two rows; a real flood of one kind and one finding of another."""
    loop = WatchedLoop(dataclasses.replace(CONFIG, ring_capacity=2))
    assert loop.extend(1, 0, 9) == []
    assert loop.extend(2, 0, 3) == []
    # Row 1 is read as row 2 holds it; row 2 jumps.
    loop.requests.table[1, :3] = loop.requests.table[2, :3]
    loop.requests.place(2, 3, 1)
    loop.requests.place(1, 9, 1)
    batch = loop.requests.batch((1, 9, [5]), (2, 3, [6]))
    loop.step(dataclasses.replace(batch, positions=np.where(np.arange(13) == 1, 7, batch.positions).astype(np.int32)))
    loop.monitor.flush(loop.state)
    (text,) = [text for text in lines(logging.WARNING) if "is full" in text]
    counted = dict(re.findall(r"(\w+ \w+) (\d+)", text.split("By launch tag and reason: ")[1]))
    for tag in TAGS.split(","):
        assert counted[f"{tag} write_position"] == "1"
        assert f"{tag} verify_chain_hash" in counted


def test_a_flood_that_raises_names_every_kind():
    monitor = make_monitor("raise")
    monitor.observe(make_report(2, [row(slot) for slot in range(RING_CAPACITY)], total=9), None)
    with pytest.raises(kvc.CanaryViolationError) as caught:
        monitor.flush()
    assert str(caught.value).splitlines()[-2:] == [
        "4 more violations were recorded.",
        "By launch tag and reason: TAIL_K_FULL verify_chain_hash 9.",
    ]
    assert (len(caught.value.violations), caught.value.total) == (RING_CAPACITY, 9)


# A log that is reset.


def corrupt_and_read(loop, position):
    """Findings of a step that reads a slot whose record was changed."""
    slot = int(loop.requests.table[1, 2])
    group = loop.state.groups[0]
    changed = dataclasses.replace(group, k_head=group.k_head.at[slot, 8].add(1))
    loop.state = dataclasses.replace(loop.state, groups=(changed,))
    return loop.extend(1, position, 1)


def test_after_a_raise_the_log_is_reset_and_the_loop_goes_on():
    loop = WatchedLoop(dataclasses.replace(CONFIG, mode=kvc.CanaryMode.RAISE, ring_capacity=3))
    assert loop.extend(1, 0, 5) == []
    assert len(corrupt_and_read(loop, 5)) == 2  # the slot and its successor
    with pytest.raises(kvc.CanaryViolationError) as caught:
        loop.monitor.flush(loop.state)
    assert caught.value.total == 2
    loop.state = loop.canary.reset_log(loop.state)
    loop.seen = 0
    assert loop.state.device_state.violation_log.count() == 0
    loop.requests.place(2, 0, 4)
    assert loop.step(loop.requests.batch((2, 0, [21, 22, 23, 24]))) == []  # the sound request goes on, and nothing is raised again
    loop.monitor.flush(loop.state)
    found = corrupt_and_read(loop, 6)
    with pytest.raises(kvc.CanaryViolationError) as caught:
        loop.monitor.flush(loop.state)
    # The text begins with what is new.
    assert len(found) == 2
    assert caught.value.new == caught.value.violations[2:]
    assert str(caught.value) == "\n".join(map(str, caught.value.new))
    assert (len(caught.value.violations), caught.value.total) == (4, 4)
    assert [violation.step for violation in caught.value.violations] == [2, 2, 4, 4]


def test_a_reset_that_no_report_saw_empty():
    """More rows after the reset than before it: only the count of resets tells."""
    monitor = make_monitor()
    monitor.observe(make_report(1, [row(3)]), None)
    monitor.observe(make_report(2, [row(5), row(7), row(9)], resets=1), None)
    monitor.flush()
    assert [violation.slot_idx for violation in monitor.violations] == [3, 5, 7, 9]


def test_a_log_without_a_count_of_resets():
    """A log that got shorter was reset."""
    monitor = make_monitor()
    for step, rows in ((1, [row(3), row(5)]), (2, [row(7)]), (3, [row(7), row(9)])):
        report = make_report(step, rows)
        monitor.observe(report, None)
    monitor.flush()
    assert [violation.slot_idx for violation in monitor.violations] == [3, 5, 7, 9]


def test_resetting_a_log_by_hand():
    log = kvc.ViolationLog.allocate(ring_capacity=3)
    assert int(log.reset().reset().reset_count[0]) == 2
    assert kvc.ViolationLog(log.violation_ring, log.violation_write_index + 2).reset().reset_count is None


def test_reset_log_takes_a_state():
    canary = kvc.Canary(kvc.CanaryConfig("log"), CAPACITIES)
    with pytest.raises(TypeError, match=r"^`state` is of type NoneType, but it must be a CanaryState\.$"):
        canary.reset_log(None)


# Metrics.


@pytest.fixture
def registry():
    prometheus_client = pytest.importorskip("prometheus_client", reason="needs prometheus-client, the extra `metrics`")
    return prometheus_client.CollectorRegistry()


def samples(registry):
    """Every counter that is not zero, by name and labels."""
    return {
        (sample.name.removeprefix("kv_canary_").removesuffix("_total"), *sample.labels.values()): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name.endswith("_total") and sample.value
    }


def test_metrics_of_a_loop(registry):
    loop = WatchedLoop(CONFIG, metrics=kvc.CanaryMetrics(registry))
    loop.extend(1, 0, 5)
    loop.extend(1, 5, 1)
    assert len(corrupt_and_read(loop, 6)) == 2
    loop.monitor.flush(loop.state)
    expected = {("steps",): 3, ("violations",): 2, ("findings", "HEAD_K_FULL", "verify_position"): 1}
    expected |= {("findings", "HEAD_K_FULL", "verify_chain_hash"): 1}
    for tag in TAGS.split(","):
        expected |= {("launches", tag): 6, ("records", tag): 5 + 5 + 1 + 6 + 1}
    assert samples(registry) == expected


def test_metrics_of_reports(registry):
    monitor = make_monitor(metrics=kvc.CanaryMetrics(registry))
    both = Reason.VERIFY_CHAIN_HASH_MISMATCH | Reason.VERIFY_POSITION_MISMATCH
    monitor.observe(make_report(1, [row(3, reasons=both)], invalid=2, skips={Tag.TAIL_K_FULL: 1}), None)
    monitor.observe(make_report(3, [row(3, reasons=both), row(4)], invalid=0, skips={Tag.TAIL_K_FULL: 4}), None)
    monitor.flush()
    assert samples(registry) == {
        ("steps",): 3,
        ("violations",): 2,
        ("invalid_rows",): 2,
        ("launches", "TAIL_K_FULL"): 6,
        ("skipped_verifies", "TAIL_K_FULL"): 4,
        ("findings", "TAIL_K_FULL", "verify_chain_hash"): 2,
        ("findings", "TAIL_K_FULL", "verify_position"): 1,
    }


def test_metrics_of_a_fresh_state(registry):
    """Counters of Prometheus never go back."""
    monitor = make_monitor(metrics=kvc.CanaryMetrics(registry))
    for step in (5, 2, 3):
        monitor.observe(make_report(step), None)
    monitor.flush()
    assert samples(registry) == {("steps",): 6, ("launches", "TAIL_K_FULL"): 12}


def test_metrics_without_the_package(monkeypatch):
    real_import = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "prometheus_client":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    text = "CanaryMetrics needs the package prometheus-client; install it with `pip install 'jax-kvcanary[metrics]'`."
    with pytest.raises(ModuleNotFoundError) as caught:
        kvc.CanaryMetrics()
    assert str(caught.value) == text
