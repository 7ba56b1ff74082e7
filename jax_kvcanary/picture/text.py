"""The picture as text, with rich."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_kvcanary.constants import FailReason
from jax_kvcanary.picture.grid import Grid
from jax_kvcanary.picture.incident import FINDING_KINDS, FindingKind, Incident, SlotState
from jax_kvcanary.picture.strips import Cell, Strip
from jax_kvcanary.picture.words import capital, counted, joined, number, short

#: Columns that a text needs at least.
MIN_WIDTH = 80

_MAP_ROWS, _EVENT_LINES, _SLOTS_SHOWN = 16, 16, 4

# What the map writes for each state, and its colour; slots of a request by how far they are in it.
_SIGNS = {
    SlotState.EMPTY: "·",
    SlotState.PADDING: "0",
    SlotState.IDLE: "-",
    SlotState.REQUEST: "░▒▓█",
    SlotState.HOLE: "?",
    SlotState.OTHER: "B",
    SlotState.VICTIM: "A",
}
_STYLES = {
    SlotState.EMPTY: "bright_black",
    SlotState.PADDING: "bright_black",
    SlotState.IDLE: "bright_black",
    SlotState.HOLE: "bold yellow",
    SlotState.OTHER: "yellow",
    SlotState.VICTIM: "bold bright_blue",
}
_HUES = ("green", "cyan", "magenta", "white")
_FOUND, _FOUND_STYLE = "X", "bold white on red"


def print_incident(incident: Incident, console: Any) -> None:
    """Print an incident.

    Args:
        incident: what to show.
        console: a ``rich.console.Console``; its width is kept, and its colours are those that it has.
    """
    from rich.text import Text

    width = max(console.width, MIN_WIDTH)

    def say(lines: Sequence[str], style: str = "") -> None:
        for line in lines:
            console.print(Text(line, style))

    say(textwrap.wrap(incident.title, width), "bold")
    say(joined(incident.facts, " | ", width), "bright_black")
    console.print()
    _print_map(incident, console, width)
    for strip in incident.strips:
        console.print()
        _print_strip(strip, console)
    if incident.events:
        console.print()
        _print_events(incident, console)
    console.print()
    for note in incident.notes:
        say(textwrap.wrap(note, width))


def _print_map(incident: Incident, console: Any, width: int) -> None:
    from rich.text import Text

    num_slots = incident.pool.num_slots
    margin = len(number(num_slots)) + 2
    columns = 1 << (width - margin).bit_length() - 1
    while columns > 16 and num_slots <= columns // 2:
        columns //= 2
    grid = Grid.fitting(num_slots, columns, _MAP_ROWS)
    each = "one slot each" if grid.slots_per_cell == 1 else f"{number(grid.slots_per_cell)} slots each"
    console.print(Text(f"Slot map, {each}", "bold"))
    signs, styles = _cells(incident, grid)
    for row in range(grid.rows):
        first = row * columns
        line = Text(f"{number(first * grid.slots_per_cell):>{margin - 2}}  ")
        for i in range(first, min(first + columns, grid.cells)):
            line.append(signs[i], styles[i])
        console.print(line)
    for sign, style, text in _legend(incident, grid):
        for i, line in enumerate(textwrap.wrap(text, width - margin - 5)):
            console.print(Text(" " * margin).append(f"{'' if i else sign:<5}", style).append(line))


def _cells(incident: Incident, grid: Grid) -> tuple[list[str], list[str]]:
    """Sign and style of each cell: a finding takes it, then the requests of the finding, then what most of its written slots are."""
    state = incident.state
    found = np.zeros(incident.pool.num_slots, bool)
    found[incident.marked] = True
    found_cells = grid.most(found)
    top = grid.most(np.where(state >= SlotState.HOLE, state, 0))
    counts = np.stack([grid.sum((state == own).astype(np.int64)) for own in SlotState], axis=1)
    usual = np.where(counts[:, SlotState.REQUEST] > 0, SlotState.REQUEST, counts.argmax(axis=1))
    usual = np.where((counts[:, SlotState.REQUEST] == 0) & (counts[:, SlotState.IDLE] > 0), SlotState.IDLE, usual)
    own = np.where(top > 0, top, usual)
    hues = np.stack(
        [grid.sum(((state == SlotState.REQUEST) & (incident.hue == hue)).astype(np.int64)) for hue in range(len(_HUES))], axis=1
    )
    shade = _shades(incident, grid, counts[:, SlotState.REQUEST])
    signs, styles = [], []
    for i in range(grid.cells):
        if found_cells[i]:
            sign, style = _FOUND, _FOUND_STYLE
        elif own[i] == SlotState.REQUEST:
            sign, style = _SIGNS[SlotState.REQUEST][shade[i]], _HUES[hues[i].argmax()]
        else:
            sign, style = _SIGNS[SlotState(own[i])], _STYLES[SlotState(own[i])]
        signs.append(sign)
        styles.append(style)
    return signs, styles


def _shades(incident: Incident, grid: Grid, requests: np.ndarray) -> np.ndarray:
    """A quarter for each cell: of the pool's last position where a cell is a slot, of the cell's slots where it has several."""
    quarters = incident.age * 4 if grid.slots_per_cell == 1 else (requests - 1) * 4 / grid.sizes()
    return np.clip(quarters, 0, 3).astype(np.int64)


def _legend(incident: Incident, grid: Grid) -> list[tuple[str, str, str]]:
    lines = []
    for kind in FindingKind:
        count = int((incident.marked_kind == kind).sum())
        if count:
            lines.append((_FOUND, _FOUND_STYLE, f"finding, {FINDING_KINDS[kind][1]}: {counted(count, 'slot')}"))
    if incident.off_map:
        lines.append(("", "", f"{counted(incident.off_map, 'finding')} with a slot that does not exist"))
    for own, text in incident.legend:
        if own is SlotState.REQUEST:
            what = "from first to last position" if grid.slots_per_cell == 1 else "from few to all slots of a cell"
            text = f"{text}, {what}"
        lines.append((_SIGNS[own], _STYLES.get(own, ""), text))
    return lines


def _print_strip(strip: Strip, console: Any) -> None:
    slot = strip.cells[strip.focus].slot
    styles = ["bold red" if cell.reasons else "bold" if i == strip.focus else "" for i, cell in enumerate(strip.cells)]
    _print_table(
        console, f"{capital(strip.request.name)} around slot {slot}", STRIP_HEADER, [cell_texts(cell) for cell in strip.cells], styles
    )


#: What :func:`cell_texts` has of a cell.
STRIP_HEADER = ("position", "slot", "holds", "token", "expected", "follows", "wrong")


def cell_texts(cell: Cell) -> tuple[str, ...]:
    """A cell in words: position, slot, stored position, stored token, expected token, whether it follows, and what was found."""
    return (
        "?" if cell.position is None else str(cell.position),
        str(cell.slot),
        "empty" if cell.stored_position is None else str(cell.stored_position),
        "-" if cell.stored_token is None else str(cell.stored_token),
        "-" if cell.expected_token is None else str(cell.expected_token),
        "?" if cell.follows is None else "yes" if cell.follows else "NO",
        short(cell.reasons),
    )


def _print_events(incident: Incident, console: Any) -> None:
    shown = _shown_events(incident)
    rows = []
    for i in sorted(shown):
        event = incident.events[i]
        slots = list(dict.fromkeys(event.slots.tolist()))
        more = len(slots) - _SLOTS_SHOWN
        names = " ".join(map(str, slots[:_SLOTS_SHOWN])) + (f" +{number(more)}" if more > 0 else "")
        when = event.row if event.step is None else event.step
        rows.append((str(when), number(len(event.slots)), event.tag.name, short(event.reasons), names))
    title = "Timeline" if incident.has_steps else "Timeline, in the order of the log: the dump has no steps"
    _print_table(console, title, ("step" if incident.has_steps else "row", "findings", "launch", "wrong", "slots"), rows, [""] * len(rows))
    left = len(incident.events) - len(shown)
    if left:
        console.print(f"and {counted(left, 'more line')} like these")


def _print_table(console: Any, title: str, header: Sequence[str], rows: Sequence[Sequence[str]], styles: Sequence[str]) -> None:
    """Columns of text, numbers to the right, each as wide as it must be."""
    from rich.text import Text

    console.print(Text(title, "bold"))
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    numeric = [all(text[-1:].isdecimal() or text in _NO_NUMBERS for text in column) for column in zip(*rows, strict=True)]
    for row, style in zip((header, *rows), ("bright_black", *styles), strict=True):
        aligned = [t.rjust(w) if right else t.ljust(w) for t, w, right in zip(row, widths, numeric, strict=True)]
        console.print(Text("  ".join(aligned).rstrip(), style, overflow="fold"))


_NO_NUMBERS = ("?", "-", "empty")


def _shown_events(incident: Incident) -> set[int]:
    """The first events, and the first one of every launch tag and reasons: a flood of one kind hides no other."""
    first: dict[tuple[int, FailReason], int] = {}
    for i, event in enumerate(incident.events):
        first.setdefault((event.tag, event.reasons), i)
    shown = set(first.values())
    for i in range(len(incident.events)):
        if len(shown) >= _EVENT_LINES:
            break
        shown.add(i)
    return shown
