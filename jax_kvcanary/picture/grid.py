"""Slots in a grid of cells. A large pool has several slots in a cell, and what matters of them takes the whole cell."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Grid:
    """Cells in rows, from left to right; each has the next ``slots_per_cell`` slots.

    Fields:
        num_slots: slots of the pool.
        columns: cells of a row.
        slots_per_cell: a power of two.
    """

    num_slots: int
    columns: int
    slots_per_cell: int

    @classmethod
    def fitting(cls, num_slots: int, columns: int, rows: int) -> Grid:
        """The grid of so many columns with as few slots in a cell as so many rows allow."""
        slots_per_cell = 1
        while slots_per_cell * columns * rows < num_slots:
            slots_per_cell *= 2
        return cls(num_slots, columns, slots_per_cell)

    @property
    def cells(self) -> int:
        """Cells that have slots."""
        return -(-self.num_slots // self.slots_per_cell)

    @property
    def rows(self) -> int:
        """Rows, the last one perhaps not full."""
        return -(-self.cells // self.columns)

    def cell(self, slots: np.ndarray) -> np.ndarray:
        """The cell of each slot."""
        return slots // self.slots_per_cell

    def most(self, values: np.ndarray) -> np.ndarray:
        """The largest value of each cell's slots: [cells] of [num_slots]."""
        return np.maximum.reduceat(values, self._starts())

    def sum(self, values: np.ndarray) -> np.ndarray:
        """The sum over each cell's slots: [cells, ...] of [num_slots, ...]."""
        return np.add.reduceat(values, self._starts(), axis=0)

    def sizes(self) -> np.ndarray:
        """Slots of each cell."""
        return np.diff(np.append(self._starts(), self.num_slots))

    def in_rows(self, cells: np.ndarray, fill: float) -> np.ndarray:
        """Values of cells [cells, ...] as [rows, columns, ...], the places without slots filled."""
        full = np.full((self.rows * self.columns, *cells.shape[1:]), fill, cells.dtype)
        full[: self.cells] = cells
        return full.reshape(self.rows, self.columns, *cells.shape[1:])

    def _starts(self) -> np.ndarray:
        return np.arange(0, self.num_slots, self.slots_per_cell)
