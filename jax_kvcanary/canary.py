"""The canary in an inference loop: launches before and after the forward, bound to the live pool."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jax_kvcanary._checks import ArrayLike, check_enum, check_int, check_type, index_array
from jax_kvcanary._launch import BatchRows
from jax_kvcanary.batch import ForwardBatch
from jax_kvcanary.buffers import CanaryBufferGroup, CanaryState
from jax_kvcanary.config import CanaryConfig, CanaryLaunchCapacities
from jax_kvcanary.constants import INT64_MAX, PoolKind, RealKvHashMode
from jax_kvcanary.dump import write_dump
from jax_kvcanary.expected_tokens import append_expected_tokens, set_expected_tokens
from jax_kvcanary.phase import PhaseResults, phase_launch
from jax_kvcanary.plan import Plan, VerifyPlan, plan, translate_slots
from jax_kvcanary.records import release_records
from jax_kvcanary.report import CanaryReport
from jax_kvcanary.sources import PoolPath, resolve_path
from jax_kvcanary.state import CanaryDeviceState, zero_behind_launches
from jax_kvcanary.swa_statistics import SwaDivergence, add_divergences, swa_divergence
from jax_kvcanary.verify import verify_launch
from jax_kvcanary.violations import Violation


@partial(jax.tree_util.register_dataclass, data_fields=("plans", "out_cache_locs", "row_flags", "links"), meta_fields=())
@dataclass(frozen=True)
class CanaryStep:
    """What ``pre_forward`` hands to ``post_forward``.

    Fields:
        plans: of each group.
        out_cache_locs: for each group the slots that it writes, int32 or int64 [tokens].
        row_flags: int32 [bs]; what was found so far for each row of the batch; None is nothing.
        links: for each group what each token follows, uint32, so that the chains are not walked twice; None walks them again.
    """

    plans: tuple[Plan, ...]
    out_cache_locs: tuple[ArrayLike, ...]
    row_flags: ArrayLike | None = None
    links: tuple[ArrayLike, ...] | None = None


@dataclass(frozen=True)
class Canary:
    """The static side of a canary: hashable, so that a jitted step may close over it or take it as a static argument.

    Fields:
        config: see :class:`CanaryConfig`.
        capacities: room of the plans, see :class:`CanaryLaunchCapacities`.
        swa_window_size: positions that an SWA group verifies; 0 is all.
        swa_tables: paths in the pool to the tables from full-pool slots to those of the SWA groups.
    """

    config: CanaryConfig
    capacities: CanaryLaunchCapacities
    swa_window_size: int = 0
    swa_tables: tuple[PoolPath, ...] = ()

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
        requests, rows = self._requests(batch), None
        plans, slots, links = [], [], []
        for group in state.groups:
            lut = group.lut(pool)
            group_plan = self._plan(group, batch, device_state, lut, self._verify_phase(group, state))
            if rows is None and group_plan.row_flags is not None:
                rows = BatchRows(requests, group_plan.row_flags)
            plans.append(dataclasses.replace(group_plan, row_flags=None))
            slots.append(translate_slots(batch.out_cache_loc, lut))
            group, out = self._phase("head", group, plans[-1], slots[-1], batch, device_state, rows, pool)
            device_state, rows = out.state, out.rows
            groups.append(group)
            links.append(out.links)
        flags = None if rows is None else rows.flags
        return CanaryState(tuple(groups), device_state), CanaryStep(tuple(plans), tuple(slots), flags, tuple(links))

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
        if step.links is not None and len(step.links) != len(state.groups):
            raise ValueError(f"`step` has links for {len(step.links)} groups, but `state` has {len(state.groups)} groups.")
        groups, device_state, report = [], state.device_state, None
        requests, rows = self._requests(batch), None
        if requests.shape[0]:
            rows = BatchRows(requests, jnp.zeros_like(requests) if step.row_flags is None else step.row_flags)
        for i, (group, group_plan, slots) in enumerate(zip(state.groups, step.plans, step.out_cache_locs, strict=True)):
            # All groups plan the same rows, so any one's count of invalid ones stands for all.
            links = step.links[i] if step.links is not None and group.is_uniform else None
            last = i == len(state.groups) - 1
            group, out = self._phase("tail", group, group_plan, slots, batch, device_state, rows, pool, links=links, reports=last)
            device_state, rows, report = out.state, out.rows, out.report
            groups.append(group)
        if report is None:  # a canary without groups
            report = CanaryReport.of(device_state, jnp.zeros((1,), jnp.int32))
        return CanaryState(tuple(groups), device_state), report

    def sweep(
        self, state: CanaryState, verify_plan: VerifyPlan, pool: Any, *, kind: PoolKind = PoolKind.FULL
    ) -> tuple[CanaryState, CanaryReport]:
        """Verify slots that no batch refers to, such as those that a prefix cache holds.

        Args:
            state: the canary's state.
            verify_plan: entries in the group's own slots, as :func:`sweep_plan` lists them; expected tokens other than -1 are compared.
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
            device_state, _ = verify_launch(
                group.endpoints("sweep", pool),
                verify_plan,
                device_state,
                mode=self.config.real_kv_hash_mode,
                check_expected_token=True,
            )
        return CanaryState(state.groups, device_state), CanaryReport.of(device_state, jnp.zeros((1,), jnp.int32))

    def sweep_due(self, step: int) -> bool:
        """Whether a sweep follows this step, so that there is one every ``config.sweep_interval`` steps, and none where that is 0.

        Args:
            step: steps so far, this one included.
        """
        return _is_due(step, self.config.sweep_interval)

    def in_order(self, state: CanaryState, batch: ForwardBatch) -> ForwardBatch:
        """The batch for a further forward on the same pool in one jitted program; :meth:`wrap` takes care of it by itself.

        The launches behind a forward read the pool where it lies. The next forward changes it there, and does not depend on them: without
        an order between the two, XLA copies the pool. Here, ``out_cache_loc`` gets that order; no value changes.

        Args:
            state: as the ``post_forward`` before returned it, if need be with its expected tokens set since.
            batch: the batch of the next forward, for it and for both halves of the canary.

        Returns:
            The batch; the same one where no forward came before it in this program.
        """
        check_type(state, "state", CanaryState)
        check_type(batch, "batch", ForwardBatch)
        slots = batch.out_cache_loc
        # Outside of a program every operation waits for those before it; a wide constant would not keep its type.
        traced = isinstance(slots, jax.core.Tracer) and slots.dtype in (jnp.int32, jnp.int64)
        if not traced or not state.device_state.violation_log.launched:
            return batch
        with jax.enable_x64(True):
            slots = slots + zero_behind_launches(state.device_state).astype(slots.dtype)
        return dataclasses.replace(batch, out_cache_loc=slots)

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
            *others, batch, pool = args
            batch = self.in_order(state, batch)
            state, step = self.pre_forward(state, batch, pool)
            out, pool = forward(*others, batch, pool, **kwargs)
            state, report = self.post_forward(state, step, batch, pool)
            return state, report, out, pool

        return wrapped

    def mark_init_finished(self, state: CanaryState) -> CanaryState:
        """Turn the chain-position check on: warm-up, whose positions follow nothing, is over."""
        check_type(state, "state", CanaryState)
        on = jnp.ones_like(state.device_state.enable_chain_position_assert)
        return CanaryState(state.groups, dataclasses.replace(state.device_state, enable_chain_position_assert=on))

    def reset_log(self, state: CanaryState) -> CanaryState:
        """Empty the violation log, so that its ring has room again. Counters go on; a monitor notices and goes on as well."""
        check_type(state, "state", CanaryState)
        log = state.device_state.violation_log.reset()
        return CanaryState(state.groups, dataclasses.replace(state.device_state, violation_log=log))

    def release(self, state: CanaryState, slots: ArrayLike, pool: Any, *, kinds: tuple[PoolKind, ...] | None = None) -> CanaryState:
        """Write fresh records to slots that were freed, so that the next use by a stale owner is a finding of that step.

        Call it between the step that used them last and the one that may write them again, and before the pool's SWA table forgets
        them: a slot that the table maps to 0 is absent, and then only its full-pool record is wiped.

        Args:
            state: the canary's state; updated in place under donation.
            slots: int32 or int64 [n] full-pool slots, an SWA group's translated through its table. Negative ones and slot 0 are skipped,
                so that the array can be padded to a fixed length. An index past the pool or the table is a finding,
                SLOT_OUT_OF_RANGE under HEAD_K of the group, and the next report has it.
            pool: the live pool; only its SWA table is read.
            kinds: groups to release in (static); None is all. (PoolKind.SWA,) is for slots that a window has left and whose full-pool KV
                lives on.

        Raises:
            TypeError: an argument of another type or dtype. ValueError: another rank, or a group that the canary does not have.
        """
        return release_records(state, slots, pool, kinds=kinds)

    def set_expected_tokens(
        self,
        state: CanaryState,
        req_pool_indices: ArrayLike,
        tokens: ArrayLike,
        lengths: ArrayLike,
        *,
        start_positions: ArrayLike | None = None,
    ) -> CanaryState:
        """Store the tokens that some requests' slots should hold, see :func:`set_expected_tokens`; arguments and errors are its own."""
        check_type(state, "state", CanaryState)
        device_state = set_expected_tokens(state.device_state, req_pool_indices, tokens, lengths, start_positions=start_positions)
        return CanaryState(state.groups, device_state)

    def append_expected_tokens(
        self, state: CanaryState, req_pool_indices: ArrayLike, positions: ArrayLike, tokens: ArrayLike
    ) -> CanaryState:
        """Store one expected token a row, on the device, see :func:`append_expected_tokens`; arguments and errors are its own."""
        check_type(state, "state", CanaryState)
        return CanaryState(state.groups, append_expected_tokens(state.device_state, req_pool_indices, positions, tokens))

    def swa_divergence(self, batch: ForwardBatch, pool: Any) -> SwaDivergence:
        """How the slots of the SWA groups differ from those of the full pool; for :meth:`CanaryMonitor.log_swa_divergence`.

        A function of its own, which loops that do not call it do not pay for. Several groups with a table are added up.

        Args:
            batch: the batch of a forward; its ``req_to_token`` has the slots of the tokens being written, too.
            pool: the pool before or after that forward; only its SWA tables are read.

        Raises:
            ValueError: no SWA group has a table. TypeError, ValueError: an argument of a wrong type, dtype or shape.
        """
        if not self.swa_tables:
            raise ValueError("`pool` has no sliding-window group with a table from full-pool slots, so there is no divergence to count.")
        tables = (resolve_path(pool, path) for path in self.swa_tables)
        return reduce(add_divergences, [swa_divergence(batch, table, swa_window_size=self.swa_window_size) for table in tables])

    def stats_due(self, step: int) -> bool:
        """Whether ``config.stats_every_n_steps`` asks for statistics at this step of the loop's own count."""
        return _is_due(step, self.config.stats_every_n_steps)

    def dump(
        self,
        state: CanaryState,
        path: str | os.PathLike[str],
        *,
        req_to_token: ArrayLike | None = None,
        req_lens: ArrayLike | None = None,
        pool: Any = None,
        violations: Sequence[Violation] = (),
    ) -> Path:
        """Write the state to one file, to look at an incident later: see :func:`load_dump` and ``python -m jax_kvcanary report``.

        Waits for the device and copies all records to the host, 64 bytes a slot for K and as many for V. The state is unchanged.

        Args:
            state: the canary's state, as the last step returned it.
            path: the file; one that is there is replaced once the new one is complete.
            req_to_token: int32 or int64 [max_reqs, max_seq_len]; the engine's table, so that slots can be told by request.
            req_lens: int32 or int64 [max_reqs]; tokens of each row of the table that are in the cache, 0 for rows that are not live.
                Given exactly when ``req_to_token`` is. The values of neither are checked.
            pool: the live pool; only its SWA table is read. Without it, slots of an SWA group cannot be told by request.
            violations: what the monitor handled (``monitor.violations``): gives the rows of the log their steps.

        Returns:
            The path.

        Raises:
            TypeError, ValueError: an argument of a wrong type or shape, or a state that is traced or was donated.
            OSError: the file cannot be written.
        """
        check_type(state, "state", CanaryState)
        return write_dump(path, self, state, req_to_token=req_to_token, req_lens=req_lens, pool=pool, violations=violations)

    def _check(self, state: CanaryState, batch: ForwardBatch) -> None:
        check_type(state, "state", CanaryState)
        check_type(batch, "batch", ForwardBatch)
        if self.config.enable_verify_token_assert:
            for name, value in (
                ("state.device_state.req_to_verify_expected_tokens", state.device_state.req_to_verify_expected_tokens),
                ("batch.plan_input.expected_tokens_valid_lens", batch.plan_input.expected_tokens_valid_lens),
            ):
                if value is None:
                    raise ValueError(f"`{name}` is None, but it must be an array when `enable_verify_token_assert` is on.")
        for name in ("expected_input_tokens", "expected_input_positions"):
            given = getattr(batch, name) is not None
            if given != self.config.enable_write_input_assert:
                raise ValueError(
                    f"`batch.{name}` is {'an array' if given else 'None'}, but it must be "
                    f"{'None' if given else 'an array'} when `enable_write_input_assert` is {'off' if given else 'on'}."
                )

    def _requests(self, batch: ForwardBatch) -> jax.Array:
        """The request row of each row of the batch, int32 [bs]."""
        return index_array(
            batch.plan_input.req_pool_indices, "batch.plan_input.req_pool_indices", (None,), "one request row for each row of the batch"
        )

    def _verify_phase(self, group: CanaryBufferGroup, state: CanaryState) -> jax.Array | None:
        """The steps of the group before this one, int32 [1], by which a strided verify goes on to other positions; None without a stride.

        Its head counts twice a step under one tag, to verify and to write, and so does that of each other group of its kind.
        """
        if self.config.verify_stride == 1:
            return None
        launches = jnp.asarray(state.device_state.kernel_run_counters)[group.launch_tag("head", "k"), :1]
        return (launches // (2 * len(state.groups_of(group.kind)))).astype(jnp.int32)

    def _plan(
        self,
        group: CanaryBufferGroup,
        batch: ForwardBatch,
        device_state: CanaryDeviceState,
        lut: ArrayLike | None,
        verify_phase: jax.Array | None,
    ) -> Plan:
        return plan(
            batch.plan_input,
            batch.req_to_token,
            verify_capacity=self.capacities.verify_capacity,
            write_req_capacity=self.capacities.write_req_capacity,
            swa_window_size=self.swa_window_size if group.kind is PoolKind.SWA else 0,
            full_to_swa_index_mapping=lut,
            expected_tokens=self._expected_tokens(device_state),
            kv_token_id_vs_position_offset=group.kv_token_id_vs_position_offset,
            verify_stride=self.config.verify_stride,
            verify_phase=verify_phase,
        )

    def _expected_tokens(self, device_state: CanaryDeviceState) -> ArrayLike | None:
        return device_state.req_to_verify_expected_tokens if self.config.enable_verify_token_assert else None

    def _phase(
        self,
        phase: str,
        group: CanaryBufferGroup,
        group_plan: Plan,
        slots: ArrayLike,
        batch: ForwardBatch,
        device_state: CanaryDeviceState,
        rows: BatchRows | None,
        pool: Any,
        *,
        links: ArrayLike | None = None,
        reports: bool = False,
    ) -> tuple[CanaryBufferGroup, PhaseResults]:
        """One phase of one group, over K and V."""
        out = phase_launch(
            group.endpoints(phase, pool),
            group_plan,
            batch,
            slots,
            device_state,
            mode=self.config.real_kv_hash_mode if phase == "tail" else RealKvHashMode.NONE,
            check_expected_token=self.config.enable_verify_token_assert,
            rows=rows,
            links=links,
            reports=reports,
        )
        names = [f"{half}_{phase}" for half in group.halves]
        return group.with_buffers(**dict(zip(names, out.buffers, strict=True))), out


def _is_due(step: int, interval: int) -> bool:
    """Whether another ``interval`` steps are full; never where it is 0."""
    step = check_int(step, "step", 0, INT64_MAX)
    return step > 0 and interval > 0 and step % interval == 0
