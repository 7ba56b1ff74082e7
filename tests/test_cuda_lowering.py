"""The programs for CUDA, lowered without a GPU: the plan's kernels compile to Triton, and the custom calls are named."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import jax_kvcanary as kvc
from jax_kvcanary.pallas import scatter_tokens

NUM_SLOTS, TOKENS, MAX_REQS, MAX_SEQ_LEN = 37, 17, 7, 13
KERNELS = ("kvcanary_plan_offsets", "kvcanary_plan_entries")
EXPECTED = ("kvcanary_expected_tokens",)
TARGETS = ("kvcanary_verify", "kvcanary_write", "kvcanary_phase", "kvcanary_report_phase")


def abstract_gpu():
    """Where there is no GPU, newer releases of JAX lower for a described one."""
    if jax.default_backend() == "gpu":
        return contextlib.nullcontext()
    described = {"device_kind": "NVIDIA H100 80GB HBM3", "num_cores": None, "platform": "cuda"}
    taken = inspect.signature(AbstractDevice).parameters
    device = AbstractDevice(**{name: value for name, value in described.items() if name in taken})
    return use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device))


def cuda_text(function, *args):
    """The module of a program for CUDA."""
    with abstract_gpu():
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def occurrences(text, names):
    """Custom calls of a target, or kernels of a name, in a module's text."""
    return [len(re.findall(rf"custom_call @{name}\b|name = \"{name}\"", text)) for name in names]


def operations(text):
    """Operations of a module, but for those that choose the platform: cases, and the scalars that they go by."""
    names = re.findall(r"= \"?stablehlo\.(\w+)(?! dense<\d+> : tensor<i\d+>\n)\b", text)
    return [name for name in names if name != "case"]


def ints(*shape):
    return jnp.ones(shape, jnp.int32)


def rows(bs, *, tokens=False):
    return kvc.PlanInput(ints(bs), ints(bs), ints(bs), ints(bs) if tokens else None)


def test_a_step_of_operations():
    state = kvc.CanaryDeviceState.allocate(kvc.CanaryConfig("log", ring_capacity=3))

    def step(inputs, table, tokens, buf, state):
        plan = kvc.plan(inputs, table, verify_capacity=701, write_req_capacity=11)
        state = kvc.verify_step(buf, plan.verify, state, tag=0)
        return kvc.write_step(buf, plan.write, tokens, tokens, tokens, state, tag=0)

    text = cuda_text(step, rows(5), ints(MAX_REQS, MAX_SEQ_LEN), ints(TOKENS), kvc.fresh_records(NUM_SLOTS), state)
    assert occurrences(text, KERNELS) == [1, 1]
    assert occurrences(text, TARGETS) == [1, 1, 0, 0]


@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
@pytest.mark.parametrize("write_req_capacity", [5, 11])
@pytest.mark.parametrize("verify_capacity", [1301, 2048])
def test_a_plan_is_two_kernels_and_nothing_else(verify_capacity, write_req_capacity, x64):
    """On a GPU, each slice and each constant would be a launch."""
    capacities = {"verify_capacity": verify_capacity, "write_req_capacity": write_req_capacity}
    with jax.enable_x64(x64):
        text = cuda_text(lambda inputs, table: kvc.plan(inputs, table, **capacities), rows(5), ints(MAX_REQS, MAX_SEQ_LEN))
    assert operations(text) == ["custom_call", "custom_call"]
    assert occurrences(text, KERNELS) == [1, 1]


@pytest.mark.parametrize("swa_window_size", [0, 5])
@pytest.mark.parametrize(
    ("bs", "with_tokens", "with_lut"),
    # A loop over blocks of rows is compiled for more than 4096 of them.
    [*itertools.product((0, 1, 5), (False, True), (False, True)), (5003, False, False), (5003, True, True)],
)
def test_every_form_of_a_plan(bs, with_tokens, with_lut, swa_window_size):
    def plan(inputs, table, lut, tokens):
        return kvc.plan(
            inputs,
            table,
            verify_capacity=1301,
            swa_window_size=swa_window_size,
            full_to_swa_index_mapping=lut,
            expected_tokens=tokens,
            kv_token_id_vs_position_offset=1,
        )

    table = ints(MAX_REQS, MAX_SEQ_LEN)
    lut, tokens = ints(NUM_SLOTS) if with_lut else None, table if with_tokens else None
    text = cuda_text(plan, rows(bs, tokens=with_tokens), table, lut, tokens)
    assert occurrences(text, KERNELS) == [1, 1]


def test_a_plan_without_room_for_entries_is_one_kernel():
    text = cuda_text(lambda inputs, table: kvc.plan(inputs, table, verify_capacity=0), rows(3), ints(MAX_REQS, MAX_SEQ_LEN))
    assert occurrences(text, KERNELS) == [1, 0]


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("write_req_capacity", [5, 11])
def test_a_step_of_the_loop_is_two_kernels_and_two_calls(write_req_capacity, tree):
    """Nothing else runs for int32 inputs: no slice, no constant, and no copy for the report."""
    pool = kvc.pools.MHATokenToKVPool.allocate(num_slots=NUM_SLOTS, num_layers=1, num_kv_heads=1, head_dim=8)
    canary, state = kvc.install_canary(pool, kvc.CanaryConfig("log"), capacities=kvc.CanaryLaunchCapacities(701, write_req_capacity))
    tokens = ints(TOKENS)
    parents = tokens if tree else None
    batch = kvc.ForwardBatch(tokens, tokens, tokens, rows(5), ints(MAX_REQS, MAX_SEQ_LEN), parents=parents)
    text = cuda_text(canary.wrap(lambda _, pool: (None, pool)), state, batch, pool)
    assert operations(text) == ["custom_call"] * 4
    assert occurrences(text, KERNELS) == [1, 1]
    assert occurrences(text, TARGETS) == [0, 0, 1, 1]
    assert occurrences(text, EXPECTED) == [0]


def test_each_group_has_two_kernels_and_two_calls_and_one_reports():
    """The links of each group go from its HEAD to its TAIL; the report comes with the last TAIL."""
    sizes = {"num_slots": NUM_SLOTS, "swa_num_slots": NUM_SLOTS, "num_layers": 2, "swa_layers": (1,), "num_kv_heads": 1, "head_dim": 8}
    pool = kvc.pools.SWAKVPool.allocate(pool_class=kvc.pools.MHATokenToKVPool, **sizes)
    capacities = kvc.CanaryLaunchCapacities(701, 5)
    canary, state = kvc.install_canary(pool, kvc.CanaryConfig("log"), capacities=capacities, swa_window_size=3)
    batch = kvc.ForwardBatch(ints(TOKENS), ints(TOKENS), ints(TOKENS), rows(5), ints(MAX_REQS, MAX_SEQ_LEN))
    text = cuda_text(canary.wrap(lambda _, pool: (None, pool)), state, batch, pool)
    assert occurrences(text, KERNELS) == [2, 2]
    assert occurrences(text, TARGETS) == [0, 0, 3, 1]
    assert re.findall(r"carried = (\w+)", text) == ["false", "false", "true", "true"]
    assert re.findall(r"kvcanary_(\w*phase)\b", text) == ["phase", "phase", "phase", "report_phase"]


@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
@pytest.mark.parametrize("tokens", [1, 5, 257, 70_001])
@pytest.mark.parametrize("lists", [1, 3, 4097])
def test_expected_tokens_are_one_kernel_on_the_table_itself(lists, tokens, x64):
    with jax.enable_x64(x64):
        text = cuda_text(scatter_tokens, ints(MAX_REQS, MAX_SEQ_LEN), *(ints(lists),) * 3, ints(tokens))
    assert occurrences(text, EXPECTED) == [1]
    assert re.findall(r"output_operand_alias<.*?operand_index = (\d+)", text) == ["0"]


def test_no_expected_tokens_are_no_kernel():
    for lists, tokens in ((0, 5), (5, 0), (0, 0)):
        text = cuda_text(scatter_tokens, ints(MAX_REQS, MAX_SEQ_LEN), *(ints(lists),) * 3, ints(tokens))
        assert occurrences(text, EXPECTED) == [0]


@pytest.mark.parametrize("append", [False, True])
def test_a_step_that_checks_tokens(append):
    """The check itself adds no launch; storing the sampled tokens adds one."""
    pool = kvc.pools.MHATokenToKVPool.allocate(num_slots=NUM_SLOTS, num_layers=1, num_kv_heads=1, head_dim=8)
    config = kvc.CanaryConfig("log", enable_verify_token_assert=True)
    table = {"req_to_token_alloc_size": MAX_REQS, "max_context_len": MAX_SEQ_LEN}
    canary, state = kvc.install_canary(pool, config, capacities=kvc.CanaryLaunchCapacities(701, 5), **table)
    batch = kvc.ForwardBatch(ints(TOKENS), ints(TOKENS), ints(TOKENS), rows(5, tokens=True), ints(MAX_REQS, MAX_SEQ_LEN))

    def step(state, batch, pool):
        state, *rest = canary.wrap(lambda _, pool: (None, pool))(state, batch, pool)
        if append:
            reqs = batch.plan_input.req_pool_indices
            state = canary.append_expected_tokens(state, reqs, batch.plan_input.prefix_lens + 1, reqs)
        return state, *rest

    text = cuda_text(step, state, batch, pool)
    assert occurrences(text, KERNELS) == [1, 1]
    assert occurrences(text, TARGETS) == [0, 0, 1, 1]
    assert occurrences(text, EXPECTED) == [append]


def test_the_inputs_of_an_oracle_take_one_kernel():
    oracle = kvc.TokenOracle(seed=3, vocab_size=101)
    batch = kvc.ForwardBatch(ints(TOKENS), ints(TOKENS), ints(TOKENS), rows(5), ints(MAX_REQS, MAX_SEQ_LEN))
    assert occurrences(cuda_text(oracle.with_expected_inputs, batch, ints(5)), KERNELS) == [1, 0]


def test_a_program_for_the_cpu_has_no_kernels():
    def plan_and_store(inputs, table):
        return kvc.plan(inputs, table, verify_capacity=7), scatter_tokens(table, *(inputs.prefix_lens,) * 4)

    text = jax.jit(plan_and_store).trace(rows(3), ints(MAX_REQS, MAX_SEQ_LEN)).lower(lowering_platforms=("cpu",)).as_text()
    assert not any(occurrences(text, KERNELS + EXPECTED))
