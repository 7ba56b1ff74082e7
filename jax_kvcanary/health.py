"""Whether the launches of a canary keep running: one that stopped is as silent as a sound cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jax_kvcanary.buffers import CanaryBufferGroup
from jax_kvcanary.constants import NUM_LAUNCH_TAGS, CanaryLaunchTag

#: Steps before the counters are looked at for the first time.
WARM_UP_STEPS = 100

#: Steps from one check to the next.
CHECK_INTERVAL_STEPS = 100

_IS_SWEEP = np.array([tag.name.startswith("SWEEP") for tag in CanaryLaunchTag])


class CanaryHealthError(RuntimeError):
    """Launches of the canary stopped, so that its silence says nothing.

    Fields:
        tags: the launches that should have run and did not, in the order of their numbers.
        step: the check that found it, in observed forwards, counted from 1.
    """

    def __init__(self, last_ran: Mapping[CanaryLaunchTag, int], step: int, sweep_interval: int = 0) -> None:
        """``last_ran`` has, for each tag that is missing, the last check before which it still ran."""
        self.tags = tuple(sorted(last_ran))
        self.step = step
        self._made_of = (dict(last_ran), step, sweep_interval)
        names = ", ".join(f"{tag.name} (not since step {last_ran[tag]})" for tag in self.tags)
        causes = [
            "a state that pre_forward, post_forward or sweep returned was dropped",
            "the step was compiled without the canary",
            "the state lost a group",
        ]
        if _IS_SWEEP[list(self.tags)].any():
            causes.append(f"the loop does not sweep that group although `sweep_interval` is {sweep_interval}")
        super().__init__(
            f"kv_canary: by step {step} these launches should have run again and did not: {names}. "
            f"Usual causes: {', '.join(causes[:-1])}, or {causes[-1]}."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Made again from what it was made of where it goes to another process, not from its text."""
        return type(self), self._made_of


def launch_tags(groups: Iterable[CanaryBufferGroup], *, sweeps: bool) -> frozenset[CanaryLaunchTag]:
    """The launches of a loop with these groups; reads no array, since the buffers may be donated already."""
    phases = ("head", "tail", "sweep") if sweeps else ("head", "tail")
    return frozenset(group.launch_tag(phase, half) for group in groups for phase in phases for half in group.halves)


class LaunchHealth:
    """Compares the launch counters of two checks. Steps are observed forwards: numbers of the device may be what failed."""

    def __init__(self, sweep_interval: int) -> None:
        self._sweep_interval = sweep_interval
        self._step = 0
        self._latest = np.zeros(NUM_LAUNCH_TAGS, np.int64)
        self._at_last_check = self._latest
        # The tags that should run. A tag stays here, so that a group which the state loses is missed.
        self._last_ran: dict[CanaryLaunchTag, int] = {}

    def take(self, runs: np.ndarray, tags: Iterable[CanaryLaunchTag]) -> CanaryHealthError | None:
        """Take in the counters of the next report.

        Args:
            runs: int64 [12]; launches of each tag so far.
            tags: the launches that the report's state calls for.

        Returns:
            What is wrong, when a check is due and finds something.
        """
        gained, self._latest = runs > self._latest, runs
        if gained.any() and not gained[~_IS_SWEEP].any():
            return None  # the report of a sweep, which is no step
        self._step += 1
        if self._step < WARM_UP_STEPS or (self._step - WARM_UP_STEPS) % CHECK_INTERVAL_STEPS:
            return None
        for tag in self._last_ran:
            if runs[tag] != self._at_last_check[tag]:  # fewer: a fresh state, which counts from 0 again
                self._last_ran[tag] = self._step
        self._at_last_check = runs
        missing = {tag: last for tag, last in self._last_ran.items() if self._step - last >= self._patience(tag)}
        for tag in tags:  # judged from the next check on
            self._last_ran.setdefault(tag, self._step)
        return CanaryHealthError(missing, self._step, self._sweep_interval) if missing else None

    def _patience(self, tag: CanaryLaunchTag) -> int:
        """Steps without a launch that are too many, seen at checks: sweeps at their interval leave no such gap."""
        return max(CHECK_INTERVAL_STEPS, self._sweep_interval) if _IS_SWEEP[tag] else CHECK_INTERVAL_STEPS
