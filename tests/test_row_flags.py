"""Findings attributed to the rows of a batch, so that one request can be aborted and the others go on."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import jax_kvcanary as kvc
from helpers.backends import host
from helpers.loops import (
    CAPACITIES,
    CONFIG,
    ROWS,
    Loop,
    baseline,
    bracket,
    forward,
    install,
    int32,
    jitted_step,
    make_pool,
    rows_of,
    serve,
    tokens_of,
)
from helpers.random_cases import LAUNCH_SHAPES, random_write
from helpers.states import fresh_state, log_rows, multiset
from jax_kvcanary import FailReason as Reason
from jax_kvcanary._launch import BatchRows, Endpoint
from jax_kvcanary.pools import MHATokenToKVPool
from jax_kvcanary.write import write_launch

CHAIN, POSITION = Reason.VERIFY_CHAIN_HASH_MISMATCH, Reason.VERIFY_POSITION_MISMATCH


class ThreeRequests(Loop):
    """Requests in rows 1, 2 and 4 of the table with a prefix each; batches take them in the order 4, padding, 1 or 2."""

    LENGTHS = {1: 5, 2: 3, 4: 7}  # noqa: RUF012 - a constant

    def __init__(self, **options):
        super().__init__(**options)
        for row, length in self.LENGTHS.items():
            assert self.extend(row, 0, length) == []

    def decode(self, other, *, batch_change=lambda batch: batch):
        """Flags of a step in which rows 4 and another one go on by one token, with padding between them."""
        for row in (4, other):
            self.requests.place(row, self.LENGTHS[row], 1)
        work = [(4, 7, tokens_of(4, 7, 1)), (0, 0, []), (other, self.LENGTHS[other], tokens_of(other, self.LENGTHS[other], 1))]
        self.state, report, _, self.pool = jitted_step(self.canary, self.state, batch_change(self.requests.batch(*work)), self.pool)
        self.report = report
        return np.asarray(report.row_flags).tolist()


def test_a_sound_step_flags_nothing():
    loop = ThreeRequests()
    assert loop.decode(1) == [0, 0, 0]
    assert (loop.report.row_flags.dtype, loop.report.row_flags.shape) == (np.int32, (ROWS,))


def test_the_row_that_reads_a_wrong_slot_is_flagged():
    loop = ThreeRequests()
    loop.requests.table[1, 2] = loop.requests.table[2, 1]
    assert loop.decode(1) == [0, 0, CHAIN | POSITION]
    assert np.asarray(loop.report.violation_request_rows)[:9].tolist() == [1] * 8 + [-1]


def test_the_first_row_is_flagged_at_its_first_and_last_entry():
    """The last one is what the write goes on from."""
    for position, written in ((0, 0), (6, Reason.WRITE_POSITION_MISMATCH)):
        loop = ThreeRequests()
        loop.requests.table[4, position] = loop.requests.table[2, 1]
        assert loop.decode(1) == [CHAIN | POSITION | written, 0, 0]


def test_a_fault_that_no_row_reads_flags_none():
    loop = ThreeRequests()
    loop.requests.table[2, 1] = loop.requests.table[1, 2]
    assert loop.decode(1) == [0, 0, 0]


def test_every_request_of_a_shared_slot_is_flagged():
    loop = ThreeRequests()
    stolen = loop.requests.table[1, 0]
    loop.requests.table[4, 2] = stolen
    loop.requests.table[1, 3] = stolen
    assert loop.decode(1) == [CHAIN | POSITION, 0, CHAIN | POSITION]
    by_row = {}
    for row, request in zip(rows_of(loop.report).tolist(), np.asarray(loop.report.violation_request_rows).tolist(), strict=False):
        by_row.setdefault(request, set()).add(row[1])
    table = loop.requests.table
    assert by_row == {4: {stolen, table[4, 3]}, 1: {stolen, table[1, 4]}}


def test_writes_flag_the_row_that_writes():
    loop = ThreeRequests()

    def jump(batch):
        positions = batch.positions.copy()
        positions[1] += 1
        return dataclasses.replace(batch, positions=positions)

    assert loop.decode(1, batch_change=jump) == [0, 0, Reason.WRITE_POSITION_MISMATCH]


def test_flags_belong_to_one_step():
    loop = ThreeRequests()
    kept = loop.requests.table[1, 2]
    loop.requests.table[1, 2] = loop.requests.table[2, 1]
    assert loop.decode(1) == [0, 0, CHAIN | POSITION]
    loop.requests.table[1, 2] = kept
    assert loop.decode(1) == [0, 0, 0]
    assert int(loop.report.violation_write_index[0]) == 8


def test_a_full_ring_hides_no_row():
    loop = ThreeRequests(config=dataclasses.replace(CONFIG, ring_capacity=1))
    loop.requests.table[4, 3] = loop.requests.table[1, 2] = loop.requests.table[2, 1]
    assert loop.decode(1) == [CHAIN | POSITION, 0, CHAIN | POSITION]
    assert np.asarray(loop.report.violation_request_rows).shape == (1,)


def test_a_row_that_is_cut_or_seeded_outside_is_flagged():
    """Findings of a row as a whole."""
    loop = ThreeRequests()
    loop.requests.table[4, 6] = 9999
    assert loop.decode(1) == [Reason.SLOT_OUT_OF_RANGE, 0, 0]


def test_both_groups_flag_one_row():
    """Two groups over one pool: a fault in either belongs to the row."""
    pool = make_pool(MHATokenToKVPool)
    canary, state = install(pool)
    state = dataclasses.replace(state, groups=(state.groups[0], jax.tree.map(lambda leaf: leaf.copy(), state.groups[0])))
    batches = serve()[:2]
    for batch in batches[:1]:
        state, report, _, pool = jitted_step(canary, state, batch, pool)
        assert not np.asarray(report.row_flags).any()
    first, second = state.groups
    broken = dataclasses.replace(second, k_head=second.k_head.at[batches[0].out_cache_loc[3], 0].add(1))
    _, report, _, _ = jitted_step(canary, dataclasses.replace(state, groups=(first, broken)), batches[1], pool)
    assert np.asarray(report.row_flags).tolist() == [CHAIN, 0, 0]


def test_a_sweep_flags_no_row():
    loop = ThreeRequests()
    slots = int32([9, 0])
    plan = kvc.VerifyPlan(slots, int32([-1, -1]), int32([5, 0]), int32([-1, 0]), int32([1]), int32([1]))
    _, report = loop.canary.sweep(loop.state, plan, loop.pool)
    assert report.row_flags.shape == (0,)
    assert rows_of(report)[:, 1].tolist() == [9, 9]
    assert np.asarray(report.violation_request_rows)[:3].tolist() == [-1, -1, -1]


def test_a_batch_without_rows():
    pool = make_pool(MHATokenToKVPool)
    canary, state = install(pool)
    none = int32([])
    batch = kvc.ForwardBatch(none, none, none, kvc.PlanInput(none, none, none), np.zeros((3, 5), np.int32))
    step = jax.jit(canary.wrap(lambda _, pool: (None, pool)))
    for _ in range(2):
        state, report, _, pool = step(state, batch, pool)
    assert (report.row_flags.shape, report.row_flags.dtype) == ((0,), np.int32)


def test_flags_in_a_scan():
    pool = make_pool(MHATokenToKVPool)
    canary, state = install(pool)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *serve(faults=True))

    def body(carry, batch):
        state, report, _, pool = bracket(canary, carry[0], batch, carry[1])
        return (state, pool), report.row_flags

    _, flags = jax.lax.scan(body, (state, pool), stacked)
    assert flags.tolist() == [np.asarray(report.row_flags).tolist() for report in baseline(MHATokenToKVPool)[0]]
    assert (flags != 0).any()


def test_a_violation_names_its_request():
    loop = ThreeRequests()
    monitor = kvc.CanaryMonitor(loop.canary)
    loop.requests.table[1, 2] = loop.requests.table[2, 1]
    loop.decode(1)
    monitor.observe(loop.report, loop.state)
    monitor.flush(loop.state)
    assert {violation.request_row for violation in monitor.violations} == {1}
    assert any("in the K records of the full pool, for request row 1\n" in str(violation) for violation in monitor.violations)


def test_one_request_is_aborted_and_the_others_go_on():
    """What a server does: the request at fault leaves, its slots are released, and nobody else notices."""
    loop = ThreeRequests()
    table = loop.requests.table
    table[1, 2] = table[2, 1]
    flags = loop.decode(1)
    at_fault = [row for row, found in zip((4, 0, 1), flags, strict=True) if found]
    assert at_fault == [1]
    own = [slot for position, slot in enumerate(table[1, :6]) if position != 2]
    loop.state = loop.canary.release(loop.state, int32(own), loop.pool)
    loop.LENGTHS = {4: 8, 2: 3}
    assert loop.decode(2) == [0, 0, 0]


def test_a_state_without_the_list_of_request_rows():
    """A log of two arrays, as it may be made by hand, does without."""
    pool = make_pool(MHATokenToKVPool)
    canary, state = install(pool)
    log = kvc.ViolationLog(state.device_state.violation_log.violation_ring, state.device_state.violation_log.violation_write_index)
    state = dataclasses.replace(state, device_state=dataclasses.replace(state.device_state, violation_log=log))
    for batch, want in zip(serve(faults=True), baseline(MHATokenToKVPool)[0], strict=True):
        state, report, _, pool = jitted_step(canary, state, batch, pool)
        assert report.violation_request_rows is None
        np.testing.assert_array_equal(report.row_flags, want.row_flags)
    assert state.device_state.violation_log.violation_request_rows is None


@pytest.mark.parametrize("seed", range(40))
def test_rows_of_random_writes(seed):
    """The flags of a row are those of a launch with that row alone."""
    rng = np.random.default_rng(seed)
    shape = LAUNCH_SHAPES[seed % len(LAUNCH_SHAPES)]
    (buf, plan, tokens, positions, slots, state), keywords = random_write(rng, shape, 0.2, wide=False)
    del state
    number = min(max(int(plan.write_num_valid_reqs[0]), 0), shape.rows)
    tag, sources, mode = (keywords.pop(name) for name in ("tag", "real_kv_sources", "real_kv_hash_mode"))
    narrow = {name: value.astype(np.int32) for name, value in keywords.items()}
    entries = [values.astype(np.int32) for values in (tokens, positions, slots)]
    rows = BatchRows(np.arange(100, 100 + shape.rows, dtype=np.int32), np.zeros(shape.rows, np.int32))
    log = kvc.ViolationLog.allocate(ring_capacity=999)
    state = dataclasses.replace(fresh_state(999), violation_log=log)
    _, state, marked = write_launch([Endpoint(buf, tag, sources)], plan, *entries, state, mode=mode, rows=rows, **narrow)
    state, flags = host(state), np.asarray(marked.flags)
    requests = state.violation_log.violation_request_rows
    for row in range(shape.rows):
        alone = kvc.WritePlan(plan.write_offsets[row : row + 2], plan.write_seed_slot_indices[row : row + 1], int32([row < number]))
        _, found = kvc.reference.write_step(
            buf, alone, *entries, fresh_state(999), tag=tag, real_kv_sources=sources, real_kv_hash_mode=mode, **narrow
        )
        want = log_rows(found)
        assert flags[row] == np.bitwise_or.reduce(want[:, 7], initial=0)
        got = log_rows(state)[requests[: state.violation_log.count()] == 100 + row]
        assert multiset(got) == multiset(want)


def test_flags_without_the_wrapper_s_help():
    """``pre_forward`` and ``post_forward`` in programs of their own hand the flags on."""
    pool = make_pool(MHATokenToKVPool)
    canary, state = kvc.install_canary(pool, CONFIG, capacities=CAPACITIES)
    batch = serve()[0]
    state, step = jax.jit(canary.pre_forward)(state, batch, pool)
    assert np.asarray(step.row_flags).tolist() == [0] * ROWS
    _, pool = forward(batch, pool)
    _, report = jax.jit(canary.post_forward)(state, dataclasses.replace(step, row_flags=int32([0, 2, 0])), batch, pool)
    assert np.asarray(report.row_flags).tolist() == [0, 2, 0]


def test_a_plan_without_row_offsets_leaves_the_flags_alone():
    """Entries that belong to no row are found, and what was known of the rows stays. What a write finds has a row in any case."""
    pool = make_pool(MHATokenToKVPool)
    canary, state = install(pool)
    batch = serve()[1]
    state, step = canary.pre_forward(state, batch, pool)
    plan = dataclasses.replace(step.plans[0], verify=dataclasses.replace(step.plans[0].verify, row_offsets=None))
    step = dataclasses.replace(step, plans=(plan,), row_flags=int32([0, 8, 0]))
    _, report = canary.post_forward(state, step, batch, pool)
    assert np.asarray(report.row_flags).tolist() == [Reason.WRITE_POSITION_MISMATCH, 8, 0]
    assert CHAIN & int(np.bitwise_or.reduce(rows_of(report)[:, 7])) == CHAIN
