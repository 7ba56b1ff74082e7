"""A small engine with a full pool and a sliding-window pool, whose KV and records can be moved about."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_kvcanary as kvc
from helpers.loops import findings
from jax_kvcanary import CanaryLaunchTag as Tag
from jax_kvcanary import FailReason as Reason

NUM_SLOTS, SWA_SLOTS, WINDOW = 37, 31, 5
TOKENS, ROWS, MAX_REQS, MAX_SEQ_LEN, WIDTH = 11, 3, 4, 17, 4
CONFIG = kvc.CanaryConfig("log", ring_capacity=211, real_kv_hash_mode=kvc.RealKvHashMode.ALL)
CAPACITIES = kvc.CanaryLaunchCapacities(3 * NUM_SLOTS, ROWS)
NAMES = ("k_head", "k_tail", "v_head", "v_tail")

PHASES = ("HEAD_K", "HEAD_V", "TAIL_K", "TAIL_V")
TAILS = PHASES[2:]


@partial(jax.tree_util.register_dataclass, data_fields=("full_k", "full_v", "swa_k", "swa_v", "lut"), meta_fields=())
@dataclass(frozen=True)
class WindowPool:
    """KV of one layer, float32 [slots, 4] each, and the table int32 [full slots] to the window's slots."""

    full_k: Any
    full_v: Any
    swa_k: Any
    swa_v: Any
    lut: Any

    @classmethod
    def allocate(cls, num_slots: int = NUM_SLOTS, swa_slots: int = SWA_SLOTS) -> WindowPool:
        return cls(
            *(jnp.zeros((n, WIDTH), jnp.float32) for n in (num_slots, num_slots, swa_slots, swa_slots)), jnp.zeros(num_slots, jnp.int32)
        )


def attach_window_pool(
    pool: WindowPool,
    config: kvc.CanaryConfig,
    *,
    kv_token_id_vs_position_offset: int = 0,
) -> tuple[kvc.CanaryBufferGroup, ...]:
    """A FULL and an SWA group."""
    groups = []
    for kind, lut in ((kvc.PoolKind.FULL, None), (kvc.PoolKind.SWA, ("lut",))):
        k, v = (f"{kind.name.lower()}_{half}" for half in "kv")
        sources = [(kvc.SourceSpec(path=(name,), num_bytes_per_token=4 * WIDTH, read_bytes=4 * WIDTH),) for name in (k, v)]
        num_slots = getattr(pool, k).shape[0]
        names = NAMES if config.enable_v_half else NAMES[:2]
        groups.append(
            kvc.CanaryBufferGroup(
                kind=kind,
                real_kv_sources_k=sources[0],
                real_kv_sources_v=sources[1] if config.enable_v_half else (),
                swa_index_lut=lut,
                kv_token_id_vs_position_offset=kv_token_id_vs_position_offset,
                **{name: kvc.fresh_records(num_slots) for name in names},
            )
        )
    return tuple(groups)


kvc.register_pool_attacher(WindowPool, attach_window_pool)


@jax.jit
def take_kv(pool: WindowPool, slots: Any) -> tuple[Any, ...]:
    """KV of full-pool slots: full K, full V, window K, window V."""
    own = pool.lut[slots]
    return pool.full_k[slots], pool.full_v[slots], pool.swa_k[own], pool.swa_v[own]


@partial(jax.jit, donate_argnums=0)
def put_kv(pool: WindowPool, slots: Any, kv: tuple[Any, ...]) -> WindowPool:
    """The pool with KV at full-pool slots and at the window's slots that the table has for them."""
    own = pool.lut[slots]
    own = jnp.where(own > 0, own, pool.swa_k.shape[0])
    places = (slots, slots, own, own)
    names = ("full_k", "full_v", "swa_k", "swa_v")
    put = {name: getattr(pool, name).at[at].set(new, mode="drop") for name, at, new in zip(names, places, kv, strict=True)}
    return dataclasses.replace(pool, **put)


def forward(batch: kvc.ForwardBatch, pool: WindowPool) -> tuple[Any, WindowPool]:
    """KV follows from token and position."""
    base = (batch.input_ids * 3 + batch.positions)[:, None] + jnp.arange(WIDTH)
    kv = [(base * factor % 61).astype(jnp.float32) for factor in (1, 2, 3, 5)]
    return None, put_kv(pool, batch.out_cache_loc, tuple(kv))


@partial(jax.jit, static_argnums=0, donate_argnums=(1, 3))
def window_step(canary: kvc.Canary, state: kvc.CanaryState, batch: kvc.ForwardBatch, pool: WindowPool) -> Any:
    return canary.wrap(forward)(state, batch, pool)


def tokens_of(row: int, start: int, count: int) -> list[int]:
    return [100 * row + position for position in range(start, start + count)]


class Engine:
    """Slots of both pools, a table of them, and a canary. Findings are sorted (tag, slot, reasons)."""

    def __init__(self, num_slots: int = NUM_SLOTS, swa_slots: int = SWA_SLOTS, *, step: int = 7, config: kvc.CanaryConfig = CONFIG) -> None:
        self.pool = WindowPool.allocate(num_slots, swa_slots)
        canary, state = kvc.install_canary(self.pool, config, capacities=CAPACITIES, swa_window_size=WINDOW)
        self.canary, self.state = canary, canary.mark_init_finished(state)
        self.table = np.zeros((MAX_REQS, MAX_SEQ_LEN), np.int32)
        # Both pools hand out their slots in an order of their own; the sizes are prime.
        self.free = [step * i % num_slots for i in range(1, num_slots)]
        self.swa_free = [(step + 2) * i % swa_slots for i in range(1, swa_slots)]
        self.seen = 0

    @property
    def lut(self) -> np.ndarray:
        return np.asarray(self.pool.lut)

    def set_lut(self, slots: Any, values: Any) -> None:
        lut = self.lut.copy()
        lut[slots] = values
        self.pool = dataclasses.replace(self.pool, lut=jnp.asarray(lut))

    def new_slots(self, count: int, *, window: bool = True) -> np.ndarray:
        """Full-pool slots that nobody has, with a window's slot each unless told otherwise."""
        slots = np.array([self.free.pop(0) for _ in range(count)], np.int32)
        self.set_lut(slots, [self.swa_free.pop(0) if window else 0 for _ in range(count)])
        return slots

    def slots(self, row: int, count: int) -> np.ndarray:
        return self.table[row, :count].copy()

    def extend(self, row: int, prefix: int, count: int) -> list[tuple[int, int, int]]:
        """Findings of a step that writes a request's next tokens to new slots."""
        self.table[row, prefix : prefix + count] = self.new_slots(count)
        return self.step(row, prefix, count)

    def step(self, row: int, prefix: int, count: int) -> list[tuple[int, int, int]]:
        """Findings of a step that writes a request's next tokens to the slots of its table."""

        def padded(values: Any, length: int) -> np.ndarray:
            return np.array([*values, *[0] * (length - len(values))], np.int32)

        batch = kvc.ForwardBatch.extend(
            input_ids=padded(tokens_of(row, prefix, count), TOKENS),
            positions=padded(range(prefix, prefix + count), TOKENS),
            out_cache_loc=padded(self.table[row, prefix : prefix + count], TOKENS),
            req_pool_indices=padded([row], ROWS),
            prefix_lens=padded([prefix], ROWS),
            extend_seq_lens=padded([count], ROWS),
            req_to_token=self.table.copy(),
        )
        self.state, report, _, self.pool = window_step(self.canary, self.state, batch, self.pool)
        gained = findings(report, self.seen)
        self.seen += len(gained)
        return gained

    def expect(
        self, row: int, prefix: int, positions: Any, reasons: int, *, phases: tuple[str, ...] = PHASES
    ) -> list[tuple[int, int, int]]:
        """A finding at each of a request's positions in every phase: in the full pool, and in the window's where the step looks."""
        slots = self.table[row, list(positions)]
        own = self.lut[[slot for slot, position in zip(slots, positions, strict=True) if position >= prefix - WINDOW]]
        found = {"FULL": slots, "SWA": own[own > 0]}
        return [(int(Tag[f"{phase}_{kind}"]), int(slot), int(reasons)) for kind in found for phase in phases for slot in found[kind]]

    def rows_in_between(self) -> list[list[int]]:
        """Rows that the log gained since the last report."""
        rows = self.state.device_state.violation_log.rows()[self.seen :].tolist()
        self.seen += len(rows)
        return rows


#: What the record of a slot that nothing wrote, or that was released, differs in.
UNWRITTEN = Reason.VERIFY_CHAIN_HASH_MISMATCH | Reason.VERIFY_POSITION_MISMATCH | Reason.VERIFY_REAL_KV_HASH_MISMATCH


def row_out_of_range(tag: int, slot: int, num_slots: int) -> list[int]:
    """A row of the log, by the contract."""
    return [int(tag), int(slot), -1, -1, -1, 0, num_slots, int(Reason.SLOT_OUT_OF_RANGE)]
