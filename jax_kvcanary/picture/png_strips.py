"""The strips of the PNG: the broken request, position by position, and the request whose record stands in its slot."""

from __future__ import annotations

from typing import Any

from matplotlib.patches import FancyBboxPatch

from jax_kvcanary.constants import FailReason
from jax_kvcanary.picture.incident import Incident
from jax_kvcanary.picture.strips import RADIUS, Cell, Strip
from jax_kvcanary.picture.style import BROKEN, INK, MUTED, OTHER, VICTIM, mix
from jax_kvcanary.picture.words import capital, short

#: Inches of one strip.
STRIP_HEIGHT = 2.05

_BOX = 0.86  # of the way from one position to the next
_TOP, _BOTTOM, _LINE = 0.19, 0.79, 0.108  # of the height


def draw_strips(incident: Incident, axes: Any) -> None:
    """Draw the strips of an incident below each other, the finding's slot in one column."""
    axes.axis("off")
    axes.set_xticks([])
    axes.set_yticks([])
    strips = incident.strips
    axes.set_xlim(-RADIUS - 0.5, RADIUS + 0.5)
    axes.set_ylim(len(strips), 0)
    for i, strip in enumerate(strips):
        colour = OTHER if i else VICTIM
        align = strip.focus if len(strips) > 1 else RADIUS  # one below the other, or from the left
        _draw_strip(axes, strip, float(i), align, colour, is_other=bool(i))
    if len(strips) > 1:
        style = {"color": BROKEN, "linewidth": 2.2, "linestyle": (0, (2, 1.2)), "zorder": 1, "gid": "same slot"}
        axes.plot([0, 0], [_BOTTOM, 1 + _TOP], **style)


def _draw_strip(axes: Any, strip: Strip, top: float, align: int, colour: str, *, is_other: bool) -> None:
    name = capital(strip.request.name)
    slot = strip.cells[strip.focus].slot
    what = f"{name}: the request whose record is in slot {slot}" if is_other else f"{name}: position by position around the finding"
    left = -RADIUS - 0.5
    axes.plot([left + 0.03], [top + 0.06], marker="s", markersize=9, color=colour)
    axes.text(left + 0.12, top + 0.06, what, size=11, weight="bold", color=INK, va="center", gid="strip title")
    for i, cell in enumerate(strip.cells):
        x = float(i - align)
        _draw_box(axes, cell, x, top, colour, is_focus=i == strip.focus, is_other=is_other)
        _draw_link(axes, cell, x, top, is_start=cell.position == 0)


def _draw_box(axes: Any, cell: Cell, x: float, top: float, colour: str, *, is_focus: bool, is_other: bool) -> None:
    wrong = bool(cell.reasons)
    edge = BROKEN if wrong or (is_focus and is_other) else colour
    face = mix(BROKEN, 0.12) if wrong else mix(colour, 0.16)
    box = FancyBboxPatch(
        (x - _BOX / 2, top + _TOP),
        _BOX,
        _BOTTOM - _TOP,
        boxstyle="round,pad=0,rounding_size=0.05",
        mutation_aspect=0.6,
        facecolor=face,
        edgecolor=edge,
        linewidth=2.6 if is_focus else 1.4,
        zorder=2,
        gid="wrong cell" if wrong else "cell",
    )
    axes.add_patch(box)
    lines = _lines(cell)
    for i, (text, is_wrong) in enumerate(lines):
        y = top + (_TOP + _BOTTOM) / 2 + _LINE * (i - (len(lines) - 1) / 2)
        style = {"weight": "bold" if i == 0 or is_wrong else "normal", "color": BROKEN if is_wrong else INK}
        axes.text(x, y, text, ha="center", va="center", size=9, zorder=3, gid="cell text", **style)
    if wrong:
        below: dict[str, Any] = {"size": 9, "weight": "bold", "color": BROKEN, "ha": "center", "va": "center", "gid": "cell reasons"}
        background = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        axes.text(x, top + _BOTTOM + 0.07, short(cell.reasons), zorder=5, bbox=background, **below)


def _lines(cell: Cell) -> list[tuple[str, bool]]:
    """The texts of a box, and whether each says what is wrong."""
    place = "position ?" if cell.position is None else f"position {cell.position}"
    lines = [(place, False), (f"slot {cell.slot}", FailReason.SLOT_OUT_OF_RANGE in cell.reasons)]
    if cell.stored_position is None:
        return [*lines, ("empty" if FailReason.SLOT_OUT_OF_RANGE not in cell.reasons else "no such slot", True), *_expected(cell)]
    token_wrong = cell.expected_token not in (None, cell.stored_token)
    if cell.position is not None and cell.stored_position != cell.position:
        lines.append((f"holds position {cell.stored_position}", True))
    lines.append((f"token {cell.stored_token}", token_wrong))
    return [*lines, *(_expected(cell) if token_wrong else [])]


def _expected(cell: Cell) -> list[tuple[str, bool]]:
    return [] if cell.expected_token is None else [(f"token due {cell.expected_token}", True)]


def _draw_link(axes: Any, cell: Cell, x: float, top: float, *, is_start: bool) -> None:
    """The link to the slot before: whole, broken, or unknown."""
    left, right, y = x - 1 + _BOX / 2, x - _BOX / 2, top + (_TOP + _BOTTOM) / 2
    if is_start:
        return
    if cell.follows is None:
        axes.plot([left, right], [y, y], color=MUTED, linewidth=1.5, linestyle=":", zorder=1, gid="link unknown")
    elif cell.follows:
        axes.plot([left, right], [y, y], color=INK, linewidth=2.4, zorder=1, gid="link whole")
    else:
        axes.plot([(left + right) / 2], [y], marker="x", color=BROKEN, markersize=10, markeredgewidth=3, zorder=4, gid="link broken")
