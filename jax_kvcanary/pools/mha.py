"""A pool with K and V apart, one array of each a layer or for all layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_kvcanary._checks import ArrayLike
from jax_kvcanary.buffers import CanaryBufferGroup
from jax_kvcanary.config import CanaryConfig
from jax_kvcanary.pools.layers import (
    LayerArrays,
    allocate_layers,
    full_group,
    layer_sources,
    layers_layout,
    leading_shape,
    pool_slots,
    store_tokens,
    token_values,
)

_TOKEN_RANK = 2  # kv_heads, head_dim


@partial(jax.tree_util.register_dataclass, data_fields=("k_buffer", "v_buffer"), meta_fields=())
@dataclass(frozen=True)
class MHATokenToKVPool:
    """KV of multi-head or grouped-query attention, K and V apart.

    Fields:
        k_buffer, v_buffer: one array a layer, (slots, kv_heads, head_dim) or (pages, page_size, kv_heads, head_dim); or one array for
            all, with a leading axis of layers. Slot 0, in pages page 0, is for padding.
    """

    k_buffer: LayerArrays
    v_buffer: LayerArrays

    @classmethod
    def allocate(
        cls,
        *,
        num_slots: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: Any = jnp.bfloat16,
        page_size: int = 1,
        stacked: bool = False,
    ) -> MHATokenToKVPool:
        """Zeroed arrays.

        Args:
            num_slots: slots, the padding slot included; a multiple of ``page_size``.
            num_layers: layers, at least 1.
            num_kv_heads: heads of K, and of V.
            head_dim: elements of a head.
            dtype: of the elements.
            page_size: slots in one page; 1 is a pool without pages.
            stacked: one array for all layers.
        """
        shape = (*leading_shape(num_slots, page_size), num_kv_heads, head_dim)
        return cls(*(allocate_layers(num_layers, shape, dtype, stacked=stacked) for _ in "kv"))

    @property
    def num_slots(self) -> int:
        """Slots of the pool, the padding slot included."""
        return layers_layout(self, "k_buffer", _TOKEN_RANK).num_slots

    @property
    def page_size(self) -> int:
        """Slots in one page; 1 for a pool without pages."""
        return layers_layout(self, "k_buffer", _TOKEN_RANK).page_size

    def write(self, layer: int, slots: ArrayLike, k: ArrayLike, v: ArrayLike) -> MHATokenToKVPool:
        """The pool with tokens' K and V of one layer stored.

        Args:
            layer: which layer, negative from the end (static).
            slots: int32 or int64 [tokens]; negative ones and those past the pool are dropped.
            k: (tokens, kv_heads, head_dim).
            v: (tokens, kv_heads, head_dim).

        Raises:
            TypeError, ValueError: a wrong dtype, shape or layer.
        """
        slots = pool_slots(slots)
        stored = {}
        for half, values in (("k", k), ("v", v)):
            name = f"{half}_buffer"
            values = token_values(values, half, slots, layers_layout(self, name, _TOKEN_RANK).token_shape)
            stored[name] = store_tokens(getattr(self, name), layer, slots, values, _TOKEN_RANK)
        return MHATokenToKVPool(**stored)


def attach_mha(pool: Any, config: CanaryConfig, *, kv_token_id_vs_position_offset: int) -> tuple[CanaryBufferGroup, ...]:
    """Attacher for pools with ``k_buffer`` and ``v_buffer``: one FULL group."""
    sources: dict[str, Any] = {"v": None}
    slots = {}
    for half in ("k", "v") if config.enable_v_half else ("k",):
        name = f"{half}_buffer"
        slots[half] = layers_layout(pool, name, _TOKEN_RANK).num_slots
        sources[half] = layer_sources(pool, name, config, token_rank=_TOKEN_RANK)
    if len(set(slots.values())) > 1:
        raise ValueError(f"`pool.v_buffer` has {slots['v']} slots, but it must have as many as `pool.k_buffer`, {slots['k']}.")
    return (full_group(slots["k"], sources["k"], sources["v"], kv_token_id_vs_position_offset=kv_token_id_vs_position_offset),)
