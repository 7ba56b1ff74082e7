"""Pieces of cases that are worked out by hand: hashes in other words than the library's, buffers, counters."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from helpers.backends import host
from helpers.states import records
from jax_kvcanary.constants import CanaryLaunchTag
from jax_kvcanary.state import to_int64

TAG = CanaryLaunchTag.TAIL_K_FULL
NUM_SLOTS = 7
FRESH = [-1, -1, -1, -1]

# Reasons.
CHAIN, POSITION, REAL_KV, WRITE_TOKEN, WRITE_POSITION, TOKEN, RANGE = (1 << bit for bit in range(7))


def mix(x: int) -> int:
    """splitmix64 in other words than the reference's: NumPy's wrapping words."""
    word = np.array([x % 2**64], np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        word = (word ^ (word >> np.uint64(shift))) * np.uint64(factor)
    return int((word ^ (word >> np.uint64(31)))[0])


def link(prev_hash: int, token: int, position: int) -> int:
    """The hash behind a record, as the signed integer that records hold."""
    return signed(mix(mix(mix(prev_hash) ^ token % 2**64) ^ position % 2**64))


def signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


ANCHOR = signed(mix(0xC0FFEE1234567890))
AFTER_11 = link(ANCHOR, 11, 0)
AFTER_12 = link(AFTER_11, 12, 1)
AFTER_13 = link(AFTER_12, 13, 2)

#: Tokens 11, 12, 13 in slots 2, 4, 1; slots 0, 3, 5, 6 are fresh.
CHAIN_OF_THREE = {2: [11, 0, ANCHOR, 0], 4: [12, 1, AFTER_11, 0], 1: [13, 2, AFTER_12, 0]}


def buffer(content: dict[int, list[int]]) -> np.ndarray:
    """A canary buffer of NUM_SLOTS slots; those not given are fresh."""
    return records([content.get(slot, FRESH) for slot in range(NUM_SLOTS)])


def counters(state: object) -> SimpleNamespace:
    """The counters of TAG; all others must be 0."""
    state = host(state)
    tables = {
        "kernel_runs": to_int64(state.kernel_run_counters),
        "slot_runs": to_int64(state.slot_run_counters),
        "skips": state.verify_skip_counters,
        "reasons": state.fail_reason_counters,
    }
    for table in tables.values():
        assert not np.delete(table, TAG, axis=0).any()
    return SimpleNamespace(**{name: table[TAG].tolist() for name, table in tables.items()})
