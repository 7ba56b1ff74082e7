"""The host's half of the engine: which tokens run in the next step, and in which slots their K and V go.

Legality, which the canary checks on the device and the tests check here: before a step, each row's positions below its prefix
length have a slot each; those slots form one chain, every token written by a step that knew its predecessor's slot; and a slot that
somebody holds, a request or the tree, is never written again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from smollm2.allocator import SlotAllocator
from smollm2.radix import RadixNode, RadixTree

EMPTY = -1  # a place in the table that has no slot


@dataclass(frozen=True)
class Limits:
    """Sizes that are fixed for the life of an engine."""

    num_slots: int  # of the KV pool, the padding slot 0 included
    max_batch: int  # rows of a step, and requests that run at once
    max_seq_len: int  # width of the table
    chunk: int  # tokens of one request in one step, at most
    token_buckets: tuple[int, ...]  # static token counts of a step, ascending: one compilation each

    def __post_init__(self) -> None:
        if not self.token_buckets or self.token_buckets[-1] < self.max_batch:
            raise ValueError(f"`token_buckets` is {self.token_buckets}; the last must hold one token of each of {self.max_batch} rows.")

    @property
    def max_reqs(self) -> int:
        """Rows of the table: row 0 is the padding row."""
        return self.max_batch + 1


@dataclass(eq=False)
class Request:
    """A prompt on its way. `row` is 0 while it has no row of the table."""

    rid: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    arrival_step: int = 0
    tokens: list[int] = field(default_factory=list)  # prompt and answer
    row: int = 0
    num_computed: int = 0  # leading positions whose K and V are in the pool
    num_shared: int = 0  # leading positions whose slots the tree owns
    node: RadixNode | None = None  # what it has locked in the tree
    num_retractions: int = 0
    num_lost: int = 0  # positions that were computed when it was retracted
    finished: bool = False

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]


@dataclass(frozen=True)
class Stats:
    """What a run contained, counted by the scheduler."""

    chunks: int = 0  # pieces of a prompt that another piece had to follow
    shared_prefix_tokens: int = 0  # positions that a new request found in the tree
    retractions: int = 0
    recomputed_tokens: int = 0  # positions whose K and V were lost in a retraction, and computed again
    evicted_slots: int = 0
    merged_slots: int = 0  # duplicates given back because the tree had the same prefix


@dataclass(frozen=True)
class StepBatch:
    """One step, padded to static sizes: int32 NumPy arrays, token arrays [bucket], row arrays [max_batch]."""

    work: tuple[tuple[Request, int], ...]  # each row's request and its number of tokens in this step
    input_ids: np.ndarray
    positions: np.ndarray
    out_cache_loc: np.ndarray
    req_pool_indices: np.ndarray
    prefix_lens: np.ndarray
    extend_seq_lens: np.ndarray

    @classmethod
    def padding(cls, bucket: int, max_batch: int) -> StepBatch:
        """A step of nothing but padding: tokens that go to slot 0, rows that name request row 0."""
        tokens = (np.zeros(bucket, np.int32) for _ in range(3))
        rows = (np.zeros(max_batch, np.int32) for _ in range(3))
        return cls((), *tokens, *rows)

    @property
    def num_tokens(self) -> int:
        """Live tokens."""
        return sum(count for _, count in self.work)

    @property
    def num_prefix_tokens(self) -> int:
        """Cached positions over all rows; a shared prefix counts once for each request."""
        return int(self.prefix_lens.sum())

    @property
    def is_decode(self) -> bool:
        """Whether every row has one token."""
        return all(count == 1 for _, count in self.work)


class Scheduler:
    """Continuous batching over a fixed pool, first come first served.

    A request that is older goes first. Where slots run out, unlocked prefixes are evicted from the tree, then the youngest request
    is retracted: it loses its slots, goes back to the head of the queue and is prefilled again later, its answer so far included.
    """

    def __init__(self, limits: Limits, *, stop_token: int) -> None:
        self.limits = limits
        self.stop_token = stop_token
        self.allocator = SlotAllocator(limits.num_slots)
        self.tree = RadixTree()
        self.table = np.full((limits.max_reqs, limits.max_seq_len), EMPTY, np.int32)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self._free_rows = list(range(limits.max_reqs - 1, 0, -1))
        self._freed: list[int] = []
        self._counts = dict.fromkeys(Stats.__dataclass_fields__, 0)

    @property
    def stats(self) -> Stats:
        return Stats(**self._counts)

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, request: Request) -> None:
        """Queue a request. ValueError where it could never run, even alone."""
        needed = len(request.prompt) + request.max_new_tokens
        allowed = min(self.limits.max_seq_len, self.allocator.num_usable)
        if not request.prompt or request.max_new_tokens < 1:
            raise ValueError(
                f"Request {request.rid} has {len(request.prompt)} prompt tokens and `max_new_tokens` {request.max_new_tokens}; "
                "both must be positive."
            )
        if needed > allowed:
            raise ValueError(f"Request {request.rid} may grow to {needed} tokens; the pool and the table take {allowed}.")
        self.waiting.append(request)

    def schedule(self) -> StepBatch | None:
        """Choose the next step's tokens and give them slots; None where nothing is left to do."""
        if self.is_idle:
            return None
        budget = self.limits.token_buckets[-1]
        retractions = self._counts["retractions"]
        work: list[tuple[Request, int]] = []
        for request in list(self.running):
            if request.row == 0:
                continue  # retracted just now in favour of an older one
            # The budget lasts for all of them: the older ones ask for no more than when the youngest was let in.
            if count := self._grant(request, budget):
                work.append((request, count))
                budget -= count
        if retractions == self._counts["retractions"]:
            while budget > 0 and self.waiting and self._free_rows and self._admit(self.waiting[0]):
                request = self.waiting.popleft()
                count = self._grant(request, budget)
                work.append((request, count))
                budget -= count
        return self._pack(work)

    def commit(self, batch: StepBatch, next_tokens: Sequence[int] | np.ndarray) -> None:
        """Account for a step that ran. `next_tokens` [rows] is the token that follows each row's last one."""
        for (request, count), token in zip(batch.work, next_tokens, strict=False):
            request.num_computed += count
            if request.num_computed == len(request.tokens):
                request.tokens.append(int(token))
                request.finished = int(token) == self.stop_token or len(request.output) >= request.max_new_tokens
            if request.finished or count > 1:
                self._share(request)
            if request.finished:
                self._leave(request)

    def take_freed(self) -> list[int]:
        """Slots that went back to the allocator since the last call. Their records must be released before the next step."""
        freed, self._freed = self._freed, []
        return freed

    def slots_of(self, request: Request) -> list[int]:
        """Slots of the computed positions of a running request, in order."""
        return [int(slot) for slot in self.table[request.row, : request.num_computed]]

    def _grant(self, request: Request, budget: int) -> int:
        """Give a running request slots for its next tokens; returns how many, or 0 after retracting it for want of any."""
        remaining = len(request.tokens) - request.num_computed
        want = min(remaining, self.limits.chunk, budget)
        self._evict(want - self.allocator.num_free)
        while self.allocator.num_free == 0 and request.row != 0:
            self._retract(self.running[-1])
            self._evict(want - self.allocator.num_free)
        if request.row == 0:
            return 0
        count = min(want, self.allocator.num_free)
        start = request.num_computed
        self.table[request.row, start : start + count] = self.allocator.alloc(count)
        self._counts["chunks"] += count < remaining
        return count

    def _admit(self, request: Request) -> bool:
        """Give a waiting request a row and the shared prefix, if the pool has room for the rest of it and a token for each other one."""
        slots, node = self.tree.match(request.tokens[:-1])  # the last token must run, for the logits after it
        self.tree.lock(node)
        needed = len(request.tokens) - len(slots) + len(self.running)
        if needed > self.allocator.num_free + self.tree.num_evictable():
            self.tree.unlock(node)
            return False
        request.row = self._free_rows.pop()
        request.node = node
        request.num_computed = request.num_shared = len(slots)
        self.table[request.row, : len(slots)] = slots
        self.running.append(request)
        if request.num_retractions == 0:
            self._counts["shared_prefix_tokens"] += len(slots)
        self._counts["recomputed_tokens"] += max(0, request.num_lost - len(slots))
        return True

    def _share(self, request: Request) -> None:
        """Give the computed prefix to the tree, and use the tree's slots where it had the same prefix before."""
        assert request.node is not None
        own = self.slots_of(request)
        held, node = self.tree.insert(request.tokens[: request.num_computed], own)
        duplicates = [mine for mine, theirs in zip(own, held, strict=True) if mine != theirs]
        self._counts["merged_slots"] += len(duplicates)
        self._free(duplicates)
        self.table[request.row, : request.num_computed] = held
        self.tree.lock(node)
        self.tree.unlock(request.node)
        request.node, request.num_shared = node, request.num_computed

    def _retract(self, request: Request) -> None:
        self._counts["retractions"] += 1
        request.num_retractions += 1
        request.num_lost = request.num_computed
        self._free(self.slots_of(request)[request.num_shared :])
        self._leave(request)
        self.waiting.appendleft(request)

    def _leave(self, request: Request) -> None:
        """Take a request whose slots are freed or given to the tree out of the batch."""
        assert request.node is not None
        self.tree.unlock(request.node)
        self.table[request.row] = EMPTY
        self._free_rows.append(request.row)
        self.running.remove(request)
        request.row, request.num_computed, request.num_shared, request.node = 0, 0, 0, None

    def _evict(self, count: int) -> None:
        freed = self.tree.evict(count)
        self._counts["evicted_slots"] += len(freed)
        self._free(freed)

    def _free(self, slots: list[int]) -> None:
        self.allocator.free(slots)
        self._freed.extend(slots)

    def _pack(self, work: list[tuple[Request, int]]) -> StepBatch:
        """Live tokens in row order at the front of the smallest bucket that holds them."""
        total = sum(count for _, count in work)
        bucket = next(size for size in self.limits.token_buckets if size >= total)
        batch = replace(StepBatch.padding(bucket, self.limits.max_batch), work=tuple(work))
        end = 0
        for row, (request, count) in enumerate(work):
            start, end = end, end + count
            prefix, after = request.num_computed, request.num_computed + count
            batch.input_ids[start:end] = request.tokens[prefix:after]
            batch.positions[start:end] = range(prefix, after)
            batch.out_cache_loc[start:end] = self.table[request.row, prefix:after]
            batch.req_pool_indices[row], batch.prefix_lens[row], batch.extend_seq_lens[row] = request.row, prefix, count
        return batch
