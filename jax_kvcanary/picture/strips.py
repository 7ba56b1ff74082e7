"""A request's positions around the finding: slot by slot, what is there and what should be."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jax_kvcanary.constants import FailReason, PoolKind
from jax_kvcanary.picture.diagnosis import ANCHOR, Finding, Request
from jax_kvcanary.picture.pool import Pool
from jax_kvcanary.reference.hashes import POSITION, PREV_HASH, TOKEN

#: Positions before the finding that a strip shows, and behind it.
RADIUS = 3


@dataclass(frozen=True)
class Cell:
    """One position of a request in a strip. None stands for what the dump does not tell.

    Fields:
        slot: where the position is; it need not exist.
        position: the position that the request has there.
        stored_position, stored_token: what the record holds, None where there is none.
        expected_token: the token that belongs there.
        follows: whether the record follows the cell before it.
        reasons: what the log has for the slot.
    """

    slot: int
    position: int | None
    stored_position: int | None
    stored_token: int | None
    expected_token: int | None
    follows: bool | None
    reasons: FailReason


@dataclass(frozen=True)
class Strip:
    """Some positions of a request in order, around the finding.

    Fields:
        request: whose.
        cells: the positions.
        focus: which of the cells has the finding's slot.
    """

    request: Request
    cells: tuple[Cell, ...]
    focus: int


def strips(pool: Pool, finding: Finding, radius: int = RADIUS) -> tuple[Strip, ...]:
    """The victim around the finding, and the request whose record is in the slot, where there is one."""
    drawn = [_strip(pool, finding.victim, finding.slot, finding.position, _slots_around(pool, finding, radius), finding)]
    if finding.other is not None and finding.other.name != finding.victim.name:
        position, chains = pool.chains.position(finding.slot), pool.chains
        around = _row_around(pool, finding.other, position, radius)
        around = around or (chains.before(finding.slot, radius), chains.behind(finding.slot, radius))
        drawn.append(_strip(pool, finding.other, finding.slot, position, around, None))
    return tuple(drawn)


def _slots_around(pool: Pool, finding: Finding, radius: int) -> tuple[list[int], list[int]]:
    """The victim's slots before the finding's, and behind it."""
    around = _row_around(pool, finding.victim, finding.position, radius)
    if around is not None:
        return around
    slots = finding.victim.slots
    if finding.slot in slots:
        at = slots.index(finding.slot)
        return list(slots[max(at - radius, 0) : at]), list(slots[at + 1 : at + 1 + radius])
    return [] if finding.previous is None else [*pool.chains.before(finding.previous, radius - 1), finding.previous], []


def _row_around(pool: Pool, request: Request, position: int | None, radius: int) -> tuple[list[int], list[int]] | None:
    """The same by the engine's table; None where it does not have the request."""
    if request.row is None or position is None or pool.table is None:
        return None
    entries = [pool.table.slot(request.row, p) for p in range(position - radius, position + radius + 1)]
    before, behind = ([slot for slot in part if slot is not None] for part in (entries[:radius], entries[radius + 1 :]))
    while pool.group.kind is PoolKind.SWA and before and not pool.exists(before[0]):  # evicted from the window
        before.pop(0)
    return before, behind


def _strip(
    pool: Pool,
    request: Request,
    slot: int,
    position: int | None,
    around: tuple[list[int], list[int]],
    finding: Finding | None,
) -> Strip:
    before, behind = around
    slots, focus = [*before, slot, *behind], len(before)
    cells: list[Cell] = []
    for i, own in enumerate(slots):
        record = pool.chains.records[own] if pool.exists(own) else None
        stored = None if record is None or not pool.chains.written[own] else record
        place = position
        if i != focus:
            # A row of the table counts its positions; of a chain, each record knows its own.
            place = None if stored is None else int(stored[POSITION])
            place = place if request.row is None or position is None else position + i - focus
        ahead = slots[i - 1] if i else _slot_ahead(pool, request, own, place)
        hash_before = ANCHOR if place == 0 else None if ahead is None else _stored_hash(pool, ahead)
        expected = pool.expected_token(request.row, place)
        if finding is not None and i == focus:
            expected = finding.expected_token
        cells.append(
            Cell(
                slot=own,
                position=place,
                stored_position=None if stored is None else int(stored[POSITION]),
                stored_token=None if stored is None else int(stored[TOKEN]),
                expected_token=expected,
                follows=None if record is None or hash_before is None else int(record[PREV_HASH]) == hash_before,
                reasons=pool.reasons_of_slot(own) if finding is not None else FailReason(0),
            )
        )
    return Strip(request, tuple(cells), focus)


def _slot_ahead(pool: Pool, request: Request, slot: int, position: int | None) -> int | None:
    """The slot before the first one of a strip."""
    if request.row is not None and position is not None and pool.table is not None:
        return pool.table.slot(request.row, position - 1)
    parent = int(pool.chains.parent[slot]) if pool.exists(slot) else -1
    return None if parent < 0 else parent


def _stored_hash(pool: Pool, slot: int) -> int | None:
    return int(pool.chains.hashes[slot].view(np.int64)) if pool.exists(slot) else None
