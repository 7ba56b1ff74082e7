"""The device's side of the self test: a canary around the steps of the engine, with room for a fault between its parts."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvcanary.batch import ForwardBatch
from jax_kvcanary.buffers import CanaryBufferGroup, CanaryState
from jax_kvcanary.canary import Canary, CanaryStep
from jax_kvcanary.config import CanaryConfig, CanaryLaunchCapacities, CanaryMode
from jax_kvcanary.constants import PoolKind
from jax_kvcanary.install import install_canary
from jax_kvcanary.perturb import Perturbation
from jax_kvcanary.pools import SWAKVPool
from jax_kvcanary.selftest.faults import Fault, Mode, Moment
from jax_kvcanary.selftest.pool import allocate_pool, forward
from jax_kvcanary.selftest.steps import MAX_REQS, MAX_SEQ_LEN, NUM_SLOTS, NUM_SWA_SLOTS, ROWS, VERIFY_CAPACITY, WINDOW, Step
from jax_kvcanary.state import to_int64
from jax_kvcanary.violations import Violation

#: More rows than one fault can make in the steps that it is watched for.
_RING_CAPACITY = 512


class Machine:
    """A canary in one mode on a pool. A step is compiled in two halves, which are donated what they update."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        config = CanaryConfig(
            CanaryMode.LOG,
            ring_capacity=_RING_CAPACITY,
            real_kv_hash_mode=mode.hash_mode,
            enable_write_input_assert=mode.inputs,
            enable_verify_token_assert=mode.tokens,
        )
        self.canary, self._state, self._pool = _install(config)
        self._first = jax.jit(partial(_first_half, self.canary), donate_argnums=(0, 1))
        self._second = jax.jit(partial(_second_half, self.canary), donate_argnums=(0, 2))

    def reset(self) -> None:
        """An empty cache."""
        _, self._state, self._pool = _install(self.canary.config)

    def snapshot(self) -> Any:
        """State and pool as they are now."""
        return jax.tree.map(np.array, (self._state, self._pool))

    def restore(self, snapshot: Any) -> None:
        """Go back to a snapshot."""
        self._state, self._pool = jax.tree.map(jnp.array, snapshot)

    def step(self, step: Step, fault: Fault | None = None, key: Any = None) -> Perturbation | None:
        """One step, with a fault in it or without, and its sweeps; what the fault changed."""
        batch, change = _batch(step, self.mode), None
        if fault is not None and fault.moment is Moment.BEFORE_STEP:
            # The table from full-pool slots is the one that this step will use.
            batch, change = fault.plant(key, step, batch, dataclasses.replace(self._pool, full_to_swa_index_mapping=step.full_to_swa))
        state, canary_step, pool = self._first(self._state, self._pool, step, batch)
        if fault is not None and fault.moment is Moment.BEHIND_FORWARD:
            pool, change = fault.plant(key, step, batch, pool)
        self._state, self._pool = self._second(state, canary_step, pool, step, batch)
        if fault is not None and fault.moment is Moment.BEHIND_STEP:
            self._pool, change = fault.plant(key, step, batch, self._pool)
        return None if change is None else jax.tree.map(int, change)

    def rows(self) -> list[Violation]:
        """All findings so far."""
        return [Violation.from_row(row) for row in self._state.device_state.violation_log.rows()]

    @property
    def counters(self) -> dict[str, np.ndarray]:
        """The canary's counters, int64."""
        state = self._state.device_state
        return {
            "findings": np.asarray(state.violation_log.violation_write_index, np.int64),
            "kernel_runs": to_int64(state.kernel_run_counters),
            "slot_runs": to_int64(state.slot_run_counters),
            "skips": np.asarray(state.verify_skip_counters, np.int64),
        }


def _install(config: CanaryConfig) -> tuple[Canary, CanaryState, SWAKVPool]:
    pool = allocate_pool(num_slots=NUM_SLOTS, num_swa_slots=NUM_SWA_SLOTS)
    table = {"req_to_token_alloc_size": MAX_REQS, "max_context_len": MAX_SEQ_LEN} if config.enable_verify_token_assert else {}
    capacities = CanaryLaunchCapacities(VERIFY_CAPACITY, ROWS)
    canary, state = install_canary(pool, config, capacities=capacities, swa_window_size=WINDOW, **table)
    if canary is None or state is None:
        raise ValueError("`config` has mode NONE, but the self test needs a canary.")
    return canary, canary.mark_init_finished(state), pool


def _batch(step: Step, mode: Mode) -> ForwardBatch:
    expected = {"expected_input_tokens": step.input_ids, "expected_input_positions": step.positions} if mode.inputs else {}
    return ForwardBatch.extend(
        input_ids=step.input_ids,
        positions=step.positions,
        out_cache_loc=step.out_cache_loc,
        req_pool_indices=step.req_pool_indices,
        prefix_lens=step.prefix_lens,
        extend_seq_lens=step.extend_seq_lens,
        req_to_token=step.req_to_token,
        expected_tokens_valid_lens=step.known_lens,
        **expected,
    )


def _first_half(
    canary: Canary, state: CanaryState, pool: SWAKVPool, step: Step, batch: ForwardBatch
) -> tuple[CanaryState, CanaryStep, SWAKVPool]:
    """Release slots, move slots, and run the step up to the forward."""
    state = canary.release(state, step.released, pool)
    moves = {PoolKind.FULL: step.moves.full, PoolKind.SWA: step.moves.swa}
    groups = tuple(_move_records(group, moves[group.kind]) for group in state.groups)
    pool = dataclasses.replace(
        pool,
        full_kv_pool=_move(pool.full_kv_pool, moves[PoolKind.FULL]),
        swa_kv_pool=_move(pool.swa_kv_pool, moves[PoolKind.SWA]),
        full_to_swa_index_mapping=jnp.asarray(step.full_to_swa),
    )
    device_state = state.device_state
    if canary.config.enable_verify_token_assert:
        device_state = dataclasses.replace(device_state, req_to_verify_expected_tokens=jnp.asarray(step.expected_tokens))
    state, canary_step = canary.pre_forward(CanaryState(groups, device_state), batch, pool)
    _, pool = forward(batch, pool)
    return state, canary_step, pool


def _second_half(
    canary: Canary, state: CanaryState, canary_step: CanaryStep, pool: SWAKVPool, step: Step, batch: ForwardBatch
) -> tuple[CanaryState, SWAKVPool]:
    """The step from the forward on, and the sweeps."""
    state, _ = canary.post_forward(state, canary_step, batch, pool)
    state, _ = canary.sweep(state, step.sweep_full, pool)
    state, _ = canary.sweep(state, step.sweep_swa, pool, kind=PoolKind.SWA)
    return state, pool


def _move(tree: Any, move: Any) -> Any:
    return jax.tree.map(lambda array: jnp.asarray(array).at[move[1]].set(array[move[0]]), tree)


def _move_records(group: CanaryBufferGroup, move: Any) -> CanaryBufferGroup:
    names = [f"{half}_{phase}" for half in group.halves for phase in ("head", "tail")]
    return group.with_buffers(**{name: _move(getattr(group, name), move) for name in names})
