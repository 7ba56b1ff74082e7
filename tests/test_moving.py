"""The chain survives relocation: inside a pool, through the host, and between two pools; and what is left behind is reported."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

import jax_kvcanary as kvc
from helpers.moving import TAILS, UNWRITTEN, Engine, put_kv, take_kv
from jax_kvcanary import FailReason as Reason

CHAIN, POSITION, REAL_KV = Reason.VERIFY_CHAIN_HASH_MISMATCH, Reason.VERIFY_POSITION_MISMATCH, Reason.VERIFY_REAL_KV_HASH_MISMATCH
COUNT = 7  # tokens of the request that moves: positions 2 to 6 are in the window


@pytest.fixture
def engine():
    engine = Engine()
    assert engine.extend(1, 0, COUNT) == []
    assert engine.extend(2, 0, 4) == []
    return engine


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def move(canary, state, old, new, vacated, pool):
    records = kvc.extract_records(state, old, pool=pool)
    state = kvc.insert_records(state, new, records, pool=pool)
    return canary.release(state, vacated, pool)


def relocate(engine, old, new):
    """The records go to the new slots; old ones that nobody has any more are released."""
    vacated = np.where(np.isin(old, new), -1, old)
    engine.state = move(engine.canary, engine.state, old, new, vacated, engine.pool)


def next_tokens(engine, row, prefix):
    """Findings of two more steps of a request."""
    return engine.extend(row, prefix, 2) + engine.extend(row, prefix + 2, 1)


# Inside one pool.


def test_defragmentation(engine):
    """KV, records and table go to other slots: silence, for the one that moved and for the one that stayed."""
    old, new = engine.slots(1, COUNT), engine.new_slots(COUNT)
    kv = take_kv(engine.pool, old)
    relocate(engine, old, new)
    engine.pool = put_kv(engine.pool, new, kv)
    engine.table[1, :COUNT] = new
    assert next_tokens(engine, 1, COUNT) == next_tokens(engine, 2, 4) == []


def test_defragmentation_into_slots_of_its_own(engine):
    """Old and new places overlap: each position goes where the one before it was."""
    first = engine.new_slots(1)
    old = engine.slots(1, COUNT)
    new = np.concatenate([first, old[:-1]])
    kv = take_kv(engine.pool, old)
    relocate(engine, old, new)
    engine.pool = put_kv(engine.pool, new, kv)
    engine.table[1, :COUNT] = new
    assert next_tokens(engine, 1, COUNT) == []


def test_the_full_pool_is_defragmented_and_the_window_stays(engine):
    """The table hands the window's slots on to the new full-pool slots: their records are inserted where they were."""
    old, new = engine.slots(1, COUNT), engine.new_slots(COUNT, window=False)
    kv, window = take_kv(engine.pool, old), engine.lut[old]
    records = kvc.extract_records(engine.state, old, pool=engine.pool)
    engine.set_lut(old, 0)
    engine.set_lut(new, window)
    engine.state = kvc.insert_records(engine.state, new, records, pool=engine.pool)
    engine.state = engine.canary.release(engine.state, old, engine.pool)  # absent from the window's pool by now
    engine.pool = put_kv(engine.pool, new, kv)
    engine.table[1, :COUNT] = new
    assert next_tokens(engine, 1, COUNT) == []
    engine.table[1, :COUNT] = old
    stale = engine.step(1, COUNT, 0)
    assert stale == sorted(engine.expect(1, COUNT, range(COUNT), UNWRITTEN))


def test_kv_moves_without_its_records(engine):
    old, new = engine.slots(1, COUNT), engine.new_slots(COUNT)
    engine.pool = put_kv(engine.pool, new, take_kv(engine.pool, old))
    engine.table[1, :COUNT] = new
    assert engine.step(1, COUNT, 0) == sorted(engine.expect(1, COUNT, range(COUNT), UNWRITTEN))


def test_records_move_without_their_kv(engine):
    old, new = engine.slots(1, COUNT), engine.new_slots(COUNT)
    relocate(engine, old, new)
    engine.table[1, :COUNT] = new
    assert engine.step(1, COUNT, 0) == sorted(engine.expect(1, COUNT, range(COUNT), REAL_KV, phases=TAILS))


def test_the_table_is_not_rewritten(engine):
    """The moved request still reads its old slots: reported at once, with nobody in them yet."""
    old, new = engine.slots(1, COUNT), engine.new_slots(COUNT)
    kv = take_kv(engine.pool, old)
    relocate(engine, old, new)
    engine.pool = put_kv(engine.pool, new, kv)
    assert engine.step(1, COUNT, 0) == sorted(engine.expect(1, COUNT, range(COUNT), UNWRITTEN))


def test_records_move_to_the_wrong_slots(engine):
    """Positions 4 and 5 change places on the way; their KV does not."""
    old, new = engine.slots(1, COUNT), engine.new_slots(COUNT)
    wrong = new[[0, 1, 2, 3, 5, 4, 6]]
    kv = take_kv(engine.pool, old)
    relocate(engine, old, wrong)
    engine.pool = put_kv(engine.pool, new, kv)
    engine.table[1, :COUNT] = new
    swapped = engine.expect(1, COUNT, [4, 5], CHAIN | POSITION, phases=("HEAD_K", "HEAD_V"))
    swapped += engine.expect(1, COUNT, [4, 5], CHAIN | POSITION | REAL_KV, phases=TAILS)
    assert engine.step(1, COUNT, 0) == sorted(swapped + engine.expect(1, COUNT, [6], CHAIN))


def test_kv_and_records_to_the_wrong_slots_together(engine):
    """Two positions change places with everything they have, but not in the table: bytes and records agree, the chain does not."""
    old, new = engine.slots(1, COUNT), engine.new_slots(COUNT)
    wrong = new[[0, 1, 2, 3, 5, 4, 6]]
    kv = take_kv(engine.pool, old)
    relocate(engine, old, wrong)
    engine.pool = put_kv(engine.pool, wrong, kv)
    engine.table[1, :COUNT] = new
    assert engine.step(1, COUNT, 0) == sorted(engine.expect(1, COUNT, [4, 5], CHAIN | POSITION) + engine.expect(1, COUNT, [6], CHAIN))


def test_kv_records_and_table_together_are_a_legal_relocation(engine):
    old, new = engine.slots(1, COUNT), engine.new_slots(COUNT)
    wrong = new[[0, 1, 2, 3, 5, 4, 6]]
    kv = take_kv(engine.pool, old)
    relocate(engine, old, wrong)
    engine.pool = put_kv(engine.pool, wrong, kv)
    engine.table[1, :COUNT] = wrong
    assert next_tokens(engine, 1, COUNT) == []


# Through the host.


def offload(engine, row, count):
    """KV and records as the host keeps them; the slots are released, and used by somebody else."""
    slots = engine.slots(row, count)
    kv = [np.array(array) for array in take_kv(engine.pool, slots)]
    stored = kvc.extract_records(engine.state, slots, pool=engine.pool).to_bytes()
    engine.state = engine.canary.release(engine.state, slots, engine.pool)
    engine.table[3, :count] = slots
    assert engine.step(3, 0, count) == []
    return kv, stored


def reload(engine, row, count, kv, records):
    slots = engine.table[row, :count] = engine.new_slots(count)
    engine.pool = put_kv(engine.pool, slots, tuple(kv))
    engine.state = kvc.insert_records(engine.state, slots, records, pool=engine.pool)


def test_offload_and_reload(engine):
    kv, stored = offload(engine, 1, COUNT)
    reload(engine, 1, COUNT, kv, kvc.CanaryRecords.from_bytes(stored))
    assert next_tokens(engine, 1, COUNT) == next_tokens(engine, 3, COUNT) == []


def test_a_byte_of_kv_is_lost_on_the_host(engine):
    """In the full pool's V alone, at position 3."""
    kv, stored = offload(engine, 1, COUNT)
    kv[1][3].view(np.uint8)[-1] ^= 1
    reload(engine, 1, COUNT, kv, kvc.CanaryRecords.from_bytes(stored))
    found = [row for row in engine.expect(1, COUNT, [3], REAL_KV, phases=("TAIL_V",)) if row[0] == kvc.CanaryLaunchTag.TAIL_V_FULL]
    assert len(found) == 1
    assert engine.step(1, COUNT, 0) == found


def test_a_byte_of_a_record_is_lost_on_the_host(engine):
    """The position in one record of the full pool's K, HEAD: its own entry, and the chain of the next."""
    kv, stored = offload(engine, 1, COUNT)
    data = bytearray(stored)
    data[20 + 2 * 8 + 3 * 32 + 8] ^= 1  # headers, three records, a token
    reload(engine, 1, COUNT, kv, kvc.CanaryRecords.from_bytes(data))
    tag = int(kvc.CanaryLaunchTag.HEAD_K_FULL)
    slots = engine.slots(1, COUNT)
    assert engine.step(1, COUNT, 0) == sorted([(tag, slots[3], POSITION), (tag, slots[4], CHAIN)])


# Between two pools.


@pytest.fixture
def decoder():
    """A pool of another size, whose slots are handed out in another order, with a request of its own."""
    decoder = Engine(29, 19, step=11)
    assert decoder.extend(2, 0, 3) == []
    return decoder


def send(engine, decoder, *, window_from=0):
    """KV and records of request 1, to the decoder's own slots; positions before ``window_from`` get no window slot there."""
    slots = engine.slots(1, COUNT)
    kv = [np.array(array) for array in take_kv(engine.pool, slots)]
    records = kvc.CanaryRecords.from_bytes(kvc.extract_records(engine.state, slots, pool=engine.pool).to_bytes())
    new = np.concatenate([decoder.new_slots(window_from, window=False), decoder.new_slots(COUNT - window_from)])
    decoder.table[1, :COUNT] = new
    assert not set(zip(slots.tolist(), engine.lut[slots].tolist(), strict=True)) & set(zip(new, decoder.lut[new], strict=True))
    return kv, records, new


def test_prefill_here_and_decode_there(engine, decoder):
    kv, records, new = send(engine, decoder)
    decoder.pool = put_kv(decoder.pool, new, tuple(kv))
    decoder.state = kvc.insert_records(decoder.state, new, records, pool=decoder.pool)
    assert next_tokens(decoder, 1, COUNT) == next_tokens(decoder, 2, 3) == []
    assert next_tokens(engine, 1, COUNT) == []  # the sender keeps its copy


def test_only_the_window_has_slots_over_there(engine, decoder):
    """Legal: the decoder gives window slots to the last five positions alone."""
    kv, records, new = send(engine, decoder, window_from=2)
    assert (decoder.lut[new] > 0).sum() == 5
    decoder.pool = put_kv(decoder.pool, new, tuple(kv))
    decoder.state = kvc.insert_records(decoder.state, new, records, pool=decoder.pool)
    assert next_tokens(decoder, 1, COUNT) == []


@pytest.mark.parametrize("lost", [0, 3, COUNT - 1])
def test_a_record_gets_lost(engine, decoder, lost):
    """Its own entry is reported, and its successor's chain; after the last one, the write that it should have seeded."""
    kv, records, new = send(engine, decoder)
    decoder.pool = put_kv(decoder.pool, new, tuple(kv))
    padded = np.where(np.arange(COUNT) == lost, -1, new)
    decoder.state = kvc.insert_records(decoder.state, padded, records, pool=decoder.pool)
    found = decoder.expect(1, COUNT, [lost], UNWRITTEN)
    if lost < COUNT - 1:
        found += decoder.expect(1, COUNT, [lost + 1], CHAIN)
    assert decoder.step(1, COUNT, 0) == sorted(found)
    seeded = decoder.extend(1, COUNT, 1)
    assert sorted(found) == [row for row in seeded if row[2] != Reason.WRITE_POSITION_MISMATCH]
    assert (len(seeded) > len(found)) == (lost == COUNT - 1)


def test_a_token_of_kv_gets_lost(engine, decoder):
    """Zeros arrive for position 4, in all four arrays."""
    kv, records, new = send(engine, decoder)
    for array in kv:
        array[4] = 0
    decoder.pool = put_kv(decoder.pool, new, tuple(kv))
    decoder.state = kvc.insert_records(decoder.state, new, records, pool=decoder.pool)
    assert decoder.step(1, COUNT, 0) == sorted(decoder.expect(1, COUNT, [4], REAL_KV, phases=TAILS))
    assert next_tokens(decoder, 2, 3) == []


def test_the_records_of_another_request_arrive(engine, decoder):
    """The right number of records, of request 2 and its successor: tokens differ, so does every chain and every byte of KV."""
    kv, _, new = send(engine, decoder)
    assert engine.extend(2, 4, 3) == []
    others = kvc.extract_records(engine.state, engine.slots(2, COUNT), pool=engine.pool)
    decoder.pool = put_kv(decoder.pool, new, tuple(kv))
    decoder.state = kvc.insert_records(decoder.state, new, others.on_host(), pool=decoder.pool)
    # Their chain is sound in itself, so it is the KV that gives them away.
    assert decoder.step(1, COUNT, 0) == sorted(decoder.expect(1, COUNT, range(COUNT), REAL_KV, phases=TAILS))
