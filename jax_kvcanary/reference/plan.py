"""The plan of a step, row by row (the contract's section 3)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jax_kvcanary._checks import ArrayLike, as_array, check_dtype, check_int, check_shape, check_type
from jax_kvcanary.constants import INT32_MAX, REQ_POOL_IDX_PADDING
from jax_kvcanary.plan import PHASE_MEANING, Plan, PlanInput, VerifyPlan, WritePlan, check_stride

INT32_MIN = -(2**31)


class Row(NamedTuple):
    """One row of the batch."""

    req_pool_index: int
    prefix_len: int
    extend_len: int
    expected_valid_len: int


class VerifyEntry(NamedTuple):
    """One slot to verify."""

    slot: int
    expected_token: int
    expected_position: int
    prev_slot: int


def plan(
    inputs: PlanInput,
    req_to_token: ArrayLike,
    *,
    verify_capacity: int,
    write_req_capacity: int | None = None,
    swa_window_size: int = 0,
    full_to_swa_index_mapping: ArrayLike | None = None,
    expected_tokens: ArrayLike | None = None,
    kv_token_id_vs_position_offset: int = 0,
    verify_stride: int = 1,
    verify_phase: ArrayLike | None = None,
) -> Plan:
    """:func:`jax_kvcanary.plan` on the host: the same arguments, NumPy results, -1 in entries that are not in use."""
    rows = _check_rows(inputs, needs_valid_lens=expected_tokens is not None)
    bs = len(rows)
    table = indices(req_to_token, "req_to_token", (None, None), "a table of slots by request row and position")
    check_int(verify_capacity, "verify_capacity", 0, INT32_MAX - 1)
    check_int(swa_window_size, "swa_window_size", 0, INT32_MAX)
    check_int(kv_token_id_vs_position_offset, "kv_token_id_vs_position_offset", -INT32_MAX, INT32_MAX)
    if write_req_capacity is None:
        write_req_capacity = bs
    check_int(write_req_capacity, "write_req_capacity", bs, INT32_MAX - 1, f", and at least the batch size {bs}")
    check_stride(verify_stride, verify_phase)
    phase = 0 if verify_phase is None else int(integers(verify_phase, "verify_phase", (1,), PHASE_MEANING)[0])
    table = translate_slots(table, full_to_swa_index_mapping)
    tokens = np.empty((0, 0), np.int64)
    if expected_tokens is not None:
        tokens = token_ids(expected_tokens, "expected_tokens", (None, None), "a table of tokens by request row and position")

    def row_entries(row: Row, positions: range) -> Iterator[VerifyEntry]:
        slots = table[row.req_pool_index]
        known = tokens[row.req_pool_index][: max(row.expected_valid_len, 0)] if row.req_pool_index < len(tokens) else ()
        for p in positions:
            # A hole before an entry is reported by the entry at the hole; here it is only an unreachable predecessor.
            prev_slot = max(int(slots[p - 1]), 0) if p > 0 else -1
            j = p + kv_token_id_vs_position_offset
            yield VerifyEntry(int(slots[p]), int(known[j]) if 0 <= j < len(known) else -1, p, prev_slot)

    num_entries, num_invalid = 0, 0
    to_verify: list[tuple[Row, range]] = []
    offsets, seeds, row_offsets = [0], [], [0]
    for row in rows:
        seed, write_len = -1, 0
        if row.req_pool_index != REQ_POOL_IDX_PADDING:
            # The tokens of an invalid row are in the token arrays all the same: the rows behind it must not shift.
            write_len = max(row.extend_len, 0)
            if not _is_valid(row, *table.shape):
                num_invalid += 1
            else:
                start = max(0, row.prefix_len - swa_window_size) if swa_window_size else 0
                start += -(start + phase) % verify_stride
                to_verify.append((row, range(start, row.prefix_len, verify_stride)))
                num_entries += len(to_verify[-1][1])
                if row.prefix_len > 0 and row.extend_len > 0:
                    seed = int(table[row.req_pool_index, row.prefix_len - 1])
        offsets.append(min(offsets[-1] + write_len, INT32_MAX))
        seeds.append(seed)
        row_offsets.append(min(num_entries, INT32_MAX))

    # The entries of an overflow are counted and not listed: there could be any number of them.
    enable = num_entries <= verify_capacity
    entries = [entry for row, positions in to_verify for entry in row_entries(row, positions)] if enable else []
    unused = [VerifyEntry(-1, -1, -1, -1)] * (verify_capacity - len(entries))
    columns = np.array(entries + unused, np.int32).reshape(verify_capacity, len(VerifyEntry._fields))
    unused_rows = write_req_capacity - bs
    return Plan(
        verify=VerifyPlan(
            verify_slot_indices=columns[:, 0].copy(),
            verify_expected_tokens=columns[:, 1].copy(),
            verify_expected_positions=columns[:, 2].copy(),
            verify_prev_slot_indices=columns[:, 3].copy(),
            verify_num_valid=np.array([min(num_entries, verify_capacity)], np.int32),
            enable=np.array([enable], np.int32),
            row_offsets=np.array(row_offsets, np.int32),
        ),
        write=WritePlan(
            write_offsets=np.array(offsets + [0] * unused_rows, np.int32),
            write_seed_slot_indices=np.array(seeds + [-1] * unused_rows, np.int32),
            write_num_valid_reqs=np.array([bs], np.int32),
        ),
        num_invalid_rows=np.array([num_invalid], np.int32),
        row_flags=np.zeros(bs, np.int32) if bs else None,
    )


def translate_slots(slots: np.ndarray, full_to_swa_index_mapping: ArrayLike | None) -> np.ndarray:
    """Full-pool slots, int64 of any shape, in the group's own numbering; without a table they stay what they are.

    A negative slot passes, one past the table becomes 2^31 - 1, and a negative value of the table counts as 0, absent.
    """
    if full_to_swa_index_mapping is None:
        return slots
    meaning = "a table from full-pool slots to the group's own"
    table = indices(full_to_swa_index_mapping, "full_to_swa_index_mapping", (None,), meaning)
    own = np.where(slots < 0, slots, INT32_MAX)
    inside = (slots >= 0) & (slots < len(table))
    own[inside] = np.maximum(table[slots[inside]], 0)
    return own


def integers(value: ArrayLike, name: str, shape: tuple[int | None, ...], meaning: str) -> np.ndarray:
    """An int32 or int64 array, checked, as int64 on the host."""
    value = as_array(value)
    check_dtype(value, name, np.int32, np.int64)
    check_shape(value, name, shape, meaning)
    return np.asarray(value).astype(np.int64)


def indices(value: ArrayLike, name: str, shape: tuple[int | None, ...], meaning: str) -> np.ndarray:
    """Indices or lengths; a value that does not fit int32 becomes 2^31 - 1, or -1 where negative."""
    wide = integers(value, name, shape, meaning)
    return np.where(wide > INT32_MAX, INT32_MAX, np.where(wide < INT32_MIN, -1, wide))


def token_ids(value: ArrayLike, name: str, shape: tuple[int | None, ...], meaning: str) -> np.ndarray:
    """Expected tokens; a value that does not fit int32 becomes -1, unknown."""
    wide = integers(value, name, shape, meaning)
    return np.where((wide > INT32_MAX) | (wide < INT32_MIN), -1, wide)


def _is_valid(row: Row, max_reqs: int, max_seq_len: int) -> bool:
    return 0 <= row.req_pool_index < max_reqs and 0 <= row.prefix_len <= max_seq_len and row.extend_len >= 0


def _check_rows(inputs: PlanInput, *, needs_valid_lens: bool) -> list[Row]:
    """The rows of a batch; without a table of expected tokens none of them is valid."""
    check_type(inputs, "inputs", PlanInput)
    batch = indices(inputs.req_pool_indices, "inputs.req_pool_indices", (None,), "one request row for each row of the batch")
    of_batch = f"the batch of {len(batch)} rows"
    prefix_lens = indices(inputs.prefix_lens, "inputs.prefix_lens", batch.shape, of_batch)
    extend_lens = indices(inputs.extend_seq_lens, "inputs.extend_seq_lens", batch.shape, of_batch)
    valid_lens = np.zeros_like(batch)
    if needs_valid_lens:
        if inputs.expected_tokens_valid_lens is None:
            raise ValueError("`inputs.expected_tokens_valid_lens` is None, but it must be an array when `expected_tokens` is given.")
        valid_lens = indices(inputs.expected_tokens_valid_lens, "inputs.expected_tokens_valid_lens", batch.shape, of_batch)
    return [Row(*row) for row in np.stack((batch, prefix_lens, extend_lens, valid_lens), axis=1).tolist()]
