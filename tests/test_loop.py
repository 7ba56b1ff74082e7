"""The canary in a small serving loop: what it finds, what it leaves alone, and that every way to run a step is the same."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_kvcanary as kvc
from helpers.backends import host
from helpers.states import assert_same_buffer, assert_same_state, fields, multiset
from jax_kvcanary import CanaryLaunchTag as Tag
from jax_kvcanary import FailReason as Reason
from jax_kvcanary.pools import FusedMHATokenToKVPool, MHATokenToKVPool

NUM_SLOTS, LAYERS, HEADS, HEAD_DIM = 67, 2, 3, 4
TOKENS, ROWS, MAX_REQS, MAX_SEQ_LEN = 13, 3, 5, 23
POOLS = (MHATokenToKVPool, FusedMHATokenToKVPool)
CAPACITIES = kvc.CanaryLaunchCapacities.from_pool(NUM_SLOTS, ROWS)
CONFIG = kvc.CanaryConfig("log", ring_capacity=101, real_kv_hash_mode=kvc.RealKvHashMode.ALL, real_kv_layers=(0, -1))

#: A token whose forward also overwrites the KV of a slot that is not its own.
STRAY_TOKEN, STRAY_SLOT = 666, 29

EVERY_PHASE = (Tag.HEAD_K_FULL, Tag.HEAD_V_FULL, Tag.TAIL_K_FULL, Tag.TAIL_V_FULL)
#: What the record of a slot that nothing wrote differs in.
UNWRITTEN = Reason.VERIFY_CHAIN_HASH_MISMATCH | Reason.VERIFY_POSITION_MISMATCH | Reason.VERIFY_REAL_KV_HASH_MISMATCH
TAILS = (Tag.TAIL_K_FULL, Tag.TAIL_V_FULL)


def int32(values):
    return np.array(values, np.int32)


class Requests:
    """The engine's side: which slot each position of a request has, and batches of one fixed, padded size."""

    def __init__(self):
        self.table = np.zeros((MAX_REQS, MAX_SEQ_LEN), np.int32)
        # Neighbouring positions lie apart.
        self.free = [1 + (38 + 7 * i) % (NUM_SLOTS - 1) for i in range(NUM_SLOTS - 1)][::-1]

    def lengths(self, work):
        """Row index, prefix length and tokens of each row, padded with empty rows of index 0."""
        return [*work, *[(0, 0, [])] * (ROWS - len(work))]

    def place(self, row, start, count):
        """New slots for positions that have none yet."""
        for position in range(start, start + count):
            self.table[row, position] = self.free.pop()

    def batch(self, *work, **more):
        """A batch of (row, prefix_len, tokens); positions follow the prefix, slots are those of the table."""
        ids, positions, slots = np.zeros((3, TOKENS), np.int32)
        at = 0
        for row, prefix, tokens in work:
            for position, token in enumerate(tokens, prefix):
                ids[at], positions[at], slots[at] = token, position, self.table[row, position]
                at += 1
        rows, prefixes, extends = zip(*((row, prefix, len(tokens)) for row, prefix, tokens in self.lengths(work)), strict=True)
        return kvc.ForwardBatch.extend(
            input_ids=ids,
            positions=positions,
            out_cache_loc=slots,
            req_pool_indices=int32(rows),
            prefix_lens=int32(prefixes),
            extend_seq_lens=int32(extends),
            req_to_token=self.table.copy(),
            **more,
        )


def tokens_of(row, start, count):
    return [100 * row + position for position in range(start, start + count)]


def serve(*, faults=False):
    """Eight steps: prefill, a second chunk, a shared prefix, decode, a mixed batch, padding between live rows."""
    requests = Requests()

    def work(row, prefix, count, stray=False):
        requests.place(row, prefix, count)
        return (row, prefix, [STRAY_TOKEN] if stray and faults else tokens_of(row, prefix, count))

    batches = [requests.batch(work(1, 0, 7)), requests.batch(work(1, 7, 4))]
    requests.table[2, :5] = requests.table[1, :5]
    batches.append(requests.batch(work(1, 11, 1), work(2, 5, 6)))
    batches.append(requests.batch(work(1, 12, 1), work(2, 11, 1)))
    batches.append(requests.batch(work(1, 13, 1), work(2, 12, 1), work(3, 0, 3)))
    assert requests.table[1, 8] == STRAY_SLOT  # its only owner is row 1
    batches.append(requests.batch(work(1, 14, 1, stray=True), work(3, 3, 1)))
    if faults:  # position 1 of row 3 is mixed up with position 3 of row 1
        requests.table[3, 1] = requests.table[1, 3]
    batches.append(requests.batch(work(1, 15, 1), (0, 0, []), work(3, 4, 1)))
    batches.append(requests.batch(work(2, 13, 1)))
    return batches


def make_pool(pool_class, page_size=1):
    return pool_class.allocate(num_slots=NUM_SLOTS, num_layers=LAYERS, num_kv_heads=HEADS, head_dim=HEAD_DIM, page_size=page_size)


def forward(batch, pool):
    """A model of whole numbers: KV follows from token and position, the output sums up the KV that each row sees."""
    feature = jnp.arange(HEADS * HEAD_DIM, dtype=jnp.int32).reshape(HEADS, HEAD_DIM)
    base = (jnp.asarray(batch.input_ids) * 3 + batch.positions)[:, None, None]
    stray = jnp.where((jnp.asarray(batch.input_ids) == STRAY_TOKEN).any(), STRAY_SLOT, -1)[None]
    for layer in range(LAYERS):
        k, v = (((base + feature * (layer + 1 + n)) % 61).astype(jnp.float32) for n in (0, 5))
        pool = pool.write(layer, batch.out_cache_loc, k, v)
        pool = pool.write(layer, stray, jnp.full((1, HEADS, HEAD_DIM), 77.0), jnp.full((1, HEADS, HEAD_DIM), 78.0))
    first = jax.tree.leaves(pool)[0].reshape(NUM_SLOTS, -1)[:, :HEAD_DIM].astype(jnp.int32)
    rows = batch.plan_input
    seen = jnp.arange(MAX_SEQ_LEN, dtype=jnp.int32) < (jnp.asarray(rows.prefix_lens) + rows.extend_seq_lens)[:, None]
    slots = jnp.asarray(batch.req_to_token)[rows.req_pool_indices]
    return jnp.where(seen[..., None], first[slots], 0).sum(1, dtype=jnp.int32), pool


def bracket(canary, state, batch, pool):
    """One step, piece by piece."""
    state, step = canary.pre_forward(state, batch, pool)
    out, pool = forward(batch, pool)
    state, report = canary.post_forward(state, step, batch, pool)
    return state, report, out, pool


def install(pool, config=CONFIG, **options):
    canary, state = kvc.install_canary(pool, config, capacities=CAPACITIES, **options)
    return canary, canary.mark_init_finished(state)


def rows_of(report):
    """The rows of a report's ring."""
    return kvc.to_int64(np.asarray(report.violation_ring))[: int(np.asarray(report.violation_write_index)[0])]


def findings(report, already=0):
    """What a report adds behind its first rows: sorted (tag, slot, reasons)."""
    return sorted((row[0], row[1], row[7]) for row in rows_of(report)[already:].tolist())


def at(tags, slot, reasons):
    return [(int(tag), int(slot), int(reasons)) for tag in tags]


class Loop:
    """A canary on a pool, stepped by a jitted and donated function."""

    def __init__(self, config=CONFIG, pool_class=MHATokenToKVPool, *, finished=True, **options):
        self.requests = Requests()
        self.pool = make_pool(pool_class)
        self.canary, state = kvc.install_canary(self.pool, config, capacities=CAPACITIES, **options)
        self.state = self.canary.mark_init_finished(state) if finished else state
        self.seen = 0

    def step(self, batch):
        """Findings of one forward."""
        self.state, report, _, self.pool = jitted_step(self.canary, self.state, batch, self.pool)
        return self.gained(report)

    def extend(self, row, prefix, count, **more):
        """Findings of one request's prefill or decode into new slots."""
        self.requests.place(row, prefix, count)
        return self.step(self.requests.batch((row, prefix, tokens_of(row, prefix, count)), **more))

    def gained(self, report):
        gained = findings(report, self.seen)
        self.seen += len(gained)
        return gained

    def set_expected_tokens(self, table):
        device_state = dataclasses.replace(self.state.device_state, req_to_verify_expected_tokens=jnp.asarray(table))
        self.state = dataclasses.replace(self.state, device_state=device_state)


@partial(jax.jit, static_argnums=0, donate_argnums=(1, 3))
def jitted_step(canary, state, batch, pool):
    return bracket(canary, state, batch, pool)


# Every way to run the steps.


def run(step, state, batches, pool):
    """Reports and outputs of all steps on the host, and what is left."""
    reports, outs = [], []
    for batch in batches:
        state, report, out, pool = step(state, batch, pool)
        reports.append(host(report))
        outs.append(np.asarray(out))
    return reports, outs, host(state), host(pool)


def run_eager(canary, state, batches, pool):
    return run(partial(bracket, canary), state, batches, pool)


def run_jit(canary, state, batches, pool):
    return run(jax.jit(partial(bracket, canary)), state, batches, pool)


def run_donated(canary, state, batches, pool):
    return run(partial(jitted_step, canary), state, batches, pool)


def run_wrapped(canary, state, batches, pool):
    return run(jax.jit(canary.wrap(forward), donate_argnums=(0, 2)), state, batches, pool)


def run_scan(canary, state, batches, pool):
    @partial(jax.jit, donate_argnums=(0, 2))
    def steps(state, stacked, pool):
        def body(carry, batch):
            state, report, out, pool = bracket(canary, carry[0], batch, carry[1])
            return (state, pool), (report, out)

        return jax.lax.scan(body, (state, pool), stacked)

    (state, pool), (reports, outs) = host(steps(state, jax.tree.map(lambda *leaves: np.stack(leaves), *batches), pool))
    return [jax.tree.map(lambda leaf, i=i: leaf[i], reports) for i in range(len(batches))], list(outs), state, pool


@cache
def baseline(pool_class):
    pool = make_pool(pool_class)
    return run_jit(*install(pool), serve(faults=True), pool)


def assert_same_run(got, want):
    """Two runs agree in everything but the order of the rows that one launch wrote."""
    for got_report, want_report in zip(got[0], want[0], strict=True):
        for got_leaf, want_leaf in zip(jax.tree.leaves(got_report.summary), jax.tree.leaves(want_report.summary), strict=True):
            np.testing.assert_array_equal(got_leaf, want_leaf)
            assert got_leaf.dtype == want_leaf.dtype
        assert multiset(rows_of(got_report)) == multiset(rows_of(want_report))
    np.testing.assert_array_equal(got[1], want[1])
    assert_same_state(got[2].device_state, want[2].device_state)
    for got_group, want_group in zip(got[2].groups, want[2].groups, strict=True):
        for got_buf, want_buf in zip(jax.tree.leaves(got_group), jax.tree.leaves(want_group), strict=True):
            assert_same_buffer(got_buf, want_buf)
    assert_same_pool(got[3], want[3])


def assert_same_pool(got, want):
    for got_array, want_array in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (got_array.dtype, got_array.shape) == (want_array.dtype, want_array.shape)
        np.testing.assert_array_equal(np.asarray(got_array).view(np.uint8), np.asarray(want_array).view(np.uint8))


@pytest.mark.parametrize(
    ("runner", "pool_class"),
    [(run_eager, MHATokenToKVPool), *itertools.product((run_donated, run_wrapped, run_scan), POOLS)],
)
def test_every_way_to_run_a_step_is_the_same(runner, pool_class):
    pool = make_pool(pool_class)
    assert_same_run(runner(*install(pool), serve(faults=True), pool), baseline(pool_class))


@pytest.mark.parametrize("pool_class", POOLS)
def test_faults_are_found_at_their_step(pool_class):
    reports = baseline(pool_class)[0]
    table = serve(faults=True)[6].req_to_token
    mixed_up, behind = table[3, 1], table[3, 2]
    stray = at(TAILS, STRAY_SLOT, Reason.VERIFY_REAL_KV_HASH_MISMATCH)
    table_fault = at(EVERY_PHASE, mixed_up, Reason.VERIFY_CHAIN_HASH_MISMATCH | Reason.VERIFY_POSITION_MISMATCH)
    table_fault += at(EVERY_PHASE, behind, Reason.VERIFY_CHAIN_HASH_MISMATCH)
    totals = [len(rows_of(report)) for report in reports]
    got = [findings(report, before) for report, before in zip(reports, [0, *totals], strict=False)]
    assert got == [[], [], [], [], [], stray, sorted(stray + table_fault), []]


@pytest.mark.parametrize("pool_class", POOLS)
def test_sound_steps_are_silent_and_counted(pool_class):
    pool, batches = make_pool(pool_class), serve()
    reports, _, state, _ = run_donated(*install(pool), batches, pool)
    assert [int(report.violation_write_index[0]) for report in reports] == [0] * 8
    verified = sum(int(batch.plan_input.prefix_lens.sum()) for batch in batches)
    written = sum(int(batch.plan_input.extend_seq_lens.sum()) for batch in batches)
    assert kvc.to_int64(state.device_state.kernel_run_counters).tolist() == [16] * 4 + [0] * 8
    assert kvc.to_int64(state.device_state.slot_run_counters).tolist() == [verified + written] * 4 + [0] * 8
    assert not state.device_state.fail_reason_counters.any()
    assert not state.device_state.verify_skip_counters.any()
    # The records hold what was written, the same chain in all four buffers; only TAIL records fingerprint the KV.
    group = state.groups[0]
    chains = [fields(buf)[1:] for buf in (group.k_head, group.v_head, group.k_tail, group.v_tail)]
    used = np.unique(np.concatenate([batch.out_cache_loc for batch in batches]))[1:] - 1
    for chain in chains:
        np.testing.assert_array_equal(chain[:, :3], chains[0][:, :3])
        assert (np.delete(chain, used, axis=0) == -1).all()
    for chain, hashed in zip(chains, (False, False, True, True), strict=True):
        assert (chain[used, 3] != 0).all() == hashed
        assert (chain[used, 3] != 0).any() == hashed


@pytest.mark.parametrize("pool_class", POOLS)
def test_the_forward_is_left_alone(pool_class):
    """KV bytes and outputs are the same with and without a canary, with faults and without."""
    for faults in (False, True):
        batches, pool, outs = serve(faults=faults), make_pool(pool_class), []
        for batch in batches:
            out, pool = jax.jit(forward, donate_argnums=1)(batch, pool)
            outs.append(np.asarray(out))
        watched = make_pool(pool_class)
        _, watched_outs, _, watched = run_donated(*install(watched), batches, watched)
        np.testing.assert_array_equal(watched_outs, outs)
        assert_same_pool(watched, pool)


@pytest.mark.parametrize("int_dtype", [np.int32, np.int64])
def test_x64_changes_nothing(int_dtype):
    with jax.enable_x64(True):
        batches = [jax.tree.map(lambda leaf: leaf.astype(int_dtype), batch) for batch in serve(faults=True)]
        pool = make_pool(MHATokenToKVPool)
        run = run_donated(*install(pool), batches, pool)
    assert_same_run(run, baseline(MHATokenToKVPool))


def test_int64_batches_without_x64():
    """NumPy's int64 goes into the eager operations as it is; jit would narrow it on the way."""
    batches, pool = serve()[:3], make_pool(MHATokenToKVPool)
    wide = [jax.tree.map(lambda leaf: leaf.astype(np.int64), batch) for batch in batches]
    got, want = run_eager(*install(pool), wide, pool), run_jit(*install(pool), batches, pool)
    assert_same_run(got, want)


def test_pages_change_nothing():
    num_slots = 70  # whole pages
    pool = MHATokenToKVPool.allocate(num_slots=num_slots, num_layers=LAYERS, num_kv_heads=HEADS, head_dim=HEAD_DIM, page_size=5)
    flat = MHATokenToKVPool.allocate(num_slots=num_slots, num_layers=LAYERS, num_kv_heads=HEADS, head_dim=HEAD_DIM)
    states = []
    for each in (pool, flat):
        canary, state = install(each)
        slots = np.arange(1, 14, dtype=np.int32)
        batch = dataclasses.replace(serve()[0], out_cache_loc=slots)
        state, step = canary.pre_forward(state, batch, each)
        k = jnp.arange(13 * HEADS * HEAD_DIM).reshape(13, HEADS, HEAD_DIM) % 61
        state, _ = canary.post_forward(state, step, batch, each.write(0, slots, k, k + 1))
        states.append(host(state))
    for paged_leaf, flat_leaf in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(paged_leaf, flat_leaf)


# Kinds of steps.


def plan_lengths(batch):
    rows = batch.plan_input
    return [np.asarray(values).tolist() for values in (rows.req_pool_indices, rows.prefix_lens, rows.extend_seq_lens)]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_lengths_of_each_kind_of_step(dtype):
    def ints(*values):
        return np.array(values, dtype)

    tokens = {name: ints(*range(6)) for name in ("input_ids", "out_cache_loc")}
    tokens["req_to_token"] = np.zeros((5, 9), dtype)
    rows = {"req_pool_indices": ints(3, 0, 1)}
    three = {**{name: ints(5, 0, 7) for name in ("input_ids", "out_cache_loc", "positions")}, "req_to_token": tokens["req_to_token"]}
    decode = kvc.ForwardBatch.decode(**rows, **three)
    assert plan_lengths(decode) == [[3, 0, 1], [5, 0, 7], [1, 1, 1]]
    extend = kvc.ForwardBatch.extend(**rows, **tokens, positions=ints(*range(6)), prefix_lens=ints(4, 0, 2), extend_seq_lens=ints(5, 0, 1))
    assert plan_lengths(extend) == [[3, 0, 1], [4, 0, 2], [5, 0, 1]]
    verify = kvc.ForwardBatch.target_verify(**rows, **tokens, positions=ints(*range(6)), seq_lens=ints(4, 0, 8), draft_token_num=3)
    assert plan_lengths(verify) == [[3, 0, 1], [4, 0, 8], [3, 3, 3]]
    draft = kvc.ForwardBatch.draft_extend(
        **rows, **tokens, positions=ints(*range(6)), seq_lens=ints(9, 0, 4), extend_seq_lens=ints(5, 0, 1)
    )
    assert plan_lengths(draft) == [[3, 0, 1], [4, 0, 3], [5, 0, 1]]
    for batch in (decode, extend, verify, draft):
        assert {leaf.dtype for leaf in jax.tree.leaves(batch)} == {np.dtype(dtype)}
        assert (batch.expected_input_tokens, batch.plan_input.expected_tokens_valid_lens) == (None, None)


@pytest.mark.parametrize("kind", ["decode", "extend", "target_verify", "draft_extend"])
def test_constructors_take_the_expected_values(kind):
    given = {
        name: np.full(2, value, np.int32) for value, name in enumerate(("input_ids", "positions", "out_cache_loc", "req_pool_indices"))
    }
    given["req_to_token"] = np.zeros((3, 5), np.int32)
    given["seq_lens"] = given["prefix_lens"] = given["extend_seq_lens"] = int32([1, 1])
    given["draft_token_num"] = 1
    own = {
        "decode": (),
        "extend": ("prefix_lens", "extend_seq_lens"),
        "target_verify": ("seq_lens", "draft_token_num"),
        "draft_extend": ("seq_lens", "extend_seq_lens"),
    }[kind]
    common = ("input_ids", "positions", "out_cache_loc", "req_pool_indices", "req_to_token")
    expected = {name: int32([value] * 2) for value, name in enumerate(("expected_input_tokens", "expected_input_positions"), 11)}
    batch = getattr(kvc.ForwardBatch, kind)(
        **{name: given[name] for name in (*common, *own)}, **expected, expected_tokens_valid_lens=int32([7, 7])
    )
    for name in ("input_ids", "positions", "out_cache_loc", "req_to_token"):
        assert getattr(batch, name) is given[name]
    assert batch.plan_input.req_pool_indices is given["req_pool_indices"]
    for name, value in expected.items():
        assert getattr(batch, name) is value
    np.testing.assert_array_equal(batch.plan_input.expected_tokens_valid_lens, [7, 7])


def test_decode_batches():
    loop = Loop()
    assert loop.extend(1, 0, 5) == []
    assert loop.extend(2, 0, 3) == []
    for length in range(3):
        for row, start in ((1, 5), (2, 3)):
            loop.requests.place(row, start + length, 1)
        positions = int32([5 + length, 3 + length, 0])
        rows = int32([1, 2, 0])
        slots = loop.requests.table[rows, positions]
        decode = kvc.ForwardBatch.decode(
            input_ids=positions * 10,
            positions=positions,
            out_cache_loc=slots,
            req_pool_indices=rows,
            req_to_token=loop.requests.table.copy(),
        )
        assert loop.step(decode) == []
    # The same step again writes over nothing that it verifies; with another row's slot it is found.
    mixed = decode.req_to_token.copy()
    mixed[1, 2] = mixed[2, 1]
    wrong = dataclasses.replace(decode, req_to_token=mixed)
    found = loop.step(wrong)
    assert {entry[1] for entry in found} == {mixed[1, 2], mixed[1, 3]}


def test_speculative_steps():
    """Target verification writes four draft tokens behind each row's length; two of them stay, and the draft pool catches up."""
    loop = Loop()
    assert loop.extend(1, 0, 6) == []
    loop.requests.place(1, 6, 12)
    length = 6
    for round_number in range(3):
        positions = int32(range(length, length + 4))
        verify = kvc.ForwardBatch.target_verify(
            input_ids=positions + 1000 * round_number,
            positions=positions,
            out_cache_loc=loop.requests.table[1, positions],
            req_pool_indices=int32([1]),
            seq_lens=int32([length]),
            draft_token_num=4,
            req_to_token=loop.requests.table.copy(),
        )
        assert loop.step(verify) == []
        length += 2
    positions = int32(range(length, length + 2))
    catch_up = kvc.ForwardBatch.draft_extend(
        input_ids=positions,
        positions=positions,
        out_cache_loc=loop.requests.table[1, positions],
        req_pool_indices=int32([1]),
        seq_lens=int32([length + 2]),
        extend_seq_lens=int32([2]),
        req_to_token=loop.requests.table.copy(),
    )
    assert loop.step(catch_up) == []
    # A length that counts a token too many reads a slot that nothing wrote.
    positions = int32([length + 3])
    too_long = kvc.ForwardBatch.target_verify(
        input_ids=positions,
        positions=positions,
        out_cache_loc=loop.requests.table[1, positions],
        req_pool_indices=int32([1]),
        seq_lens=positions,
        draft_token_num=1,
        req_to_token=loop.requests.table.copy(),
    )
    read, written = loop.requests.table[1, length + 2 : length + 4]
    assert loop.step(too_long) == sorted(at(EVERY_PHASE, read, UNWRITTEN) + at(EVERY_PHASE, written, Reason.WRITE_POSITION_MISMATCH))


# Installing.


def test_mode_none_installs_nothing():
    assert kvc.install_canary(make_pool(MHATokenToKVPool), kvc.CanaryConfig("none"), capacities=CAPACITIES) == (None, None)
    assert kvc.install_canary(object(), kvc.CanaryConfig("none"), capacities=CAPACITIES) == (None, None)


def test_installed_state():
    canary, state = kvc.install_canary(make_pool(MHATokenToKVPool), CONFIG, capacities=CAPACITIES, swa_window_size=7)
    assert canary == kvc.Canary(CONFIG, CAPACITIES, 7)
    assert len(state.groups) == 1
    log = state.device_state.violation_log
    assert (log.violation_ring.shape, log.count(), log.is_errored()) == ((101, 8, 2), 0, False)
    assert state.device_state.req_to_verify_expected_tokens is None
    assert np.asarray(state.device_state.enable_chain_position_assert).tolist() == [0]
    finished = canary.mark_init_finished(state)
    assert np.asarray(finished.device_state.enable_chain_position_assert).tolist() == [1]
    assert finished.device_state.enable_chain_position_assert.dtype == jnp.int32
    assert jax.tree.structure(finished) == jax.tree.structure(state)


def test_warm_up_is_silent_until_it_is_finished():
    loop = Loop(finished=False)
    loop.requests.place(1, 0, 8)
    jump = dataclasses.replace(loop.requests.batch((1, 4, [11, 12])), positions=int32([9, 10, *[0] * (TOKENS - 2)]))
    first = loop.requests.batch((1, 0, [1, 2, 3, 4]))
    assert loop.step(first) == []
    assert loop.step(jump) == []
    loop.state = loop.canary.mark_init_finished(loop.state)
    assert loop.step(first) == []
    assert loop.step(jump) == sorted(at(EVERY_PHASE, loop.requests.table[1, 4], Reason.WRITE_POSITION_MISMATCH))


def test_a_canary_is_static():
    canary, state = install(make_pool(MHATokenToKVPool))
    same = kvc.Canary(dataclasses.replace(CONFIG), dataclasses.replace(CAPACITIES))
    assert (canary, hash(canary)) == (same, hash(same))
    others = [
        dataclasses.replace(canary, swa_window_size=3),
        dataclasses.replace(canary, capacities=kvc.CanaryLaunchCapacities(3, ROWS)),
        dataclasses.replace(canary, config=kvc.CanaryConfig("raise")),
    ]
    assert len({canary, same, *others}) == 4
    traces = []

    @partial(jax.jit, static_argnums=0)
    def finish(canary, state):
        traces.append(canary)
        return canary.mark_init_finished(state)

    finish(canary, state)
    finish(same, state)
    finish(others[0], state)
    assert traces == [canary, others[0]]
    hash(jax.tree.structure(state))


# The report.


def test_a_report_survives_donation():
    loop = Loop()
    state, pool, kept = loop.state, loop.pool, []
    for batch in serve(faults=True):
        before = state
        state, report, _, pool = jitted_step(loop.canary, state, batch, pool)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
        kept.append(report)
    for got, want in zip(kept, baseline(MHATokenToKVPool)[0], strict=True):
        for got_leaf, want_leaf in zip(jax.tree.leaves(got.summary), jax.tree.leaves(want.summary), strict=True):
            np.testing.assert_array_equal(got_leaf, want_leaf)
        assert multiset(rows_of(got)) == multiset(rows_of(want))


consume = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf * 0, state), donate_argnums=0)


@pytest.mark.parametrize("how", ["eager", "jit", "jit twice", "sweep"])
def test_a_report_shares_nothing_with_the_state(how):
    canary, state = install(make_pool(MHATokenToKVPool))
    pool, batch = make_pool(MHATokenToKVPool), serve()[0]
    step = partial(bracket, canary)
    if how == "eager":
        state, report, _, _ = step(state, batch, pool)
        reports = [report]
    elif how == "jit":
        state, report, _, _ = jax.jit(step)(state, batch, pool)
        reports = [report]
    elif how == "jit twice":
        state, *reports = jax.jit(lambda *args: (lambda state, report, *_: (state, report, report))(*step(*args)))(state, batch, pool)
    else:
        verify_plan = kvc.plan(batch.plan_input, batch.req_to_token, verify_capacity=5).verify
        state, report = jax.jit(lambda state: canary.sweep(state, verify_plan, pool))(state)
        reports = [report]
    want = [host(report) for report in reports]
    addresses = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)}
    assert not addresses & {leaf.unsafe_buffer_pointer() for report in reports for leaf in jax.tree.leaves(report)}
    jax.block_until_ready(consume(state))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    for report, copy in zip(reports, want, strict=True):
        for leaf, want_leaf in zip(jax.tree.leaves(report), jax.tree.leaves(copy), strict=True):
            np.testing.assert_array_equal(leaf, want_leaf)


def test_the_summary_is_small():
    canary, state = install(make_pool(MHATokenToKVPool))
    state, report = bracket(canary, state, serve()[0], make_pool(MHATokenToKVPool))[:2]
    assert report.summary.nbytes < 1024
    state = state.device_state
    for name, part in report.on_host().items():
        if name not in ("violation_write_index", "num_invalid_rows"):
            np.testing.assert_array_equal(part, getattr(state, name))
    assert report.violation_write_index.tolist() == [0]
    assert np.asarray(report.num_invalid_rows).tolist() == [0]


def test_invalid_rows_are_in_the_report():
    loop = Loop()
    assert loop.extend(1, 0, 5) == []
    sound = loop.requests.batch((1, 2, [1]), (2, 3, [2]))
    wrong = dataclasses.replace(sound.plan_input, req_pool_indices=int32([MAX_REQS, 1, 0]), prefix_lens=int32([2, MAX_SEQ_LEN + 1, 0]))
    batch = dataclasses.replace(sound, plan_input=wrong)
    state, report, _, _ = jitted_step(loop.canary, loop.state, batch, loop.pool)
    assert np.asarray(report.num_invalid_rows).tolist() == [2]
    assert state.device_state.violation_log.count() == 0


# Freed slots.


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_release(jit):
    loop = Loop()
    assert loop.extend(1, 0, 5) == []
    assert loop.extend(2, 0, 4) == []
    freed = loop.requests.table[1, :5]
    before = host(loop.state)
    padded = int32([*freed, -1, 0, NUM_SLOTS, -NUM_SLOTS, 2**31 - 1])
    release = jax.jit(loop.canary.release, donate_argnums=0) if jit else loop.canary.release
    loop.state = release(loop.state, padded, loop.pool)
    for old, new in zip(jax.tree.leaves(before.groups), jax.tree.leaves(loop.state.groups), strict=True):
        want = old.copy()
        want[freed] = 0xFF
        np.testing.assert_array_equal(new, want)
    assert loop.extend(2, 4, 1) == []  # others go on
    stale = loop.requests.batch((1, 5, []))
    assert loop.step(stale) == sorted(entry for slot in freed for entry in at(EVERY_PHASE, slot, UNWRITTEN))


def test_released_slots_are_free_for_others():
    loop = Loop()
    assert loop.extend(1, 0, 5) == []
    loop.state = loop.canary.release(loop.state, loop.requests.table[1, :5].astype(np.int64), loop.pool)
    loop.requests.table[2, :5] = loop.requests.table[1, :5][::-1]
    assert loop.step(loop.requests.batch((2, 0, tokens_of(2, 0, 5)))) == []
    assert loop.extend(2, 5, 1) == []


# Sweeps.


def sweep_plan(slots, tokens=None):
    """A plan of one chain from its start."""
    count = len(slots)
    return kvc.VerifyPlan(
        verify_slot_indices=int32(slots),
        verify_expected_tokens=int32([-1] * count if tokens is None else tokens),
        verify_expected_positions=np.arange(count, dtype=np.int32),
        verify_prev_slot_indices=int32([-1, *slots[:-1]]),
        verify_num_valid=int32([count]),
        enable=int32([1]),
    )


def test_sweep():
    loop = Loop()
    assert loop.extend(1, 0, 7) == []
    slots = loop.requests.table[1, :7]
    sweep = jax.jit(loop.canary.sweep, donate_argnums=0)

    def swept(plan, pool=None):
        loop.state, report = sweep(loop.state, plan, pool or loop.pool)
        assert np.asarray(report.num_invalid_rows).tolist() == [0]
        return loop.gained(report)

    both = (Tag.SWEEP_K_FULL, Tag.SWEEP_V_FULL)
    assert swept(sweep_plan(slots)) == []
    assert swept(sweep_plan(slots, tokens_of(1, 0, 7))) == []
    wrong_token = [*tokens_of(1, 0, 6), 5]
    assert swept(sweep_plan(slots, wrong_token)) == at(both, slots[6], Reason.VERIFY_TOKEN_MISMATCH)
    swapped = slots[[0, 1, 3, 2, 4, 5, 6]]
    assert {entry[1] for entry in swept(sweep_plan(swapped))} == {slots[3], slots[2], slots[4]}
    overwritten = loop.pool.write(0, slots[3:4], jnp.ones((1, HEADS, HEAD_DIM)), jnp.ones((1, HEADS, HEAD_DIM)))
    assert swept(sweep_plan(slots), overwritten) == at(both, slots[3], Reason.VERIFY_REAL_KV_HASH_MISMATCH)
    assert swept(sweep_plan([NUM_SLOTS])) == at(both, NUM_SLOTS, Reason.SLOT_OUT_OF_RANGE)
    kernel_runs = kvc.to_int64(loop.state.device_state.kernel_run_counters)
    assert [kernel_runs[tag] for tag in both] == [6, 6]
    slot_runs = kvc.to_int64(loop.state.device_state.slot_run_counters)
    assert [slot_runs[tag] for tag in both] == [36, 36]


def test_sweep_of_a_group_that_is_not_there():
    canary, state = install(make_pool(MHATokenToKVPool))
    with pytest.raises(ValueError, match=r"^`kind` is SWA, but this canary has the groups FULL\.$"):
        canary.sweep(state, sweep_plan([1]), make_pool(MHATokenToKVPool), kind=kvc.PoolKind.SWA)


# Checks that are off by default.


def test_write_input_assert():
    loop = Loop(dataclasses.replace(CONFIG, enable_write_input_assert=True))
    loop.requests.place(1, 0, 7)
    batch = loop.requests.batch((1, 0, tokens_of(1, 0, 7)))
    tokens, positions = batch.input_ids.copy(), batch.positions.copy()

    def step():
        given = {"expected_input_tokens": tokens.copy(), "expected_input_positions": positions.copy()}
        return loop.step(dataclasses.replace(batch, **given))

    assert step() == []
    tokens[2] += 1
    assert step() == at(EVERY_PHASE, batch.out_cache_loc[2], Reason.WRITE_TOKEN_MISMATCH)
    positions[2] += 1
    assert step() == at(EVERY_PHASE, batch.out_cache_loc[2], Reason.WRITE_TOKEN_MISMATCH | Reason.WRITE_POSITION_MISMATCH)
    tokens[7] = positions[12] = 99  # padding is not compared
    tokens[2] -= 1
    assert step() == at(EVERY_PHASE, batch.out_cache_loc[2], Reason.WRITE_POSITION_MISMATCH)


TOKEN_TABLE = {"req_to_token_alloc_size": MAX_REQS, "max_context_len": MAX_SEQ_LEN}


def expected_table(shift=0):
    return int32([tokens_of(row, shift, MAX_SEQ_LEN) for row in range(MAX_REQS)])


def valid_lens(*lens):
    return {"expected_tokens_valid_lens": int32([*lens, *[0] * (ROWS - len(lens))])}


def test_verify_token_assert():
    loop = Loop(dataclasses.replace(CONFIG, enable_verify_token_assert=True), **TOKEN_TABLE)
    np.testing.assert_array_equal(loop.state.device_state.req_to_verify_expected_tokens, np.full((MAX_REQS, MAX_SEQ_LEN), -1))
    assert loop.extend(1, 0, 7, **valid_lens(7)) == []
    assert loop.extend(1, 7, 1, **valid_lens(8)) == []  # -1 is unknown
    table = expected_table()
    loop.set_expected_tokens(table)
    assert loop.extend(1, 8, 1, **valid_lens(9)) == []
    table[1, 3] = table[1, 7] = 5
    loop.set_expected_tokens(table)
    slots = loop.requests.table[1]
    both = [entry for position in (3, 7) for entry in at(EVERY_PHASE, slots[position], Reason.VERIFY_TOKEN_MISMATCH)]
    assert loop.extend(1, 9, 1, **valid_lens(10)) == sorted(both)
    assert loop.extend(1, 10, 1, **valid_lens(7)) == at(EVERY_PHASE, slots[3], Reason.VERIFY_TOKEN_MISMATCH)
    assert loop.extend(1, 11, 1, **valid_lens(0)) == []


@pytest.mark.parametrize("offset", [0, 1])
def test_draft_pools_hold_the_next_token(offset):
    """The slot of position p holds the token of position p + 1: no finding with offset 1, every slot with 0."""
    config = dataclasses.replace(CONFIG, enable_verify_token_assert=True)
    loop = Loop(config, kv_token_id_vs_position_offset=offset, **TOKEN_TABLE)
    loop.set_expected_tokens(expected_table())
    loop.requests.place(1, 0, 8)
    assert loop.step(loop.requests.batch((1, 0, tokens_of(1, 1, 5)), **valid_lens(6))) == []
    found = loop.step(loop.requests.batch((1, 5, tokens_of(1, 6, 1)), **valid_lens(7)))
    slots = loop.requests.table[1, :5]
    assert found == ([] if offset else sorted(entry for slot in slots for entry in at(EVERY_PHASE, slot, Reason.VERIFY_TOKEN_MISMATCH)))


# Plans that are too large.


def test_overflow_skips_the_verify_and_writes_on():
    loop = Loop()
    roomy, tight = loop.canary, dataclasses.replace(loop.canary, capacities=kvc.CanaryLaunchCapacities(6, ROWS))
    loop.canary = tight
    assert loop.extend(1, 0, 7) == []
    for position in (7, 8):
        assert loop.extend(1, position, 1) == []
    skips = np.asarray(loop.state.device_state.verify_skip_counters).tolist()
    assert skips == [2] * 4 + [0] * 8
    # Nothing was verified, all was written, and both kernels count as run.
    assert kvc.to_int64(loop.state.device_state.slot_run_counters).tolist() == [9] * 4 + [0] * 8
    assert kvc.to_int64(loop.state.device_state.kernel_run_counters).tolist() == [6] * 4 + [0] * 8
    loop.canary = roomy
    assert loop.extend(1, 9, 1) == []
    assert kvc.to_int64(loop.state.device_state.slot_run_counters).tolist() == [9 + 9 + 1] * 4 + [0] * 8
    assert np.asarray(loop.state.device_state.verify_skip_counters).tolist() == skips
