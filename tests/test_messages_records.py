"""What moving and releasing records say about wrong arguments, and that nothing is lost by one."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest

import jax_kvcanary as kvc
from helpers.messages import LOG, assert_message, case_id, floats, install, ints, make_state, release
from helpers.moving import CAPACITIES, CONFIG, WindowPool

N = 3


def records(groups=(kvc.PoolKind.FULL,), *, n=N, **changes):
    """Fresh records as a canary over MHATokenToKVPool gives them."""
    array = np.full((n, 32), 0xFF, np.uint8)
    return kvc.CanaryRecords(
        tuple(
            kvc.GroupRecords(kind=kind, **{"k_head": array, "k_tail": array, "v_head": array, "v_tail": array, **changes})
            for kind in groups
        )
    )


def window_state():
    return kvc.install_canary(WindowPool.allocate(), CONFIG, capacities=CAPACITIES)[1]


def insert(**changes):
    good = {"state": install()[1], "slots": ints(N), "records": records()}
    return kvc.insert_records(**{**good, **changes})


def extract(**changes):
    return kvc.extract_records(**{"state": install()[1], "slots": ints(N), **changes})


def read(**changes):
    return kvc.CanaryRecords.from_bytes(**changes)


def write(records):
    return records.to_bytes()


NO_V = dataclasses.replace(LOG, enable_v_half=False)
DATA = records().to_bytes()
KV = "FULL (K and V, token offset 0)"
MOVE = [
    (extract, {"state": None}, TypeError, "`state` is of type NoneType, but it must be a CanaryState."),
    (extract, {"slots": floats(N)}, TypeError, "`slots` has dtype float32, but it must be int32 or int64."),
    (extract, {"slots": ints()}, ValueError, "`slots` has shape [], but full-pool slots to extract needs shape [any]."),
    (
        extract,
        {"state": window_state()},
        ValueError,
        "`pool` is None, but it must be the live pool, since the SWA group has a table of slots there.",
    ),
    (insert, {"state": make_state()}, TypeError, "`state` is of type CanaryDeviceState, but it must be a CanaryState."),
    (
        insert,
        {"records": records().groups},
        TypeError,
        "`records` is of type tuple, but it must be a CanaryRecords, as extract_records returns it.",
    ),
    (insert, {"slots": ints(N, dtype=np.uint8)}, TypeError, "`slots` has dtype uint8, but it must be int32 or int64."),
    (insert, {"slots": ints(N, 1)}, ValueError, "`slots` has shape [3, 1], but full-pool slots to insert records at needs shape [any]."),
    (
        insert,
        {"slots": ints(N + 1)},
        ValueError,
        "`records.groups[0].k_head` has shape [3, 32], but one record for each of 4 slots needs shape [4, 32].",
    ),
    (
        insert,
        {"records": records(v_tail=np.zeros((N, 31), np.uint8))},
        ValueError,
        "`records.groups[0].v_tail` has shape [3, 31], but one record for each of 3 slots needs shape [3, 32].",
    ),
    (
        insert,
        {"records": records(k_tail=ints(N, 32))},
        TypeError,
        "`records.groups[0].k_tail` has dtype int32, but it must be uint8.",
    ),
    (
        insert,
        {"records": records(v_head=None)},
        TypeError,
        "`records.groups[0].v_head` is of type NoneType, but it must be an array.",
    ),
    (
        insert,
        {"records": records(v_head=None, v_tail=None)},
        ValueError,
        f"`records` is of a canary with the groups FULL (K alone, token offset 0), but this canary has the groups {KV}.",
    ),
    (
        insert,
        {"state": install(config=NO_V)[1]},
        ValueError,
        f"`records` is of a canary with the groups {KV}, but this canary has the groups FULL (K alone, token offset 0).",
    ),
    (
        insert,
        {"records": records(kv_token_id_vs_position_offset=1)},
        ValueError,
        f"`records` is of a canary with the groups FULL (K and V, token offset 1), but this canary has the groups {KV}.",
    ),
    (
        insert,
        {"records": records((kvc.PoolKind.FULL, kvc.PoolKind.SWA))},
        ValueError,
        f"`records` is of a canary with the groups {KV}, SWA (K and V, token offset 0), but this canary has the groups {KV}.",
    ),
    (
        insert,
        {"records": records((kvc.PoolKind.SWA,))},
        ValueError,
        f"`records` is of a canary with the groups SWA (K and V, token offset 0), but this canary has the groups {KV}.",
    ),
    (
        insert,
        {"records": kvc.CanaryRecords(())},
        ValueError,
        f"`records` is of a canary with no groups, but this canary has the groups {KV}.",
    ),
    (
        insert,
        {"state": window_state(), "records": records(tuple(kvc.PoolKind))},
        ValueError,
        "`pool` is None, but it must be the live pool, since the SWA group has a table of slots there.",
    ),
]

KINDS = [
    (release, {"kinds": (kvc.PoolKind.SWA,)}, ValueError, "`kinds` names SWA, but this canary has the groups FULL."),
    (
        release,
        {"kinds": kvc.PoolKind.FULL},
        TypeError,
        "`kinds` is <PoolKind.FULL: 0> of type PoolKind, but it must be None or a tuple of PoolKind.",
    ),
    (release, {"kinds": (0, 2)}, ValueError, "`kinds[1]` is 2, but it must be one of FULL (0), SWA (1)."),
    (release, {"kinds": ("SWA",)}, ValueError, "`kinds[0]` is 'SWA', but it must be one of FULL (0), SWA (1)."),
]

BYTES = [
    (read, {"data": "KVCANREC"}, TypeError, "`data` is of type str, but it must be bytes, a bytearray or a memoryview."),
    (read, {"data": ints(N)}, TypeError, "`data` is of type ndarray, but it must be bytes, a bytearray or a memoryview."),
    (read, {"data": b""}, ValueError, "`data` has 0 bytes, but its header has 20 bytes: it was cut short."),
    (read, {"data": b"PK\x03\x04"}, ValueError, "`data` begins with b'PK\\x03\\x04', but the records of a canary begin with b'KVCANREC'."),
    (
        read,
        {"data": b"\0" + DATA},
        ValueError,
        "`data` begins with b'\\x00KVCANRE', but the records of a canary begin with b'KVCANREC'.",
    ),
    (
        read,
        {"data": DATA[:8] + b"\x02" + DATA[9:]},
        ValueError,
        "`data` is in version 2 of its format, but this package reads version 1.",
    ),
    (
        read,
        {"data": DATA[:10] + b"\xff\xff" + DATA[12:]},
        ValueError,
        f"`data` has {len(DATA)} bytes, but its header and 65535 groups have 524300 bytes: it was cut short.",
    ),
    (
        read,
        {"data": DATA[:12] + b"\xff" * 4 + DATA[16:]},
        ValueError,
        f"`data` has {len(DATA)} bytes, but 4294967295 records of its groups end at 549755813788 bytes: it was cut short.",
    ),
    (
        read,
        {"data": DATA[:20] + b"\x05" + DATA[21:]},
        ValueError,
        "`data` has a group of kind 5 with 2 halves, but a group is of kind 0 (FULL) or 1 (SWA) with 1 or 2.",
    ),
    (
        read,
        {"data": DATA[:21] + b"\x00" + DATA[22:]},
        ValueError,
        "`data` has a group of kind 0 with 0 halves, but a group is of kind 0 (FULL) or 1 (SWA) with 1 or 2.",
    ),
    (
        read,
        {"data": DATA + b"\x00"},
        ValueError,
        f"`data` has {len(DATA) + 1} bytes, but 3 records of its groups end at {len(DATA)} bytes.",
    ),
    (
        write,
        {"records": records(k_head=np.zeros((2, 32), np.uint8))},
        ValueError,
        "`records.groups[0].k_tail` has shape [3, 32], but one record for each of 2 slots needs shape [2, 32].",
    ),
    (
        write,
        {"records": records(v_tail=np.zeros((N, 32), np.int8))},
        TypeError,
        "`records.groups[0].v_tail` has dtype int8, but it must be uint8.",
    ),
    (write, {"records": records(k_head=None)}, TypeError, "`records.groups[0].k_head` is of type NoneType, but it must be an array."),
]

CASES = [*MOVE, *KINDS, *BYTES]


@pytest.mark.parametrize(("call", "changes", "error", "text"), CASES, ids=map(case_id, CASES))
def test_message(call, changes, error, text):
    assert_message(call, changes, error, text)


def test_a_refused_insertion_donates_nothing():
    _, state = install()
    inserted = jax.jit(kvc.insert_records, donate_argnums=0)
    for bad in (records(n=N + 1), records((kvc.PoolKind.SWA,))):
        with pytest.raises(ValueError, match="`records"):
            inserted(state, ints(N), bad)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    after = inserted(state, np.array([4, 5, 6], np.int32), jax.tree.map(np.zeros_like, records()))
    assert not np.asarray(after.groups[0].v_head)[4:7].any()


def test_kinds_are_static():
    canary, state = install()
    with pytest.raises(ValueError, match=r"^`kinds\[0\]` is .*, but it must be one of FULL \(0\), SWA \(1\)\."):
        jax.jit(partial(canary.release, pool=None))(state, ints(N), kinds=(0,))
