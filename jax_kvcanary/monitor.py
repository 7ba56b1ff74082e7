"""The host's watch over the reports of a canary."""

from __future__ import annotations

import logging

import numpy as np

from jax_kvcanary._checks import check_type
from jax_kvcanary.buffers import CanaryState
from jax_kvcanary.canary import Canary
from jax_kvcanary.config import CanaryMode
from jax_kvcanary.constants import CanaryLaunchTag
from jax_kvcanary.report import CanaryReport
from jax_kvcanary.state import to_int64
from jax_kvcanary.violations import CanaryViolationError, Violation

logger = logging.getLogger("jax_kvcanary")


class CanaryMonitor:
    """Reads reports one step late, so that the device never waits for the host.

    ``observe`` starts the copy of the report it is given and handles the one before it; ``flush`` handles the last one. In mode
    LOG every row is logged once at WARNING; in mode RAISE a step with new rows raises :class:`CanaryViolationError`.
    """

    def __init__(self, canary: Canary) -> None:
        check_type(canary, "canary", Canary, ", as install_canary returns it")
        self._canary = canary
        self._pending: CanaryReport | None = None
        self._rows_seen = 0
        self._violations_seen = 0
        self._last_step = 0
        self._skips_seen = np.zeros(len(CanaryLaunchTag), np.int64)
        self._violations: list[Violation] = []

    @property
    def violations(self) -> tuple[Violation, ...]:
        """Every row handled so far."""
        return tuple(self._violations)

    def observe(self, report: CanaryReport, state: CanaryState) -> None:
        """Start copying this report to the host and handle the previous one.

        Args:
            report: what ``post_forward`` or ``sweep`` returned.
            state: the state that came with it; it is not read and may be donated afterwards.

        Raises:
            CanaryViolationError: in mode RAISE, when the previous report has rows that were not seen before. The monitor has
                taken this report by then and the state is sound, so that the caller may go on.
        """
        del state
        check_type(report, "report", CanaryReport)
        report.copy_to_host_async()
        previous, self._pending = self._pending, report
        if previous is not None:
            self._handle(previous)

    def flush(self, state: CanaryState | None = None) -> None:
        """Wait for the last report and handle it; does nothing when there is none.

        Raises:
            CanaryViolationError: as for :meth:`observe`.
        """
        del state
        previous, self._pending = self._pending, None
        if previous is not None:
            self._handle(previous)

    def _handle(self, report: CanaryReport) -> None:
        summary = report.on_host()
        # In every pass the tail of each group runs once to verify and once to write; a canary can lack one of the groups.
        runs = to_int64(summary["kernel_run_counters"])
        step = int(max(runs[CanaryLaunchTag.TAIL_K_FULL], runs[CanaryLaunchTag.TAIL_K_SWA]) // 2)
        earliest, self._last_step = min(self._last_step + 1, step), step
        self._warn_about_gaps(summary, step)

        total = int(summary["violation_write_index"][0])
        if total <= self._violations_seen:
            return
        rows = to_int64(report.violation_ring)[:total]
        new = [Violation.from_row(row, step=step, earliest_step=earliest) for row in rows[self._rows_seen :]]
        dropped = (total - self._violations_seen) - len(new)
        self._violations += new
        self._rows_seen, self._violations_seen = len(rows), total
        if self._canary.config.mode is CanaryMode.RAISE:
            raise CanaryViolationError(self._violations, total)
        for violation in new:
            logger.warning("%s", violation)
        if dropped:
            logger.warning(
                "kv_canary: the violation ring of %d rows is full; %d more violations were counted but not kept.", len(rows), dropped
            )

    def _warn_about_gaps(self, summary: dict[str, np.ndarray], step: int) -> None:
        """Say what was not checked: silence must never pass for health."""
        skips = summary["verify_skip_counters"].astype(np.int64)
        for tag in CanaryLaunchTag:
            if skips[tag] > self._skips_seen[tag]:
                logger.warning(
                    "kv_canary: %s skipped its verify %d times up to step %d, because the step had more entries than verify_capacity.",
                    tag.name,
                    skips[tag] - self._skips_seen[tag],
                    step,
                )
        self._skips_seen = skips
        invalid = int(summary["num_invalid_rows"][0])
        if invalid:
            logger.warning(
                "kv_canary: %d rows of the batch of step %d were invalid (request row, prefix or extend length out of range) and were "
                "not verified.",
                invalid,
                step,
            )
