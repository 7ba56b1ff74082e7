"""What the rest of the package says about wrong arguments, and that nothing is lost by one."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_kvcanary as kvc
from helpers.backends import host
from helpers.messages import (
    LOG,
    MODES,
    NUM_SLOTS,
    TAGS,
    TOKEN_LOG,
    TOKENS,
    assert_message,
    call_allocate,
    call_loop,
    call_verify,
    call_write,
    case_id,
    floats,
    install,
    ints,
    make_batch,
    make_plan,
    make_pool,
    make_state,
    post_forward,
    pre_forward,
    release,
    rows,
    source,
    sweep,
)
from helpers.states import assert_same_counters

ALLOCATE = [
    (
        call_allocate,
        {"req_to_token_alloc_size": None},
        ValueError,
        "`req_to_token_alloc_size` is None, but it must be an int when `config.enable_verify_token_assert` is on.",
    ),
    (
        call_allocate,
        {"max_context_len": None},
        ValueError,
        "`max_context_len` is None, but it must be an int when `config.enable_verify_token_assert` is on.",
    ),
    (
        call_allocate,
        {"config": LOG},
        ValueError,
        "`req_to_token_alloc_size` is 3, but it must be None when `config.enable_verify_token_assert` is off.",
    ),
    (
        call_allocate,
        {"config": LOG, "req_to_token_alloc_size": None},
        ValueError,
        "`max_context_len` is 5, but it must be None when `config.enable_verify_token_assert` is off.",
    ),
    (
        call_allocate,
        {"req_to_token_alloc_size": 0},
        ValueError,
        "`req_to_token_alloc_size` is 0, but it must be between 1 and 2147483647.",
    ),
    (call_allocate, {"max_context_len": 5.0}, TypeError, "`max_context_len` is 5.0 of type float, but it must be an int."),
    (kvc.ViolationLog.allocate, {"ring_capacity": 0}, ValueError, "`ring_capacity` is 0, but it must be between 1 and 2147483647."),
    (kvc.fresh_records, {"num_slots": 0}, ValueError, "`num_slots` is 0, but it must be between 1 and 2147483647."),
]

BYTES_RULE = "byte counts must be multiples of 8, the width of one hashed word."
SOURCE = [
    (source, {"page_size": 0}, ValueError, "`page_size` is 0, but it must be between 1 and 2147483647."),
    (source, {"page_size": 2.0}, TypeError, "`page_size` is 2.0 of type float, but it must be an int."),
    (source, {"num_bytes_per_token": 0}, ValueError, "`num_bytes_per_token` is 0, but it must be between 8 and 281474976710656."),
    (source, {"num_bytes_per_token": 36}, ValueError, f"`num_bytes_per_token` is 36, but {BYTES_RULE}"),
    (source, {"num_bytes_per_token": None}, TypeError, "`num_bytes_per_token` is None of type NoneType, but it must be an int."),
    (source, {"read_bytes": 0}, ValueError, "`read_bytes` is 0, but it must be between 8 and 281474976710656."),
    (source, {"read_bytes": 12}, ValueError, f"`read_bytes` is 12, but {BYTES_RULE}"),
    (source, {"read_bytes": 40}, ValueError, "`read_bytes` is 40, but a slot has `num_bytes_per_token` = 32 bytes to read."),
    (source, {"byte_offset": -8}, ValueError, "`byte_offset` is -8, but it must be between 0 and 281474976710656."),
    (source, {"byte_offset": 4}, ValueError, f"`byte_offset` is 4, but {BYTES_RULE}"),
    (source, {"row_stride_bytes": 0}, ValueError, "`row_stride_bytes` is 0, but it must be between 8 and 281474976710656."),
    (source, {"row_stride_bytes": 33}, ValueError, f"`row_stride_bytes` is 33, but {BYTES_RULE}"),
    (
        source,
        {"token_stride_bytes": 2**48 + 8},
        ValueError,
        "`token_stride_bytes` is 281474976710664, but it must be between 8 and 281474976710656.",
    ),
    (source, {"token_stride_bytes": 42}, ValueError, f"`token_stride_bytes` is 42, but {BYTES_RULE}"),
    (
        source,
        {"token_stride_bytes": 24},
        ValueError,
        "`token_stride_bytes` is 24, but it must be at least `num_bytes_per_token` = 32, or neighbouring slots would share bytes.",
    ),
    (source, {"array": np.float32(1)}, ValueError, "`array` is a scalar, but a source needs at least one axis."),
    (source, {"array": np.ones((NUM_SLOTS, 17), jnp.bfloat16)}, ValueError, f"`row_stride_bytes` is 34, but {BYTES_RULE}"),
    (
        source,
        {"byte_offset": 328},
        ValueError,
        "`array` has 352 bytes, but slot 0 needs the bytes from 328 to 360.",
    ),
    (
        source,
        {"array": np.ones((NUM_SLOTS, 64), jnp.int4)},
        NotImplementedError,
        "`array` has dtype int4, whose elements are smaller than a byte; pass the packed bytes as uint8.",
    ),
]

INSTALL = [
    (install, {"config": "log"}, TypeError, "`config` is of type str, but it must be a CanaryConfig."),
    (install, {"capacities": (5, 3)}, TypeError, "`capacities` is of type tuple, but it must be a CanaryLaunchCapacities."),
    (install, {"swa_window_size": -1}, ValueError, "`swa_window_size` is -1, but it must be between 0 and 2147483647."),
    (install, {"swa_window_size": 5.0}, TypeError, "`swa_window_size` is 5.0 of type float, but it must be an int."),
    (
        install,
        {"kv_token_id_vs_position_offset": None},
        TypeError,
        "`kv_token_id_vs_position_offset` is None of type NoneType, but it must be an int.",
    ),
    (
        install,
        {"config": TOKEN_LOG, "max_context_len": 5},
        ValueError,
        "`req_to_token_alloc_size` is None, but it must be an int when `config.enable_verify_token_assert` is on.",
    ),
    (
        install,
        {"max_context_len": 5},
        ValueError,
        "`max_context_len` is 5, but it must be None when `config.enable_verify_token_assert` is off.",
    ),
    (
        install,
        {"config": dataclasses.replace(LOG, real_kv_layers=(0, 2))},
        ValueError,
        "`config.real_kv_layers` names layer 2, but the pool has 2 layers.",
    ),
    (
        partial(kvc.attach_canary_buffers, make_pool(), LOG),
        {"kv_token_id_vs_position_offset": 2**31},
        ValueError,
        "`kv_token_id_vs_position_offset` is 2147483648, but it must be between -2147483647 and 2147483647.",
    ),
    (
        kvc.attach_canary_buffers,
        {"pool": make_pool(), "config": None},
        TypeError,
        "`config` is of type NoneType, but it must be a CanaryConfig.",
    ),
    (
        kvc.register_pool_attacher,
        {"pool_class": 3, "attacher": len},
        TypeError,
        "`pool_class` is 3, but it must be a class or its qualified name as text.",
    ),
    (
        kvc.register_pool_attacher,
        {"pool_class": "engine.Pool", "attacher": None},
        TypeError,
        "`attacher` is None, but it must be a function of a pool and a configuration.",
    ),
]

INPUT_ASSERT = dataclasses.replace(LOG, enable_write_input_assert=True)
LOOP = [
    (pre_forward, {"state": None}, TypeError, "`state` is of type NoneType, but it must be a CanaryState."),
    (pre_forward, {"state": make_state()}, TypeError, "`state` is of type CanaryDeviceState, but it must be a CanaryState."),
    (pre_forward, {"batch": ints(3)}, TypeError, "`batch` is of type ndarray, but it must be a ForwardBatch."),
    (
        pre_forward,
        {"batch": make_batch(expected_input_tokens=ints(TOKENS))},
        ValueError,
        "`batch.expected_input_tokens` is an array, but it must be None when `enable_write_input_assert` is off.",
    ),
    (
        pre_forward,
        {"batch": make_batch(expected_input_positions=ints(TOKENS))},
        ValueError,
        "`batch.expected_input_positions` is an array, but it must be None when `enable_write_input_assert` is off.",
    ),
    (
        pre_forward,
        {"config": INPUT_ASSERT},
        ValueError,
        "`batch.expected_input_tokens` is None, but it must be an array when `enable_write_input_assert` is on.",
    ),
    (
        pre_forward,
        {"config": INPUT_ASSERT, "batch": make_batch(expected_input_tokens=ints(TOKENS))},
        ValueError,
        "`batch.expected_input_positions` is None, but it must be an array when `enable_write_input_assert` is on.",
    ),
    (
        pre_forward,
        {"batch": make_batch(plan_input=rows(req_pool_indices=ints(3), prefix_lens=ints(3), extend_seq_lens=ints(3)))},
        ValueError,
        "`write_req_capacity` is 2, but it must be between 3 and 2147483646, and at least the batch size 3.",
    ),
    (
        pre_forward,
        {"batch": make_batch(out_cache_loc=floats(TOKENS))},
        TypeError,
        "`out_cache_loc` has dtype float32, but it must be int32 or int64.",
    ),
    (post_forward, {"state": ()}, TypeError, "`state` is of type tuple, but it must be a CanaryState."),
    (
        post_forward,
        {"step": make_plan()},
        TypeError,
        "`step` is of type Plan, but it must be a CanaryStep, as pre_forward returned it.",
    ),
    (
        post_forward,
        {"pool": (1, 2)},
        ValueError,
        "`pool` of class tuple has nothing at ('k_buffer', 0): step 'k_buffer' failed on a tuple.",
    ),
    (
        post_forward,
        {"pool": make_pool(NUM_SLOTS - 1)},
        ValueError,
        "`real_kv_sources[0]` has the bytes of 10 slots, but the canary buffer has 11 slots.",
    ),
    (sweep, {"kind": kvc.PoolKind.SWA}, ValueError, "`kind` is SWA, but this canary has the groups FULL."),
    (sweep, {"state": None}, TypeError, "`state` is of type NoneType, but it must be a CanaryState."),
    (
        sweep,
        {"verify_plan": make_plan()},
        TypeError,
        "`plan` is of type Plan, but it must be a VerifyPlan, such as the `verify` of a Plan.",
    ),
    (release, {"slots": floats(3)}, TypeError, "`slots` has dtype float32, but it must be int32 or int64."),
    (release, {"slots": ints(3, 1)}, ValueError, "`slots` has shape [3, 1], but full-pool slots to release needs shape [any]."),
    (release, {"state": make_state()}, TypeError, "`state` is of type CanaryDeviceState, but it must be a CanaryState."),
    (
        partial(call_loop, "mark_init_finished"),
        {"state": make_state()},
        TypeError,
        "`state` is of type CanaryDeviceState, but it must be a CanaryState.",
    ),
]

BATCH = [
    (
        kvc.ForwardBatch.decode,
        {**dict.fromkeys(("input_ids", "out_cache_loc", "req_pool_indices", "req_to_token")), "positions": floats(2)},
        TypeError,
        "`positions` has dtype float32, but it must be int32 or int64.",
    ),
    (
        kvc.ForwardBatch.target_verify,
        {
            **dict.fromkeys(("input_ids", "positions", "out_cache_loc", "req_pool_indices", "req_to_token")),
            "seq_lens": ints(2),
            "draft_token_num": -1,
        },
        ValueError,
        "`draft_token_num` is -1, but it must be between 0 and 2147483647.",
    ),
    (
        kvc.ForwardBatch.target_verify,
        {
            **dict.fromkeys(("input_ids", "positions", "out_cache_loc", "req_pool_indices", "req_to_token")),
            "seq_lens": ints(2),
            "draft_token_num": 6,
            "topk": 2,
        },
        ValueError,
        "`parents` is None, but with `topk` = 2 the draft tokens of a row are a tree, and it must name the entry that each token follows.",
    ),
    (
        kvc.ForwardBatch.draft_decode,
        {
            **dict.fromkeys(("input_ids", "positions", "out_cache_loc", "req_pool_indices", "req_to_token")),
            "seq_lens": ints(2),
            "draft_step": -1,
        },
        ValueError,
        "`draft_step` is -1, but it must be between 0 and 2147483647.",
    ),
    (
        kvc.ForwardBatch.draft_decode,
        {
            **dict.fromkeys(("input_ids", "positions", "out_cache_loc", "req_pool_indices", "req_to_token")),
            "seq_lens": ints(2),
            "draft_step": ints(2),
        },
        ValueError,
        "`draft_step` has shape [2], but the number of draft steps before this one needs shape [].",
    ),
    (
        kvc.ForwardBatch.draft_extend,
        {
            **dict.fromkeys(("input_ids", "positions", "out_cache_loc", "req_pool_indices", "req_to_token")),
            "seq_lens": ints(2),
            "extend_seq_lens": ints(3),
        },
        ValueError,
        "`extend_seq_lens` has shape [3], but one length for each row of `seq_lens` needs shape [2].",
    ),
]


HASHES = [
    (kvc.splitmix64, {"x": 1.0}, TypeError, "`x` is 1.0 of type float, but it must be an int."),
    (kvc.splitmix64, {"x": True}, TypeError, "`x` is True of type bool, but it must be an int."),
    (kvc.mix3, {"a": 1, "b": "2", "c": 3}, TypeError, "`b` is '2' of type str, but it must be an int."),
    (kvc.mix3, {"a": 1, "b": 2, "c": None}, TypeError, "`c` is None of type NoneType, but it must be an int."),
    (kvc.to_int64, {"words": ints(3, 2)}, TypeError, "`words` has dtype int32, but it must be uint32."),
    (
        kvc.to_int64,
        {"words": ints(2, 3, dtype=np.uint32)},
        ValueError,
        "`words` has shape [2, 3], but a word-pair array has a last axis of 2, low word first.",
    ),
    (
        kvc.to_int64,
        {"words": ints(dtype=np.uint32)},
        ValueError,
        "`words` has shape [], but a word-pair array has a last axis of 2, low word first.",
    ),
]

#: What is of another kind altogether.
KINDS = [
    *(
        (call, {"real_kv_sources": bad}, TypeError, f"`real_kv_sources` is of type {kind}, but it must be a sequence of RealKvSource.")
        for call in (call_verify, call_write)
        for bad, kind in ((source(), "RealKvSource"), (None, "NoneType"), (3, "int"))
    ),
    (
        call_verify,
        {"real_kv_sources": [source(array=[1, 2])]},
        TypeError,
        "`real_kv_sources[0].array` is of type list, but it must be an array.",
    ),
    (
        call_verify,
        {"device_state": make_state(violation_log=None)},
        TypeError,
        "`device_state.violation_log` is of type NoneType, but it must be a ViolationLog.",
    ),
    (
        call_verify,
        {"device_state": make_state(kernel_run_counters=None)},
        TypeError,
        "`device_state.kernel_run_counters` is of type NoneType, but it must be an array.",
    ),
    (call_verify, {"plan_changes": {"enable": [1]}}, TypeError, "`plan.enable` is of type list, but it must be an array."),
    (
        call_verify,
        {"plan_changes": {"verify_slot_indices": None}},
        TypeError,
        "`plan.verify_slot_indices` is of type NoneType, but it must be an array.",
    ),
    (
        call_write,
        {"plan_changes": {"write_seed_slot_indices": [1, 2]}},
        TypeError,
        "`plan.write_seed_slot_indices` is of type list, but it must be an array.",
    ),
    (kvc.to_int64, {"words": [[1, 2]]}, TypeError, "`words` is of type list, but it must be an array."),
    (call_allocate, {"config": "log"}, TypeError, "`config` is of type str, but it must be a CanaryConfig."),
    (pre_forward, {"batch": None}, TypeError, "`batch` is of type NoneType, but it must be a ForwardBatch."),
    (post_forward, {"batch": None}, TypeError, "`batch` is of type NoneType, but it must be a ForwardBatch."),
    (sweep, {"kind": 2}, ValueError, "`kind` is 2, but it must be one of FULL (0), SWA (1)."),
    (call_verify, {"tag": True}, ValueError, f"`tag` is True, but it must be one of {TAGS}."),
    (call_verify, {"real_kv_hash_mode": True}, ValueError, f"`real_kv_hash_mode` is True, but it must be one of {MODES}."),
]


CASES = [*ALLOCATE, *SOURCE, *INSTALL, *LOOP, *BATCH, *HASHES, *KINDS]


@pytest.mark.parametrize(("call", "changes", "error", "text"), CASES, ids=map(case_id, CASES))
def test_message(call, changes, error, text):
    assert_message(call, changes, error, text)


# Under jit an argument of a wrong shape is found while tracing, before anything is donated.


def donating(function, **static):
    return jax.jit(partial(function, **static), donate_argnames=("canary_buf", "device_state"))


def test_a_refused_write_donates_nothing():
    write = donating(kvc.write_step, tag=0)
    plan = make_plan().write
    state, buf = make_state(), kvc.fresh_records(NUM_SLOTS)
    with pytest.raises(ValueError, match="`positions` has shape"):
        write(buf, plan, ints(TOKENS), ints(TOKENS + 1), ints(TOKENS), device_state=state)
    with pytest.raises(TypeError, match="`out_cache_loc` has dtype"):
        write(buf, plan, ints(TOKENS), ints(TOKENS), floats(TOKENS), device_state=state)
    assert not buf.is_deleted()
    want_buf, want_state = kvc.write_step(kvc.fresh_records(NUM_SLOTS), plan, ints(TOKENS), ints(TOKENS), ints(TOKENS), make_state(), tag=0)
    got_buf, got_state = write(buf, plan, ints(TOKENS), ints(TOKENS), ints(TOKENS), device_state=state)
    assert buf.is_deleted()
    np.testing.assert_array_equal(got_buf, want_buf)
    assert_same_counters(got_state, want_state)


@pytest.mark.parametrize("bad", [{"batch": make_batch(positions=ints(TOKENS + 1))}, {"pool": make_pool(NUM_SLOTS - 1)}])
def test_a_refused_step_donates_nothing(bad):
    canary, state = install(config=dataclasses.replace(LOG, real_kv_layers=(0, -1)))
    untouched = host(install(config=dataclasses.replace(LOG, real_kv_layers=(0, -1)))[1])

    @partial(jax.jit, donate_argnums=(0, 2))
    def step(state, batch, pool):
        return canary.wrap(lambda _, pool: (None, pool))(state, batch, pool)

    good = {"batch": jax.tree.map(jnp.asarray, make_batch()), "pool": make_pool()}
    with pytest.raises(ValueError, match=r"has shape|has the bytes"):
        step(state, *{**good, **bad}.values())
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((state, good)))
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(untouched), strict=True):
        np.testing.assert_array_equal(got, want)
    after = step(state, *good.values())[0]
    kernel_runs = kvc.to_int64(after.device_state.kernel_run_counters)
    assert kernel_runs.tolist() == [2, 2, 2, 2, *[0] * 8]


def test_a_wrapped_forward_needs_batch_and_pool():
    canary, state = install()
    wrapped = canary.wrap(lambda batch, pool: (batch, pool))
    with pytest.raises(TypeError, match=r"`batch` and `pool` as its last two positional arguments\.$"):
        wrapped(state, make_batch())
    with pytest.raises(TypeError, match=r"^`batch` is of type int, but it must be a ForwardBatch\.$"):
        wrapped(state, 1, make_pool())
