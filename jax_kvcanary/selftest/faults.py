"""The faults of the self test, and which mode finds which of them, when and as what."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import jax

from jax_kvcanary import perturb
from jax_kvcanary.config import CanaryConfig, CanaryMode
from jax_kvcanary.constants import PARTIAL_READ_BYTES, CanaryLaunchTag, FailReason, PoolKind, RealKvHashMode
from jax_kvcanary.pools import SWAKVPool, attach_canary_buffers
from jax_kvcanary.selftest.pool import allocate_pool
from jax_kvcanary.selftest.steps import NUM_SLOTS, NUM_SWA_SLOTS, SWEEP_INTERVAL, WINDOW, Step
from jax_kvcanary.violations import Violation


@dataclass(frozen=True)
class Mode:
    """What the canary under test checks.

    Fields:
        name: as it is printed.
        hash_mode: how many real KV bytes.
        inputs: whether the batch says which tokens and positions it should hold.
        tokens: whether a table says which token each slot should hold.
    """

    name: str
    hash_mode: RealKvHashMode
    inputs: bool = False
    tokens: bool = False


NONE = Mode("NONE", RealKvHashMode.NONE)
PARTIAL = Mode("PARTIAL", RealKvHashMode.PARTIAL)
ALL = Mode("ALL", RealKvHashMode.ALL)
INPUTS = Mode("NONE + inputs", RealKvHashMode.NONE, inputs=True)
TOKENS = Mode("NONE + tokens", RealKvHashMode.NONE, tokens=True)
MODES = (NONE, PARTIAL, ALL, INPUTS, TOKENS)


@dataclass(frozen=True)
class Expected:
    """What a finding of a fault must be.

    Fields:
        within: steps after the one with the fault; 0 is that step itself.
        reasons: one of these.
        phase: HEAD, TAIL or SWEEP.
    """

    within: int
    reasons: FailReason
    phase: str

    def matches(self, violation: Violation, change: perturb.Perturbation, group: PoolKind) -> bool:
        """Whether a finding is this fault's: in its group and half, at its slot, for the right reason."""
        halves = "KV" if change.source < 0 else "KV"[change.source]
        tags = [CanaryLaunchTag[f"{self.phase}_{half}_{group.name}"] for half in halves]
        return violation.launch_tag in tags and bool(violation.fail_reason & self.reasons) and violation.slot_idx == change.slot


class Moment(Enum):
    """Where in a step a fault is planted."""

    BEFORE_STEP = "before the step"
    BEHIND_FORWARD = "between the forward and the fingerprint"
    BEHIND_STEP = "after the step"


@dataclass(frozen=True, eq=False)
class Fault:
    """One row of the matrix, in one group.

    Fields:
        name: as it is printed.
        group: whose slots it hits.
        moment: when it is planted.
        function: ``function(key, what, pool, *, probability)``, jitted; returns the batch or the pool, and what was changed.
        expected: what it is found as, by mode; not seen in the others, by design.
        cached: whether it hits the slots that only the prefix cache holds, else those of the batch.
    """

    name: str
    group: PoolKind
    moment: Moment
    function: Callable[..., tuple[Any, perturb.Perturbation]]
    expected: Mapping[Mode, Expected] = field(default_factory=dict)
    cached: bool = False

    def plant(self, key: jax.Array, step: Step, batch: Any, pool: SWAKVPool) -> tuple[Any, perturb.Perturbation]:
        """The batch or the pool with the fault in it, and what was changed."""
        if self.cached:
            slots = step.cached_slots if self.group is PoolKind.FULL else step.cached_window_slots
            return self.function(key, slots, pool, probability=1.0)
        # What the batch should hold is none of the fault's business: without it, one compiled function serves every mode.
        expectations = {name: getattr(batch, name) for name in ("expected_input_tokens", "expected_input_positions")}
        changed, change = self.function(key, dataclasses.replace(batch, **dict.fromkeys(expectations)), pool, probability=1.0)
        if self.moment is Moment.BEFORE_STEP:
            changed = dataclasses.replace(changed, **expectations)
        return changed, change


_VERIFY_KV = FailReason.VERIFY_REAL_KV_HASH_MISMATCH


def make_faults() -> tuple[Fault, ...]:
    """Every fault, once for each group."""
    return tuple(fault for kind in PoolKind for fault in _faults_of(kind))


def _faults_of(kind: PoolKind) -> list[Fault]:
    hashed, others = _targets(kind)
    position = FailReason.VERIFY_POSITION_MISMATCH
    shifted = FailReason.WRITE_POSITION_MISMATCH
    behind_forward = partial(Fault, group=kind, moment=Moment.BEHIND_FORWARD)
    behind_step = partial(Fault, group=kind, moment=Moment.BEHIND_STEP)
    before_step = partial(Fault, group=kind, moment=Moment.BEFORE_STEP)
    flip_written = _jitted(perturb.flip_written_kv, hashed)
    return [
        before_step(
            "entry of the request table trampled",
            function=_jitted(perturb.trample_req_to_token, hashed),
            expected=dict.fromkeys(MODES, Expected(0, position, "HEAD")),
        ),
        before_step(
            "two next tokens swapped",
            function=_jitted(perturb.swap_next_tokens, hashed),
            expected={
                INPUTS: Expected(0, FailReason.WRITE_TOKEN_MISMATCH, "HEAD"),
                TOKENS: Expected(1, FailReason.VERIFY_TOKEN_MISMATCH, "HEAD"),
            },
        ),
        before_step(
            "position shifted",
            function=_jitted(perturb.shift_position, hashed),
            expected={**dict.fromkeys(MODES, Expected(1, shifted | position, "HEAD")), INPUTS: Expected(0, shifted, "HEAD")},
        ),
        behind_forward(
            "byte of a live slot flipped",
            function=_jitted(perturb.flip_live_kv, hashed),
            expected=dict.fromkeys((PARTIAL, ALL), Expected(0, _VERIFY_KV, "TAIL")),
        ),
        behind_forward(
            f"byte of a live slot flipped, past the first {PARTIAL_READ_BYTES}",
            function=_jitted(perturb.flip_live_kv, others),
            expected={ALL: Expected(0, _VERIFY_KV, "TAIL")},
        ),
        behind_step(
            "byte of a cached, unused slot flipped",
            function=_jitted(perturb.flip_cached_kv, hashed),
            expected=dict.fromkeys((PARTIAL, ALL), Expected(SWEEP_INTERVAL, _VERIFY_KV, "SWEEP")),
            cached=True,
        ),
        behind_step(
            "byte of a slot just written flipped",
            function=flip_written,
            expected=dict.fromkeys((PARTIAL, ALL), Expected(1, _VERIFY_KV, "TAIL")),
        ),
        behind_forward("byte of a slot just written flipped, before its fingerprint", function=flip_written),
    ]


def _jitted(function: Callable[..., Any], target: perturb.PerturbTarget) -> Callable[..., Any]:
    return jax.jit(lambda key, what, pool, *, probability: function(key, target, what, pool, probability=probability))


def _targets(kind: PoolKind) -> tuple[perturb.PerturbTarget, perturb.PerturbTarget]:
    """A group's bytes that PARTIAL hashes, and those that only ALL does, whatever the canary under test hashes."""
    pool = allocate_pool(num_slots=NUM_SLOTS, num_swa_slots=NUM_SWA_SLOTS)
    config = CanaryConfig(CanaryMode.LOG, real_kv_hash_mode=RealKvHashMode.ALL)
    (group,) = (group for group in attach_canary_buffers(pool, config) if group.kind is kind)
    target = partial(
        perturb.PerturbTarget,
        kind=kind,
        num_slots=group.k_head.shape[0],
        sources=(*group.real_kv_sources_k, *group.real_kv_sources_v),
        swa_index_lut=group.swa_index_lut,
        swa_window_size=WINDOW if kind is PoolKind.SWA else 0,
    )
    return target(real_kv_hash_mode=RealKvHashMode.PARTIAL), target(first_byte=PARTIAL_READ_BYTES)
