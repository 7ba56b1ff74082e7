"""What a canary and its monitor cost a decode loop of 200 steps.

    python tests/benchmarks/bench_monitor.py [--steps N] [--work N] [--layers N]

Wall time of the whole loop, from the first call to the last result, on jax's default device, in turn and as medians. There are two loops.
One launches its steps without waiting; where a monitor made the device wait, its figure is above that of the canary alone. The other
reads the result of each step before the next one, and keeps no part of the step but what a monitor keeps, so that the host's part of a
step counts in full. Nothing here is asserted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_kvcanary as kvc

NUM_SLOTS, ROWS, CONTEXT = 65_537, 64, 1024
REPEATS = 7
NONE, CANARY, MONITOR, FLUSHED = "no canary", "a canary, unobserved", "a canary and a monitor", "the same, flushed in each step"
LOOPS = (
    ("steps launched without waiting", False, (NONE, CANARY, MONITOR)),
    ("each step's result read", True, (NONE, CANARY, MONITOR, FLUSHED)),
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--work", type=int, default=4096, help="width of the matrices that stand for a model's step, at least 128")
    parser.add_argument("--layers", type=int, default=4)
    arguments = parser.parse_args()
    layers = arguments.layers
    pool = kvc.pools.MHATokenToKVPool.allocate(num_slots=NUM_SLOTS, num_layers=layers, num_kv_heads=8, head_dim=128)
    canary, state = kvc.install_canary(pool, kvc.CanaryConfig("log"), capacities=kvc.CanaryLaunchCapacities.from_pool(NUM_SLOTS, ROWS))
    assert canary is not None
    weights = jnp.eye(arguments.work, dtype=jnp.bfloat16)
    table = np.zeros((ROWS + 1, CONTEXT), np.int32)
    table[1:] = 1 + np.random.default_rng(0).permutation(NUM_SLOTS - 1)[: ROWS * CONTEXT].reshape(ROWS, CONTEXT)
    table = jnp.asarray(table)
    first = CONTEXT - arguments.steps

    def forward(weights: jax.Array, batch: kvc.ForwardBatch, pool: Any) -> tuple[jax.Array, Any]:
        hidden = jnp.broadcast_to(batch.input_ids[:, None], (ROWS, arguments.work)).astype(jnp.bfloat16)
        for layer in range(layers):
            for _ in range(8):
                hidden = jnp.tanh(hidden @ weights)
            kv = jnp.broadcast_to(hidden[:, :128].reshape(ROWS, 1, 128), (ROWS, 8, 128))
            pool = pool.write(layer, batch.out_cache_loc, kv, kv)
        return hidden.sum(), pool

    def decode(position: jax.Array) -> kvc.ForwardBatch:
        rows = jnp.arange(1, ROWS + 1, dtype=jnp.int32)
        positions = jnp.broadcast_to(position, (ROWS,))
        return kvc.ForwardBatch.decode(
            input_ids=positions + rows,
            positions=positions,
            out_cache_loc=table[rows, positions],
            req_pool_indices=rows,
            req_to_token=table,
        )

    @partial(jax.jit, donate_argnums=2)
    def plain_step(weights: jax.Array, position: jax.Array, pool: Any) -> tuple[jax.Array, Any]:
        return forward(weights, decode(position), pool)

    @partial(jax.jit, donate_argnums=(0, 3))
    def checked_step(state: Any, weights: jax.Array, position: jax.Array, pool: Any) -> Any:
        return canary.wrap(forward)(state, weights, decode(position), pool)

    @partial(jax.jit, donate_argnums=(0, 1))
    def prefill(state: Any, pool: Any) -> Any:
        """Stamp the prefixes, so that the decode steps have something sound to read."""

        def body(carry: Any, position: jax.Array) -> Any:
            state, report, _, pool = canary.wrap(lambda _, pool: (None, pool))(carry[0], decode(position), carry[1])
            return (state, pool), report.summary[0]

        return jax.lax.scan(body, (state, pool), jnp.arange(first, dtype=jnp.int32))[0]

    state, pool = prefill(state, pool)
    positions = [np.int32(position) for position in range(first, CONTEXT)]
    monitor = kvc.CanaryMonitor(canary)

    def step(kind: str, position: np.int32) -> jax.Array:
        nonlocal state, pool
        if kind == NONE:
            out, pool = plain_step(weights, position, pool)
            return out
        state, report, out, pool = checked_step(state, weights, position, pool)
        if kind in (MONITOR, FLUSHED):
            monitor.observe(report, state)
        if kind == FLUSHED:
            monitor.flush()
        return out

    def run(kind: str, *, reads: bool) -> float:
        start = time.perf_counter()
        for position in positions:
            out = step(kind, position)
            if reads:
                np.asarray(out)
                del out
        jax.block_until_ready((pool, state))
        return time.perf_counter() - start

    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {len(positions)} steps, {ROWS} rows, context {CONTEXT}, {layers} layers")
    for loop, reads, kinds in LOOPS:
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for repeat in range(REPEATS + 1):
            for kind in kinds:
                seconds = run(kind, reads=reads)
                if repeat:  # the first one compiles
                    times[kind].append(seconds)
        medians = {kind: statistics.median(values) for kind, values in times.items()}
        print(loop)
        for kind in kinds:
            print(f"  {kind:34} {1e3 * medians[kind] / len(positions):8.3f} ms a step   {medians[kind] / medians[NONE]:6.3f} x")
    monitor.flush(state)
    print(f"violations: {state.device_state.violation_log.count()}; the same slots are written again in every repeat")


if __name__ == "__main__":
    main()
