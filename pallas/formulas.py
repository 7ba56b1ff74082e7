"""The arithmetic of a plan, written once for both drivers.

Each function works on a vector of rows or of entries and reads arrays through a ``load(array, index, mask, other)``
that the driver supplies: ``plgpu.load`` on references in the Triton kernels, a clipped gather in plain jnp on the CPU.
Everything is int32. Sums saturate at 2^31 - 1 instead of wrapping.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_kvcanary.constants import INT32_MAX, REQ_POOL_IDX_PADDING

#: load(array, index, mask, other): elements at an index tuple where the mask is set, ``other`` elsewhere.
Load = Callable[[Any, tuple[jax.Array, ...], jax.Array, int], jax.Array]

#: Longest block of rows whose prefix sum stays exact: 2^12 values below 2^16 sum to less than 2^31.
MAX_ROW_BLOCK = 4096

_HALF_BITS = 16
_HALF_MASK = (1 << _HALF_BITS) - 1


@dataclass(frozen=True)
class PlanStatics:
    """Sizes and switches of a plan that are known when it is traced.

    The array sizes stand here, since an empty table is replaced by a dummy that nothing reads.
    """

    batch_size: int
    max_reqs: int
    max_seq_len: int
    verify_capacity: int
    write_req_capacity: int
    swa_window_size: int
    lut_len: int | None
    expected_rows: int
    expected_width: int
    kv_token_id_vs_position_offset: int


class PlanArrays(NamedTuple):
    """Inputs of a plan, int32: what belongs to the batch, and the tables (None where not used)."""

    req_pool_indices: Any
    prefix_lens: Any
    extend_seq_lens: Any
    req_to_token: Any
    lut: Any
    expected_tokens: Any
    expected_valid_lens: Any


class RowSums(NamedTuple):
    """Running totals over the rows so far, scalars."""

    verify: jax.Array
    write: jax.Array
    invalid: jax.Array


class RowOutputs(NamedTuple):
    """What the offsets pass finds for a block of rows."""

    verify_offsets: jax.Array
    write_offsets: jax.Array
    seeds: jax.Array


class EntryOutputs(NamedTuple):
    """Verify entries of a block."""

    slot: jax.Array
    position: jax.Array
    prev_slot: jax.Array
    expected_token: jax.Array


def plan_rows(load: Load, arrays: PlanArrays, rows: jax.Array, before: RowSums, s: PlanStatics) -> tuple[RowOutputs, RowSums]:
    """Offsets and seeds of the rows named, which follow the rows summed up in ``before``.

    Rows past the batch get the totals as their offset and no seed.
    """
    in_batch = rows < s.batch_size
    req = load(arrays.req_pool_indices, (rows,), in_batch, REQ_POOL_IDX_PADDING)
    prefix = load(arrays.prefix_lens, (rows,), in_batch, 0)
    extend = load(arrays.extend_seq_lens, (rows,), in_batch, 0)

    live, valid = live_and_valid_rows(req, prefix, extend, s.max_reqs, s.max_seq_len)
    verify_len = jnp.where(valid, prefix - window_start(prefix, s.swa_window_size), 0)
    # An invalid row's tokens are in the token arrays all the same: the rows behind it must not shift.
    write_len = jnp.where(live, jnp.maximum(extend, 0), 0)
    verify_offsets, verify_total = _saturating_offsets(verify_len, before.verify)
    write_offsets, write_total = _saturating_offsets(write_len, before.write)

    has_seed = valid & (prefix > 0) & (extend > 0)
    seed = load(arrays.req_to_token, (req, prefix - 1), has_seed, -1)
    seed = jnp.where(has_seed, translate(load, arrays.lut, s.lut_len, seed, has_seed), -1)
    invalid_total = before.invalid + jnp.sum((live & ~valid).astype(jnp.int32), dtype=jnp.int32)
    return RowOutputs(verify_offsets, write_offsets, seed), RowSums(verify_total, write_total, invalid_total)


def plan_entries(
    load: Load, arrays: PlanArrays, verify_offsets: Any, entries: jax.Array, num_valid: jax.Array, s: PlanStatics
) -> EntryOutputs:
    """The verify entries named; what is past ``num_valid`` is arbitrary."""
    live = entries < num_valid
    row = _row_of_entry(load, verify_offsets, entries, live, s)
    req = load(arrays.req_pool_indices, (row,), live, 0)
    prefix = load(arrays.prefix_lens, (row,), live, 0)
    first_entry = load(verify_offsets, (row,), live, 0)
    position = window_start(prefix, s.swa_window_size) + entries - first_entry

    slot = load(arrays.req_to_token, (req, position), live, -1)
    slot = translate(load, arrays.lut, s.lut_len, slot, live)
    has_prev = live & (position > 0)
    prev = load(arrays.req_to_token, (req, position - 1), has_prev, -1)
    prev = translate(load, arrays.lut, s.lut_len, prev, has_prev)
    # A hole before this entry is reported by the entry at the hole; here it only makes the predecessor unreachable.
    prev = jnp.where(has_prev, jnp.maximum(prev, 0), -1)

    if arrays.expected_tokens is None:
        expected = jnp.full_like(entries, -1)
    else:
        valid_len = load(arrays.expected_valid_lens, (row,), live, 0)
        at = position + s.kv_token_id_vs_position_offset
        known = live & (req < s.expected_rows) & (at >= 0) & (at < valid_len) & (at < s.expected_width)
        expected = load(arrays.expected_tokens, (req, at), known, -1)
    return EntryOutputs(slot, position, prev, expected)


def live_and_valid_rows(
    req: jax.Array, prefix: jax.Array, extend: jax.Array, max_reqs: int, max_seq_len: int
) -> tuple[jax.Array, jax.Array]:
    """Which rows are no padding, and which of those make sense."""
    live = req != REQ_POOL_IDX_PADDING
    return live, live & (req >= 0) & (req < max_reqs) & (prefix >= 0) & (prefix <= max_seq_len) & (extend >= 0)


def window_start(prefix: jax.Array, swa_window_size: int) -> jax.Array:
    """First position of a row that is verified: 0, or where the sliding window begins."""
    return jnp.maximum(prefix - swa_window_size, 0) if swa_window_size else jnp.zeros_like(prefix)


def translate(load: Load, lut: Any, lut_len: int | None, slot: jax.Array, mask: jax.Array) -> jax.Array:
    """Full-pool slots to the group's own through its table; unchanged without one.

    Negative slots pass, one past the table becomes 2^31 - 1, and a negative table value counts as 0, absent.
    """
    if lut_len is None:
        return slot
    inside = (slot >= 0) & (slot < lut_len)
    value = jnp.maximum(load(lut, (slot,), mask & inside, 0), 0)
    return jnp.where(slot < 0, slot, jnp.where(inside, value, INT32_MAX))


def gather(array: jax.Array, index: tuple[jax.Array, ...], mask: jax.Array, other: int) -> jax.Array:
    """The ``load`` of plain jnp: a masked gather that never leaves the array."""
    inside = tuple(jnp.where(mask, i, 0) for i in index)
    return jnp.where(mask, array.at[inside].get(mode="promise_in_bounds"), other)


def _row_of_entry(load: Load, verify_offsets: Any, entries: jax.Array, live: jax.Array, s: PlanStatics) -> jax.Array:
    """Binary search for the last row whose first entry is not behind the entry."""
    low, high = jnp.zeros_like(entries), jnp.full_like(entries, s.batch_size)
    for _ in range(max(s.batch_size - 1, 0).bit_length()):  # offsets[low] <= entry < offsets[high]
        middle = (low + high) >> 1
        at_or_before = load(verify_offsets, (middle,), live, 0) <= entries
        low, high = jnp.where(at_or_before, middle, low), jnp.where(at_or_before, high, middle)
    return low


def _saturating_offsets(lengths: jax.Array, before: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Exclusive prefix sums of non-negative lengths behind ``before``, and the total, saturating at 2^31 - 1.

    The sum runs over 16-bit halves, since neither int64 nor a saturating scan is at hand in a 32-bit kernel.
    """
    low, high = lengths & _HALF_MASK, lengths >> _HALF_BITS

    def combine(low_sum: jax.Array, high_sum: jax.Array) -> jax.Array:
        low_sum = low_sum + (before & _HALF_MASK)
        high_sum = high_sum + (before >> _HALF_BITS) + (low_sum >> _HALF_BITS)
        total = (jnp.minimum(high_sum, _HALF_MASK >> 1) << _HALF_BITS) | (low_sum & _HALF_MASK)
        return jnp.where(high_sum > _HALF_MASK >> 1, INT32_MAX, total)

    inclusive_low, inclusive_high = jnp.cumsum(low, dtype=jnp.int32), jnp.cumsum(high, dtype=jnp.int32)
    exclusive = combine(inclusive_low - low, inclusive_high - high)
    return exclusive, combine(jnp.sum(low, dtype=jnp.int32), jnp.sum(high, dtype=jnp.int32))
