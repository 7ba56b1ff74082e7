"""What compiled programs of a canary's services consist of: sweeps, releases, expected tokens and moved records work in place."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_kvcanary as kvc
from helpers.hlo import (
    BUFFER_SIZE,
    CAPACITIES,
    CONFIG,
    INSTRUCTION,
    LAYOUTS,
    NUM_SLOTS,
    STEPS,
    compiled_text,
    custom_calls,
    forward,
    install,
    large_copies,
    make_batch,
    one_step,
    pointers,
)


def test_a_sweep_interval_adds_nothing_to_a_step():
    """Sweeps are calls of their own: the step of a loop that has some is that of a loop without."""
    texts = []
    for interval in (0, 3):
        canary, state, pool, forward = install("mha", replace(CONFIG, sweep_interval=interval))
        texts.append(compiled_text(partial(one_step, canary, forward), state, make_batch(), pool, donate=(0, 2)))
    assert texts[0] == texts[1]
    assert custom_calls(texts[0]) == [0, 0, 1, 1]


def test_a_donated_sweep_stays_where_it_is():
    canary, state, pool, _ = install("mha")
    sweep = jax.jit(canary.sweep, donate_argnums=0)
    root = SimpleNamespace(key=[], value=[], children={})
    root.children[5] = SimpleNamespace(key=[5, 6, 7], value=[1, 2, 3], children={})
    plan = kvc.sweep_plan(root)
    text = sweep.lower(state, plan, pool).compile().as_text()
    assert custom_calls(text) == [1, 0, 0, 0]  # K and V shared
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
    layout = LAYOUTS["mha"]
    pool = layout.allocate()
    canary, state = kvc.install_canary(pool, TOKEN_CONFIG, capacities=CAPACITIES, **TABLE)
    batch = make_batch()
    rows = replace(batch.plan_input, expected_tokens_valid_lens=batch.plan_input.prefix_lens)
    return canary, state, replace(batch, plan_input=rows), pool, partial(forward, layout)


def sampling_step(canary, forward, state, batch, pool):
    state, *rest = one_step(canary, forward, state, batch, pool)
    return canary.append_expected_tokens(state, batch.plan_input.req_pool_indices, batch.positions + 1, batch.input_ids), *rest


def scanned_sampling_steps(canary, forward, state, batch, pool):
    def body(carry, _):
        state, report, _, pool = sampling_step(canary, forward, carry[0], batch, carry[1])
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
    canary, state, batch, pool, forward = install_with_tokens()
    step = jax.jit(partial(function, canary, forward), donate_argnums=(0, 2))
    text = step.lower(state, batch, pool).compile().as_text()
    assert large_copies(text) == []
    assert custom_calls(text) == [0, 0, 1, 1]
    if jax.default_backend() == "cpu":  # elsewhere the change is a kernel
        assert changes_of_the_table(text) == ([] if function is one_step else ["scatter"])
    before = pointers((state.groups, state.device_state.req_to_verify_expected_tokens, pool))
    for _ in range(3):
        state, _, _, pool = step(state, batch, pool)
        assert pointers((state.groups, state.device_state.req_to_verify_expected_tokens, pool)) == before
    assert np.asarray(state.device_state.req_to_verify_expected_tokens)[2, 5] == (-1 if function is one_step else 28)


def test_donated_expected_tokens_stay_where_they_are():
    canary, state, *_ = install_with_tokens()
    store = jax.jit(canary.set_expected_tokens, donate_argnums=0)
    lists = jnp.array([3, 1]), jnp.arange(11), jnp.array([7, 4])
    text = store.lower(state, *lists).compile().as_text()
    assert large_copies(text) == []
    before = pointers(state)
    state = store(state, *lists)
    assert pointers(state) == before
    assert np.asarray(state.device_state.req_to_verify_expected_tokens)[3, :8].tolist() == [*range(7), -1]


def test_copies_of_the_table_would_be_seen():
    canary, state, *_ = install_with_tokens()
    text = compiled_text(canary.set_expected_tokens, state, jnp.array([3]), jnp.arange(5), jnp.array([5]))
    assert TABLE_TYPE in "\n".join(large_copies(text))


def relocated(canary, state, old, new, vacated, pool):
    """Taken out, put elsewhere, and what nobody has any more released, in one program."""
    return canary.release(kvc.insert_records(state, new, kvc.extract_records(state, old)), vacated, pool)


def test_moved_records_stay_in_their_buffers():
    """Nothing of a buffer's size is copied, although the program reads what it overwrites."""
    canary, state, pool, _ = install("mha")
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
