"""One forward pass as the canary sees it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jax_kvcanary._checks import ArrayLike, check_int, integer_array
from jax_kvcanary.constants import INT32_MAX
from jax_kvcanary.plan import PlanInput


@partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        "input_ids",
        "positions",
        "out_cache_loc",
        "plan_input",
        "req_to_token",
        "expected_input_tokens",
        "expected_input_positions",
    ),
    meta_fields=(),
)
@dataclass(frozen=True)
class ForwardBatch:
    """The tokens of one forward pass and the rows they belong to. Integers are int32 or int64.

    Fields:
        input_ids: [tokens]; live tokens packed in row order at the front, padding behind them.
        positions: [tokens]; position of each token in its request.
        out_cache_loc: [tokens]; full-pool slot that takes the token's KV; 0 for padding, negative for none.
        plan_input: the rows, see :class:`PlanInput`.
        req_to_token: [max_reqs, max_seq_len]; full-pool slot of each (request row, position); row 0 is padding.
        expected_input_tokens, expected_input_positions: [tokens] or None; what ``input_ids`` and ``positions`` should be, required
            when ``CanaryConfig.enable_write_input_assert`` is on.

    The constructors :meth:`decode`, :meth:`extend`, :meth:`target_verify` and :meth:`draft_extend` derive the rows' lengths from
    what an engine has at hand for each kind of step.
    """

    input_ids: ArrayLike
    positions: ArrayLike
    out_cache_loc: ArrayLike
    plan_input: PlanInput
    req_to_token: ArrayLike
    expected_input_tokens: ArrayLike | None = None
    expected_input_positions: ArrayLike | None = None

    @classmethod
    def decode(
        cls,
        *,
        input_ids: ArrayLike,
        positions: ArrayLike,
        out_cache_loc: ArrayLike,
        req_pool_indices: ArrayLike,
        req_to_token: ArrayLike,
        expected_tokens_valid_lens: ArrayLike | None = None,
        expected_input_tokens: ArrayLike | None = None,
        expected_input_positions: ArrayLike | None = None,
    ) -> ForwardBatch:
        """One token a row: the prefix is as long as the token's position, [bs] = [tokens]."""
        prefix_lens = integer_array(positions, "positions", (None,), "one position for each row of a decode batch")
        rows = PlanInput(req_pool_indices, prefix_lens, jnp.ones_like(prefix_lens), expected_tokens_valid_lens)
        return cls(input_ids, positions, out_cache_loc, rows, req_to_token, expected_input_tokens, expected_input_positions)

    @classmethod
    def extend(
        cls,
        *,
        input_ids: ArrayLike,
        positions: ArrayLike,
        out_cache_loc: ArrayLike,
        req_pool_indices: ArrayLike,
        prefix_lens: ArrayLike,
        extend_seq_lens: ArrayLike,
        req_to_token: ArrayLike,
        expected_tokens_valid_lens: ArrayLike | None = None,
        expected_input_tokens: ArrayLike | None = None,
        expected_input_positions: ArrayLike | None = None,
    ) -> ForwardBatch:
        """Prefill, chunked prefill, or a mix with decode rows: lengths as given, [bs]."""
        rows = PlanInput(req_pool_indices, prefix_lens, extend_seq_lens, expected_tokens_valid_lens)
        return cls(input_ids, positions, out_cache_loc, rows, req_to_token, expected_input_tokens, expected_input_positions)

    @classmethod
    def target_verify(
        cls,
        *,
        input_ids: ArrayLike,
        positions: ArrayLike,
        out_cache_loc: ArrayLike,
        req_pool_indices: ArrayLike,
        seq_lens: ArrayLike,
        draft_token_num: int,
        req_to_token: ArrayLike,
        expected_tokens_valid_lens: ArrayLike | None = None,
        expected_input_tokens: ArrayLike | None = None,
        expected_input_positions: ArrayLike | None = None,
    ) -> ForwardBatch:
        """Speculative verification: every row writes ``draft_token_num`` tokens behind its ``seq_lens`` [bs] cached ones."""
        check_int(draft_token_num, "draft_token_num", 0, INT32_MAX)
        seq_lens = integer_array(seq_lens, "seq_lens", (None,), "one length for each row")
        rows = PlanInput(req_pool_indices, seq_lens, jnp.full_like(seq_lens, draft_token_num), expected_tokens_valid_lens)
        return cls(input_ids, positions, out_cache_loc, rows, req_to_token, expected_input_tokens, expected_input_positions)

    @classmethod
    def draft_extend(
        cls,
        *,
        input_ids: ArrayLike,
        positions: ArrayLike,
        out_cache_loc: ArrayLike,
        req_pool_indices: ArrayLike,
        seq_lens: ArrayLike,
        extend_seq_lens: ArrayLike,
        req_to_token: ArrayLike,
        expected_tokens_valid_lens: ArrayLike | None = None,
        expected_input_tokens: ArrayLike | None = None,
        expected_input_positions: ArrayLike | None = None,
    ) -> ForwardBatch:
        """The draft model catches up: ``seq_lens`` [bs] include the ``extend_seq_lens`` [bs] tokens written now."""
        seq_lens = integer_array(seq_lens, "seq_lens", (None,), "one length for each row")
        extend_seq_lens = integer_array(extend_seq_lens, "extend_seq_lens", tuple(seq_lens.shape), "one length for each row of `seq_lens`")
        with jax.enable_x64(True):
            prefix_lens = seq_lens - extend_seq_lens
        rows = PlanInput(req_pool_indices, prefix_lens, extend_seq_lens, expected_tokens_valid_lens)
        return cls(input_ids, positions, out_cache_loc, rows, req_to_token, expected_input_tokens, expected_input_positions)
