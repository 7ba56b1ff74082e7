"""One write launch, row by row (the contract's section 5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_kvcanary._checks import ArrayLike, check_array, check_canary_buffer, check_enum, check_type
from jax_kvcanary.constants import CanaryLaunchTag, FailReason, RealKvHashMode
from jax_kvcanary.plan import WritePlan
from jax_kvcanary.reference.hashes import ANCHOR_HASH, POSITION, mix3, real_kv_hash, slot_hash, slot_records, to_signed
from jax_kvcanary.reference.log import Launch
from jax_kvcanary.reference.plan import indices, integers
from jax_kvcanary.sources import RealKvSource, check_sources
from jax_kvcanary.state import CanaryDeviceState


class Entry(NamedTuple):
    """One token to write; the expected values are the actual ones where nobody knows better."""

    slot: int
    token: int
    position: int
    expected_token: int
    expected_position: int


class Link(NamedTuple):
    """The end of a chain: what the entry behind it stores as its predecessor's hash, and the position that it should follow."""

    running_hash: int
    position: int


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
) -> tuple[np.ndarray, CanaryDeviceState]:
    """:func:`jax_kvcanary.write_step` on the host: the same arguments, NumPy results; the buffer given stays as it is."""
    num_slots = check_canary_buffer(canary_buf, "canary_buf")
    mode = check_enum(real_kv_hash_mode, "real_kv_hash_mode", RealKvHashMode)
    sources = check_sources(real_kv_sources, mode, num_slots)
    offsets, seeds, num_rows = _check_plan(plan)
    entries = _check_entries(input_ids, positions, out_cache_loc, expected_input_tokens, expected_input_positions)
    parent_of = None if parents is None else integers(parents, "parents", (len(entries),), _one_for_each(len(entries))).tolist()
    launch = Launch(device_state, tag)
    check_positions = int(np.asarray(device_state.enable_chain_position_assert)[0]) != 0
    result = np.array(canary_buf)

    def store(entry: Entry, running_hash: int) -> None:
        kv_hash = real_kv_hash(sources, entry.slot, mode)
        slot_records(result)[entry.slot] = [to_signed(word) for word in (entry.token, entry.position, running_hash, kv_hash)]

    num_stored = 0
    for r in range(num_rows):
        start, end = _clip_row(offsets[r], offsets[r + 1], len(entries), launch)
        if start >= end:
            continue
        seed, first = seeds[r], entries[start]
        # Seeds come from the buffer as it was before the launch, which may overwrite them.
        has_seed = 0 < seed < num_slots
        before = Link(slot_hash(canary_buf, seed), int(slot_records(canary_buf)[seed, POSITION])) if has_seed else Link(ANCHOR_HASH, 0)
        if seed >= num_slots:
            launch.record(
                FailReason.SLOT_OUT_OF_RANGE,
                slot=seed,
                position=first.position,
                stored_token=first.token,
                expected_token=-1,
                stored_chain_hash=ANCHOR_HASH,
                expected_aux=num_slots,
            )
        num_stored += _write_row(entries, range(start, end), parent_of, before, has_seed and check_positions, num_slots, launch, store)
    launch.count_slots(num_stored)
    return result, launch.finish()


def _clip_row(start: int, end: int, num_tokens: int, launch: Launch) -> tuple[int, int]:
    """The part of a row that lies inside the token arrays; what lies outside is recorded once."""
    if start >= end or (start >= 0 and end <= num_tokens):
        return start, end
    launch.record(
        FailReason.SLOT_OUT_OF_RANGE,
        slot=-1,
        position=-1,
        stored_token=-1,
        expected_token=-1,
        stored_chain_hash=0,
        expected_aux=num_tokens,
    )
    return max(start, 0), min(end, num_tokens)


def _write_row(
    entries: Sequence[Entry],
    row: range,
    parent_of: Sequence[int] | None,
    seed: Link,
    check_positions: bool,
    num_slots: int,
    launch: Launch,
    store: Callable[[Entry, int], None],
) -> int:
    """Write the chain, or the tree, of one row and return how many records were stored.

    Args:
        entries: those of the whole step.
        row: which of them belong to the row.
        parent_of: for each entry of the step the one that it follows, negative for the seed; None for a chain.
        seed: what the row goes on from.
        check_positions: whether positions must follow, the seed's first.
        num_slots: records of the buffer.
        launch: where findings go.
        store: writes the record of an entry, given the chain's hash before it.
    """
    num_stored = 0
    ends: dict[int, Link] = {}  # the chain behind each entry so far
    for i in row:
        entry = entries[i]
        parent = parent_of[i] if parent_of is not None else i - 1 if i > row.start else -1
        sound = parent < 0 or parent in ends
        before = ends.get(parent, seed)
        ends[i] = before
        if entry.slot < 0:
            continue
        if not sound:
            launch.record(
                FailReason.SLOT_OUT_OF_RANGE,
                slot=parent,
                position=entry.position,
                stored_token=entry.token,
                expected_token=-1,
                stored_chain_hash=before.running_hash,
                expected_aux=i,
            )
        _check_entry(entry, before, check_positions and sound, num_slots, launch)
        if entry.slot < num_slots:
            store(entry, before.running_hash)
            num_stored += 1
        # What was written goes on, not what was expected, so that one bad input is one finding.
        ends[i] = Link(mix3(before.running_hash, entry.token, entry.position), entry.position)
    return num_stored


def _check_entry(entry: Entry, before: Link, check_position: bool, num_slots: int, launch: Launch) -> None:
    """Record what is wrong with an entry that is not skipped, given the chain that it follows."""
    slot, token, position, expected_token, expected_position = entry
    if slot >= num_slots:
        launch.record(
            FailReason.SLOT_OUT_OF_RANGE,
            slot=slot,
            position=position,
            stored_token=token,
            expected_token=-1,
            stored_chain_hash=before.running_hash,
            expected_aux=num_slots,
        )
        return
    reasons = FailReason(0)
    if token != expected_token:
        reasons |= FailReason.WRITE_TOKEN_MISMATCH
    if position != expected_position:
        reasons |= FailReason.WRITE_POSITION_MISMATCH
    if reasons:
        launch.record(
            reasons,
            slot=slot,
            position=position,
            stored_token=token,
            expected_token=expected_token,
            stored_chain_hash=before.running_hash,
            expected_aux=expected_position,
        )
    if check_position and position != to_signed(before.position + 1):
        launch.record(
            FailReason.WRITE_POSITION_MISMATCH,
            slot=slot,
            position=position,
            stored_token=token,
            expected_token=token,
            stored_chain_hash=before.running_hash,
            expected_aux=before.position + 1,
        )


def _check_plan(plan: Any) -> tuple[list[int], list[int], int]:
    """Offsets, seeds, and the number of rows in use."""
    check_type(plan, "plan", WritePlan, ", such as the `write` of a Plan")
    check_array(plan.write_seed_slot_indices, "plan.write_seed_slot_indices")
    rows = plan.write_seed_slot_indices.shape[0] if plan.write_seed_slot_indices.shape else 0
    fields = []
    for name, length in (("write_offsets", rows + 1), ("write_seed_slot_indices", rows), ("write_num_valid_reqs", 1)):
        check_array(getattr(plan, name), f"plan.{name}")
        fields.append(indices(getattr(plan, name), f"plan.{name}", (length,), f"a write plan of {rows} rows").tolist())
    offsets, seeds, num_valid = fields
    return offsets, seeds, max(0, min(num_valid[0], rows))


def _check_entries(
    input_ids: ArrayLike,
    positions: ArrayLike,
    out_cache_loc: ArrayLike,
    expected_input_tokens: ArrayLike | None,
    expected_input_positions: ArrayLike | None,
) -> list[Entry]:
    """The token arrays of a step, one entry after the other, at full width."""
    token_ids = integers(input_ids, "input_ids", (None,), "one token each")
    shape, step = token_ids.shape, _one_for_each(len(token_ids))
    token_positions = integers(positions, "positions", shape, step)
    slots = integers(out_cache_loc, "out_cache_loc", shape, step)
    if (expected_input_tokens is None) != (expected_input_positions is None):
        missing, given = ("tokens", "positions") if expected_input_tokens is None else ("positions", "tokens")
        raise ValueError(f"`expected_input_{missing}` is None, but it must be an array when `expected_input_{given}` is given.")
    expected_tokens, expected_positions = token_ids, token_positions
    if expected_input_tokens is not None:
        expected_tokens = integers(expected_input_tokens, "expected_input_tokens", shape, step)
        expected_positions = integers(expected_input_positions, "expected_input_positions", shape, step)
    columns = (slots, token_ids, token_positions, expected_tokens, expected_positions)
    return [Entry(*row) for row in np.stack(columns, axis=1).tolist()]


def _one_for_each(num_tokens: int) -> str:
    return f"one value for each of the {num_tokens} tokens of `input_ids`"
