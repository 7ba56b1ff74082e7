"""Speculative decoding: drafts that are written over again, trees of drafts, draft pools, several forwards in one outer step."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_kvcanary as kvc
from helpers.loops import (
    CAPACITIES,
    CONFIG,
    EVERY_PHASE,
    MAX_REQS,
    MAX_SEQ_LEN,
    TAILS,
    TOKENS,
    UNWRITTEN,
    Loop,
    at,
    bracket,
    findings,
    int32,
    make_pool,
)
from jax_kvcanary import FailReason as Reason
from jax_kvcanary.pools import MHATokenToKVPool

CHAIN, POSITION = Reason.VERIFY_CHAIN_HASH_MISMATCH, Reason.VERIFY_POSITION_MISMATCH


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


# Trees. Entry 0 is the root, the last token that was accepted; 1 and 2 follow it; 3 and 4 follow 1; 5 follows 2, and 6 follows 5.
PARENTS = (-1, 0, 0, 1, 1, 2, 5)
DEPTHS = (0, 1, 1, 2, 2, 2, 3)


class TreeLoop(Loop):
    """One request in row 1, whose draft trees get slots of their own."""

    def __init__(self):
        super().__init__()
        self.length = 5
        assert self.extend(1, 0, self.length) == []
        self.free = self.requests.free

    def verify(self, parents=PARENTS, *, topk=2, round_number=0):
        """Findings of a target verification; slots of the tree's entries are in ``slots`` then."""
        self.slots = int32([self.free.pop() for _ in DEPTHS])
        positions = self.length + int32(DEPTHS)
        batch = kvc.ForwardBatch.target_verify(
            input_ids=1000 * round_number + 10 * positions + np.arange(len(DEPTHS), dtype=np.int32),
            positions=positions,
            out_cache_loc=self.slots,
            req_pool_indices=int32([1]),
            seq_lens=int32([self.length]),
            draft_token_num=len(DEPTHS),
            req_to_token=self.requests.table.copy(),
            topk=topk,
            parents=None if parents is None else int32(parents),
        )
        return self.step(batch)

    def accept(self, *path):
        """Keep the entries of a path; the slots of all others are free again, and are the next ones to be handed out."""
        self.requests.table[1, self.length : self.length + len(path)] = self.slots[list(path)]
        self.length += len(path)
        self.free += [int(slot) for entry, slot in enumerate(self.slots) if entry not in path]

    def decode(self):
        """Findings of one plain step."""
        self.length += 1
        return self.extend(1, self.length - 1, 1)


@pytest.mark.parametrize("path", [(0, 1, 3), (0, 1, 4), (0, 2, 5, 6), (0, 2), (0,)])
def test_a_path_of_a_tree_is_a_chain(path):
    """Slots of rejected drafts are written again at once."""
    loop = TreeLoop()
    for round_number in range(3):
        assert loop.verify(round_number=round_number) == []
        rejected = set(loop.slots.tolist()) - set(loop.slots[list(path)].tolist())
        loop.accept(*path)
        assert rejected == set(loop.free[-len(rejected) :])
        assert loop.decode() == []
    assert loop.decode() == []


def test_a_path_that_jumps_between_branches_is_found():
    loop = TreeLoop()
    assert loop.verify() == []
    loop.accept(0, 1, 5)  # entry 5 follows entry 2
    assert loop.decode() == at(EVERY_PHASE, loop.slots[5], CHAIN)


def test_a_rejected_draft_that_is_kept_is_found():
    """The request's table names the sibling that was not accepted, whose slot is free."""
    loop = TreeLoop()
    assert loop.verify() == []
    loop.accept(0, 1, 3)
    kept = loop.requests.table[1, loop.length - 1] = loop.slots[4]
    loop.free.remove(kept)
    assert loop.decode() == []  # a legal successor of entry 1, as long as nobody else has its slot
    loop.free.append(kept)
    assert loop.verify() == at(TAILS, kept, Reason.VERIFY_REAL_KV_HASH_MISMATCH)  # the round that writes it again


def test_parents_mixed_up_are_found():
    """Entry 3 is said to follow the root, which is one position too far back."""
    loop = TreeLoop()
    assert loop.verify((-1, 0, 0, 0, 1, 2, 5)) == at(EVERY_PHASE, loop.slots[3], Reason.WRITE_POSITION_MISMATCH)


def test_a_parent_that_does_not_exist_is_found():
    loop = TreeLoop()
    assert loop.verify((-1, 0, 0, 1, 1, 99, 5)) == at(EVERY_PHASE, 99, Reason.SLOT_OUT_OF_RANGE)


def test_why_a_tree_needs_parents():
    """Told nothing of a tree, every branch looks like a jump of positions."""
    with pytest.raises(ValueError, match="`parents` is None"):
        TreeLoop().verify(None)
    loop = TreeLoop()
    jumps = [i for i in range(1, len(DEPTHS)) if DEPTHS[i] != DEPTHS[i - 1] + 1]
    expected = [entry for i in jumps for entry in at(EVERY_PHASE, loop.free[-1 - i], Reason.WRITE_POSITION_MISMATCH)]
    assert loop.verify(None, topk=1) == sorted(expected)


def test_trees_of_several_rows_and_padding():
    """Parents count through the token arrays of the whole batch."""
    loop = Loop()
    for row, length in ((1, 4), (2, 7)):
        assert loop.extend(row, 0, length) == []
    slots = int32([loop.requests.free.pop() for _ in range(6)])
    parents = int32([-1, 0, 0, -1, 3, 3, *[-1] * (TOKENS - 6)])
    positions = int32([4, 5, 5, 7, 8, 8, *[0] * (TOKENS - 6)])
    batch = kvc.ForwardBatch.target_verify(
        input_ids=positions * 3 + 1,
        positions=positions,
        out_cache_loc=np.concatenate([slots, np.zeros(TOKENS - 6, np.int32)]),
        req_pool_indices=int32([1, 2, 0]),
        seq_lens=int32([4, 7, 0]),
        draft_token_num=3,
        req_to_token=loop.requests.table.copy(),
        topk=2,
        parents=parents,
    )
    assert loop.step(batch) == []
    across = dataclasses.replace(batch, parents=np.where(np.arange(TOKENS) == 4, 2, parents).astype(np.int32))
    assert loop.step(across) == at(EVERY_PHASE, 2, Reason.SLOT_OUT_OF_RANGE)


# A draft model's own steps.


def test_branches_of_a_draft_model_are_rows():
    """Top-k drafting: both branches share the request's slots and have drafts of their own."""
    loop = Loop()
    length = 6
    assert loop.extend(1, 0, length) == []
    branches = (3, 4)
    for row in branches:
        loop.requests.table[row, :length] = loop.requests.table[1, :length]
    for draft_step in range(3):
        for row in branches:
            loop.requests.place(row, length + draft_step, 1)
        positions = int32([length + draft_step] * 2)
        batch = kvc.ForwardBatch.draft_decode(
            input_ids=positions * 7 + int32([0, 1]),
            positions=positions,
            out_cache_loc=loop.requests.table[int32(branches), positions],
            req_pool_indices=int32(branches),
            seq_lens=int32([length, length]),
            draft_step=draft_step,
            req_to_token=loop.requests.table.copy(),
        )
        assert loop.step(batch) == []
    # Two branches that were given one row write over each other's drafts.
    mixed = batch.req_to_token.copy()
    mixed[4, length + 1] = mixed[3, length + 1]
    found = loop.step(dataclasses.replace(batch, req_to_token=mixed))
    assert found == sorted(at(EVERY_PHASE, mixed[4, length + 1], CHAIN))


DRAFT_STEPS = 3
TOKEN_CONFIG = dataclasses.replace(CONFIG, enable_verify_token_assert=True)


class Speculation:
    """A target and a draft pool with a canary each; one outer step drafts, verifies and catches up.

    The draft pool's slot of position p holds token p + 1, as EAGLE's rotated inputs have it.
    """

    def __init__(self, *, draft_offset=1):
        self.pools = make_pool(MHATokenToKVPool), make_pool(MHATokenToKVPool)
        options = {"capacities": CAPACITIES, "req_to_token_alloc_size": MAX_REQS, "max_context_len": MAX_SEQ_LEN}
        installed = [
            kvc.install_canary(pool, TOKEN_CONFIG, kv_token_id_vs_position_offset=offset, **options)
            for pool, offset in zip(self.pools, (0, draft_offset), strict=True)
        ]
        self.canaries = tuple(canary for canary, _ in installed)
        self.states = tuple(canary.mark_init_finished(state) for canary, state in installed)
        self.tokens = 100 + np.arange(2 * MAX_SEQ_LEN, dtype=np.int32)  # token of each position
        self.table = np.zeros((MAX_REQS, MAX_SEQ_LEN), np.int32)
        self.table[1] = 3 + 2 * np.arange(MAX_SEQ_LEN)
        expected = np.full((MAX_REQS, MAX_SEQ_LEN), -1, np.int32)
        expected[1] = self.tokens[:MAX_SEQ_LEN]
        self.states = tuple(
            dataclasses.replace(
                state, device_state=dataclasses.replace(state.device_state, req_to_verify_expected_tokens=jnp.array(expected))
            )
            for state in self.states
        )
        self.monitors = tuple(kvc.CanaryMonitor(canary) for canary in self.canaries)
        self.seen = [0, 0]
        self.length = 0

    def batch(self, start, count, *, shift=0, make=kvc.ForwardBatch.extend, **lengths):
        """Positions from ``start`` on; ``shift`` is 1 for the draft model's rotated inputs."""
        positions = np.arange(start, start + count, dtype=np.int32)
        return make(
            input_ids=self.tokens[positions + shift],
            positions=positions,
            out_cache_loc=self.table[1, positions],
            req_pool_indices=int32([1]),
            req_to_token=self.table.copy(),
            expected_tokens_valid_lens=int32([MAX_SEQ_LEN]),
            **lengths,
        )

    def prefill(self, count):
        """Both models prefill; findings of target and draft."""
        lengths = {"prefix_lens": int32([0]), "extend_seq_lens": int32([count])}
        batches = [(0, self.batch(0, count, **lengths)), (1, self.batch(0, count, shift=1, **lengths))]
        self.length = count
        return self.run(batches)

    def speculate(self, accepted, *, change=lambda batches: batches):
        """Draft steps, target verification, draft extension, all in one jitted step."""
        length = self.length
        batches = [
            (
                1,
                self.batch(length + i, 1, shift=1, make=kvc.ForwardBatch.draft_decode, seq_lens=int32([length]), draft_step=i),
            )
            for i in range(DRAFT_STEPS)
        ]
        verify = {"make": kvc.ForwardBatch.target_verify, "seq_lens": int32([length]), "draft_token_num": DRAFT_STEPS + 1}
        batches.append((0, self.batch(length, DRAFT_STEPS + 1, **verify)))
        catch_up = {"make": kvc.ForwardBatch.draft_extend, "seq_lens": int32([length + accepted]), "extend_seq_lens": int32([accepted])}
        batches.append((1, self.batch(length, accepted, shift=1, **catch_up)))
        self.length += accepted
        return self.run(change(batches))

    def run(self, batches):
        which, batches = zip(*batches, strict=True)
        self.states, reports, self.pools = outer_step(self.canaries, which, self.states, batches, self.pools)
        for owner, report in zip(which, reports, strict=True):
            self.monitors[owner].observe(report, self.states[owner])
        found = []
        for owner in (0, 1):
            last = [report for model, report in zip(which, reports, strict=True) if model == owner][-1]
            gained = findings(last, self.seen[owner])
            self.seen[owner] += len(gained)
            found.append(gained)
        return found


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 4))
def outer_step(canaries, which, states, batches, pools):
    """Several forwards, each on the target's pool (0) or the draft's (1)."""
    states, pools, reports = list(states), list(pools), []
    for owner, batch in zip(which, batches, strict=True):
        states[owner], report, _, pools[owner] = bracket(canaries[owner], states[owner], batch, pools[owner])
        reports.append(report)
    return tuple(states), reports, tuple(pools)


def test_several_forwards_in_one_outer_step():
    speculation = Speculation()
    assert speculation.prefill(5) == [[], []]
    for accepted in (1, 4, 2, 3):
        assert speculation.speculate(accepted) == [[], []]
    runs = [kvc.to_int64(state.device_state.kernel_run_counters)[kvc.CanaryLaunchTag.HEAD_K_FULL] for state in speculation.states]
    assert runs == [2 * (1 + 4), 2 * (1 + 4 * (DRAFT_STEPS + 1))]


def test_a_finding_names_its_forward():
    """The second outer step's third draft reads a slot that another request wrote in the second draft."""
    speculation = Speculation()
    assert speculation.prefill(5) == [[], []]
    assert speculation.speculate(2) == [[], []]

    def steal(batches):
        owner, second = batches[1]
        stolen = dataclasses.replace(second, out_cache_loc=speculation.table[1, 3:4])
        return [batches[0], (owner, stolen), *batches[2:]]

    target, draft = speculation.speculate(2, change=steal)
    assert target == []
    assert {entry[1] for entry in draft} >= {int(speculation.table[1, 3])}
    for monitor, state in zip(speculation.monitors, speculation.states, strict=True):
        monitor.flush(state)
    assert speculation.monitors[0].violations == ()
    # Forward 1 is the prefill, 2 to 5 are the first outer step's, and 6 to 9 the second's. The thief reads its own write in 7.
    first = min(violation.step for violation in speculation.monitors[1].violations)
    assert first in (7, 8)
    assert all(violation.earliest_step == violation.step for violation in speculation.monitors[1].violations)


def test_the_offset_of_a_draft_pool():
    """Slot p of a draft pool holds token p + 1. A canary that is not told so takes every token for a wrong one."""
    assert Speculation().prefill(5) == [[], []]
    wrong = Speculation(draft_offset=0)
    assert wrong.prefill(5) == [[], []]  # the prefill verifies nothing
    target, draft = wrong.speculate(1)
    assert target == []
    assert {entry[2] for entry in draft} == {Reason.VERIFY_TOKEN_MISMATCH}
    assert {entry[1] for entry in draft} >= set(wrong.table[1, :5].tolist())


def test_inputs_that_were_not_rotated_are_found():
    speculation = Speculation()
    lengths = {"prefix_lens": int32([0]), "extend_seq_lens": int32([5])}
    assert speculation.run([(0, speculation.batch(0, 5, **lengths)), (1, speculation.batch(0, 5, **lengths))]) == [[], []]
    speculation.length = 5
    target, draft = speculation.speculate(1)
    assert target == []
    assert {(entry[1], entry[2]) for entry in draft} == {(slot, Reason.VERIFY_TOKEN_MISMATCH) for slot in speculation.table[1, :5].tolist()}
