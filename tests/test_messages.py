"""What the package says about wrong arguments: type and text of each error, and that nothing is lost by one."""

from __future__ import annotations

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_kvcanary as kvc
from helpers.backends import host
from helpers.states import assert_same_counters

NUM_SLOTS, ROWS, MAX_REQS, MAX_SEQ_LEN, CAPACITY, TOKENS = 11, 2, 3, 7, 13, 5
LOG = kvc.CanaryConfig("log", ring_capacity=17)
TOKEN_LOG = dataclasses.replace(LOG, enable_verify_token_assert=True)
CAPACITIES = kvc.CanaryLaunchCapacities(CAPACITY, ROWS)
TAGS = (
    "HEAD_K_FULL (0), HEAD_V_FULL (1), TAIL_K_FULL (2), TAIL_V_FULL (3), SWEEP_K_FULL (4), SWEEP_V_FULL (5), HEAD_K_SWA (6), "
    "HEAD_V_SWA (7), TAIL_K_SWA (8), TAIL_V_SWA (9), SWEEP_K_SWA (10), SWEEP_V_SWA (11)"
)
MODES = "NONE (0), PARTIAL (1), ALL (2)"


def ints(*shape, dtype=np.int32):
    return np.ones(shape, dtype)


def floats(*shape):
    return np.ones(shape, np.float32)


def rows(**changes):
    return dataclasses.replace(kvc.PlanInput(ints(ROWS), ints(ROWS), ints(ROWS)), **changes)


def make_plan():
    return kvc.reference.plan(rows(), ints(MAX_REQS, MAX_SEQ_LEN), verify_capacity=CAPACITY)


def make_state(**changes):
    return dataclasses.replace(kvc.CanaryDeviceState.allocate(LOG), **changes)


def make_log(**changes):
    return make_state(violation_log=dataclasses.replace(kvc.ViolationLog.allocate(ring_capacity=17), **changes))


def source(**changes):
    return kvc.RealKvSource(**{"array": floats(NUM_SLOTS, 2, 4), "num_bytes_per_token": 32, "read_bytes": 32, **changes})


def make_pool(num_slots=NUM_SLOTS):
    return kvc.pools.MHATokenToKVPool.allocate(num_slots=num_slots, num_layers=2, num_kv_heads=2, head_dim=4)


def make_batch(**changes):
    extend = kvc.ForwardBatch.extend(
        input_ids=ints(TOKENS),
        positions=ints(TOKENS),
        out_cache_loc=ints(TOKENS),
        req_pool_indices=ints(ROWS),
        prefix_lens=ints(ROWS),
        extend_seq_lens=ints(ROWS),
        req_to_token=ints(MAX_REQS, MAX_SEQ_LEN),
    )
    return dataclasses.replace(extend, **changes)


def install(**changes):
    return kvc.install_canary(**{"pool": make_pool(), "config": LOG, "capacities": CAPACITIES, **changes})


# Each operation with good arguments, some of them replaced.


def call_plan(**changes):
    good = {"inputs": rows(), "req_to_token": ints(MAX_REQS, MAX_SEQ_LEN), "verify_capacity": CAPACITY}
    return kvc.plan(**{**good, **changes})


def call_verify(plan_changes=None, **changes):
    plan = dataclasses.replace(make_plan().verify, **(plan_changes or {}))
    good = {"canary_buf": kvc.fresh_records(NUM_SLOTS), "plan": plan, "device_state": make_state(), "tag": 0}
    return kvc.verify_step(**{**good, **changes})


def call_write(plan_changes=None, **changes):
    good = {
        "canary_buf": kvc.fresh_records(NUM_SLOTS),
        "plan": dataclasses.replace(make_plan().write, **(plan_changes or {})),
        "input_ids": ints(TOKENS),
        "positions": ints(TOKENS),
        "out_cache_loc": ints(TOKENS),
        "device_state": make_state(),
        "tag": 0,
    }
    return kvc.write_step(**{**good, **changes})


def call_allocate(config=TOKEN_LOG, **sizes):
    return kvc.CanaryDeviceState.allocate(config, **{"req_to_token_alloc_size": 3, "max_context_len": 5, **sizes})


def call_loop(method, config=LOG, **changes):
    canary, state = install(config=config)
    batch, pool = make_batch(), make_pool()
    arguments = {"state": state, "batch": batch, "pool": pool}
    if method == "post_forward":
        arguments["step"] = kvc.CanaryStep((make_plan(),), (batch.out_cache_loc,))
    elif method == "sweep":
        arguments = {"state": state, "verify_plan": make_plan().verify, "pool": pool}
    elif method == "release":
        arguments = {"state": state, "slots": ints(3), "pool": pool}
    elif method == "mark_init_finished":
        arguments = {"state": state}
    return getattr(canary, method)(**{**arguments, **changes})


pre_forward = partial(call_loop, "pre_forward")
post_forward = partial(call_loop, "post_forward")
sweep = partial(call_loop, "sweep")
release = partial(call_loop, "release")

PLAN = [
    (call_plan, {"inputs": ints(ROWS)}, TypeError, "`inputs` is of type ndarray, but it must be a PlanInput."),
    (call_plan, {"inputs": None}, TypeError, "`inputs` is of type NoneType, but it must be a PlanInput."),
    (
        call_plan,
        {"inputs": rows(req_pool_indices=floats(ROWS))},
        TypeError,
        "`inputs.req_pool_indices` has dtype float32, but it must be int32 or int64.",
    ),
    (
        call_plan,
        {"inputs": rows(req_pool_indices=ints(ROWS, 1))},
        ValueError,
        "`inputs.req_pool_indices` has shape [2, 1], but one request row for each row of the batch needs shape [any].",
    ),
    (
        call_plan,
        {"inputs": rows(prefix_lens=ints(ROWS, dtype=np.uint32))},
        TypeError,
        "`inputs.prefix_lens` has dtype uint32, but it must be int32 or int64.",
    ),
    (
        call_plan,
        {"inputs": rows(prefix_lens=ints(3))},
        ValueError,
        "`inputs.prefix_lens` has shape [3], but the batch of 2 rows needs shape [2].",
    ),
    (
        call_plan,
        {"inputs": rows(extend_seq_lens=np.ones(ROWS, bool))},
        TypeError,
        "`inputs.extend_seq_lens` has dtype bool, but it must be int32 or int64.",
    ),
    (
        call_plan,
        {"inputs": rows(extend_seq_lens=ints())},
        ValueError,
        "`inputs.extend_seq_lens` has shape [], but the batch of 2 rows needs shape [2].",
    ),
    (
        call_plan,
        {"inputs": rows(extend_seq_lens=None)},
        TypeError,
        "`inputs.extend_seq_lens` has dtype object, but it must be int32 or int64.",
    ),
    (
        call_plan,
        {"req_to_token": ints(MAX_SEQ_LEN)},
        ValueError,
        "`req_to_token` has shape [7], but a table of slots by request row and position needs shape [any, any].",
    ),
    (
        call_plan,
        {"req_to_token": ints(MAX_REQS, MAX_SEQ_LEN, dtype=np.int16)},
        TypeError,
        "`req_to_token` has dtype int16, but it must be int32 or int64.",
    ),
    (call_plan, {"verify_capacity": -1}, ValueError, "`verify_capacity` is -1, but it must be between 0 and 2147483646."),
    (call_plan, {"verify_capacity": 2**31 - 1}, ValueError, "`verify_capacity` is 2147483647, but it must be between 0 and 2147483646."),
    (call_plan, {"verify_capacity": 5.0}, TypeError, "`verify_capacity` is 5.0 of type float, but it must be an int."),
    (call_plan, {"verify_capacity": None}, TypeError, "`verify_capacity` is None of type NoneType, but it must be an int."),
    (
        call_plan,
        {"write_req_capacity": 1},
        ValueError,
        "`write_req_capacity` is 1, but it must be between 2 and 2147483646, and at least the batch size 2.",
    ),
    (call_plan, {"write_req_capacity": True}, TypeError, "`write_req_capacity` is True of type bool, but it must be an int."),
    (call_plan, {"swa_window_size": -1}, ValueError, "`swa_window_size` is -1, but it must be between 0 and 2147483647."),
    (
        call_plan,
        {"kv_token_id_vs_position_offset": 2**31},
        ValueError,
        "`kv_token_id_vs_position_offset` is 2147483648, but it must be between -2147483647 and 2147483647.",
    ),
    (
        call_plan,
        {"full_to_swa_index_mapping": ints(1, NUM_SLOTS)},
        ValueError,
        "`full_to_swa_index_mapping` has shape [1, 11], but a table from full-pool slots to the group's own needs shape [any].",
    ),
    (
        call_plan,
        {"full_to_swa_index_mapping": floats(NUM_SLOTS)},
        TypeError,
        "`full_to_swa_index_mapping` has dtype float32, but it must be int32 or int64.",
    ),
    (
        call_plan,
        {"expected_tokens": ints(MAX_REQS, MAX_SEQ_LEN)},
        ValueError,
        "`inputs.expected_tokens_valid_lens` is None, but it must be an array when `expected_tokens` is given.",
    ),
    (
        call_plan,
        {"expected_tokens": ints(MAX_REQS), "inputs": rows(expected_tokens_valid_lens=ints(ROWS))},
        ValueError,
        "`expected_tokens` has shape [3], but a table of tokens by request row and position needs shape [any, any].",
    ),
    (
        call_plan,
        {"expected_tokens": ints(MAX_REQS, MAX_SEQ_LEN, dtype=np.uint8), "inputs": rows(expected_tokens_valid_lens=ints(ROWS))},
        TypeError,
        "`expected_tokens` has dtype uint8, but it must be int32 or int64.",
    ),
    (
        call_plan,
        {"expected_tokens": ints(MAX_REQS, MAX_SEQ_LEN), "inputs": rows(expected_tokens_valid_lens=ints(ROWS + 1))},
        ValueError,
        "`inputs.expected_tokens_valid_lens` has shape [3], but the batch of 2 rows needs shape [2].",
    ),
]

#: What verify and write check alike.
LAUNCH = [
    case
    for call, plan_name in ((call_verify, "VerifyPlan, such as the `verify`"), (call_write, "WritePlan, such as the `write`"))
    for case in (
        (call, {"canary_buf": None}, TypeError, "`canary_buf` is of type NoneType, but it must be an array."),
        (call, {"canary_buf": ints(NUM_SLOTS, 32)}, TypeError, "`canary_buf` has dtype int32, but it must be uint8."),
        (
            call,
            {"canary_buf": ints(NUM_SLOTS, 31, dtype=np.uint8)},
            ValueError,
            "`canary_buf` has shape [11, 31], but a canary buffer of 32-byte records needs shape [any, 32].",
        ),
        (
            call,
            {"canary_buf": ints(NUM_SLOTS * 32, dtype=np.uint8)},
            ValueError,
            "`canary_buf` has shape [352], but a canary buffer of 32-byte records needs shape [any, 32].",
        ),
        (
            call,
            {"canary_buf": ints(0, 32, dtype=np.uint8)},
            ValueError,
            "`canary_buf.shape[0]` is 0, but it must be between 1 and 2147483647, since a pool has at least its padding slot.",
        ),
        (call, {"plan": make_plan()}, TypeError, f"`plan` is of type Plan, but it must be a {plan_name} of a Plan."),
        (call, {"plan": None}, TypeError, f"`plan` is of type NoneType, but it must be a {plan_name} of a Plan."),
        (call, {"tag": 12}, ValueError, f"`tag` is 12, but it must be one of {TAGS}."),
        (call, {"tag": -1}, ValueError, f"`tag` is -1, but it must be one of {TAGS}."),
        (call, {"tag": "HEAD_K_FULL"}, ValueError, f"`tag` is 'HEAD_K_FULL', but it must be one of {TAGS}."),
        (call, {"tag": None}, ValueError, f"`tag` is None, but it must be one of {TAGS}."),
        (call, {"real_kv_hash_mode": 3}, ValueError, f"`real_kv_hash_mode` is 3, but it must be one of {MODES}."),
        (call, {"real_kv_hash_mode": "all"}, ValueError, f"`real_kv_hash_mode` is 'all', but it must be one of {MODES}."),
        (
            call,
            {"real_kv_sources": (source(),) * 5},
            ValueError,
            "`real_kv_sources` has 5 sources, but one launch folds at most 4.",
        ),
        (
            call,
            {"real_kv_sources": (source(), floats(3))},
            TypeError,
            "`real_kv_sources[1]` is of type ndarray, but it must be a RealKvSource.",
        ),
        (
            call,
            {"real_kv_sources": (source(), source(array=floats(NUM_SLOTS - 1, 2, 4)))},
            ValueError,
            "`real_kv_sources[1]` has the bytes of 10 slots, but the canary buffer has 11 slots.",
        ),
        (
            call,
            {"device_state": kvc.ViolationLog.allocate(ring_capacity=3)},
            TypeError,
            "`device_state` is of type ViolationLog, but it must be a CanaryDeviceState.",
        ),
        (
            call,
            {"device_state": make_state(kernel_run_counters=ints(12, 2))},
            TypeError,
            "`device_state.kernel_run_counters` has dtype int32, but it must be uint32.",
        ),
        (
            call,
            {"device_state": make_state(slot_run_counters=ints(6, 2, dtype=np.uint32))},
            ValueError,
            "`device_state.slot_run_counters` has shape [6, 2], but the state of a canary needs shape [12, 2].",
        ),
        (
            call,
            {"device_state": make_state(fail_reason_counters=ints(12, dtype=np.uint32))},
            ValueError,
            "`device_state.fail_reason_counters` has shape [12], but the state of a canary needs shape [12, 8].",
        ),
        (
            call,
            {"device_state": make_state(verify_skip_counters=floats(12))},
            TypeError,
            "`device_state.verify_skip_counters` has dtype float32, but it must be uint32.",
        ),
        (
            call,
            {"device_state": make_state(enable_chain_position_assert=ints(2))},
            ValueError,
            "`device_state.enable_chain_position_assert` has shape [2], but the state of a canary needs shape [1].",
        ),
        (
            call,
            {"device_state": make_log(violation_ring=ints(17, 8, dtype=np.uint32))},
            ValueError,
            "`device_state.violation_log.violation_ring` has shape [17, 8], but the state of a canary needs shape [any, 8, 2].",
        ),
        (
            call,
            {"device_state": make_log(violation_write_index=ints())},
            ValueError,
            "`device_state.violation_log.violation_write_index` has shape [], but the state of a canary needs shape [1].",
        ),
    )
]

VERIFY = [
    (
        call_verify,
        {"plan_changes": {"verify_expected_tokens": ints(CAPACITY - 1)}},
        ValueError,
        "`plan.verify_expected_tokens` has shape [12], but a verify plan of 13 entries needs shape [13].",
    ),
    (
        call_verify,
        {"plan_changes": {"verify_slot_indices": floats(CAPACITY)}},
        TypeError,
        "`plan.verify_slot_indices` has dtype float32, but it must be int32 or int64.",
    ),
    (
        call_verify,
        {"plan_changes": {"verify_num_valid": ints()}},
        ValueError,
        "`plan.verify_num_valid` has shape [], but a verify plan of 13 entries needs shape [1].",
    ),
    (
        call_verify,
        {"plan_changes": {"enable": np.ones(1, bool)}},
        TypeError,
        "`plan.enable` has dtype bool, but it must be int32 or int64.",
    ),
    (call_verify, {"check_expected_token": 1}, TypeError, "`check_expected_token` is 1 of type int, but it must be True or False."),
    (
        call_verify,
        {"check_expected_token": None},
        TypeError,
        "`check_expected_token` is None of type NoneType, but it must be True or False.",
    ),
]

WRITE = [
    (
        call_write,
        {"plan_changes": {"write_offsets": ints(ROWS)}},
        ValueError,
        "`plan.write_offsets` has shape [2], but a write plan of 2 rows needs shape [3].",
    ),
    (
        call_write,
        {"plan_changes": {"write_seed_slot_indices": floats(ROWS)}},
        TypeError,
        "`plan.write_seed_slot_indices` has dtype float32, but it must be int32 or int64.",
    ),
    (
        call_write,
        {"plan_changes": {"write_num_valid_reqs": ints(2)}},
        ValueError,
        "`plan.write_num_valid_reqs` has shape [2], but a write plan of 2 rows needs shape [1].",
    ),
    (call_write, {"input_ids": floats(TOKENS)}, TypeError, "`input_ids` has dtype float32, but it must be int32 or int64."),
    (call_write, {"input_ids": ints(1, TOKENS)}, ValueError, "`input_ids` has shape [1, 5], but one token each needs shape [any]."),
    (
        call_write,
        {"positions": ints(TOKENS + 1)},
        ValueError,
        "`positions` has shape [6], but one value for each of the 5 tokens of `input_ids` needs shape [5].",
    ),
    (
        call_write,
        {"positions": ints(TOKENS, dtype=np.uint8)},
        TypeError,
        "`positions` has dtype uint8, but it must be int32 or int64.",
    ),
    (
        call_write,
        {"out_cache_loc": ints(TOKENS, 1)},
        ValueError,
        "`out_cache_loc` has shape [5, 1], but one value for each of the 5 tokens of `input_ids` needs shape [5].",
    ),
    (
        call_write,
        {"expected_input_tokens": ints(TOKENS)},
        ValueError,
        "`expected_input_positions` is None, but it must be an array when `expected_input_tokens` is given.",
    ),
    (
        call_write,
        {"expected_input_positions": ints(TOKENS)},
        ValueError,
        "`expected_input_tokens` is None, but it must be an array when `expected_input_positions` is given.",
    ),
    (
        call_write,
        {"expected_input_tokens": ints(TOKENS - 1), "expected_input_positions": ints(TOKENS)},
        ValueError,
        "`expected_input_tokens` has shape [4], but one value for each of the 5 tokens of `input_ids` needs shape [5].",
    ),
    (
        call_write,
        {"expected_input_tokens": ints(TOKENS), "expected_input_positions": floats(TOKENS)},
        TypeError,
        "`expected_input_positions` has dtype float32, but it must be int32 or int64.",
    ),
]

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

CASES = [*PLAN, *LAUNCH, *VERIFY, *WRITE, *ALLOCATE, *SOURCE, *INSTALL, *LOOP, *BATCH, *HASHES, *KINDS]


def case_id(case):
    call, changes, _, text = case
    name = getattr(call, "__name__", None) or "-".join(str(arg) for arg in getattr(call, "args", ()) if isinstance(arg, str)) or "attach"
    return f"{name}-{'-'.join(changes)}-{len(text)}"


@pytest.mark.parametrize(("call", "changes", "error", "text"), CASES, ids=map(case_id, CASES))
def test_message(call, changes, error, text):
    with pytest.raises(error) as caught:
        call(**changes)
    assert (type(caught.value), str(caught.value)) == (error, text)


def test_texts_are_sentences_that_name_an_argument():
    for _, _, _, text in CASES:
        assert re.fullmatch(r"`[a-z_0-9.\[\]]+` [^\n]+\.", text), text


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
