"""Pools that store fewer bits than they are given: how far what is read is from what was written."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from helpers.pool_cases import E2M1, quantised_fp4
from jax_kvcanary.pools import MHATokenToKVPoolFP4, pack_deepseek_v4_tokens

SCALES = (0.0, 1.0, 2.0**-40, 3.0e20, 1.7)


def random_tokens(shape, seed):
    """Normal values whose size differs from token to token."""
    rng = np.random.default_rng(seed)
    scale = rng.choice(SCALES, (shape[0], *[1] * (len(shape) - 1)))
    return (rng.normal(size=shape) * scale).astype(np.float32)


@pytest.mark.parametrize("page_size", [1, 7])
def test_fp4_is_near_what_was_written(page_size):
    pool = MHATokenToKVPoolFP4.allocate(num_slots=21, num_layers=2, num_kv_heads=3, head_dim=16, page_size=page_size)
    assert (pool.num_slots, pool.page_size) == (21, page_size)
    slots = np.array([13, 2, 20, 7, 11, 5, 1], np.int32)
    k, v = random_tokens((7, 3, 16), 1), random_tokens((7, 3, 16), 2)
    pool = jax.jit(lambda pool, k, v: pool.write(-1, slots, k, v), donate_argnums=0)(pool, k, v)
    for got, want in zip(pool.read(1), (k, v), strict=True):
        assert (got.shape, got.dtype) == ((21, 3, 16), np.float32)
        blocks = np.abs(want).reshape(7, 3, 16).max(-1, keepdims=True).astype(np.float64)
        scale = 2.0 ** np.ceil(np.log2(np.where(blocks > 0, blocks, 1) / 6))
        in_scale = np.abs(want) / scale
        # Half the gap between neighbouring values: 0.5 below 2, 1 below 4, 2 above.
        bound = scale * np.where(in_scale <= 2, 0.25, np.where(in_scale <= 4, 0.5, 1.0))
        assert (np.abs(np.asarray(got)[slots] - want) <= bound).all()
        assert not np.asarray(got)[np.delete(np.arange(21), slots)].any()
    for got in pool.read(0):
        assert not np.asarray(got).any()


def test_fp4_keeps_what_it_can_represent():
    """Every value of the format at every scale comes back as it was; the first value of two is in the low bits."""
    pool = MHATokenToKVPoolFP4.allocate(num_slots=31, num_layers=1, num_kv_heads=1, head_dim=16)
    values = np.concatenate([E2M1, -E2M1])[None] * 2.0 ** np.arange(-15, 15)[:, None]
    tokens = values.astype(np.float32)[:, None]
    pool = pool.write(0, np.arange(1, 31, dtype=np.int32), tokens, tokens[:, :, ::-1])
    k, v = pool.read(0)
    np.testing.assert_array_equal(k[1:], tokens)
    np.testing.assert_array_equal(v[1:], tokens[:, :, ::-1])
    assert np.asarray(pool.k_buffer[0])[1, 0].tolist() == [0x10, 0x32, 0x54, 0x76, 0x90, 0xBA, 0xDC, 0xFE]
    assert np.asarray(pool.k_scale_buffer[0])[1:, 0].tolist() == list(range(127 - 15, 127 + 15))


@pytest.mark.parametrize("seed", range(3))
def test_fp4_bytes_are_those_of_a_search(seed):
    tokens = random_tokens((23, 2, 24), seed)
    pool = MHATokenToKVPoolFP4.allocate(num_slots=24, num_layers=1, num_kv_heads=2, head_dim=24)
    pool = pool.write(0, np.arange(1, 24, dtype=np.int32), tokens, tokens)
    packed, scales = quantised_fp4(tokens)
    np.testing.assert_array_equal(np.asarray(pool.v_buffer[0])[1:].reshape(23, -1), packed)
    np.testing.assert_array_equal(np.asarray(pool.v_scale_buffer[0])[1:], scales)


def test_deepseek_v4_tokens():
    latent, rope = random_tokens((11, 448), 4), random_tokens((11, 64), 5)
    packed = np.asarray(jax.jit(pack_deepseek_v4_tokens)(latent, rope))
    assert (packed.shape, packed.dtype) == ((11, 584), np.uint8)
    np.testing.assert_array_equal(packed[:, 448:576].copy().view(ml_dtypes.bfloat16), rope.astype(ml_dtypes.bfloat16))
    assert not packed[:, 583].any()
    blocks = np.abs(latent).reshape(11, 7, 64).max(-1).astype(np.float64)
    exponents = packed[:, 576:583].astype(int) - 127
    live = blocks > 0
    np.testing.assert_array_equal(exponents[live], np.ceil(np.log2(blocks[live] / 448)).astype(int))
    assert (exponents[~live] == -126).all()
    values = packed[:, :448].copy().view(ml_dtypes.float8_e4m3fn).astype(np.float64).reshape(11, 7, 64)
    read = (values * 2.0 ** exponents[..., None]).reshape(11, 448)
    # Three bits of mantissa: a 16th of the value, or half the smallest step, 2^-9.
    bound = np.maximum(np.abs(latent) / 16, np.repeat(2.0**exponents, 64, axis=1) * 2.0**-10)
    assert (np.abs(read - latent) <= bound).all()


def test_deepseek_v4_tokens_of_another_shape():
    with pytest.raises(ValueError, match=r"^`latent` has shape \[3, 447\], but the latent part of each token needs shape \[any, 448\]\.$"):
        pack_deepseek_v4_tokens(jnp.zeros((3, 447)), jnp.zeros((3, 64)))
    with pytest.raises(
        ValueError, match=r"^`rope` has shape \[2, 64\], but the rotary part of each token of `latent` needs shape \[3, 64\]\.$"
    ):
        pack_deepseek_v4_tokens(jnp.zeros((3, 448)), jnp.zeros((2, 64)))
