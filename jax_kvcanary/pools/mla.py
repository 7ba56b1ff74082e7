"""A pool of multi-head latent attention: one latent and one rotary part a token, no V."""

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
    is_stacked,
    layer_arrays,
    layer_sources,
    layers_layout,
    leading_shape,
    pool_slots,
    store_tokens,
    token_values,
)

_TOKEN_RANK = 2  # 1, rank + rope


@partial(jax.tree_util.register_dataclass, data_fields=("kv_buffer",), meta_fields=("kv_lora_rank",))
@dataclass(frozen=True)
class MLATokenToKVPool:
    """Latent KV: K and V of all heads are computed from one row a token, so that the pool has no V half.

    Fields:
        kv_buffer: one array a layer, (slots, 1, rank + rope) or (pages, page_size, 1, rank + rope); or one array for all, with a
            leading axis of layers. Slot 0, in pages page 0, is for padding.
        kv_lora_rank: elements of the latent; those behind it are the rotary part of K (static).
    """

    kv_buffer: LayerArrays
    kv_lora_rank: int

    @classmethod
    def allocate(
        cls,
        *,
        num_slots: int,
        num_layers: int,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        dtype: Any = jnp.bfloat16,
        page_size: int = 1,
        stacked: bool = False,
    ) -> MLATokenToKVPool:
        """Zeroed arrays.

        Args:
            num_slots: slots, the padding slot included; a multiple of ``page_size``.
            num_layers: layers, at least 1.
            kv_lora_rank: elements of the latent.
            qk_rope_head_dim: elements of the rotary part.
            dtype: of the elements.
            page_size: slots in one page; 1 is a pool without pages.
            stacked: one array for all layers.
        """
        shape = (*leading_shape(num_slots, page_size), 1, kv_lora_rank + qk_rope_head_dim)
        return cls(allocate_layers(num_layers, shape, dtype, stacked=stacked), kv_lora_rank)

    @property
    def num_slots(self) -> int:
        """Slots of the pool, the padding slot included."""
        return layers_layout(self, "kv_buffer", _TOKEN_RANK).num_slots

    @property
    def page_size(self) -> int:
        """Slots in one page; 1 for a pool without pages."""
        return layers_layout(self, "kv_buffer", _TOKEN_RANK).page_size

    def write(self, layer: int, slots: ArrayLike, latent: ArrayLike, rope: ArrayLike) -> MLATokenToKVPool:
        """The pool with tokens' latents of one layer stored.

        Args:
            layer: which layer, negative from the end (static).
            slots: int32 or int64 [tokens]; negative ones and those past the pool are dropped.
            latent: (tokens, rank).
            rope: (tokens, rope).

        Raises:
            TypeError, ValueError: a wrong dtype, shape or layer.
        """
        slots = pool_slots(slots)
        width = layers_layout(self, "kv_buffer", _TOKEN_RANK).token_shape[-1]
        parts = [
            token_values(latent, "latent", slots, (self.kv_lora_rank,)),
            token_values(rope, "rope", slots, (width - self.kv_lora_rank,)),
        ]
        stored = store_tokens(self.kv_buffer, layer, slots, jnp.concatenate(parts, axis=1), _TOKEN_RANK)
        return MLATokenToKVPool(stored, self.kv_lora_rank)


def attach_mla(pool: Any, config: CanaryConfig, *, kv_token_id_vs_position_offset: int) -> tuple[CanaryBufferGroup, ...]:
    """Attacher for pools with a ``kv_buffer`` of latent rows: one FULL group with K alone, whatever ``enable_v_half`` says.

    The last axis is a token's row, the first one counts pages, and all between count the slots of a page: an axis of length 1, a page
    size, or a page size in packs.
    """
    buffer = layer_arrays(pool, "kv_buffer")
    shape = buffer.shape[1:] if is_stacked(buffer) else buffer[0].shape
    if not 2 <= len(shape) <= 4:
        raise ValueError(
            f"`pool.kv_buffer` has layers of shape {list(shape)}, but they must have 2 axes (slots, rank + rope), 3 with one axis for "
            "the slots of a page, or 4 with two."
        )
    geometry = {"token_rank": 1, "page_rank": len(shape) - 2}
    num_slots = layers_layout(pool, "kv_buffer", **geometry).num_slots
    sources = layer_sources(pool, "kv_buffer", config, **geometry)
    return (full_group(num_slots, sources, None, kv_token_id_vs_position_offset=kv_token_id_vs_position_offset),)
