"""The contract's hashes inside a JAX program: pure ``jnp`` on word pairs, so that 64-bit types may be off.

A word is a pair of uint32 in the last axis, low half first, as everywhere on the device. The same functions on Python ints,
to read and to compare with, are in :mod:`jax_kvcanary.reference`.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvcanary._checks import ArrayLike, check_dtype, check_int, check_shape, on_device
from jax_kvcanary.constants import INT32_MAX

_HALF_MASK = np.uint32(0xFFFF)


def words_of(values: ArrayLike) -> jax.Array:
    """Integers as words, sign extended, without change of value whether 64-bit types are on or off.

    Args:
        values: int32 or int64 array of any shape.

    Returns:
        uint32 [..., 2].

    Raises:
        TypeError: another dtype.
    """
    check_dtype(values, "values", np.int32, np.int64)
    values = on_device(values)
    with jax.enable_x64(True):
        if values.dtype == np.int64:
            return jax.lax.bitcast_convert_type(values, jnp.uint32)
        return jax.lax.bitcast_convert_type(jnp.stack([values, values >> 31], axis=-1), jnp.uint32)


@jax.jit
def splitmix64(words: ArrayLike) -> jax.Array:
    """The finaliser of the generator splitmix64, without its increment: 0 stays 0.

    Args:
        words: uint32 [..., 2].

    Returns:
        uint32 [..., 2].

    Raises:
        TypeError: another dtype. ValueError: the last axis is not 2.
    """
    low, high = _halves(words, "words")
    low, high = _times(*_xor_shift(low, high, 30), 0xBF58476D1CE4E5B9)
    low, high = _times(*_xor_shift(low, high, 27), 0x94D049BB133111EB)
    return jnp.stack(_xor_shift(low, high, 31), axis=-1)


@jax.jit
def mix3(a: ArrayLike, b: ArrayLike, c: ArrayLike) -> jax.Array:
    """Hash of three words in order: one link of a chain is ``mix3(prev_hash, token, position)``.

    Args:
        a: uint32 [..., 2]; the leading axes of all three are broadcast.
        b: the second word.
        c: the third word.

    Returns:
        uint32 [..., 2].

    Raises:
        TypeError: another dtype. ValueError: the last axis is not 2.
    """
    for name, value in (("a", a), ("b", b), ("c", c)):
        _halves(value, name)
    return splitmix64(splitmix64(splitmix64(a) ^ jnp.asarray(b)) ^ jnp.asarray(c))


def scale_below(words: ArrayLike, bound: int) -> jax.Array:
    """Hashes as integers below a bound: ``word * bound >> 64``, exactly.

    Equal ranges of words go to each integer, up to one word. A remainder would do as well, but needs a division of 64-bit numbers.

    Args:
        words: uint32 [..., 2].
        bound: between 1 and 2^31 - 1 (static).

    Returns:
        int32 [...], each in [0, bound).

    Raises:
        TypeError: another dtype or type. ValueError: the last axis is not 2, or the bound is outside its range.
    """
    return _scale_below(words, check_int(bound, "bound", 1, INT32_MAX))


@partial(jax.jit, static_argnames="bound")
def _scale_below(words: ArrayLike, bound: int) -> jax.Array:
    low, high = _halves(words, "words")
    factor = np.uint32(bound)
    _, carried = _wide_product(low, factor)
    middle, top = _wide_product(high, factor)
    return (top + (middle + carried < carried).astype(jnp.uint32)).astype(jnp.int32)


def _halves(words: ArrayLike, name: str) -> tuple[jax.Array, jax.Array]:
    """Low and high halves of words, checked."""
    check_dtype(words, name, np.uint32)
    check_shape(words, name, (*[None] * max(len(words.shape) - 1, 0), 2), "a word of two halves in the last axis")
    words = jnp.asarray(words)
    return words[..., 0], words[..., 1]


def _xor_shift(low: jax.Array, high: jax.Array, bits: int) -> tuple[jax.Array, jax.Array]:
    """``x ^ x >> bits``, for fewer bits than a half has."""
    carried = high << np.uint32(32 - bits)
    return low ^ (low >> np.uint32(bits) | carried), high ^ high >> np.uint32(bits)


def _times(low: jax.Array, high: jax.Array, factor: int) -> tuple[jax.Array, jax.Array]:
    """The product with a constant, modulo 2^64."""
    factor_low, factor_high = np.uint32(factor & 0xFFFFFFFF), np.uint32(factor >> 32)
    product_low, product_high = _wide_product(low, factor_low)
    return product_low, product_high + low * factor_high + high * factor_low


def _wide_product(a: jax.Array, b: np.uint32) -> tuple[jax.Array, jax.Array]:
    """All 64 bits of the product of two halves, by 16-bit digits: no partial sum below leaves uint32."""
    digit = np.uint32(16)
    a_low, a_high, b_low, b_high = a & _HALF_MASK, a >> digit, b & _HALF_MASK, b >> digit
    first = a_high * b_low + (a_low * b_low >> digit)
    second = a_low * b_high + (first & _HALF_MASK)
    return a * b, a_high * b_high + (first >> digit) + (second >> digit)
