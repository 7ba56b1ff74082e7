"""Statistics of a sliding-window pool as one line of JSON in the log."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_kvcanary as kvc
from helpers.messages import CAPACITIES, LOG, assert_message
from helpers.reports import Watched, make_report, row
from helpers.window_loop import WINDOW, decode, install, make_pool, step
from jax_kvcanary import PoolKind

README = Path(__file__).parents[1] / "README.md"
INT32_MAX = 2**31 - 1
NAMES = ("live_entries", "diverged", "outside_window", "absent_in_window", "past_table", "without_slot")


def divergence_of(*values):
    return kvc.SwaDivergence(*(jnp.array([value], jnp.int32) for value in values))


@pytest.fixture
def lines(caplog):
    """The lines of statistics that were logged since the last time."""
    caplog.set_level(logging.DEBUG, logger="jax_kvcanary")

    def take():
        found = [record for record in caplog.records if record.levelno == logging.INFO and record.getMessage().startswith("{")]
        caplog.clear()
        assert {record.name for record in found} <= {"jax_kvcanary"}
        return [json.loads(record.getMessage()) for record in found]

    return take


def line(step, *values):
    return {"event": "kv_canary_swa_divergence", "step": step, **dict(zip(NAMES, values, strict=True))}


@pytest.fixture
def monitor():
    return kvc.CanaryMonitor(kvc.Canary(kvc.CanaryConfig("raise"), CAPACITIES))


def test_lines_are_logged_one_report_late(monitor, lines):
    monitor.observe(make_report(3), None)
    monitor.log_swa_divergence(divergence_of(9, 8, 7, 6, 5, 4))
    assert lines() == []
    monitor.observe(make_report(4), None)
    assert lines() == [line(3, 9, 8, 7, 6, 5, 4)]
    monitor.log_swa_divergence(divergence_of(1, 0, 0, 0, 0, 0))
    monitor.log_swa_divergence(divergence_of(2, 0, 0, 0, 0, INT32_MAX))
    monitor.flush()
    assert lines() == [line(4, 1, 0, 0, 0, 0, 0), line(4, 2, 0, 0, 0, 0, INT32_MAX)]
    monitor.log_swa_divergence(divergence_of(3, 0, 0, 0, 0, 0))
    monitor.flush()
    assert lines() == [line(4, 3, 0, 0, 0, 0, 0)]
    monitor.flush()
    assert lines() == []


def test_a_line_before_the_first_report(monitor, lines):
    monitor.log_swa_divergence(divergence_of(*range(6)))
    monitor.observe(make_report(1), None)
    assert lines() == [line(0, *range(6))]


def test_a_violation_does_not_cost_the_line(monitor, lines):
    monitor.observe(make_report(2, [row(3)]), None)
    monitor.log_swa_divergence(divergence_of(*range(6)))
    with pytest.raises(kvc.CanaryViolationError):
        monitor.flush()
    assert lines() == [line(2, *range(6))]


def test_copies_start_at_once_and_are_read_later(monitor, lines):
    events = []
    watched = kvc.SwaDivergence(*(Watched(events, name, np.array([3], np.int32)) for name in NAMES))
    monitor.observe(make_report(1), None)
    monitor.log_swa_divergence(watched)
    assert events == [("copy", name) for name in NAMES]
    events.clear()
    monitor.observe(make_report(2), None)
    assert events == [("read", name) for name in NAMES]
    assert lines() == [line(1, *[3] * 6)]


def test_beside_a_step(lines):
    """A request of seventeen tokens on a pool of two groups; the table turns slots around."""
    pool = make_pool(PoolKind.FULL, PoolKind.SWA)
    canary, state = install(pool, stats_every_n_steps=8)
    assert canary.swa_tables == (("lut",),)
    monitor = kvc.CanaryMonitor(canary)
    statistics = jax.jit(canary.swa_divergence)
    for position in range(17):
        batch = decode(position)
        state, report, pool = step(canary, state, batch, pool)
        monitor.observe(report, state)
        if canary.stats_due(position + 1):
            monitor.log_swa_divergence(statistics(batch, pool))
    monitor.flush(state)
    assert lines() == [line(tokens, tokens, tokens, tokens - 1 - WINDOW, 0, 0, 0) for tokens in (8, 16)]


@pytest.mark.parametrize(
    ("bad", "error", "text"),
    [
        ({}, TypeError, "`divergence` is of type dict, but it must be a SwaDivergence, as Canary.swa_divergence returns it."),
        (
            kvc.SwaDivergence(*(jnp.ones((50, 1), jnp.int32),) * 6),
            ValueError,
            "`divergence.live_entries` has shape [50, 1], but one step of statistics needs shape [1].",
        ),
    ],
    ids=["type", "scan"],
)
def test_messages(bad, error, text):
    assert_message(kvc.CanaryMonitor(kvc.Canary(LOG, CAPACITIES)).log_swa_divergence, {"divergence": bad}, error, text)


def test_the_line_of_the_readme_has_the_keys_of_a_line():
    shown = re.search(r"```json\n(.*?)\n```", README.read_text(encoding="utf-8"), flags=re.DOTALL).group(1)
    assert list(json.loads(shown)) == list(line(0, *range(6)))
