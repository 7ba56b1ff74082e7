"""Rows of the GPU benchmark: a measured time beside the time that it is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

HEADER = ("work", "mode", "measured", "reference", "", "ratio", "limit", "")


@dataclass(frozen=True)
class Row:
    """One comparison: measured_us and reference_us in microseconds, ratio the first over the second, limit the most it may be."""

    work: str
    mode: str
    measured_us: float
    reference: str
    reference_us: float
    ratio: float
    limit: float | None

    def verdict(self) -> str:
        """Ok or over, or nothing where there is no limit."""
        if self.limit is None:
            return ""
        return "ok" if self.ratio <= self.limit else "over"


def compare(work: str, mode: str, measured_us: float, reference: str, reference_us: float, limit: float | None = None) -> Row:
    """A row whose ratio is that of its two times."""
    return Row(work, mode, measured_us, reference, reference_us, measured_us / reference_us, limit)


def text(rows: Sequence[Row]) -> str:
    """A table, numbers to the right."""
    lines = [HEADER, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    right = {2, 4, 5, 6}
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _cells(row: Row) -> tuple[str, ...]:
    limit = "" if row.limit is None else f"{row.limit:.3f}"
    return (
        row.work,
        row.mode,
        f"{row.measured_us:,.1f} µs",
        row.reference,
        f"{row.reference_us:,.1f} µs",
        f"{row.ratio:.3f}",
        limit,
        row.verdict(),
    )
