"""The host's side of the self test: a scheduler with random traffic.

Prompts come in whole or in chunks; requests decode, or speculate and have drafts rejected; they share prefixes with each other and with
a prefix cache; they end, are retracted and computed anew; slots are used again at once, released or not, and move. A second pool keeps
a sliding window: its slots are taken back when they have left every window.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from jax_kvcanary.selftest.steps import CHUNK, MAX_REQS, MAX_SEQ_LEN, NUM_SLOTS, NUM_SWA_SLOTS, SWEEP_INTERVAL, WINDOW, Step, StepBuilder

_VOCABULARY = 32_000
_CACHE_ENTRIES = 3
_LONGEST_PROMPT = 13
_DRAFTS = 2


@dataclass
class Sequence:
    """Tokens with slots: a live request, or an entry of the prefix cache.

    Fields:
        tokens: what is known to be said; of a live request, up to one more than is in the cache.
        cached: how many of them are in the cache.
        slots: full-pool slots by position; drafts that were rejected leave some behind ``cached``.
        speculates: whether the request has a draft model.
    """

    tokens: list[int]
    cached: int = 0
    slots: list[int] = field(default_factory=list)
    speculates: bool = False

    def window(self) -> list[int]:
        """The slots that must be in the SWA pool."""
        return self.slots[max(0, self.cached - WINDOW) :]


class Pace(Enum):
    """How much a step changes."""

    BUSY = "requests come, end and are retracted, slots move, drafts are rejected"
    SETTLE = "long requests end, the last row is free, and something is in the prefix cache alone; from here on every request lives"
    ARRIVE = "a new request takes the last row, from its first token on"
    CALM = "every request goes on"


class Engine:
    """Requests, slots and the prefix cache.

    ``events`` counts what happened, ``entries`` what the canary has to verify and to write, see :class:`StepBuilder`.
    """

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.events: Counter[str] = Counter()
        self.entries: Counter[str] = Counter()
        self._live: dict[int, Sequence] = {}
        self._cache: list[Sequence] = []
        self._retracted: list[list[int]] = []
        self._free = [int(slot) for slot in self.rng.permutation(np.arange(1, NUM_SLOTS))]
        self._free_swa = [int(slot) for slot in self.rng.permutation(np.arange(1, NUM_SWA_SLOTS))]
        self._users = np.zeros(NUM_SLOTS, np.int64)
        self._used = np.zeros(NUM_SLOTS, bool)
        self._full_to_swa = np.zeros(NUM_SLOTS, np.int32)
        self._req_to_token = np.zeros((MAX_REQS, MAX_SEQ_LEN), np.int32)
        self._step = 0

    def step(self, pace: Pace = Pace.BUSY) -> Step:
        """The next step."""
        self._take_window_slots_back()
        builder = StepBuilder(self.rng)
        if pace is Pace.BUSY:
            self._churn(builder)
        elif pace is Pace.SETTLE:
            self._settle(builder)
        elif pace is Pace.ARRIVE:
            self._admit(MAX_REQS - 1, [])
        if pace in (Pace.BUSY, Pace.SETTLE):
            self._move(builder)
        for row in self.rng.permutation(sorted(self._live)).tolist():
            self._go_on(row, builder, reject=pace is Pace.BUSY)
        if self._step % SWEEP_INTERVAL == 0:
            for entry in self._cache:
                builder.sweep(entry.tokens, entry.slots, self._full_to_swa)
            self.events["sweeps"] += 1
        self._step += 1
        expected = np.full((MAX_REQS, MAX_SEQ_LEN), -1, np.int32)
        for row, request in self._live.items():
            expected[row, : len(request.tokens)] = request.tokens
        self.entries += builder.entries
        return builder.build(
            self._req_to_token.copy(), expected, self._full_to_swa.copy(), self._in_cache_alone(), self._in_cached_windows()
        )

    def _churn(self, builder: StepBuilder) -> None:
        """Some requests end or are retracted, cache entries go, new requests come."""
        for row in list(self._live):
            if len(self._live[row].tokens) + _DRAFTS >= MAX_SEQ_LEN or self.rng.random() < 0.1:
                self._end(row, builder, fate=self.rng.random())
        if self._cache and self.rng.random() < 0.1:
            self._drop(self._cache.pop(int(self.rng.integers(len(self._cache)))), builder)
            self.events["cache entries evicted"] += 1
        for row in range(1, MAX_REQS):
            if row not in self._live and self.rng.random() < 0.4:
                self._admit(row, [*self._live.values(), *self._cache])

    def _settle(self, builder: StepBuilder) -> None:
        for row in list(self._live):
            request = self._live[row]
            long = len(request.tokens) > MAX_SEQ_LEN // 2
            if row == MAX_REQS - 1 or long or (request.cached and not self._in_cached_windows()):
                self._end(row, builder, fate=0.5)
        for row in range(1, MAX_REQS - 1):
            if row not in self._live:
                self._admit(row, list(self._live.values()))

    def _end(self, row: int, builder: StepBuilder, *, fate: float) -> None:
        """A request is retracted, ends into the prefix cache, or ends. Its row of the table keeps what it held."""
        request = self._live.pop(row)
        if fate < 0.3:
            self._drop(request, builder)
            if len(request.tokens) < MAX_SEQ_LEN // 2:
                self._retracted.append(request.tokens)
            self.events["requests retracted"] += 1
        elif fate < 0.8 and request.cached:
            spare, kept = request.slots[request.cached :], request.slots[: request.cached]
            self._drop(Sequence([], slots=spare), builder)
            self._cache.append(Sequence(request.tokens[: request.cached], request.cached, kept))
            if len(self._cache) > _CACHE_ENTRIES:
                self._drop(self._cache.pop(0), builder)
                self.events["cache entries evicted"] += 1
            self.events["requests ended"] += 1
        else:
            self._drop(request, builder)
            self.events["requests ended"] += 1

    def _drop(self, sequence: Sequence, builder: StepBuilder) -> None:
        """Free slots that nobody else holds. Half of the time the canary is told, before the table forgets them."""
        freed = []
        for slot in sequence.slots:
            self._users[slot] -= 1
            if not self._users[slot]:
                freed.append(slot)
        if self.rng.random() < 0.5:
            builder.release(freed)
            self.events["slots released"] += len(freed)
        for slot in freed:
            self._free.append(slot)
            self._unmap(slot)

    def _admit(self, row: int, others: list[Sequence]) -> None:
        """A new request: a retracted one, one behind a prefix of one of the others, or one of its own."""
        if self._retracted and self.rng.random() < 0.7:
            self._live[row] = Sequence(self._retracted.pop())
            return
        prompt = self.rng.integers(1, _VOCABULARY, self.rng.integers(2, _LONGEST_PROMPT)).tolist()
        request = Sequence(prompt, speculates=bool(self.rng.random() < 0.4))
        holders = [other for other in others if 0 < other.cached <= MAX_SEQ_LEN // 4]
        if holders and self.rng.random() < 0.6:
            other = holders[int(self.rng.integers(len(holders)))]
            mapped = self._full_to_swa[other.slots[: other.cached]] > 0
            lengths = [n for n in range(1, other.cached + 1) if mapped[max(0, n - WINDOW) : n].all()]
            if lengths:
                shared = int(self.rng.choice(lengths))
                request.tokens = other.tokens[:shared] + prompt
                request.cached, request.slots = shared, other.slots[:shared]
                self._users[request.slots] += 1
                self._req_to_token[row, :shared] = request.slots
                self.events["prefixes shared"] += 1
        self._live[row] = request

    def _move(self, builder: StepBuilder) -> None:
        """Move a slot with its KV and its records, with every reference to it."""
        if self.rng.random() < 0.3 and self._users.any():
            slot = int(self.rng.choice(np.flatnonzero(self._users)))
            to = self._free.pop(0)
            for sequence in (*self._live.values(), *self._cache):
                sequence.slots = [to if s == slot else s for s in sequence.slots]
            for row, request in self._live.items():
                self._req_to_token[row, : len(request.slots)] = request.slots
            self._users[to], self._users[slot] = self._users[slot], 0
            self._full_to_swa[to], self._full_to_swa[slot] = self._full_to_swa[slot], 0
            self._free.append(slot)
            builder.move_full(slot, to)
            self.events["slots moved"] += 1
        if self.rng.random() < 0.3 and self._full_to_swa.any():
            slot = int(self.rng.choice(np.flatnonzero(self._full_to_swa)))
            to = self._free_swa.pop(0)
            builder.move_swa(int(self._full_to_swa[slot]), to)
            self._free_swa.append(int(self._full_to_swa[slot]))
            self._full_to_swa[slot] = to
            self.events["slots moved"] += 1

    def _go_on(self, row: int, builder: StepBuilder, *, reject: bool) -> None:
        """A request's part of the step: a chunk of its prompt, a token, or a token with drafts behind it."""
        request = self._live[row]
        if request.cached == len(request.tokens):
            request.tokens.append(self._token())
        left = len(request.tokens) - request.cached
        drafts: list[int] = []
        if left > 1:
            tokens = request.tokens[request.cached :][: int(self.rng.integers(1, min(left, CHUNK) + 1))]
            self.events["chunks"] += len(tokens) < left
        else:
            drafts = [self._token() for _ in range(_DRAFTS)] if request.speculates else []
            tokens = request.tokens[request.cached :] + drafts
        for position in range(len(request.slots), request.cached + len(tokens)):
            request.slots.append(self._take())
            self._req_to_token[row, position] = request.slots[-1]
        accepted = int(self.rng.integers(len(drafts) + 1)) if reject else len(drafts)
        self.events["tokens"] += len(tokens)
        builder.row(row, request.cached, tokens, request.slots, known=len(request.tokens))
        request.tokens += drafts[:accepted]
        request.cached += len(tokens) - len(drafts) + accepted
        self.events["drafts rejected"] += len(drafts) - accepted

    def _token(self) -> int:
        return int(self.rng.integers(1, _VOCABULARY))

    def _take(self) -> int:
        """A slot of each pool: the ones that were freed last."""
        slot = self._free.pop()
        self.events["slots used again"] += int(self._used[slot])
        self._users[slot], self._used[slot] = 1, True
        self._full_to_swa[slot] = self._free_swa.pop()
        return slot

    def _unmap(self, slot: int) -> None:
        if self._full_to_swa[slot]:
            self._free_swa.append(int(self._full_to_swa[slot]))
            self._full_to_swa[slot] = 0

    def _take_window_slots_back(self) -> None:
        needed = {slot for sequence in (*self._live.values(), *self._cache) for slot in sequence.window()}
        for slot in np.flatnonzero(self._full_to_swa).tolist():
            if slot not in needed:
                self._unmap(slot)
                self.events["window slots taken back"] += 1

    def _in_cache_alone(self) -> list[int]:
        """Slots that only the prefix cache holds."""
        holders = Counter(slot for entry in self._cache for slot in entry.slots)
        return sorted(slot for slot, count in holders.items() if count == self._users[slot])

    def _in_cached_windows(self) -> list[int]:
        """Those of them that a sweep of the SWA group verifies."""
        windows = {slot for entry in self._cache for slot in entry.window()}
        return sorted(windows.intersection(self._in_cache_alone()))
