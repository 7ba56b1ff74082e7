"""The text of a report, and the same as data."""

from __future__ import annotations

import json

import pytest

import jax_kvcanary as kvc
from jax_kvcanary import CanaryLaunchTag as Tag
from jax_kvcanary import FailReason as Reason
from jax_kvcanary.violations import with_related_slots

CHAIN, POSITION, REAL_KV = Reason.VERIFY_CHAIN_HASH_MISMATCH, Reason.VERIFY_POSITION_MISMATCH, Reason.VERIFY_REAL_KV_HASH_MISMATCH
WRITE_TOKEN, WRITE_POSITION = Reason.WRITE_TOKEN_MISMATCH, Reason.WRITE_POSITION_MISMATCH
TOKEN, RANGE = Reason.VERIFY_TOKEN_MISMATCH, Reason.SLOT_OUT_OF_RANGE

STOLEN = "the slot belongs to another request now (handed out twice, or freed while in use), or req_to_token names a wrong slot here"
MIXED_UP = "two requests of equal length are mixed up here, or a prefix was matched that holds other tokens"
STALE = "a request or a cache still refers to a slot that was released, or whose KV and records never arrived"
SECOND_WRITER = (
    "the slot was given to another request in this very step (then the next one finds its chain and position broken, too), or a second "
    "writer: a late transfer, or a scatter with a wrong index or stride"
)
PREDECESSOR = (
    "the slot before it was overwritten (then that one has a finding, too), or this one was, by a request that has it at the same "
    "position; or two branches were spliced"
)
SHIFTED = "the entry of req_to_token is shifted, or the record was overwritten in place"
WRONG_FEED = "a wrong token was fed when the slot was written, or the list of expected tokens belongs to another request"
MIXED_TOKENS = "tokens were mixed up between rows, taken from another step, or sampled from the wrong logits"
BAD_POSITIONS = "positions that were not advanced or were advanced twice, or a prefix length that does not match the cache"
NO_INDEX = "an entry of req_to_token, the SWA table or out_cache_loc that was never set, was cleared too early, or was overwritten"

THERE = "the position that the request has there"
BYTES = "the KV bytes that were fingerprinted"
HELD = "token 11 at position 3, with chain hash 0x0000000000000abc"
ASKED = "chain hash 0x0000000000000def, which follows from the slot before it"


def violation(reasons, *, tag=Tag.TAIL_K_FULL, slot=7, position=3, stored=11, expected=-1, chain_hash=0xABC, aux=0xDEF, **more):
    return kvc.Violation(tag, reasons, slot, position, stored, expected, chain_hash, aux, **more)


def lines_of(finding):
    """The lines of a report's text by what stands before the colon, those of reasons left out."""
    lines = (line.strip().split(": ", 1) for line in str(finding).splitlines()[2:])
    return {name: text for name, text in lines if name in ("expected", "found", "usual cause") or name.startswith("also broken")}


@pytest.mark.parametrize(
    ("reasons", "expected", "found", "cause"),
    [
        (CHAIN, ASKED, HELD, PREDECESSOR),
        (POSITION, THERE, HELD, SHIFTED),
        (REAL_KV, BYTES, f"{HELD} and other KV bytes", SECOND_WRITER),
        (TOKEN, "token 12", HELD, WRONG_FEED),
        (CHAIN | POSITION, f"{ASKED}; {THERE}", HELD, STOLEN),
        (CHAIN | TOKEN, f"{ASKED}; token 12", HELD, MIXED_UP),
        (CHAIN | POSITION | REAL_KV | TOKEN, f"{ASKED}; token 12; {THERE}; {BYTES}", f"{HELD} and other KV bytes", STOLEN),
        (CHAIN | REAL_KV, f"{ASKED}; {BYTES}", f"{HELD} and other KV bytes", PREDECESSOR),
    ],
)
def test_what_a_verify_found(reasons, expected, found, cause):
    finding = violation(reasons, expected=12 if TOKEN in reasons else -1)
    assert lines_of(finding) == {"expected": expected, "found": found, "usual cause": cause}


def test_a_record_that_nothing_has_written():
    finding = violation(CHAIN | POSITION | REAL_KV, position=-1, stored=-1, chain_hash=2**64 - 1)
    assert lines_of(finding) == {
        "expected": f"{ASKED}; {THERE}",
        "found": "a record that nothing has written since it was allocated or released",
        "usual cause": STALE,
    }
    assert "  verify_real_kv_hash: the slot has no fingerprint of KV bytes" in str(finding).splitlines()


@pytest.mark.parametrize(
    ("reasons", "cause"), [(WRITE_TOKEN, MIXED_TOKENS), (WRITE_POSITION, BAD_POSITIONS), (WRITE_TOKEN | WRITE_POSITION, MIXED_TOKENS)]
)
def test_what_a_write_found(reasons, cause):
    finding = violation(reasons, tag=Tag.HEAD_K_FULL, expected=12, aux=4)
    assert lines_of(finding) == {"expected": "token 12 at position 4", "found": "token 11 at position 3", "usual cause": cause}
    before_all = violation(reasons, tag=Tag.HEAD_K_FULL, expected=12, aux=2**64 - 1)
    assert lines_of(before_all)["expected"] == "token 12 at position -1"


def test_an_index_that_does_not_exist():
    finding = violation(RANGE, slot=99, stored=-1, chain_hash=0, aux=67)
    assert lines_of(finding) == {"expected": "an index from 0 to 66", "found": "99, for position 3", "usual cause": NO_INDEX}
    released = violation(RANGE, slot=99, position=-1, stored=-1, chain_hash=0, aux=67)
    assert lines_of(released)["found"] == "99, among slots that were released or that records were moved to"
    cut = violation(RANGE, slot=-1, position=-1, stored=-1, chain_hash=0, aux=5)
    assert lines_of(cut) == {
        "expected": "entries below 5, the number of tokens",
        "found": "a row of the write plan that reaches outside",
        "usual cause": NO_INDEX,
    }


def test_a_parent_of_another_row():
    """A slot that exists is never out of range, so this is entry 2, named as the parent of entry 7."""
    finding = violation(RANGE, tag=Tag.HEAD_K_FULL, slot=2, position=8, aux=7, request_row=1)
    assert lines_of(finding) == {
        "expected": "a parent in the same row as entry 7 of the token arrays and before it, or a negative one",
        "found": "entry 2, for token 11 at position 8",
        "usual cause": "parents that count from the beginning of their row, or of another batch: they count through the token arrays",
    }
    assert "the array ends" not in str(finding)
    found = with_related_slots([finding, violation(WRITE_POSITION, tag=Tag.HEAD_K_FULL, slot=9, request_row=1)])
    assert [finding.related_slots for finding in found] == [(9,), ()]


def test_an_index_of_a_write_may_be_a_parent():
    finding = violation(RANGE, tag=Tag.HEAD_K_FULL, slot=99, aux=7)
    assert lines_of(finding)["usual cause"] == f"{NO_INDEX}; or, in a tree, a wrong entry of parents"


def test_other_slots_of_the_same_request():
    """Each slot once, in the order of the findings; rows of other requests and of none are not mixed in."""
    rows = [(7, 1), (9, 1), (7, 1), (8, 2), (30, None), (-1, 1), (5, 1)]
    found = with_related_slots([violation(CHAIN, slot=slot, request_row=row) for slot, row in rows])
    assert [finding.related_slots for finding in found] == [(9, 5), (7, 5), (9, 5), (), (), (7, 9, 5), (7, 9)]
    assert lines_of(found[0])["also broken in request row 1"] == "slots 9, 5"
    assert not any(name.startswith("also") for name in lines_of(found[3]))
    many = with_related_slots([violation(CHAIN, slot=slot, request_row=4) for slot in range(1, 21)])
    assert lines_of(many[0])["also broken in request row 4"] == "slots 2, 3, 4, 5, 6, 7, 8, 9 and 11 more"


def test_slots_of_another_pool_are_not_mixed_in():
    """A full pool and a window's number their slots apart: slot 9 of one is not slot 9 of the other."""
    tags = [(7, Tag.HEAD_K_FULL), (9, Tag.TAIL_V_FULL), (9, Tag.HEAD_K_SWA), (3, Tag.TAIL_K_SWA)]
    found = with_related_slots([violation(CHAIN, slot=slot, tag=tag, request_row=1) for slot, tag in tags])
    assert [finding.related_slots for finding in found] == [(9,), (7,), (3,), (9,)]


def test_violations_as_data():
    findings = [
        violation(CHAIN | POSITION, step=41, earliest_step=40, request_row=2, related_slots=(9,)),
        violation(WRITE_POSITION, tag=Tag.HEAD_V_SWA, slot=8, chain_hash=-1, aux=4),
    ]
    data = json.loads(json.dumps(kvc.violations_to_dict(findings, total=5)))
    assert data == {
        "total": 5,
        "violations": [
            {
                "launch_tag": "TAIL_K_FULL",
                "fail_reason": ["verify_chain_hash", "verify_position"],
                "slot_idx": 7,
                "position": 3,
                "stored_token": 11,
                "expected_token": -1,
                "stored_chain_hash": "0x0000000000000abc",
                "expected_aux": "0x0000000000000def",
                "step": 41,
                "earliest_step": 40,
                "request_row": 2,
                "related_slots": [9],
                "usual_cause": STOLEN,
                "text": str(findings[0]),
            },
            {
                "launch_tag": "HEAD_V_SWA",
                "fail_reason": ["write_position"],
                "slot_idx": 8,
                "position": 3,
                "stored_token": 11,
                "expected_token": -1,
                "stored_chain_hash": "0x" + 16 * "f",
                "expected_aux": "0x0000000000000004",
                "step": None,
                "earliest_step": None,
                "request_row": None,
                "related_slots": [],
                "usual_cause": BAD_POSITIONS,
                "text": str(findings[1]),
            },
        ],
    }
    assert kvc.violations_to_dict([]) == {"total": 0, "violations": []}
