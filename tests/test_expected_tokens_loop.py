"""Expected tokens in a serving loop: prompts stored by the host, sampled tokens by the step itself."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_kvcanary as kvc
from helpers.loops import (
    CONFIG,
    EVERY_PHASE,
    MAX_REQS,
    MAX_SEQ_LEN,
    ROWS,
    Loop,
    at,
    bracket,
    int32,
    serve,
    tokens_of,
)
from jax_kvcanary import FailReason as Reason

TOKEN_CONFIG = dataclasses.replace(CONFIG, enable_verify_token_assert=True)
TABLE = {"req_to_token_alloc_size": MAX_REQS, "max_context_len": MAX_SEQ_LEN}

#: The prompts of ``serve``; row 2 shares the slots of its first five tokens with row 1.
PROMPTS = {1: tokens_of(1, 0, 11), 2: tokens_of(1, 0, 5) + tokens_of(2, 5, 6), 3: tokens_of(3, 0, 3)}
WRONG = 4321


def sampled_tokens(batch, ahead=0):
    """What a row's step samples: the tokens that ``serve`` feeds to its next one."""
    rows = batch.plan_input
    position = jnp.asarray(rows.prefix_lens) + rows.extend_seq_lens + ahead
    return position, 100 * jnp.asarray(rows.req_pool_indices) + position


def sampling_step(canary, state, batch, pool, keep, ahead=0):
    """A forward, and the tokens that it sampled where they are kept."""
    state, report, out, pool = bracket(canary, state, batch, pool)
    positions, tokens = sampled_tokens(batch, ahead)
    state = canary.append_expected_tokens(state, batch.plan_input.req_pool_indices, jnp.where(keep, positions, -1), tokens)
    return state, report, out, pool


class TokenLoop(Loop):
    """The loop with expected tokens."""

    def __init__(self, **options):
        super().__init__(TOKEN_CONFIG, **TABLE, **options)
        self.ahead = options.get("kv_token_id_vs_position_offset", 0)
        self.sampling_step = jax.jit(partial(sampling_step, self.canary, ahead=self.ahead), donate_argnums=(0, 2))

    def expect(self, row, tokens, start=0):
        """Store a row's tokens."""
        self.state = self.canary.set_expected_tokens(
            self.state, int32([row]), np.array(tokens), int32([len(tokens)]), start_positions=int32([start])
        )

    def sample(self, batch, keep=True):
        """Findings of a forward whose sampled tokens are stored."""
        self.state, report, _, self.pool = self.sampling_step(self.state, batch, self.pool, jnp.full(ROWS, keep))
        return self.gained(report)

    def table(self):
        return np.asarray(self.state.device_state.req_to_verify_expected_tokens)


def with_lens(batch, ahead=0, **changes):
    """The batch, whose rows' expected tokens are those of prefix and step; ``changes`` are other fields of the rows."""
    rows = batch.plan_input
    lens = {"expected_tokens_valid_lens": rows.prefix_lens + rows.extend_seq_lens + ahead}
    return dataclasses.replace(batch, plan_input=dataclasses.replace(rows, **{**lens, **changes}))


def served(loop):
    """The prompts stored at once, padding between them; the batches; and whether each samples a token that is used."""
    prompts = int32([*PROMPTS[3], 9, 9, *PROMPTS[1], *PROMPTS[2], 8, 8, 8])
    rows, lengths = int32([3, 0, 1, 2]), int32([3, 2, 11, 11])
    loop.state = jax.jit(loop.canary.set_expected_tokens, donate_argnums=0)(loop.state, rows, prompts, lengths)
    return [with_lens(batch) for batch in serve()], [False] + [True] * 7


def served_table():
    """What the table holds after all batches: prompts, and the tokens of each decode step with the last one sampled."""
    table = np.full((MAX_REQS, MAX_SEQ_LEN), -1)
    for row, end in ((1, 17), (2, 15), (3, 6)):
        table[row, :end] = (PROMPTS[row] + tokens_of(row, len(PROMPTS[row]), end))[:end]
    return table


def test_sound_steps_are_silent():
    """Chunks, a shared prefix, decode, a mixed batch, and padding between the rows."""
    loop = TokenLoop()
    batches, keep = served(loop)
    assert [loop.sample(*step) for step in zip(batches, keep, strict=True)] == [[]] * 8
    np.testing.assert_array_equal(loop.table(), served_table())
    verified = sum(int(batch.plan_input.prefix_lens.sum()) for batch in batches)
    written = sum(int(batch.plan_input.extend_seq_lens.sum()) for batch in batches)
    assert kvc.to_int64(loop.state.device_state.slot_run_counters).tolist() == [verified + written] * 4 + [0] * 8


def test_as_a_scan():
    loop = TokenLoop()
    batches, keep = served(loop)

    @partial(jax.jit, donate_argnums=(0, 2))
    def steps(state, stacked, pool):
        def body(carry, step):
            batch, keep = step
            state, report, _, pool = sampling_step(loop.canary, carry[0], batch, carry[1], keep)
            return (state, pool), report.summary

        return jax.lax.scan(body, (state, pool), stacked)[0]

    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *batches), np.array(keep)
    loop.state, loop.pool = steps(loop.state, stacked, loop.pool)
    assert loop.state.device_state.violation_log.count() == 0
    np.testing.assert_array_equal(loop.table(), served_table())


@pytest.mark.parametrize("keep", [False, True])
def test_the_sample_of_a_chunk_must_not_be_kept(keep):
    """The prompt has another token at the next chunk's first position than the one that the chunk before it sampled."""
    loop = TokenLoop()
    batches, _ = served(loop)
    loop.expect(1, [WRONG], start=7)
    assert loop.sample(batches[0], keep) == []
    assert loop.sample(dataclasses.replace(batches[1], input_ids=np.where(batches[1].positions == 7, WRONG, batches[1].input_ids))) == []
    found = at(EVERY_PHASE, batches[1].out_cache_loc[0], Reason.VERIFY_TOKEN_MISMATCH)
    assert loop.sample(batches[2]) == (found if keep else [])


def decoded_with_a_wrong_token(loop):
    """Steps up to the one that feeds row 1 another token than the one sampled, all silent; its slot and the next batch."""
    batches, keep = served(loop)
    wrong = batches[5]
    assert (wrong.plan_input.req_pool_indices[0], wrong.positions[0]) == (1, 14)
    batches[5] = dataclasses.replace(wrong, input_ids=np.where(wrong.input_ids == 114, WRONG, wrong.input_ids))
    assert [loop.sample(*step) for step in zip(batches[:6], keep, strict=False)] == [[]] * 6
    return int(wrong.out_cache_loc[0]), batches[6]


def test_a_wrong_token_is_found_at_the_next_step():
    loop = TokenLoop()
    slot, batch = decoded_with_a_wrong_token(loop)
    before = loop.seen
    assert loop.sample(batch) == at(EVERY_PHASE, slot, Reason.VERIFY_TOKEN_MISMATCH)
    rows = loop.state.device_state.violation_log.rows()[before:]
    assert rows[:, 1:5].tolist() == [[slot, 14, WRONG, 114]] * 4


@pytest.mark.parametrize("unknown", [-1, 2**31, 2**32 + WRONG, -(2**40)])
def test_an_unknown_token_is_not_compared(unknown):
    loop = TokenLoop()
    _, batch = decoded_with_a_wrong_token(loop)
    loop.expect(1, [unknown], start=14)
    assert loop.sample(batch) == []
    assert loop.table()[1, 13:16].tolist() == [113, -1, 115]


@pytest.mark.parametrize(("length", "silent"), [(14, True), (0, True), (15, False), (MAX_SEQ_LEN + 5, False)])
def test_what_lies_past_the_valid_length_is_not_compared(length, silent):
    loop = TokenLoop()
    slot, batch = decoded_with_a_wrong_token(loop)
    batch = with_lens(batch, expected_tokens_valid_lens=int32([length, 0, 4]))
    assert loop.sample(batch) == ([] if silent else at(EVERY_PHASE, slot, Reason.VERIFY_TOKEN_MISMATCH))


def test_a_wrong_prefix_is_found_by_each_request_that_shares_it():
    loop = TokenLoop()
    batches, keep = served(loop)
    batches[0] = dataclasses.replace(batches[0], input_ids=np.where(batches[0].input_ids == 103, WRONG, batches[0].input_ids))
    slot = int(batches[0].out_cache_loc[3])
    once = at(EVERY_PHASE, slot, Reason.VERIFY_TOKEN_MISMATCH)
    got = [loop.sample(*step) for step in zip(batches[:3], keep, strict=False)]
    assert got == [[], once, sorted(once * 2)]


def test_a_row_that_another_request_takes():
    """What the earlier request left behind the new prompt is past the valid length."""
    loop = TokenLoop()
    loop.expect(1, tokens_of(1, 0, 9))
    assert loop.extend(1, 0, 9, expected_tokens_valid_lens=int32([9, 0, 0])) == []
    loop.expect(1, tokens_of(3, 0, 4))
    loop.requests.place(1, 0, 9)
    assert loop.step(loop.requests.batch((1, 0, tokens_of(3, 0, 4)), expected_tokens_valid_lens=int32([4, 0, 0]))) == []
    for position in range(4, 7):
        decode = loop.requests.batch((1, position, tokens_of(3, position, 1)), expected_tokens_valid_lens=int32([4, 0, 0]))
        assert loop.step(decode) == []
    # With the whole row taken as valid, the remainder is compared.
    stale = loop.requests.batch((1, 7, tokens_of(3, 7, 1)), expected_tokens_valid_lens=int32([9, 0, 0]))
    slots = loop.requests.table[1, 4:7]
    assert loop.step(stale) == sorted(entry for slot in slots for entry in at(EVERY_PHASE, slot, Reason.VERIFY_TOKEN_MISMATCH))


# Draft pools: the slot of position p holds the token of position p + 1.


@pytest.mark.parametrize("fault", [False, True])
def test_draft_pools(fault):
    loop = TokenLoop(kv_token_id_vs_position_offset=1)
    prompt = tokens_of(1, 0, 6)
    loop.expect(1, prompt)
    loop.requests.place(1, 0, 9)
    written = tokens_of(1, 1, 5)
    if fault:
        written[3] = WRONG
    found = at(EVERY_PHASE, loop.requests.table[1, 3], Reason.VERIFY_TOKEN_MISMATCH) if fault else []
    # Five slots hold tokens 1 to 5 of the prompt; each step then feeds the token that the one before it stored.
    assert loop.sample(with_lens(loop.requests.batch((1, 0, written)), ahead=1)) == []
    for position in range(5, 9):
        assert loop.sample(with_lens(loop.requests.batch((1, position, tokens_of(1, position + 1, 1))), ahead=1)) == found
    assert loop.table()[1].tolist() == tokens_of(1, 0, 11) + [-1] * (MAX_SEQ_LEN - 11)


def test_a_wrong_draft_token_that_was_sampled():
    loop = TokenLoop(kv_token_id_vs_position_offset=1)
    loop.expect(1, tokens_of(1, 0, 6))
    loop.requests.place(1, 0, 9)
    assert loop.sample(with_lens(loop.requests.batch((1, 0, tokens_of(1, 1, 5))), ahead=1)) == []
    assert loop.sample(with_lens(loop.requests.batch((1, 5, [WRONG])), ahead=1)) == []
    slot = loop.requests.table[1, 5]
    batch = loop.requests.batch((1, 6, tokens_of(1, 7, 1)))
    assert loop.sample(with_lens(batch, expected_tokens_valid_lens=int32([6, 0, 0]))) == []  # slot 5 would hold token 6
    assert loop.sample(with_lens(batch, expected_tokens_valid_lens=int32([7, 0, 0]))) == at(EVERY_PHASE, slot, Reason.VERIFY_TOKEN_MISMATCH)
