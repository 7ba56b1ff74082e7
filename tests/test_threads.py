"""Launches that are large enough to be spread over the threads of a pool, and several of them at a time."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from helpers.backends import host
from helpers.random_cases import INT32_MAX, LaunchShape, random_verify, random_world, random_write, sprinkle
from helpers.states import assert_same_buffer, assert_same_state, fields, fresh_buffer, fresh_state, log_rows
from jax_kvcanary import reference
from jax_kvcanary._launch import Endpoint
from jax_kvcanary.constants import CANARY_CHAIN_ANCHOR, CanaryLaunchTag, FailReason, RealKvHashMode
from jax_kvcanary.plan import WritePlan
from jax_kvcanary.reference.hashes import slot_hash, to_signed
from jax_kvcanary.verify import verify_launch
from jax_kvcanary.write import write_launch

TAGS = (CanaryLaunchTag.TAIL_K_FULL, CanaryLaunchTag.TAIL_V_FULL)
NUM_SLOTS, V_SLOTS = 4_001, 3_701
#: Ring capacities: with room for every finding of these tests, and without.
ROOMY, TIGHT = 9_973, 97
#: Seconds for a run of this file in another process, jax's start included.
TIMEOUT_S = 300
#: What hashes nothing, and what reads four sources.
SOURCES = pytest.mark.parametrize("sources", [0, 7])


@pytest.mark.parametrize("ring_capacity", [ROOMY, TIGHT])
@SOURCES
def test_verify_counts_every_finding_once(sources, ring_capacity):
    launch, expect = verify_case(sources, ring_capacity)
    assert expect(ROOMY).violation_log.count() > 2 * TIGHT
    check_log(jax.jit(launch)(), expect, ring_capacity)


def test_a_sound_pool_is_silent():
    launch, _ = verify_case(7, TIGHT, wildness=0.0)
    assert launch().violation_log.count() == 0


@pytest.mark.parametrize("ring_capacity", [ROOMY, TIGHT])
@pytest.mark.parametrize("tokens", [101, 3_001])
@pytest.mark.parametrize("tree", [False, True])
@SOURCES
def test_write_of_two_halves(sources, tree, tokens, ring_capacity):
    """K and V go on from the same records in some rows and from different ones in others; V has fewer slots."""
    launch, expect = write_case(sources, tree, tokens, ring_capacity)
    got_bufs, got = jax.jit(launch)()
    want_bufs, _ = expect(ring_capacity)
    for got_buf, want_buf in zip(got_bufs, want_bufs, strict=True):
        assert_same_buffer(got_buf, want_buf)
    assert expect(ROOMY)[1].violation_log.count() > tokens / 20
    check_log(got, lambda capacity: expect(capacity)[1], ring_capacity)


def test_rows_without_entries_between_others_keep_their_records():
    """Only the slots that a row names are fingerprinted, also where the entries of rows leave a gap."""
    rng = np.random.default_rng(8)
    world = random_world(rng, LaunchShape(NUM_SLOTS, 0, 2, TIGHT, sources=7))
    offsets = int32(2003, 3001, 0, 701)  # rows of the entries [2003, 3001), none, [0, 701)
    plan = WritePlan(offsets, int32(-1, -1, -1), int32(3))
    slots, tokens = rng.permutation(NUM_SLOTS)[:3001].astype(np.int32), rng.integers(0, 99, 3001).astype(np.int32)
    operands = (plan, tokens, np.arange(3001, dtype=np.int32), slots)
    keywords = {"real_kv_sources": world.sources, "real_kv_hash_mode": world.mode, "tag": TAGS[0]}
    want, _ = reference.write_step(world.canary_buf, *operands, world.state, **keywords)
    (got,), _, _ = write_launch([Endpoint(world.canary_buf, TAGS[0], world.sources)], *operands, world.state, mode=world.mode)
    assert_same_buffer(got, want)
    untouched = np.setdiff1d(slots[701:2003], 0)
    np.testing.assert_array_equal(fields(got)[untouched], fields(world.canary_buf)[untouched])


def test_a_seed_that_hashes_to_the_anchor_is_a_seed_all_the_same():
    """K and V have one chain, but only K has a position to go on from: V has no such slot."""
    k = fresh_buffer(7)
    # splitmix64(0) is 0, so that the hash behind this record is splitmix64(splitmix64(token)).
    fields(k)[5] = (to_signed(unmixed(CANARY_CHAIN_ANCHOR)), 0, 0, 0)
    assert slot_hash(k, 5) == slot_hash(k, -1)
    operands = (WritePlan(int32(0, 2), int32(5), int32(1)), int32(11, 13), int32(3, 4), int32(1, 2))
    endpoints = endpoints_of((k, k[:3]), ())
    bufs, state, _ = write_launch(endpoints, *operands, fresh_state(TIGHT), mode=RealKvHashMode.NONE)
    for half, buf in zip(endpoints, bufs, strict=True):
        want, _ = reference.write_step(half.canary_buf, *operands, fresh_state(TIGHT), tag=half.tag)
        assert_same_buffer(buf, want)
    assert sorted(row[[0, 2, 7]].tolist() for row in log_rows(state)) == [
        [TAGS[0], 3, FailReason.WRITE_POSITION_MISMATCH],
        [TAGS[1], 3, FailReason.SLOT_OUT_OF_RANGE],
    ]


def test_programs_at_the_same_time():
    """Each runs two launches that do not depend on each other, while other threads run theirs."""
    (verify, expect_verify), (write, expect_write) = verify_case(7, ROOMY), write_case(7, False, 3_001, ROOMY)
    program = jax.jit(lambda: (verify(), write()))
    jax.block_until_ready(program())
    with ThreadPoolExecutor(5) as threads:
        results = list(threads.map(lambda _: host(program()), range(23)))
    (want_bufs, written), verified = expect_write(ROOMY), expect_verify(ROOMY)
    for got_verified, (got_bufs, got_written) in results:
        for got, want in ((got_verified, verified), (got_written, written)):
            assert_same_state(got, want)
        for got_buf, want_buf in zip(got_bufs, want_bufs, strict=True):
            assert_same_buffer(got_buf, want_buf)


# jax takes the size of the host's pool from NPROC, and from the cores that the process may use where that is not set.
@pytest.mark.parametrize(
    "environment",
    [{"NPROC": "1"}, {"NPROC": "7"}],
    ids=["one thread", "seven threads"],
)
def test_other_sizes_of_the_pool(environment):
    """A pool of one thread ends too, and one with more threads than cores computes the same."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # no worker of this run
    command = [sys.executable, "-m", "pytest", __file__, "-q", "-p", "no:cacheprovider", "-k", "not other_sizes and not 101"]
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**outside, "JAX_PLATFORMS": "cpu", **environment},
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def verify_case(sources: int, ring_capacity: int, wildness: float = 0.05) -> tuple[Any, Any]:
    """A launch over K and V, and what the reference finds with a ring of a given capacity. V is damaged more, and has fewer slots."""
    rng = np.random.default_rng(sources)
    shape = LaunchShape(NUM_SLOTS, 3_001, rows=2, ring_capacity=ring_capacity, sources=sources)
    (k, plan, _), keywords = random_verify(rng, shape, wildness)
    plan = dataclasses.replace(plan, verify_num_valid=int32(3_001), enable=int32(1))
    damage = rng.integers(0, 256, k.shape, np.uint8)
    v = np.where(rng.random((NUM_SLOTS, 1)) < wildness, damage, k)[: V_SLOTS if wildness else NUM_SLOTS]
    mode, endpoints = keywords["real_kv_hash_mode"], endpoints_of((k, v), keywords["real_kv_sources"])
    fresh = fresh_state(ring_capacity)

    def launch() -> Any:
        return verify_launch(endpoints, plan, fresh, mode=mode, check_expected_token=True)[0]

    @cache
    def expect(capacity: int) -> Any:
        state = fresh_state(capacity)
        for buf, tag in zip((k, v), TAGS, strict=True):
            state = reference.verify_step(buf, plan, state, **keywords | {"tag": tag, "check_expected_token": True})
        return state

    return launch, expect


def write_case(sources: int, tree: bool, tokens: int, ring_capacity: int) -> tuple[Any, Any]:
    """A launch over K and V, and what the reference makes of it with a ring of a given capacity.

    Slots are named twice within a row only: which of two rows a record comes from would be open.
    """
    rng = np.random.default_rng(sources)
    shape = LaunchShape(NUM_SLOTS, tokens, rows=7, ring_capacity=ring_capacity, sources=sources, check=True)
    while ("parents" in (case := random_write(rng, shape, 0.0, wide=False))[1]) != tree:
        pass
    (k, plan, ids, positions, _, _), keywords = case
    slots = rng.permutation(NUM_SLOTS)[:tokens]
    starts, ends = plan.write_offsets[:-1], plan.write_offsets[1:]
    for start, end in zip(starts, ends, strict=True):
        again = np.flatnonzero(rng.random(max(end - start - 3, 0)) < 0.1) + start
        slots[again + 3] = slots[again]
    slots = sprinkle(rng, slots, 0.05, [-1, NUM_SLOTS, INT32_MAX])
    positions = sprinkle(rng, positions, 0.05, [0, INT32_MAX, -1])
    if tree:
        keywords["parents"] = sprinkle(rng, keywords["parents"], 0.05, [INT32_MAX, tokens])

    # Rows in turn: the same seed record in both halves, another one in V, none in V.
    plan.write_seed_slot_indices[:] = [17, 19, V_SLOTS + 2, 23, 29, -1, NUM_SLOTS]
    v = k[:V_SLOTS].copy()
    fields(v)[[19, 29], [0, 2]] ^= 1
    mode, endpoints = keywords.pop("real_kv_hash_mode"), endpoints_of((k, v), keywords.pop("real_kv_sources"))
    keywords.pop("tag")
    fresh = fresh_state(ring_capacity)
    operands = (plan, ids.astype(np.int32), positions.astype(np.int32), slots.astype(np.int32))
    keywords = {name: value.astype(np.int32) for name, value in keywords.items()}

    def launch() -> Any:
        return write_launch(endpoints, *operands, fresh, mode=mode, **keywords)[:2]

    @cache
    def expect(capacity: int) -> Any:
        state, bufs = fresh_state(capacity), []
        for half in endpoints:
            buf, state = reference.write_step(
                half.canary_buf, *operands, state, tag=half.tag, real_kv_sources=half.sources, real_kv_hash_mode=mode, **keywords
            )
            bufs.append(buf)
        return bufs, state

    return launch, expect


def unmixed(x: int) -> int:
    """The word whose splitmix64 is x."""
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        x ^= x >> shift ^ x >> 2 * shift
        x = x * pow(factor, -1, 2**64) % 2**64
    return x


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def endpoints_of(bufs: Any, sources: Any) -> list[Endpoint]:
    return [Endpoint(buf, tag, sources) for buf, tag in zip(bufs, TAGS, strict=True)]


def check_log(got: Any, expect: Any, ring_capacity: int) -> None:
    """Compare logs and counters; where the ring had no room for all rows, any of them may stay."""
    assert_same_state(got, expect(ring_capacity), all_rows=log_rows(expect(ROOMY)) if ring_capacity == TIGHT else None)
