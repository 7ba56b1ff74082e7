"""What the first finding is about: whose position, which slot, what stands there, and what should."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jax_kvcanary.constants import CanaryLaunchTag, FailReason
from jax_kvcanary.picture.pool import Pool
from jax_kvcanary.picture.words import capital
from jax_kvcanary.reference.hashes import ANCHOR_HASH, POSITION, PREV_HASH, TOKEN, mix3, to_signed
from jax_kvcanary.violations import Violation

_CHAIN, _POSITION, _REAL_KV = (
    FailReason.VERIFY_CHAIN_HASH_MISMATCH,
    FailReason.VERIFY_POSITION_MISMATCH,
    FailReason.VERIFY_REAL_KV_HASH_MISMATCH,
)
_WRITES = FailReason.WRITE_TOKEN_MISMATCH | FailReason.WRITE_POSITION_MISMATCH

#: Stands before the first position of a request, as in a record.
ANCHOR = to_signed(ANCHOR_HASH)

#: Tokens that are tried when an overwritten one is looked for.
_VOCABULARY = 1 << 20


@dataclass(frozen=True)
class Request:
    """A request that the finding is about.

    Fields:
        name: "request row 3" where the engine's table names it, else "request A" or "request B".
        row: its row of the table, or None.
        slots: its slots, in order of position, those that are known.
    """

    name: str
    row: int | None
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Finding:
    """The first finding, taken apart. None stands for what the dump does not tell.

    Fields:
        violation: the row of the log.
        position: the position of the victim that the slot stands for.
        victim: the request that was checked, or written.
        other: the request whose record is in the slot, where it is not the victim's.
        previous: the slot before it in the victim.
        successor: the slot after it in the victim.
        rightful: a slot that holds the record which the victim is missing.
        expected_token: the token that belongs there.
        recovered: whether that token was found by trying all of them against the successor's hash.
        overwritten: whether the slot held that record once, and no slot holds it any more.
        empty: whether the slot holds a fresh record.
        changed: whether the slot was written again since it was found.
    """

    violation: Violation
    position: int | None
    victim: Request
    other: Request | None
    previous: int | None
    successor: int | None
    rightful: int | None
    expected_token: int | None
    recovered: bool
    overwritten: bool
    empty: bool
    changed: bool

    @property
    def slot(self) -> int:
        """The slot that the row names; it need not exist."""
        return self.violation.slot_idx


def first_finding(pool: Pool) -> Finding | None:
    """The finding that the picture is about, or None where the group has none."""
    if not len(pool.findings.rows):
        return None
    return _examine(pool, _first_row(pool))


def _first_row(pool: Pool) -> int:
    """Of the first launch that found something, the row that is not just the consequence of another, and stands first in its request.

    The order of the rows of one launch means nothing. A slot whose predecessor changed shows its chain hash alone, and a write behind
    a record that changed shows a position that does not follow.
    """
    findings = pool.findings
    halves = np.array([CanaryLaunchTag(tag).name.split("_")[1].lower() == pool.half for tag in findings.tags.tolist()])
    candidates = np.flatnonzero(halves) if halves.any() else np.arange(len(halves))
    candidates = candidates[findings.launch[candidates] == findings.launch[candidates[0]]]
    for consequence in (FailReason.WRITE_POSITION_MISMATCH, _CHAIN):
        causes = candidates[findings.reasons[candidates] != consequence]
        candidates = causes if len(causes) else candidates
    positions = _expected_positions(pool, findings.rows[candidates])
    order = np.lexsort((candidates, findings.slots[candidates], positions, positions < 0))
    return int(candidates[order[0]])


def _expected_positions(pool: Pool, rows: np.ndarray) -> np.ndarray:
    """The victim's position in each row of the log, int64 [m], -1 where it is not known.

    It is the one stored where that was right, else the one behind the predecessor that the check named, if a slot still has that.
    """
    reasons, positions = rows[:, 7], rows[:, 2].copy()
    out_of_range = reasons & FailReason.SLOT_OUT_OF_RANGE != 0
    written = ~out_of_range & (reasons & FailReason.WRITE_POSITION_MISMATCH != 0)
    positions[written] = rows[written, 6]
    moved = np.flatnonzero(~out_of_range & (reasons & _POSITION != 0))
    previous, _ = pool.chains.index.find(rows[moved, 6], rows[moved, 1])
    positions[moved] = np.where(previous >= 0, pool.chains.records[previous, POSITION] + 1, -1)
    positions[moved[rows[moved, 6] == ANCHOR]] = 0
    return np.maximum(positions, -1)


def _examine(pool: Pool, at: int) -> Finding:
    dump, chains, findings = pool.dump, pool.chains, pool.findings
    ring_index = int(findings.index[at])
    step = int(dump.violation_steps[ring_index])
    violation = Violation.from_row(findings.rows[at], step=None if step < 0 else step)
    slot, reasons = violation.slot_idx, violation.fail_reason
    known = pool.exists(slot)
    is_write = bool(reasons & _WRITES) or (FailReason.SLOT_OUT_OF_RANGE in reasons and violation.stored_chain_hash != 0)
    position: int | None = int(_expected_positions(pool, findings.rows[at : at + 1])[0])
    position = None if position == -1 else position

    # What the check compared with; an anchor, or a record that changed since, is no slot.
    wanted = to_signed(violation.stored_chain_hash if is_write else violation.expected_aux)
    if FailReason.SLOT_OUT_OF_RANGE in reasons and not is_write:
        wanted = ANCHOR
    previous = None if wanted == ANCHOR else chains.with_hash(wanted, slot)
    successor, old_hash = (None, None) if is_write or not known else _successor(pool, at, position)

    holder = _holder(pool, slot, position, wanted, int(dump.violation_request_rows[ring_index]))
    if holder is not None and pool.table is not None:
        row, position = holder
        previous = pool.table.slot(row, position - 1)
        if successor is None:
            successor = pool.table.slot(row, position + 1)
    previous = previous if pool.exists(previous) else None
    successor = successor if pool.exists(successor) else None

    changed = known and FailReason.SLOT_OUT_OF_RANGE not in reasons and _has_changed(pool, violation)
    foreign = known and _CHAIN in reasons and not changed
    rightful = chains.with_hash(old_hash, slot) if old_hash is not None and foreign else None
    rightful = None if rightful == slot else rightful
    expected, recovered = _expected_token(pool, violation, holder, position, rightful), False
    if expected is None and foreign and old_hash is not None and position is not None:
        expected = _recover(wanted, position, old_hash)
        recovered = expected is not None
    has_other = foreign and chains.written[slot] and not chains.orphaned[slot]
    return Finding(
        violation=violation,
        position=position,
        victim=_victim(pool, slot if known else None, holder, previous, successor, foreign),
        other=_other(pool, slot, holder) if has_other else None,
        previous=previous,
        successor=successor,
        rightful=rightful,
        expected_token=expected,
        recovered=recovered,
        overwritten=foreign and old_hash is not None and rightful is None,
        empty=violation.stored_token == violation.position == to_signed(violation.stored_chain_hash) == -1,
        changed=changed,
    )


def _has_changed(pool: Pool, violation: Violation) -> bool:
    """Whether a slot's record is another one than the log has."""
    token, position, prev_hash, _ = pool.chains.records[violation.slot_idx].tolist()
    return (token, position, prev_hash) != (violation.stored_token, violation.position, to_signed(violation.stored_chain_hash))


def _successor(pool: Pool, at: int, position: int | None) -> tuple[int | None, int | None]:
    """The slot that was found not to follow the record which now stands in a finding's slot, and the hash that it does follow.

    Many slots may not follow a fresh record; only one has the next position of the victim.
    """
    slot, findings = int(pool.findings.slots[at]), pool.findings
    behind = np.uint64(pool.chains.hashes[slot]).view(np.int64)
    rows = findings.rows[(findings.rows[:, 6] == behind) & (findings.reasons & _CHAIN != 0) & (findings.slots != slot)]
    if position is not None:
        rows = rows[rows[:, 2] == position + 1]
    return (int(rows[0, 1]), int(rows[0, 5])) if len(rows) else (None, None)


def _holder(pool: Pool, slot: int, position: int | None, wanted: int, request_row: int) -> tuple[int, int] | None:
    """The live row and position of the engine's table that a finding belongs to."""
    if pool.table is None:
        return None
    holders = pool.table.holders(slot)
    holders = [(r, p) for r, p in holders if position in (None, p) and request_row in (-1, r)]
    follows = [(r, p) for r, p in holders if _hash_before(pool, r, p) == wanted]
    return next(iter(follows or holders), None)


def _hash_before(pool: Pool, row: int, position: int) -> int | None:
    """The hash that stands before a live position of the table."""
    if position == 0 or pool.table is None:
        return ANCHOR
    previous = pool.table.slot(row, position - 1)
    return int(pool.chains.hashes[previous].view(np.int64)) if previous is not None and pool.exists(previous) else None


def _expected_token(
    pool: Pool, violation: Violation, holder: tuple[int, int] | None, position: int | None, rightful: int | None
) -> int | None:
    if violation.expected_token >= 0 and FailReason.SLOT_OUT_OF_RANGE not in violation.fail_reason:
        return violation.expected_token
    if rightful is not None:
        return int(pool.chains.records[rightful, TOKEN])
    return pool.expected_token(None if holder is None else holder[0], position)


def _recover(prev_hash: int, position: int, old_hash: int) -> int | None:
    """The token with which a predecessor and a position give a hash: the one that was overwritten, if it is a usual one."""
    tokens = np.arange(_VOCABULARY)
    hashes = mix3(np.full_like(tokens, prev_hash), tokens, np.full_like(tokens, position))
    found = np.flatnonzero(hashes == np.uint64(old_hash & (1 << 64) - 1))
    return int(found[0]) if len(found) else None


def _victim(
    pool: Pool, slot: int | None, holder: tuple[int, int] | None, previous: int | None, successor: int | None, foreign: bool
) -> Request:
    if holder is not None and pool.table is not None:
        row = holder[0]
        return _live_request(pool, row)
    chains, size = pool.chains, pool.num_slots
    before = [] if previous is None else [*chains.before(previous, size), previous]
    behind = [] if successor is None else [successor, *chains.behind(successor, size)]
    if slot is not None and not foreign and successor is None:
        behind = chains.behind(slot, size)
        before = before or chains.before(slot, size)
    return Request("request A", None, (*before, *([] if slot is None else [slot]), *behind))


def _live_request(pool: Pool, row: int) -> Request:
    slots = () if pool.table is None else pool.table.slots_of_row(row).tolist()
    return Request(f"request row {row}", row, tuple(slot for slot in slots if pool.exists(slot)))


def _other(pool: Pool, slot: int, victim: tuple[int, int] | None) -> Request:
    """The request whose record a slot holds."""
    stored = int(pool.chains.records[slot, PREV_HASH])
    if pool.table is not None:
        for row, position in pool.table.holders(slot):
            if (row, position) != victim and position == pool.chains.position(slot) and _hash_before(pool, row, position) == stored:
                return _live_request(pool, row)
    return Request("a request that is not live" if victim is not None else "request B", None, tuple(pool.chains.path(slot)))


def sentence(pool: Pool, finding: Finding) -> str:
    """The finding in one sentence, without its full stop."""
    violation, slot, victim = finding.violation, finding.slot, finding.victim.name
    reasons = violation.fail_reason
    place = f"position {finding.position} of {victim}" if finding.position is not None else f"a position of {victim}"
    if FailReason.SLOT_OUT_OF_RANGE in reasons:
        return _out_of_range(pool, finding, place)
    if FailReason.WRITE_POSITION_MISMATCH in reasons:
        return f"Slot {slot} was written with position {violation.position} where position {finding.position} of {victim} was due"
    if FailReason.WRITE_TOKEN_MISMATCH in reasons:
        return f"Slot {slot} was written with token {violation.stored_token} where token {violation.expected_token} was due, at {place}"
    if finding.empty:
        return f"Slot {slot} is read as {place}, but it is empty: released, or never written"
    if _CHAIN in reasons:
        return _foreign(finding, place)
    if _POSITION in reasons:
        return f"Slot {slot} holds position {violation.position} where {place} is expected"
    if FailReason.VERIFY_TOKEN_MISMATCH in reasons:
        return f"Slot {slot}, {place}, holds token {violation.stored_token} where token {violation.expected_token} is expected"
    if finding.changed:
        return f"Slot {slot} ({place}) was overwritten: first its KV bytes, and by now its record too, {_record_now(pool, slot)}"
    return f"KV bytes of slot {slot} ({place}) changed, and its record did not"


def _record_now(pool: Pool, slot: int) -> str:
    if not pool.chains.written[slot]:
        return "which is empty"
    return f"which has token {pool.chains.records[slot, TOKEN]} at position {pool.chains.position(slot)}"


def _foreign(finding: Finding, place: str) -> str:
    violation, slot = finding.violation, finding.slot
    owner = "another request" if finding.other is None else finding.other.name
    if finding.other is not None and finding.other.row == finding.victim.row is not None:
        owner = "the same request"
    holds = f"position {violation.position} of {owner}"
    if finding.rightful is not None:
        return f"{capital(place)} is read from slot {slot}, which holds {holds}; the right record is in slot {finding.rightful}"
    if finding.overwritten:
        return f"Slot {slot} was overwritten: it held {place}, and now holds {holds}"
    if finding.other is None and _POSITION not in violation.fail_reason:
        return f"Slot {slot}, {place}, does not follow the slot before it: one of the two was overwritten"
    return f"Slot {slot} holds {holds} where {place} is expected"


def _out_of_range(pool: Pool, finding: Finding, place: str) -> str:
    violation = finding.violation
    if violation.slot_idx == -1 and violation.position == -1:
        return f"A row of the batch left the token arrays, which have {violation.expected_aux} tokens"
    if violation.expected_aux != pool.num_slots:
        return f"{capital(place)} names entry {violation.slot_idx} of the token arrays as its parent, which it cannot follow"
    return f"{capital(place)} has slot index {violation.slot_idx}, which does not exist: the pool has {pool.num_slots} slots"
