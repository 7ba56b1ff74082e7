"""The pool and the model of the self test: K and V of a full-attention layer, and of a sliding-window layer in a smaller pool."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_kvcanary.batch import ForwardBatch
from jax_kvcanary.pools import SWAKVPool

HEADS, HEAD_DIM = 2, 6  # 48 bytes a token of float32: PARTIAL hashes a third of them
LAYERS = 2
SWA_LAYERS = (1,)


def allocate_pool(*, num_slots: int, num_swa_slots: int) -> SWAKVPool:
    """A pool with one layer of each kind, zeroed; both counts include the padding slot.

    The arrays are float32: a CPU's scatter passes arrays of narrower floats through wider ones, which undoes flips that make a subnormal.
    """
    return SWAKVPool.allocate(
        num_slots=num_slots,
        swa_num_slots=num_swa_slots,
        num_layers=LAYERS,
        swa_layers=SWA_LAYERS,
        num_kv_heads=HEADS,
        head_dim=HEAD_DIM,
        dtype=jnp.float32,
    )


def forward(batch: ForwardBatch, pool: SWAKVPool) -> tuple[jax.Array, SWAKVPool]:
    """Store KV that follows from token and position, and return nothing of use: who is served does not matter here."""
    feature = jnp.arange(HEADS * HEAD_DIM, dtype=jnp.int32).reshape(HEADS, HEAD_DIM)
    base = (jnp.asarray(batch.input_ids) * 37 + jnp.asarray(batch.positions) * 11)[:, None, None]
    k, v = ((base * (feature + n) % 251).astype(jnp.float32) for n in (3, 7))
    for layer in range(LAYERS):
        pool = pool.write(layer, batch.out_cache_loc, k, v)
    return jnp.zeros((), jnp.int32), pool
