"""Findings in readable form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jax_kvcanary.constants import CanaryLaunchTag, FailReason

_UINT64 = (1 << 64) - 1

_EXPLANATIONS = {
    FailReason.VERIFY_CHAIN_HASH_MISMATCH: (
        "the slot does not follow from the slot before it: one of the two was overwritten, or belongs to another request"
    ),
    FailReason.VERIFY_POSITION_MISMATCH: "the slot holds another position than the request has there",
    FailReason.VERIFY_REAL_KV_HASH_MISMATCH: (
        "the KV bytes changed since they were fingerprinted: something wrote them without the scheduler knowing"
    ),
    FailReason.WRITE_TOKEN_MISMATCH: "the step wrote another token than was expected",
    FailReason.WRITE_POSITION_MISMATCH: "the step wrote a position that was not expected, or that does not follow its predecessor's",
    FailReason.VERIFY_TOKEN_MISMATCH: "the slot holds another token than the request has at that position",
    FailReason.SLOT_OUT_OF_RANGE: "there is no such index: the array ends at the number in expected_aux",
}


@dataclass(frozen=True)
class Violation:
    """One decoded row of the violation ring. ``str()`` is the report.

    Fields:
        launch_tag: the launch that found it: phase, half and group.
        fail_reason: one or more reasons.
        slot_idx: slot in the group's own numbering, -1 where a row as a whole is at fault.
        position: the position stored there (verify), or written (write).
        stored_token: the token stored there, or written.
        expected_token: the token expected, -1 where none was.
        stored_chain_hash: unsigned 64-bit; the predecessor's hash in the record, or the running hash of a write.
        expected_aux: unsigned 64-bit; the hash that the chain asks for, the expected position of a write, or the number of slots
            (SLOT_OUT_OF_RANGE; tokens, for a row that left the token arrays).
        step: forward pass whose report first showed the row, counted from 1; None where the row was decoded without a report.
        earliest_step: first pass that it can come from, when several passed between two reports.
        request_row: row of ``req_to_token`` whose request the slot was checked or written for; None where it was none's.
    """

    launch_tag: CanaryLaunchTag
    fail_reason: FailReason
    slot_idx: int
    position: int
    stored_token: int
    expected_token: int
    stored_chain_hash: int
    expected_aux: int
    step: int | None = None
    earliest_step: int | None = None
    request_row: int | None = None

    @classmethod
    def from_row(
        cls,
        row: Sequence[int] | np.ndarray,
        *,
        step: int | None = None,
        earliest_step: int | None = None,
        request_row: int | None = None,
    ) -> Violation:
        """Decode eight int64 of the ring; a negative request row is none."""
        tag, slot, position, stored, expected, chain_hash, aux, reasons = (int(field) for field in row)
        return cls(
            launch_tag=CanaryLaunchTag(tag),
            fail_reason=FailReason(reasons),
            slot_idx=slot,
            position=position,
            stored_token=stored,
            expected_token=expected,
            stored_chain_hash=chain_hash & _UINT64,
            expected_aux=aux & _UINT64,
            step=step,
            earliest_step=earliest_step,
            request_row=None if request_row is None or request_row < 0 else int(request_row),
        )

    def first_line(self) -> str:
        """The line of fixed form that tools may parse."""
        return (
            f"kv_canary violation: launch_tag={self.launch_tag.name} fail_reason={reason_text(self.fail_reason)} "
            f"slot_idx={self.slot_idx} position={self.position} stored_token={self.stored_token} "
            f"expected_token={self.expected_token} stored_chain_hash=0x{self.stored_chain_hash & _UINT64:016x} "
            f"expected_aux=0x{self.expected_aux & _UINT64:016x}"
        )

    def __str__(self) -> str:
        phase, half, kind = self.launch_tag.name.split("_")
        when = {"HEAD": "before the forward", "TAIL": "after the forward", "SWEEP": "in a sweep over cached slots"}[phase]
        where = f"{half} records of the {'full' if kind == 'FULL' else 'sliding-window'} pool"
        whose = "" if self.request_row is None else f", for request row {self.request_row}"
        lines = [self.first_line(), f"  found {self._step_text()}{when}, in the {where}{whose}"]
        lines += [f"  {reason_text(reason)}: {_EXPLANATIONS[reason]}" for reason in FailReason if reason in self.fail_reason]
        return "\n".join(lines)

    def _step_text(self) -> str:
        if self.step is None:
            return ""
        if self.earliest_step is not None and self.earliest_step < self.step:
            return f"between steps {self.earliest_step} and {self.step}, "
        return f"at step {self.step}, "


def reason_text(reasons: FailReason) -> str:
    """Names of the reasons in lower case without ``_mismatch``, joined by ``+`` in bit order."""
    return "+".join(str(reason.name).lower().removesuffix("_mismatch") for reason in FailReason if reason in reasons)


class CanaryViolationError(RuntimeError):
    """The cache is corrupted. ``violations`` has every row that the ring holds so far."""

    def __init__(self, violations: Sequence[Violation], total: int | None = None) -> None:
        self.violations = tuple(violations)
        self.total = len(self.violations) if total is None else total
        shown = "\n".join(str(violation) for violation in self.violations[:8])
        more = self.total - min(len(self.violations), 8)
        super().__init__(f"{shown}\n{more} more violations were recorded." if more > 0 else shown)
