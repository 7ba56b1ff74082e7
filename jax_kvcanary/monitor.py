"""The host's watch over the reports of a canary."""

from __future__ import annotations

import json
import logging
from typing import NamedTuple

import numpy as np

from jax_kvcanary._checks import check_shape, check_type
from jax_kvcanary.buffers import CanaryState
from jax_kvcanary.canary import Canary
from jax_kvcanary.config import CanaryMode
from jax_kvcanary.constants import CanaryLaunchTag
from jax_kvcanary.health import LaunchHealth, launch_tags
from jax_kvcanary.report import CanaryReport
from jax_kvcanary.state import forward_steps, to_int64
from jax_kvcanary.statistics import CanaryCounts, CanaryMetrics, statistics_line
from jax_kvcanary.swa_statistics import SwaDivergence
from jax_kvcanary.violations import CanaryViolationError, Violation, with_related_slots

logger = logging.getLogger("jax_kvcanary")


class _Observed(NamedTuple):
    """A report that was not handled yet, and the launches that its state calls for."""

    report: CanaryReport
    tags: frozenset[CanaryLaunchTag]


class CanaryMonitor:
    """Reads reports one step late, so that the device never waits for the host.

    ``observe`` starts the copy of the report it is given and handles the one before it; ``flush`` waits for the last one and handles it,
    in a loop that flushes after each step in its own step. In mode LOG every row is logged once at WARNING; in mode RAISE a step with
    new rows raises :class:`CanaryViolationError`.

    It also watches that the canary runs at all. Every 100 observed forwards after the first 100, a launch tag that should have run
    since the check before is an error: :class:`CanaryHealthError` in mode RAISE, a line at ERROR in mode LOG. HEAD and TAIL tags of
    each group of the state should run, and its SWEEP tags within ``config.sweep_interval`` steps, where that is set. A group that the
    state had at a check is expected from then on, so a canary installed anew takes a new monitor.

    Every ``config.stats_every_n_steps`` steps, where that is set, it logs one line of statistics at INFO.

    Args:
        canary: the canary.
        metrics: counters for Prometheus, which every report adds to.
    """

    def __init__(self, canary: Canary, metrics: CanaryMetrics | None = None) -> None:
        check_type(canary, "canary", Canary, ", as install_canary returns it")
        self._canary = canary
        self._pending: _Observed | None = None
        self._divergences: list[SwaDivergence] = []
        self._rows_seen = 0  # of the ring, since the log was reset last
        self._counts = self._at_last_line = CanaryCounts.none()
        self._metrics = metrics
        self._violations: list[Violation] = []
        self._health = LaunchHealth(canary.config.sweep_interval)

    @property
    def violations(self) -> tuple[Violation, ...]:
        """Every row handled so far."""
        return tuple(self._violations)

    def observe(self, report: CanaryReport, state: CanaryState | None) -> None:
        """Start copying this report to the host and handle the previous one.

        Args:
            report: what ``post_forward`` or ``sweep`` returned.
            state: the state that came with it: its groups say which launches should run. Its arrays are not read and may be donated
                already. None where it is not at hand; then no launches are added to those that should run.

        Raises:
            CanaryViolationError: in mode RAISE, when the previous report has rows that were not seen before. The monitor has
                taken this report by then and the state is sound, so that the caller may go on. A health error of the same report is
                its ``__cause__``.
            CanaryHealthError: in mode RAISE, when the previous report shows that launches stopped; the caller may go on as well.
        """
        check_type(report, "report", CanaryReport)
        tags: frozenset[CanaryLaunchTag] = frozenset()
        if state is not None:
            check_type(state, "state", CanaryState)
            tags = launch_tags(state.groups, sweeps=self._canary.config.sweep_interval > 0)
        report.copy_to_host_async()
        self._advance(_Observed(report, tags))

    def flush(self, state: CanaryState | None = None) -> None:
        """Wait for the last report and handle it; does nothing when there is none.

        Raises:
            CanaryViolationError, CanaryHealthError: as for :meth:`observe`.
        """
        del state
        self._advance(None)

    def log_swa_divergence(self, divergence: SwaDivergence) -> None:
        """Log the statistics of a step as one line of JSON at INFO, at the next ``observe`` or ``flush``.

        The line is written late for the sake of the device, as reports are read late. Its ``step`` is that of the report observed
        last before this call, 0 when there was none; its other keys are the fields of :class:`SwaDivergence`.

        Args:
            divergence: what :meth:`Canary.swa_divergence` returned, outside of any trace.

        Raises:
            TypeError: another type. ValueError: the stacked statistics of a scan.
        """
        check_type(divergence, "divergence", SwaDivergence, ", as Canary.swa_divergence returns it")
        for name, count in vars(divergence).items():
            check_shape(count, f"divergence.{name}", (1,), "one step of statistics")
        divergence.copy_to_host_async()
        self._divergences.append(divergence)

    def _advance(self, observed: _Observed | None) -> None:
        """Put what was observed now in the place of what is handled now."""
        previous, self._pending = self._pending, observed
        divergences, self._divergences = self._divergences, []
        try:
            if previous is not None:
                self._handle(previous)
        finally:
            for divergence in divergences:
                line = {"event": "kv_canary_swa_divergence", "step": self._counts.steps, **divergence.on_host()}
                logger.info("%s", json.dumps(line))

    def _handle(self, observed: _Observed) -> None:
        summary = observed.report.on_host()
        runs = to_int64(summary["kernel_run_counters"])
        before, self._counts = self._counts, self._counts.after(summary, forward_steps(runs))
        self._warn_about_gaps(before)
        self._write_statistics(before)

        # Everything is taken in before anything is raised. A corrupted cache comes first; launches that stopped may be its cause.
        unhealthy = self._health.take(runs, observed.tags)
        new, dropped = self._take_rows(observed.report, before)
        by_reason = self._counts.reasons_text() if dropped else ""
        if self._canary.config.mode is CanaryMode.RAISE:
            if new or dropped:
                raise CanaryViolationError(
                    self._violations,
                    self._counts.violations,
                    by_reason,
                    earlier=len(self._violations) - len(new),
                    earlier_total=before.violations,
                ) from unhealthy
            if unhealthy is not None:
                raise unhealthy
            return
        for violation in new:
            logger.warning("%s", violation)
        if dropped:
            logger.warning(
                "kv_canary: the violation ring of %d rows is full; %d more violations were counted but not kept. By launch tag and "
                "reason: %s.",
                self._rows_seen,
                dropped,
                by_reason,
            )
        if unhealthy is not None:
            logger.error("%s", unhealthy)

    def _take_rows(self, report: CanaryReport, before: CanaryCounts) -> tuple[list[Violation], int]:
        """The violations that were not seen before, and how many more of them found the ring full."""
        now = self._counts
        if now.resets != before.resets:
            self._rows_seen = 0
        if now.violations == before.violations:
            return [], 0
        step, earliest = now.steps, min(before.steps + 1, now.steps)
        rows = to_int64(report.violation_ring)[: now.in_log]
        request_rows = [None] * len(rows) if report.violation_request_rows is None else np.asarray(report.violation_request_rows)
        new = with_related_slots(
            [
                Violation.from_row(rows[i], step=step, earliest_step=earliest, request_row=request_rows[i], log_place=(now.reset_count, i))
                for i in range(self._rows_seen, len(rows))
            ]
        )
        self._violations += new
        self._rows_seen = len(rows)
        return new, now.violations - before.violations - len(new)

    def _write_statistics(self, before: CanaryCounts) -> None:
        """A line at the first report in which another N steps are full, and the metrics at each."""
        every, now = self._canary.config.stats_every_n_steps, self._counts
        if self._metrics is not None:
            self._metrics.add(now, before)
        if every and now.steps // every > before.steps // every:
            logger.info("%s", statistics_line(now, self._at_last_line))
            self._at_last_line = now

    def _warn_about_gaps(self, before: CanaryCounts) -> None:
        """Say what was not checked: silence must never pass for health."""
        now = self._counts
        for tag in CanaryLaunchTag:
            if now.skips[tag] > before.skips[tag]:
                logger.warning(
                    "kv_canary: %s skipped its verify %d times up to step %d, because the step had more entries than verify_capacity.",
                    tag.name,
                    now.skips[tag] - before.skips[tag],
                    now.steps,
                )
        if invalid := now.invalid_rows - before.invalid_rows:
            logger.warning(
                "kv_canary: %d rows of the batch of step %d were invalid (request row, prefix or extend length out of range) and were "
                "not verified.",
                invalid,
                now.steps,
            )
