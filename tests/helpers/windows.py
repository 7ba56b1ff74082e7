"""A serving loop with a sliding window on a real pool: SWA slots are given with a token, and taken back behind the window."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_kvcanary as kvc
from helpers.loops import NUM_SLOTS, ROWS, Requests, findings, tokens_of
from helpers.pool_cases import fused_family, mha_family, mla_family, packed_family
from jax_kvcanary.pools import DeepSeekV4TokenToKVPool, FusedMHATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool, SWAKVPool

WINDOW, SWA_SLOTS, LAYERS = 5, 24, 3
CONFIG = kvc.CanaryConfig("log", ring_capacity=101, real_kv_hash_mode=kvc.RealKvHashMode.ALL, real_kv_layers=(0, -1))

_SIZES = {"num_slots": NUM_SLOTS, "swa_num_slots": SWA_SLOTS, "num_layers": LAYERS, "swa_layers": (0, 2)}

#: By name: how to allocate the pool, and what its layers store.
POOLS: dict[str, Any] = {
    "mha": (partial(SWAKVPool.allocate, pool_class=MHATokenToKVPool, num_kv_heads=3, head_dim=4, **_SIZES), mha_family(3, 4, jnp.bfloat16)),
    "fused": (
        partial(SWAKVPool.allocate, pool_class=FusedMHATokenToKVPool, num_kv_heads=3, head_dim=4, stacked=True, **_SIZES),
        fused_family(3, 4, jnp.bfloat16),
    ),
    "mla": (
        partial(SWAKVPool.allocate, pool_class=MLATokenToKVPool, kv_lora_rank=13, qk_rope_head_dim=7, **_SIZES),
        mla_family(13, 7, jnp.bfloat16),
    ),
    "deepseek v4": (
        partial(DeepSeekV4TokenToKVPool.allocate, num_slots=SWA_SLOTS, full_num_slots=NUM_SLOTS, num_layers=LAYERS, page_size=4),
        packed_family(),
    ),
}


def forward(values, batch, pool):
    base = jnp.asarray(batch.input_ids) * 3 + batch.positions
    for layer in range(LAYERS):
        pool = pool.write(layer, batch.out_cache_loc, *values(layer, base))
    return base, pool


class WindowLoop:
    """Requests on a pool with a window of five positions."""

    def __init__(self, name: str = "mha", config: kvc.CanaryConfig = CONFIG) -> None:
        allocate, family = POOLS[name]
        self.pool, self.requests = allocate(), Requests()
        self.free = list(range(1, SWA_SLOTS))
        capacities = kvc.CanaryLaunchCapacities.from_pool(NUM_SLOTS, ROWS)
        self.canary, state = kvc.install_canary(self.pool, config, capacities=capacities, swa_window_size=WINDOW)
        self.state = self.canary.mark_init_finished(state)
        self.jitted = jax.jit(self.canary.wrap(partial(forward, family.values)), donate_argnums=(0, 2))
        self.seen = 0

    @property
    def table(self) -> np.ndarray:
        """From full-pool slots to SWA slots, on the host."""
        return np.asarray(self.pool.full_to_swa_index_mapping)

    def full_slot(self, row: int, position: int) -> int:
        return int(self.requests.table[row, position])

    def swa_slot(self, row: int, position: int) -> int:
        return int(self.table[self.full_slot(row, position)])

    def map(self, full_slots: Any, swa_slots: Any) -> None:
        """Give full-pool slots SWA slots, without asking the allocator."""
        self.pool = self.pool.map_slots(np.array(full_slots, np.int32), np.array(swa_slots, np.int32))

    def extend(self, row: int, prefix: int, count: int, *, swa_slots: Any = None, retire: bool = True) -> list[Any]:
        """One request's prefill or decode into new slots, and what it finds. Then what lies behind the window is freed."""
        self.requests.place(row, prefix, count)
        given = [self.free.pop(0) for _ in range(count)] if swa_slots is None else swa_slots
        self.map(self.requests.table[row, prefix : prefix + count], given)
        found = self.step(self.requests.batch((row, prefix, tokens_of(row, prefix, count))))
        if retire:
            self.retire(row, prefix + count - WINDOW)
        return found

    def retire(self, row: int, end: int) -> None:
        """Free the SWA slots of positions below ``end``; their full-pool slots stay."""
        slots = [self.full_slot(row, position) for position in range(max(end, 0))]
        self.free += [int(slot) for slot in self.table[slots] if slot > 0]
        self.pool = self.pool.unmap_slots(np.array(slots, np.int32))

    def step(self, batch: kvc.ForwardBatch) -> list[Any]:
        """What one forward finds, as sorted (tag, slot, reasons)."""
        self.state, report, _, self.pool = self.jitted(self.state, batch, self.pool)
        gained = findings(report, self.seen)
        self.seen += len(gained)
        return gained
