"""A small serving loop around the canary: pool, forward, requests, and what a report found."""

from __future__ import annotations

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

import jax_kvcanary as kvc
from helpers.backends import host
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
