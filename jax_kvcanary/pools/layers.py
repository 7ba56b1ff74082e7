"""Shared pieces of attachers: which layers are hashed, and the groups made of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jax_kvcanary._checks import ArrayLike
from jax_kvcanary.buffers import CanaryBufferGroup, fresh_records
from jax_kvcanary.config import CanaryConfig
from jax_kvcanary.constants import PoolKind, RealKvHashMode
from jax_kvcanary.sources import SourceSpec, item_bytes


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


def slots_of(array: ArrayLike, token_rank: int) -> tuple[int, int]:
    """Number of slots and page size of a KV array whose last ``token_rank`` axes belong to one token.

    One axis before them counts slots, two are pages and the slots of a page.

    Raises:
        ValueError: another rank.
    """
    leading = tuple(array.shape[: len(array.shape) - token_rank])
    if not 1 <= len(leading) <= 2:
        raise ValueError(
            f"`pool` has a KV array of shape {list(array.shape)}, but it must have {token_rank + 1} axes, slots first, or "
            f"{token_rank + 2}, pages and page size first."
        )
    return math.prod(leading), leading[1] if len(leading) == 2 else 1


def token_bytes(array: ArrayLike, token_rank: int) -> int:
    """Bytes of one token in a KV array whose last ``token_rank`` axes belong to it."""
    return math.prod(array.shape[-token_rank:]) * item_bytes(array.dtype)


def mha_group(
    config: CanaryConfig,
    num_slots: int,
    sources_k: Sequence[SourceSpec],
    sources_v: Sequence[SourceSpec],
    *,
    kv_token_id_vs_position_offset: int,
) -> CanaryBufferGroup:
    """A FULL group with fresh buffers for K, and for V where the configuration gives it a half."""
    with_v = config.enable_v_half
    return CanaryBufferGroup(
        kind=PoolKind.FULL,
        k_head=fresh_records(num_slots),
        k_tail=fresh_records(num_slots),
        v_head=fresh_records(num_slots) if with_v else None,
        v_tail=fresh_records(num_slots) if with_v else None,
        real_kv_sources_k=tuple(sources_k),
        real_kv_sources_v=tuple(sources_v) if with_v else (),
        kv_token_id_vs_position_offset=kv_token_id_vs_position_offset,
    )
