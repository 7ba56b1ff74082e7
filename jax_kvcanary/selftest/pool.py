"""The pool and the model of the self test: K and V of a full-attention layer, and of a sliding-window layer in a smaller pool."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_kvcanary._checks import ArrayLike
from jax_kvcanary.batch import ForwardBatch
from jax_kvcanary.buffers import CanaryBufferGroup
from jax_kvcanary.config import CanaryConfig
from jax_kvcanary.constants import PoolKind
from jax_kvcanary.plan import translate_slots
from jax_kvcanary.pools.mha import MHATokenToKVPool, attach_mha

HEADS, HEAD_DIM = 2, 6  # 48 bytes a token of float32: PARTIAL hashes a third of them


@partial(jax.tree_util.register_dataclass, data_fields=("full", "swa", "full_to_swa"), meta_fields=())
@dataclass(frozen=True)
class TwoPools:
    """KV of a layer that attends to everything, and of one that attends to a window.

    Fields:
        full, swa: the two pools.
        full_to_swa: int32 [slots of the full pool]; slot in the SWA pool, 0 where there is none.
    """

    full: MHATokenToKVPool
    swa: MHATokenToKVPool
    full_to_swa: ArrayLike

    @classmethod
    def allocate(cls, *, num_slots: int, num_swa_slots: int) -> TwoPools:
        """Zeroed arrays; both counts include the padding slot.

        They are float32: a CPU's scatter passes arrays of narrower floats through wider ones, which undoes flips that make a subnormal.
        """
        full, swa = (
            MHATokenToKVPool.allocate(num_slots=slots, num_layers=1, num_kv_heads=HEADS, head_dim=HEAD_DIM, dtype=jnp.float32)
            for slots in (num_slots, num_swa_slots)
        )
        return cls(full, swa, jnp.zeros((num_slots,), jnp.int32))


def attach_two_pools(pool: TwoPools, config: CanaryConfig, *, kv_token_id_vs_position_offset: int) -> tuple[CanaryBufferGroup, ...]:
    """Attacher: a FULL group and an SWA group."""
    groups = []
    for name, kind, lut in (("full", PoolKind.FULL, None), ("swa", PoolKind.SWA, ("full_to_swa",))):
        (group,) = attach_mha(getattr(pool, name), config, kv_token_id_vs_position_offset=kv_token_id_vs_position_offset)
        sources: dict[str, Any] = {
            half: tuple(dataclasses.replace(spec, path=(name, *spec.path)) for spec in getattr(group, half))
            for half in ("real_kv_sources_k", "real_kv_sources_v")
        }
        groups.append(dataclasses.replace(group, kind=kind, swa_index_lut=lut, **sources))
    return tuple(groups)


def forward(batch: ForwardBatch, pool: TwoPools) -> tuple[jax.Array, TwoPools]:
    """Store KV that follows from token and position, and return nothing of use: who is served does not matter here."""
    feature = jnp.arange(HEADS * HEAD_DIM, dtype=jnp.int32).reshape(HEADS, HEAD_DIM)
    base = (jnp.asarray(batch.input_ids) * 37 + jnp.asarray(batch.positions) * 11)[:, None, None]
    k, v = ((base * (feature + n) % 251).astype(jnp.float32) for n in (3, 7))
    full = pool.full.write(0, batch.out_cache_loc, k, v)
    swa = pool.swa.write(0, translate_slots(batch.out_cache_loc, pool.full_to_swa), k, v)
    return jnp.zeros((), jnp.int32), dataclasses.replace(pool, full=full, swa=swa)
