"""What is said about wrong expected tokens, and about a loop that lacks them."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

import jax_kvcanary as kvc
from helpers.messages import (
    ROWS,
    TOKEN_LOG,
    assert_message,
    case_id,
    floats,
    install,
    ints,
    make_batch,
    make_pool,
    make_state,
    rows,
)

TABLE = {"req_to_token_alloc_size": 3, "max_context_len": 5}
LACKING = (
    "`device_state.req_to_verify_expected_tokens` is None, but it must be a table of tokens, which a state has when "
    "`enable_verify_token_assert` is on."
)


def token_state(**changes):
    return dataclasses.replace(kvc.CanaryDeviceState.allocate(TOKEN_LOG, **TABLE), **changes)


def set_tokens(**changes):
    good = {"device_state": token_state(), "req_pool_indices": ints(ROWS), "tokens": ints(7), "lengths": ints(ROWS)}
    return kvc.set_expected_tokens(**{**good, **changes})


def append_tokens(**changes):
    good = {"device_state": token_state(), "req_pool_indices": ints(ROWS), "positions": ints(ROWS), "tokens": ints(ROWS)}
    return kvc.append_expected_tokens(**{**good, **changes})


def canary_and_state(config=TOKEN_LOG):
    return install(config=config, **TABLE) if config.enable_verify_token_assert else install(config=config)


def canary_set(state=None, config=TOKEN_LOG):
    canary, own = canary_and_state(config)
    return canary.set_expected_tokens(state or own, ints(ROWS), ints(7), ints(ROWS))


def canary_append(state=None, config=TOKEN_LOG):
    canary, own = canary_and_state(config)
    return canary.append_expected_tokens(state or own, ints(ROWS), ints(ROWS), ints(ROWS))


def pre_forward(lens=True, state_changes=None):
    canary, state = canary_and_state()
    state = dataclasses.replace(state, device_state=dataclasses.replace(state.device_state, **(state_changes or {})))
    batch = make_batch(plan_input=rows(expected_tokens_valid_lens=ints(ROWS) if lens else None))
    return canary.pre_forward(state, batch, make_pool())


EITHER = [
    case
    for call in (set_tokens, append_tokens)
    for case in (
        (call, {"device_state": make_state()}, ValueError, LACKING),
        (call, {"device_state": None}, TypeError, "`device_state` is of type NoneType, but it must be a CanaryDeviceState."),
        (
            call,
            {"device_state": token_state(violation_log=None)},
            TypeError,
            "`device_state.violation_log` is of type NoneType, but it must be a ViolationLog.",
        ),
        (
            call,
            {"device_state": token_state(req_to_verify_expected_tokens=floats(3, 5))},
            TypeError,
            "`device_state.req_to_verify_expected_tokens` has dtype float32, but it must be int32.",
        ),
        (
            call,
            {"device_state": token_state(req_to_verify_expected_tokens=jnp.zeros(15, jnp.int32))},
            ValueError,
            "`device_state.req_to_verify_expected_tokens` has shape [15], but a table of tokens by request row and position needs shape "
            "[any, any].",
        ),
        (call, {"req_pool_indices": floats(ROWS)}, TypeError, "`req_pool_indices` has dtype float32, but it must be int32 or int64."),
        (
            call,
            {"tokens": ints(ROWS, dtype=np.uint32)},
            TypeError,
            "`tokens` has dtype uint32, but it must be int32 or int64.",
        ),
    )
]

SET = [
    (
        set_tokens,
        {"req_pool_indices": ints(ROWS, 1)},
        ValueError,
        "`req_pool_indices` has shape [2, 1], but one request row for each list of tokens needs shape [any].",
    ),
    (
        set_tokens,
        {"tokens": ints(ROWS, 5)},
        ValueError,
        "`tokens` has shape [2, 5], but a flat array of the tokens of all lists needs shape [any].",
    ),
    (
        set_tokens,
        {"lengths": ints(ROWS + 1)},
        ValueError,
        "`lengths` has shape [3], but one value for each of the 2 lists of `req_pool_indices` needs shape [2].",
    ),
    (set_tokens, {"lengths": floats(ROWS)}, TypeError, "`lengths` has dtype float32, but it must be int32 or int64."),
    (
        set_tokens,
        {"start_positions": ints()},
        ValueError,
        "`start_positions` has shape [], but one value for each of the 2 lists of `req_pool_indices` needs shape [2].",
    ),
    (set_tokens, {"start_positions": floats(ROWS)}, TypeError, "`start_positions` has dtype float32, but it must be int32 or int64."),
]

APPEND = [
    (
        append_tokens,
        {"req_pool_indices": ints()},
        ValueError,
        "`req_pool_indices` has shape [], but one request row for each token needs shape [any].",
    ),
    (
        append_tokens,
        {"positions": ints(ROWS - 1)},
        ValueError,
        "`positions` has shape [1], but one value for each of the 2 rows of `req_pool_indices` needs shape [2].",
    ),
    (append_tokens, {"positions": floats(ROWS)}, TypeError, "`positions` has dtype float32, but it must be int32 or int64."),
    (
        append_tokens,
        {"tokens": ints(ROWS, 1)},
        ValueError,
        "`tokens` has shape [2, 1], but one value for each of the 2 rows of `req_pool_indices` needs shape [2].",
    ),
]

LOOP = [
    *(
        case
        for call in (canary_set, canary_append)
        for case in (
            (call, {"config": dataclasses.replace(TOKEN_LOG, enable_verify_token_assert=False)}, ValueError, LACKING),
            (call, {"state": token_state()}, TypeError, "`state` is of type CanaryDeviceState, but it must be a CanaryState."),
        )
    ),
    (
        pre_forward,
        {"lens": False},
        ValueError,
        "`batch.plan_input.expected_tokens_valid_lens` is None, but it must be an array when `enable_verify_token_assert` is on.",
    ),
    (
        pre_forward,
        {"state_changes": {"req_to_verify_expected_tokens": None}},
        ValueError,
        "`state.device_state.req_to_verify_expected_tokens` is None, but it must be an array when `enable_verify_token_assert` is on.",
    ),
]

CASES = [*EITHER, *SET, *APPEND, *LOOP]


@pytest.mark.parametrize(("call", "changes", "error", "text"), CASES, ids=map(case_id, CASES))
def test_message(call, changes, error, text):
    assert_message(call, changes, error, text)


@pytest.mark.parametrize("call", [set_tokens, append_tokens, canary_set, canary_append, pre_forward, partial(set_tokens, tokens=ints(0))])
def test_the_good_arguments_are_good(call):
    assert call() is not None
