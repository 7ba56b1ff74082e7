"""What a compiled step consists of: custom calls that work in place, and no copy of a canary buffer or a KV array."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_kvcanary as kvc
from helpers.hlo import BUFFER_SIZE, NUM_SLOTS, custom_calls, large_copies
from jax_kvcanary.pools import FusedMHATokenToKVPool, MHATokenToKVPool

# float32: the CPU's scatter converts whole bfloat16 arrays, with a canary and without.
LAYERS, HEADS, HEAD_DIM = 2, 2, 8
TOKENS, STEPS = 5, 8
CONFIG = kvc.CanaryConfig("log", ring_capacity=17, real_kv_hash_mode=kvc.RealKvHashMode.ALL, real_kv_layers=(0, -1))
CAPACITIES = kvc.CanaryLaunchCapacities(67, TOKENS)

assert NUM_SLOTS * HEADS * HEAD_DIM * 4 >= BUFFER_SIZE


@partial(jax.tree_util.register_dataclass, data_fields=("kv",), meta_fields=())
@dataclass(frozen=True)
class StackedPool:
    """One array [layers, slots, 2, heads, head_dim] for all layers, K and V side by side."""

    kv: Any

    @classmethod
    def allocate(cls, *, num_slots, num_layers, num_kv_heads, head_dim, dtype):
        return cls(jnp.zeros((num_layers, num_slots, 2, num_kv_heads, head_dim), dtype))

    def write(self, layer, slots, k, v):
        return StackedPool(self.kv.at[layer, slots].set(jnp.stack([k, v], axis=1), mode="drop"))


def attach_stacked(pool, config, *, kv_token_id_vs_position_offset=0):  # noqa: ARG001 - attachers are called with it
    layers, num_slots, _, heads, head_dim = pool.kv.shape
    token = heads * head_dim * pool.kv.dtype.itemsize

    def sources(half):
        return tuple(
            kvc.SourceSpec(
                path=("kv",),
                num_bytes_per_token=token,
                read_bytes=token,
                byte_offset=(layer % layers * num_slots * 2 + half) * token,
                row_stride_bytes=2 * token,
            )
            for layer in config.real_kv_layers
        )

    buffers = {name: kvc.fresh_records(num_slots) for name in ("k_head", "k_tail", "v_head", "v_tail")}
    return (kvc.CanaryBufferGroup(kind=kvc.PoolKind.FULL, real_kv_sources_k=sources(0), real_kv_sources_v=sources(1), **buffers),)


POOLS = (MHATokenToKVPool, FusedMHATokenToKVPool, StackedPool)


@pytest.fixture(autouse=True)
def _stacked_attacher(monkeypatch):
    from jax_kvcanary.pools import attach

    monkeypatch.setattr(attach, "_ATTACHERS", {**attach._ATTACHERS, StackedPool: attach_stacked})


def make_pool(pool_class):
    return pool_class.allocate(num_slots=NUM_SLOTS, num_layers=LAYERS, num_kv_heads=HEADS, head_dim=HEAD_DIM, dtype=jnp.float32)


def install(pool_class, config=CONFIG):
    pool = make_pool(pool_class)
    canary, state = kvc.install_canary(pool, config, capacities=CAPACITIES)
    return canary, state, pool


def make_batch():
    positions = jnp.arange(3, 3 + TOKENS, dtype=jnp.int32)
    return kvc.ForwardBatch.decode(
        input_ids=positions * 7,
        positions=positions,
        out_cache_loc=positions * 11,
        req_pool_indices=jnp.arange(1, 1 + TOKENS, dtype=jnp.int32),
        req_to_token=jnp.arange(7 * 13, dtype=jnp.int32).reshape(7, 13),
    )


def forward(batch, pool):
    k = jnp.broadcast_to((batch.input_ids * 3 + batch.positions)[:, None, None], (TOKENS, HEADS, HEAD_DIM)).astype(jnp.float32)
    for layer in range(LAYERS):
        pool = pool.write(layer, batch.out_cache_loc, k + layer, k * 2)
    return k.sum(), pool


def one_step(canary, state, batch, pool):
    return canary.wrap(forward)(state, batch, pool)


def scanned_steps(canary, state, batch, pool):
    def body(carry, _):
        state, report, out, pool = canary.wrap(forward)(carry[0], batch, carry[1])
        return (state, pool), (report.summary, out)

    return jax.lax.scan(body, (state, pool), None, length=STEPS)


def compiled_text(function, *args, donate=()):
    return jax.jit(function, donate_argnums=donate).lower(*args).compile().as_text()


@pytest.mark.parametrize("run", [one_step, scanned_steps])
@pytest.mark.parametrize("pool_class", POOLS)
def test_a_donated_step_copies_nothing(pool_class, run):
    canary, state, pool = install(pool_class)
    text = compiled_text(partial(run, canary), state, make_batch(), pool, donate=(0, 2))
    assert large_copies(text) == []
    assert custom_calls(text) == [2, 2]  # a phase each, K and V shared, also in the body of a scan


def test_copies_would_be_seen():
    """A step whose state and pool have to survive shows copies of both."""
    canary, state, pool = install(MHATokenToKVPool)
    kept = "\n".join(large_copies(compiled_text(partial(one_step, canary), state, make_batch(), pool)))
    assert f"u8[{NUM_SLOTS},32]" in kept
    assert f"f32[{NUM_SLOTS},{HEADS},{HEAD_DIM}]" in kept


@pytest.mark.parametrize(
    ("line", "large"),
    [
        ("  %slice.1 = f32[1020,2,8]{2,1,0} slice(%p), slice={[1:1021], [0:2], [0:8]}", True),
        ("  ROOT %copy.2 = u8[1021,32]{1,0} copy(%p)", True),
        ("  ROOT copy.2 = u8[1021,31]{1,0} copy(p)", False),
        ('  %c = (u8[1021,32]{1,0}, u8[1021,32]{1,0}, u32[]) copy-start(%p), metadata={op_name="a"}', True),
        ("  %x = u64[4084]{0} bitcast-convert(u8[1021,32]{1,0} %p)", True),
        ("  %x = u64[4083]{0} bitcast-convert(u8[4083,8]{1,0} %p)", False),
        ("  %d = bf16[1,1021,16]{2,1,0} dynamic-slice(%p, %i, %j, %k), dynamic_slice_sizes={1,1021,16}", True),
        ("  %s = f32[1021,2,8]{2,1,0} scatter(%p, %i, %u), to_apply=%copy", False),
    ],
)
def test_the_reading_of_instructions(line, large):
    assert bool(large_copies(line)) == large


def test_no_custom_call_without_a_canary():
    canary, state, pool = install(MHATokenToKVPool, kvc.CanaryConfig("none"))
    assert (canary, state) == (None, None)
    assert custom_calls(compiled_text(forward, make_batch(), pool, donate=1)) == [0, 0]


@pytest.mark.parametrize("v_half", [True, False])
def test_custom_calls_of_each_piece(v_half):
    config = kvc.CanaryConfig("log", enable_v_half=v_half)
    canary, state, pool = install(MHATokenToKVPool, config)
    batch = make_batch()
    state_after, step = jax.eval_shape(canary.pre_forward, state, batch, pool)
    plan = step.plans[0].verify
    assert custom_calls(compiled_text(canary.pre_forward, state, batch, pool)) == [1, 1]
    assert custom_calls(compiled_text(canary.post_forward, state_after, step, batch, pool)) == [1, 1]
    assert custom_calls(compiled_text(canary.sweep, state, plan, pool)) == [1, 0]
    assert custom_calls(compiled_text(canary.release, state, batch.out_cache_loc, pool)) == [0, 0]


def test_custom_calls_of_the_operations():
    _, state, _ = install(MHATokenToKVPool)
    batch = make_batch()

    def step(buf, device_state):
        plan = kvc.plan(batch.plan_input, batch.req_to_token, verify_capacity=67)
        device_state = kvc.verify_step(buf, plan.verify, device_state, tag=0)
        return kvc.write_step(buf, plan.write, batch.input_ids, batch.positions, batch.out_cache_loc, device_state, tag=0)

    text = compiled_text(step, state.groups[0].k_head, state.device_state, donate=(0, 1))
    assert custom_calls(text) == [1, 1]
    assert large_copies(text) == []


@pytest.mark.parametrize("tree", [False, True])
def test_only_trees_take_scratch_for_their_entries(tree):
    """Four words for each row, and for each token of a tree, of K and of V."""
    canary, state, pool = install(MHATokenToKVPool)
    batch = dataclasses.replace(make_batch(), parents=jnp.full(TOKENS, -1, jnp.int32) if tree else None)
    text = compiled_text(partial(one_step, canary), state, batch, pool, donate=(0, 2))
    scratch = [int(words) for words in re.findall(r"u32\[(\d+)\]\S*, (?=[^()]*\) custom-call\([^\n]*kvcanary_write)", text)]
    assert 2 * 4 * (CAPACITIES.write_req_capacity + (TOKENS if tree else 0)) in scratch
    assert max(scratch) == 2 * 4 * (CAPACITIES.write_req_capacity + (TOKENS if tree else 0))
    assert custom_calls(text) == [2, 2]
    assert large_copies(text) == []


def pointers(tree):
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("run", [one_step, scanned_steps])
@pytest.mark.parametrize("pool_class", POOLS)
def test_donated_arrays_stay_where_they_are(pool_class, run):
    canary, state, pool = install(pool_class)
    step = jax.jit(partial(run, canary), donate_argnums=(0, 2))
    batch = make_batch()
    before = pointers((state.groups, pool))
    for _ in range(3):
        out = step(state, batch, pool)
        state, pool = out[0] if run is scanned_steps else (out[0], out[3])
        assert pointers((state.groups, pool)) == before
    kernel_runs = kvc.to_int64(state.device_state.kernel_run_counters)
    assert kernel_runs[0] == 6 * (STEPS if run is scanned_steps else 1)


def test_a_donated_release_stays_where_it_is():
    canary, state, pool = install(MHATokenToKVPool)
    release = jax.jit(canary.release, donate_argnums=0)
    text = release.lower(state, jnp.arange(5), pool).compile().as_text()
    assert large_copies(text) == []
    before = pointers(state.groups)
    state = release(state, jnp.arange(5), pool)
    assert pointers(state.groups) == before
    assert (np.asarray(state.groups[0].k_head)[1:5] == 0xFF).all()
