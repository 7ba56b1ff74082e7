"""Steps with and without canaries on one pool, compiled ahead of time, for the benchmarks of whole models."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_kvcanary as kvc

OFF = "off"


class Cache:
    """A pool that all steps pass on, and the canaries beside it.

    Args:
        pool: the pool; steps donate it.
        configs: canaries by the name of the kind of step that runs them.
        capacities: room of their plans.
    """

    def __init__(self, pool: Any, configs: Mapping[str, kvc.CanaryConfig], capacities: kvc.CanaryLaunchCapacities) -> None:
        self.pool = pool
        self.capacities = capacities
        self.canaries: dict[str, kvc.Canary] = {}
        self.states: dict[str, kvc.CanaryState] = {}
        for kind, config in configs.items():
            canary, state = kvc.install_canary(pool, config, capacities=capacities)
            assert canary is not None  # no benchmark asks for mode NONE
            assert state is not None
            self.canaries[kind], self.states[kind] = canary, canary.mark_init_finished(state)

    def stamp(self, batch: kvc.ForwardBatch) -> None:
        """Write the records of tokens whose KV is in the pool already, with every canary."""
        stamps = Steps(self, lambda _, pool: (None, pool), batch)
        for kind in self.canaries:
            stamps.step(kind)

    def slots_seen(self, kind: str) -> np.ndarray:
        """Records verified plus records written so far, int64 [12], by launch tag."""
        return kvc.to_int64(self.states[kind].device_state.slot_run_counters)

    def check(self) -> None:
        """Raise a RuntimeError if a canary found something, or could not verify: then the times say nothing."""
        for kind, state in self.states.items():
            found = state.device_state.violation_log.count()
            skipped = int(np.asarray(state.device_state.verify_skip_counters).sum())
            if found or skipped:
                raise RuntimeError(
                    f"The canary of kind {kind!r} reported {found} violations and skipped {skipped} verify launches in a sound pool."
                )


class Steps:
    """One forward in all kinds: without a canary, and with each one of a cache.

    Args:
        cache: the pool and the canaries; every step leaves them there.
        forward: ``forward(*others, batch, pool) -> (out, pool)``.
        others: the forward's other arguments, the same in each step.
        batch: the batch, the same in each step, so that every step writes the same slots and verifies the same prefixes.
    """

    def __init__(self, cache: Cache, forward: Callable[..., tuple[Any, Any]], *others_and_batch: Any) -> None:
        self.cache = cache
        self._forward = forward
        self._arguments = others_and_batch
        self._programs: dict[str, Any] = {}

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of steps, the one without a canary first."""
        return (OFF, *self.cache.canaries)

    def program(self, kind: str) -> Any:
        """The compiled step of a kind, pool and state donated."""
        if kind not in self._programs:
            pool = len(self._arguments)
            if kind == OFF:
                step = jax.jit(self._forward, donate_argnums=pool)
                lowered = step.lower(*self._arguments, self.cache.pool)
            else:
                step = jax.jit(self.cache.canaries[kind].wrap(self._forward), donate_argnums=(0, pool + 1))
                lowered = step.lower(self.cache.states[kind], *self._arguments, self.cache.pool)
            self._programs[kind] = lowered.compile()
        return self._programs[kind]

    def step(self, kind: str) -> Any:
        """Run one step. Returns all arrays to wait for; the next step donates some of them."""
        program, cache = self.program(kind), self.cache
        if kind == OFF:
            out, cache.pool = program(*self._arguments, cache.pool)
            return out, cache.pool
        cache.states[kind], report, out, cache.pool = program(cache.states[kind], *self._arguments, cache.pool)
        return out, cache.pool, report.summary

    def call(self, kind: str) -> Callable[[], Any]:
        """:meth:`step` of one kind."""
        return functools.partial(self.step, kind)

    def memory(self, kind: str) -> Memory:
        """Device memory that the kind's program takes while it runs, its arguments and what it writes in place of them left out."""
        found = self.program(kind).memory_analysis()
        return Memory(found.temp_size_in_bytes, found.output_size_in_bytes - found.alias_size_in_bytes)

    def plan_bytes(self) -> int:
        """Device memory of the plan of a step with a canary, which lives as long as the step; its rows' flags count as the canary's own."""
        *_, batch = self._arguments
        capacities = self.cache.capacities
        plan = jax.eval_shape(
            functools.partial(kvc.plan, verify_capacity=capacities.verify_capacity, write_req_capacity=capacities.write_req_capacity),
            batch.plan_input,
            batch.req_to_token,
        )
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((plan.verify, plan.write, plan.num_invalid_rows)))


class Memory(NamedTuple):
    """Bytes of device memory of a program."""

    temporary: int
    results: int  # those that do not lie in a donated argument


def extend_batch(table: np.ndarray, rows: np.ndarray, prefix: int, extend: int, vocab: int) -> kvc.ForwardBatch:
    """Random tokens behind equally long prefixes.

    Args:
        table: int32 [max_reqs, max_seq_len]; slot of each position.
        rows: int32 [bs]; rows of the table.
        prefix: tokens that each row has in the cache.
        extend: tokens that each row adds, at the slots that the table has for them.
        vocab: the tokens are below it.
    """
    bs = len(rows)
    positions = np.arange(prefix, prefix + extend, dtype=np.int32)
    batch = kvc.ForwardBatch.extend(
        input_ids=np.random.default_rng(prefix).integers(0, vocab, bs * extend).astype(np.int32),
        positions=np.tile(positions, bs),
        out_cache_loc=table[rows][:, positions].reshape(-1),
        req_pool_indices=rows,
        prefix_lens=np.full(bs, prefix, np.int32),
        extend_seq_lens=np.full(bs, extend, np.int32),
        req_to_token=table,
    )
    return jax.tree.map(jnp.asarray, batch)


def random_pool(num_slots: int, layers: int, kv_heads: int, head_dim: int) -> kvc.pools.MHATokenToKVPool:
    """A bfloat16 pool whose KV is random in every slot, made on the device."""
    fill = jax.jit(lambda key: jax.random.normal(key, (num_slots, kv_heads, head_dim), jnp.bfloat16))
    keys = jax.random.split(jax.random.key(1), 2 * layers)
    return kvc.pools.MHATokenToKVPool(tuple(map(fill, keys[:layers])), tuple(map(fill, keys[layers:])))
