"""Expected tokens: what each (request row, position) should hold, for ``CanaryConfig.enable_verify_token_assert``."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from jax_kvcanary._checks import ArrayLike, check_dtype, check_shape, index_array, token_array
from jax_kvcanary.pallas import scatter_tokens
from jax_kvcanary.state import CanaryDeviceState, check_device_state, zero_behind_launches


def set_expected_tokens(
    device_state: CanaryDeviceState,
    req_pool_indices: ArrayLike,
    tokens: ArrayLike,
    lengths: ArrayLike,
    *,
    start_positions: ArrayLike | None = None,
) -> CanaryDeviceState:
    """Store the tokens of some requests in the table of expected tokens.

    The rest of the table stays as it is, also that of the rows named: ``PlanInput.expected_tokens_valid_lens`` says how much of a row
    belongs to its present request.

    Args:
        device_state: its table is updated in place under donation.
        req_pool_indices: int32 or int64 [n]; request row of each list of tokens. Lists of row 0, the padding, and of rows that the
            table does not have are skipped.
        tokens: int32 or int64 [m]; those of all lists, one list after the other in the order of ``req_pool_indices``. -1, or a token
            that does not fit int32, is unknown: nothing is compared there. Tokens past the sum of the lengths are padding, so that
            the array can have one of a few fixed sizes.
        lengths: int32 or int64 [n]; tokens of each list, those of skipped lists included. A negative one counts as 0.
        start_positions: int32 or int64 [n]; position of each list's first token; None is 0. A list that starts at a negative position
            is skipped, and tokens past the end of the row are dropped.

    Returns:
        The state with the tokens stored.

    Danger:
        Name each request once in a call. Where two lists have tokens for the same position of a row, it is open which token stays.

    Raises:
        TypeError: a dtype other than int32 and int64. ValueError: a wrong rank or length, or a state without a table, because
            ``enable_verify_token_assert`` is off.
    """
    table = _table(device_state)
    reqs = index_array(req_pool_indices, "req_pool_indices", (None,), "one request row for each list of tokens")
    each = f"one value for each of the {reqs.shape[0]} lists of `req_pool_indices`"
    lengths = index_array(lengths, "lengths", tuple(reqs.shape), each)
    tokens = token_array(tokens, "tokens", (None,), "a flat array of the tokens of all lists")
    if start_positions is None:
        start_positions = jnp.zeros_like(reqs)
    starts = index_array(start_positions, "start_positions", tuple(reqs.shape), each)
    # Plans read the table before the launches so far. A store that did not depend on them could come first, and XLA would copy the table.
    table = scatter_tokens(table, reqs + zero_behind_launches(device_state), lengths, starts, tokens)
    return dataclasses.replace(device_state, req_to_verify_expected_tokens=table)


def append_expected_tokens(
    device_state: CanaryDeviceState, req_pool_indices: ArrayLike, positions: ArrayLike, tokens: ArrayLike
) -> CanaryDeviceState:
    """Store one token a row, such as the ones that a decode step has just sampled. Everything stays on the device.

    Args:
        device_state: its table is updated in place under donation.
        req_pool_indices: int32 or int64 [n]; request row of each token. Row 0, the padding, and rows that the table does not have are
            skipped.
        positions: int32 or int64 [n]; position that each token will have in its request: for a sampled token, the one behind the last
            position of the step. A token for a negative position, or for one past the end of the row, is skipped: give -1 where a
            row's sample is thrown away, as it is in all chunks of a prompt but the last.
        tokens: int32 or int64 [n]; -1, or a token that does not fit int32, is unknown.

    Returns:
        The state with the tokens stored.

    Danger:
        As for :func:`set_expected_tokens`.

    Raises:
        TypeError, ValueError: as for :func:`set_expected_tokens`.
    """
    _table(device_state)
    reqs = index_array(req_pool_indices, "req_pool_indices", (None,), "one request row for each token")
    each = f"one value for each of the {reqs.shape[0]} rows of `req_pool_indices`"
    positions = index_array(positions, "positions", tuple(reqs.shape), each)
    tokens = token_array(tokens, "tokens", tuple(reqs.shape), each)
    return set_expected_tokens(device_state, reqs, tokens, jnp.ones_like(reqs), start_positions=positions)


def _table(device_state: CanaryDeviceState) -> ArrayLike:
    check_device_state(device_state)
    table, name = device_state.req_to_verify_expected_tokens, "device_state.req_to_verify_expected_tokens"
    if table is None:
        raise ValueError(f"`{name}` is None, but it must be a table of tokens, which a state has when `enable_verify_token_assert` is on.")
    check_dtype(table, name, np.int32)
    check_shape(table, name, (None, None), "a table of tokens by request row and position")
    return table
