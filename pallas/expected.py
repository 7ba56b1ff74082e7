"""Scatter of flat token lists into rows of a table: one Triton kernel on CUDA, one jnp scatter on the CPU, one formula.

Each flat token has a thread, which finds its list by binary search. The table is updated in place where it is donated.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jax_kvcanary._results import varying_zero
from jax_kvcanary.constants import REQ_POOL_IDX_PADDING
from jax_kvcanary.pallas._driver import int32_results, load_ref
from jax_kvcanary.pallas.formulas import MAX_ROW_BLOCK, Load, gather, list_of_entry, saturating_ends

#: Threads of a warp, and of the largest block; a decode step of a few rows takes one warp.
_WARP, _MAX_BLOCK = 32, 256


class TokenLists(NamedTuple):
    """Operands of the scatter, int32.

    Fields:
        table: [rows, width].
        offsets: [lists + 1]; flat token with which each list begins, and the number of tokens in all lists.
        req_pool_indices: [lists]; the table's row that takes each list.
        start_positions: [lists]; where in the row each list begins.
        tokens: [tokens]; those of all lists, one list after the other, and padding.
    """

    table: Any
    offsets: Any
    req_pool_indices: Any
    start_positions: Any
    tokens: Any


class Placement(NamedTuple):
    """Where flat tokens go: past the table's last row where ``stored`` is unset."""

    stored: jax.Array
    row: jax.Array
    position: jax.Array
    token: jax.Array


@jax.jit
def scatter_tokens(
    table: jax.Array, req_pool_indices: jax.Array, lengths: jax.Array, start_positions: jax.Array, tokens: jax.Array
) -> jax.Array:
    """Store token lists in rows of a table, on the platform that the surrounding program is compiled for.

    Args:
        table: int32 [rows, width], aliased to the result.
        req_pool_indices: int32 [lists]; the row that takes each list.
        lengths: int32 [lists]; number of tokens of each list; a negative one counts as 0.
        start_positions: int32 [lists]; where in the row each list begins.
        tokens: int32 [tokens]; what lies past the sum of the lengths is padding.

    Returns:
        The table. A token for row 0, for a row or a position that the table does not have, or of a list that starts at a negative
        position is not stored.
    """
    if 0 in (*table.shape, *tokens.shape, *lengths.shape):  # kernels cannot take empty operands
        return table
    lists = TokenLists(table, _list_offsets(lengths), req_pool_indices, start_positions, tokens)
    lists = lists._replace(table=table + varying_zero(lists))  # the result varies as the table does; XLA folds the addition
    return jax.lax.platform_dependent(
        *lists, cpu=lambda *values: _scatter_jnp(TokenLists(*values)), cuda=lambda *values: _scatter_triton(TokenLists(*values))
    )


def _list_offsets(lengths: jax.Array) -> jax.Array:
    """Exclusive prefix sums of the lengths, and their total, [lists + 1], saturating at 2^31 - 1."""
    lists = lengths.shape[0]
    block = min(lists, MAX_ROW_BLOCK)
    padded = jnp.pad(jnp.maximum(lengths, 0), (0, -lists % block)).reshape(-1, block)

    def step(before: jax.Array, part: jax.Array) -> tuple[jax.Array, jax.Array]:
        ends, total = saturating_ends(part, before)
        return total, ends

    zero = varying_zero([lengths])
    _, ends = jax.lax.scan(step, zero, padded)
    return jnp.append(zero, ends.reshape(-1)[:lists])


def place_tokens(load: Load, lists: TokenLists, flat: jax.Array, total: jax.Array) -> Placement:
    """The flat tokens named, and where they go; ``total`` of them are in lists, or more than there are."""
    rows, width = lists.table.shape
    in_lists = flat < jnp.minimum(total, lists.tokens.shape[0])
    (count,) = lists.req_pool_indices.shape
    index = list_of_entry(load, lists.offsets, 0, count - 1, count, flat, in_lists)
    row = load(lists.req_pool_indices, (index,), in_lists, REQ_POOL_IDX_PADDING)
    start = load(lists.start_positions, (index,), in_lists, -1)
    # From a start of 0 or more, a sum that does not fit int32 wraps to a negative position.
    position = start + (flat - load(lists.offsets, (index,), in_lists, 0))
    stored = in_lists & (row != REQ_POOL_IDX_PADDING) & (row >= 0) & (row < rows) & (start >= 0) & (position >= 0) & (position < width)
    return Placement(stored, jnp.where(stored, row, rows), jnp.where(stored, position, 0), load(lists.tokens, (flat,), stored, -1))


def _scatter_jnp(lists: TokenLists) -> jax.Array:
    """One scatter, which drops what lies past the last row."""
    flat = jnp.arange(lists.tokens.shape[0], dtype=jnp.int32)
    out = place_tokens(gather, lists, flat, lists.offsets[-1])
    return lists.table.at[out.row, out.position].set(out.token, mode="drop")


def _scatter_triton(lists: TokenLists) -> jax.Array:
    """The same as a Pallas kernel on Triton that works in the table's own memory."""
    (tokens,) = lists.tokens.shape
    block = min(max(pl.next_power_of_2(tokens), _WARP), _MAX_BLOCK)
    (table,) = pl.pallas_call(
        functools.partial(_tokens_kernel, block=block),
        out_shape=int32_results(lists, lists.table.shape),
        grid=(pl.cdiv(tokens, block),),
        input_output_aliases={0: 0},
        compiler_params=plgpu.CompilerParams(num_warps=block // _WARP, num_stages=1),
        name="kvcanary_expected_tokens",
    )(*lists)
    return table


def _tokens_kernel(*refs: Any, block: int) -> None:
    """One thread a token; a block behind the last token ends at once."""
    *operands, table_ref = refs
    lists = TokenLists(*operands)
    first = pl.program_id(0) * block
    total = lists.offsets[lists.req_pool_indices.shape[0]]

    @pl.when(first < total)
    def _() -> None:
        out = place_tokens(load_ref, lists, first + jnp.arange(block, dtype=jnp.int32), total)
        plgpu.store(table_ref.at[out.row, out.position], out.token, mask=out.stored)
