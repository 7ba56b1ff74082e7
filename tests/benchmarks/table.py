"""A row of the benchmarks' table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One measurement beside what it is compared with.

    Fields:
        work: what was run.
        mode: real-KV hash mode, or "-".
        measured_us: time of it in microseconds.
        reference: what it is compared with, such as "baseline" or "step without canary".
        reference_us: time of that in microseconds.
        ratio: measured over reference.
        limit: largest ratio that is all right; None where there is no such limit.
    """

    work: str
    mode: str
    measured_us: float
    reference: str
    reference_us: float
    ratio: float
    limit: float | None
