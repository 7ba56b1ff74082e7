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
        "parents",
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
        parents: [tokens] or None; for a tree of draft tokens, the entry of the token arrays that each one follows: one before it in its
            own row, or a negative one for the row's last cached token. None: each token follows the one before it.

    The constructors :meth:`decode`, :meth:`extend`, :meth:`target_verify`, :meth:`draft_decode` and :meth:`draft_extend` derive the
    rows' lengths from what an engine has at hand for each kind of step.

    A draft model's top-k branches are chains of their own: give each branch a row of ``req_to_token`` that holds the request's slots
    and then the branch's, and a row of the batch.
    """

    input_ids: ArrayLike
    positions: ArrayLike
    out_cache_loc: ArrayLike
    plan_input: PlanInput
    req_to_token: ArrayLike
    expected_input_tokens: ArrayLike | None = None
    expected_input_positions: ArrayLike | None = None
    parents: ArrayLike | None = None

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
        topk: int = 1,
        parents: ArrayLike | None = None,
        expected_tokens_valid_lens: ArrayLike | None = None,
        expected_input_tokens: ArrayLike | None = None,
        expected_input_positions: ArrayLike | None = None,
    ) -> ForwardBatch:
        """Speculative verification: every row writes ``draft_token_num`` tokens behind its ``seq_lens`` [bs] cached ones.

        With ``topk`` above 1 the tokens of a row are a tree, and ``parents`` [tokens] says which one each follows.

        Raises:
            ValueError: a tree without parents: followed one after the other, its tokens would look like corruption.
        """
        check_int(draft_token_num, "draft_token_num", 0, INT32_MAX)
        if check_int(topk, "topk", 1, INT32_MAX) > 1 and parents is None:
            raise ValueError(
                f"`parents` is None, but with `topk` = {topk} the draft tokens of a row are a tree, and it must name the entry that each "
                "token follows."
            )
        seq_lens = integer_array(seq_lens, "seq_lens", (None,), "one length for each row")
        rows = PlanInput(req_pool_indices, seq_lens, jnp.full_like(seq_lens, draft_token_num), expected_tokens_valid_lens)
        return cls(input_ids, positions, out_cache_loc, rows, req_to_token, expected_input_tokens, expected_input_positions, parents)

    @classmethod
    def draft_decode(
        cls,
        *,
        input_ids: ArrayLike,
        positions: ArrayLike,
        out_cache_loc: ArrayLike,
        req_pool_indices: ArrayLike,
        seq_lens: ArrayLike,
        draft_step: ArrayLike,
        req_to_token: ArrayLike,
        expected_tokens_valid_lens: ArrayLike | None = None,
        expected_input_tokens: ArrayLike | None = None,
        expected_input_positions: ArrayLike | None = None,
    ) -> ForwardBatch:
        """One of several decode steps of a draft model, [bs] = [tokens].

        Behind its ``seq_lens`` [bs] accepted tokens, every row has ``draft_step`` draft tokens in the cache already: an int, or an int32
        or int64 scalar such as the counter of a scan.
        """
        seq_lens = integer_array(seq_lens, "seq_lens", (None,), "one length for each row of a decode batch")
        if not hasattr(draft_step, "dtype"):
            check_int(draft_step, "draft_step", 0, INT32_MAX)
        else:
            draft_step = integer_array(draft_step, "draft_step", (), "the number of draft steps before this one")
        with jax.enable_x64(True):
            prefix_lens = seq_lens + draft_step
        rows = PlanInput(req_pool_indices, prefix_lens, jnp.ones_like(prefix_lens), expected_tokens_valid_lens)
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
