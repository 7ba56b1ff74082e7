"""What a compiled step consists of: custom calls that work in place, and no copy of a canary buffer or a KV array."""

from __future__ import annotations

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import jax_kvcanary as kvc
from helpers.hlo import (
    CAPACITIES,
    HEAD_DIM,
    HEADS,
    LAYOUTS,
    NUM_SLOTS,
    STEPS,
    TOKENS,
    compiled_text,
    custom_calls,
    install,
    large_copies,
    make_batch,
    one_step,
    pointers,
    scanned_steps,
    two_steps,
    two_steps_by_hand,
)


@pytest.mark.parametrize("run", [one_step, scanned_steps])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_donated_step_copies_nothing(name, run):
    canary, state, pool, forward = install(name)
    text = compiled_text(partial(run, canary, forward), state, make_batch(), pool, donate=(0, 2))
    assert large_copies(text) == []
    groups = len(state.groups)
    assert custom_calls(text) == [0, 0, 2 * groups - 1, 1]  # K and V shared, also in the body of a scan


@pytest.mark.parametrize("run", [two_steps, two_steps_by_hand])
@pytest.mark.parametrize("name", LAYOUTS)
def test_several_forwards_on_one_pool_copy_nothing(name, run):
    """The second forward changes the pool that the launches behind the first one read in place."""
    canary, state, pool, forward = install(name)
    assert large_copies(compiled_text(partial(run, canary, forward), state, make_batch(), pool, donate=(0, 2))) == []


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_report_is_written_by_the_last_launch_alone(name):
    """The host holds a report while it launches the next step, so that the next one lies elsewhere. Launches in command buffers must not
    touch it, not even by a row flag: XLA would record them all again."""
    canary, state, pool, forward = install(name)
    program, shapes = jax.make_jaxpr(partial(one_step, canary, forward), return_shape=True)(state, make_batch(), pool)
    outs = jax.tree.unflatten(jax.tree.structure(shapes), program.jaxpr.outvars)
    calls = [equation for equation in program.jaxpr.eqns if equation.primitive.name == "ffi_call"]
    (last,) = (call for call in calls if call.params["target_name"] == "kvcanary_report_phase")
    aliased = {result for _, result in last.params["input_output_aliases"]}
    own = [result for i, result in enumerate(last.outvars) if i not in aliased]
    assert last is calls[-1]
    assert set(jax.tree.leaves(outs[1])) <= set(own)


def orders(canary, state, batch, pool):
    """The slots of the first forward of a program, which are those given, and of a second one."""
    first = canary.in_order(state, batch)
    assert first is batch  # a loop of one forward pays for nothing
    state, step = canary.pre_forward(state, batch, pool)
    state, _ = canary.post_forward(state, step, batch, pool)
    second = canary.in_order(state, batch)
    assert second is not batch
    return first.out_cache_loc, second.out_cache_loc


def test_the_order_of_forwards_changes_no_slot():
    canary, state, pool, _ = install("mha")
    slots = jnp.array([5, -3, 0, 2**31 - 1, 7], jnp.int32)
    for dtype in (jnp.int32, jnp.int64):
        with jax.enable_x64(True):
            wide = slots.astype(dtype)
        batch = dataclasses.replace(make_batch(), out_cache_loc=wide)
        first, second = jax.jit(partial(orders, canary))(state, batch, pool)
        assert (first.dtype, second.dtype) == (dtype, dtype)
        assert second.tolist() == slots.tolist()
    assert canary.in_order(state, batch) is batch  # outside of a program there is nothing to order


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
    assert custom_calls(compiled_text(forward, make_batch(), pool, donate=1)) == [0, 0, 0, 0]


@pytest.mark.parametrize("v_half", [True, False])
def test_custom_calls_of_each_piece(v_half):
    config = kvc.CanaryConfig("log", enable_v_half=v_half)
    canary, state, pool, _ = install("mha", config)
    batch = make_batch()
    state_after, step = jax.eval_shape(canary.pre_forward, state, batch, pool)
    plan = step.plans[0].verify
    assert custom_calls(compiled_text(canary.pre_forward, state, batch, pool)) == [0, 0, 1, 0]
    assert custom_calls(compiled_text(canary.post_forward, state_after, step, batch, pool)) == [0, 0, 0, 1]
    assert custom_calls(compiled_text(canary.sweep, state, plan, pool)) == [1, 0, 0, 0]
    assert custom_calls(compiled_text(canary.release, state, batch.out_cache_loc, pool)) == [0, 0, 0, 0]
    records = kvc.extract_records(state, batch.out_cache_loc)
    assert custom_calls(compiled_text(kvc.extract_records, state, batch.out_cache_loc)) == [0, 0, 0, 0]
    assert custom_calls(compiled_text(kvc.insert_records, state, batch.out_cache_loc, records)) == [0, 0, 0, 0]


def test_custom_calls_of_the_operations():
    _, state, _, _ = install("mha")
    batch = make_batch()

    def step(buf, device_state):
        plan = kvc.plan(batch.plan_input, batch.req_to_token, verify_capacity=67)
        device_state = kvc.verify_step(buf, plan.verify, device_state, tag=0)
        return kvc.write_step(buf, plan.write, batch.input_ids, batch.positions, batch.out_cache_loc, device_state, tag=0)

    text = compiled_text(step, state.groups[0].k_head, state.device_state, donate=(0, 1))
    assert custom_calls(text) == [1, 1, 0, 0]
    assert large_copies(text) == []


@pytest.mark.parametrize("tree", [False, True])
def test_only_trees_take_scratch_for_their_entries(tree):
    """Four words for each row, and for each token of a tree, of K and of V; four for the launch. Links are a result of the HEAD alone."""
    canary, state, pool, forward = install("mha")
    batch = dataclasses.replace(make_batch(), parents=jnp.full(TOKENS, -1, jnp.int32) if tree else None)
    text = compiled_text(partial(one_step, canary, forward), state, batch, pool, donate=(0, 2))
    own = re.findall(r"= \(u32\[(\d+)\]\S*, u32\[(\d+)\]\S*, [^\n]* custom-call\([^\n]*kvcanary_(?:report_)?phase", text)
    rows = CAPACITIES.write_req_capacity
    scratch, links = 2 * 4 * (rows + (TOKENS if tree else 0)) + 4, 4 * TOKENS + 2 * rows
    assert sorted((int(words), int(more)) for words, more in own) == [(scratch, 1), (scratch, links)]
    assert custom_calls(text) == [0, 0, 1, 1]
    assert large_copies(text) == []


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
