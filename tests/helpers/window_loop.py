"""A pool with a full and a window's half, K and V in each, and a loop that decodes one request on it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_kvcanary as kvc

NUM_SLOTS, NUM_SWA_SLOTS, MAX_SEQ_LEN, WINDOW = 47, 31, 23, 5
CAPACITIES = kvc.CanaryLaunchCapacities(53, 3)


@partial(jax.tree_util.register_dataclass, data_fields=("full", "swa", "lut"), meta_fields=())
@dataclass(frozen=True)
class WindowPool:
    """Any of the two halves, with or without V.

    Fields:
        full, swa: {"k": uint8 [slots, 8], "v": the same}, without "v" for a pool of K alone; None where there is no such half.
        lut: int32 [full slots] to window slots, or None.
    """

    full: dict[str, Any] | None = None
    swa: dict[str, Any] | None = None
    lut: Any = None

    def write(self, slots: Any, values: Any) -> WindowPool:
        """The pool with tokens stored: their low byte, eight times."""
        own = slots if self.lut is None else jnp.asarray(self.lut)[slots]
        stored = {}
        for name, at in (("full", slots), ("swa", own)):
            half = getattr(self, name)
            byte = jnp.asarray(values).astype(jnp.uint8)[:, None]
            stored[name] = None if half is None else {key: jnp.asarray(array).at[at].set(byte) for key, array in half.items()}
        return WindowPool(**stored, lut=self.lut)


def make_pool(*kinds: kvc.PoolKind, v: bool = True) -> WindowPool:
    """A pool with the halves named, and a table that mixes the window's slots up."""
    halves = {}
    for name, kind, slots in (("full", kvc.PoolKind.FULL, NUM_SLOTS), ("swa", kvc.PoolKind.SWA, NUM_SWA_SLOTS)):
        if kind in kinds:
            halves[name] = {half: jnp.zeros((slots, 8), jnp.uint8) for half in ("kv" if v else "k")}
    lut = np.zeros(NUM_SLOTS, np.int32)
    lut[1:NUM_SWA_SLOTS] = np.arange(1, NUM_SWA_SLOTS)[::-1]
    return WindowPool(**halves, lut=jnp.asarray(lut) if kvc.PoolKind.SWA in kinds else None)


def attach_window_pool(pool: WindowPool, config: kvc.CanaryConfig, *, kv_token_id_vs_position_offset: int) -> tuple[Any, ...]:
    groups = []
    for kind, name, lut in ((kvc.PoolKind.FULL, "full", None), (kvc.PoolKind.SWA, "swa", ("lut",))):
        arrays = getattr(pool, name)
        if arrays is None:
            continue
        halves = [half for half in arrays if half == "k" or config.enable_v_half]
        buffers = {f"{half}_{end}": kvc.fresh_records(len(arrays[half])) for half in halves for end in ("head", "tail")}
        sources = {f"real_kv_sources_{half}": (kvc.SourceSpec(path=(name, half), num_bytes_per_token=8, read_bytes=8),) for half in halves}
        offset = kv_token_id_vs_position_offset
        groups.append(kvc.CanaryBufferGroup(kind=kind, swa_index_lut=lut, kv_token_id_vs_position_offset=offset, **buffers, **sources))
    return tuple(groups)


kvc.register_pool_attacher(WindowPool, attach_window_pool)


def install(pool: WindowPool, **config: Any) -> tuple[Any, Any]:
    config = kvc.CanaryConfig(**{"mode": "raise", "ring_capacity": 17, **config})
    canary, state = kvc.install_canary(pool, config, capacities=CAPACITIES, swa_window_size=WINDOW)
    return canary, canary.mark_init_finished(state)


def req_to_token() -> np.ndarray:
    """Row 1 owns the slots 1, 2, 3 and so on, backwards; row 0 is padding."""
    table = np.zeros((3, MAX_SEQ_LEN), np.int32)
    table[1] = np.arange(1, MAX_SEQ_LEN + 1)[::-1]
    return table


def decode(position: int) -> kvc.ForwardBatch:
    """One token of row 1, and a row of padding."""
    table = req_to_token()
    return kvc.ForwardBatch.decode(
        input_ids=np.array([100 + position, 0], np.int32),
        positions=np.array([position, 0], np.int32),
        out_cache_loc=np.array([table[1, position], 0], np.int32),
        req_pool_indices=np.array([1, 0], np.int32),
        req_to_token=table,
    )


def idle() -> kvc.ForwardBatch:
    """Nothing but padding."""
    zeros = np.zeros(2, np.int32)
    return kvc.ForwardBatch.decode(
        input_ids=zeros, positions=zeros, out_cache_loc=zeros, req_pool_indices=zeros, req_to_token=req_to_token()
    )


def forward(batch: kvc.ForwardBatch, pool: WindowPool) -> WindowPool:
    return pool.write(batch.out_cache_loc, batch.input_ids)


@partial(jax.jit, static_argnums=0, donate_argnums=(1, 3))
def step(canary: kvc.Canary, state: Any, batch: kvc.ForwardBatch, pool: WindowPool) -> tuple[Any, ...]:
    """One forward as it should be: state, report, pool."""
    state, between = canary.pre_forward(state, batch, pool)
    pool = forward(batch, pool)
    state, report = canary.post_forward(state, between, batch, pool)
    return state, report, pool


@partial(jax.jit, static_argnums=(0, 4), donate_argnums=1)
def sweep(canary: kvc.Canary, state: Any, plan: kvc.VerifyPlan, pool: WindowPool, kind: kvc.PoolKind) -> tuple[Any, Any]:
    return canary.sweep(state, plan, pool, kind=kind)


def cached(length: int, kind: kvc.PoolKind, pool: WindowPool) -> kvc.VerifyPlan:
    """A sweep over the first positions of row 1."""
    slots = req_to_token()[1, :length]
    if kind is kvc.PoolKind.SWA:
        slots = np.asarray(pool.lut)[slots]
    pad = [0] * (CAPACITIES.verify_capacity - length)

    def column(values: Any) -> np.ndarray:
        return np.array([*values, *pad], np.int32)

    return kvc.VerifyPlan(
        verify_slot_indices=column(slots),
        verify_expected_tokens=column(range(100, 100 + length)),
        verify_expected_positions=column(range(length)),
        verify_prev_slot_indices=column([-1, *slots[:-1]]),
        verify_num_valid=np.array([length], np.int32),
        enable=np.array([1], np.int32),
    )
