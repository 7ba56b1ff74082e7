"""Small floating-point formats: blocks with a power of two as their scale (e8m0), and e2m1 values."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp

#: An e8m0 byte b stands for 2^(b - 127). Scales keep to exponents whose powers, and their inverses, are normal in float32.
_BIAS, _MAX_EXPONENT = 127, 126

_FLOAT32_MANTISSA_BITS = 23

#: Magnitudes of the e2m1 codes 0 to 7; bit 3 is the sign.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def scale_bytes(blocks: jax.Array, *, largest: float) -> jax.Array:
    """For each block, uint8 [...], the smallest power of two, from 2^-126 on, that brings its elements to ``largest`` or below.

    Args:
        blocks: float32 [..., elements], finite.
        largest: the largest magnitude of the format that the elements go to.
    """
    mantissa, exponent = jnp.frexp(jnp.abs(blocks).max(axis=-1))  # exact, where a logarithm would round
    limit_mantissa, limit_exponent = math.frexp(largest)
    exponent = jnp.where(mantissa == 0, -_MAX_EXPONENT, exponent - limit_exponent + (mantissa > limit_mantissa))
    return (jnp.clip(exponent, -_MAX_EXPONENT, _MAX_EXPONENT) + _BIAS).astype(jnp.uint8)


def scaled(blocks: jax.Array, scales: jax.Array) -> jax.Array:
    """Blocks, float32 [..., elements], over their scales, uint8 [...]."""
    return blocks * _power_of_two(_BIAS - scales.astype(jnp.int32))[..., None]


def unscaled(blocks: jax.Array, scales: jax.Array) -> jax.Array:
    """Blocks, float32 [..., elements], times their scales, uint8 [...]."""
    return blocks * _power_of_two(scales.astype(jnp.int32) - _BIAS)[..., None]


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """2^exponent, float32, put together from its bits: a device's ``pow`` need not be exact."""
    return jax.lax.bitcast_convert_type((exponent + _BIAS) << _FLOAT32_MANTISSA_BITS, jnp.float32)


def encode_e2m1(values: jax.Array) -> jax.Array:
    """The codes, uint8 below 16, of the nearest e2m1 values; a tie goes to the smaller magnitude."""
    middles = [(low + high) / 2 for low, high in itertools.pairwise(_MAGNITUDES)]
    magnitude = sum((jnp.abs(values) > middle).astype(jnp.uint8) for middle in middles)
    return jnp.where(values < 0, 8, 0).astype(jnp.uint8) | magnitude


def decode_e2m1(codes: jax.Array) -> jax.Array:
    """The values, float32, of e2m1 codes, uint8 below 16."""
    return jnp.asarray([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], jnp.float32)[codes]
