"""One process's share of serving: its pool, its canary, its requests; and the way in and out for KV and records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from smollm2.allocator import SlotAllocator
from smollm2.engine import checked_step
from smollm2.model import Params, allocate_pool

import jax_kvcanary as kvc
from disaggregation.tiny import CANARY, MODEL
from jax_kvcanary.pools import MHATokenToKVPool

MAX_BATCH = 3  # requests at a time
MAX_PROMPT = 16
MAX_SEQ_LEN = 32
EMPTY = -1  # a place in the table without a slot, and what pads an array of slots

KV_DTYPE = np.dtype(np.float32)


@dataclass(frozen=True)
class Cache:
    """What a request's tokens have left in a pool, on the host."""

    kv: np.ndarray  # float32 [layers, 2, tokens, kv_heads, head_dim]
    records: kvc.CanaryRecords  # of the same tokens


def kv_shape(num_tokens: int) -> tuple[int, ...]:
    """Of KV on its way: layers, K and V, tokens, heads, head_dim."""
    return (MODEL.num_layers, 2, num_tokens, MODEL.num_kv_heads, MODEL.head_dim)


@jax.jit
def take_out(state: kvc.CanaryState, pool: MHATokenToKVPool, slots: Array) -> tuple[Array, kvc.CanaryRecords]:
    """KV and records of slots [MAX_PROMPT], padded with negative ones."""
    inside = jnp.maximum(slots, 0)
    kv = jnp.stack([jnp.stack([k[inside], v[inside]]) for k, v in zip(pool.k_buffer, pool.v_buffer, strict=True)])
    return kv, kvc.extract_records(state, slots)


@partial(jax.jit, donate_argnames=("state", "pool"))
def put_in(
    state: kvc.CanaryState, pool: MHATokenToKVPool, kv_slots: Array, kv: Array, record_slots: Array, records: kvc.CanaryRecords
) -> tuple[kvc.CanaryState, MHATokenToKVPool]:
    """KV and records at slots [MAX_PROMPT], padded with negative ones."""
    for layer in range(MODEL.num_layers):
        pool = pool.write(layer, kv_slots, kv[layer, 0], kv[layer, 1])
    return kvc.insert_records(state, record_slots, records), pool


@partial(jax.jit, static_argnames="canary", donate_argnames="state")
def release(state: kvc.CanaryState, slots: Array, pool: MHATokenToKVPool, *, canary: kvc.Canary) -> kvc.CanaryState:
    return canary.release(state, slots, pool)


class Node:
    """A pool with a canary beside it, and requests by their row of the table, from 1 on."""

    def __init__(self, params: Params, num_slots: int) -> None:
        self.params = params
        self.num_slots = num_slots
        self.pool = allocate_pool(MODEL, num_slots)
        capacities = kvc.CanaryLaunchCapacities.from_pool(num_slots, MAX_BATCH)
        canary, state = kvc.install_canary(self.pool, CANARY, capacities=capacities)
        self.canary, self.state = canary, canary.mark_init_finished(state)
        self.monitor = kvc.CanaryMonitor(canary)
        self.steps = 0
        self._allocator = SlotAllocator(num_slots)
        self._table = np.full((1 + MAX_BATCH, MAX_SEQ_LEN), EMPTY, np.int32)
        self._lengths = [0] * (1 + MAX_BATCH)  # tokens of each row in the pool

    def slots(self, row: int) -> np.ndarray:
        """The slots of a row's tokens, in order of their positions."""
        return self._table[row, : self._lengths[row]].copy()

    def step(self, work: Sequence[tuple[int, Sequence[int]]], *, bucket: int) -> list[int]:
        """Run the next tokens of some rows, in a step of `bucket` tokens. Returns the token that follows each row's.

        In mode RAISE what the canary found in the step before comes as `kvc.CanaryViolationError`.
        """
        ids, positions, slots = np.zeros((3, bucket), np.int32)
        rows, prefixes, counts = np.zeros((3, MAX_BATCH), np.int32)
        end = 0
        for index, (row, tokens) in enumerate(work):
            prefix, count = self._lengths[row], len(tokens)
            self._give_slots(row, count)
            start, end = end, end + count
            ids[start:end], positions[start:end] = tokens, range(prefix, prefix + count)
            slots[start:end] = self._table[row, prefix : prefix + count]
            rows[index], prefixes[index], counts[index] = row, prefix, count
        batch = kvc.ForwardBatch.extend(
            input_ids=ids,
            positions=positions,
            out_cache_loc=slots,
            req_pool_indices=rows,
            prefix_lens=prefixes,
            extend_seq_lens=counts,
            req_to_token=self._table.copy(),
        )
        tokens, self.pool, self.state, report = checked_step(self.params, batch, self.pool, self.state, config=MODEL, canary=self.canary)
        self.steps += 1
        self.monitor.observe(report, self.state)
        return np.asarray(tokens)[: len(work)].tolist()

    def take(self, row: int) -> Cache:
        """A copy of a row's KV and records. The steps that wrote them are behind: the device goes in order."""
        count = self._lengths[row]
        kv, records = take_out(self.state, self.pool, _padded(self.slots(row)))
        # Nothing but the request's own tokens is sent: the padding stays here.
        return Cache(np.array(kv[:, :, :count]), jax.tree.map(lambda array: array[:count], records).on_host())

    def put(self, row: int, cache: Cache) -> None:
        """Give an empty row slots for a cache that was taken elsewhere, and put its KV and its records there."""
        self._give_slots(row, cache.kv.shape[2])
        slots = self.slots(row)
        kv = _pad_axis(cache.kv, 2)
        records = jax.tree.map(partial(_pad_axis, axis=0), cache.records)
        record_slots = slots[: cache.records.num_slots]  # as many as arrived
        self.state, self.pool = put_in(self.state, self.pool, _padded(slots), kv, _padded(record_slots), records)

    def drop(self, row: int) -> None:
        """Free a row and its slots, and release their records."""
        slots = self.slots(row)
        padded = np.full(MAX_SEQ_LEN, EMPTY, np.int32)
        padded[: len(slots)] = slots
        self.state = release(self.state, padded, self.pool, canary=self.canary)
        self._allocator.free(slots.tolist())
        self._table[row], self._lengths[row] = EMPTY, 0

    def _give_slots(self, row: int, count: int) -> None:
        prefix = self._lengths[row]
        self._table[row, prefix : prefix + count] = self._allocator.alloc(count)
        self._lengths[row] += count


def _padded(slots: np.ndarray) -> np.ndarray:
    return np.pad(slots, (0, MAX_PROMPT - len(slots)), constant_values=EMPTY)


def _pad_axis(array: np.ndarray, axis: int) -> np.ndarray:
    """Zeros up to MAX_PROMPT entries: they go to negative slots, where nothing is stored."""
    return np.pad(array, [(0, MAX_PROMPT - array.shape[axis] if i == axis else 0) for i in range(array.ndim)])
