"""Small floating-point formats: blocks with a power of two as their scale (e8m0), and e2m1 values."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp

#: An e8m0 byte b stands for 2^(b - 127); 255 would be no number.
_BIAS = 127

#: Magnitudes of the e2m1 codes 0 to 7; bit 3 is the sign.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def scale_bytes(blocks: jax.Array, *, largest: float) -> jax.Array:
    """For each block, uint8 [...], the smallest power of two that brings its elements to ``largest`` or below.

    Args:
        blocks: float32 [..., elements], finite.
        largest: the largest magnitude of the format that the elements go to.
    """
    mantissa, exponent = jnp.frexp(jnp.abs(blocks).max(axis=-1))  # exact, where a logarithm would round
    limit_mantissa, limit_exponent = math.frexp(largest)
    exponent = jnp.where(mantissa == 0, -_BIAS, exponent - limit_exponent + (mantissa > limit_mantissa))
    return (jnp.clip(exponent, -_BIAS, _BIAS) + _BIAS).astype(jnp.uint8)


def scaled(blocks: jax.Array, scales: jax.Array) -> jax.Array:
    """Blocks, float32 [..., elements], over their scales, uint8 [...]."""
    return jnp.ldexp(blocks, _BIAS - scales.astype(jnp.int32)[..., None])


def unscaled(blocks: jax.Array, scales: jax.Array) -> jax.Array:
    """Blocks, float32 [..., elements], times their scales, uint8 [...]."""
    return jnp.ldexp(blocks, scales.astype(jnp.int32)[..., None] - _BIAS)


def encode_e2m1(values: jax.Array) -> jax.Array:
    """The codes, uint8 below 16, of the nearest e2m1 values; a tie goes to the smaller magnitude."""
    middles = [(low + high) / 2 for low, high in itertools.pairwise(_MAGNITUDES)]
    magnitude = sum((jnp.abs(values) > middle).astype(jnp.uint8) for middle in middles)
    return jnp.where(values < 0, 8, 0).astype(jnp.uint8) | magnitude


def decode_e2m1(codes: jax.Array) -> jax.Array:
    """The values, float32, of e2m1 codes, uint8 below 16."""
    return jnp.asarray([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], jnp.float32)[codes]
