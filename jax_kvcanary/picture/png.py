"""The picture as a PNG, with matplotlib. Nothing here touches pyplot, so that a program's own figures and backend stay as they are."""

from __future__ import annotations

import os
import textwrap
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from jax_kvcanary.picture.grid import Grid
from jax_kvcanary.picture.incident import FINDING_KINDS, HUES, Counter, FindingKind, Incident, SlotState
from jax_kvcanary.picture.png_strips import STRIP_HEIGHT, draw_strips
from jax_kvcanary.picture.style import BROKEN, INK, KIND_COLOURS, KIND_MARKERS, MUTED, OTHER, VICTIM, mix
from jax_kvcanary.picture.words import counted, joined, number, short

_WIDTH, _DPI = 14.0, 150
_LEFT, _RIGHT, _SIDE = 0.75, 0.35, 3.75  # margins, and the width of the column on the right, in inches
_MAP_HEIGHT, _LANE_HEIGHT, _GAP = 4.5, 0.24, 0.62
_NAMES = 0.95  # for the lanes' names
_TIMELINE_WIDTH = _WIDTH - _LEFT - _RIGHT - _SIDE - _NAMES
_COUNTS = 1 + 0.25 / _TIMELINE_WIDTH
_MAX_COLUMNS, _MAX_TIMES = 128, 200

_COLOURS = {
    SlotState.EMPTY: "#eef0f2",
    SlotState.PADDING: "#4d4d4d",
    SlotState.IDLE: "#c3c8ce",
    SlotState.HOLE: "#f0e442",
    SlotState.OTHER: OTHER,
    SlotState.VICTIM: VICTIM,
}
# Hues of requests that the finding is not about. They only tell neighbours apart, so they may fade.
_HUES = ("#009e73", "#b07aa1", "#8f7a5c", "#5f7fae")


def save(incident: Incident, path: str | os.PathLike[str]) -> None:
    """Write the picture of an incident as a PNG, 2100 pixels wide."""
    draw(incident).savefig(path, format="png", dpi=_DPI)


def draw(incident: Incident) -> Figure:
    """The picture of an incident as a matplotlib figure."""
    headline, tally = textwrap.wrap(incident.headline, 92), textwrap.wrap(incident.tally, 110)
    facts = joined(incident.facts, "   ·   ", 190)
    notes = [line for note in incident.notes for line in textwrap.wrap(note, 190)]
    lanes = max(len(incident.counters), 1)
    title_height, facts_height = 0.36 * len(headline) + 0.3 * len(tally) + 0.06, 0.2 * len(facts)
    strips_height = (STRIP_HEIGHT * len(incident.strips) + 0.45) if incident.strips else 0.0
    timeline_height = 0.35 + (_LANE_HEIGHT + 0.16 * max(len(set(incident.kinds.tolist())) - 1, 0)) * lanes
    notes_height = 0.2 * len(notes)
    height = 0.35 + title_height + facts_height + 0.45 + _MAP_HEIGHT + _GAP + strips_height + timeline_height + _GAP + notes_height + 0.35

    figure = Figure(figsize=(_WIDTH, height), facecolor="white")
    FigureCanvasAgg(figure)
    page = _Page(figure, height)
    broken = incident.finding is not None
    page.text("\n".join(headline), 0.36 * len(headline), size=17, weight="bold", color=BROKEN if broken else INK, gid="headline")
    page.text("\n".join(tally), 0.3 * len(tally) + 0.06, size=14, color=INK, gid="tally")
    page.text("\n".join(facts), facts_height + 0.45, size=10, color=MUTED, gid="facts")
    map_width = _WIDTH - _LEFT - _RIGHT - _SIDE
    _draw_map(incident, page.axes("map", map_width, _MAP_HEIGHT))
    _draw_legend(incident, page.axes("legend", _SIDE - 0.25, _MAP_HEIGHT, left=_WIDTH - _RIGHT - _SIDE + 0.25))
    page.move(_MAP_HEIGHT + _GAP)
    if incident.strips:
        draw_strips(incident, page.axes("strips", _WIDTH - _LEFT - _RIGHT, strips_height - 0.45))
        page.move(strips_height)
    _draw_timeline(incident, page.axes("timeline", _TIMELINE_WIDTH, timeline_height, left=_LEFT + _NAMES))
    page.move(timeline_height + _GAP)
    page.text("\n".join(notes), notes_height, size=9, color=MUTED, gid="notes")
    return figure


class _Page:
    """A figure filled from top to bottom, in inches."""

    def __init__(self, figure: Figure, height: float) -> None:
        self._figure, self._height, self._top = figure, height, 0.35

    def text(self, text: str, height: float, **style: Any) -> None:
        left = 0.35 / _WIDTH
        self._figure.text(left, 1 - self._top / self._height, text, va="top", ha="left", linespacing=1.3, **style)
        self.move(height)

    def axes(self, name: str, width: float, height: float, left: float = _LEFT) -> Any:
        bottom = 1 - (self._top + height) / self._height
        return self._figure.add_axes((left / _WIDTH, bottom, width / _WIDTH, height / self._height), label=name)

    def move(self, height: float) -> None:
        self._top += height


def _draw_map(incident: Incident, axes: Any) -> None:
    grid = _grid(incident.pool.num_slots)
    axes.imshow(grid.in_rows(_cell_colours(incident, grid), 1.0), aspect="auto", interpolation="nearest")
    each = "one cell for each slot" if grid.slots_per_cell == 1 else f"{number(grid.slots_per_cell)} slots in each cell"
    axes.set_title(f"Slot map, {each}", loc="left", size=11, weight="bold", color=INK)
    if grid.cells <= 4096:
        axes.set_xticks(np.arange(-0.5, grid.columns), minor=True)
        axes.set_yticks(np.arange(-0.5, grid.rows), minor=True)
        axes.grid(which="minor", color="white", linewidth=1.2)
    axes.tick_params(which="both", length=0, labelsize=9, labelcolor=MUTED)
    rows = np.arange(0, grid.rows, max(-(-grid.rows // 12), 1))
    axes.set_yticks(rows, [number(row * grid.columns * grid.slots_per_cell) for row in rows.tolist()])
    columns = np.arange(0, grid.columns, max(grid.columns // 8, 1))
    axes.set_xticks(columns, [f"+{number(column * grid.slots_per_cell)}" for column in columns.tolist()])
    for spine in axes.spines.values():
        spine.set_visible(False)

    cells = grid.cell(incident.marked)
    kinds = np.full(grid.cells, len(FindingKind), np.int64)
    np.minimum.at(kinds, cells, incident.marked_kind)
    height = _MAP_HEIGHT * 72 / grid.rows
    width = (_WIDTH - _LEFT - _RIGHT - _SIDE) * 72 / grid.columns
    side = min(width, height)
    few = len(np.unique(cells)) <= 150
    size = np.clip(0.55 * side, 7 if few else 2, 16) ** 2
    for kind in FindingKind:
        own = np.flatnonzero(kinds == kind)
        style = {"marker": KIND_MARKERS[kind], "color": KIND_COLOURS[kind], "edgecolors": "black" if few else "none"}
        if len(own):
            axes.scatter(own % grid.columns, own // grid.columns, s=size, linewidths=0.9, zorder=3, gid=f"found {kind.name}", **style)
    finding = incident.finding
    if finding is not None and 0 <= finding.slot < grid.num_slots:
        kind = FindingKind(int(incident.marked_kind[np.searchsorted(incident.marked, finding.slot)]))
        _point_at(axes, grid, finding.slot, kind, max(np.sqrt(size), 6))
    if finding is not None and finding.rightful is not None:
        cell = finding.rightful // grid.slots_per_cell
        ring: dict[str, Any] = {"marker": "o", "facecolors": "none", "edgecolors": "black", "linewidths": 1.6, "linestyle": "dashed"}
        axes.scatter([cell % grid.columns], [cell // grid.columns], s=(np.sqrt(size) + 9) ** 2, zorder=4, gid="rightful", **ring)
    axes.set_xlim(-0.5, grid.columns - 0.5)
    axes.set_ylim(grid.rows - 0.5, -0.5)


def _point_at(axes: Any, grid: Grid, slot: int, kind: FindingKind, side: float) -> None:
    """The finding's mark in a ring, and its slot beside it, towards the middle of the map."""
    cell = slot // grid.slots_per_cell
    x, y = cell % grid.columns, cell // grid.columns
    mark = {"marker": KIND_MARKERS[kind], "color": KIND_COLOURS[kind], "edgecolors": "black"}
    axes.scatter([x], [y], s=side**2, linewidths=0.9, zorder=4, gid="focus mark", **mark)
    axes.scatter([x], [y], s=(side + 9) ** 2, marker="o", facecolors="none", edgecolors="black", linewidths=2, zorder=4, gid="focus")
    across = 46 if x < grid.columns / 2 else -46
    down = -30 if y < grid.rows / 2 else 30
    axes.annotate(
        f"slot {slot}",
        (x, y),
        xytext=(across, down),
        textcoords="offset points",
        size=11,
        weight="bold",
        ha="left" if across > 0 else "right",
        va="center",
        zorder=5,
        bbox={"boxstyle": "round,pad=0.3", "facecolor": "white", "edgecolor": "black"},
        arrowprops={"arrowstyle": "-", "color": "black", "linewidth": 1.5, "shrinkB": 9},
    )


def _grid(num_slots: int) -> Grid:
    """About twice as many columns as rows, a power of two."""
    columns = 16
    while columns < _MAX_COLUMNS and num_slots > columns * columns // 2:
        columns *= 2
    return Grid.fitting(num_slots, columns, _MAX_COLUMNS // 2)


def _cell_colours(incident: Incident, grid: Grid) -> np.ndarray:
    """Colours of the cells, float [cells, 3]: the mean of the slots, unless the finding's requests have one of them."""
    state = incident.state
    palette = np.array([mix(_COLOURS.get(own, "#ffffff")) for own in SlotState])
    colours = palette[state]
    in_request = state == SlotState.REQUEST
    hues = np.array([mix(hue) for hue in _HUES[:HUES]])[incident.hue[in_request]]
    strength = (0.3 + 0.6 * incident.age[in_request])[:, None]
    colours[in_request] = 1 - strength * (1 - hues)
    cells = grid.sum(colours) / grid.sizes()[:, None]
    top = grid.most(np.where(state >= SlotState.HOLE, state, 0))
    return np.where((top > 0)[:, None], palette[top], cells)


def _draw_legend(incident: Incident, axes: Any) -> None:
    axes.axis("off")
    axes.set_xticks([])
    axes.set_yticks([])
    handles: list[Any] = []
    labels: list[str] = []
    for kind in FindingKind:
        slots = int((incident.marked_kind == kind).sum())
        if slots or (kind is not FindingKind.RANGE and (incident.kinds == kind).any()):
            where = counted(slots, "slot") if slots else "in the timeline"  # on the map another one of the same slot stands before it
            handles.append(_marker(kind))
            labels.append(_wrapped(f"finding, {FINDING_KINDS[kind][1]}: {where}"))
    if incident.finding is not None and incident.finding.rightful is not None:
        handles.append(Line2D([], [], linestyle="none", marker="o", color="black", fillstyle="none", markersize=9))
        labels.append(_wrapped(f"slot {incident.finding.rightful}: holds the record that is missing"))
    if incident.off_map:
        text = f"{counted(incident.off_map, 'finding')} with a slot that does not exist (not on the map)"
        handles.append(_marker(FindingKind.RANGE))
        labels.append(_wrapped(text))
    for own, text in incident.legend:
        colours = [_COLOURS[own]] if own in _COLOURS else [_HUES[hue] for hue in np.unique(incident.hue[incident.state == own])]
        handles.append(tuple(Patch(facecolor=colour, edgecolor="#999999", linewidth=0.5) for colour in colours))
        labels.append(_wrapped(text))
    axes.legend(
        handles=handles,
        labels=labels,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        loc="upper left",
        bbox_to_anchor=(0, 1),
        borderaxespad=0,
        frameon=False,
        fontsize=9.2,
        labelcolor=INK,
        labelspacing=0.75,
        handlelength=1.8,
        title="What the map shows",
        title_fontproperties={"weight": "bold", "size": 11},
        alignment="left",
    )
    if (incident.state == SlotState.REQUEST).any():
        _draw_scale(incident, axes)


def _draw_scale(incident: Incident, axes: Any) -> None:
    """The hues of requests, from the first position to the last one."""
    scale = axes.inset_axes((0.0, 0.06, 0.62, 0.1), label="scale")
    strength = np.linspace(0.3, 0.9, 64)[None, :, None]
    hues = np.array([mix(hue) for hue in _HUES[:HUES]])[:, None, :]
    scale.imshow(1 - strength * (1 - hues), aspect="auto", interpolation="nearest")
    scale.set_xticks([0, 63], ["0", number(incident.last_position)])
    scale.set_yticks([])
    scale.tick_params(length=0, labelsize=9, labelcolor=MUTED)
    scale.set_title("position in the request (colours repeat)", loc="left", size=9.5, color=INK)
    for spine in scale.spines.values():
        spine.set_visible(False)


def _marker(kind: FindingKind) -> Line2D:
    style = {"marker": KIND_MARKERS[kind], "color": KIND_COLOURS[kind], "markeredgecolor": "black"}
    return Line2D([], [], linestyle="none", markersize=9, **style)


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, 50))


def _draw_timeline(incident: Incident, axes: Any) -> None:
    """A lane for each launch tag: what it found when, and at the right what the device counted."""
    dump, lanes = incident.pool.dump, [counter.tag for counter in incident.counters]
    order = "by step" if incident.has_steps else "in the order of the log: the dump has no steps"
    style = {"size": 11, "weight": "bold", "color": INK}
    axes.set_title(f"Findings {order}" if len(incident.times) else "Steps", loc="left", x=-_NAMES / _TIMELINE_WIDTH, **style)
    axes.set_title("Counted on the device", loc="right", x=_COUNTS, ha="left", **style)
    last = max(dump.steps, 1) if incident.has_steps or not len(incident.times) else max(len(incident.times) - 1, 1)
    first = 0 if incident.has_steps or not len(incident.times) else -0.5
    for lane in range(len(lanes)):
        axes.axhline(lane, color="#e3e6e9", linewidth=1, zorder=0)
    width = max(-(-(last + 1) // _MAX_TIMES), 1)
    side = np.clip(0.8 * _TIMELINE_WIDTH * 72 * width / (last + 1), 4.5, 11)
    present = sorted({FindingKind(kind) for kind in incident.kinds.tolist()})
    for place, kind in enumerate(present):
        found: dict[tuple[int, int], int] = {}
        for i in np.flatnonzero(incident.kinds == kind).tolist():
            key = (int(incident.times[i]) // width * width, lanes.index(dump.violation_rows[i, 0]))
            found[key] = found.get(key, 0) + 1
        at = np.array(list(found))
        sizes = np.clip(30 * np.sqrt(list(found.values())), 4.5**2, side**2)
        shift = (place - (len(present) - 1) / 2) * 0.8 / len(present)
        style = {"marker": KIND_MARKERS[kind], "color": KIND_COLOURS[kind], "edgecolors": "black", "linewidths": 0.6}
        axes.scatter(at[:, 0], at[:, 1] + shift, s=sizes, zorder=3, gid=f"timeline {kind.name}", **style)
    if incident.has_steps and len(incident.times) < dump.violation_count:
        _draw_full_log(incident, axes, last)
    axes.set_xlim(first, last + 0.03 * (last - first) + 0.5)
    axes.set_ylim(max(len(lanes), 1) - 0.4, -0.6)
    axes.set_yticks(range(len(lanes)), [tag.name for tag in lanes])
    axes.set_xticks([tick for tick in MaxNLocator(integer=True).tick_values(0, last).astype(int) if 0 <= tick <= last])
    axes.tick_params(length=0, labelsize=9, labelcolor=INK)
    axes.set_xlabel("step" if incident.has_steps or not len(incident.times) else "row of the log", size=9.5, color=MUTED)
    for name, spine in axes.spines.items():
        spine.set_visible(name == "bottom")
        spine.set_color("#c3c8ce")
    for lane, counter in enumerate(incident.counters):
        found_any = any(counter.reasons.values())
        colour = BROKEN if found_any else MUTED
        axes.text(_COUNTS, lane, _total(counter), transform=axes.get_yaxis_transform(), va="center", size=9, color=colour, gid="total")


def _draw_full_log(incident: Incident, axes: Any, last: int) -> None:
    """Grey for the steps of which the log has nothing, because it was full: they were not without findings."""
    full = int(incident.times.max())
    if full < last:
        axes.axvspan(full + 0.5, last + 0.5, facecolor="#e9ecef", edgecolor="#c3c8ce", hatch="//", linewidth=0, zorder=0.5, gid="log full")
    share = (last - full) / last
    text = "log full: counted, not kept" if share > 1 / 3 else "log full" if share > 1 / 8 else ""
    if text:
        style = {"size": 9, "color": INK, "ha": "center", "va": "center", "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 2}}
        axes.text((full + last + 1) / 2, (len(incident.counters) - 1) / 2, text, **style)


def _total(counter: Counter) -> str:
    """What the device counted for a tag; of many reasons the last ones are summed up, so that the line stays short."""
    skipped = f", {number(counter.skipped)} skipped" if counter.skipped else ""
    found = [f"{short(reason)} {number(count)}" for reason, count in counter.reasons.items() if count]
    if not found:
        return f"nothing in {counted(counter.entries, 'entry', plural='entries')}{skipped}"
    return ", ".join(found) + skipped
