"""Write: stamp the records of the slots that a step fills."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from jax_kvcanary import _launch
from jax_kvcanary._checks import ArrayLike, check_array, check_enum, check_type, index_array, integer_array
from jax_kvcanary._ffi import WRITE_TARGET
from jax_kvcanary._launch import BatchRows, Endpoint
from jax_kvcanary.constants import CanaryLaunchTag, RealKvHashMode
from jax_kvcanary.plan import WritePlan
from jax_kvcanary.sources import RealKvSource
from jax_kvcanary.state import CanaryDeviceState, check_device_state

#: uint32 words of what the handlers keep for an entry (``Link``), for a row's seed (``Seed``), for a row's links, and for a launch.
_LINK_WORDS, _SEED_WORDS, _START_WORDS, _LAUNCH_WORDS = 4, 4, 2, 4


def write_step(
    canary_buf: ArrayLike,
    plan: WritePlan,
    input_ids: ArrayLike,
    positions: ArrayLike,
    out_cache_loc: ArrayLike,
    device_state: CanaryDeviceState,
    *,
    tag: CanaryLaunchTag,
    real_kv_sources: Sequence[RealKvSource] = (),
    real_kv_hash_mode: RealKvHashMode = RealKvHashMode.NONE,
    expected_input_tokens: ArrayLike | None = None,
    expected_input_positions: ArrayLike | None = None,
    parents: ArrayLike | None = None,
) -> tuple[jax.Array, CanaryDeviceState]:
    """Write the records of a step's tokens into one canary buffer (the contract's section 5).

    Args:
        canary_buf: uint8 [num_slots, 32]; updated in place under donation.
        plan: the ``write`` of a :class:`~jax_kvcanary.Plan`, or one built by hand; int64 arrays are narrowed as those of a plan.
        input_ids: int32 or int64 [tokens]; live tokens packed in row order at the front.
        positions: int32 or int64 [tokens].
        out_cache_loc: int32 or int64 [tokens]; slots in the group's own numbering; negative ones are skipped.
        device_state: log and counters; updated in place under donation.
        tag: which launch this is (static).
        real_kv_sources: up to four arrays whose bytes go into the records.
        real_kv_hash_mode: how many of their bytes (static).
        expected_input_tokens: int32 or int64 [tokens]; compares ``input_ids``; needs the expected positions too.
        expected_input_positions: int32 or int64 [tokens]; compares ``positions``; needs the expected tokens too.
        parents: int32 or int64 [tokens]; for rows that are trees, the entry of the token arrays that each one follows: one before it
            in its own row, or a negative one for the row's seed. Chain and position check follow the parent; where that entry was
            skipped, its own parent. Any other entry is recorded as SLOT_OUT_OF_RANGE, with the parent as slot and the entry's own
            index as ``expected_aux``, and the token follows the seed. None: every token follows the one before it.

    Returns:
        The canary buffer and the state with every finding recorded.

    Raises:
        TypeError: a wrong type or dtype. ValueError: a wrong shape, tag, mode or source geometry, or one expected array without
            the other.
    """
    buffers, state, _ = write_launch(
        [Endpoint(canary_buf, tag, real_kv_sources)],
        plan,
        input_ids,
        positions,
        out_cache_loc,
        device_state,
        mode=real_kv_hash_mode,
        expected_input_tokens=expected_input_tokens,
        expected_input_positions=expected_input_positions,
        parents=parents,
    )
    return buffers[0], state


def write_launch(
    endpoints: Sequence[Endpoint],
    plan: WritePlan,
    input_ids: ArrayLike,
    positions: ArrayLike,
    out_cache_loc: ArrayLike,
    device_state: CanaryDeviceState,
    *,
    mode: RealKvHashMode,
    expected_input_tokens: ArrayLike | None = None,
    expected_input_positions: ArrayLike | None = None,
    parents: ArrayLike | None = None,
    rows: BatchRows | None = None,
) -> tuple[list[jax.Array], CanaryDeviceState, BatchRows | None]:
    """Write one step's records into several canary buffers, of as many slots each; findings are attributed to ``rows``."""
    mode = check_enum(mode, "real_kv_hash_mode", RealKvHashMode)
    operands = WriteOperands.of(
        plan,
        input_ids,
        positions,
        out_cache_loc,
        expected_input_tokens=expected_input_tokens,
        expected_input_positions=expected_input_positions,
        parents=parents,
    )
    state = check_device_state(device_state)
    out = _launch.call(
        WRITE_TARGET,
        [*operands.arrays, state.enable_chain_position_assert],
        [endpoint.checked(mode) for endpoint in endpoints],
        mode,
        state,
        rows,
        own_words=[operands.scratch_words(len(endpoints)) + operands.link_words],
        writes=True,
        check_input=operands.check_input,
        tree=operands.tree,
    )
    return out.buffers, out.state, out.rows


@dataclass(frozen=True)
class WriteOperands:
    """What a launch that writes takes of its plan and of the step's tokens.

    Fields:
        arrays: the plan's three arrays, and six over the tokens: those given, and in the place of others some that are not read.
        rows: row capacity of the plan.
        tokens: length of the token arrays.
        check_input: whether expected tokens and positions were given.
        tree: whether parents were given.
    """

    arrays: list[ArrayLike]
    rows: int
    tokens: int
    check_input: bool
    tree: bool

    @classmethod
    def of(
        cls,
        plan: WritePlan,
        input_ids: ArrayLike,
        positions: ArrayLike,
        out_cache_loc: ArrayLike,
        *,
        expected_input_tokens: ArrayLike | None,
        expected_input_positions: ArrayLike | None,
        parents: ArrayLike | None,
    ) -> WriteOperands:
        """Check the arrays of a write; arguments and errors are those of :func:`write_step`."""
        plan_operands = _plan_operands(plan)
        ids = integer_array(input_ids, "input_ids", (None,), "one token each")
        of_tokens = (ids.shape[0],)
        meaning = f"one value for each of the {ids.shape[0]} tokens of `input_ids`"
        tokens = [
            ids,
            integer_array(positions, "positions", of_tokens, meaning),
            integer_array(out_cache_loc, "out_cache_loc", of_tokens, meaning),
        ]
        check_input = expected_input_tokens is not None
        if check_input != (expected_input_positions is not None):
            missing, given = ("positions", "tokens") if check_input else ("tokens", "positions")
            raise ValueError(f"`expected_input_{missing}` is None, but it must be an array when `expected_input_{given}` is given.")
        if check_input:
            expected = [
                integer_array(expected_input_tokens, "expected_input_tokens", of_tokens, meaning),
                integer_array(expected_input_positions, "expected_input_positions", of_tokens, meaning),
            ]
        else:
            expected = tokens[:2]  # operands that the handler does not read
        tree = parents is not None
        parents = integer_array(parents, "parents", of_tokens, meaning) if tree else tokens[2]  # likewise
        return cls([*plan_operands, *tokens, *expected, parents], plan_operands[1].shape[0], ids.shape[0], check_input, tree)

    @property
    def link_words(self) -> int:
        """uint32 words of the links: what each entry follows, and the hash that each row's links start from."""
        return self.tokens * _LINK_WORDS + self.rows * _START_WORDS

    def scratch_words(self, endpoints: int) -> int:
        """uint32 words of scratch memory beside the links."""
        ends = endpoints * self.tokens * _LINK_WORDS if self.tree else 0
        return endpoints * self.rows * _SEED_WORDS + ends + _LAUNCH_WORDS


def _plan_operands(plan: WritePlan) -> list[ArrayLike]:
    check_type(plan, "plan", WritePlan, ", such as the `write` of a Plan")
    check_array(plan.write_seed_slot_indices, "plan.write_seed_slot_indices")
    rows = plan.write_seed_slot_indices.shape[0] if plan.write_seed_slot_indices.shape else 0
    operands = []
    for name, length in (("write_offsets", rows + 1), ("write_seed_slot_indices", rows), ("write_num_valid_reqs", 1)):
        value = getattr(plan, name)
        check_array(value, f"plan.{name}")
        operands.append(index_array(value, f"plan.{name}", (length,), f"a write plan of {rows} rows"))
    return operands
