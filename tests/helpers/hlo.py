"""Layouts of pools whose steps are compiled, and the reading of compiled programs: custom calls, and copies of large arrays."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_kvcanary as kvc
from jax_kvcanary.pools import (
    DeepSeekV4TokenToKVPool,
    FusedMHATokenToKVPool,
    MHATokenToKVPool,
    MHATokenToKVPoolFP4,
    MLATokenToKVPool,
    SWAKVPool,
)

# float32: the CPU's scatter converts whole bfloat16 arrays, with a canary and without.
NUM_SLOTS, LAYERS, HEADS, HEAD_DIM = 1021, 2, 2, 8
TOKENS, STEPS = 5, 8
CONFIG = kvc.CanaryConfig("log", ring_capacity=17, real_kv_hash_mode=kvc.RealKvHashMode.ALL, real_kv_layers=(0, -1))
CAPACITIES = kvc.CanaryLaunchCapacities(67, TOKENS)

#: Elements of a canary buffer; a KV layer of these pools is no smaller.
BUFFER_SIZE = NUM_SLOTS * kvc.CANARY_SLOT_BYTES
assert NUM_SLOTS * HEADS * HEAD_DIM * 4 >= BUFFER_SIZE

COPYING = {
    "bitcast-convert",
    "concatenate",
    "convert",
    "copy",
    "copy-start",
    "dynamic-slice",
    "slice",
    "transpose",
}
WORD_BYTES = {"pred": 1, "s8": 1, "u8": 1, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8}


@partial(jax.tree_util.register_dataclass, data_fields=("kv",), meta_fields=())
@dataclass(frozen=True)
class StackedPool:
    """A pool of somebody's own: one array [layers, slots, 2, heads, head_dim] for all layers, K and V side by side."""

    kv: Any

    @classmethod
    def allocate(cls, *, num_slots, num_layers, num_kv_heads, head_dim, dtype):
        return cls(jnp.zeros((num_layers, num_slots, 2, num_kv_heads, head_dim), dtype))

    def write(self, layer, slots, k, v):
        return StackedPool(self.kv.at[layer, slots].set(jnp.stack([k, v], axis=1), mode="drop"))


def attach_stacked(pool, config, *, kv_token_id_vs_position_offset=0):  # noqa: ARG001 - attachers are called with it
    half_bytes = HEADS * HEAD_DIM * 4

    def sources(half):
        part = {"byte_offset": half * half_bytes, "num_bytes_per_token": half_bytes}
        return tuple(kvc.make_row_source(pool, ("kv",), token_rank=3, layer=layer, **part) for layer in config.real_kv_layers)

    buffers = {name: kvc.fresh_records(NUM_SLOTS) for name in ("k_head", "k_tail", "v_head", "v_tail")}
    return (kvc.CanaryBufferGroup(kind=kvc.PoolKind.FULL, real_kv_sources_k=sources(0), real_kv_sources_v=sources(1), **buffers),)


@dataclass(frozen=True)
class Layout:
    """A pool to be stepped: how it is allocated, and the shapes of what its ``write`` takes for each token."""

    allocate: Any
    values: tuple[tuple[int, ...], ...] = ((HEADS, HEAD_DIM),) * 2
    dtype: Any = jnp.float32


SIZES = {"num_slots": NUM_SLOTS, "num_layers": LAYERS}
HEAD_SIZES = {"num_kv_heads": HEADS, "head_dim": HEAD_DIM, "dtype": jnp.float32}
MHA, FUSED = (partial(pool_class.allocate, **SIZES, **HEAD_SIZES) for pool_class in (MHATokenToKVPool, FusedMHATokenToKVPool))
SWA_SIZES = {"num_slots": NUM_SLOTS, "swa_num_slots": NUM_SLOTS, "num_layers": LAYERS, "swa_layers": (1,)}


def mapped(allocate):
    """A pool with a table that gives each full-pool slot the SWA slot of its number."""
    return allocate().map_slots(np.arange(NUM_SLOTS), np.arange(NUM_SLOTS))


kvc.register_pool_attacher(StackedPool, attach_stacked)

LAYOUTS = {
    "mha": Layout(MHA),
    "mha pages": Layout(partial(MHA, num_slots=NUM_SLOTS + 3, page_size=16)),
    "mha stacked": Layout(partial(MHA, stacked=True)),
    "mha stacked pages": Layout(partial(MHA, num_slots=NUM_SLOTS + 3, page_size=16, stacked=True)),
    "fused": Layout(FUSED),
    "fused stacked": Layout(partial(FUSED, stacked=True)),
    "fused packed": Layout(partial(FUSED, num_slots=NUM_SLOTS + 3, page_size=16, packing=2)),
    "own stacked": Layout(partial(StackedPool.allocate, **SIZES, **HEAD_SIZES)),
    # Scales, a byte for 16 elements, are as large as a canary buffer too.
    "fp4": Layout(partial(MHATokenToKVPoolFP4.allocate, **SIZES, num_kv_heads=2, head_dim=256), ((2, 256),) * 2),
    "mla": Layout(partial(MLATokenToKVPool.allocate, **SIZES, kv_lora_rank=13, qk_rope_head_dim=7, dtype=jnp.float32), ((13,), (7,))),
    "swa": Layout(partial(mapped, partial(SWAKVPool.allocate, **SWA_SIZES, **HEAD_SIZES))),
    "deepseek v4": Layout(
        partial(
            mapped,
            partial(DeepSeekV4TokenToKVPool.allocate, **{**SIZES, "num_slots": NUM_SLOTS + 3}, full_num_slots=NUM_SLOTS, page_size=16),
        ),
        ((584,),),
        jnp.uint8,
    ),
}


def install(name, config=CONFIG):
    """Canary, state, pool, and a forward for the pool."""
    layout = LAYOUTS[name]
    pool = layout.allocate()
    canary, state = kvc.install_canary(pool, config, capacities=CAPACITIES)
    return canary, state, pool, partial(forward, layout)


def make_batch():
    positions = jnp.arange(3, 3 + TOKENS, dtype=jnp.int32)
    return kvc.ForwardBatch.decode(
        input_ids=positions * 7,
        positions=positions,
        out_cache_loc=positions * 11,
        req_pool_indices=jnp.arange(1, 1 + TOKENS, dtype=jnp.int32),
        req_to_token=jnp.arange(7 * 13, dtype=jnp.int32).reshape(7, 13),
    )


def forward(layout, batch, pool):
    base = batch.input_ids * 3 + batch.positions
    for layer in range(LAYERS):
        values = [(base + layer + n).reshape(-1, *[1] * len(shape)) for n, shape in enumerate(layout.values)]
        kv = [jnp.broadcast_to(value, (TOKENS, *shape)).astype(layout.dtype) for value, shape in zip(values, layout.values, strict=True)]
        pool = pool.write(layer, batch.out_cache_loc, *kv)
    return base.sum(), pool


def one_step(canary, forward, state, batch, pool):
    return canary.wrap(forward)(state, batch, pool)


def two_steps(canary, forward, state, batch, pool):
    """Two forwards on one pool in one program, as in the steps of a draft model."""
    step = canary.wrap(forward)
    state, first, out, pool = step(state, batch, pool)
    state, second, out, pool = step(state, batch, pool)
    return state, (first.summary, second.summary), out, pool


def two_steps_by_hand(canary, forward, state, batch, pool):
    reports = []
    for _ in range(2):
        ordered = canary.in_order(state, batch)
        state, step = canary.pre_forward(state, ordered, pool)
        out, pool = forward(ordered, pool)
        state, report = canary.post_forward(state, step, ordered, pool)
        reports.append(report.summary)
    return state, reports, out, pool


def scanned_steps(canary, forward, state, batch, pool):
    def body(carry, _):
        state, report, out, pool = canary.wrap(forward)(carry[0], batch, carry[1])
        return (state, pool), (report.summary, out)

    return jax.lax.scan(body, (state, pool), None, length=STEPS)


def compiled_text(function, *args, donate=()):
    return jax.jit(function, donate_argnums=donate).lower(*args).compile().as_text()


INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (?P<type>.*?) (?P<op>[a-z][\w\-]*)\(", re.MULTILINE)
ARRAY = re.compile(r"(?P<dtype>[a-z]+\d*)\[(?P<dims>[\d,]*)\]")


def large_copies(text):
    """Instructions whose result is another arrangement of bytes, as large as a canary buffer."""
    found = []
    for instruction in INSTRUCTION.finditer(text):
        sizes = [
            math.prod(int(dim) for dim in array["dims"].split(",") if dim) * WORD_BYTES.get(array["dtype"], 8)
            for array in ARRAY.finditer(instruction["type"])
        ]
        if instruction["op"] in COPYING and max(sizes, default=0) >= BUFFER_SIZE:
            found.append(instruction[0].strip())
    return found


def custom_calls(text):
    """How often a program names each of the canary's targets: verify, write, a phase of a step, which does both, and one that reports."""
    return [len(re.findall(f'custom_call_target="kvcanary_{name}"', text)) for name in ("verify", "write", "phase", "report_phase")]


def pointers(tree):
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)]
