"""Tokens that are known beforehand: a model's stand-in whose every input can be checked.

A server under test takes its prompts and its next tokens from a :class:`TokenOracle` instead of a tokenizer and a sampler.
Each token then follows from request and position alone, so that a wrong one shows where it is written.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvcanary import hashing, reference
from jax_kvcanary._checks import ArrayLike, check_int, check_type, integer_array
from jax_kvcanary.batch import ForwardBatch
from jax_kvcanary.constants import INT32_MAX
from jax_kvcanary.plan import plan
from jax_kvcanary.reference.hashes import to_signed
from jax_kvcanary.state import from_int64


@jax.tree_util.register_static
@dataclass(frozen=True)
class TokenOracle:
    """Deterministic tokens from (seed, request id, position).

    With ``hash = mix3(seed, request_id, position)`` and ``n = vocab_size - reserved``, the token is ``reserved + (hash * n >> 64)``: every
    token from ``reserved`` on is as likely as any other, up to one hash in 2^64.

    Static and hashable: a jitted function may close over it, or take it as an argument.

    Fields:
        seed: between 0 and 2^64 - 1.
        vocab_size: tokens are below this, at most 2^31 - 1.
        reserved: this many low tokens are never produced, such as those that end a text.

    Raises:
        TypeError: a field is not an int. ValueError: a field is outside its range.
    """

    seed: int
    vocab_size: int
    reserved: int = 0

    def __post_init__(self) -> None:
        check_int(self.seed, "seed", 0, 2**64 - 1)
        check_int(self.vocab_size, "vocab_size", 1, INT32_MAX)
        check_int(self.reserved, "reserved", 0, self.vocab_size - 1, ", since at least one token must be left")

    def tokens(self, request_ids: ArrayLike, positions: ArrayLike) -> jax.Array:
        """The token of each (request, position).

        As a sampler: behind a forward that wrote the last token of each row at ``positions``, the next tokens are those of
        ``positions + 1``.

        Args:
            request_ids: int32 or int64 [n]; any numbers that tell requests apart.
            positions: int32 or int64 [n].

        Returns:
            int32 [n].

        Raises:
            TypeError: another dtype. ValueError: a wrong shape.
        """
        ids = integer_array(request_ids, "request_ids", (None,), "one request for each token")
        at = integer_array(positions, "positions", tuple(ids.shape), "one position for each of the `request_ids`")
        hashes = hashing.mix3(from_int64(to_signed(self.seed)), hashing.words_of(ids), hashing.words_of(at))
        return np.int32(self.reserved) + hashing.scale_below(hashes, self.vocab_size - self.reserved)

    def prompt(self, request_id: int, length: int, *, start: int = 0) -> np.ndarray:
        """The first tokens of a request, computed on the host.

        A prompt behind the shared prefix of another request is the other's ``prompt(other, shared)``, and
        ``prompt(request, length - shared, start=shared)``.

        Args:
            request_id: an int of 64 bits.
            length: how many tokens.
            start: position of the first one.

        Returns:
            NumPy int32 [length].

        Raises:
            TypeError: not an int. ValueError: an int outside its range.
        """
        check_int(request_id, "request_id", -(2**63), 2**63 - 1)
        check_int(length, "length", 0, INT32_MAX)
        check_int(start, "start", 0, INT32_MAX)
        num_tokens = self.vocab_size - self.reserved
        hashes = (reference.mix3(self.seed, request_id, start + i) for i in range(length))
        return np.array([self.reserved + (word * num_tokens >> 64) for word in hashes], np.int32)

    def expected_inputs(
        self,
        batch: ForwardBatch,
        request_ids: ArrayLike,
        *,
        shared_ids: ArrayLike | None = None,
        shared_lens: ArrayLike | None = None,
        kv_token_id_vs_position_offset: int = 0,
    ) -> tuple[jax.Array, jax.Array]:
        """What the token arrays of a batch should hold, from its ``plan_input`` alone.

        A row's positions follow its prefix, and rows are packed in order; padding rows have no tokens. The batch's own ``input_ids``
        and ``positions`` are not read, only counted.

        Args:
            batch: the batch; its rows must be chains.
            request_ids: int32 or int64 [bs]; the request of each row; those of padding rows are not looked at.
            shared_ids: int32 or int64 [bs]; the request that the beginning of each row's prompt is taken from.
            shared_lens: int32 or int64 [bs]; how many tokens that beginning has, 0 for none. A row may write some of them itself,
                where the cache holds fewer.
            kv_token_id_vs_position_offset: the entry of position p holds the token of position p plus this: 1 for the rotated inputs of
                draft models (static).

        Returns:
            Expected tokens, int32 [tokens], and expected positions in the dtype of ``plan_input.prefix_lens``, [tokens]. Both are -1
            behind the live tokens, where nothing is compared.

        Danger:
            Draft tokens are guesses. A batch that verifies them has these inputs only if the draft model takes its tokens from the
            oracle too.

        Raises:
            TypeError: a wrong type or dtype. ValueError: a wrong shape, one of the shared arrays without the other, or a tree.
        """
        check_type(batch, "batch", ForwardBatch)
        if batch.parents is not None:
            raise ValueError(
                "`batch.parents` is an array, but it must be None: the tokens and positions of a tree do not follow from its row."
            )
        offset = check_int(kv_token_id_vs_position_offset, "kv_token_id_vs_position_offset", -INT32_MAX, INT32_MAX)
        # Where a row's tokens are is the plan's to say; no verify entry is asked for.
        offsets = plan(batch.plan_input, batch.req_to_token, verify_capacity=0).write.write_offsets
        bs = offsets.shape[0] - 1
        ids = integer_array(request_ids, "request_ids", (bs,), f"the batch of {bs} rows")
        if (shared_ids is None) != (shared_lens is None):
            missing, given = ("ids", "lens") if shared_ids is None else ("lens", "ids")
            raise ValueError(f"`shared_{missing}` is None, but it must be an array when `shared_{given}` is given.")
        prefix_lens = integer_array(batch.plan_input.prefix_lens, "batch.plan_input.prefix_lens", (bs,), f"the batch of {bs} rows")
        input_ids = integer_array(batch.input_ids, "batch.input_ids", (None,), "one token each")

        with jax.enable_x64(True):
            entries = jnp.arange(input_ids.shape[0], dtype=jnp.int32)
            row = jnp.searchsorted(offsets, entries, side="right").astype(jnp.int32) - 1  # bs behind the last row
            positions = _of_row(prefix_lens, row) + (entries - _of_row(offsets[:-1], row))
            token_positions = positions + offset
            token_ids = _of_row(ids, row)
            if shared_ids is not None:
                owners = integer_array(shared_ids, "shared_ids", (bs,), f"the batch of {bs} rows")
                lens = integer_array(shared_lens, "shared_lens", (bs,), f"the batch of {bs} rows")
                token_ids = jnp.where(token_positions < _of_row(lens, row), _of_row(owners, row), token_ids)
            tokens = self.tokens(token_ids, token_positions)
            live = row < bs
            return jnp.where(live, tokens, -1), jnp.where(live, positions, -1)

    def with_expected_inputs(
        self,
        batch: ForwardBatch,
        request_ids: ArrayLike,
        *,
        shared_ids: ArrayLike | None = None,
        shared_lens: ArrayLike | None = None,
        kv_token_id_vs_position_offset: int = 0,
    ) -> ForwardBatch:
        """The batch with ``expected_input_tokens`` and ``expected_input_positions`` of :meth:`expected_inputs`, which has the arguments.

        For a canary whose configuration has ``enable_write_input_assert`` on.
        """
        tokens, positions = self.expected_inputs(
            batch,
            request_ids,
            shared_ids=shared_ids,
            shared_lens=shared_lens,
            kv_token_id_vs_position_offset=kv_token_id_vs_position_offset,
        )
        return dataclasses.replace(batch, expected_input_tokens=tokens, expected_input_positions=positions)


def _of_row(values: jax.Array, row: jax.Array) -> jax.Array:
    """The value of each entry's row; 0 for entries behind the last one."""
    return jnp.append(values, jnp.zeros((1,), values.dtype)).at[row].get(mode="promise_in_bounds")
