"""What plan, verify and write say about wrong arguments: type and text of each error."""

from __future__ import annotations

import numpy as np
import pytest

import jax_kvcanary as kvc
from helpers.messages import (
    CAPACITY,
    MAX_REQS,
    MAX_SEQ_LEN,
    MODES,
    NUM_SLOTS,
    ROWS,
    TAGS,
    TOKENS,
    assert_message,
    call_plan,
    call_verify,
    call_write,
    case_id,
    floats,
    ints,
    make_log,
    make_plan,
    make_state,
    rows,
    source,
)

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
    (
        call_write,
        {"parents": ints(TOKENS + 1)},
        ValueError,
        "`parents` has shape [6], but one value for each of the 5 tokens of `input_ids` needs shape [5].",
    ),
    (call_write, {"parents": floats(TOKENS)}, TypeError, "`parents` has dtype float32, but it must be int32 or int64."),
]


CASES = [*PLAN, *LAUNCH, *VERIFY, *WRITE]


@pytest.mark.parametrize(("call", "changes", "error", "text"), CASES, ids=map(case_id, CASES))
def test_message(call, changes, error, text):
    assert_message(call, changes, error, text)
