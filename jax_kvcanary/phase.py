"""A phase of a step, before or behind the forward: verify, then write, in one custom call for all endpoints of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jax_kvcanary import _launch
from jax_kvcanary._checks import ArrayLike, check_array, check_dtype, check_enum, check_flag, check_shape
from jax_kvcanary._ffi import PHASE_TARGET, REPORT_PHASE_TARGET
from jax_kvcanary._launch import BatchRows, Endpoint
from jax_kvcanary.batch import ForwardBatch
from jax_kvcanary.constants import RealKvHashMode
from jax_kvcanary.plan import Plan
from jax_kvcanary.report import SUMMARY_WORDS, CanaryReport
from jax_kvcanary.state import CanaryDeviceState, check_device_state
from jax_kvcanary.verify import verify_operands
from jax_kvcanary.write import WriteOperands


@dataclass(frozen=True)
class PhaseResults:
    """What a phase leaves.

    Fields:
        buffers: the canary buffers of the endpoints.
        state: with every finding recorded.
        rows: the batch's rows with their flags; None where there are none.
        links: uint32 [words]; what each token follows, for a later phase of the same step.
        report: the step's report, where it was asked for.
    """

    buffers: list[jax.Array]
    state: CanaryDeviceState
    rows: BatchRows | None
    links: jax.Array
    report: CanaryReport | None


def phase_launch(
    endpoints: Sequence[Endpoint],
    plan: Plan,
    batch: ForwardBatch,
    out_cache_loc: ArrayLike,
    device_state: CanaryDeviceState,
    *,
    mode: RealKvHashMode,
    check_expected_token: bool,
    rows: BatchRows | None,
    links: ArrayLike | None = None,
    reports: bool = False,
) -> PhaseResults:
    """Verify a plan's entries and write the batch's tokens (the contract's sections 4 and 5).

    Args:
        endpoints: canary buffers with their tags and sources.
        plan: of this group.
        batch: tokens, positions, and what they are compared with.
        out_cache_loc: int32 or int64 [tokens]; slots in the group's own numbering.
        device_state: log and counters.
        mode: how much of the real KV is hashed.
        check_expected_token: compare stored tokens with the plan's expected ones.
        rows: the rows that findings are attributed to, or None.
        links: uint32; those that a phase of the same group, batch and plan returned, whose buffers have as many slots. Rows whose seed
            records disagree with those are walked again; the results are the same with and without.
        reports: whether the step's report is wanted.
    """
    mode = check_enum(mode, "real_kv_hash_mode", RealKvHashMode)
    check_flag(check_expected_token, "check_expected_token")
    write = WriteOperands.of(
        plan.write,
        batch.input_ids,
        batch.positions,
        out_cache_loc,
        expected_input_tokens=batch.expected_input_tokens,
        expected_input_positions=batch.expected_input_positions,
        parents=batch.parents,
    )
    state = check_device_state(device_state)
    carried = links is not None
    if carried:
        check_array(links, "step.links")
        check_dtype(links, "step.links", jnp.uint32)
        check_shape(links, "step.links", (write.link_words,), f"a batch of {write.tokens} tokens and a plan of {write.rows} rows")
    resets = state.violation_log.reset_count
    out = _launch.call(
        REPORT_PHASE_TARGET if reports else PHASE_TARGET,
        [
            *verify_operands(plan.verify, rows),
            *write.arrays,
            state.enable_chain_position_assert,
            links if carried else state.enable_chain_position_assert,  # in its place, where there are none
            plan.num_invalid_rows,
            jnp.zeros((1,), jnp.int32) if resets is None else resets,
        ],
        [endpoint.checked(mode) for endpoint in endpoints],
        mode,
        state,
        rows,
        own_words=[write.scratch_words(len(endpoints)), 1 if carried else max(write.link_words, 1)],
        summary_words=SUMMARY_WORDS if reports else 0,
        writes=True,
        check_expected_token=check_expected_token,
        check_input=write.check_input,
        tree=write.tree,
        carried=carried,
    )
    report = None
    if reports:
        # The flags in place go on from phase to phase; those of the report lie where nothing but the report is written.
        ring, request_rows, row_flags, summary = out.report
        report = CanaryReport(
            violation_ring=ring,
            violation_request_rows=None if state.violation_log.violation_request_rows is None else request_rows,
            row_flags=jnp.zeros((0,), jnp.int32) if out.rows is None else row_flags,
            summary=summary,
        )
    return PhaseResults(out.buffers, out.state, out.rows, out.own[1] if links is None else links, report)
