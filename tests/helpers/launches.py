"""Launches over several endpoints on the device against the NumPy reference: buffers, counters, the log, and the flags of rows."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import jax_kvcanary as kvc
from helpers.backends import host
from helpers.states import assert_same_state, fields, fresh_state, log_rows
from jax_kvcanary import reference
from jax_kvcanary._launch import BatchRows, Endpoint
from jax_kvcanary.constants import CanaryLaunchTag, RealKvHashMode
from jax_kvcanary.plan import VerifyPlan, WritePlan
from jax_kvcanary.reference.hashes import real_kv_hash, to_signed
from jax_kvcanary.verify import verify_launch
from jax_kvcanary.write import write_launch

TAGS = (CanaryLaunchTag.TAIL_K_FULL, CanaryLaunchTag.TAIL_V_FULL, CanaryLaunchTag.TAIL_K_SWA, CanaryLaunchTag.TAIL_V_SWA)
INT32_MAX = 2**31 - 1
ROOMY = 40_009

Rng = np.random.Generator


def random_records(rng: Rng, num_slots: int) -> np.ndarray:
    """A canary buffer of records that nothing follows from; their positions are small, so that rows can go on from them."""
    words = rng.integers(-(2**63), 2**63 - 1, (num_slots, 4))
    words[:, 1] = rng.integers(0, 5_000, num_slots)
    return words.view(np.uint8)


def source_of(rng: Rng, num_slots: int, words: int, *, page_size: int = 1, aligned: bool = True) -> kvc.RealKvSource:
    """A source whose slots have ``words`` 8-byte words; only where ``aligned`` does its address allow loads of 16 bytes."""
    token_stride = -(-words // 2) * 16 if aligned else words * 8
    row_stride, offset = page_size * token_stride + 32, 16 if aligned else 8
    pages = -(-num_slots // page_size)
    return kvc.RealKvSource(
        array=rng.integers(0, 256, offset + pages * row_stride, np.uint8),
        page_size=page_size,
        num_bytes_per_token=words * 8,
        read_bytes=words * 8,
        byte_offset=offset,
        row_stride_bytes=row_stride,
        token_stride_bytes=token_stride,
    )


# Writes.


@dataclass
class Write:
    """A write of some rows, to be changed by a test before it is checked.

    Fields:
        buffers: a canary buffer of each endpoint.
        plan: hand-made; row r has the entries from offset r to offset r + 1.
        tokens, positions, slots: int32 or int64, one value an entry.
        optional: further keywords: expected inputs, parents.
        sources: of each endpoint.
        mode: how much of them is hashed.
        chain_assert: whether positions must follow the seed's.
    """

    buffers: list[np.ndarray]
    plan: WritePlan
    tokens: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    optional: dict[str, np.ndarray] = field(default_factory=dict)
    sources: tuple[tuple[kvc.RealKvSource, ...], ...] = ()
    mode: RealKvHashMode = RealKvHashMode.NONE
    chain_assert: int = 1

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.tokens, self.positions, self.slots

    @property
    def endpoints(self) -> list[Endpoint]:
        sources = self.sources or ((),) * len(self.buffers)
        return [Endpoint(buf, tag, own) for buf, tag, own in zip(self.buffers, TAGS, sources, strict=False)]

    @property
    def ranges(self) -> list[range]:
        """The entries of each row in use, cut to those that there are."""
        rows = max(0, min(int(self.plan.write_num_valid_reqs[0]), len(self.plan.write_seed_slot_indices)))
        offsets = self.plan.write_offsets.tolist()
        return [range(max(offsets[r], 0), min(offsets[r + 1], len(self.tokens))) for r in range(rows)]

    def with_expected(self, rng: Rng, share: float) -> None:
        """Compare the inputs with others that differ in a share of the entries."""
        for name, values in (("expected_input_tokens", self.tokens), ("expected_input_positions", self.positions)):
            self.optional[name] = values + (rng.random(len(values)) < share).astype(values.dtype)

    def with_parents(self, rng: Rng) -> None:
        """Make every row a tree; some parents are none."""
        parents = np.full(len(self.tokens), -1, self.tokens.dtype)
        for row in self.ranges:
            for i in row:
                parents[i] = rng.integers(max(row.start, i - 40), i) if i > row.start and rng.random() < 0.9 else -1
        wild = rng.random(len(parents)) < 0.02
        parents[wild] = rng.choice([0, len(parents), INT32_MAX], wild.sum())
        self.optional["parents"] = parents


def make_write(
    rng: Rng, lengths: Any, *, endpoints: int = 2, num_slots: int | None = None, padding: int = 0, capacity: int = 0, dtype: Any = np.int32
) -> Write:
    """Rows of these lengths, each entry with a slot of its own, and tokens of padding behind them which no row has."""
    lengths = np.asarray(lengths)
    live = int(lengths.sum())
    num_slots = live + len(lengths) + 101 if num_slots is None else num_slots
    buffer = random_records(rng, num_slots)
    free = rng.permutation(np.arange(1, num_slots))
    seeds, slots = free[: len(lengths)].copy(), free[len(lengths) :][:live]
    seeds[rng.random(len(seeds)) < 0.3] = -1
    first = np.where(seeds > 0, fields(buffer)[np.maximum(seeds, 0), 1] + 1, 0)
    positions = np.concatenate([start + np.arange(length) for start, length in zip(first, lengths, strict=True)] or [np.arange(0)])
    spare = max(capacity - len(lengths), 0)
    offsets = np.concatenate([[0], np.cumsum(lengths), np.zeros(spare, np.int64)])
    # What lies behind the rows is nobody's: it names slots that rows name, too.
    behind = rng.permutation(np.concatenate([slots, [0]]))[:padding] if live else np.zeros(padding, np.int64)
    behind = np.resize(behind, padding)
    return Write(
        buffers=[buffer.copy() for _ in range(endpoints)],
        plan=WritePlan(
            offsets.astype(np.int32),
            np.concatenate([seeds, np.full(spare, 5)]).astype(np.int32),
            np.array([len(lengths)], np.int32),
        ),
        tokens=rng.integers(0, 50_000, live + padding).astype(dtype),
        positions=np.concatenate([positions, np.zeros(padding)]).astype(dtype),
        slots=np.concatenate([slots, behind]).astype(dtype),
    )


def check_write(case: Write, *, attribute: bool = True) -> np.ndarray:
    """Run a write on the device and on the reference, compare everything, and return the rows that it logged.

    Args:
        case: the write.
        attribute: whether the flags of each row are compared, which takes a run of the reference for each.
    """
    capacity = len(case.plan.write_seed_slot_indices)
    state = fresh_state(ROOMY, chain_assert=case.chain_assert)
    marked = BatchRows(np.arange(100, 100 + capacity, dtype=np.int32), np.zeros(capacity, np.int32)) if attribute and capacity else None
    got_buffers, got, rows = write_launch(case.endpoints, case.plan, *case.arrays, state, mode=case.mode, rows=marked, **case.optional)

    want, flags = state, np.zeros(capacity, np.int64)
    for endpoint, got_buffer in zip(case.endpoints, got_buffers, strict=True):
        keywords = {"tag": endpoint.tag, "real_kv_sources": endpoint.sources, "real_kv_hash_mode": case.mode}
        want_buffer, want = reference.write_step(endpoint.canary_buf, case.plan, *case.arrays, want, **keywords, **case.optional)
        _check_records(case, endpoint, np.asarray(got_buffer), want_buffer)
        if rows is not None:
            flags |= _flags_of_rows(case, endpoint)
    assert_same_state(got, want)
    if rows is not None:
        _check_attribution(got, rows, flags)
    return log_rows(got)


def in_order(case: Write) -> bool:
    """Whether rows share no entries."""
    rows = len(case.ranges)
    return bool((np.diff(case.plan.write_offsets[: rows + 1].astype(np.int64)) >= 0).all())


def _check_records(case: Write, endpoint: Endpoint, got: np.ndarray, want: np.ndarray) -> None:
    """Compare buffers but for slot 0. Of a slot that several rows name, the last record of any of them may stay, whole.

    Rows that share entries are written one after the other, so that the last one stays.
    """
    differing = [slot for slot in np.flatnonzero((fields(got) != fields(want)).any(axis=1)).tolist() if slot]
    if not differing:
        return
    assert in_order(case), differing
    last: dict[int, dict[int, int]] = defaultdict(dict)
    for r, row in enumerate(case.ranges):
        for i in row:
            last[int(case.slots[i])][r] = i
    candidates = _records_of_entries(case, endpoint)
    for slot in differing:
        kv_hash = to_signed(real_kv_hash(endpoint.sources, slot, case.mode)) if endpoint.sources else 0
        allowed = [[*candidates[i, :3].tolist(), kv_hash] for i in last[slot].values()]
        assert len(allowed) > 1, (slot, fields(got)[slot], fields(want)[slot])
        assert fields(got)[slot].tolist() in allowed


def _records_of_entries(case: Write, endpoint: Endpoint) -> np.ndarray:
    """The record of each entry, but for its real-KV hash: what it stores in a slot that it alone names."""
    num_slots, tokens = len(endpoint.canary_buf), len(case.tokens)
    slots = case.slots.astype(np.int64)
    seeds = np.where(case.plan.write_seed_slot_indices >= num_slots, INT32_MAX, case.plan.write_seed_slot_indices)
    buffer, _ = reference.write_step(
        np.concatenate([endpoint.canary_buf, np.zeros((tokens, 32), np.uint8)]),
        dataclasses.replace(case.plan, write_seed_slot_indices=seeds.astype(np.int32)),
        case.tokens,
        case.positions,
        np.where(slots < 0, slots, np.where(slots >= num_slots, INT32_MAX, num_slots + np.arange(tokens))),
        fresh_state(1),
        tag=endpoint.tag,
        **case.optional,
    )
    return fields(buffer)[num_slots:]


def _flags_of_rows(case: Write, endpoint: Endpoint) -> np.ndarray:
    """The reasons that the reference finds for each row alone."""
    capacity = len(case.plan.write_seed_slot_indices)
    flags = np.zeros(capacity, np.int64)
    for r in range(len(case.ranges)):
        alone = WritePlan(case.plan.write_offsets[r : r + 2], case.plan.write_seed_slot_indices[r : r + 1], np.ones(1, np.int32))
        _, found = reference.write_step(
            endpoint.canary_buf,
            alone,
            *case.arrays,
            fresh_state(ROOMY, chain_assert=case.chain_assert),
            tag=endpoint.tag,
            real_kv_sources=(),
            **case.optional,
        )
        flags[r] = np.bitwise_or.reduce(log_rows(found)[:, 7], initial=0)
    return flags


def _check_attribution(got: Any, rows: BatchRows, flags: np.ndarray) -> None:
    """Flags of rows as given, and every logged row with the request of a row that has its reasons."""
    np.testing.assert_array_equal(np.asarray(rows.flags), flags)
    log = host(got).violation_log
    requests = log.violation_request_rows[: log.count()]
    by_request = np.zeros(len(flags), np.int64)
    np.bitwise_or.at(by_request, requests - 100, log.rows()[:, 7])
    np.testing.assert_array_equal(by_request, flags)


# Verifies.


def chain_plan(
    slots: np.ndarray, *, prevs: Any = None, positions: Any = None, tokens: Any = None, capacity: int | None = None
) -> VerifyPlan:
    """A verify plan over slots, each the predecessor of the next one where nothing else is said. What is not in use is wild."""
    count = len(slots)
    columns = (
        slots,
        np.full(count, -1) if tokens is None else tokens,
        np.arange(count) if positions is None else positions,
        np.concatenate([[-1], slots[:-1]])[:count] if prevs is None else prevs,
    )
    spare = np.full((count if capacity is None else capacity) - count, INT32_MAX)
    whole = [np.concatenate([np.asarray(column, np.int64), spare]).astype(np.int32) for column in columns]
    return VerifyPlan(*whole, np.array([count], np.int32), np.ones(1, np.int32))


def check_verify(
    endpoints: list[Endpoint], plan: VerifyPlan, mode: RealKvHashMode = RealKvHashMode.NONE, *, check_expected_token: bool = False
) -> np.ndarray:
    """Run a verify on the device and on the reference, compare everything, and return the rows that it logged.

    Where the plan has row offsets, the flags of each row are compared with those of its entries alone.
    """
    state, keywords = fresh_state(ROOMY), {"check_expected_token": check_expected_token}
    bs = 0 if plan.row_offsets is None else len(plan.row_offsets) - 1
    marked = BatchRows(np.arange(100, 100 + bs, dtype=np.int32), np.zeros(bs, np.int32)) if bs else None
    got, rows = verify_launch(endpoints, plan, state, mode=mode, rows=marked, **keywords)
    want, flags = state, np.zeros(bs, np.int64)
    for endpoint in endpoints:
        keywords |= {"tag": endpoint.tag, "real_kv_sources": endpoint.sources, "real_kv_hash_mode": mode}
        want = reference.verify_step(endpoint.canary_buf, plan, want, **keywords)
        for r in range(bs):
            part = slice(*plan.row_offsets[r : r + 2])
            columns = dataclasses.astuple(plan)[:4]
            alone = VerifyPlan(*(column[part] for column in columns), np.array([part.stop - part.start], np.int32), plan.enable)
            found = reference.verify_step(endpoint.canary_buf, alone, fresh_state(ROOMY), **keywords)
            flags[r] |= np.bitwise_or.reduce(log_rows(found)[:, 7], initial=0)
    assert_same_state(got, want)
    if rows is not None:
        _check_attribution(got, rows, flags)
    return log_rows(got)
