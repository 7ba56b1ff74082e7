"""One verify launch, entry by entry (the contract's section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_kvcanary._checks import ArrayLike, check_array, check_canary_buffer, check_enum, check_flag, check_type
from jax_kvcanary.constants import TOKEN_TO_KV_SLOT_PADDING, CanaryLaunchTag, FailReason, RealKvHashMode
from jax_kvcanary.plan import VerifyPlan
from jax_kvcanary.reference.hashes import real_kv_hash, slot_hash, slot_records, to_signed
from jax_kvcanary.reference.log import Launch
from jax_kvcanary.reference.plan import indices, token_ids
from jax_kvcanary.sources import RealKvSource, check_sources
from jax_kvcanary.state import CanaryDeviceState


def verify_step(
    canary_buf: ArrayLike,
    plan: VerifyPlan,
    device_state: CanaryDeviceState,
    *,
    tag: CanaryLaunchTag,
    real_kv_sources: Sequence[RealKvSource] = (),
    real_kv_hash_mode: RealKvHashMode = RealKvHashMode.NONE,
    check_expected_token: bool = False,
) -> CanaryDeviceState:
    """:func:`jax_kvcanary.verify_step` on the host: the same arguments, NumPy results."""
    num_slots = check_canary_buffer(canary_buf, "canary_buf")
    mode = check_enum(real_kv_hash_mode, "real_kv_hash_mode", RealKvHashMode)
    sources = check_sources(real_kv_sources, mode, num_slots)
    entries = _check_plan(plan)
    check_flag(check_expected_token, "check_expected_token")
    launch = Launch(device_state, tag)
    if np.asarray(plan.enable)[0] == 0:
        launch.count_skip()
        return launch.finish()

    records = slot_records(canary_buf)
    num_entries = max(0, min(int(np.asarray(plan.verify_num_valid)[0]), len(entries)))
    launch.count_slots(num_entries)
    for slot, expected_token, expected_position, prev_slot in entries[:num_entries].tolist():
        if not check_expected_token:
            expected_token = -1
        if slot == TOKEN_TO_KV_SLOT_PADDING:
            continue

        slot_is_bad = not 0 <= slot < num_slots
        if slot_is_bad or prev_slot >= num_slots:
            launch.record(
                FailReason.SLOT_OUT_OF_RANGE,
                slot=slot if slot_is_bad else prev_slot,
                position=expected_position,
                stored_token=-1,
                expected_token=expected_token,
                stored_chain_hash=0,
                expected_aux=num_slots,
            )
            continue

        token, position, prev_hash, stored_kv_hash = records[slot].tolist()
        # A predecessor in the padding slot was evicted from the window, or never filled: there is no chain to check.
        reachable = prev_slot != TOKEN_TO_KV_SLOT_PADDING
        expected_hash = to_signed(slot_hash(canary_buf, prev_slot)) if reachable else prev_hash
        reasons = FailReason(0)
        if prev_hash != expected_hash:
            reasons |= FailReason.VERIFY_CHAIN_HASH_MISMATCH
        if expected_token != -1 and token != expected_token:
            reasons |= FailReason.VERIFY_TOKEN_MISMATCH
        if position != expected_position:
            reasons |= FailReason.VERIFY_POSITION_MISMATCH
        # Where nothing is hashed a written record holds 0, and a fresh one does not.
        if stored_kv_hash != to_signed(real_kv_hash(sources, slot, mode)):
            reasons |= FailReason.VERIFY_REAL_KV_HASH_MISMATCH
        if reasons:
            launch.record(
                reasons,
                slot=slot,
                position=position,
                stored_token=token,
                expected_token=expected_token,
                stored_chain_hash=prev_hash,
                expected_aux=expected_hash,
            )
    return launch.finish()


def _check_plan(plan: Any) -> np.ndarray:
    """The entries of a plan, int64 [verify_capacity, 4]: slot, expected token, expected position, previous slot."""
    check_type(plan, "plan", VerifyPlan, ", such as the `verify` of a Plan")
    check_array(plan.verify_slot_indices, "plan.verify_slot_indices")
    capacity = plan.verify_slot_indices.shape[0] if plan.verify_slot_indices.shape else None
    meaning = f"a verify plan of {capacity} entries"
    for name in ("verify_num_valid", "enable"):
        check_array(getattr(plan, name), f"plan.{name}")
        indices(getattr(plan, name), f"plan.{name}", (1,), meaning)
    columns = []
    for name, narrow in (
        ("verify_slot_indices", indices),
        ("verify_expected_tokens", token_ids),
        ("verify_expected_positions", indices),
        ("verify_prev_slot_indices", indices),
    ):
        check_array(getattr(plan, name), f"plan.{name}")
        columns.append(narrow(getattr(plan, name), f"plan.{name}", (capacity,), meaning))
    return np.stack(columns, axis=1)
