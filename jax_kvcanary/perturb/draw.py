"""Random choices: whether a fault happens, in which row, and at which of its positions.

All of it runs on a few random words, one threefry call a fault. Everything is traced with 64-bit types on, so that int64 batches keep
their values and byte addresses do not wrap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvcanary._checks import ArrayLike, check_dtype, check_probability, check_shape, check_type, index_array
from jax_kvcanary.batch import ForwardBatch
from jax_kvcanary.pallas import gather, live_and_valid_rows, window_start
from jax_kvcanary.perturb.target import PerturbTarget, step_number

_WORDS = 8  # as many as the function with the most choices needs


class Dice:
    """Random words of one fault, drawn one after the other."""

    def __init__(self, key: ArrayLike) -> None:
        words = jax.random.bits(key, (_WORDS,), jnp.uint32)
        self._words = iter([words[i] for i in range(_WORDS)])

    def happens(self, probability: Any, step: Any, warmup_steps: Any) -> jax.Array:
        """Whether the fault happens in this step: bool scalar."""
        if hasattr(probability, "dtype"):
            check_dtype(probability, "probability", np.float32, np.float64)
            check_shape(probability, "probability", (), "the probability of a fault")
        else:
            probability = check_probability(probability, "probability")
        warm = jnp.asarray(step_number(step)) >= jnp.asarray(step_number(warmup_steps, "warmup_steps"))
        # 24 bits are a float32 below 1 without rounding: probability 1 is always, 0 is never.
        return warm & ((next(self._words) >> 8).astype(jnp.float32) * jnp.float32(2**-24) < probability)

    def below(self, count: Any) -> jax.Array:
        """An int32 scalar from 0 to ``count`` - 1; 0 where the count is 0."""
        return (next(self._words).astype(jnp.int64) % jnp.maximum(count, 1)).astype(jnp.int32)

    def one_of(self, mask: jax.Array) -> jax.Array:
        """Index of one of the entries that are set, each with equal chance; unspecified, but inside, where none is."""
        ranks = jnp.cumsum(mask, dtype=jnp.int32)
        nth = self.below(ranks[-1])
        return jnp.minimum(jnp.sum(ranks <= nth, dtype=jnp.int32), mask.shape[0] - 1)


@dataclass(frozen=True)
class Rows:
    """The rows of a batch, int32 [bs + 1] each; those that the plan leaves out have nothing verified and nothing written.

    Fields:
        req: request row.
        start, prefix: the group verifies the positions from ``start`` to ``prefix`` - 1.
        first_entry: where the row's tokens begin in the token arrays, int64.
        first, extend: of the row's tokens those from ``first`` to ``extend`` - 1 are verified by the group in the next step.
    """

    req: jax.Array
    start: jax.Array
    prefix: jax.Array
    first_entry: jax.Array
    first: jax.Array
    extend: jax.Array

    @classmethod
    def of(cls, batch: ForwardBatch, target: PerturbTarget) -> Rows:
        """The rows as the plan of the target's group reads them."""
        check_type(batch, "batch", ForwardBatch)
        check_type(target, "target", PerturbTarget)
        inputs = batch.plan_input
        req = index_array(inputs.req_pool_indices, "batch.plan_input.req_pool_indices", (None,), "one request row for each row")
        of_rows = (req.shape[0],)
        prefix = index_array(inputs.prefix_lens, "batch.plan_input.prefix_lens", of_rows, "one length for each row")
        extend = index_array(inputs.extend_seq_lens, "batch.plan_input.extend_seq_lens", of_rows, "one length for each row")
        # A row of padding behind them, so that there is one to draw from.
        req, prefix, extend = (jnp.append(column, jnp.int32(0)) for column in (req, prefix, extend))
        max_reqs, max_seq_len = batch.req_to_token.shape
        num_tokens = batch.input_ids.shape[0]
        live, valid = live_and_valid_rows(req, prefix, extend, max_reqs, max_seq_len)
        written = jnp.where(live, jnp.maximum(extend, 0), 0).astype(jnp.int64)
        first_entry = jnp.cumsum(written, dtype=jnp.int64) - written
        return cls(
            req=jnp.where(valid, req, 0),
            start=jnp.where(valid, window_start(prefix, target.swa_window_size), 0),
            prefix=jnp.where(valid, prefix, 0),
            first_entry=first_entry,
            first=jnp.where(valid, window_start(extend, target.swa_window_size), 0),
            # Entries past the token arrays are the canary's to report, and nobody's to change.
            extend=jnp.where(valid, jnp.minimum(extend, num_tokens - first_entry), 0).astype(jnp.int32),
        )

    def verified(self, dice: Dice) -> tuple[jax.Array, jax.Array, jax.Array]:
        """A row and a position that this step verifies, and whether there is one."""
        count = self.prefix - self.start
        row = dice.one_of(count > 0)
        return row, self.start[row] + dice.below(count[row]), count[row] > 0

    def verified_elsewhere(self, dice: Dice, position: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """A row and a position that this step verifies, other than the position given."""
        covers = (self.start <= position) & (position < self.prefix)
        count = jnp.maximum(self.prefix - self.start - covers, 0)
        row = dice.one_of(count > 0)
        at = self.start[row] + dice.below(count[row])
        return row, at + (covers[row] & (at >= position)), count[row] > 0

    def written(self, dice: Dice) -> tuple[jax.Array, jax.Array, jax.Array]:
        """A row, one of its entries in the token arrays that the next step verifies, and whether there is one."""
        count = jnp.maximum(self.extend - self.first, 0)
        row = dice.one_of(count > 0)
        entry = self.first_entry[row] + self.first[row] + dice.below(count[row])
        return row, jnp.where(count[row] > 0, entry, 0).astype(jnp.int32), count[row] > 0


def element(array: ArrayLike, *index: jax.Array) -> jax.Array:
    """One element of an integer array, as int32: -1 for an index outside it, and as ``index_array`` narrows it."""
    inside = jnp.ones((), bool)
    for i, size in zip(index, array.shape, strict=True):
        inside &= (i >= 0) & (i < size)
    value = gather(jnp.asarray(array), tuple(index), inside, -1) if 0 not in array.shape else jnp.full((), -1, jnp.int32)
    return index_array(value, "value", (), "one element")
