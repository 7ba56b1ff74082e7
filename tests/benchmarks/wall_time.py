"""Wall times of steps of several kinds, taken in turn, so that a drift of the clock or of the load hits all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class WallTimes:
    """Wall times of one step of each kind.

    Fields:
        us: microseconds by kind, one a round; those of one round were taken one after the other.
    """

    us: Mapping[str, tuple[float, ...]]

    def median(self, kind: str) -> float:
        """Of a kind's rounds, in microseconds."""
        return statistics.median(self.us[kind])

    def ratio(self, kind: str, to: str) -> tuple[float, float]:
        """How many times as long as another kind this one takes: the median over rounds, and the median absolute deviation from it.

        The ratio is taken within each round, so that what changes from round to round cancels out.
        """
        ratios = [one / other for one, other in zip(self.us[kind], self.us[to], strict=True)]
        median = statistics.median(ratios)
        return median, statistics.median([abs(ratio - median) for ratio in ratios])


def wall_times(calls: Mapping[str, Callable[[], Any]], *, rounds: int, steps: int) -> WallTimes:
    """Run all kinds in turn.

    Args:
        calls: by kind; each runs one step and returns arrays to wait for.
        rounds: how often each kind's turn is measured, best an even number; one more round comes before them.
        steps: steps in a turn, with nothing but its last one waited for.
    """
    times: dict[str, list[float]] = {kind: [] for kind in calls}
    order = list(calls)
    for number in range(rounds + 1):
        for kind in order:
            start = time.perf_counter()
            for _ in range(steps):
                out = calls[kind]()
            jax.block_until_ready(out)
            if number:
                times[kind].append((time.perf_counter() - start) / steps * 1e6)
        order.reverse()  # whoever comes first in one round comes last in the next
    return WallTimes({kind: tuple(values) for kind, values in times.items()})
