"""Each operation with good arguments, some of which a case replaces, and the check of an error's type and text."""

from __future__ import annotations

import dataclasses
import re
from functools import partial

import numpy as np
import pytest

import jax_kvcanary as kvc

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


def case_id(case):
    call, changes, _, text = case
    name = getattr(call, "__name__", None) or "-".join(str(arg) for arg in getattr(call, "args", ()) if isinstance(arg, str)) or "attach"
    return f"{name}-{'-'.join(changes)}-{len(text)}"


def assert_message(call, changes, error, text):
    """The error's type and its exact text, which is a sentence that names an argument."""
    assert re.fullmatch(r"`[a-z_0-9.\[\]]+` [^\n]+\.", text), text
    with pytest.raises(error) as caught:
        call(**changes)
    assert (type(caught.value), str(caught.value)) == (error, text)
