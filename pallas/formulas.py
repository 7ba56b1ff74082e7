"""The arithmetic of a plan, written once for both drivers; offsets and search serve other kernels too.

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
Load = Callable[[Any, tuple[Any, ...], jax.Array, int], jax.Array]

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
    verify_stride: int = 1

    @property
    def most_entries_of_row(self) -> int:
        """Verify entries that a row can have."""
        positions = min(self.swa_window_size or self.max_seq_len, self.max_seq_len)
        return -(-positions // self.verify_stride)

    @property
    def most_entries(self) -> int:
        """Verify entries that the batch can have, or that there is room for."""
        return min(self.verify_capacity, self.batch_size * self.most_entries_of_row)


class PlanArrays(NamedTuple):
    """Inputs of a plan, int32: what belongs to the batch, and the tables (None where not used)."""

    req_pool_indices: Any
    prefix_lens: Any
    extend_seq_lens: Any
    req_to_token: Any
    lut: Any
    expected_tokens: Any
    expected_valid_lens: Any
    verify_phase: Any = None


class RowSums(NamedTuple):
    """Running totals over the rows so far, scalars."""

    verify: jax.Array
    write: jax.Array
    invalid: jax.Array


class RowOutputs(NamedTuple):
    """What the offsets pass finds for a block of rows; a row's lists end where those of the next one begin."""

    verify_ends: jax.Array
    write_ends: jax.Array
    seeds: jax.Array


class EntryOutputs(NamedTuple):
    """Verify entries of a block."""

    slot: jax.Array
    position: jax.Array
    prev_slot: jax.Array
    expected_token: jax.Array


def plan_rows(load: Load, arrays: PlanArrays, rows: jax.Array, before: RowSums, s: PlanStatics) -> tuple[RowOutputs, RowSums]:
    """Ends and seeds of the rows named, which follow the rows summed up in ``before``.

    Rows past the batch end at the totals and have no seed.
    """
    in_batch = rows < s.batch_size
    req = load(arrays.req_pool_indices, (rows,), in_batch, REQ_POOL_IDX_PADDING)
    prefix = load(arrays.prefix_lens, (rows,), in_batch, 0)
    extend = load(arrays.extend_seq_lens, (rows,), in_batch, 0)
    live, valid = live_and_valid_rows(req, prefix, extend, s.max_reqs, s.max_seq_len)
    has_seed = valid & (prefix > 0) & (extend > 0)
    # Threads wait for each other in the sums below; a load that is under way by then costs no time of its own.
    seed = load(arrays.req_to_token, (req, prefix - 1), has_seed, -1)

    _, count = verified_positions(prefix, wanted_residue(load, arrays, s), s)
    # An invalid row's tokens are in the token arrays all the same: the rows behind it must not shift.
    write_len = jnp.where(live, jnp.maximum(extend, 0), 0)
    verify_ends, verify_total = saturating_ends(jnp.where(valid, count, 0), before.verify, s.most_entries_of_row)
    write_ends, write_total = saturating_ends(write_len, before.write)
    invalid_total = before.invalid + jnp.sum((live & ~valid).astype(jnp.int32), dtype=jnp.int32)

    seed = jnp.where(has_seed, translate(load, arrays.lut, s.lut_len, seed, has_seed), -1)
    return RowOutputs(verify_ends, write_ends, seed), RowSums(verify_total, write_total, invalid_total)


def plan_entries(
    load: Load, arrays: PlanArrays, verify_offsets: Any, row: jax.Array, entries: jax.Array, live: jax.Array, s: PlanStatics
) -> EntryOutputs:
    """The verify entries named; those that are not live are arbitrary.

    ``row`` is the row of each entry, or the scalar row of them all: then what belongs to the row is loaded once.
    """
    of_batch = live if row.ndim else jnp.bool_(True)
    req = load(arrays.req_pool_indices, (row,), of_batch, 0)
    prefix = load(arrays.prefix_lens, (row,), of_batch, 0)
    first_entry = load(verify_offsets, (row,), of_batch, 0)
    first_position, _ = verified_positions(prefix, wanted_residue(load, arrays, s), s)
    position = first_position + (entries - first_entry) * s.verify_stride

    slot = load(arrays.req_to_token, (req, position), live, -1)
    has_prev = live & (position > 0)
    prev = load(arrays.req_to_token, (req, position - 1), has_prev, -1)
    slot = translate(load, arrays.lut, s.lut_len, slot, live)
    prev = translate(load, arrays.lut, s.lut_len, prev, has_prev)
    # A hole before this entry is reported by the entry at the hole; here it only makes the predecessor unreachable.
    prev = jnp.where(has_prev, jnp.maximum(prev, 0), -1)

    if arrays.expected_tokens is None:
        expected = jnp.full_like(entries, -1)
    else:
        valid_len = load(arrays.expected_valid_lens, (row,), of_batch, 0)
        at = position + s.kv_token_id_vs_position_offset
        known = live & (req < s.expected_rows) & (at >= 0) & (at < valid_len) & (at < s.expected_width)
        expected = load(arrays.expected_tokens, (req, at), known, -1)
    return EntryOutputs(slot, position, prev, expected)


def verify_extent(total: jax.Array, s: PlanStatics) -> tuple[jax.Array, jax.Array]:
    """Active entries and the enable flag; an overflow is exact, since the sums saturate above any capacity."""
    return jnp.minimum(total, s.verify_capacity), (total <= s.verify_capacity).astype(jnp.int32)


def live_and_valid_rows(
    req: jax.Array, prefix: jax.Array, extend: jax.Array, max_reqs: int, max_seq_len: int
) -> tuple[jax.Array, jax.Array]:
    """Which rows are no padding, and which of those make sense."""
    live = req != REQ_POOL_IDX_PADDING
    return live, live & (req >= 0) & (req < max_reqs) & (prefix >= 0) & (prefix <= max_seq_len) & (extend >= 0)


def window_start(prefix: jax.Array, swa_window_size: int) -> jax.Array:
    """First position of a row that is verified: 0, or where the sliding window begins."""
    return jnp.maximum(prefix - swa_window_size, 0) if swa_window_size else jnp.zeros_like(prefix)


def wanted_residue(load: Load, arrays: PlanArrays, s: PlanStatics) -> jax.Array | None:
    """The remainder, by the stride, of the positions that get entries: that of minus the phase. None where all positions do."""
    if s.verify_stride == 1:
        return None
    phase = jax.lax.rem(
        load(arrays.verify_phase, (jnp.int32(0),), jnp.bool_(True), 0), jnp.int32(s.verify_stride)
    )  # of the phase's own sign
    return jnp.where(phase > 0, s.verify_stride - phase, -phase)


def verified_positions(prefix: jax.Array, residue: jax.Array | None, s: PlanStatics) -> tuple[jax.Array, jax.Array]:
    """First position of a row that gets a verify entry, and how many do, each ``verify_stride`` behind the one before.

    Neither leaves int32, whatever the stride, in a row that has such positions.
    """
    start = window_start(prefix, s.swa_window_size)
    if residue is None:
        return start, prefix - start
    stride = jnp.int32(s.verify_stride)
    skipped = residue - jax.lax.rem(start, stride)
    skipped = jnp.where(skipped < 0, skipped + stride, skipped)
    left = prefix - start - skipped
    return start + skipped, jnp.where(left > 0, jax.lax.div(left - 1, stride) + 1, 0)


def translate(load: Load, lut: Any, lut_len: int | None, slot: jax.Array, mask: jax.Array) -> jax.Array:
    """Full-pool slots to the group's own through its table; unchanged without one.

    Negative slots pass, one past the table becomes 2^31 - 1, and a negative table value counts as 0, absent.
    """
    if lut_len is None:
        return slot
    inside = (slot >= 0) & (slot < lut_len)
    value = jnp.maximum(load(lut, (slot,), mask & inside, 0), 0)
    return jnp.where(slot < 0, slot, jnp.where(inside, value, INT32_MAX))


def gather(array: jax.Array, index: tuple[Any, ...], mask: jax.Array, other: int) -> jax.Array:
    """The ``load`` of plain jnp: a masked gather that never leaves the array."""
    inside = tuple(jnp.where(mask, i, 0) for i in index)
    return jnp.where(mask, array.at[inside].get(mode="promise_in_bounds"), other)


def list_of_entry(
    load: Load, offsets: Any, first: int | jax.Array, last: int | jax.Array, most: int, entries: jax.Array, live: jax.Array
) -> jax.Array:
    """Which list, of those packed one after the other, holds each entry: the last one that begins at or before it.

    It is none before ``first`` and none behind ``last``; ``most`` lists at most are between the two, both included. Where the two are
    scalars on the device, the search takes the steps that their distance calls for.
    """

    def step(_: Any, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = ends  # offsets[low] <= entry < offsets[high]
        middle = (low + high) >> 1
        at_or_before = load(offsets, (middle,), live, 0) <= entries
        return jnp.where(at_or_before, middle, low), jnp.where(at_or_before, high, middle)

    ends = jnp.full_like(entries, first), jnp.full_like(entries, last + 1)
    bits = max(most - 1, 0).bit_length()
    if isinstance(first, int) and isinstance(last, int):
        for _ in range(bits):
            ends = step(None, ends)
        return ends[0]
    distance = jnp.asarray(last - first, jnp.int32)
    steps = sum((((distance >> bit) > 0).astype(jnp.int32) for bit in range(bits)), jnp.int32(0))
    return jax.lax.fori_loop(0, steps, step, ends)[0]


def sample_lists(load: Load, offsets: Any, count: int, width: int) -> jax.Array:
    """Where every n-th of ``count`` lists begins, so that there are ``width`` samples at most, a power of two below 2^15."""
    lists = jnp.arange(width, dtype=jnp.int32) * -(-count // width)
    return load(offsets, (lists,), lists < count, INT32_MAX)


def lists_of_ends(
    load: Load, offsets: Any, samples: jax.Array, count: int, first: jax.Array, last: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The lists that hold two entries, scalars; ``samples`` are those of :func:`sample_lists`.

    All threads look at one vector of lists and count those that begin at or before an entry, where a binary search would take many
    looks, one after the other. Between two samples a further look has samples of its own.
    """

    def count_both(at_first: jax.Array, at_last: jax.Array) -> tuple[jax.Array, jax.Array]:
        both = (at_first <= first).astype(jnp.int32) + ((at_last <= last).astype(jnp.int32) << _HALF_BITS)
        counts = jnp.sum(both, dtype=jnp.int32)  # one sum for the two, a half each
        return counts & _HALF_MASK, counts >> _HALF_BITS

    def look(begin: jax.Array, local: jax.Array) -> jax.Array:
        return load(offsets, (begin + local,), (local < step) & (begin + local < count), INT32_MAX)

    (width,) = samples.shape
    step = -(-count // width)
    low, high = (step * (number - 1) for number in count_both(samples, samples))
    while step > 1:
        width = min(width, 1 << (step - 1).bit_length())
        finer = -(-step // width)
        local = jnp.arange(width, dtype=jnp.int32) * finer
        more_low, more_high = count_both(look(low, local), look(high, local))
        low, high, step = low + finer * (more_low - 1), high + finer * (more_high - 1), finer
    return low, high


def saturating_ends(lengths: jax.Array, before: jax.Array, longest: int = INT32_MAX) -> tuple[jax.Array, jax.Array]:
    """Inclusive prefix sums of non-negative lengths behind ``before``, and the total, saturating at 2^31 - 1.

    Unless the lengths are known to be so short that nothing saturates within the block, the sum runs over 16-bit halves, since
    neither int64 nor a saturating scan is at hand in a 32-bit kernel.
    """

    def sums(values: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.cumsum(values, dtype=jnp.int32), jnp.sum(values, dtype=jnp.int32)

    if longest * lengths.shape[0] <= INT32_MAX:
        ends, total = (jnp.where(part > INT32_MAX - before, INT32_MAX, part + before) for part in sums(lengths))
        return ends, total

    def combine(low_sum: jax.Array, high_sum: jax.Array) -> jax.Array:
        low_sum = low_sum + (before & _HALF_MASK)
        high_sum = high_sum + (before >> _HALF_BITS) + (low_sum >> _HALF_BITS)
        total = (jnp.minimum(high_sum, _HALF_MASK >> 1) << _HALF_BITS) | (low_sum & _HALF_MASK)
        return jnp.where(high_sum > _HALF_MASK >> 1, INT32_MAX, total)

    ends, total = (combine(*part) for part in zip(sums(lengths & _HALF_MASK), sums(lengths >> _HALF_BITS), strict=True))
    return ends, total
