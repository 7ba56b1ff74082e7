"""What reference pools and attachers have in common: arrays of all layers, stores into them, and groups over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_kvcanary._checks import ArrayLike, as_array, check_array, check_int, check_shape, index_array
from jax_kvcanary.buffers import CanaryBufferGroup, fresh_records
from jax_kvcanary.config import CanaryConfig
from jax_kvcanary.constants import INT32_MAX, PoolKind, RealKvHashMode
from jax_kvcanary.pools.layouts import RowLayout, make_row_source, row_layout
from jax_kvcanary.sources import SourceSpec, resolve_path

#: One array a layer, or one array whose leading axis counts layers.
LayerArrays = Any


def is_stacked(buffer: LayerArrays) -> bool:
    """Whether one array holds all layers."""
    return hasattr(buffer, "shape")


def layer_arrays(pool: Any, name: str) -> LayerArrays:
    """A field of a pool that holds the arrays of its layers.

    Raises:
        ValueError: the pool has no such field, no layers in it, or layers that differ in shape or dtype.
    """
    buffer = resolve_path(pool, (name,))
    if buffer is None or len(buffer) == 0:
        raise ValueError(f"`pool.{name}` is {'None' if buffer is None else 'empty'}, but it must hold the KV arrays of at least one layer.")
    if not is_stacked(buffer):
        for layer, array in enumerate(buffer):
            check_array(array, f"pool.{name}[{layer}]")
            if (array.shape, array.dtype) != (buffer[0].shape, buffer[0].dtype):
                raise ValueError(
                    f"`pool.{name}` has {buffer[0].dtype}{list(buffer[0].shape)} in layer 0 and {array.dtype}{list(array.shape)} in layer "
                    f"{layer}, but all its layers must be alike."
                )
    return buffer


def layers_layout(pool: Any, name: str, token_rank: int, *, page_rank: int | None = None) -> RowLayout:
    """Layout of a pool's KV arrays; errors as for :func:`layer_arrays` and :func:`row_layout`."""
    buffer = layer_arrays(pool, name)
    if is_stacked(buffer):
        return row_layout(buffer, (name,), token_rank, stacked=True, page_rank=page_rank)
    return row_layout(buffer[0], (name, 0), token_rank, page_rank=page_rank)


def hashed_layers(config: CanaryConfig, num_layers: int) -> tuple[int, ...]:
    """The layers whose KV goes into TAIL records, counted from 0; none when the mode hashes nothing.

    Raises:
        ValueError: the pool has no such layer.
    """
    if config.real_kv_hash_mode is RealKvHashMode.NONE:
        return ()
    for layer in config.real_kv_layers:
        if not -num_layers <= layer < num_layers:
            raise ValueError(f"`config.real_kv_layers` names layer {layer}, but the pool has {num_layers} layers.")
    return tuple(layer % num_layers for layer in config.real_kv_layers)


def layer_sources(pool: Any, name: str, config: CanaryConfig, **geometry: Any) -> list[SourceSpec]:
    """Row sources of the layers that are hashed; ``geometry`` is that of :func:`make_row_source`."""
    buffer = layer_arrays(pool, name)
    layers = hashed_layers(config, len(buffer))
    if is_stacked(buffer):
        return [make_row_source(pool, (name,), layer=layer, **geometry) for layer in layers]
    return [make_row_source(pool, (name, layer), **geometry) for layer in layers]


def full_group(
    num_slots: int,
    sources_k: Sequence[SourceSpec],
    sources_v: Sequence[SourceSpec] | None,
    *,
    kv_token_id_vs_position_offset: int,
) -> CanaryBufferGroup:
    """A FULL group with fresh buffers for K, and for V unless there are no sources of it (None)."""
    with_v = sources_v is not None
    return CanaryBufferGroup(
        kind=PoolKind.FULL,
        k_head=fresh_records(num_slots),
        k_tail=fresh_records(num_slots),
        v_head=fresh_records(num_slots) if with_v else None,
        v_tail=fresh_records(num_slots) if with_v else None,
        real_kv_sources_k=tuple(sources_k),
        real_kv_sources_v=tuple(sources_v or ()),
        kv_token_id_vs_position_offset=kv_token_id_vs_position_offset,
    )


# What the reference pools do with their arrays.


def leading_shape(num_slots: int, page_size: int) -> tuple[int, ...]:
    """The axes before those of a token, slots or pages and page size; ValueError where pages do not fit."""
    if page_size < 1 or num_slots < 1 or num_slots % page_size:
        raise ValueError(f"`num_slots` is {num_slots}, but it must be a positive multiple of `page_size` = {page_size}.")
    return (num_slots,) if page_size == 1 else (num_slots // page_size, page_size)


def allocate_layers(num_layers: int, shape: tuple[int, ...], dtype: Any, *, stacked: bool = False) -> LayerArrays:
    """Zeroed arrays of one shape for each layer, or one with a leading axis of layers."""
    check_int(num_layers, "num_layers", 1, INT32_MAX)
    return jnp.zeros((num_layers, *shape), dtype) if stacked else tuple(jnp.zeros(shape, dtype) for _ in range(num_layers))


def token_values(values: ArrayLike, name: str, slots: ArrayLike, shape: tuple[int, ...]) -> jax.Array:
    """What is stored for each of ``slots``, checked to be [tokens, *shape], as a JAX array."""
    values = as_array(values)
    check_shape(values, name, (len(slots), *shape), f"one token for each of the {len(slots)} `slots`")
    return jnp.asarray(values)


def pool_slots(slots: ArrayLike) -> jax.Array:
    """Slots to be written, int32 [tokens], without change of value as far as a slot can be meant."""
    return index_array(slots, "slots", (None,), "one slot for each token")


def replace_layer(buffer: LayerArrays, layer: int, array: jax.Array) -> LayerArrays:
    """One array a layer, with that of one layer replaced."""
    return tuple(array if i == layer else kept for i, kept in enumerate(buffer))


def layer_index(buffer: LayerArrays, layer: int) -> int:
    """A static layer index counted from 0."""
    count = len(buffer)
    return check_int(layer, "layer", -count, count - 1, f", since the pool has {count} layers") % count


def store_tokens(buffer: LayerArrays, layer: int, slots: jax.Array, values: jax.Array, token_rank: int) -> LayerArrays:
    """Scatter tokens into a layer in place under donation; slots outside the pool are dropped, negative ones too.

    Args:
        buffer: the arrays of all layers.
        layer: which one, negative from the end (static).
        slots: int32 [tokens].
        values: [tokens, ...], the elements of each token in order.
        token_rank: axes of the arrays that belong to a token.
    """
    layer = layer_index(buffer, layer)
    stacked = is_stacked(buffer)
    layout = row_layout(buffer if stacked else buffer[0], (), token_rank, stacked=stacked)
    inside = jnp.where(slots < 0, layout.num_slots, slots)  # a negative index would wrap
    index: tuple[Any, ...] = (inside // layout.page_size, inside % layout.page_size) if layout.page_shape else (inside,)
    array = buffer if stacked else buffer[layer]
    values = values.astype(array.dtype).reshape(len(slots), *layout.token_shape)
    array = array.at[(layer, *index) if stacked else index].set(values, mode="drop")
    return array if stacked else replace_layer(buffer, layer, array)
