"""Faults of the pool: one byte of a slot's real KV.

A donated pool is not copied: a step without a fault leaves it alone, one with a fault passes over the one array that it hits.

On the CPU, XLA's scatter takes arrays of bfloat16 and float8 through wider floats, all of it, and flushes subnormals to zero. Where a
forward stores its tokens so, the fault that made a subnormal may be gone before the next verify.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvcanary._checks import ArrayLike, check_type, index_array, on_device
from jax_kvcanary.batch import ForwardBatch
from jax_kvcanary.perturb.batches import own_slot
from jax_kvcanary.perturb.draw import Dice, Rows, element
from jax_kvcanary.perturb.target import Perturbation, PerturbTarget
from jax_kvcanary.plan import translate_slots
from jax_kvcanary.sources import RealKvSource, item_bytes, replace_at_path


def flip_live_kv(
    key: ArrayLike,
    target: PerturbTarget,
    batch: ForwardBatch,
    pool: Any,
    *,
    probability: Any,
    step: Any = 0,
    warmup_steps: Any = 0,
) -> tuple[Any, Perturbation]:
    """Flip bits of one byte of a slot that this step verifies. Call it before ``post_forward``, which finds it.

    Args:
        key: PRNG key, typed or raw.
        target: whose slots to hit, and which of their bytes (static).
        batch: the batch of this step.
        pool: the live pool.
        probability: of the fault in this step, a Python number between 0 and 1, or a float scalar.
        step: number of this step, an int or an int32 or int64 scalar.
        warmup_steps: nothing happens before the step of this number.

    Returns:
        The pool, and what was changed. Nothing is where the batch verifies no slot, or the position drawn has none.

    Raises:
        TypeError: an argument of a wrong type. ValueError: one of a wrong shape or range, or a target without bytes to flip.
        NotImplementedError: the KV's dtype has no bytes to flip.
    """
    with jax.enable_x64(True):
        dice, rows = Dice(key), Rows.of(batch, target)
        happened = dice.happens(probability, step, warmup_steps)
        row, position, found = rows.verified(dice)
        slot = own_slot(target, element(batch.req_to_token, rows.req[row], position), pool)
        return _flip_byte(dice, target, pool, slot, happened & found, row=rows.req[row], position=position)


def flip_written_kv(
    key: ArrayLike,
    target: PerturbTarget,
    batch: ForwardBatch,
    pool: Any,
    *,
    probability: Any,
    step: Any = 0,
    warmup_steps: Any = 0,
) -> tuple[Any, Perturbation]:
    """Flip bits of one byte of a slot that this step wrote.

    Called behind ``post_forward`` it is found in the row's next step, unless the slot is written again: rejected drafts are. Called
    between the forward and ``post_forward`` it is fingerprinted as it is, and nobody finds it. The slot is one that the target's
    group verifies in the row's next step.

    Args:
        key: PRNG key, typed or raw.
        target: whose slots to hit, and which of their bytes (static).
        batch: the batch of this step.
        pool: the live pool.
        probability: of the fault in this step, a Python number between 0 and 1, or a float scalar.
        step: number of this step, an int or an int32 or int64 scalar.
        warmup_steps: nothing happens before the step of this number.

    Returns:
        The pool, and what was changed. Nothing is where the batch writes no slot, or the entry drawn has none.

    Raises:
        TypeError, ValueError, NotImplementedError: as for :func:`flip_live_kv`.
    """
    with jax.enable_x64(True):
        dice, rows = Dice(key), Rows.of(batch, target)
        happened = dice.happens(probability, step, warmup_steps)
        row, entry, found = rows.written(dice)
        slot = own_slot(target, element(batch.out_cache_loc, entry), pool)
        position = element(batch.positions, entry)
        return _flip_byte(dice, target, pool, slot, happened & found, row=rows.req[row], position=position, entry=entry)


def flip_cached_kv(
    key: ArrayLike,
    target: PerturbTarget,
    slots: ArrayLike,
    pool: Any,
    *,
    probability: Any,
    step: Any = 0,
    warmup_steps: Any = 0,
) -> tuple[Any, Perturbation]:
    """Flip bits of one byte of one of the slots given: those that only a prefix cache holds.

    The next sweep that covers the slot finds it, or ``post_forward`` of the first step that uses it again.

    Args:
        key: PRNG key, typed or raw.
        target: whose slots to hit, and which of their bytes (static).
        slots: int32 or int64 [n] full-pool slots; negative ones, slot 0 and those that the group does not have are passed over, so that
            the array can be padded.
        pool: the live pool.
        probability: of the fault in this step, a Python number between 0 and 1, or a float scalar.
        step: number of this step, an int or an int32 or int64 scalar.
        warmup_steps: nothing happens before the step of this number.

    Returns:
        The pool, and what was changed.

    Raises:
        TypeError, ValueError, NotImplementedError: as for :func:`flip_live_kv`.
    """
    check_type(target, "target", PerturbTarget)
    with jax.enable_x64(True):
        dice = Dice(key)
        happened = dice.happens(probability, step, warmup_steps)
        slots = index_array(slots, "slots", (None,), "full-pool slots to choose from")
        own = translate_slots(slots, target.lut(pool))
        entry = dice.one_of((own > 0) & (own < target.num_slots)) if slots.shape[0] else jnp.zeros((), jnp.int32)
        return _flip_byte(dice, target, pool, own_slot(target, element(slots, entry), pool), happened, entry=entry)


def _flip_byte(
    dice: Dice, target: PerturbTarget, pool: Any, slot: jax.Array, happened: jax.Array, **where: jax.Array
) -> tuple[Any, Perturbation]:
    """Flip bits of a byte of a slot, in one of the target's sources."""
    check_type(target, "target", PerturbTarget)
    bound = [spec.bind(pool) for spec in target.sources]
    usable = [i for i, source in enumerate(bound) if target.bytes_to_flip(source)]
    if not usable:
        raise ValueError(
            f"`target` has {len(bound)} sources and no byte to flip in any of them, from byte {target.first_byte} on with "
            f"`real_kv_hash_mode` {target.real_kv_hash_mode.name}; take the target of a canary that hashes these bytes."
        )
    happened &= slot > 0
    slot = jnp.where(happened, slot, 0)
    choice, draw, mask = dice.below(len(usable)), dice.below(2**31), 1 + dice.below(255)
    nothing = jnp.zeros((), jnp.int32)
    hit_source = hit_byte = before = nothing
    for n, i in enumerate(usable):
        source = target.sources[i].bind(pool)  # with the array that an earlier source may have changed already
        hit = happened & (choice == n)
        byte = (target.first_byte + draw % len(target.bytes_to_flip(source))).astype(jnp.int32)
        array, old = _xor_byte(source, slot, byte, mask, hit)
        pool = replace_at_path(pool, target.sources[i].path, array)
        hit_source, hit_byte, before = jnp.where(hit, i, hit_source), jnp.where(hit, byte, hit_byte), jnp.where(hit, old, before)
    record = Perturbation.of(happened, slot=slot, source=hit_source, byte=hit_byte, before=before, after=before ^ mask, **where)
    return pool, record


def _xor_byte(source: RealKvSource, slot: jax.Array, byte: jax.Array, mask: jax.Array, hit: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The array of a source with one byte of a slot combined with a mask where it is hit, and the byte before.

    The array is looked at as integers: a CPU passes arrays of narrow floats through wider ones even to update a slice, and loses bits of
    subnormals and NaNs. That is a pass over the array, so it stands in a branch of its own: where nothing is hit, a donated array stays
    as it is.
    """
    array = jnp.asarray(on_device(source.array))
    dtype = np.dtype(array.dtype)
    width = item_bytes(dtype)
    if not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)):
        raise NotImplementedError(f"`pool` has a KV array of dtype {dtype}, but only bytes of integers and floats can be flipped.")
    bits = np.dtype(f"uint{8 * width}")
    page, in_page = slot.astype(jnp.int64) // source.page_size, slot.astype(jnp.int64) % source.page_size
    address = source.byte_offset + page * source.row_stride + in_page * source.token_stride + byte
    index = [i.astype(jnp.int32) for i in jnp.unravel_index(address // width, array.shape)]
    shift = (8 * (address % width)).astype(bits)  # little-endian, as all platforms with custom calls are
    one = (1,) * array.ndim

    def flip(array: jax.Array) -> tuple[jax.Array, jax.Array]:
        words = jax.lax.bitcast_convert_type(array, bits)
        word = jax.lax.dynamic_slice(words, index, one)
        words = jax.lax.dynamic_update_slice(words, word ^ (mask.astype(bits) << shift), index)
        return jax.lax.bitcast_convert_type(words, dtype), word

    def leave(array: jax.Array) -> tuple[jax.Array, jax.Array]:
        return array, jnp.zeros(one, bits)

    array, word = jax.lax.cond(hit, flip, leave, array)
    return array, ((word.reshape(()) >> shift) & bits.type(0xFF)).astype(jnp.int32)
