"""The host side of the demo engine: radix tree, allocator, scheduler. No model, no device: a shadow of the canary stands in for both."""

from __future__ import annotations

import random
import sys
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import jax_kvcanary as kvc

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from smollm2.allocator import SlotAllocator
from smollm2.planted_bug import EarlyFree
from smollm2.radix import RadixNode, RadixTree
from smollm2.scheduler import EMPTY, Limits, Request, Scheduler, Stats, StepBatch

STOP = 3
SEEDS = range(25)


def toy_next_token(tokens: list[int]) -> int:
    """A deterministic model: the next token depends on all tokens before it, and on nothing else."""
    return zlib.crc32(bytes(tokens)) % 11


def answer(request: Request) -> list[int]:
    """What a request generates when it is alone."""
    tokens = list(request.prompt)
    for _ in range(request.max_new_tokens):
        tokens.append(toy_next_token(tokens))
        if tokens[-1] == STOP:
            break
    return tokens[len(request.prompt) :]


class Shadow:
    """What the canary keeps on the device, on the host: a record beside each slot, here the whole prefix that it stands for."""

    def __init__(self, num_slots: int) -> None:
        self.records: list[tuple[int, ...] | None] = [None] * num_slots

    def release(self, slots: list[int]) -> None:
        for slot in slots:
            assert self.records[slot] is not None, f"slot {slot} was freed unwritten"
            self.records[slot] = None

    def step(self, batch: StepBatch, table: np.ndarray) -> list[int]:
        """Verify every row's prefix, then write its tokens. Returns the next tokens."""
        cursor = 0
        written: Counter[int] = Counter()
        prefixes: dict[int, tuple[int, ...]] = {}
        next_tokens = []
        for row, (request, count) in enumerate(batch.work):
            request_row, prefix_len = int(batch.req_pool_indices[row]), int(batch.prefix_lens[row])
            assert request_row == request.row != 0
            assert batch.extend_seq_lens[row] == count > 0
            for position in range(prefix_len):
                slot = int(table[request_row, position])
                assert self.records[slot] == tuple(request.tokens[: position + 1])
            for position in range(prefix_len, prefix_len + count):
                slot = int(batch.out_cache_loc[cursor])
                assert slot == table[request_row, position] != 0
                assert batch.positions[cursor] == position
                assert batch.input_ids[cursor] == request.tokens[position]
                prefixes[slot] = tuple(request.tokens[: position + 1])
                written[slot] += 1
                cursor += 1
            next_tokens.append(toy_next_token(request.tokens[: prefix_len + count]))
        assert max(written.values()) == 1
        for slot, prefix in prefixes.items():
            assert self.records[slot] is None, f"slot {slot} was overwritten"
            self.records[slot] = prefix
        assert not batch.out_cache_loc[cursor:].any()
        assert not batch.req_pool_indices[len(batch.work) :].any()
        assert not batch.extend_seq_lens[len(batch.work) :].any()
        return next_tokens

    def sweep(self, tree: RadixTree) -> None:
        """Verify every slot of the tree as a sweep does."""
        plan = kvc.sweep_plan(tree.root)
        count = int(plan.verify_num_valid[0])
        slots = plan.verify_slot_indices[:count].tolist()
        assert sorted(slots) == sorted(tree_slots(tree))
        entries = zip(slots, plan.verify_expected_positions, plan.verify_prev_slot_indices, plan.verify_expected_tokens, strict=False)
        for slot, position, prev_slot, token in entries:
            record = self.records[slot]
            assert record is not None
            assert (len(record) - 1, record[-1]) == (position, token)
            assert prev_slot == -1 if position == 0 else self.records[prev_slot] == record[:-1]


def tree_slots(tree: RadixTree) -> list[int]:
    return [slot for node in tree.nodes() for slot in node.value]


def check_invariants(scheduler: Scheduler) -> None:
    """Every slot has one owner; locks are those of the running requests; the table holds what it should."""
    private = [slot for request in scheduler.running for slot in scheduler.slots_of(request)[request.num_shared :]]
    owned = scheduler.allocator.free_slots() + tree_slots(scheduler.tree) + private
    assert sorted(owned) == list(range(1, scheduler.limits.num_slots))

    locks: Counter[RadixNode] = Counter()
    for request in scheduler.running:
        shared, node = [], request.node
        while node is not None and node.parent is not None:
            locks[node] += 1
            shared = node.value + shared
            node = node.parent
        assert shared == scheduler.slots_of(request)[: request.num_shared]
    for node in scheduler.tree.nodes():
        assert node.lock_ref == locks[node]
        assert len(node.key) == len(node.value) > 0
        assert all(child.parent is node and child.key[0] == first for first, child in node.children.items())

    rows = [request.row for request in scheduler.running]
    assert len(set(rows)) == len(rows) <= scheduler.limits.max_batch
    assert 0 not in rows
    lengths = {request.row: request.num_computed for request in scheduler.running}
    for row in range(scheduler.limits.max_reqs):
        assert (scheduler.table[row, lengths.get(row, 0) :] == EMPTY).all()


def serve(requests: list[Request], limits: Limits) -> Stats:
    """Serve on the toy model, checking every step."""
    scheduler, shadow = Scheduler(limits, stop_token=STOP), Shadow(limits.num_slots)
    pending, steps = sorted(requests, key=lambda request: request.arrival_step), 0
    while pending or not scheduler.is_idle:
        while pending and (scheduler.is_idle or pending[0].arrival_step <= steps):
            scheduler.add(pending.pop(0))
        before = list(scheduler.running)
        batch = scheduler.schedule()
        assert batch is not None
        assert 0 < batch.num_tokens <= len(batch.input_ids) in limits.token_buckets
        assert [request for request, _ in batch.work] == scheduler.running, "a running request got no token"
        kept = [request for request in before if request.row != 0]
        assert kept == before[: len(kept)], "an older request was retracted in favour of a younger one"
        assert all(count <= limits.chunk for _, count in batch.work)
        shadow.release(scheduler.take_freed())
        scheduler.commit(batch, shadow.step(batch, scheduler.table))
        check_invariants(scheduler)
        shadow.sweep(scheduler.tree)
        steps += 1
        assert steps < 5000, "the scheduler makes no progress"
    assert scheduler.schedule() is None
    return scheduler.stats


def random_case(seed: int) -> tuple[list[Request], Limits]:
    """Requests with common prefixes, and a pool in which the largest of them just fits."""
    rng = random.Random(seed)
    stems = [[rng.randrange(11) for _ in range(rng.randrange(1, 60))] for _ in range(3)]
    requests = []
    for rid in range(rng.randrange(1, 14)):
        stem = rng.choice(stems)
        prompt = stem[: rng.randrange(len(stem)) + 1] + [rng.randrange(11) for _ in range(rng.randrange(12))]
        requests.append(Request(rid, tuple(prompt), rng.randrange(1, 20), rng.randrange(12)))
    longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
    max_batch = rng.randrange(1, 7)
    limits = Limits(
        num_slots=1 + longest + rng.choice((0, 1, 7, 40)),
        max_batch=max_batch,
        max_seq_len=longest + rng.randrange(5),
        chunk=rng.choice((1, 2, 5, 13)),
        token_buckets=(max_batch, max_batch + rng.randrange(1, 30)),
    )
    return requests, limits


@pytest.mark.parametrize("seed", SEEDS)
def test_every_schedule_is_legal_and_every_answer_is_the_one_given_alone(seed: int) -> None:
    requests, limits = random_case(seed)
    serve(requests, limits)
    assert [request.output for request in requests] == [answer(request) for request in requests]
    assert all(request.finished and request.row == 0 for request in requests)


def test_the_random_schedules_contain_everything_they_should() -> None:
    runs = [serve(*random_case(seed)) for seed in SEEDS]
    for name in Stats.__dataclass_fields__:
        assert sum(getattr(stats, name) > 0 for stats in runs) >= 3, f"hardly any schedule had {name}"


def test_a_retracted_request_waits_before_the_others() -> None:
    limits = Limits(num_slots=15, max_batch=2, max_seq_len=16, chunk=8, token_buckets=(2, 16))
    scheduler, shadow = Scheduler(limits, stop_token=-1), Shadow(limits.num_slots)
    requests = [Request(0, (1, 2, 4, 5), 9), Request(1, (6, 7, 8, 9), 9), Request(2, (9, 9, 9, 9), 9)]
    for request in requests:
        scheduler.add(request)
    while scheduler.stats.retractions == 0:
        batch = scheduler.schedule()
        assert batch is not None
        shadow.release(scheduler.take_freed())
        scheduler.commit(batch, shadow.step(batch, scheduler.table))
    assert scheduler.running == requests[:1]
    assert list(scheduler.waiting) == requests[1:]
    assert requests[1].output == answer(requests[1])[: len(requests[1].output)] != []


def test_a_common_prefix_is_computed_once() -> None:
    limits = Limits(num_slots=64, max_batch=2, max_seq_len=32, chunk=32, token_buckets=(2, 32))
    stem = (1, 2, 4, 5, 6, 7)
    late = Request(1, (*stem, 9, 10), 4, arrival_step=1)
    stats = serve([Request(0, (*stem, 8), 4), late], limits)
    assert stats.shared_prefix_tokens == len(stem)
    assert stats.merged_slots == 0


def test_the_same_prompt_twice_at_once_is_merged() -> None:
    limits = Limits(num_slots=64, max_batch=2, max_seq_len=32, chunk=32, token_buckets=(2, 32))
    stats = serve([Request(0, (1, 2, 4, 5), 4), Request(1, (1, 2, 4, 5), 4)], limits)
    assert stats.merged_slots >= 4


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(7, (1,) * 10, 7), r"Request 7 may grow to 17 tokens; the pool and the table take 15\."),
        (Request(8, (), 1), r"Request 8 has 0 prompt tokens and `max_new_tokens` 1; both must be positive\."),
        (Request(9, (1,), 0), r"Request 9 has 1 prompt tokens and `max_new_tokens` 0; both must be positive\."),
    ],
)
def test_an_impossible_request_is_refused(request_: Request, message: str) -> None:
    scheduler = Scheduler(Limits(16, 2, 64, 8, (2, 8)), stop_token=STOP)
    with pytest.raises(ValueError, match=message):
        scheduler.add(request_)


def test_limits_want_a_bucket_that_holds_a_batch() -> None:
    with pytest.raises(ValueError, match=r"`token_buckets` is \(2, 3\); the last must hold one token of each of 4 rows\."):
        Limits(num_slots=8, max_batch=4, max_seq_len=8, chunk=4, token_buckets=(2, 3))


def test_allocator_hands_out_each_slot_once_and_never_slot_0() -> None:
    allocator = SlotAllocator(7)
    slots = allocator.alloc(4) + allocator.alloc(2)
    assert sorted(slots) == [1, 2, 3, 4, 5, 6]
    assert (allocator.num_free, allocator.num_usable) == (0, 6)
    with pytest.raises(ValueError, match=r"`count` is 1; 0 slots are free\."):
        allocator.alloc(1)
    allocator.free([5])
    assert allocator.alloc(1) == [5]
    with pytest.raises(ValueError, match=r"`num_slots` is 1; a pool needs at least 2"):
        SlotAllocator(1)


@pytest.mark.parametrize("seed", SEEDS)
def test_radix_tree_agrees_with_a_dictionary_of_prefixes(seed: int) -> None:
    rng = random.Random(seed)
    tree, shadow, locked, next_slot = RadixTree(), {}, [], 1
    for _ in range(60):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 12))]
        known = 0
        while known < len(tokens) and tuple(tokens[: known + 1]) in shadow:
            known += 1
        expected = [shadow[tuple(tokens[: i + 1])] for i in range(known)]
        action = rng.randrange(4)
        if action == 0:
            slots, node = tree.match(tokens)
            assert slots == expected
            tree.lock(node)
            locked.append((tuple(tokens[:known]), node))
        elif action == 1:
            own = list(range(next_slot, next_slot + len(tokens)))
            next_slot += len(tokens)
            held, _ = tree.insert(tokens, own)
            assert held == expected + own[known:]
            shadow.update({tuple(tokens[: i + 1]): held[i] for i in range(known, len(tokens))})
        elif action == 2 and locked:
            tree.unlock(locked.pop(rng.randrange(len(locked)))[1])
        else:
            before, count = tree.num_evictable(), rng.randrange(6)
            freed = tree.evict(count)
            assert len(freed) == len(set(freed)) == min(count, before)
            shadow = {prefix: slot for prefix, slot in shadow.items() if slot not in set(freed)}
        assert sorted(tree_slots(tree)) == sorted(shadow.values())
        for prefix, _ in locked:
            assert all(prefix[: i + 1] in shadow for i in range(len(prefix))), "a locked prefix was evicted"
        assert tree.num_evictable() == len(shadow) - len({prefix[: i + 1] for prefix, _ in locked for i in range(len(prefix))})


def test_radix_tree_evicts_what_was_not_used_for_longest() -> None:
    tree = RadixTree()
    tree.insert([1, 2], [11, 12])
    tree.insert([3, 4], [13, 14])
    tree.match([1, 2])
    assert tree.evict(1) == [14]
    assert tree.evict(2) == [13, 12]
    assert tree.match([1, 2])[0] == [11]


def test_radix_tree_wants_a_slot_for_each_token() -> None:
    with pytest.raises(ValueError, match=r"`slots` has 1 entries; it takes one for each of the 2 tokens\."):
        RadixTree().insert([1, 2], [1])


def test_the_planted_bug_gives_one_slot_to_two_requests() -> None:
    limits = Limits(num_slots=64, max_batch=3, max_seq_len=32, chunk=32, token_buckets=(3, 32))
    scheduler, shadow, bug = Scheduler(limits, stop_token=-1), Shadow(64), EarlyFree(at_step=4)
    requests = [Request(rid, (rid, 4, 5, 6, 7), 12) for rid in range(3)]
    for request in requests:
        scheduler.add(request)
    for step in range(1, 4):
        bug(step, scheduler)
        batch = scheduler.schedule()
        assert batch is not None
        assert bug.done is None
        scheduler.commit(batch, shadow.step(batch, scheduler.table))
        check_invariants(scheduler)
    bug(4, scheduler)
    planted = bug.done
    assert planted is not None
    assert planted.victim != planted.thief
    batch = scheduler.schedule()
    assert batch is not None
    held = {request.rid: scheduler.table[request.row].tolist() for request in requests}
    assert held[planted.victim][planted.position] == planted.slot
    assert planted.slot in held[planted.thief]
    assert planted.slot in batch.out_cache_loc
    assert planted.slot not in scheduler.take_freed(), "the scheduler knows nothing of it, so no record is released"
    with pytest.raises(AssertionError, match=f"slot {planted.slot} was overwritten"):
        shadow.step(batch, scheduler.table)
