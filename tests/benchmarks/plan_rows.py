"""Device time of plans: a full batch, and an idle one in a plan of the same capacity.

python tests/benchmarks/plan_rows.py [--rows N] [--entries N] [--capacity N]
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device_time import DeviceTimeError, device_operations, print_operations, total_us
from table import Row, allow, compare, text
from wall_time import wall_times

import jax_kvcanary as kvc

ROWS, ENTRIES, CAPACITY, IDLE_ENTRIES = 256, 800_000, 2_000_000, 100
_ALLOWED_US = 14.0
_TABLES = 8  # taken in turn: together with the plans they are larger than a GPU's cache


def rows(batch: int = ROWS, entries: int = ENTRIES, capacity: int = CAPACITY) -> list[Row]:
    """Measure both plans.

    Args:
        batch: rows of the full batch.
        entries: verify entries of it, a multiple of ``batch``.
        capacity: room of both plans.
    """
    if entries % batch:
        raise ValueError(f"`entries` is {entries}, but it must be a multiple of `batch` = {batch}.")
    cases = {
        f"plan, {batch} rows, {entries} entries, room for {capacity}": (batch, entries // batch),
        f"plan, 1 row, {IDLE_ENTRIES} entries, room for {capacity}": (1, IDLE_ENTRIES),
    }
    full_work, idle_work = cases
    calls = {work: _plans(bs, prefix, capacity) for work, (bs, prefix) in cases.items()}
    try:
        operations = {work: device_operations(call, repeats=2 * _TABLES) for work, call in calls.items()}
    except DeviceTimeError as error:
        print(f"Wall times only. {error}")
        times = wall_times(calls, rounds=8, steps=2 * _TABLES)
        return [_beside_full(f"{work} (wall time, no device profile)", times.median(work), times.median(full_work)) for work in cases]
    for work, ran in operations.items():
        print_operations(work, ran)
    full_us, idle_us = total_us(operations[full_work]), total_us(operations[idle_work])
    return [allow(full_work, "-", full_us, _ALLOWED_US), _beside_full(idle_work, idle_us, full_us)]


def _beside_full(work: str, us: float, full_us: float) -> Row:
    return compare(work, "-", us, "full plan", full_us)


def _plans(batch: int, prefix: int, capacity: int) -> Callable[[], Any]:
    """A call that plans a decode step of equally long requests, with another table each time."""
    rng = np.random.default_rng(batch)
    tables = [jnp.asarray(rng.integers(1, capacity, (batch + 1, prefix + 1)), jnp.int32) for _ in range(_TABLES)]
    inputs = kvc.PlanInput(jnp.arange(1, batch + 1, dtype=jnp.int32), jnp.full(batch, prefix, jnp.int32), jnp.ones(batch, jnp.int32))
    plan = jax.jit(functools.partial(kvc.plan, verify_capacity=capacity))
    verify = plan(inputs, tables[0]).verify
    if (int(verify.verify_num_valid[0]), int(verify.enable[0])) != (batch * prefix, 1):
        raise RuntimeError(f"The plan has {verify.verify_num_valid} entries and `enable` {verify.enable}, not {batch * prefix} and 1.")
    turn = itertools.cycle(tables)
    return lambda: plan(inputs, next(turn))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--entries", type=int, default=ENTRIES)
    parser.add_argument("--capacity", type=int, default=CAPACITY)
    arguments = parser.parse_args()
    print(text(rows(arguments.rows, arguments.entries, arguments.capacity)))


if __name__ == "__main__":
    main()
