"""A pool with one K and one V array a layer."""

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
from jax_kvcanary.sources import SourceSpec

_TOKEN_RANK = 2  # kv_heads, head_dim


@partial(jax.tree_util.register_dataclass, data_fields=("k_buffer", "v_buffer"), meta_fields=())
@dataclass(frozen=True)
class MHATokenToKVPool:
    """KV of multi-head or grouped-query attention, K and V apart.

    Fields:
        k_buffer, v_buffer: one array a layer, (slots, kv_heads, head_dim) or (pages, page_size, kv_heads, head_dim). Slot 0, in pages
            page 0, is for padding.
    """

    k_buffer: tuple[ArrayLike, ...]
    v_buffer: tuple[ArrayLike, ...]

    @classmethod
    def allocate(
        cls, *, num_slots: int, num_layers: int, num_kv_heads: int, head_dim: int, dtype: Any = jnp.bfloat16, page_size: int = 1
    ) -> MHATokenToKVPool:
        """Zeroed arrays. ``num_slots`` counts the padding slot and must be a multiple of ``page_size``."""
        shape = pool_shape(num_slots, page_size, num_kv_heads, head_dim)
        return cls(*(tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)) for _ in "kv"))

    @property
    def num_slots(self) -> int:
        """Slots of the pool, the padding slot included."""
        return slots_of(self.k_buffer[0], _TOKEN_RANK)[0]

    @property
    def page_size(self) -> int:
        """Slots in one page; 1 for a pool without pages."""
        return slots_of(self.k_buffer[0], _TOKEN_RANK)[1]

    def write(self, layer: int, slots: ArrayLike, k: ArrayLike, v: ArrayLike) -> MHATokenToKVPool:
        """The pool with tokens' K and V of one layer stored.

        Args:
            layer: which layer (static).
            slots: int [tokens]; negative ones and those past the pool are dropped.
            k: (tokens, kv_heads, head_dim).
            v: (tokens, kv_heads, head_dim).
        """
        stored = {}
        for name, value in (("k_buffer", k), ("v_buffer", v)):
            buffers = list(getattr(self, name))
            buffers[layer] = store_tokens(buffers[layer], slots, value)
            stored[name] = tuple(buffers)
        return MHATokenToKVPool(**stored)


def pool_shape(num_slots: int, page_size: int, heads: int, head_dim: int) -> tuple[int, ...]:
    """Shape of one layer's array; ValueError where pages do not fit."""
    if page_size < 1 or num_slots < 1 or num_slots % page_size:
        raise ValueError(f"`num_slots` is {num_slots}, but it must be a positive multiple of `page_size` = {page_size}.")
    leading = (num_slots,) if page_size == 1 else (num_slots // page_size, page_size)
    return (*leading, heads, head_dim)


def store_tokens(buffer: ArrayLike, slots: ArrayLike, values: ArrayLike) -> jax.Array:
    """Scatter tokens into a layer's array in place under donation; slots outside it are dropped, negative ones too."""
    num_slots, page_size = slots_of(buffer, _TOKEN_RANK)
    inside = jnp.where(slots < 0, num_slots, slots)  # a negative index would wrap
    index = (inside,) if page_size == 1 and buffer.ndim == _TOKEN_RANK + 1 else (inside // page_size, inside % page_size)
    return buffer.at[index].set(values.astype(buffer.dtype), mode="drop")


def attach_mha(pool: Any, config: CanaryConfig, *, kv_token_id_vs_position_offset: int) -> tuple[CanaryBufferGroup, ...]:
    """Attacher for pools with ``k_buffer`` and ``v_buffer``: one FULL group."""
    layers = hashed_layers(config, len(pool.k_buffer))
    num_slots, page_size = slots_of(pool.k_buffer[0], _TOKEN_RANK)

    def sources(name: str) -> list[SourceSpec]:
        specs = []
        for layer in layers:
            size = token_bytes(getattr(pool, name)[layer], _TOKEN_RANK)
            specs.append(SourceSpec(path=(name, layer), page_size=page_size, num_bytes_per_token=size, read_bytes=size))
        return specs

    offset = kv_token_id_vs_position_offset
    return (mha_group(config, num_slots, sources("k_buffer"), sources("v_buffer"), kv_token_id_vs_position_offset=offset),)
