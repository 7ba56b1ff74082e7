"""The jitted step, with and without the canary, and the loop that serves requests with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jax_kvcanary as kvc
from jax_kvcanary.pools import MHATokenToKVPool
from smollm2.model import ModelConfig, Params, allocate_pool, forward
from smollm2.scheduler import EMPTY, Limits, Request, Scheduler, Stats, StepBatch

Hook = Callable[[int, Scheduler], None]
PHASES = ("HEAD", "TAIL", "SWEEP")


@partial(jax.jit, static_argnames="config", donate_argnames="pool")
def plain_step(params: Params, batch: kvc.ForwardBatch, pool: MHATokenToKVPool, *, config: ModelConfig) -> tuple[Array, MHATokenToKVPool]:
    """One step without a canary. Returns the token that follows each row, int32 [rows], and the pool."""
    logits, pool = forward(params, batch, pool, config)
    return jnp.argmax(logits, axis=-1), pool


@partial(jax.jit, static_argnames=("config", "canary"), donate_argnames=("pool", "state"))
def checked_step(
    params: Params,
    batch: kvc.ForwardBatch,
    pool: MHATokenToKVPool,
    state: kvc.CanaryState,
    *,
    config: ModelConfig,
    canary: kvc.Canary,
) -> tuple[Array, MHATokenToKVPool, kvc.CanaryState, Any]:
    """The same step between the two halves of the canary. Returns the canary's state and this step's report as well."""
    state, step = canary.pre_forward(state, batch, pool)
    logits, pool = forward(params, batch, pool, config)
    state, report = canary.post_forward(state, step, batch, pool)
    return jnp.argmax(logits, axis=-1), pool, state, report


@partial(jax.jit, static_argnames="canary", donate_argnames="state")
def release_slots(state: kvc.CanaryState, slots: Array, pool: MHATokenToKVPool, *, canary: kvc.Canary) -> kvc.CanaryState:
    """Wipe the records of freed slots, int32 [num_slots] padded with -1: whoever uses one of them unwritten is reported."""
    return canary.release(state, slots, pool)


@partial(jax.jit, static_argnames="canary", donate_argnames="state")
def sweep_slots(state: kvc.CanaryState, plan: kvc.VerifyPlan, pool: MHATokenToKVPool, *, canary: kvc.Canary) -> tuple[kvc.CanaryState, Any]:
    """Check the slots that the radix tree holds, those that no request uses too. Returns the state and a report."""
    return canary.sweep(state, plan, pool)


@dataclass(frozen=True)
class StepTime:
    """Wall time of one step after warm-up, from the call to the last result ready, the canary's host part included."""

    num_tokens: int
    bucket: int
    is_decode: bool
    seconds: float


@dataclass(frozen=True)
class Checks:
    """What the canary did. `expected_*` is the scheduler's own count, the rest is read from the device."""

    launches: dict[str, int]  # of each launch tag that ran
    slots: dict[str, int]  # records verified plus records written, of each launch tag that ran
    expected_launches: int  # of each tag of a step
    expected_verified: int
    expected_written: int
    expected_sweeps: int = 0  # launches of each tag of a sweep
    expected_swept: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether each tag that ran has verified and written exactly the records that the scheduler's batches and its tree ask for."""
        step = (self.expected_launches, self.expected_verified + self.expected_written)
        sweep = (self.expected_sweeps, self.expected_swept)
        done = {phase: {(self.launches[tag], self.slots[tag]) for tag in self.launches if tag.startswith(phase)} for phase in PHASES}
        return done == {"HEAD": {step}, "TAIL": {step}, "SWEEP": {sweep} if self.expected_sweeps else set()}


@dataclass(frozen=True)
class Served:
    """A finished run."""

    outputs: dict[int, tuple[int, ...]]  # answer tokens by rid
    pool: MHATokenToKVPool  # as the last step left it
    steps: int
    stats: Stats
    times: tuple[StepTime, ...]
    checks: Checks | None  # None without a canary


class Engine:
    """A model, its sizes and a canary configuration. Every `serve` starts from an empty pool and an empty tree."""

    def __init__(self, params: Params, model: ModelConfig, limits: Limits, canary: kvc.CanaryConfig) -> None:
        self.params = params
        self.model = model
        self.limits = limits
        self.canary_config = canary

    def serve(self, requests: Sequence[Request], *, stop_token: int, before_step: Hook | None = None) -> Served:
        """Serve `requests`, each from its `arrival_step` on, to the end, by greedy decoding.

        `before_step` gets the number of the coming step, from 1, and the scheduler. In mode RAISE a finding is a
        `kvc.CanaryViolationError`.
        """
        run = Run(self, requests, stop_token=stop_token, before_step=before_step)
        while run.advance():
            pass
        return run.finish()


class Run:
    """One serving in progress: a scheduler on the host; the pool, the canary's state and its monitor beside them.

    `advance` runs one step, so that two runs can be taken through the same schedule side by side.
    """

    def __init__(self, engine: Engine, requests: Sequence[Request], *, stop_token: int, before_step: Hook | None = None) -> None:
        self.engine = engine
        self.requests = tuple(requests)
        self.scheduler = Scheduler(engine.limits, stop_token=stop_token)
        self.steps = 0
        self._before_step = before_step
        self._arrivals = sorted(requests, key=lambda request: request.arrival_step)
        self._verified = self._written = self._sweeps = self._swept = 0
        self._times: list[StepTime] = []
        self._install()
        self._warm_up()
        self._install()  # the steps of the warm-up count for nothing: the first of the run is step 1 for the canary too
        if self.canary is not None:
            self.state = self.canary.mark_init_finished(self.state)

    def advance(self) -> bool:
        """Run the next step; False where every request is finished."""
        scheduler, arrivals = self.scheduler, self._arrivals
        while arrivals and (scheduler.is_idle or arrivals[0].arrival_step <= self.steps):
            scheduler.add(arrivals.pop(0))
        if self._before_step is not None:
            self._before_step(self.steps + 1, scheduler)
        batch = scheduler.schedule()
        if batch is None:
            return False
        self.steps += 1
        self._verified += batch.num_prefix_tokens
        self._written += batch.num_tokens
        scheduler.commit(batch, self._step(batch, scheduler.take_freed()))
        if self.canary is not None and self.canary.sweep_due(self.steps):
            self._sweeps += 1
            self._swept += scheduler.tree.num_slots()
            self.monitor.observe(self._sweep(), self.state)
        return True

    def finish(self) -> Served:
        """Handle the last report, then put together what the run gave."""
        if self.monitor is not None:
            self.monitor.flush(self.state)
        return Served(
            outputs={request.rid: tuple(request.output) for request in self.requests},
            pool=self.pool,
            steps=self.steps,
            stats=self.scheduler.stats,
            times=tuple(self._times),
            checks=None if self.canary is None else self._checks(),
        )

    def _install(self) -> None:
        """An empty pool, and a canary beside it."""
        limits = self.engine.limits
        self.pool = allocate_pool(self.engine.model, limits.num_slots)
        capacities = kvc.CanaryLaunchCapacities.from_pool(limits.num_slots, limits.max_batch)
        self.canary, self.state = kvc.install_canary(self.pool, self.engine.canary_config, capacities=capacities)
        self.monitor = None if self.canary is None else kvc.CanaryMonitor(self.canary)

    def _warm_up(self) -> None:
        """Compile and run everything once for each bucket, on nothing but padding."""
        limits = self.engine.limits
        table = np.full((limits.max_reqs, limits.max_seq_len), EMPTY, np.int32)
        for bucket in limits.token_buckets:
            self._release([])
            jax.block_until_ready(self._dispatch(StepBatch.padding(bucket, limits.max_batch), table))
        if self.canary is not None and self.canary.config.sweep_interval:
            jax.block_until_ready(self._sweep())

    def _step(self, batch: StepBatch, freed: list[int]) -> np.ndarray:
        """Run a step and wait for it. Returns the token after each row, [rows]."""
        start = time.perf_counter()
        if freed:
            self._release(freed)
        tokens, report = self._dispatch(batch, self.scheduler.table)
        jax.block_until_ready((tokens, self.pool, self.state))
        if self.monitor is not None:
            self.monitor.observe(report, self.state)
        seconds = time.perf_counter() - start
        self._times.append(StepTime(batch.num_tokens, len(batch.input_ids), batch.is_decode, seconds))
        return np.asarray(tokens)

    def _dispatch(self, batch: StepBatch, table: np.ndarray) -> tuple[Array, Any]:
        inputs = kvc.ForwardBatch.extend(
            input_ids=batch.input_ids,
            positions=batch.positions,
            out_cache_loc=batch.out_cache_loc,
            req_pool_indices=batch.req_pool_indices,
            prefix_lens=batch.prefix_lens,
            extend_seq_lens=batch.extend_seq_lens,
            req_to_token=table.copy(),  # the scheduler goes on writing its own, and the device may read this one in place
        )
        params, config = self.engine.params, self.engine.model
        if self.canary is None:
            tokens, self.pool = plain_step(params, inputs, self.pool, config=config)
            return tokens, None
        tokens, self.pool, self.state, report = checked_step(params, inputs, self.pool, self.state, config=config, canary=self.canary)
        return tokens, report

    def _release(self, freed: list[int]) -> None:
        if self.canary is None:
            return
        slots = np.full(self.engine.limits.num_slots, -1, np.int32)
        slots[: len(freed)] = freed
        self.state = release_slots(self.state, slots, self.pool, canary=self.canary)

    def _sweep(self) -> Any:
        """Sweep the tree as it is now; returns the report. No tree holds more slots than the pool has: one size, one compilation."""
        plan = kvc.sweep_plan(self.scheduler.tree.root, min_capacity=self.engine.limits.num_slots)
        self.state, report = sweep_slots(self.state, plan, self.pool, canary=self.canary)
        return report

    def _checks(self) -> Checks:
        device = self.state.device_state
        launches, slots = kvc.to_int64(device.kernel_run_counters), kvc.to_int64(device.slot_run_counters)  # [12] each
        tags = [tag for tag in kvc.CanaryLaunchTag if launches[tag]]
        return Checks(
            launches={tag.name: int(launches[tag]) for tag in tags},
            slots={tag.name: int(slots[tag]) for tag in tags},
            expected_launches=2 * self.steps,  # a verify and a write
            expected_verified=self._verified,
            expected_written=self._written,
            expected_sweeps=self._sweeps,
            expected_swept=self._swept,
        )
