"""Times of plan, verify and write on jax's default device: a table on the terminal, JSON on request.

    python tests/benchmarks/bench_operations.py [--json FILE]

Medians of whole jitted calls, wall time, state donated, over random data. Nothing here is asserted.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_kvcanary as kvc

NUM_SLOTS = 131_071
ROWS = 251
REAL_BYTES = {kvc.RealKvHashMode.NONE: 0, kvc.RealKvHashMode.PARTIAL: 16, kvc.RealKvHashMode.ALL: 2048}


def main() -> None:
    """Run every case and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="also write the results to this file")
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    device = jax.devices()[0]
    about = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "jax_kvcanary": kvc.__version__,
        "python": platform.python_version(),
    }
    print("  ".join(f"{name}: {value}" for name, value in about.items()))
    results = []
    for mode in kvc.RealKvHashMode:
        for name, case in (
            ("plan + verify, 100,000 entries", plan_and_verify(mode)),
            ("write, 1 request of 16,384", write(mode, 1)),
            ("write, 32 requests of 512", write(mode, 32)),
        ):
            times = case(arguments.repeats)
            row = {"case": name, "mode": mode.name, "median_ms": statistics.median(times) * 1e3, "best_ms": min(times) * 1e3}
            results.append(row)
            print(f"{name:34} {mode.name:8} median {row['median_ms']:9.3f} ms   best {row['best_ms']:9.3f} ms")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({**about, "results": results}, file, indent=2)


def plan_and_verify(mode: kvc.RealKvHashMode) -> Callable[[int], list[float]]:
    """A decode batch whose prefixes add up to 100,000 entries at random slots of a sound pool."""
    rng = np.random.default_rng(0)
    lengths = np.full(ROWS, 100_000 // ROWS)
    lengths[: 100_000 - lengths.sum()] += 1
    slots = rng.permutation(np.arange(1, NUM_SLOTS))[:100_000].astype(np.int32)
    table = np.zeros((ROWS + 1, lengths.max() + 1), np.int32)
    for row, (start, length) in enumerate(zip(np.cumsum(lengths) - lengths, lengths, strict=True)):
        table[row + 1, :length] = slots[start : start + length]
    rows = kvc.PlanInput(np.arange(1, ROWS + 1, dtype=np.int32), lengths.astype(np.int32), np.ones(ROWS, np.int32))
    buffer, sources, state = sound_pool(slots, lengths, mode)

    @jax.jit
    def step(inputs: kvc.PlanInput, req_to_token: Any, buffer: Any, state: Any, sources: Any) -> Any:
        planned = kvc.plan(inputs, req_to_token, verify_capacity=3 * NUM_SLOTS)
        return kvc.verify_step(
            buffer, planned.verify, state, tag=kvc.CanaryLaunchTag.TAIL_K_FULL, real_kv_sources=sources, real_kv_hash_mode=mode
        )

    arguments = jax.tree.map(jnp.asarray, (rows, table, buffer))

    def run(repeats: int) -> list[float]:
        nonlocal state
        times = []
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            state = jax.block_until_ready(step(*arguments, state, sources))
            times.append(time.perf_counter() - begin)
        if state.violation_log.count():
            raise RuntimeError("The sound pool of this benchmark was reported as corrupted.")
        return times[1:]

    return run


def write(mode: kvc.RealKvHashMode, requests: int) -> Callable[[int], list[float]]:
    """Prefill of 16,384 tokens at random slots."""
    rng = np.random.default_rng(1)
    slots = rng.permutation(np.arange(1, NUM_SLOTS))[:16_384].astype(np.int32)
    lengths = np.full(requests, 16_384 // requests)
    step = writer(mode)
    operands = write_operands(slots, lengths)
    buffer, state = kvc.fresh_records(NUM_SLOTS), fresh_state()
    sources = real_kv(mode)

    def run(repeats: int) -> list[float]:
        nonlocal buffer, state
        times = []
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            buffer, state = jax.block_until_ready(step(buffer, state, *operands, sources))
            times.append(time.perf_counter() - begin)
        return times[1:]

    return run


def sound_pool(slots: np.ndarray, lengths: np.ndarray, mode: kvc.RealKvHashMode) -> tuple[Any, Any, kvc.CanaryDeviceState]:
    """A canary buffer in which every request's chain is right."""
    sources = real_kv(mode)
    buffer, state = writer(mode)(kvc.fresh_records(NUM_SLOTS), fresh_state(), *write_operands(slots, lengths), sources)
    return buffer, sources, state


def writer(mode: kvc.RealKvHashMode) -> Callable[..., Any]:
    """A jitted write with buffer and state donated."""

    def step(buffer: Any, state: Any, plan: Any, ids: Any, positions: Any, slots: Any, sources: Any) -> Any:
        return kvc.write_step(
            buffer,
            plan,
            ids,
            positions,
            slots,
            state,
            tag=kvc.CanaryLaunchTag.TAIL_K_FULL,
            real_kv_sources=sources,
            real_kv_hash_mode=mode,
        )

    return jax.jit(step, donate_argnums=(0, 1))


def write_operands(slots: np.ndarray, lengths: np.ndarray) -> tuple[Any, ...]:
    """Plan and token arrays that write each request from position 0."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    positions = np.concatenate([np.arange(length) for length in lengths]).astype(np.int32)
    tokens = np.random.default_rng(2).integers(0, 50_000, len(slots)).astype(np.int32)
    plan = kvc.WritePlan(offsets, np.full(len(lengths), -1, np.int32), np.array([len(lengths)], np.int32))
    return jax.tree.map(jnp.asarray, (plan, tokens, positions, slots))


def real_kv(mode: kvc.RealKvHashMode) -> tuple[kvc.RealKvSource, ...]:
    """One source of random bytes, or none."""
    width = REAL_BYTES[mode]
    if not width:
        return ()
    array = np.random.default_rng(3).integers(0, 256, (NUM_SLOTS, width), np.uint8)
    return (kvc.RealKvSource(array=jnp.asarray(array), num_bytes_per_token=width, read_bytes=width),)


def fresh_state() -> kvc.CanaryDeviceState:
    """An empty log."""
    return kvc.CanaryDeviceState.allocate(kvc.CanaryConfig(mode=kvc.CanaryMode.LOG))


if __name__ == "__main__":
    main()
