"""The canary in an inference loop: launches before and after the forward, bound to the live pool."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_kvcanary._checks import ArrayLike, check_enum, check_int, check_type, index_array
from jax_kvcanary._ffi import CUDA_MISSING
from jax_kvcanary.batch import ForwardBatch
from jax_kvcanary.buffers import CanaryBufferGroup
from jax_kvcanary.config import CanaryConfig, CanaryLaunchCapacities, CanaryMode
from jax_kvcanary.constants import FRESH_RECORD_BYTE, INT32_MAX, PoolKind, RealKvHashMode
from jax_kvcanary.plan import Plan, VerifyPlan, plan, translate_slots
from jax_kvcanary.pools import attach_canary_buffers
from jax_kvcanary.report import CanaryReport
from jax_kvcanary.state import CanaryDeviceState
from jax_kvcanary.verify import verify_launch
from jax_kvcanary.write import write_launch


@partial(jax.tree_util.register_dataclass, data_fields=("groups", "device_state"), meta_fields=())
@dataclass(frozen=True)
class CanaryState:
    """Everything of a canary that lives on the device. Thread it through the step, donated.

    Fields:
        groups: the canary buffers, one group for each pool or sub-pool.
        device_state: log and counters.
    """

    groups: tuple[CanaryBufferGroup, ...]
    device_state: CanaryDeviceState

    def groups_of(self, kind: PoolKind) -> tuple[CanaryBufferGroup, ...]:
        """The groups of one kind.

        Raises:
            ValueError: there are none.
        """
        chosen = tuple(group for group in self.groups if group.kind is kind)
        if not chosen:
            have = ", ".join(group.kind.name for group in self.groups)
            raise ValueError(f"`kind` is {kind.name}, but this canary has the groups {have}.")
        return chosen


@partial(jax.tree_util.register_dataclass, data_fields=("plans", "out_cache_locs"), meta_fields=())
@dataclass(frozen=True)
class CanaryStep:
    """What ``pre_forward`` hands to ``post_forward``: for each group its plan and the slots it writes, int32 or int64 [tokens]."""

    plans: tuple[Plan, ...]
    out_cache_locs: tuple[ArrayLike, ...]


@dataclass(frozen=True)
class Canary:
    """The static side of a canary: hashable, so that a jitted step may close over it or take it as a static argument.

    Fields:
        config: see :class:`CanaryConfig`.
        capacities: room of the plans, see :class:`CanaryLaunchCapacities`.
        swa_window_size: positions that an SWA group verifies; 0 is all.
    """

    config: CanaryConfig
    capacities: CanaryLaunchCapacities
    swa_window_size: int = 0

    def pre_forward(self, state: CanaryState, batch: ForwardBatch, pool: Any) -> tuple[CanaryState, CanaryStep]:
        """Plan the step, verify the HEAD buffers and write them. Call it before the model's forward.

        Args:
            state: the canary's state.
            batch: the tokens and rows of this forward.
            pool: the pool as it is before the forward; only its SWA table is read.

        Returns:
            The state, and what ``post_forward`` needs.

        Raises:
            TypeError, ValueError: an argument of a wrong type, shape or size, or expected inputs that the configuration does not
                call for, or lacks.
        """
        self._check(state, batch)
        groups, device_state = [], state.device_state
        plans, slots = [], []
        for group in state.groups:
            lut = group.lut(pool)
            plans.append(self._plan(group, batch, device_state, lut))
            slots.append(translate_slots(batch.out_cache_loc, lut))
            group, device_state = self._verify_and_write("head", group, plans[-1], slots[-1], batch, device_state, pool)
            groups.append(group)
        return CanaryState(tuple(groups), device_state), CanaryStep(tuple(plans), tuple(slots))

    def post_forward(self, state: CanaryState, step: CanaryStep, batch: ForwardBatch, pool: Any) -> tuple[CanaryState, CanaryReport]:
        """Verify the TAIL buffers with the real KV and write them. Call it after the model's forward.

        Args:
            state: as ``pre_forward`` returned it.
            step: as ``pre_forward`` returned it.
            batch: the same batch.
            pool: the pool as the forward left it.

        Returns:
            The state, and a report that does not share memory with it.

        Raises:
            TypeError, ValueError: as for :meth:`pre_forward`.
        """
        self._check(state, batch)
        check_type(step, "step", CanaryStep, ", as pre_forward returned it")
        if len(step.plans) != len(state.groups):
            raise ValueError(f"`step` has plans for {len(step.plans)} groups, but `state` has {len(state.groups)} groups.")
        groups, device_state = [], state.device_state
        for group, group_plan, slots in zip(state.groups, step.plans, step.out_cache_locs, strict=True):
            group, device_state = self._verify_and_write("tail", group, group_plan, slots, batch, device_state, pool)
            groups.append(group)
        # All groups plan the same rows, so the first one's count of invalid ones stands for all.
        return CanaryState(tuple(groups), device_state), CanaryReport.of(device_state, step.plans[0].num_invalid_rows)

    def sweep(
        self, state: CanaryState, verify_plan: VerifyPlan, pool: Any, *, kind: PoolKind = PoolKind.FULL
    ) -> tuple[CanaryState, CanaryReport]:
        """Verify slots that no batch refers to, such as those that a prefix cache holds.

        Args:
            state: the canary's state.
            verify_plan: entries in the group's own slots; expected tokens other than -1 are compared.
            pool: the live pool.
            kind: which group.

        Returns:
            The state, and a report as :meth:`post_forward` returns it.

        Raises:
            ValueError: the canary has no such group.
        """
        check_type(state, "state", CanaryState)
        kind = check_enum(kind, "kind", PoolKind)
        device_state = state.device_state
        for group in state.groups_of(kind):
            device_state = verify_launch(
                group.endpoints("sweep", pool),
                verify_plan,
                device_state,
                mode=self.config.real_kv_hash_mode,
                check_expected_token=True,
            )
        return CanaryState(state.groups, device_state), CanaryReport.of(device_state, jnp.zeros((1,), jnp.int32))

    def wrap(self, forward: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[CanaryState, CanaryReport, Any, Any]]:
        """Bracket a forward: ``forward(*args, batch, pool) -> (out, pool)``.

        Returns:
            ``wrapped(state, *args, batch, pool) -> (state, report, out, pool)``, to be jitted with ``state`` and ``pool`` donated.
        """

        def wrapped(state: CanaryState, *args: Any, **kwargs: Any) -> tuple[CanaryState, CanaryReport, Any, Any]:
            if len(args) < 2:
                raise TypeError(
                    "The wrapped forward takes the canary's state first, and `batch` and `pool` as its last two positional arguments."
                )
            batch, pool = args[-2:]
            state, step = self.pre_forward(state, batch, pool)
            out, pool = forward(*args, **kwargs)
            state, report = self.post_forward(state, step, batch, pool)
            return state, report, out, pool

        return wrapped

    def mark_init_finished(self, state: CanaryState) -> CanaryState:
        """Turn the chain-position check on: warm-up, whose positions follow nothing, is over."""
        check_type(state, "state", CanaryState)
        on = jnp.ones_like(state.device_state.enable_chain_position_assert)
        return CanaryState(state.groups, dataclasses.replace(state.device_state, enable_chain_position_assert=on))

    def release(self, state: CanaryState, slots: ArrayLike, pool: Any) -> CanaryState:
        """Write fresh records to slots that were freed, so that a later use by a stale owner is a finding.

        Call it before the pool's SWA table forgets the slots.

        Args:
            state: the canary's state.
            slots: int32 or int64 [n] full-pool slots; negative ones are skipped, so that the array can be padded to a fixed length,
                and so are slot 0 and indices past the pool.
            pool: the live pool; only its SWA table is read.
        """
        check_type(state, "state", CanaryState)
        slots = index_array(slots, "slots", (None,), "full-pool slots to release")
        groups = []
        for group in state.groups:
            own = translate_slots(slots, group.lut(pool))
            fresh = {}
            for name in (f"{half}_{phase}" for half in group.halves for phase in ("head", "tail")):
                buffer = jnp.asarray(getattr(group, name))
                target = jnp.where(own > 0, own, buffer.shape[0])  # past the end: dropped
                fresh[name] = buffer.at[target].set(jnp.uint8(FRESH_RECORD_BYTE), mode="drop")
            groups.append(group.with_buffers(**fresh))
        return CanaryState(tuple(groups), state.device_state)

    def _check(self, state: CanaryState, batch: ForwardBatch) -> None:
        check_type(state, "state", CanaryState)
        check_type(batch, "batch", ForwardBatch)
        for name in ("expected_input_tokens", "expected_input_positions"):
            given = getattr(batch, name) is not None
            if given != self.config.enable_write_input_assert:
                raise ValueError(
                    f"`batch.{name}` is {'an array' if given else 'None'}, but it must be "
                    f"{'None' if given else 'an array'} when `enable_write_input_assert` is {'off' if given else 'on'}."
                )

    def _plan(self, group: CanaryBufferGroup, batch: ForwardBatch, device_state: CanaryDeviceState, lut: ArrayLike | None) -> Plan:
        return plan(
            batch.plan_input,
            batch.req_to_token,
            verify_capacity=self.capacities.verify_capacity,
            write_req_capacity=self.capacities.write_req_capacity,
            swa_window_size=self.swa_window_size if group.kind is PoolKind.SWA else 0,
            full_to_swa_index_mapping=lut,
            expected_tokens=self._expected_tokens(device_state),
            kv_token_id_vs_position_offset=group.kv_token_id_vs_position_offset,
        )

    def _expected_tokens(self, device_state: CanaryDeviceState) -> ArrayLike | None:
        return device_state.req_to_verify_expected_tokens if self.config.enable_verify_token_assert else None

    def _verify_and_write(
        self,
        phase: str,
        group: CanaryBufferGroup,
        group_plan: Plan,
        slots: ArrayLike,
        batch: ForwardBatch,
        device_state: CanaryDeviceState,
        pool: Any,
    ) -> tuple[CanaryBufferGroup, CanaryDeviceState]:
        """One phase of one group: a verify call and a write call, each over K and V."""
        mode = self.config.real_kv_hash_mode if phase == "tail" else RealKvHashMode.NONE
        endpoints = group.endpoints(phase, pool)
        device_state = verify_launch(
            endpoints, group_plan.verify, device_state, mode=mode, check_expected_token=self.config.enable_verify_token_assert
        )
        buffers, device_state = write_launch(
            endpoints,
            group_plan.write,
            batch.input_ids,
            batch.positions,
            slots,
            device_state,
            mode=mode,
            expected_input_tokens=batch.expected_input_tokens,
            expected_input_positions=batch.expected_input_positions,
            parents=batch.parents,
        )
        names = [f"{half}_{phase}" for half in group.halves]
        return group.with_buffers(**dict(zip(names, buffers, strict=True))), device_state


def install_canary(
    pool: Any,
    config: CanaryConfig,
    *,
    capacities: CanaryLaunchCapacities,
    swa_window_size: int = 0,
    kv_token_id_vs_position_offset: int = 0,
    req_to_token_alloc_size: int | None = None,
    max_context_len: int | None = None,
) -> tuple[Canary, CanaryState] | tuple[None, None]:
    """Attach canary buffers to a pool and allocate the state.

    The chain-position check is off until :meth:`Canary.mark_init_finished`, so that warm-up steps stay silent.

    Args:
        pool: an object of a class with an attacher, see :func:`register_pool_attacher`.
        config: settings; mode NONE installs nothing.
        capacities: room of the plans.
        swa_window_size: positions that an SWA group verifies; 0 is all.
        kv_token_id_vs_position_offset: slot of position p holds the token of position p plus this.
        req_to_token_alloc_size: rows of the table of expected tokens; given exactly when ``config.enable_verify_token_assert`` is on.
        max_context_len: positions of that table; likewise.

    Returns:
        The canary and its state, or (None, None) for mode NONE.

    Raises:
        NotImplementedError: no attacher for the pool's class. RuntimeError: the pool is on a GPU and the CUDA module is missing.
        TypeError, ValueError: a wrong argument.
    """
    check_type(config, "config", CanaryConfig)
    check_type(capacities, "capacities", CanaryLaunchCapacities)
    check_int(swa_window_size, "swa_window_size", 0, INT32_MAX)
    if config.mode is CanaryMode.NONE:
        return None, None
    devices = _devices(pool)
    if CUDA_MISSING is not None and any(device.platform in ("gpu", "cuda") for device in devices):
        raise RuntimeError(CUDA_MISSING)
    groups = attach_canary_buffers(pool, config, kv_token_id_vs_position_offset=kv_token_id_vs_position_offset)
    device_state = CanaryDeviceState.allocate(config, req_to_token_alloc_size=req_to_token_alloc_size, max_context_len=max_context_len)
    off = jnp.zeros_like(device_state.enable_chain_position_assert)
    state = CanaryState(groups, dataclasses.replace(device_state, enable_chain_position_assert=off))
    if len(devices) == 1 and devices != _devices(off):
        state = jax.device_put(state, next(iter(devices)))
    return Canary(config, capacities, swa_window_size), state


def _devices(tree: Any) -> set[jax.Device]:
    """The devices of a pytree's concrete arrays."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)]
    return set().union(*(array.devices() for array in arrays))
