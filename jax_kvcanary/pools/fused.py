"""A pool with the heads of K and V interleaved in one array: K0, V0, K1, V1, and so on."""

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
from jax_kvcanary.pools.layouts import RowLayout


@partial(jax.tree_util.register_dataclass, data_fields=("kv_buffer",), meta_fields=())
@dataclass(frozen=True)
class FusedMHATokenToKVPool:
    """KV with interleaved heads.

    Fields:
        kv_buffer: one array a layer, (slots, 2 * kv_heads, head_dim), (pages, page_size, 2 * kv_heads, head_dim) or, with heads in packs,
            (pages, page_size, 2 * kv_heads / packing, packing, head_dim); or one array for all, with a leading axis of layers. Even
            heads are K, odd ones V. Slot 0, in pages page 0, is for padding.
    """

    kv_buffer: LayerArrays

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
        packing: int | None = None,
    ) -> FusedMHATokenToKVPool:
        """Zeroed arrays; arguments as for :meth:`MHATokenToKVPool.allocate`.

        Args:
            num_slots: slots, the padding slot included; a multiple of ``page_size``.
            num_layers: layers, at least 1.
            num_kv_heads: heads of K, and of V.
            head_dim: elements of a head.
            dtype: of the elements.
            page_size: slots in one page; 1 is a pool without pages, unless heads are packed.
            stacked: one array for all layers.
            packing: interleaved heads in one pack, such as 32 over the bits of an element; None packs none.
        """
        leading = leading_shape(num_slots, page_size)
        heads = 2 * num_kv_heads
        if packing is None:
            shape = (*leading, heads, head_dim)
        elif packing < 1 or heads % packing:
            raise ValueError(f"`packing` is {packing}, but it must divide 2 * `num_kv_heads` = {heads}.")
        else:
            shape = (num_slots // page_size, page_size, heads // packing, packing, head_dim)
        return cls(allocate_layers(num_layers, shape, dtype, stacked=stacked))

    @property
    def num_slots(self) -> int:
        """Slots of the pool, the padding slot included."""
        return _layout(self).num_slots

    @property
    def page_size(self) -> int:
        """Slots in one page; 1 for a pool without pages."""
        return _layout(self).page_size

    def write(self, layer: int, slots: ArrayLike, k: ArrayLike, v: ArrayLike) -> FusedMHATokenToKVPool:
        """The pool with tokens' K and V of one layer stored; arguments as for :meth:`MHATokenToKVPool.write`."""
        layout = _layout(self)
        slots = pool_slots(slots)
        *heads, head_dim = layout.token_shape
        shape = (heads[0] * (heads[1] if len(heads) == 2 else 1) // 2, head_dim)
        halves = [token_values(values, half, slots, shape) for half, values in (("k", k), ("v", v))]
        return FusedMHATokenToKVPool(store_tokens(self.kv_buffer, layer, slots, jnp.stack(halves, axis=2), len(layout.token_shape)))


def _layout(pool: Any) -> RowLayout:
    """Layout of interleaved heads, in packs where the arrays have five axes."""
    buffer = layer_arrays(pool, "kv_buffer")
    shape = buffer.shape[1:] if is_stacked(buffer) else buffer[0].shape
    if not 3 <= len(shape) <= 5:
        raise ValueError(
            f"`pool.kv_buffer` has layers of shape {list(shape)}, but they must have 3 axes (slots, 2 * kv_heads, head_dim), 4 with "
            "pages and page size first, or 5 with the heads in packs too."
        )
    return layers_layout(pool, "kv_buffer", 3 if len(shape) == 5 else 2)


def attach_fused(pool: Any, config: CanaryConfig, *, kv_token_id_vs_position_offset: int) -> tuple[CanaryBufferGroup, ...]:
    """Attacher for pools with a ``kv_buffer`` of interleaved heads: one FULL group.

    A slot's bytes are hashed as one run, since K and V of a token alternate: the K half reads from the first K head up to
    the last one, the V half from the first V head to the end. PARTIAL therefore sees the first bytes of K and of V, and ALL
    every byte, those between the heads of one half in both.
    """
    layout = _layout(pool)
    head_bytes = layout.token_shape[-1] * layout.item_bytes

    def sources(first_head: int) -> list[Any]:
        return layer_sources(
            pool,
            "kv_buffer",
            config,
            token_rank=len(layout.token_shape),
            byte_offset=first_head * head_bytes,
            num_bytes_per_token=layout.token_bytes - head_bytes,
        )

    k, v = sources(0), sources(1) if config.enable_v_half else None
    return (full_group(layout.num_slots, k, v, kv_token_id_vs_position_offset=kv_token_id_vs_position_offset),)
