"""A pool of packed pages for DeepSeek-V4's sliding-window cache: 584 bytes a token, quantised, no V."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvcanary._checks import ArrayLike, as_array, check_dtype, check_int, check_shape
from jax_kvcanary.buffers import CanaryBufferGroup
from jax_kvcanary.config import CanaryConfig
from jax_kvcanary.constants import INT32_MAX, PoolKind
from jax_kvcanary.plan import translate_slots
from jax_kvcanary.pools.layers import (
    allocate_layers,
    full_group,
    hashed_layers,
    layer_arrays,
    layer_index,
    leading_shape,
    replace_layer,
    token_values,
)
from jax_kvcanary.pools.layouts import make_packed_source
from jax_kvcanary.pools.quantize import scale_bytes, scaled
from jax_kvcanary.pools.swa import TABLE, check_table, map_slots

#: Elements of a token: latent values in eight bits, rotary ones in bfloat16; 64 latent values share a scale.
LATENT_DIM, ROPE_DIM, SCALE_BLOCK = 448, 64, 64

#: Bytes of a token: its values, seven scales and one byte of padding.
TOKEN_BYTES = LATENT_DIM + 2 * ROPE_DIM + LATENT_DIM // SCALE_BLOCK + 1

#: Pages are padded to a multiple of this many bytes.
PAGE_ALIGNMENT = 576


@partial(jax.tree_util.register_dataclass, data_fields=("kv_buffer", TABLE), meta_fields=("page_size",))
@dataclass(frozen=True)
class DeepSeekV4TokenToKVPool:
    """The sliding-window cache as pages of packed bytes. It knows tokens by their full-pool slot and has no V half.

    Fields:
        kv_buffer: one uint8 array a layer, (pages, page_bytes): ``page_size`` runs of 584 bytes, then padding to a multiple of 576. Slot
            0, in pages page 0, is for padding.
        full_to_swa_index_mapping: int32 [full-pool slots]; the slot of each in this pool, 0 where it has none.
        page_size: slots in one page (static).
    """

    kv_buffer: tuple[ArrayLike, ...]
    full_to_swa_index_mapping: ArrayLike
    page_size: int

    @classmethod
    def allocate(cls, *, num_slots: int, full_num_slots: int, num_layers: int, page_size: int = 1) -> DeepSeekV4TokenToKVPool:
        """Zeroed pages and a table in which no full-pool slot has a slot here.

        Args:
            num_slots: slots of this pool, the padding slot included; a multiple of ``page_size``.
            full_num_slots: slots of the full pool, the padding slot included.
            num_layers: layers, at least 1.
            page_size: slots in one page.
        """
        pages = leading_shape(num_slots, page_size)[0]
        page_bytes = -(-page_size * TOKEN_BYTES // PAGE_ALIGNMENT) * PAGE_ALIGNMENT
        check_int(full_num_slots, "full_num_slots", 1, INT32_MAX)
        return cls(allocate_layers(num_layers, (pages, page_bytes), jnp.uint8), jnp.zeros((full_num_slots,), jnp.int32), page_size)

    @property
    def num_slots(self) -> int:
        """Slots of this pool, the padding slot included."""
        return int(layer_arrays(self, "kv_buffer")[0].shape[0]) * self.page_size

    def write(self, layer: int, slots: ArrayLike, packed_tokens: ArrayLike) -> DeepSeekV4TokenToKVPool:
        """The pool with tokens of one layer stored.

        Args:
            layer: which layer, negative from the end (static).
            slots: int32 or int64 [tokens] full-pool slots; negative ones and those past the table are dropped. A token without a slot
                here goes to padding slot 0.
            packed_tokens: uint8 (tokens, 584), such as :func:`pack_deepseek_v4_tokens` makes them.

        Raises:
            TypeError, ValueError: a wrong dtype, shape or layer.
        """
        own = translate_slots(slots, self.full_to_swa_index_mapping)
        packed_tokens = as_array(packed_tokens)
        check_dtype(packed_tokens, "packed_tokens", np.uint8)
        packed_tokens = token_values(packed_tokens, "packed_tokens", own, (TOKEN_BYTES,))
        layer = layer_index(self.kv_buffer, layer)
        inside = jnp.where(own < 0, self.num_slots, own)  # past the last page: dropped
        start = jnp.stack([inside // self.page_size, inside % self.page_size * TOKEN_BYTES], axis=1)
        runs = jax.lax.ScatterDimensionNumbers(update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1))
        mode = jax.lax.GatherScatterMode.FILL_OR_DROP
        array = jax.lax.scatter(jnp.asarray(self.kv_buffer[layer]), start, packed_tokens, runs, mode=mode)
        return dataclasses.replace(self, kv_buffer=replace_layer(self.kv_buffer, layer, array))

    def map_slots(self, full_slots: ArrayLike, swa_slots: ArrayLike) -> DeepSeekV4TokenToKVPool:
        """The pool with slots of its own given to full-pool slots; see :func:`~jax_kvcanary.pools.swa.map_slots`."""
        return dataclasses.replace(self, full_to_swa_index_mapping=map_slots(self.full_to_swa_index_mapping, full_slots, swa_slots))

    def unmap_slots(self, full_slots: ArrayLike) -> DeepSeekV4TokenToKVPool:
        """The pool with full-pool slots that have no slot here any more: tokens that left the window, or were freed."""
        return self.map_slots(full_slots, jnp.zeros((len(full_slots),), jnp.int32))


def pack_deepseek_v4_tokens(latent: ArrayLike, rope: ArrayLike) -> jax.Array:
    """Quantise and pack tokens: uint8 (tokens, 584).

    A token is 448 float8_e4m3fn values, 64 bfloat16 values, seven e8m0 scales, one for 64 latent values each, and one byte 0. A scale is
    the smallest power of two that brings its values to 448 or below.

    Args:
        latent: (tokens, 448), finite.
        rope: (tokens, 64).

    Raises:
        ValueError: a wrong shape.
    """
    latent, rope = as_array(latent), as_array(rope)
    check_shape(latent, "latent", (None, LATENT_DIM), "the latent part of each token")
    tokens = latent.shape[0]
    check_shape(rope, "rope", (tokens, ROPE_DIM), "the rotary part of each token of `latent`")
    latent, rope = jnp.asarray(latent, jnp.float32), jnp.asarray(rope, jnp.bfloat16)
    blocks = latent.reshape(tokens, -1, SCALE_BLOCK)
    scales = scale_bytes(blocks, largest=448.0)
    values = scaled(blocks, scales).astype(jnp.float8_e4m3fn)
    parts = [jax.lax.bitcast_convert_type(part, jnp.uint8).reshape(tokens, -1) for part in (values, rope)]
    return jnp.concatenate([*parts, scales, jnp.zeros((tokens, 1), jnp.uint8)], axis=1)


def attach_deepseek_v4(pool: Any, config: CanaryConfig, *, kv_token_id_vs_position_offset: int) -> tuple[CanaryBufferGroup, ...]:
    """Attacher for packed pages with a table: one SWA group with K alone, whatever ``enable_v_half`` says."""
    buffer = layer_arrays(pool, "kv_buffer")
    check_table(pool, 1)
    geometry = {"page_size": pool.page_size, "num_bytes_per_token": TOKEN_BYTES}
    sources = [make_packed_source(pool, ("kv_buffer", layer), **geometry) for layer in hashed_layers(config, len(buffer))]
    group = full_group(pool.num_slots, sources, None, kv_token_id_vs_position_offset=kv_token_id_vs_position_offset)
    return (dataclasses.replace(group, kind=PoolKind.SWA, swa_index_lut=(TABLE,)),)
