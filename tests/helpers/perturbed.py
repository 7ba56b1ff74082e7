"""A batch with rows of every sort on a pool with a sliding window, for faults to be planted in."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

import jax_kvcanary as kvc
from jax_kvcanary import PoolKind
from jax_kvcanary.perturb import PerturbTarget
from jax_kvcanary.selftest.pool import allocate_pool

NUM_SLOTS, NUM_SWA_SLOTS, WINDOW = 61, 37, 3
MAX_REQS, MAX_SEQ_LEN, TOKENS = 7, 11, 17

#: Request row, prefix length, extend length: decode, prefill of more than a window, a second chunk, padding, rows that make no sense, one
#: that writes nothing.
ROWS = ((4, 6, 1), (0, 3, 5), (2, 0, 5), (5, 4, 3), (MAX_REQS, 2, 1), (3, MAX_SEQ_LEN + 1, 2), (1, 5, 0))
VALID = {4: (6, 1), 2: (0, 5), 5: (4, 3), 1: (5, 0)}
#: First entry of each row in the token arrays.
FIRST_ENTRY = {4: 0, 2: 1, 5: 6}
LIVE_TOKENS = 12


def int32(values):
    return np.array(values, np.int32)


def make_pool():
    """Every slot of the full pool up to the size of the other has a slot there."""
    pool = allocate_pool(num_slots=NUM_SLOTS, num_swa_slots=NUM_SWA_SLOTS)
    lut = np.zeros(NUM_SLOTS, np.int32)
    lut[1:NUM_SWA_SLOTS] = np.random.default_rng(7).permutation(np.arange(1, NUM_SWA_SLOTS))
    return dataclasses.replace(pool, full_to_swa_index_mapping=lut)


def make_batch(dtype=np.int32):
    """Slots of the table are all different, and in both pools; tokens are all different."""
    table = np.zeros((MAX_REQS, MAX_SEQ_LEN), dtype)
    slots = np.random.default_rng(5).permutation(np.arange(1, NUM_SWA_SLOTS)).tolist()
    for row, (prefix, extend) in VALID.items():
        table[row, : prefix + extend] = [slots.pop() for _ in range(prefix + extend)]
    ids, positions, out = np.zeros((3, TOKENS), dtype)
    ids[:LIVE_TOKENS] = np.arange(100, 100 + LIVE_TOKENS)
    for row, first in FIRST_ENTRY.items():
        prefix, extend = VALID[row]
        positions[first : first + extend] = np.arange(prefix, prefix + extend)
        out[first : first + extend] = table[row, prefix : prefix + extend]
    req, prefix, extend = np.array(ROWS, dtype).T
    return kvc.ForwardBatch.extend(
        input_ids=ids,
        positions=positions,
        out_cache_loc=out,
        req_pool_indices=req,
        prefix_lens=prefix,
        extend_seq_lens=extend,
        req_to_token=table,
    )


def make_target(kind=PoolKind.FULL, **changes):
    config = kvc.CanaryConfig("log", real_kv_hash_mode=kvc.RealKvHashMode.ALL)
    groups = kvc.attach_canary_buffers(make_pool(), config)
    canary = kvc.Canary(config, kvc.CanaryLaunchCapacities(67, len(ROWS)), WINDOW)
    target = PerturbTarget.of(canary, kvc.CanaryState(groups, kvc.CanaryDeviceState.allocate(config)), kind)
    return dataclasses.replace(target, **changes)


def own_slot(kind, slot):
    return int(slot if kind is PoolKind.FULL else make_pool().full_to_swa_index_mapping[slot])


def verified(kind):
    """Positions that a group verifies, by request row."""
    start = {row: 0 if kind is PoolKind.FULL else max(0, prefix - WINDOW) for row, (prefix, _) in VALID.items()}
    return {(row, p) for row, (prefix, _) in VALID.items() for p in range(start[row], prefix)}


def written(kind):
    """Row, position and entry of the tokens that a group verifies in the next step."""
    found = set()
    for row, first in FIRST_ENTRY.items():
        prefix, extend = VALID[row]
        skipped = 0 if kind is PoolKind.FULL else max(0, extend - WINDOW)
        found |= {(row, prefix + i, first + i) for i in range(skipped, extend)}
    return found


def values_of(record):
    """A perturbation as a dictionary of ints."""
    return {name: int(value) for name, value in vars(jax.device_get(record)).items()}


def nothing():
    return {"happened": 0, **dict.fromkeys(("row", "position", "entry", "other_entry", "slot", "source", "byte", "before", "after"), -1)}
