"""A pool for models that mix full and sliding-window attention: two sub-pools, and the table from one to the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvcanary._checks import ArrayLike, check_dtype, check_int, check_shape, index_array
from jax_kvcanary.buffers import CanaryBufferGroup
from jax_kvcanary.config import CanaryConfig
from jax_kvcanary.constants import PoolKind
from jax_kvcanary.plan import translate_slots
from jax_kvcanary.pools.attach import attacher_of
from jax_kvcanary.pools.mha import MHATokenToKVPool
from jax_kvcanary.sources import resolve_path

#: Field of a pool with the table from full-pool slots to SWA slots.
TABLE = "full_to_swa_index_mapping"


@partial(jax.tree_util.register_dataclass, data_fields=("full_kv_pool", "swa_kv_pool", TABLE), meta_fields=("layers_mapping",))
@dataclass(frozen=True)
class SWAKVPool:
    """Full-attention layers in one pool, sliding-window layers in a smaller one.

    A token has a slot of the full pool, and one of the SWA pool while it is in the window. Everything outside this class names tokens by
    their full-pool slot. Whoever frees an SWA slot clears its entry in the table too: a stale one is a finding where it is the
    predecessor of the window's first position.

    Fields:
        full_kv_pool: reference pool of the full-attention layers.
        swa_kv_pool: reference pool of the sliding-window layers, of the same class or another.
        full_to_swa_index_mapping: int32 [slots of the full pool]; the SWA slot of each, 0 where it has none.
        layers_mapping: for each layer of the model, whether it is in the SWA pool, and its index there or in the full pool (static).
    """

    full_kv_pool: Any
    swa_kv_pool: Any
    full_to_swa_index_mapping: ArrayLike
    layers_mapping: tuple[tuple[bool, int], ...]

    @classmethod
    def allocate(
        cls,
        *,
        num_slots: int,
        swa_num_slots: int,
        num_layers: int,
        swa_layers: Iterable[int],
        pool_class: Any = MHATokenToKVPool,
        **options: Any,
    ) -> SWAKVPool:
        """Zeroed sub-pools and a table in which no slot has an SWA slot.

        Args:
            num_slots: slots of the full pool, the padding slot included.
            swa_num_slots: slots of the SWA pool, the padding slot included.
            num_layers: layers of the model.
            swa_layers: those of them that are in the SWA pool; at least one is, and at least one is not.
            pool_class: reference pool class of both sub-pools.
            **options: what its ``allocate`` takes besides.

        Raises:
            ValueError: no such layer, or a sub-pool without layers.
        """
        chosen = {check_int(layer, "swa_layers", 0, num_layers - 1) for layer in swa_layers}
        if not 0 < len(chosen) < num_layers:
            raise ValueError(
                f"`swa_layers` names {len(chosen)} of the {num_layers} layers, but a pool with a sliding window needs layers of both kinds."
            )
        counts = {True: 0, False: 0}
        mapping = []
        for layer in range(num_layers):
            is_swa = layer in chosen
            mapping.append((is_swa, counts[is_swa]))
            counts[is_swa] += 1
        return cls(
            full_kv_pool=pool_class.allocate(num_slots=num_slots, num_layers=counts[False], **options),
            swa_kv_pool=pool_class.allocate(num_slots=swa_num_slots, num_layers=counts[True], **options),
            full_to_swa_index_mapping=jnp.zeros((num_slots,), jnp.int32),
            layers_mapping=tuple(mapping),
        )

    @property
    def num_slots(self) -> int:
        """Slots of the full pool, the padding slot included."""
        return int(self.full_kv_pool.num_slots)

    @property
    def page_size(self) -> int:
        """Slots in one page of the full pool."""
        return int(self.full_kv_pool.page_size)

    def write(self, layer: int, slots: ArrayLike, *kv: ArrayLike) -> SWAKVPool:
        """The pool with tokens' KV of one layer stored in the sub-pool that has the layer.

        Args:
            layer: which layer of the model, negative from the end (static).
            slots: int32 or int64 [tokens] full-pool slots; negative ones and those past the pool are dropped. In an SWA layer, a token
                without an SWA slot goes to padding slot 0.
            *kv: what the sub-pool's ``write`` takes behind its slots.

        Raises:
            TypeError, ValueError: a wrong dtype, shape or layer.
        """
        count = len(self.layers_mapping)
        check_int(layer, "layer", -count, count - 1, f", since the pool has {count} layers")
        is_swa, index = self.layers_mapping[layer]
        if is_swa:
            own = translate_slots(slots, self.full_to_swa_index_mapping)
            return dataclasses.replace(self, swa_kv_pool=self.swa_kv_pool.write(index, own, *kv))
        return dataclasses.replace(self, full_kv_pool=self.full_kv_pool.write(index, slots, *kv))

    def map_slots(self, full_slots: ArrayLike, swa_slots: ArrayLike) -> SWAKVPool:
        """The pool with SWA slots given to full-pool slots; see :func:`map_slots`."""
        return dataclasses.replace(self, full_to_swa_index_mapping=map_slots(self.full_to_swa_index_mapping, full_slots, swa_slots))

    def unmap_slots(self, full_slots: ArrayLike) -> SWAKVPool:
        """The pool with full-pool slots that have no SWA slot any more: tokens that left the window, or were freed."""
        return self.map_slots(full_slots, jnp.zeros((len(full_slots),), jnp.int32))


def map_slots(table: ArrayLike, full_slots: ArrayLike, swa_slots: ArrayLike) -> jax.Array:
    """A table from full-pool to SWA slots with some of its entries set.

    Args:
        table: int32 [full slots].
        full_slots: int32 or int64 [n]; negative ones, slot 0 and those past the table are dropped, so that the array can be padded.
        swa_slots: int32 or int64 [n]; 0 is none.

    Raises:
        TypeError, ValueError: a wrong dtype or shape.
    """
    full_slots = index_array(full_slots, "full_slots", (None,), "full-pool slots")
    swa_slots = index_array(swa_slots, "swa_slots", tuple(full_slots.shape), "one SWA slot for each of `full_slots`")
    table = jnp.asarray(table)
    return table.at[jnp.where(full_slots > 0, full_slots, len(table))].set(swa_slots.astype(table.dtype), mode="drop")


def check_table(pool: Any, num_full_slots: int) -> None:
    """Check a pool's table from full-pool slots to SWA slots.

    Raises:
        TypeError: not an int32 or int64 array. ValueError: no table, one of another rank, or one that lacks full-pool slots.
    """
    table = resolve_path(pool, (TABLE,))
    check_dtype(table, f"pool.{TABLE}", np.int32, np.int64)
    check_shape(table, f"pool.{TABLE}", (None,), "a table from full-pool slots to SWA slots")
    if len(table) < num_full_slots:
        raise ValueError(f"`pool.{TABLE}` has {len(table)} entries, but it must have one for each of the {num_full_slots} full-pool slots.")


def attach_swa(pool: Any, config: CanaryConfig, *, kv_token_id_vs_position_offset: int) -> tuple[CanaryBufferGroup, ...]:
    """Attacher for pools with ``full_kv_pool``, ``swa_kv_pool`` and the table: a FULL and an SWA group.

    Each sub-pool is attached by the attacher of its own class, so that ``config.real_kv_layers`` counts the layers of each by itself:
    (0, -1) are the first and the last full-attention layer, and the first and the last sliding-window layer.
    """
    groups = []
    for kind, name in ((PoolKind.FULL, "full_kv_pool"), (PoolKind.SWA, "swa_kv_pool")):
        sub_pool = resolve_path(pool, (name,))
        try:
            attached = attacher_of(sub_pool)(sub_pool, config, kv_token_id_vs_position_offset=kv_token_id_vs_position_offset)
        except (ValueError, NotImplementedError) as error:
            raise type(error)(f"{error} This is about the sub-pool `pool.{name}`.") from error
        if [group.kind for group in attached] != [PoolKind.FULL]:
            raise ValueError(
                f"`pool.{name}` is attached by {len(attached)} groups, but a sub-pool must be a pool without a sliding window of its own."
            )
        groups.append(_inside(attached[0], name, kind))
    check_table(pool, groups[0].k_head.shape[0])
    return tuple(groups)


def _inside(group: CanaryBufferGroup, name: str, kind: PoolKind) -> CanaryBufferGroup:
    """A sub-pool's group as one of the whole pool."""
    sources: dict[str, Any] = {
        half: tuple(dataclasses.replace(spec, path=(name, *spec.path)) for spec in getattr(group, half))
        for half in ("real_kv_sources_k", "real_kv_sources_v")
    }
    return dataclasses.replace(group, kind=kind, swa_index_lut=(TABLE,) if kind is PoolKind.SWA else None, **sources)
