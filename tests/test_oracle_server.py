"""A server whose tokens come from the oracle: sound, it is silent; every wrong token, position or order shows at its write."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import jax_kvcanary as kvc
from helpers.loops import CONFIG, EVERY_PHASE, MAX_REQS, MAX_SEQ_LEN, Loop, at, bracket, int32
from helpers.states import multiset
from jax_kvcanary import FailReason as Reason

ORACLE = kvc.TokenOracle(seed=0xFEDCBA9876543210, vocab_size=32003, reserved=5)
TOKEN, POSITION = Reason.WRITE_TOKEN_MISMATCH, Reason.WRITE_POSITION_MISMATCH
INPUT_CONFIG = dataclasses.replace(CONFIG, enable_write_input_assert=True)


class Server(Loop):
    """Request rows with an id each; prompts and next tokens are the oracle's. Every step carries its expected inputs."""

    def __init__(self, oracle=ORACLE, config=INPUT_CONFIG, **options):
        super().__init__(config, **options)
        self.oracle = oracle
        self.ids = {row: 1000 + row for row in range(1, MAX_REQS)} | {0: 0}
        self.shared = dict.fromkeys(range(MAX_REQS), (0, 0))

    def work(self, row, prefix, count, *, place=True):
        """A prompt, or a part of it."""
        if place:
            self.requests.place(row, prefix, count)
        owner, shared = self.shared[row]
        own = max(shared - prefix, 0)
        tokens = [*self.oracle.prompt(owner, min(own, count), start=prefix)]
        return (row, prefix, [*tokens, *self.oracle.prompt(self.ids[row], count - len(tokens), start=prefix + len(tokens))])

    def serve(self, *work, change=lambda batch: batch, expect_shared=True, **more):
        """Findings of a step whose batch the change has damaged."""
        batch = change(self.requests.batch(*work, **more))
        rows = np.asarray(batch.plan_input.req_pool_indices)
        shared_ids, shared_lens = int32([self.shared[row] for row in rows]).T
        options = {"shared_ids": shared_ids, "shared_lens": shared_lens} if expect_shared else {}
        return self.step(self.oracle.with_expected_inputs(batch, int32([self.ids[row] for row in rows]), **options))

    def slot(self, row, position):
        return self.requests.table[row, position]


def changed(**arrays):
    """A change of a batch: for each field a function that damages its array in place."""

    def change(batch):
        copies = {name: np.array(getattr(batch, name)) for name in arrays}
        for name, damage in arrays.items():
            damage(copies[name])
        return dataclasses.replace(batch, **copies)

    return change


def permuted(order):
    """A change of a batch: its first entries in another order, with their tokens, positions and slots."""

    def damage(array):
        array[: len(order)] = array[list(order)]

    return changed(input_ids=damage, positions=damage, out_cache_loc=damage)


def swap(i, j):
    def damage(array):
        array[[i, j]] = array[[j, i]]

    return damage


def put(i, value):
    def damage(array):
        array[i] = value(array) if callable(value) else value

    return damage


def prefilled():
    """A server with two requests of five and four tokens."""
    server = Server()
    assert server.serve(server.work(1, 0, 5), server.work(2, 0, 4)) == []
    return server


def test_a_sound_server_is_silent():
    """Chunks, decoding, padding between rows, a shared prefix that is recomputed in part, a row that is used again."""
    server = Server()
    assert server.serve(server.work(1, 0, 7)) == []
    assert server.serve(server.work(1, 7, 4), (0, 0, []), server.work(2, 0, 3)) == []
    server.requests.table[3, :5] = server.requests.table[1, :5]
    server.shared[3] = (server.ids[1], 8)  # eight tokens in common, of which five are in the cache
    assert server.serve(server.work(2, 3, 1), server.work(3, 5, 6), server.work(1, 11, 1)) == []
    for length in range(4):
        assert server.serve(server.work(3, 11 + length, 1), (0, 0, []), server.work(1, 12 + length, 1)) == []
    server.ids[2] = 55  # row 2 goes to another request
    assert server.serve(server.work(2, 0, 6), server.work(1, 16, 1)) == []
    counts = kvc.to_int64(server.state.device_state.slot_run_counters)
    assert (counts[:4] == counts[0]).all()
    assert counts[0] > 100


def test_a_shared_prefix_that_is_not_told_is_found():
    server = prefilled()
    server.shared[3] = (server.ids[1], 5)
    server.requests.table[3, :3] = server.requests.table[1, :3]
    work = server.work(3, 3, 4)
    want = [entry for p in (3, 4) for entry in at(EVERY_PHASE, server.slot(3, p), TOKEN)]
    assert server.serve(work, expect_shared=False) == sorted(want)
    assert server.serve(server.work(3, 3, 4, place=False)) == []


def test_swapped_tokens_are_found_at_their_slots():
    server = prefilled()
    found = server.serve(server.work(1, 5, 1), server.work(2, 4, 1), change=changed(input_ids=swap(0, 1)))
    assert found == sorted(at(EVERY_PHASE, server.slot(1, 5), TOKEN) + at(EVERY_PHASE, server.slot(2, 4), TOKEN))
    row = next(row for row in kvc.to_int64(server.state.device_state.violation_log.violation_ring) if row[1] == server.slot(1, 5))
    (got,), (want,) = ORACLE.prompt(1002, 1, start=4), ORACLE.prompt(1001, 1, start=5)
    assert row[[2, 3, 4, 6]].tolist() == [5, got, want, 5]
    # The step after it is sound, and silent: what was written goes on.
    assert server.serve(server.work(1, 6, 1), server.work(2, 5, 1)) == []


def test_swapping_equal_tokens_is_no_fault():
    oracle = kvc.TokenOracle(seed=1, vocab_size=2)
    server = Server(oracle)
    equal = next(p for p in range(1, 20) if oracle.prompt(1001, 1, start=p) == oracle.prompt(1002, 1, start=p))
    assert server.serve(server.work(1, 0, 1), server.work(2, 0, 1)) == []
    for start in range(1, equal):
        assert server.serve(server.work(1, start, 1), server.work(2, start, 1)) == []
    assert server.serve(server.work(1, equal, 1), server.work(2, equal, 1), change=changed(input_ids=swap(0, 1))) == []


def test_a_repeated_token_is_found():
    server = Server()
    found = server.serve(server.work(1, 0, 6), change=changed(input_ids=put(3, lambda ids: ids[2])))
    assert found == at(EVERY_PHASE, server.slot(1, 3), TOKEN)


def test_an_old_token_decoded_again_is_found():
    """The sampler's result of the step before it was not fetched."""
    server = prefilled()
    last = ORACLE.prompt(1001, 5)[-1]
    assert server.serve(server.work(1, 5, 1), change=changed(input_ids=put(0, last))) == at(EVERY_PHASE, server.slot(1, 5), TOKEN)


def test_a_shifted_position_is_found():
    server = Server()
    # Nothing stands before the first position of a request, so only the expected one tells.
    found = server.serve(server.work(1, 0, 1), change=changed(positions=put(0, 1)))
    assert found == at(EVERY_PHASE, server.slot(1, 0), POSITION)
    server = prefilled()
    found = server.serve(server.work(1, 5, 1), server.work(2, 4, 2), change=changed(positions=put(0, 6)))
    assert found == sorted(2 * at(EVERY_PHASE, server.slot(1, 5), POSITION))  # it does not follow the one before it either


def test_positions_and_tokens_shifted_together_are_found():
    """A whole chunk is one token late: each pair is a right one, in the wrong place."""

    def late(array):
        array[:4] = array[1:5]

    server = Server()
    found = server.serve(server.work(1, 0, 5), change=changed(input_ids=late, positions=late))
    assert found == sorted(entry for p in range(4) for entry in at(EVERY_PHASE, server.slot(1, p), TOKEN | POSITION))


def test_rows_packed_in_the_wrong_order_are_found():
    """Tokens, positions and slots of two rows stand in the other order than the rows do."""
    server = Server()
    work = server.work(1, 0, 3), server.work(2, 0, 3)
    found = server.serve(*work, change=permuted((3, 4, 5, 0, 1, 2)))
    assert found == sorted(entry for row in (1, 2) for p in range(3) for entry in at(EVERY_PHASE, server.slot(row, p), TOKEN))
    # The rows in that order too: nothing is wrong with it.
    assert server.serve(*(server.work(row, 0, 3, place=False) for row in (2, 1))) == []


def test_a_wrong_token_shows_in_the_verify_too():
    config = dataclasses.replace(INPUT_CONFIG, enable_verify_token_assert=True)
    server = Server(config=config, req_to_token_alloc_size=MAX_REQS, max_context_len=MAX_SEQ_LEN)
    server.set_expected_tokens(np.stack([ORACLE.prompt(1000 + row, MAX_SEQ_LEN) for row in range(MAX_REQS)]))
    valid = {"expected_tokens_valid_lens": int32([MAX_SEQ_LEN, 0, 0])}
    wrong = at(EVERY_PHASE, server.requests.free[-3], TOKEN)  # the slot of position 2
    assert server.serve(server.work(1, 0, 4), change=changed(input_ids=put(2, 3)), **valid) == wrong
    read = at(EVERY_PHASE, server.slot(1, 2), Reason.VERIFY_TOKEN_MISMATCH)
    assert server.serve(server.work(1, 4, 1), **valid) == read


def test_rotated_inputs_of_a_draft_pool():
    server = Server(kv_token_id_vs_position_offset=1)

    def step(positions, shift, prefix):
        tokens = ORACLE.prompt(1001, len(positions), start=positions[0] + shift)
        server.requests.place(1, prefix, len(positions))
        batch = server.requests.batch((1, prefix, tokens))
        return server.step(ORACLE.with_expected_inputs(batch, int32([1001, 0, 0]), kv_token_id_vs_position_offset=1))

    assert step(range(5), 1, 0) == []
    assert step(range(5, 6), 1, 5) == []
    assert step(range(6, 7), 0, 6) == at(EVERY_PHASE, server.slot(1, 6), TOKEN)


def test_the_oracle_as_a_sampler_in_a_scan():
    """Decoding on the device, each step's token from the step before; one variant decodes two rows with each other's tokens."""
    start, steps = int32([5, 4]), 6
    ids, request_ids = int32([1, 2, 0]), int32([1001, 1002, 0])

    @partial(jax.jit, static_argnums=(0, 4), donate_argnums=(1, 2))
    def decode(canary, state, pool, table, mixed_up):
        def body(carry, step):
            state, pool, tokens, positions = carry
            inputs = jnp.where(step == 3, tokens[jnp.array([1, 0, 2])], tokens) if mixed_up else tokens
            batch = kvc.ForwardBatch.decode(
                input_ids=inputs,
                positions=positions,
                out_cache_loc=table[ids, positions],
                req_pool_indices=ids,
                req_to_token=table,
            )
            batch = ORACLE.with_expected_inputs(batch, request_ids)
            state, report, _, pool = bracket(canary, state, batch, pool)
            tokens = ORACLE.tokens(request_ids, positions + 1)  # in place of the model's choice
            return (state, pool, tokens, positions + jnp.array([1, 1, 0])), report.summary

        positions = jnp.append(start, 0)
        return jax.lax.scan(body, (state, pool, ORACLE.tokens(request_ids, positions), positions), jnp.arange(steps))[0]

    for mixed_up in (False, True):
        server = prefilled()
        for row, first in zip((1, 2), start, strict=True):
            server.requests.place(row, int(first), steps + 1)
        state, _, tokens, positions = decode(server.canary, server.state, server.pool, jnp.array(server.requests.table), mixed_up)
        assert positions.tolist() == [5 + steps, 4 + steps, 0]
        assert tokens[:2].tolist() == [ORACLE.prompt(1001, 1, start=5 + steps)[0], ORACLE.prompt(1002, 1, start=4 + steps)[0]]
        rows = state.device_state.violation_log.rows()
        slots = [server.slot(1, 5 + 3), server.slot(2, 4 + 3)] if mixed_up else []
        want = [entry for slot in slots for entry in at(EVERY_PHASE, slot, TOKEN)]
        assert multiset(rows[:, [0, 1, 7]]) == multiset(want)
