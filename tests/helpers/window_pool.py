"""A pool with a sliding window: two sub-pools with K and V each, and the table between their slots."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import jax_kvcanary as kvc
from jax_kvcanary.plan import translate_slots
from jax_kvcanary.pools import MHATokenToKVPool


@partial(jax.tree_util.register_dataclass, data_fields=("full", "swa", "lut"), meta_fields=())
@dataclass(frozen=True)
class WindowPool:
    """``lut`` int32 [num_slots] has the window slot of each full slot, 0 where there is none."""

    full: MHATokenToKVPool
    swa: MHATokenToKVPool
    lut: Any

    @classmethod
    def allocate(cls, **sizes: Any) -> WindowPool:
        full, swa = (MHATokenToKVPool.allocate(**sizes) for _ in range(2))
        return cls(full, swa, jnp.zeros(sizes["num_slots"], jnp.int32))

    def write(self, layer: int, slots: Any, k: Any, v: Any) -> WindowPool:
        swa = self.swa.write(layer, translate_slots(slots, self.lut), k, v)
        return WindowPool(self.full.write(layer, slots, k, v), swa, self.lut)


def attach_window_pool(pool: WindowPool, config: kvc.CanaryConfig, **options: Any) -> tuple[kvc.CanaryBufferGroup, ...]:
    groups = []
    for kind, name in ((kvc.PoolKind.FULL, "full"), (kvc.PoolKind.SWA, "swa")):
        (group,) = kvc.attach_canary_buffers(getattr(pool, name), config, **options)
        moved = {
            half: tuple(dataclasses.replace(spec, path=(name, *spec.path)) for spec in getattr(group, half))
            for half in ("real_kv_sources_k", "real_kv_sources_v")
        }
        lut = ("lut",) if kind is kvc.PoolKind.SWA else None
        groups.append(dataclasses.replace(group, kind=kind, swa_index_lut=lut, **moved))
    return tuple(groups)


kvc.register_pool_attacher(WindowPool, attach_window_pool)
