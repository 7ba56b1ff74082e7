"""A pool whose K and V are stored in four bits an element, with scales beside."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jax_kvcanary._checks import ArrayLike
from jax_kvcanary.pools.layers import (
    LayerArrays,
    allocate_layers,
    layer_index,
    layers_layout,
    leading_shape,
    pool_slots,
    store_tokens,
    token_values,
)
from jax_kvcanary.pools.quantize import decode_e2m1, encode_e2m1, scale_bytes, scaled, unscaled

#: Elements that share a scale.
FP4_BLOCK = 16

_TOKEN_RANK = 2  # kv_heads, head_dim / 2
_SCALE_RANK = 1  # kv_heads * head_dim / 16


@partial(jax.tree_util.register_dataclass, data_fields=("k_buffer", "v_buffer", "k_scale_buffer", "v_scale_buffer"), meta_fields=())
@dataclass(frozen=True)
class MHATokenToKVPoolFP4:
    """K and V apart, two e2m1 values a byte, and one power of two as the scale of every 16.

    The packed bytes are what a canary fingerprints; the scales are not, so that a scale that changes alone goes unnoticed.

    Fields:
        k_buffer, v_buffer: one uint8 array a layer, (slots, kv_heads, head_dim / 2) or (pages, page_size, kv_heads, head_dim / 2); the
            first of two values is in the low four bits. Slot 0, in pages page 0, is for padding.
        k_scale_buffer, v_scale_buffer: one uint8 array a layer, (slots, kv_heads * head_dim / 16), with pages as above; e8m0: the scale
            of byte b is 2^(b - 127).
    """

    k_buffer: LayerArrays
    v_buffer: LayerArrays
    k_scale_buffer: LayerArrays
    v_scale_buffer: LayerArrays

    @classmethod
    def allocate(cls, *, num_slots: int, num_layers: int, num_kv_heads: int, head_dim: int, page_size: int = 1) -> MHATokenToKVPoolFP4:
        """Zeroed arrays.

        Args:
            num_slots: slots, the padding slot included; a multiple of ``page_size``.
            num_layers: layers, at least 1.
            num_kv_heads: heads of K, and of V.
            head_dim: elements of a head, an even number; a token's elements must be a multiple of 16.
            page_size: slots in one page; 1 is a pool without pages.
        """
        if head_dim % 2 or num_kv_heads * head_dim % FP4_BLOCK:
            raise ValueError(
                f"`head_dim` is {head_dim} with `num_kv_heads` = {num_kv_heads}, but it must be even, and a token's elements a multiple "
                f"of {FP4_BLOCK}."
            )
        leading = leading_shape(num_slots, page_size)
        packed, scales = (*leading, num_kv_heads, head_dim // 2), (*leading, num_kv_heads * head_dim // FP4_BLOCK)
        return cls(*(allocate_layers(num_layers, shape, jnp.uint8) for shape in (packed, packed, scales, scales)))

    @property
    def num_slots(self) -> int:
        """Slots of the pool, the padding slot included."""
        return layers_layout(self, "k_buffer", _TOKEN_RANK).num_slots

    @property
    def page_size(self) -> int:
        """Slots in one page; 1 for a pool without pages."""
        return layers_layout(self, "k_buffer", _TOKEN_RANK).page_size

    def write(self, layer: int, slots: ArrayLike, k: ArrayLike, v: ArrayLike) -> MHATokenToKVPoolFP4:
        """The pool with tokens' K and V of one layer quantised and stored.

        The scale of a block is the smallest power of two that brings its largest element to 6 or below, the largest e2m1 value; each
        element goes to the nearest value, so that it is off by at most the scale.

        Args:
            layer: which layer, negative from the end (static).
            slots: int32 or int64 [tokens]; negative ones and those past the pool are dropped.
            k: (tokens, kv_heads, head_dim), finite.
            v: (tokens, kv_heads, head_dim), finite.

        Raises:
            TypeError, ValueError: a wrong dtype, shape or layer.
        """
        slots = pool_slots(slots)
        heads, half_dim = layers_layout(self, "k_buffer", _TOKEN_RANK).token_shape
        stored = {}
        for half, values in (("k", k), ("v", v)):
            values = token_values(values, half, slots, (heads, 2 * half_dim)).astype(jnp.float32)
            blocks = values.reshape(len(slots), -1, FP4_BLOCK)
            scales = scale_bytes(blocks, largest=6.0)
            codes = encode_e2m1(scaled(blocks, scales)).reshape(len(slots), -1, 2)
            packed = codes[..., 0] | codes[..., 1] << 4
            stored[f"{half}_buffer"] = store_tokens(getattr(self, f"{half}_buffer"), layer, slots, packed, _TOKEN_RANK)
            stored[f"{half}_scale_buffer"] = store_tokens(getattr(self, f"{half}_scale_buffer"), layer, slots, scales, _SCALE_RANK)
        return MHATokenToKVPoolFP4(**stored)

    def read(self, layer: int) -> tuple[jax.Array, jax.Array]:
        """K and V of one layer as they are stored: float32 (slots, kv_heads, head_dim) each."""
        halves = []
        for half in "kv":
            packed, scales = (getattr(self, f"{half}{name}") for name in ("_buffer", "_scale_buffer"))
            layer = layer_index(packed, layer)
            *_, heads, half_dim = packed[layer].shape
            codes = jnp.stack([packed[layer] & 15, packed[layer] >> 4], axis=-1)
            blocks = decode_e2m1(codes).reshape(self.num_slots, -1, FP4_BLOCK)
            halves.append(unscaled(blocks, scales[layer].reshape(self.num_slots, -1)).reshape(self.num_slots, heads, 2 * half_dim))
        return halves[0], halves[1]
