"""The arrays of one step of the self test, of fixed sizes, and how the scheduler fills them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

from jax_kvcanary.plan import VerifyPlan

NUM_SLOTS, NUM_SWA_SLOTS, WINDOW = 263, 89, 4
MAX_REQS, MAX_SEQ_LEN, CHUNK = 5, 37, 6
ROWS, TOKENS = 7, 31
SWEEP_INTERVAL = 2
VERIFY_CAPACITY = MAX_REQS * MAX_SEQ_LEN
_SWEEP_CAPACITY = 3 * MAX_SEQ_LEN


@partial(jax.tree_util.register_dataclass, data_fields=("full", "swa"), meta_fields=())
@dataclass(frozen=True)
class Moves:
    """Slots that move in each pool, int32 [2]: from, to; 0 to 0 is none."""

    full: np.ndarray
    swa: np.ndarray


_FIELDS = (
    "input_ids",
    "positions",
    "out_cache_loc",
    "req_pool_indices",
    "prefix_lens",
    "extend_seq_lens",
    "known_lens",
    "req_to_token",
    "expected_tokens",
    "full_to_swa",
    "released",
    "moves",
    "cached_slots",
    "cached_window_slots",
    "sweep_full",
    "sweep_swa",
)


@partial(jax.tree_util.register_dataclass, data_fields=_FIELDS, meta_fields=())
@dataclass(frozen=True)
class Step:
    """Everything that the scheduler hands to the device for one step, int32.

    Fields:
        input_ids, positions, out_cache_loc: [TOKENS]; the tokens of all rows, padded with 0.
        req_pool_indices, prefix_lens, extend_seq_lens, known_lens: [ROWS]; padding stands anywhere.
        req_to_token: [MAX_REQS, MAX_SEQ_LEN].
        expected_tokens: [MAX_REQS, MAX_SEQ_LEN]; tokens by request row and position, -1 behind them.
        full_to_swa: [NUM_SLOTS].
        released: [NUM_SLOTS]; slots to release before anything else, by the table of the step before, padded with -1.
        moves: slots that move then.
        cached_slots: [NUM_SLOTS]; slots that only the prefix cache holds, padded with -1.
        cached_window_slots: [NUM_SLOTS]; those of them that a sweep of the SWA group verifies.
        sweep_full, sweep_swa: what to sweep behind the step; no entries in steps without a sweep.
    """

    input_ids: np.ndarray
    positions: np.ndarray
    out_cache_loc: np.ndarray
    req_pool_indices: np.ndarray
    prefix_lens: np.ndarray
    extend_seq_lens: np.ndarray
    known_lens: np.ndarray
    req_to_token: np.ndarray
    expected_tokens: np.ndarray
    full_to_swa: np.ndarray
    released: np.ndarray
    moves: Moves
    cached_slots: np.ndarray
    cached_window_slots: np.ndarray
    sweep_full: VerifyPlan
    sweep_swa: VerifyPlan


class StepBuilder:
    """Collects what a step consists of, and lays it out.

    ``entries`` counts what the canary has to verify and to write: in a phase by the group's name, in a sweep by "swept" before it.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self.entries: Counter[str] = Counter()
        self._rng = rng
        self._rows: list[tuple[int, int, int, int]] = []
        self._tokens: list[tuple[int, int, int]] = []
        self._released: list[int] = []
        self._moves = {"full": (0, 0), "swa": (0, 0)}
        self._sweeps: dict[str, list[tuple[int, int, int, int]]] = {"full": [], "swa": []}

    def row(self, row: int, prefix: int, tokens: Sequence[int], slots: Sequence[int], *, known: int) -> None:
        """A request's tokens, behind ``prefix`` cached ones."""
        self._rows.append((row, prefix, len(tokens), known))
        self._tokens += [(token, prefix + i, slots[prefix + i]) for i, token in enumerate(tokens)]
        self.entries.update({"FULL": prefix + len(tokens), "SWA": min(prefix, WINDOW) + len(tokens)})

    def release(self, slots: Sequence[int]) -> None:
        """Slots that were freed."""
        self._released += slots

    def move_full(self, slot: int, to: int) -> None:
        """A slot of the full pool that moves; one a step."""
        self._moves["full"] = (slot, to)

    def move_swa(self, slot: int, to: int) -> None:
        """A slot of the SWA pool that moves; one a step."""
        self._moves["swa"] = (slot, to)

    def sweep(self, tokens: Sequence[int], slots: Sequence[int], full_to_swa: np.ndarray) -> None:
        """A chain of the prefix cache, whole in the full pool, its window in the SWA pool."""
        own = [int(full_to_swa[slot]) for slot in slots]
        first = max(0, len(slots) - WINDOW)
        for group, chain, start in (("full", slots, 0), ("swa", own, first)):
            previous = [-1, *chain[:-1]]
            self._sweeps[group] += [(chain[p], tokens[p], p, previous[p]) for p in range(start, len(chain))]
            self.entries[f"swept {group.upper()}"] += len(chain) - start

    def build(
        self,
        req_to_token: np.ndarray,
        expected_tokens: np.ndarray,
        full_to_swa: np.ndarray,
        cached: Sequence[int],
        cached_window: Sequence[int],
    ) -> Step:
        """The step."""
        rows = self._rows.copy()
        while len(rows) < ROWS:  # what the lengths of padding say means nothing
            rows.insert(int(self._rng.integers(0, len(rows) + 1)), (0, 3, 2, 5))
        padding = TOKENS - len(self._tokens)
        ids, positions, slots = np.array(self._tokens + [(0, 0, 0)] * padding, np.int32).T
        columns = ("req_pool_indices", "prefix_lens", "extend_seq_lens", "known_lens")
        return Step(
            input_ids=ids,
            positions=positions,
            out_cache_loc=slots,
            **dict(zip(columns, np.array(rows, np.int32).T, strict=True)),
            req_to_token=req_to_token,
            expected_tokens=expected_tokens,
            full_to_swa=full_to_swa,
            released=_padded(self._released, NUM_SLOTS),
            moves=Moves(**{name: np.array(move, np.int32) for name, move in self._moves.items()}),
            cached_slots=_padded(cached, NUM_SLOTS),
            cached_window_slots=_padded(cached_window, NUM_SLOTS),
            sweep_full=_sweep_plan(self._sweeps["full"]),
            sweep_swa=_sweep_plan(self._sweeps["swa"]),
        )


def _padded(values: Sequence[int], length: int) -> np.ndarray:
    return np.array([*values, *[-1] * (length - len(values))], np.int32)


def _sweep_plan(entries: list[tuple[int, int, int, int]]) -> VerifyPlan:
    slots, tokens, positions, previous = np.array(entries + [(0, -1, 0, 0)] * (_SWEEP_CAPACITY - len(entries)), np.int32).T
    return VerifyPlan(slots, tokens, positions, previous, np.array([len(entries)], np.int32), np.ones(1, np.int32))
