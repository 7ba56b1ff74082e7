"""What a monitor costs a decode loop: 200 steps without a canary, with one, and with one that a monitor observes.

    python tests/benchmarks/bench_monitor.py [--steps N] [--work N]

Wall time of the whole loop, from the first call to the last result, on jax's default device, in turn and as medians; where the monitor
made the device wait, the last figure is above the one before it. Nothing here is asserted.
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

NUM_SLOTS, ROWS, CONTEXT, LAYERS = 65_537, 64, 1024, 4
REPEATS = 7


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--work", type=int, default=4096, help="width of the matrices that stand for a model's step, at least 128")
    arguments = parser.parse_args()
    pool = kvc.pools.MHATokenToKVPool.allocate(num_slots=NUM_SLOTS, num_layers=LAYERS, num_kv_heads=8, head_dim=128)
    canary, state = kvc.install_canary(pool, kvc.CanaryConfig("log"), capacities=kvc.CanaryLaunchCapacities.from_pool(NUM_SLOTS, ROWS))
    assert canary is not None
    weights = jnp.eye(arguments.work, dtype=jnp.bfloat16)
    table = np.zeros((ROWS + 1, CONTEXT), np.int32)
    table[1:] = 1 + np.random.default_rng(0).permutation(NUM_SLOTS - 1)[: ROWS * CONTEXT].reshape(ROWS, CONTEXT)
    table = jnp.asarray(table)
    first = CONTEXT - arguments.steps

    def forward(weights: jax.Array, batch: kvc.ForwardBatch, pool: Any) -> tuple[jax.Array, Any]:
        hidden = jnp.broadcast_to(batch.input_ids[:, None], (ROWS, arguments.work)).astype(jnp.bfloat16)
        for layer in range(LAYERS):
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
    positions = [jnp.int32(position) for position in range(first, CONTEXT)]
    monitor = kvc.CanaryMonitor(canary)

    def run(kind: str) -> float:
        nonlocal state, pool
        start = time.perf_counter()
        for position in positions:
            if kind == "none":
                out, pool = plain_step(weights, position, pool)
                continue
            state, report, out, pool = checked_step(state, weights, position, pool)
            if kind == "monitor":
                monitor.observe(report, state)
        jax.block_until_ready((out, pool, state))
        return time.perf_counter() - start

    kinds = {"none": "without a canary", "canary": "with a canary, unobserved", "monitor": "with a canary and a monitor"}
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for repeat in range(REPEATS + 1):
        for kind in kinds:
            seconds = run(kind)
            if repeat:  # the first one compiles
                times[kind].append(seconds)
    monitor.flush(state)
    medians = {kind: statistics.median(values) for kind, values in times.items()}
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {len(positions)} steps, {ROWS} rows, context {CONTEXT}")
    for kind, text in kinds.items():
        print(f"{text:30} {1e3 * medians[kind] / len(positions):8.3f} ms a step   {medians[kind] / medians['none']:6.3f} x")
    print(f"violations: {len(monitor.violations)}; the same slots are written again in every repeat")


if __name__ == "__main__":
    main()
