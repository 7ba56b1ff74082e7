"""Rows of the GPU benchmark: a measured figure beside the one that it is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

HEADER = ("work", "mode", "measured", "reference", "", "ratio", "", "limit", "")


@dataclass(frozen=True)
class Row:
    """One comparison.

    Fields:
        work: what was measured.
        mode: how much of the real KV is hashed, as RealKvHashMode names it, or a dash.
        measured: the figure, in ``unit``.
        reference: what it is compared with.
        reference_value: the figure of that, in ``unit``.
        ratio: the first over the second; of times taken in turn the median of the turns' ratios, which need not be that of the figures.
        limit: the most that the ratio may be; None where there is no limit.
        unit: microseconds, or what else the figures count.
        spread: median absolute deviation of the turns' ratios; None of a ratio that was taken once.
    """

    work: str
    mode: str
    measured: float
    reference: str
    reference_value: float
    ratio: float
    limit: float | None
    unit: str = "µs"
    spread: float | None = None

    def verdict(self) -> str:
        """Ok or over, or nothing where there is no limit."""
        if self.limit is None:
            return ""
        return "ok" if self.ratio <= self.limit else "over"


def compare(work: str, mode: str, measured_us: float, reference: str, reference_us: float, limit: float | None = None) -> Row:
    """A row of two times in microseconds, whose ratio is theirs."""
    return Row(work, mode, measured_us, reference, reference_us, measured_us / reference_us, limit)


def allow(work: str, mode: str, measured: float, allowed: float, unit: str = "µs") -> Row:
    """A row of a figure beside the largest one that is all right."""
    return Row(work, mode, measured, "allowed", allowed, measured / allowed, 1.0, unit)


def text(rows: Sequence[Row]) -> str:
    """A table, numbers to the right."""
    lines = [HEADER, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    right = {2, 4, 5, 6, 7}
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _cells(row: Row) -> tuple[str, ...]:
    # Four digits of a ratio: some limits are a few parts in a thousand.
    return (
        row.work,
        row.mode,
        _figure(row.measured, row.unit),
        row.reference,
        _figure(row.reference_value, row.unit),
        f"{row.ratio:.4f}",
        "" if row.spread is None else f"±{row.spread:.4f}",
        "" if row.limit is None else f"{row.limit:.4f}",
        row.verdict(),
    )


def _figure(value: float, unit: str) -> str:
    """Counts as they are, measured figures with one digit behind the point."""
    return f"{value:,} {unit}" if isinstance(value, int) else f"{value:,.1f} {unit}"
