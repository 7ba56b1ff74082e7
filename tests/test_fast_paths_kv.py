"""Verifies around the borders of a warp's batches, and real KV of every length and alignment, on the device against the reference."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from helpers.launches import INT32_MAX, TAGS, Write, chain_plan, check_verify, check_write, random_records, source_of
from helpers.states import fields, fresh_buffer, fresh_state
from jax_kvcanary import FailReason as Reason
from jax_kvcanary import RealKvHashMode as Mode
from jax_kvcanary import reference
from jax_kvcanary._launch import Endpoint
from jax_kvcanary.plan import WritePlan
from jax_kvcanary.reference.hashes import record_hashes, slot_hash

CHAIN, POSITION, TOKEN = Reason.VERIFY_CHAIN_HASH_MISMATCH, Reason.VERIFY_POSITION_MISMATCH, Reason.VERIFY_TOKEN_MISMATCH
KV = Reason.VERIFY_REAL_KV_HASH_MISMATCH
#: Words of a slot around those at which a source is read another way.
WORDS = (1, 2, 3, 15, 16, 17, 18, 32, 33, 34, 256)
ALIGNED = pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "not aligned"])


def int32(*values):
    return np.array(values, np.int32)


def chain_write(rng, num_slots, length, *, sources=(), mode=Mode.NONE):
    """A write of one chain into slots anywhere in a fresh buffer."""
    return Write(
        buffers=[fresh_buffer(num_slots)],
        plan=WritePlan(int32(0, length), int32(-1), int32(1)),
        tokens=rng.integers(0, 50_000, length).astype(np.int32),
        positions=np.arange(length, dtype=np.int32),
        slots=rng.permutation(np.arange(1, num_slots))[:length].astype(np.int32),
        sources=(tuple(sources),),
        mode=mode,
    )


def written(case):
    """The buffer that the reference makes of a write."""
    (endpoint,) = case.endpoints
    buffer, _ = reference.write_step(
        endpoint.canary_buf,
        case.plan,
        *case.arrays,
        fresh_state(1),
        tag=endpoint.tag,
        real_kv_sources=endpoint.sources,
        real_kv_hash_mode=case.mode,
    )
    return buffer


def chain(rng, num_slots, length, **options):
    """A buffer with one chain, its slots and its tokens."""
    case = chain_write(rng, num_slots, length, **options)
    return written(case), case.slots, case.tokens


def endpoint_of(buffer, *sources, number=0):
    return Endpoint(buffer, TAGS[number], sources)


def found(rows):
    """Sorted (slot, reasons) of logged rows."""
    return sorted((int(row[1]), int(row[7])) for row in rows)


# Entries.


@pytest.mark.parametrize("spare", [0, 5])
@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 1000])
def test_entry_counts(count, spare):
    """A sound chain is silent; one that is damaged here and there is not. What is not in use is not looked at."""
    rng = np.random.default_rng(count)
    buffer, slots, tokens = chain(rng, count + 53, count)
    plan = chain_plan(slots, tokens=tokens, capacity=count + spare)
    assert len(check_verify([endpoint_of(buffer)], plan, check_expected_token=True)) == 0
    damaged = rng.permutation(count)[: 1 + count // 9]
    fields(buffer)[slots[damaged], rng.integers(0, 4, len(damaged))] ^= 1
    other = buffer.copy()
    fields(other)[slots[::5], 1] += 1
    endpoints = [endpoint_of(half, number=number) for number, half in enumerate((buffer, other, buffer))]
    rows = check_verify(endpoints, plan, check_expected_token=True)
    assert {int(row[0]) for row in rows} == (set(TAGS[:3]) if count else set())


def test_forty_thousand_entries():
    """More than all warps of a device take at a time. Chains of three, since a long one would take the reference too long to make."""
    rng = np.random.default_rng(40)
    buffer, slots = random_records(rng, 40_009), rng.permutation(np.arange(1, 40_009))[:40_000].astype(np.int32)
    records, links = fields(buffer), np.arange(40_000) % 3
    records[slots, 1], records[slots, 3] = links, 0
    records[slots[links == 0], 2] = slot_hash(fresh_buffer(1), -1) - 2**64
    for link in (1, 2):
        at = np.flatnonzero(links == link)
        records[slots[at], 2] = record_hashes(records[slots[at - 1]]).view(np.int64)
    prevs = np.where(links == 0, -1, np.concatenate([[-1], slots[:-1]]))
    plan = chain_plan(slots, prevs=prevs, positions=links)
    assert len(check_verify([endpoint_of(buffer)], plan)) == 0
    damaged = np.flatnonzero(links == 2)[::131]
    records[slots[damaged], 1] ^= 4
    assert found(check_verify([endpoint_of(buffer)], plan)) == sorted((slot, POSITION) for slot in slots[damaged].tolist())


@pytest.mark.parametrize("valid", [-5, 0, 40, 71, 72, INT32_MAX])
@pytest.mark.parametrize("enable", [0, 1, -3])
def test_counts_of_entries_that_are_not_the_capacity(valid, enable):
    rng = np.random.default_rng(7)
    buffer = random_records(rng, 101)
    plan = dataclasses.replace(chain_plan(np.arange(1, 72)), verify_num_valid=int32(valid), enable=int32(enable))
    rows = check_verify([endpoint_of(buffer), endpoint_of(buffer, number=1)], plan)
    assert len(rows) == (2 * min(max(valid, 0), 71) if enable else 0)


@pytest.mark.parametrize("count", [33, 257, 601])
def test_entries_in_any_order(count):
    """No predecessor is the neighbour, or only by accident."""
    rng = np.random.default_rng(count)
    buffer, slots, tokens = chain(rng, count + 53, count)
    prevs = np.concatenate([[-1], slots[:-1]])
    order = rng.permutation(count)
    columns = {"prevs": prevs[order], "positions": order, "tokens": tokens[order]}
    assert len(check_verify([endpoint_of(buffer)], chain_plan(slots[order], **columns), check_expected_token=True)) == 0
    fields(buffer)[slots[::11], 0] ^= 1
    rows = check_verify([endpoint_of(buffer)], chain_plan(slots[order], **columns), check_expected_token=True)
    assert {CHAIN, TOKEN} <= {Reason(int(bits)) for bits in rows[:, 7]}
    # Backwards, every predecessor is the neighbour on the other side.
    assert len(check_verify([endpoint_of(buffer)], chain_plan(slots[::-1], prevs=prevs[::-1], positions=np.arange(count)[::-1]))) > 0


@pytest.mark.parametrize("count", [97, 1000])
def test_neighbours_that_are_no_predecessors(count):
    """Wrong predecessors: the neighbour's, the entry's own slot, padding, none, slots outside; padding and slots outside between."""
    rng = np.random.default_rng(count)
    num_slots = count + 53
    buffer, slots, tokens = chain(rng, num_slots, count)
    entries = np.stack([slots, np.concatenate([[-1], slots[:-1]]), np.arange(count), tokens], axis=1).astype(np.int64)
    picked = entries[np.sort(rng.integers(0, count, count))]  # runs with entries twice and entries left out
    at = rng.random(count)
    picked[at < 0.1, 0] = rng.choice([0, num_slots, -1, -(2**31), INT32_MAX, num_slots - 1], (at < 0.1).sum())
    neighbours = np.concatenate([[0], picked[:-1, 0]])
    picked[(at > 0.1) & (at < 0.3), 1] = neighbours[(at > 0.1) & (at < 0.3)]
    picked[(at > 0.3) & (at < 0.35), 1] = picked[(at > 0.3) & (at < 0.35), 0]
    wild = (at > 0.35) & (at < 0.45)
    picked[wild, 1] = rng.choice([-1, 0, -(2**31), num_slots, INT32_MAX, 5], wild.sum())
    plan = chain_plan(picked[:, 0], prevs=picked[:, 1], positions=picked[:, 2], tokens=picked[:, 3])
    offsets = np.sort(rng.integers(0, count + 1, 6))
    plan = dataclasses.replace(plan, row_offsets=int32(0, *offsets, count))
    rows = check_verify([endpoint_of(buffer), endpoint_of(buffer[: count // 2], number=1)], plan, check_expected_token=True)
    assert {CHAIN, Reason.SLOT_OUT_OF_RANGE} <= {Reason(int(bits)) for bits in rows[:, 7]}


@pytest.mark.parametrize("field", range(4))
@pytest.mark.parametrize("entry", [31, 32, 63, 64, 255, 256])
def test_a_damaged_record_at_the_border_of_a_batch(entry, field):
    """The last lane of one batch hands its hash to the first one of the next."""
    rng = np.random.default_rng(entry)
    buffer, slots, tokens = chain(rng, 353, 300)
    fields(buffer)[slots[entry], field] ^= 1 << 40
    rows = check_verify([endpoint_of(buffer)], chain_plan(slots, tokens=tokens), check_expected_token=True)
    own = (TOKEN, POSITION, CHAIN, KV)[field]
    want = [(slots[entry], own), *([(slots[entry + 1], CHAIN)] if field < 3 else [])]
    assert found(rows) == sorted((int(slot), int(reasons)) for slot, reasons in want)


# Real KV.


@ALIGNED
@pytest.mark.parametrize(("words", "page_size"), [(words, (1, 3, 16)[i % 3]) for i, words in enumerate(WORDS)])
def test_words_of_a_slot(words, page_size, aligned):
    """Written and verified; then one bit of the last word of a few slots changes."""
    rng = np.random.default_rng(words)
    source = source_of(rng, 67, words, page_size=page_size, aligned=aligned)
    case = chain_write(rng, 67, 41, sources=[source], mode=Mode.ALL)
    assert len(check_write(case)) == 0
    buffer, plan = written(case), chain_plan(case.slots)
    assert len(check_verify([endpoint_of(buffer, source)], plan, Mode.ALL)) == 0
    damaged = case.slots[[0, 31, 32, 40]]
    for slot in damaged.tolist():
        start = source.byte_offset + slot // page_size * source.row_stride + slot % page_size * source.token_stride
        source.array[start + words * 8 - 1] ^= 0x80
    assert found(check_verify([endpoint_of(buffer, source)], plan, Mode.ALL)) == sorted((slot, KV) for slot in damaged.tolist())


@pytest.mark.parametrize("mode", [Mode.NONE, Mode.PARTIAL, Mode.ALL])
@pytest.mark.parametrize(
    "words",
    [(256, 1, 18, 2), (2, 2, 2, 2), (16, 3, 34, 17), (1, 32, 15, 33), (3, 1), (64, 48, 16)],
    ids=lambda words: "-".join(map(str, words)),
)
def test_sources_of_different_sizes(words, mode):
    """Long rows, short ones and pairs in one endpoint, on pages of different sizes, aligned and not."""
    rng = np.random.default_rng(sum(words))
    sources = [source_of(rng, 73, n, page_size=(1, 16, 3, 5)[i], aligned=(i + n) % 2 == 0) for i, n in enumerate(words)]
    case = chain_write(rng, 73, 37, sources=sources, mode=mode)
    case.slots[[3, 36]] = -1, case.slots[5]  # one skipped, one that names a slot again
    check_write(case)
    buffer, plan = written(case), chain_plan(rng.permutation(73).astype(np.int32))
    assert len(check_verify([endpoint_of(buffer, *sources)], plan, mode)) > 0
    fields(buffer)[case.slots[7:11], 3] ^= 1
    check_verify([endpoint_of(buffer, *sources)], plan, mode)


@pytest.mark.parametrize("tokens", [97, 1033])
@pytest.mark.parametrize("words", [2, 18])
def test_writes_of_several_rows_with_real_kv(tokens, words):
    """Endpoints with sources beside others without, chains that differ, slots named twice, in launches of one block and of many."""
    rng = np.random.default_rng(tokens)
    num_slots = tokens + 61
    case = chain_write(rng, num_slots, tokens, mode=Mode.ALL)
    buffer = random_records(rng, num_slots)
    case.buffers = [buffer.copy() for _ in range(4)]
    fields(case.buffers[3])[7, 0] ^= 1
    case.sources = ((source_of(rng, num_slots, words),), (), (source_of(rng, num_slots, 3), source_of(rng, num_slots, words)), ())
    case.sources = (*case.sources[:3], case.sources[0])
    case.plan = WritePlan(int32(0, tokens // 3, tokens // 2, tokens), int32(-1, 7, 9), int32(3))
    case.slots[case.slots == 7] = 11
    again = rng.permutation(np.arange(5, tokens))[:19]
    case.slots[again] = case.slots[again - 5]
    rows = check_write(case)
    assert set(rows[:, 7].tolist()) == {Reason.WRITE_POSITION_MISMATCH}


@pytest.mark.parametrize("count", [33, 301])
def test_verifies_of_endpoints_with_and_without_sources(count):
    """One endpoint reads nothing, one pairs, one long rows, one everything; each has records of its own that are damaged."""
    rng = np.random.default_rng(count)
    num_slots = count + 29
    pair, long, odd = source_of(rng, num_slots, 2), source_of(rng, num_slots, 20, page_size=3), source_of(rng, num_slots, 5)
    sources = ((), (pair,), (long,), (odd, long, pair))
    base = chain_write(rng, num_slots, count, mode=Mode.ALL)
    endpoints, want = [], []
    for number, own in enumerate(sources):
        buffer = written(dataclasses.replace(base, sources=(own,)))
        slot = base.slots[[0, 31, 32, count - 1][number]]
        fields(buffer)[slot, 3] ^= 1
        endpoints.append(endpoint_of(buffer, *own, number=number))
        want.append((TAGS[number], slot, KV))
    rows = check_verify(endpoints, chain_plan(base.slots), Mode.ALL)
    assert sorted((row[0], row[1], row[7]) for row in rows.tolist()) == sorted((int(t), int(s), int(r)) for t, s, r in want)


def test_bad_slots_read_no_source():
    """Slots outside the buffer have no bytes in a source."""
    rng = np.random.default_rng(5)
    sources = [source_of(rng, 11, words) for words in (2, 18, 3)]
    buffer = random_records(rng, 11)
    slots = int32(1, 0, 11, -1, 10, INT32_MAX, -(2**31), 10, 0, 3)
    rows = check_verify([endpoint_of(buffer, *sources)], chain_plan(slots, prevs=np.full(10, -1)), Mode.ALL)
    assert sorted(rows[rows[:, 7] == Reason.SLOT_OUT_OF_RANGE, 1].tolist()) == [-(2**31), -1, 11, INT32_MAX]
