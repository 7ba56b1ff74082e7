"""How far a sliding-window pool is from the full pool: numbers about the table between the two, not findings."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvcanary._checks import ArrayLike, check_type
from jax_kvcanary.batch import ForwardBatch
from jax_kvcanary.constants import INT32_MAX
from jax_kvcanary.pallas import gather, live_and_valid_rows, window_start
from jax_kvcanary.plan import lut_array, never_empty, row_arrays, translate_slots

#: Rows that are counted in one go: all of them at once would take memory that a serving engine may not have left.
_ROWS_AT_ONCE = 8


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("live_entries", "diverged", "outside_window", "absent_in_window", "past_table", "without_slot"),
    meta_fields=(),
)
@dataclass(frozen=True)
class SwaDivergence:
    """Counts over the live entries of a batch, int32 [1] each; they saturate at 2^31 - 1.

    An entry is a position of a row. It is live below the row's prefix and extend lengths together: those are the positions that the
    step's attention reads through ``req_to_token``. Padding rows and invalid rows have none, and a prefix that two rows
    share counts twice, as in a plan.

    Fields:
        live_entries: all of them.
        diverged: entries with a slot in the window's pool whose number is not that of their full-pool slot.
        outside_window: entries before the first position that the plan verifies; no token of the step sees them.
        absent_in_window: entries in the window, those being written included, for which the table has 0 or a negative value: their
            records are not verified.
        past_table: entries whose full-pool slot is past the end of the table; in the prefix's window they are findings.
        without_slot: entries with a negative full-pool slot, which is not looked up.
    """

    live_entries: ArrayLike
    diverged: ArrayLike
    outside_window: ArrayLike
    absent_in_window: ArrayLike
    past_table: ArrayLike
    without_slot: ArrayLike

    def copy_to_host_async(self) -> None:
        """Start the copy of the counts to the host."""
        for count in vars(self).values():
            count.copy_to_host_async()

    def on_host(self) -> dict[str, int]:
        """The counts by name. Waits for the device."""
        return {field.name: int(np.asarray(getattr(self, field.name))[0]) for field in dataclasses.fields(self)}


def swa_divergence(batch: ForwardBatch, full_to_swa_index_mapping: ArrayLike, *, swa_window_size: int) -> SwaDivergence:
    """Statistics of one table; see :class:`SwaDivergence`. Takes the memory of a few arrays of [8, max_seq_len].

    Args:
        batch: a forward's batch; ``req_to_token`` has the slots of the tokens being written, too.
        full_to_swa_index_mapping: int32 or int64 [n]; full-pool slots to those of the window's pool.
        swa_window_size: positions that the group verifies; 0 is all (static).

    Raises:
        TypeError, ValueError: an argument of a wrong type, dtype or shape.
    """
    check_type(batch, "batch", ForwardBatch)
    req, prefix, extend, table = row_arrays(batch.plan_input, batch.req_to_token)
    lut = lut_array(full_to_swa_index_mapping)
    max_reqs, max_seq_len = table.shape
    _, valid = live_and_valid_rows(req, prefix, extend, max_reqs, max_seq_len)
    # The table ends before a longer extend does; the sum of the two lengths could wrap.
    live_lens = jnp.where(valid, prefix + jnp.minimum(extend, max_seq_len - prefix), 0)
    starts = jnp.where(valid, window_start(prefix, swa_window_size), 0)

    positions = jnp.arange(max_seq_len, dtype=jnp.int32)

    def count_row(row: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        """What is counted by slot, int32 [4]."""
        req, length, start = row
        live = positions < length
        full = gather(never_empty(table), (req, positions), live, -1)
        own = translate_slots(full, lut)
        in_table = live & (full >= 0) & (full < lut.shape[0])
        diverged = in_table & (own > 0) & (own != full)
        absent = in_table & (own == 0) & (positions >= start)
        masks = (diverged, absent, live & (full >= lut.shape[0]), live & (full < 0))
        return jnp.stack([jnp.sum(mask, dtype=jnp.int32) for mask in masks])

    counts = jax.lax.map(count_row, (req, live_lens, starts), batch_size=_ROWS_AT_ONCE)
    diverged, absent_in_window, past_table, without_slot = (_saturating_sum(counts[:, i]) for i in range(4))
    return SwaDivergence(
        live_entries=_saturating_sum(live_lens),
        diverged=diverged,
        outside_window=_saturating_sum(starts),
        absent_in_window=absent_in_window,
        past_table=past_table,
        without_slot=without_slot,
    )


def add_divergences(a: SwaDivergence, b: SwaDivergence) -> SwaDivergence:
    """The counts of two tables together."""
    return jax.tree.map(_saturating_add, a, b)


def _saturating_add(a: jax.Array, b: jax.Array) -> jax.Array:
    """The sum of two non-negative int32, or 2^31 - 1 where it is larger."""
    return jnp.where(a > INT32_MAX - b, INT32_MAX, a + b)


def _saturating_sum(counts: jax.Array) -> jax.Array:
    """int32 [1]; the sum of non-negative int32 [n], or 2^31 - 1 where it is larger."""
    return jax.lax.reduce(counts, np.int32(0), _saturating_add, (0,))[None]
