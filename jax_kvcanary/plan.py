"""The plan of a step: which slots to verify, and where each request's write chain starts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jax_kvcanary._checks import ArrayLike, as_array, check_int, check_type, index_array, integer_array, token_array
from jax_kvcanary.constants import INT32_MAX
from jax_kvcanary.pallas import PlanArrays, PlanStatics, gather, plan_arrays, translate

#: What ``verify_phase`` is, for messages.
PHASE_MEANING = "the phase of a step, one number,"


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("req_pool_indices", "prefix_lens", "extend_seq_lens", "expected_tokens_valid_lens"),
    meta_fields=(),
)
@dataclass(frozen=True)
class PlanInput:
    """The rows of a batch, int32 or int64 [bs] each.

    Fields:
        req_pool_indices: row of ``req_to_token`` for each request; 0 pads the batch.
        prefix_lens: tokens already in the cache before this step.
        extend_seq_lens: tokens written by this step.
        expected_tokens_valid_lens: how many leading entries of the request's row of expected tokens to trust, or None.
    """

    req_pool_indices: ArrayLike
    prefix_lens: ArrayLike
    extend_seq_lens: ArrayLike
    expected_tokens_valid_lens: ArrayLike | None = None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        "verify_slot_indices",
        "verify_expected_tokens",
        "verify_expected_positions",
        "verify_prev_slot_indices",
        "verify_num_valid",
        "enable",
        "row_offsets",
    ),
    meta_fields=(),
)
@dataclass(frozen=True)
class VerifyPlan:
    """What one verify launch checks, int32.

    Fields:
        verify_slot_indices: [verify_capacity]; slot of each entry, in the group's own numbering; 0 is skipped.
        verify_expected_tokens: [verify_capacity]; token the slot should hold, -1 where unknown.
        verify_expected_positions: [verify_capacity]; position the slot should hold.
        verify_prev_slot_indices: [verify_capacity]; slot of the predecessor, -1 at the start of a chain, 0 unreachable.
        verify_num_valid: [1]; entries in use.
        enable: [1]; 0 skips the launch, because the step needed more entries than there is room for.
        row_offsets: [bs + 1]; first entry of each row of the batch, by which findings are attributed to rows; None for entries that
            belong to no batch.
    """

    verify_slot_indices: ArrayLike
    verify_expected_tokens: ArrayLike
    verify_expected_positions: ArrayLike
    verify_prev_slot_indices: ArrayLike
    verify_num_valid: ArrayLike
    enable: ArrayLike
    row_offsets: ArrayLike | None = None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("write_offsets", "write_seed_slot_indices", "write_num_valid_reqs"),
    meta_fields=(),
)
@dataclass(frozen=True)
class WritePlan:
    """Where each row's tokens are, and the record its chain goes on from, int32.

    Fields:
        write_offsets: [write_req_capacity + 1]; row r writes the entries from offset r to offset r + 1.
        write_seed_slot_indices: [write_req_capacity]; slot of the token before the first one, -1 to start a chain.
        write_num_valid_reqs: [1]; rows in use.
    """

    write_offsets: ArrayLike
    write_seed_slot_indices: ArrayLike
    write_num_valid_reqs: ArrayLike


@partial(jax.tree_util.register_dataclass, data_fields=("verify", "write", "num_invalid_rows", "row_flags"), meta_fields=())
@dataclass(frozen=True)
class Plan:
    """Both plans of a step.

    Fields:
        verify: what is checked.
        write: what is written.
        num_invalid_rows: int32 [1]; rows that made no sense.
        row_flags: int32 [bs]; zeros, in which the launches of a step collect what they find for each row of the batch. None for a batch
            without rows, and once they are in use.
    """

    verify: VerifyPlan
    write: WritePlan
    num_invalid_rows: ArrayLike
    row_flags: ArrayLike | None = None


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
    """Plan the verify entries and the write chains of a batch (the contract's section 3).

    Args:
        inputs: the rows of the batch, int32 or int64 [bs].
        req_to_token: int32 or int64 [max_reqs, max_seq_len]; full-pool slot of each (request row, position).
        verify_capacity: verify entries that the plan has room for (static).
        write_req_capacity: rows that the write plan has room for, at least bs; None is bs (static).
        swa_window_size: verify only this many positions before the end of the prefix; 0 is all of them (static).
        full_to_swa_index_mapping: int32 or int64 [n]; translates slots into the group's own pool.
        expected_tokens: int32 or int64 [rows, width], indexed by request row; needs ``inputs.expected_tokens_valid_lens``.
        kv_token_id_vs_position_offset: slot of position p holds the token of position p plus this (static).
        verify_stride: verify only the positions p with (p + phase) % stride == 0 (static): n plans of consecutive phases have every entry
            once between them. 1 is all of them. Predecessors are those of the chain, not of the entry before.
        verify_phase: int32 or int64 [1], any value; given exactly when ``verify_stride`` is above 1.

    Returns:
        The plan. Entries past ``verify_num_valid`` are unspecified.

    Danger:
        The tokens of a step are expected packed in row order at the front of the token arrays, padding behind them. A
        batch that breaks this cannot be told from a legal one here.

    Raises:
        TypeError: a dtype other than int32 and int64. ValueError: a wrong rank, length or range.
    """
    batch, prefix, extend, table = row_arrays(inputs, req_to_token)
    bs = batch.shape[0]

    check_int(verify_capacity, "verify_capacity", 0, INT32_MAX - 1)
    check_int(swa_window_size, "swa_window_size", 0, INT32_MAX)
    check_int(kv_token_id_vs_position_offset, "kv_token_id_vs_position_offset", -INT32_MAX, INT32_MAX)
    if write_req_capacity is None:
        write_req_capacity = bs
    check_int(write_req_capacity, "write_req_capacity", bs, INT32_MAX - 1, f", and at least the batch size {bs}")
    check_stride(verify_stride, verify_phase)

    lut = full_to_swa_index_mapping
    if lut is not None:
        lut = lut_array(lut)
    valid_lens = None
    if expected_tokens is not None:
        expected_tokens = token_array(expected_tokens, "expected_tokens", (None, None), "a table of tokens by request row and position")
        if inputs.expected_tokens_valid_lens is None:
            raise ValueError("`inputs.expected_tokens_valid_lens` is None, but it must be an array when `expected_tokens` is given.")
        valid_lens = index_array(inputs.expected_tokens_valid_lens, "inputs.expected_tokens_valid_lens", (bs,), f"the batch of {bs} rows")

    statics = PlanStatics(
        batch_size=bs,
        max_reqs=table.shape[0],
        max_seq_len=table.shape[1],
        verify_capacity=int(verify_capacity),
        write_req_capacity=int(write_req_capacity),
        swa_window_size=int(swa_window_size),
        lut_len=None if lut is None else lut.shape[0],
        expected_rows=0 if expected_tokens is None else expected_tokens.shape[0],
        expected_width=0 if expected_tokens is None else expected_tokens.shape[1],
        kv_token_id_vs_position_offset=int(kv_token_id_vs_position_offset),
        verify_stride=int(verify_stride),
    )
    phase = None if verify_phase is None else _phase_array(verify_phase, verify_stride)
    arrays = PlanArrays(*(never_empty(a) for a in (batch, prefix, extend, table, lut, expected_tokens, valid_lens, phase)))
    out = plan_arrays(arrays, statics)
    return Plan(
        verify=VerifyPlan(
            verify_slot_indices=out.verify_slot_indices,
            verify_expected_tokens=out.verify_expected_tokens,
            verify_expected_positions=out.verify_expected_positions,
            verify_prev_slot_indices=out.verify_prev_slot_indices,
            verify_num_valid=out.verify_num_valid,
            enable=out.enable,
            row_offsets=out.row_offsets,
        ),
        write=WritePlan(
            write_offsets=out.write_offsets,
            write_seed_slot_indices=out.write_seed_slot_indices,
            write_num_valid_reqs=out.write_num_valid_reqs,
        ),
        num_invalid_rows=out.num_invalid_rows,
        row_flags=out.row_flags,
    )


def translate_slots(slots: ArrayLike, full_to_swa_index_mapping: ArrayLike | None) -> ArrayLike:
    """Full-pool slots in a group's own numbering, by the rule for plans (the contract's section 8); unchanged without a table.

    Args:
        slots: int32 or int64 [n].
        full_to_swa_index_mapping: int32 or int64 [m], or None.
    """
    if full_to_swa_index_mapping is None:
        return slots
    slots = index_array(slots, "slots", (None,), "full-pool slots")
    lut = lut_array(full_to_swa_index_mapping)
    return translate(gather, never_empty(lut), lut.shape[0], slots, slots >= 0)


def check_stride(verify_stride: int, verify_phase: ArrayLike | None) -> None:
    """Check the range of a stride, and that there is a phase exactly when it needs one."""
    check_int(verify_stride, "verify_stride", 1, INT32_MAX)
    given = verify_phase is not None
    if given != (verify_stride > 1):
        raise ValueError(
            f"`verify_phase` is {'an array' if given else 'None'}, but it must be {'None' if given else 'an array'} "
            f"when `verify_stride` is {verify_stride}."
        )


def row_arrays(inputs: PlanInput, req_to_token: ArrayLike) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The rows of a batch and the table of their slots, checked and as int32: request rows, prefix and extend lengths, table."""
    check_type(inputs, "inputs", PlanInput)
    batch = index_array(inputs.req_pool_indices, "inputs.req_pool_indices", (None,), "one request row for each row of the batch")
    bs = batch.shape[0]
    row = f"the batch of {bs} rows"
    prefix = index_array(inputs.prefix_lens, "inputs.prefix_lens", (bs,), row)
    extend = index_array(inputs.extend_seq_lens, "inputs.extend_seq_lens", (bs,), row)
    table = index_array(req_to_token, "req_to_token", (None, None), "a table of slots by request row and position")
    return batch, prefix, extend, table


def lut_array(full_to_swa_index_mapping: ArrayLike) -> jax.Array:
    """A table from full-pool slots to a group's own, checked and as int32."""
    return index_array(full_to_swa_index_mapping, "full_to_swa_index_mapping", (None,), "a table from full-pool slots to the group's own")


def _phase_array(verify_phase: ArrayLike, verify_stride: int) -> jax.Array:
    """The phase, checked and as int32: a wide one is taken modulo the stride, since to saturate it would change its remainder."""
    phase = integer_array(verify_phase, "verify_phase", (1,), PHASE_MEANING)
    if phase.dtype == jnp.int32:
        return phase
    with jax.enable_x64(True):
        return (phase % verify_stride).astype(jnp.int32)


def never_empty(array: ArrayLike | None) -> ArrayLike | None:
    """The array, or one element that nothing reads in place of an empty one: kernels cannot take empty operands."""
    if array is None or as_array(array).size:
        return array
    return jnp.zeros((1,) * array.ndim, array.dtype)
