"""What a compiled step consists of: custom calls that work in place, and no copy of a canary buffer or a KV array."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


@pytest.fixture(autouse=True)
def _stacked_attacher(monkeypatch):
    from jax_kvcanary.pools import attach

    monkeypatch.setattr(attach, "_ATTACHERS", {**attach._ATTACHERS, StackedPool: attach_stacked})


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
    """How often a program names each of the canary's targets."""
    return [len(re.findall(f'custom_call_target="{target}"', text)) for target in ("kvcanary_verify", "kvcanary_write")]


@pytest.mark.parametrize("run", [one_step, scanned_steps])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_donated_step_copies_nothing(name, run):
    canary, state, pool, forward = install(name)
    text = compiled_text(partial(run, canary, forward), state, make_batch(), pool, donate=(0, 2))
    assert large_copies(text) == []
    groups = len(state.groups)
    assert custom_calls(text) == [2 * groups, 2 * groups]  # a phase each, K and V shared, also in the body of a scan


def test_copies_would_be_seen():
    """A step whose state and pool have to survive shows copies of both."""
    canary, state, pool, forward = install("mha")
    kept = "\n".join(large_copies(compiled_text(partial(one_step, canary, forward), state, make_batch(), pool)))
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
    canary, state, pool, forward = install("mha", kvc.CanaryConfig("none"))
    assert (canary, state) == (None, None)
    assert custom_calls(compiled_text(forward, make_batch(), pool, donate=1)) == [0, 0]


@pytest.mark.parametrize("v_half", [True, False])
def test_custom_calls_of_each_piece(v_half):
    config = kvc.CanaryConfig("log", enable_v_half=v_half)
    canary, state, pool, _ = install("mha", config)
    batch = make_batch()
    state_after, step = jax.eval_shape(canary.pre_forward, state, batch, pool)
    plan = step.plans[0].verify
    assert custom_calls(compiled_text(canary.pre_forward, state, batch, pool)) == [1, 1]
    assert custom_calls(compiled_text(canary.post_forward, state_after, step, batch, pool)) == [1, 1]
    assert custom_calls(compiled_text(canary.sweep, state, plan, pool)) == [1, 0]
    assert custom_calls(compiled_text(canary.release, state, batch.out_cache_loc, pool)) == [0, 0]
    records = kvc.extract_records(state, batch.out_cache_loc)
    assert custom_calls(compiled_text(kvc.extract_records, state, batch.out_cache_loc)) == [0, 0]
    assert custom_calls(compiled_text(kvc.insert_records, state, batch.out_cache_loc, records)) == [0, 0]


def test_a_sweep_interval_adds_nothing_to_a_step():
    """Sweeps are calls of their own: the step of a loop that has some is that of a loop without."""
    texts = []
    for interval in (0, 3):
        canary, state, pool = install(MHATokenToKVPool, dataclasses.replace(CONFIG, sweep_interval=interval))
        texts.append(compiled_text(partial(one_step, canary), state, make_batch(), pool, donate=(0, 2)))
    assert texts[0] == texts[1]
    assert custom_calls(texts[0]) == [2, 2]


def test_custom_calls_of_the_operations():
    _, state, _, _ = install("mha")
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
@pytest.mark.parametrize("name", LAYOUTS)
def test_donated_arrays_stay_where_they_are(name, run):
    canary, state, pool, forward = install(name)
    step = jax.jit(partial(run, canary, forward), donate_argnums=(0, 2))
    batch = make_batch()
    before = pointers((state.groups, pool))
    for _ in range(3):
        out = step(state, batch, pool)
        state, pool = out[0] if run is scanned_steps else (out[0], out[3])
        assert pointers((state.groups, pool)) == before
    kernel_runs = kvc.to_int64(state.device_state.kernel_run_counters)
    tag = kvc.CanaryLaunchTag[f"HEAD_K_{state.groups[0].kind.name}"]
    assert kernel_runs[tag] == 6 * (STEPS if run is scanned_steps else 1)


def test_a_donated_sweep_stays_where_it_is():
    canary, state, pool = install(MHATokenToKVPool)
    sweep = jax.jit(canary.sweep, donate_argnums=0)
    root = SimpleNamespace(key=[], value=[], children={})
    root.children[5] = SimpleNamespace(key=[5, 6, 7], value=[1, 2, 3], children={})
    plan = kvc.sweep_plan(root)
    text = sweep.lower(state, plan, pool).compile().as_text()
    assert custom_calls(text) == [1, 0]  # K and V shared
    assert large_copies(text) == []
    before = pointers(state.groups)
    state, _ = sweep(state, plan, pool)
    assert pointers(state.groups) == before


def test_a_donated_release_stays_where_it_is():
    canary, state, pool, _ = install("mha")
    release = jax.jit(canary.release, donate_argnums=0)
    text = release.lower(state, jnp.arange(5), pool).compile().as_text()
    assert large_copies(text) == []
    before = pointers(state.groups)
    state = release(state, jnp.arange(5), pool)
    assert pointers(state.groups) == before
    assert (np.asarray(state.groups[0].k_head)[1:5] == 0xFF).all()


# Expected tokens.

TABLE = {"req_to_token_alloc_size": 131, "max_context_len": 67}
TABLE_TYPE = "s32[131,67]"
assert BUFFER_SIZE <= 4 * 131 * 67
TOKEN_CONFIG = replace(CONFIG, enable_verify_token_assert=True)


def install_with_tokens():
    pool = make_pool(MHATokenToKVPool)
    canary, state = kvc.install_canary(pool, TOKEN_CONFIG, capacities=CAPACITIES, **TABLE)
    batch = make_batch()
    rows = replace(batch.plan_input, expected_tokens_valid_lens=batch.plan_input.prefix_lens)
    return canary, state, replace(batch, plan_input=rows), pool


def sampling_step(canary, state, batch, pool):
    state, *rest = one_step(canary, state, batch, pool)
    return canary.append_expected_tokens(state, batch.plan_input.req_pool_indices, batch.positions + 1, batch.input_ids), *rest


def scanned_sampling_steps(canary, state, batch, pool):
    def body(carry, _):
        state, report, _, pool = sampling_step(canary, carry[0], batch, carry[1])
        return (state, pool), report.summary

    (state, pool), summaries = jax.lax.scan(body, (state, pool), None, length=STEPS)
    return state, summaries, None, pool


def changes_of_the_table(text):
    """Instructions that make a table of expected tokens, other than those that pass one on."""
    made = [op["op"] for op in INSTRUCTION.finditer(text) if op["type"].startswith(TABLE_TYPE)]
    return sorted(name for name in made if name not in ("parameter", "get-tuple-element", "fusion", "call"))


@pytest.mark.parametrize("function", [one_step, sampling_step, scanned_sampling_steps])
def test_a_step_with_expected_tokens(function):
    """A step that stores tokens changes the table where it is, once, although it has read it; one that does not leaves it alone."""
    canary, state, batch, pool = install_with_tokens()
    step = jax.jit(partial(function, canary), donate_argnums=(0, 2))
    text = step.lower(state, batch, pool).compile().as_text()
    assert large_copies(text) == []
    assert custom_calls(text) == [2, 2]
    if jax.default_backend() == "cpu":  # elsewhere the change is a kernel
        assert changes_of_the_table(text) == ([] if function is one_step else ["scatter"])
    before = pointers((state.groups, state.device_state.req_to_verify_expected_tokens, pool))
    for _ in range(3):
        state, _, _, pool = step(state, batch, pool)
        assert pointers((state.groups, state.device_state.req_to_verify_expected_tokens, pool)) == before
    assert np.asarray(state.device_state.req_to_verify_expected_tokens)[2, 5] == (-1 if function is one_step else 28)


def test_donated_expected_tokens_stay_where_they_are():
    canary, state, _, _ = install_with_tokens()
    store = jax.jit(canary.set_expected_tokens, donate_argnums=0)
    lists = jnp.array([3, 1]), jnp.arange(11), jnp.array([7, 4])
    text = store.lower(state, *lists).compile().as_text()
    assert large_copies(text) == []
    before = pointers(state)
    state = store(state, *lists)
    assert pointers(state) == before
    assert np.asarray(state.device_state.req_to_verify_expected_tokens)[3, :8].tolist() == [*range(7), -1]


def test_copies_of_the_table_would_be_seen():
    canary, state, _, _ = install_with_tokens()
    text = compiled_text(canary.set_expected_tokens, state, jnp.array([3]), jnp.arange(5), jnp.array([5]))
    assert TABLE_TYPE in "\n".join(large_copies(text))


def relocated(canary, state, old, new, vacated, pool):
    """Taken out, put elsewhere, and what nobody has any more released, in one program."""
    return canary.release(kvc.insert_records(state, new, kvc.extract_records(state, old)), vacated, pool)


def test_moved_records_stay_in_their_buffers():
    """Nothing of a buffer's size is copied, although the program reads what it overwrites."""
    canary, state, pool = install(MHATokenToKVPool)
    buffers = [np.random.default_rng(i).integers(0, 256, (NUM_SLOTS, kvc.CANARY_SLOT_BYTES), np.uint8) for i in range(4)]
    groups = jax.tree.unflatten(jax.tree.structure(state.groups), map(jnp.asarray, buffers))
    state = kvc.CanaryState(groups, state.device_state)
    old, new, vacated = jnp.arange(3, 12), jnp.arange(4, 13), jnp.array([3])  # old and new places overlap
    move = jax.jit(partial(relocated, canary), donate_argnums=0)
    assert large_copies(move.lower(state, old, new, vacated, pool).compile().as_text()) == []
    assert large_copies(compiled_text(kvc.extract_records, state, old)) == []
    before = pointers(state.groups)
    state = move(state, old, new, vacated, pool)
    assert pointers(state.groups) == before
    for got, was in zip(jax.tree.leaves(state.groups), buffers, strict=True):
        want = was.copy()
        want[4:13], want[3] = was[3:12], 0xFF
        np.testing.assert_array_equal(got, want)
