"""Faults of the batch: the table, the tokens and the positions that the scheduler hands to a step."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_kvcanary._checks import ArrayLike, integer_array
from jax_kvcanary.batch import ForwardBatch
from jax_kvcanary.perturb.draw import Dice, Rows, element
from jax_kvcanary.perturb.target import Perturbation, PerturbTarget
from jax_kvcanary.plan import translate_slots


def trample_req_to_token(
    key: ArrayLike,
    target: PerturbTarget,
    batch: ForwardBatch,
    pool: Any,
    *,
    probability: Any,
    step: Any = 0,
    warmup_steps: Any = 0,
) -> tuple[ForwardBatch, Perturbation]:
    """Overwrite a position of a row's table with the slot of another position, of the same request or of another one in the batch.

    Both are positions that the target's group verifies in this step, so that the position in the slot's record gives it away. Call it
    before ``pre_forward``. The new table is the batch's: a loop whose table lives elsewhere has lost the fault in the next step.

    Args:
        key: PRNG key, typed or raw.
        target: whose slots to hit (static).
        batch: the batch of this step.
        pool: the live pool; only its SWA table is read.
        probability: of the fault in this step, a Python number between 0 and 1, or a float scalar.
        step: number of this step, an int or an int32 or int64 scalar.
        warmup_steps: nothing happens before the step of this number.

    Returns:
        The batch, and what was changed. Nothing is where the rows drawn have no slot there, or the batch verifies one position alone.

    Raises:
        TypeError, ValueError: an argument of a wrong type, shape or range.
    """
    with jax.enable_x64(True):
        dice, rows = Dice(key), Rows.of(batch, target)
        happened = dice.happens(probability, step, warmup_steps)
        row, position, found = rows.verified(dice)
        other, other_position, found_other = rows.verified_elsewhere(dice, position)
        table = integer_array(batch.req_to_token, "batch.req_to_token", (None, None), "a table of slots by request row and position")
        before, after = element(table, rows.req[row], position), element(table, rows.req[other], other_position)
        slot = own_slot(target, after, pool)
        happened &= found & found_other & (own_slot(target, before, pool) > 0) & (slot > 0) & (before != after)
        changed = dataclasses.replace(batch, req_to_token=_set(table, (rows.req[row], position), after, happened))
        record = Perturbation.of(happened, row=rows.req[row], position=position, slot=slot, before=before, after=after)
    return changed, record


def swap_next_tokens(
    key: ArrayLike,
    target: PerturbTarget,
    batch: ForwardBatch,
    pool: Any,
    *,
    probability: Any,
    step: Any = 0,
    warmup_steps: Any = 0,
) -> tuple[ForwardBatch, Perturbation]:
    """Swap the last input tokens of two rows whose tokens differ: in a decode batch, what was sampled for the two.

    ``expected_input_tokens`` stay as they are. Call it before ``pre_forward``.

    Args:
        key: PRNG key, typed or raw.
        target: whose slot the record names (static).
        batch: the batch of this step.
        pool: the live pool; only its SWA table is read.
        probability: of the fault in this step, a Python number between 0 and 1, or a float scalar.
        step: number of this step, an int or an int32 or int64 scalar.
        warmup_steps: nothing happens before the step of this number.

    Returns:
        The batch, and what was changed, seen from the first of the two rows. Nothing is where all rows have the same token, or the first
        row's token has no slot.

    Raises:
        TypeError, ValueError: an argument of a wrong type, shape or range.
    """
    with jax.enable_x64(True):
        dice, rows = Dice(key), Rows.of(batch, target)
        happened = dice.happens(probability, step, warmup_steps)
        ids = integer_array(batch.input_ids, "batch.input_ids", (None,), "one token for each entry")
        writes = rows.extend > 0
        entries = jnp.where(writes, rows.first_entry + rows.extend - 1, 0).astype(jnp.int32)
        tokens = ids[entries] if ids.shape[0] else jnp.zeros_like(entries)
        row = dice.one_of(writes & _differs_from_some(tokens, writes))
        others = writes & (tokens != tokens[row])
        other = dice.one_of(others)
        slot = own_slot(target, element(batch.out_cache_loc, entries[row]), pool)
        happened &= writes[row] & others[other] & (slot > 0)
        swapped = _set(_set(ids, (entries[row],), tokens[other], happened), (entries[other],), tokens[row], happened)
        record = Perturbation.of(
            happened,
            row=rows.req[row],
            position=element(batch.positions, entries[row]),
            entry=entries[row],
            other_entry=entries[other],
            slot=slot,
            before=element(ids, entries[row]),
            after=element(swapped, entries[row]),
        )
    return dataclasses.replace(batch, input_ids=swapped), record


def shift_position(
    key: ArrayLike,
    target: PerturbTarget,
    batch: ForwardBatch,
    pool: Any,
    *,
    probability: Any,
    step: Any = 0,
    warmup_steps: Any = 0,
) -> tuple[ForwardBatch, Perturbation]:
    """Shift the position of one token by one, up or down; position 0 only up.

    The token is one that the target's group verifies in the row's next step. The rows' lengths and ``expected_input_positions`` stay as
    they are. Call it before ``pre_forward``.

    Args:
        key: PRNG key, typed or raw.
        target: whose slots to hit (static).
        batch: the batch of this step.
        pool: the live pool; only its SWA table is read.
        probability: of the fault in this step, a Python number between 0 and 1, or a float scalar.
        step: number of this step, an int or an int32 or int64 scalar.
        warmup_steps: nothing happens before the step of this number.

    Returns:
        The batch, and what was changed. Nothing is where the batch writes no slot, or the entry drawn has none.

    Raises:
        TypeError, ValueError: an argument of a wrong type, shape or range.
    """
    with jax.enable_x64(True):
        dice, rows = Dice(key), Rows.of(batch, target)
        happened = dice.happens(probability, step, warmup_steps)
        positions = integer_array(batch.positions, "batch.positions", (None,), "one position for each entry")
        row, entry, found = rows.written(dice)
        before = element(positions, entry)
        up = (dice.below(2) == 1) | (before < 1)
        slot = own_slot(target, element(batch.out_cache_loc, entry), pool)
        happened &= found & (before >= 0) & (slot > 0)
        after = before + jnp.where(up, 1, -1)
        record = Perturbation.of(happened, row=rows.req[row], position=before, entry=entry, slot=slot, before=before, after=after)
        changed = dataclasses.replace(batch, positions=_set(positions, (entry,), after, happened))
    return changed, record


def own_slot(target: PerturbTarget, slot: jax.Array, pool: Any) -> jax.Array:
    """A full-pool slot in the group's own numbering; -1 where the group has no such slot. Slot 0 is for padding."""
    own = translate_slots(slot[None], target.lut(pool))[0]
    return jnp.where((own >= 0) & (own < target.num_slots), own, -1).astype(jnp.int32)


def _set(array: jax.Array, index: tuple[jax.Array, ...], value: jax.Array, happened: jax.Array) -> jax.Array:
    """The array with one element set where the fault happens."""
    outside = tuple(jnp.where(happened, i, size) for i, size in zip(index, array.shape, strict=True))
    return array.at[outside].set(value.astype(array.dtype), mode="drop")


def _differs_from_some(tokens: jax.Array, mask: jax.Array) -> jax.Array:
    """Whether the rows that are set do not all have the same token: then each differs from some other one."""
    some = tokens[jax.lax.argmax(mask, 0, jnp.int32)]
    return jnp.any(mask & (tokens != some))
