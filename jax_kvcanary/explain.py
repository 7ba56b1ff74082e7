"""What a finding means, in words: what was expected, what was found, and what usually causes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jax_kvcanary.constants import FailReason

if TYPE_CHECKING:
    from jax_kvcanary.violations import Violation

CHAIN = FailReason.VERIFY_CHAIN_HASH_MISMATCH
POSITION = FailReason.VERIFY_POSITION_MISMATCH
REAL_KV = FailReason.VERIFY_REAL_KV_HASH_MISMATCH
WRITE_TOKEN = FailReason.WRITE_TOKEN_MISMATCH
WRITE_POSITION = FailReason.WRITE_POSITION_MISMATCH
TOKEN = FailReason.VERIFY_TOKEN_MISMATCH
OUT_OF_RANGE = FailReason.SLOT_OUT_OF_RANGE

_FRESH_HASH = (1 << 64) - 1

#: Slots that one line names; a flood must stay readable.
_MAX_SLOTS = 8

REASONS = {
    CHAIN: "the slot does not follow from the slot before it: one of the two was overwritten, or belongs to another request",
    POSITION: "the slot holds another position than the request has there",
    REAL_KV: "the KV bytes changed since they were fingerprinted, and the record that belongs to them is still there",
    WRITE_TOKEN: "the step wrote another token than was expected",
    WRITE_POSITION: "the step wrote a position that was not expected, or that does not follow its predecessor's",
    TOKEN: "the slot holds another token than the request has at that position",
    OUT_OF_RANGE: "there is no such index: the array ends at the number in expected_aux",
}


def is_fresh(violation: Violation) -> bool:
    """Whether a verify found a record that nothing has written since it was allocated or released."""
    return violation.position == violation.stored_token == -1 and violation.stored_chain_hash == _FRESH_HASH


def names_a_parent(violation: Violation) -> bool:
    """Whether the index is surely no slot but the parent of an entry: of another row, since slots that exist are never out of range."""
    return OUT_OF_RANGE in violation.fail_reason and 0 <= violation.slot_idx < violation.expected_aux


def explain(violation: Violation) -> list[str]:
    """The lines below the first two of a report."""
    expected, found = _expected_and_found(violation)
    lines = [f"expected: {expected}", f"found: {found}"]
    meanings = dict(REASONS)
    if is_fresh(violation):
        meanings[REAL_KV] = "the slot has no fingerprint of KV bytes"
    if names_a_parent(violation):
        meanings[OUT_OF_RANGE] = "the token follows no such entry of the token arrays"
    lines += [f"{_name(reason)}: {meanings[reason]}" for reason in FailReason if reason in violation.fail_reason]
    lines.append(f"usual cause: {usual_cause(violation)}")
    if violation.related_slots:
        lines.append(f"also broken in request row {violation.request_row}: {_some(violation.related_slots)}")
    return lines


def usual_cause(violation: Violation) -> str:
    """What most often leads to this combination of reasons."""
    reasons = violation.fail_reason
    if names_a_parent(violation):
        return "parents that count from the beginning of their row, or of another batch: they count through the token arrays"
    if OUT_OF_RANGE in reasons:
        cause = "an entry of req_to_token, the SWA table or out_cache_loc that was never set, was cleared too early, or was overwritten"
        # Of a write, it may be a parent that is not before its entry.
        return cause if violation.stored_token == -1 else f"{cause}; or, in a tree, a wrong entry of parents"
    if reasons & (WRITE_TOKEN | WRITE_POSITION):
        return _cause_of_write(violation)
    if is_fresh(violation):
        return "a request or a cache still refers to a slot that was released, or whose KV and records never arrived"
    if reasons == REAL_KV:
        return (
            "the slot was given to another request in this very step (then the next one finds its chain and position broken, too), or a "
            "second writer: a late transfer, or a scatter with a wrong index or stride"
        )
    if CHAIN in reasons and POSITION in reasons:
        return "the slot belongs to another request now (handed out twice, or freed while in use), or req_to_token names a wrong slot here"
    if CHAIN in reasons and TOKEN in reasons:
        return "two requests of equal length are mixed up here, or a prefix was matched that holds other tokens"
    if CHAIN in reasons:
        return (
            "the slot before it was overwritten (then that one has a finding, too), or this one was, by a request that has it at the same "
            "position; or two branches were spliced"
        )
    if POSITION in reasons:
        return "the entry of req_to_token is shifted, or the record was overwritten in place"
    return "a wrong token was fed when the slot was written, or the list of expected tokens belongs to another request"


def _cause_of_write(violation: Violation) -> str:
    if WRITE_TOKEN in violation.fail_reason:
        return "tokens were mixed up between rows, taken from another step, or sampled from the wrong logits"
    return "positions that were not advanced or were advanced twice, or a prefix length that does not match the cache"


def _expected_and_found(violation: Violation) -> tuple[str, str]:
    v, reasons = violation, violation.fail_reason
    if OUT_OF_RANGE in reasons:
        if v.slot_idx == -1:
            return f"entries below {v.expected_aux}, the number of tokens", "a row of the write plan that reaches outside"
        if names_a_parent(v):
            before = f"a parent in the same row as entry {v.expected_aux} of the token arrays and before it, or a negative one"
            return before, f"entry {v.slot_idx}, for token {v.stored_token} at position {v.position}"
        where = f"for position {v.position}" if v.position >= 0 else "among slots that were released or that records were moved to"
        return f"an index from 0 to {v.expected_aux - 1}", f"{v.slot_idx}, {where}"
    if reasons & (WRITE_TOKEN | WRITE_POSITION):
        position = v.expected_aux - (1 << 64) if v.expected_aux >> 63 else v.expected_aux
        return f"token {v.expected_token} at position {position}", f"token {v.stored_token} at position {v.position}"
    expected = []
    if CHAIN in reasons:
        expected.append(f"chain hash 0x{v.expected_aux:016x}, which follows from the slot before it")
    if TOKEN in reasons:
        expected.append(f"token {v.expected_token}")
    if POSITION in reasons:
        expected.append("the position that the request has there")
    if REAL_KV in reasons and not is_fresh(v):
        expected.append("the KV bytes that were fingerprinted")
    if is_fresh(v):
        return "; ".join(expected), "a record that nothing has written since it was allocated or released"
    found = f"token {v.stored_token} at position {v.position}, with chain hash 0x{v.stored_chain_hash:016x}"
    return "; ".join(expected), found + (" and other KV bytes" if REAL_KV in reasons else "")


def _some(slots: Sequence[int]) -> str:
    shown = f"{'slots' if len(slots) > 1 else 'slot'} {', '.join(map(str, slots[:_MAX_SLOTS]))}"
    more = len(slots) - _MAX_SLOTS
    return f"{shown} and {more} more" if more > 0 else shown


def _name(reason: FailReason) -> str:
    return str(reason.name).lower().removesuffix("_mismatch")


def reason_text(reasons: FailReason) -> str:
    """Names of the reasons in lower case without ``_mismatch``, joined by ``+`` in bit order."""
    return "+".join(_name(reason) for reason in FailReason if reason in reasons)
