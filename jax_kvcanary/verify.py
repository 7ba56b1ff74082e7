"""Verify: compare the slots of a plan with their records."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp

from jax_kvcanary import _launch
from jax_kvcanary._checks import ArrayLike, check_array, check_enum, check_flag, check_type, index_array, token_array
from jax_kvcanary._ffi import VERIFY_TARGET
from jax_kvcanary._launch import BatchRows, Endpoint
from jax_kvcanary.constants import INT32_MAX, CanaryLaunchTag, RealKvHashMode
from jax_kvcanary.plan import VerifyPlan
from jax_kvcanary.sources import RealKvSource
from jax_kvcanary.state import CanaryDeviceState, check_device_state


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
    """Verify the entries of a plan against one canary buffer (the contract's section 4).

    Args:
        canary_buf: uint8 [num_slots, 32]; never changed.
        plan: the ``verify`` of a :class:`~jax_kvcanary.Plan`, or one built by hand; int64 arrays are narrowed as those of a plan.
        device_state: log and counters; updated in place under donation.
        tag: which launch this is (static).
        real_kv_sources: up to four arrays whose bytes the records fingerprint.
        real_kv_hash_mode: how many of their bytes (static).
        check_expected_token: compare tokens with the plan's expected ones (static).

    Returns:
        The state with every finding recorded.

    Raises:
        TypeError: a wrong type or dtype. ValueError: a wrong shape, tag, mode or source geometry.
    """
    state, _ = verify_launch(
        [Endpoint(canary_buf, tag, real_kv_sources)],
        plan,
        device_state,
        mode=real_kv_hash_mode,
        check_expected_token=check_expected_token,
    )
    return state


def verify_launch(
    endpoints: Sequence[Endpoint],
    plan: VerifyPlan,
    device_state: CanaryDeviceState,
    *,
    mode: RealKvHashMode,
    check_expected_token: bool,
    rows: BatchRows | None = None,
) -> tuple[CanaryDeviceState, BatchRows | None]:
    """Verify one plan against several canary buffers in one custom call.

    Findings are attributed to ``rows`` where the plan says which entries belong to which.
    """
    mode = check_enum(mode, "real_kv_hash_mode", RealKvHashMode)
    check_flag(check_expected_token, "check_expected_token")
    out = _launch.call(
        VERIFY_TARGET,
        verify_operands(plan, rows),
        [endpoint.checked(mode) for endpoint in endpoints],
        mode,
        check_device_state(device_state),
        rows,
        check_expected_token=check_expected_token,
    )
    return out.state, out.rows


def verify_operands(plan: VerifyPlan, rows: BatchRows | None) -> list[ArrayLike]:
    """The checked arrays of a verify plan, and where the entries of each row begin: past all entries where that is not known."""
    bs = 1 if rows is None else rows.requests.shape[0]
    if rows is None or plan.row_offsets is None:
        offsets = jnp.full((bs + 1,), INT32_MAX, jnp.int32)
    else:
        offsets = index_array(plan.row_offsets, "plan.row_offsets", (bs + 1,), f"a batch of {bs} rows")
    return [*_plan_operands(plan), offsets]


def _plan_operands(plan: VerifyPlan) -> list[ArrayLike]:
    check_type(plan, "plan", VerifyPlan, ", such as the `verify` of a Plan")
    check_array(plan.verify_slot_indices, "plan.verify_slot_indices")
    capacity = plan.verify_slot_indices.shape[0] if plan.verify_slot_indices.shape else None
    operands = []
    for name, shape, narrow in (
        ("verify_slot_indices", (capacity,), index_array),
        ("verify_expected_tokens", (capacity,), token_array),
        ("verify_expected_positions", (capacity,), index_array),
        ("verify_prev_slot_indices", (capacity,), index_array),
        ("verify_num_valid", (1,), index_array),
        ("enable", (1,), index_array),
    ):
        value = getattr(plan, name)
        check_array(value, f"plan.{name}")
        operands.append(narrow(value, f"plan.{name}", shape, f"a verify plan of {capacity} entries"))
    return operands
