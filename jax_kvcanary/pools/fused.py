"""A pool with the heads of K and V interleaved in one array a layer: K0, V0, K1, V1, and so on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_kvcanary._checks import ArrayLike
from jax_kvcanary.buffers import CanaryBufferGroup
from jax_kvcanary.config import CanaryConfig
from jax_kvcanary.pools.layers import hashed_layers, mha_group, slots_of, token_bytes
from jax_kvcanary.pools.mha import pool_shape, store_tokens
from jax_kvcanary.sources import SourceSpec

_TOKEN_RANK = 2  # 2 * kv_heads, head_dim


@partial(jax.tree_util.register_dataclass, data_fields=("kv_buffer",), meta_fields=())
@dataclass(frozen=True)
class FusedMHATokenToKVPool:
    """KV with interleaved heads.

    Fields:
        kv_buffer: one array a layer, (slots, 2 * kv_heads, head_dim) or (pages, page_size, 2 * kv_heads, head_dim); even heads are K,
            odd ones V. Slot 0, in pages page 0, is for padding.
    """

    kv_buffer: tuple[ArrayLike, ...]

    @classmethod
    def allocate(
        cls, *, num_slots: int, num_layers: int, num_kv_heads: int, head_dim: int, dtype: Any = jnp.bfloat16, page_size: int = 1
    ) -> FusedMHATokenToKVPool:
        """Zeroed arrays. ``num_slots`` counts the padding slot and must be a multiple of ``page_size``."""
        shape = pool_shape(num_slots, page_size, 2 * num_kv_heads, head_dim)
        return cls(tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)))

    @property
    def num_slots(self) -> int:
        """Slots of the pool, the padding slot included."""
        return slots_of(self.kv_buffer[0], _TOKEN_RANK)[0]

    @property
    def page_size(self) -> int:
        """Slots in one page; 1 for a pool without pages."""
        return slots_of(self.kv_buffer[0], _TOKEN_RANK)[1]

    def write(self, layer: int, slots: ArrayLike, k: ArrayLike, v: ArrayLike) -> FusedMHATokenToKVPool:
        """The pool with tokens' K and V of one layer stored; arguments as for :meth:`MHATokenToKVPool.write`."""
        tokens, heads, head_dim = k.shape
        buffers = list(self.kv_buffer)
        buffers[layer] = store_tokens(buffers[layer], slots, jnp.stack([k, v], axis=2).reshape(tokens, 2 * heads, head_dim))
        return FusedMHATokenToKVPool(tuple(buffers))


def attach_fused(pool: Any, config: CanaryConfig, *, kv_token_id_vs_position_offset: int) -> tuple[CanaryBufferGroup, ...]:
    """Attacher for pools with a ``kv_buffer`` of interleaved heads: one FULL group.

    A slot's bytes are hashed as one run, since K and V of a token alternate: the K half reads from the first K head up to
    the last one, the V half from the first V head to the end. PARTIAL therefore sees the first bytes of K and of V, and ALL
    every byte, those between the heads of one half in both.
    """
    layers = hashed_layers(config, len(pool.kv_buffer))
    num_slots, page_size = slots_of(pool.kv_buffer[0], _TOKEN_RANK)

    def sources(first_head: int) -> list[SourceSpec]:
        specs = []
        for layer in layers:
            array = pool.kv_buffer[layer]
            stride, head_bytes = token_bytes(array, _TOKEN_RANK), token_bytes(array, 1)
            specs.append(
                SourceSpec(
                    path=("kv_buffer", layer),
                    page_size=page_size,
                    num_bytes_per_token=stride - head_bytes,
                    read_bytes=stride - head_bytes,
                    byte_offset=first_head * head_bytes,
                    token_stride_bytes=stride,
                )
            )
        return specs

    offset = kv_token_id_vs_position_offset
    return (mha_group(config, num_slots, sources(0), sources(1), kv_token_id_vs_position_offset=offset),)
