"""Dumps made by hand: chains of any size, written without a canary, in a vectorised way."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np

import jax_kvcanary as kvc
from jax_kvcanary.reference.hashes import ANCHOR_HASH, mix3

CREATED = datetime(2026, 3, 14, 15, 9, 26, tzinfo=UTC)


def fresh(num_slots):
    return np.full((num_slots, 4), -1, np.int64)


def write_chains(records, slots, tokens):
    """Write requests of equal length: slots and tokens are [requests, length]."""
    prev = np.full(len(slots), ANCHOR_HASH, np.uint64)
    for position in range(slots.shape[1]):
        own, token = slots[:, position], tokens[:, position].astype(np.int64)
        positions = np.full(len(own), position)
        records[own] = np.stack([token, positions, prev.view(np.int64), np.zeros_like(token)], axis=1)
        prev = mix3(prev, token, positions)
    return records


def make_dump(records, rows=(), *, count=None, steps=None, kind=kvc.PoolKind.FULL, **more):
    """A dump of one group without a V half; rows are those of the ring."""
    rows = np.array(rows, np.int64).reshape(-1, 8)
    reasons = np.zeros((12, 8), np.uint32)
    for row in rows.tolist():
        for bit in range(7):
            reasons[row[0], bit] += row[7] >> bit & 1
    runs = np.zeros(12, np.int64)
    runs[[0, 2]] = 2 * 41
    group = kvc.DumpedGroup(kind, records, records)
    return kvc.CanaryDump(
        **{
            "created": CREATED,
            "environment": {"jax_kvcanary": "0.1.0"},
            "config": kvc.CanaryConfig("log", ring_capacity=max(len(rows), 1)),
            "capacities": kvc.CanaryLaunchCapacities(53, 5),
            "swa_window_size": 0,
            "groups": (group,),
            "violation_rows": rows,
            "violation_count": len(rows) if count is None else count,
            "violation_steps": np.full(len(rows), -1) if steps is None else np.array(steps, np.int64),
            "violation_request_rows": np.full(len(rows), -1),
            "kernel_run_counters": runs,
            "slot_run_counters": runs * 7,
            "fail_reason_counters": reasons,
            "verify_skip_counters": np.zeros(12, np.uint32),
            **more,
        }
    )


def crowded(num_slots, requests, length, seed=3):
    """Records and slots [requests, length] of a pool with requests in shuffled slots, the first of them in runs."""
    rng = np.random.default_rng(seed)
    order = np.arange(1, num_slots)
    half = len(order) // 2
    order[half:] = rng.permutation(order[half:])
    slots = rng.permutation(order[: requests * length].reshape(requests, length)) if requests * length <= len(order) else None
    return write_chains(fresh(num_slots), slots, rng.integers(0, 32000, slots.shape)), slots
