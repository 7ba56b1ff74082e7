"""A little serving engine with random traffic, and the canary around its steps.

Prompts come in whole or in chunks, requests decode, share prefixes, end, are retracted, and their slots are used again at once. A
second pool keeps a sliding window: slots that left every window are taken back, and the table then maps them to 0.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from helpers.backends import Backend, host
from helpers.scenarios import translate
from helpers.states import fields, fresh_buffer, fresh_state
from jax_kvcanary.constants import CanaryLaunchTag, RealKvHashMode
from jax_kvcanary.plan import PlanInput
from jax_kvcanary.sources import RealKvSource

NUM_SLOTS = {"FULL": 83, "SWA": 43}
WINDOW = 4
MAX_REQS, MAX_SEQ_LEN = 5, 19
ROWS, TOKENS = 7, 31
KV_BYTES = 24
VERIFY_CAPACITY = 73


@dataclass
class Request:
    """A live request: its tokens, and how many of them are in the cache."""

    tokens: list[int]
    cached: int = 0
    slots: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Step:
    """The arrays of one forward, padded to fixed sizes, int64."""

    inputs: PlanInput
    req_to_token: np.ndarray
    expected_tokens: np.ndarray
    lut: np.ndarray
    input_ids: np.ndarray
    positions: np.ndarray
    out_cache_loc: np.ndarray
    expected_input_tokens: np.ndarray
    expected_input_positions: np.ndarray


class Engine:
    """Requests, slots and KV bytes."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.requests: dict[int, Request] = {}
        self.free = {group: list(self.rng.permutation(np.arange(1, n))) for group, n in NUM_SLOTS.items()}
        self.users = np.zeros(NUM_SLOTS["FULL"], np.int64)
        self.lut = np.zeros(NUM_SLOTS["FULL"], np.int64)
        self.req_to_token = np.zeros((MAX_REQS, MAX_SEQ_LEN), np.int64)
        self.kv = {group: np.zeros((n, KV_BYTES), np.uint8) for group, n in NUM_SLOTS.items()}

    def schedule(self) -> Step:
        """Admit, end and retract requests, then let every live one go on by a chunk or by one token."""
        for row in list(self.requests):
            full = len(self.requests[row].tokens) >= MAX_SEQ_LEN
            if full or self.rng.random() < 0.12:
                self.drop(row)
        for row in range(1, MAX_REQS):
            if row not in self.requests and self.rng.random() < 0.4:
                self.admit(row)

        rows, tokens = [], []
        for row in self.rng.permutation(sorted(self.requests)).tolist():
            request = self.requests[row]
            if request.cached == len(request.tokens):
                request.tokens.append(int(self.rng.integers(1, 1000)))
            left = len(request.tokens) - request.cached
            chunk = int(self.rng.integers(1, min(left, 6) + 1))
            slots = [self.take() for _ in range(chunk)]
            request.slots += slots
            span = range(request.cached, request.cached + chunk)
            self.req_to_token[row, span.start : span.stop] = slots
            rows.append((row, request.cached, chunk, len(request.tokens)))
            tokens += [(request.tokens[p], p, slot) for p, slot in zip(span, slots, strict=True)]
            request.cached += chunk
        # Rows of padding stand anywhere; what their lengths say means nothing.
        while len(rows) < ROWS:
            rows.insert(int(self.rng.integers(0, len(rows) + 1)), (0, 3, 2, 5))
        input_ids, positions, slots = np.array(tokens + [(0, 0, 0)] * (TOKENS - len(tokens)), np.int64).T
        expected_tokens = np.full((MAX_REQS, MAX_SEQ_LEN), -1, np.int64)
        for row, request in self.requests.items():
            expected_tokens[row, : len(request.tokens)] = request.tokens
        return Step(
            inputs=PlanInput(*np.array(rows, np.int64).T),
            req_to_token=self.req_to_token.copy(),
            expected_tokens=expected_tokens,
            lut=self.lut.copy(),
            input_ids=input_ids,
            positions=positions,
            out_cache_loc=slots,
            expected_input_tokens=input_ids,
            expected_input_positions=positions,
        )

    def forward(self, step: Step) -> None:
        """Write KV at the slots of the step that exist; the padding slot takes some too."""
        for group, slots in (("FULL", step.out_cache_loc), ("SWA", translate(step.out_cache_loc, step.lut))):
            slots = slots[(slots >= 0) & (slots < NUM_SLOTS[group])]
            self.kv[group][slots] = self.rng.integers(0, 256, (len(slots), KV_BYTES), np.uint8)

    def after(self) -> None:
        """Take window slots back that no request will look at again."""
        needed = {slot for request in self.requests.values() for slot in request.slots[max(0, request.cached - WINDOW) : request.cached]}
        for slot in np.flatnonzero(self.lut):
            if slot not in needed:
                self.forget_window_slot(slot)

    def admit(self, row: int) -> None:
        """A new request, half of the time behind the prefix of another one."""
        request = Request(self.rng.integers(1, 1000, self.rng.integers(2, 12)).tolist())
        others = [other for other in self.requests.values() if other.cached > 1]
        if others and self.rng.random() < 0.5:
            other = others[self.rng.integers(len(others))]
            shared = int(self.rng.integers(1, min(other.cached, 8)))
            request = Request(other.tokens[:shared] + request.tokens[:5], shared, other.slots[:shared])
            self.users[request.slots] += 1
            self.req_to_token[row, :shared] = request.slots
        self.requests[row] = request

    def drop(self, row: int) -> None:
        """A request ends, or is retracted: its row of the table keeps what it held."""
        for slot in self.requests.pop(row).slots:
            self.users[slot] -= 1
            if not self.users[slot]:
                self.free["FULL"].append(slot)
                if self.lut[slot]:
                    self.forget_window_slot(slot)

    def take(self) -> int:
        """A slot of each pool: the one that was freed last."""
        slot = int(self.free["FULL"].pop())
        self.users[slot] = 1
        self.lut[slot] = self.free["SWA"].pop()
        return slot

    def forget_window_slot(self, slot: int) -> None:
        self.free["SWA"].append(self.lut[slot])
        self.lut[slot] = 0


class CanaryAround:
    """Canary buffers and state on one backend, run around the steps of an engine."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.buffers = {(group, end): backend.array(fresh_buffer(n)) for group, n in NUM_SLOTS.items() for end in ("head", "tail")}
        self.state = backend.own(fresh_state(503))

    def before_forward(self, step: Step) -> None:
        """Plans and HEAD."""
        ints = self.backend.ints
        self.plans, self.slots = {}, {"FULL": step.out_cache_loc, "SWA": translate(step.out_cache_loc, step.lut)}
        for group in NUM_SLOTS:
            with self.backend.active():
                self.plans[group] = self.backend.plan(
                    PlanInput(*(ints(column) for column in dataclasses.astuple(step.inputs))),
                    ints(step.req_to_token, step.req_to_token.shape),
                    verify_capacity=VERIFY_CAPACITY,
                    swa_window_size=WINDOW if group == "SWA" else 0,
                    full_to_swa_index_mapping=ints(step.lut) if group == "SWA" else None,
                    expected_tokens=ints(step.expected_tokens, step.expected_tokens.shape),
                )
            self.launches(step, group, "head", {})

    def after_forward(self, step: Step, kv: dict[str, np.ndarray]) -> None:
        """TAIL."""
        for group in NUM_SLOTS:
            source = RealKvSource(array=self.backend.array(kv[group]), num_bytes_per_token=KV_BYTES, read_bytes=KV_BYTES)
            self.launches(step, group, "tail", {"real_kv_sources": (source,), "real_kv_hash_mode": RealKvHashMode.ALL})

    def launches(self, step: Step, group: str, end: str, read_kv: dict[str, Any]) -> None:
        ints, tag = self.backend.ints, CanaryLaunchTag[f"{end.upper()}_K_{group}"]
        with self.backend.active():
            self.state = self.backend.verify_step(
                self.buffers[group, end], self.plans[group].verify, self.state, tag=tag, check_expected_token=True, **read_kv
            )
            self.buffers[group, end], self.state = self.backend.write_step(
                self.buffers[group, end],
                self.plans[group].write,
                ints(step.input_ids),
                ints(step.positions),
                ints(self.slots[group]),
                self.state,
                tag=tag,
                expected_input_tokens=ints(step.expected_input_tokens),
                expected_input_positions=ints(step.expected_input_positions),
                **read_kv,
            )

    def records(self, group: str, end: str) -> np.ndarray:
        """A copy of the records of a buffer, int64 [num_slots, 4]."""
        return fields(self.buffers[group, end]).copy()

    def set_records(self, group: str, end: str, records: np.ndarray) -> None:
        self.buffers[group, end] = self.backend.array(records.view(np.uint8))

    @property
    def found(self) -> int:
        """Findings so far."""
        return host(self.state).violation_log.count()
