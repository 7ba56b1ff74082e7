"""What a canary did, counted: a line for the log every N steps, and counters for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_kvcanary.constants import FAIL_REASON_COLUMNS, NUM_LAUNCH_TAGS, CanaryLaunchTag, FailReason
from jax_kvcanary.explain import reason_text
from jax_kvcanary.state import to_int64

_SWEEPS = [tag for tag in CanaryLaunchTag if tag.name.startswith("SWEEP_K")]
_TAILS = [tag for tag in CanaryLaunchTag if tag.name.startswith("TAIL_K")]


@dataclass(frozen=True)
class CanaryCounts:
    """Everything that a canary counts, at one moment or between two.

    Fields:
        steps: forward passes.
        launches: int64 [12]; verify and write launches of each tag.
        records: int64 [12]; records verified and written by each tag.
        reasons: int64 [12, 8]; violations of each tag that had each bit of :class:`FailReason`.
        skips: int64 [12]; verify launches that a plan overflow switched off.
        violations: findings, those that found the ring full included.
        invalid_rows: rows of batches that made no sense.
        in_log: findings since the log was reset last.
        reset_count: what the log's own count of that says.
        resets: how often it was seen to be reset.
    """

    steps: int
    launches: np.ndarray
    records: np.ndarray
    reasons: np.ndarray
    skips: np.ndarray
    violations: int
    invalid_rows: int
    in_log: int
    reset_count: int
    resets: int

    @classmethod
    def none(cls) -> CanaryCounts:
        """All zero."""
        tags = np.zeros(NUM_LAUNCH_TAGS, np.int64)
        return cls(0, tags, tags, np.zeros((NUM_LAUNCH_TAGS, FAIL_REASON_COLUMNS), np.int64), tags, 0, 0, 0, 0, 0)

    def after(self, summary: Mapping[str, np.ndarray], step: int) -> CanaryCounts:
        """The counts once a report's summary was seen, whose forward pass is the one numbered ``step``.

        32-bit counters of the device may have wrapped since, and the log may have been reset.
        """
        in_log, reset_count = int(summary["violation_write_index"][0]), int(summary["reset_count"][0])
        # A log that does not count its resets shows them by being shorter.
        was_reset = reset_count != self.reset_count or in_log < self.in_log

        def grown(before: np.ndarray, counter: np.ndarray) -> np.ndarray:
            return before + (counter.astype(np.int64) - before) % 2**32

        return CanaryCounts(
            steps=step,
            launches=to_int64(summary["kernel_run_counters"]),
            records=to_int64(summary["slot_run_counters"]),
            reasons=grown(self.reasons, summary["fail_reason_counters"]),
            skips=grown(self.skips, summary["verify_skip_counters"]),
            violations=self.violations + in_log - (0 if was_reset else self.in_log),
            invalid_rows=self.invalid_rows + int(summary["num_invalid_rows"][0]),
            in_log=in_log,
            reset_count=reset_count,
            resets=self.resets + was_reset,
        )

    @property
    def tokens_protected(self) -> int:
        """Tokens checked or stamped with their real KV: the records of the TAIL launches of K."""
        return int(self.records[_TAILS].sum())

    @property
    def sweeps(self) -> int:
        """Sweeps over the largest number of any group."""
        return int(self.launches[_SWEEPS].max())

    def reasons_text(self) -> str:
        """Each tag and reason that was found with its count, such as ``TAIL_K_FULL verify_position 3``."""
        return ", ".join(
            f"{CanaryLaunchTag(tag).name} {reason_text(FailReason(1 << int(bit)))} {self.reasons[tag, bit]}"
            for tag, bit in np.argwhere(self.reasons)
        )


def statistics_line(now: CanaryCounts, before: CanaryCounts) -> str:
    """One line: what was counted so far and, in brackets, since ``before``."""
    numbers = {
        "steps": (now.steps, before.steps),
        "tokens_protected": (now.tokens_protected, before.tokens_protected),
        "sweeps": (now.sweeps, before.sweeps),
        "violations": (now.violations, before.violations),
        "skipped_verifies": (int(now.skips.sum()), int(before.skips.sum())),
        "invalid_rows": (now.invalid_rows, before.invalid_rows),
    }
    text = " ".join(f"{name}={total} (+{total - earlier})" for name, (total, earlier) in numbers.items())
    active = ",".join(tag.name for tag in CanaryLaunchTag if now.launches[tag] > before.launches[tag])
    return f"kv_canary statistics: {text} active_tags={active or 'none'}"


class CanaryMetrics:
    """Counters for Prometheus, to be given to a :class:`CanaryMonitor`. Needs the package prometheus-client (extra ``metrics``).

    ``kv_canary_steps_total``, ``kv_canary_violations_total`` and ``kv_canary_invalid_rows_total`` have no labels;
    ``kv_canary_launches_total``, ``kv_canary_records_total`` and ``kv_canary_skipped_verifies_total`` have the label ``tag``;
    ``kv_canary_findings_total`` has the labels ``tag`` and ``reason``.

    Args:
        registry: a ``prometheus_client.CollectorRegistry``; None is the global one.

    Raises:
        ModuleNotFoundError: prometheus-client is not installed. ValueError: the registry has such counters already.
    """

    def __init__(self, registry: Any = None) -> None:
        try:
            import prometheus_client
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "CanaryMetrics needs the package prometheus-client; install it with `pip install 'jax-kvcanary[metrics]'`."
            ) from error
        registry = prometheus_client.REGISTRY if registry is None else registry

        def counter(name: str, text: str, *labels: str) -> Any:
            return prometheus_client.Counter(f"kv_canary_{name}", text, labels, registry=registry)

        self._steps = counter("steps", "Forward passes.")
        self._violations = counter("violations", "Findings, those that found the ring full included.")
        self._invalid_rows = counter("invalid_rows", "Rows of batches that made no sense and were not verified.")
        self._launches = counter("launches", "Verify and write launches.", "tag")
        self._records = counter("records", "Records verified and written.", "tag")
        self._skips = counter("skipped_verifies", "Verify launches that a plan overflow switched off.", "tag")
        self._findings = counter("findings", "Findings by reason; one may have several.", "tag", "reason")

    def add(self, now: CanaryCounts, before: CanaryCounts) -> None:
        """Count what happened between two moments."""
        self._steps.inc(max(now.steps - before.steps, 0))  # a fresh state counts from 0 again
        self._violations.inc(now.violations - before.violations)
        self._invalid_rows.inc(now.invalid_rows - before.invalid_rows)
        for tag in CanaryLaunchTag:
            for counter, values in ((self._launches, "launches"), (self._records, "records"), (self._skips, "skips")):
                if (grown := int(getattr(now, values)[tag] - getattr(before, values)[tag])) > 0:
                    counter.labels(tag.name).inc(grown)
        for tag, bit in np.argwhere(now.reasons > before.reasons):
            reason = reason_text(FailReason(1 << int(bit)))
            self._findings.labels(CanaryLaunchTag(tag).name, reason).inc(int(now.reasons[tag, bit] - before.reasons[tag, bit]))
