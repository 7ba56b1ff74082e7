"""Everything that a picture of a dump shows, as plain values: the drawings decide nothing but looks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from jax_kvcanary.constants import TOKEN_TO_KV_SLOT_PADDING, CanaryLaunchTag, FailReason, PoolKind
from jax_kvcanary.dump import CanaryDump
from jax_kvcanary.picture.diagnosis import Finding, Request, first_finding, sentence
from jax_kvcanary.picture.pool import Pool, launches
from jax_kvcanary.picture.strips import Strip, strips
from jax_kvcanary.picture.words import counted, number
from jax_kvcanary.reference.hashes import POSITION

#: Requests that the finding is not about share these many hues.
HUES = 4


class SlotState(IntEnum):
    """What a slot is. Of several, the later one counts."""

    EMPTY = 0
    PADDING = 1
    IDLE = 2
    REQUEST = 3
    HOLE = 4
    OTHER = 5
    VICTIM = 6


class FindingKind(IntEnum):
    """What a finding is about, by its reasons. Of several, the first one counts."""

    RECORD = 0
    KV_BYTES = 1
    TOKEN = 2
    RANGE = 3


#: The reasons of each kind, and what it is called in a legend.
FINDING_KINDS = {
    FindingKind.RECORD: (FailReason.VERIFY_CHAIN_HASH_MISMATCH | FailReason.VERIFY_POSITION_MISMATCH, "chain or position broken"),
    FindingKind.KV_BYTES: (FailReason.VERIFY_REAL_KV_HASH_MISMATCH, "KV bytes changed"),
    FindingKind.TOKEN: (
        FailReason.WRITE_TOKEN_MISMATCH | FailReason.WRITE_POSITION_MISMATCH | FailReason.VERIFY_TOKEN_MISMATCH,
        "token or written position wrong",
    ),
    FindingKind.RANGE: (FailReason.SLOT_OUT_OF_RANGE, "no such slot"),
}


@dataclass(frozen=True)
class Event:
    """What one launch found of one combination of reasons.

    Fields:
        step: when, or None where the dump does not know.
        row: place in the ring of its first row.
        tag: the launch.
        reasons: of every row.
        slots: int64; the slot of each row, ascending.
    """

    step: int | None
    row: int
    tag: CanaryLaunchTag
    reasons: FailReason
    slots: np.ndarray


@dataclass(frozen=True)
class Counter:
    """What the device counted for one launch tag that ran, or found something."""

    tag: CanaryLaunchTag
    launches: int
    entries: int
    skipped: int
    reasons: dict[FailReason, int]


@dataclass(frozen=True)
class Incident:
    """A picture's content.

    Fields:
        pool: the half of the group that is drawn.
        headline: the finding in one sentence.
        tally: how many findings there are, in a sentence; empty where the headline has it.
        facts: short statements about the dump.
        notes: sentences about what the dump does not tell, or was not checked.
        finding: the first finding of the group, or None.
        strips: the requests around it.
        state: int8 [num_slots]; SlotState.
        hue: int8 [num_slots]; which of the hues a slot of a request has.
        age: float32 [num_slots]; position of the record from 0, the first one, to 1, the last position of the pool.
        last_position: that position.
        legend: slot states with a line about each, in the order to show them.
        marked: int64 [m]; the slots of the map that were found, ascending.
        marked_kind: int64 [m]; FindingKind of each.
        off_map: findings of the group that name no slot of the map.
        times: int64 [rows of the ring]; the step of each row, or its place in the ring where the dump has no steps.
        has_steps: which of the two.
        kinds: int64 [rows of the ring]; FindingKind.
        events: the ring in order, rows of one launch and of the same reasons together.
        counters: of the launch tags that ran.
    """

    pool: Pool
    headline: str
    tally: str
    facts: tuple[str, ...]
    notes: tuple[str, ...]
    finding: Finding | None
    strips: tuple[Strip, ...]
    state: np.ndarray
    hue: np.ndarray
    age: np.ndarray
    last_position: int
    legend: tuple[tuple[SlotState, str], ...]
    marked: np.ndarray
    marked_kind: np.ndarray
    off_map: int
    times: np.ndarray
    has_steps: bool
    kinds: np.ndarray
    events: tuple[Event, ...]
    counters: tuple[Counter, ...]

    @classmethod
    def of(cls, dump: CanaryDump, kind: PoolKind | None = None, half: str | None = None) -> Incident:
        """The incident of a dump, in one group and half; unless told, those of the first finding.

        Raises:
            ValueError: the dump has no such group, or the group no such half.
        """
        pool = Pool.of(dump, kind, half)
        finding = first_finding(pool)
        state, hue, requests = _states(pool, finding)
        positions = np.where(pool.chains.written, pool.chains.records[:, POSITION], 0)
        last_position = int(np.clip(positions, 0, pool.num_slots - 1).max(initial=0))
        times, has_steps = _times(dump)
        kinds = _kinds(dump.violation_rows[:, -1])
        marked, marked_kind = _marked(pool)
        slots = pool.findings.slots
        headline, tally = _title(pool, finding)
        return cls(
            pool=pool,
            headline=headline,
            tally=tally,
            facts=_facts(pool),
            notes=_notes(pool, finding, has_steps),
            finding=finding,
            strips=() if finding is None else strips(pool, finding),
            state=state,
            hue=hue,
            age=(np.clip(positions, 0, last_position) / max(last_position, 1)).astype(np.float32),
            last_position=last_position,
            legend=_legend(pool, finding, state, requests),
            marked=marked,
            marked_kind=marked_kind,
            off_map=int(((slots < 0) | (slots >= pool.num_slots)).sum()),
            times=times,
            has_steps=has_steps,
            kinds=kinds,
            events=_events(dump, times, has_steps),
            counters=_counters(dump),
        )

    @property
    def title(self) -> str:
        """Headline and tally."""
        return f"{self.headline} {self.tally}".rstrip()


def _kinds(reasons: np.ndarray) -> np.ndarray:
    kinds = np.full(len(reasons), FindingKind.RANGE, np.int64)
    for kind in reversed(FindingKind):
        kinds[reasons & int(FINDING_KINDS[kind][0]) != 0] = kind
    return kinds


def _marked(pool: Pool) -> tuple[np.ndarray, np.ndarray]:
    """Slots of the map with findings, and the kind of each by all of its reasons."""
    slots, reasons = pool.findings.slots, pool.findings.reasons
    on_map = (slots >= 0) & (slots < pool.num_slots)
    union = np.zeros(pool.num_slots, np.int64)
    np.bitwise_or.at(union, slots[on_map], reasons[on_map])
    marked = np.flatnonzero(union)
    return marked, _kinds(union[marked])


def _states(pool: Pool, finding: Finding | None) -> tuple[np.ndarray, np.ndarray, int]:
    """State and hue of each slot, and how many requests there are beside those of the finding."""
    chains, table = pool.chains, pool.table
    state = np.full(pool.num_slots, SlotState.EMPTY, np.int8)
    if table is None:
        state[chains.written] = SlotState.REQUEST
        _, owner = np.unique(chains.branch, return_inverse=True)
        owner = owner.reshape(-1)
    else:
        owner = table.owners()
        state[chains.written] = SlotState.IDLE
        state[chains.written & (owner >= 0)] = SlotState.REQUEST
        state[~chains.written & (owner >= 0)] = SlotState.HOLE
    state[TOKEN_TO_KV_SLOT_PADDING] = SlotState.PADDING
    if finding is not None:
        for request, own in ((finding.other, SlotState.OTHER), (finding.victim, SlotState.VICTIM)):
            slots = np.array(() if request is None else request.slots, np.int64)
            state[slots[state[slots] != SlotState.HOLE]] = own
    requests = len(np.unique(owner[state == SlotState.REQUEST]))
    return state, (owner % HUES).astype(np.int8), requests


def _legend(pool: Pool, finding: Finding | None, state: np.ndarray, requests: int) -> tuple[tuple[SlotState, str], ...]:
    counts = np.bincount(state, minlength=len(SlotState)).tolist()
    live = "live request" if pool.table is not None else "request"
    others = f"{'other ' if finding is not None else ''}{live}"
    lines: list[tuple[SlotState, str]] = []
    if finding is not None:
        lines.append((SlotState.VICTIM, f"{_described(finding.victim)}, where the finding is"))
        if finding.other is not None and finding.other.name != finding.victim.name:
            lines.append((SlotState.OTHER, f"{_described(finding.other)}: its record is in slot {finding.slot}"))
    lines += [
        (SlotState.REQUEST, f"{counted(requests, others)} in {counted(counts[SlotState.REQUEST], 'slot')}"),
        (SlotState.IDLE, f"written, in no live request: {counted(counts[SlotState.IDLE], 'slot')}"),
        (SlotState.HOLE, f"in a live request, but empty: {counted(counts[SlotState.HOLE], 'slot')}"),
        (SlotState.EMPTY, f"empty (never written, or released): {counted(counts[SlotState.EMPTY], 'slot')}"),
        (SlotState.PADDING, "slot 0, padding"),
    ]
    return tuple((own, text) for own, text in lines if counts[own] or own is SlotState.VICTIM)


def _described(request: Request) -> str:
    if request.row is not None or not request.slots:
        return f"{request.name} ({counted(len(request.slots), 'slot')})"
    return f"{request.name} ({counted(len(request.slots), 'slot')}, ends in slot {request.slots[-1]})"


def _title(pool: Pool, finding: Finding | None) -> tuple[str, str]:
    dump = pool.dump
    if finding is not None:
        slots = len(np.unique(pool.findings.slots))
        where = "in" if dump.violation_count == len(pool.findings.rows) else "in at least"
        step = "" if finding.violation.step is None else f" since step {number(finding.violation.step)}"
        return f"{sentence(pool, finding)}.", f"{counted(dump.violation_count, 'finding')} {where} {counted(slots, 'slot')}{step}."
    if dump.violation_count:
        return f"No finding in the {pool.group.kind.name} pool, but {counted(dump.violation_count, 'finding')} in this dump.", ""
    if not dump.steps:
        return "No finding, but no step was checked either.", ""
    held = counted(int(pool.chains.written.sum()), "slot", "hold")
    requests = counted(len(pool.chains.ends()), "request")
    return f"No finding in {counted(dump.steps, 'step')}.", f"{held} the records of {requests}."


def _facts(pool: Pool) -> tuple[str, ...]:
    dump, when = pool.dump, "before" if pool.phase == "head" else "after"
    return (
        f"{pool.group.kind.name} pool, {pool.half.upper()} records written {when} the forward",
        counted(pool.num_slots, "slot"),
        f"after {counted(dump.steps, 'step')}",
        f"dumped {dump.created:%Y-%m-%d %H:%M:%S} UTC",
        f"mode {dump.config.mode.value}, real KV {dump.config.real_kv_hash_mode.name}",
        f"jax_kvcanary {dump.environment.get('jax_kvcanary', '?')}",
    )


def _notes(pool: Pool, finding: Finding | None, has_steps: bool) -> tuple[str, ...]:
    dump, notes = pool.dump, []
    skipped = int(dump.verify_skip_counters.sum())
    if skipped:
        notes.append(f"{counted(skipped, 'time')} a verify had more entries than verify_capacity, and checked nothing.")
    kept = len(dump.violation_rows)
    if kept < dump.violation_count:
        notes.append(f"The log kept the first {number(kept)} of {counted(dump.violation_count, 'finding')}; the counters have all of them.")
    elsewhere = [group.kind.name for group in dump.groups if group.kind is not pool.group.kind and _has_rows(dump, group.kind)]
    notes += [f"The {name} pool has findings too: draw it with --group {name}." for name in elsewhere]
    if has_steps and (dump.violation_steps < 0).any():
        late = int((dump.violation_steps < 0).sum())
        notes.append(f"{counted(late, 'finding')} came after what the monitor had handled, and may be later than the last step shown.")
    if finding is not None and finding.changed:
        notes.append(f"Slot {finding.slot} was written again after the finding: the map and the strip show it as it is now.")
    if finding is not None and finding.recovered:
        notes.append(f"Token {finding.expected_token} was found by trying all tokens against the hash that the next slot names.")
    notes += _table_notes(pool)
    ambiguous = int(pool.chains.ambiguous.sum())
    if ambiguous and pool.table is None:
        notes.append(f"{counted(ambiguous, 'slot')} may follow any of several equal records (same prefix); the nearest one was taken.")
    orphaned = int(pool.chains.orphaned.sum())
    if orphaned:
        why = "evicted from the window, " if pool.group.kind is PoolKind.SWA else ""
        notes.append(f"{counted(orphaned, 'slot', 'follow')} a record that no slot holds any more ({why}released or overwritten).")
    notes.append(
        f"Records carry no time: the shade is the position in the request, light for 0, dark for {number(_last_position(pool))}. "
        "A released record looks like one that was never written."
    )
    return tuple(notes)


def _last_position(pool: Pool) -> int:
    positions = pool.chains.records[pool.chains.written, POSITION]
    return int(np.clip(positions, 0, pool.num_slots - 1).max(initial=0))


def _table_notes(pool: Pool) -> list[str]:
    """What the engine's table says about itself: a slot that is shared stands at one position of all its requests."""
    if pool.table is None:
        if pool.group.kind is PoolKind.SWA and pool.dump.req_to_token is not None:
            return ["The dump was written without the pool, whose table tells the requests of window slots."]
        return []
    exists = pool.table.exists
    pairs = np.unique(np.stack([pool.table.slots[exists], pool.table.positions[exists]]), axis=1)
    slots, counts = np.unique(pairs[0], return_counts=True)
    twice = slots[counts > 1].tolist()
    if not twice:
        return []
    names = ", ".join(map(str, twice[:6])) + (f" and {number(len(twice) - 6)} more" if len(twice) > 6 else "")
    return [f"The engine's table has slot{'s' if len(twice) > 1 else ''} {names} at two positions or more: no legal sharing does that."]


def _has_rows(dump: CanaryDump, kind: PoolKind) -> bool:
    return any(CanaryLaunchTag(tag).name.endswith(f"_{kind.name}") for tag in np.unique(dump.violation_rows[:, 0]).tolist())


def _times(dump: CanaryDump) -> tuple[np.ndarray, bool]:
    """Steps of the ring's rows, those that the monitor had not handled at the dump's own step; or the rows' order."""
    steps = dump.violation_steps
    if not (steps >= 0).any():
        return np.arange(len(steps)), False
    return np.where(steps >= 0, steps, max(dump.steps, int(steps.max()))), True


def _events(dump: CanaryDump, times: np.ndarray, has_steps: bool) -> tuple[Event, ...]:
    rows = dump.violation_rows
    together: dict[tuple[int, int], list[int]] = {}
    for i, key in enumerate(zip(launches(dump).tolist(), (-rows[:, -1]).tolist(), strict=True)):
        together.setdefault(key, []).append(i)
    # The order of one launch's rows means nothing, and is another one on another device.
    return tuple(
        Event(
            step=int(times[places[0]]) if has_steps else None,
            row=places[0],
            tag=CanaryLaunchTag(rows[places[0], 0]),
            reasons=FailReason(-reasons),
            slots=np.sort(rows[places, 1]),
        )
        for (_, reasons), places in sorted(together.items())
    )


def _counters(dump: CanaryDump) -> tuple[Counter, ...]:
    def reasons(tag: CanaryLaunchTag) -> dict[FailReason, int]:
        return {reason: int(dump.fail_reason_counters[tag, reason.bit_length() - 1]) for reason in FailReason}

    return tuple(
        Counter(
            tag=tag,
            launches=int(dump.kernel_run_counters[tag]),
            entries=int(dump.slot_run_counters[tag]),
            skipped=int(dump.verify_skip_counters[tag]),
            reasons=reasons(tag),
        )
        for tag in CanaryLaunchTag
        if dump.kernel_run_counters[tag] or dump.fail_reason_counters[tag].any()
    )
