"""Findings in readable form."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_kvcanary.constants import CanaryLaunchTag, FailReason
from jax_kvcanary.explain import explain, names_a_parent, reason_text, usual_cause

_UINT64 = (1 << 64) - 1


@dataclass(frozen=True)
class Violation:
    """One decoded row of the violation ring. ``str()`` is the report.

    Fields:
        launch_tag: the launch that found it: phase, half and group.
        fail_reason: one or more reasons.
        slot_idx: slot in the group's own numbering, -1 where a row as a whole is at fault; the parent, where an entry of a tree names
            one that it cannot follow (SLOT_OUT_OF_RANGE).
        position: the position stored there (verify), or written (write).
        stored_token: the token stored there, or written.
        expected_token: the token expected, -1 where none was.
        stored_chain_hash: unsigned 64-bit; the predecessor's hash in the record, or the running hash of a write.
        expected_aux: unsigned 64-bit; the hash that the chain asks for, the expected position of a write, or the number of slots
            (SLOT_OUT_OF_RANGE; tokens, for a row that left the token arrays; the entry's own index, for a bad parent).
        step: forward pass whose report first showed the row, counted from 1; None where the row was decoded without a report.
        earliest_step: first pass that it can come from, when several passed between two reports.
        request_row: row of ``req_to_token`` whose request the slot was checked or written for; None where it was none's.
        related_slots: other slots of the same request row and the same pool that findings of the same report name.
        log_place: how often the log had been reset, and the row of its ring; None where it was decoded without a monitor.
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
    related_slots: tuple[int, ...] = ()
    log_place: tuple[int, int] | None = dataclasses.field(default=None, repr=False, compare=False)

    @classmethod
    def from_row(
        cls,
        row: Sequence[int] | np.ndarray,
        *,
        step: int | None = None,
        earliest_step: int | None = None,
        request_row: int | None = None,
        log_place: tuple[int, int] | None = None,
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
            log_place=log_place,
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
        lines += [f"  {line}" for line in explain(self)]
        return "\n".join(lines)

    def _step_text(self) -> str:
        if self.step is None:
            return ""
        if self.earliest_step is not None and self.earliest_step < self.step:
            return f"between steps {self.earliest_step} and {self.step}, "
        return f"at step {self.step}, "


def with_related_slots(violations: Sequence[Violation]) -> list[Violation]:
    """The violations of one report, each with the other slots of its request row in the same pool: every pool has its own numbering."""
    slots: dict[tuple[int, str], dict[int, None]] = defaultdict(dict)  # by request row and pool, in order, each once
    for violation in violations:
        if violation.request_row is not None and violation.slot_idx >= 0 and not names_a_parent(violation):
            slots[violation.request_row, _pool_of(violation)][violation.slot_idx] = None
    return [
        violation
        if violation.request_row is None
        else dataclasses.replace(
            violation,
            related_slots=tuple(slot for slot in slots[violation.request_row, _pool_of(violation)] if slot != violation.slot_idx),
        )
        for violation in violations
    ]


def _pool_of(violation: Violation) -> str:
    return violation.launch_tag.name.split("_")[-1]


def violations_to_dict(violations: Sequence[Violation], total: int | None = None) -> dict[str, Any]:
    """Violations as plain data for JSON: enumerations by name, hashes as ``0x`` and 16 hexadecimal digits.

    Args:
        violations: such as those of a monitor or of :class:`CanaryViolationError`.
        total: how many were counted, those that found the ring full included; None is as many as are given.
    """
    rows = []
    for violation in violations:
        row = dataclasses.asdict(violation)
        del row["log_place"]
        row["launch_tag"] = violation.launch_tag.name
        row["fail_reason"] = reason_text(violation.fail_reason).split("+")
        row["related_slots"] = list(violation.related_slots)
        for name in ("stored_chain_hash", "expected_aux"):
            row[name] = f"0x{row[name] & _UINT64:016x}"
        row["usual_cause"] = usual_cause(violation)
        row["text"] = str(violation)
        rows.append(row)
    return {"total": len(rows) if total is None else total, "violations": rows}


class CanaryViolationError(RuntimeError):
    """The cache is corrupted. ``violations`` has every row that the ring kept so far, ``total`` counts those that it did not, too.

    ``new`` has those that no earlier error had, and the text begins with them. Where some were not kept, it says how many there were of
    each kind: a flood hides no other kind.
    """

    def __init__(
        self,
        violations: Sequence[Violation],
        total: int | None = None,
        by_reason: str = "",
        earlier: int = 0,
        earlier_total: int | None = None,
    ) -> None:
        """The first ``earlier`` violations, of ``earlier_total`` then counted, were raised before."""
        self.violations = tuple(violations)
        self.total = len(self.violations) if total is None else total
        self.by_reason = by_reason
        self.new = self.violations[earlier:]
        self._earlier = (earlier, earlier_total)
        parts = [str(violation) for violation in self.new[:8]]
        more = self.total - (earlier if earlier_total is None else earlier_total) - len(parts)
        if more > 0:
            parts.append(f"{more} more violations were recorded." if parts else f"{more} violations were counted, but the ring is full.")
        if by_reason:
            parts.append(f"By launch tag and reason: {by_reason}.")
        super().__init__("\n".join(parts))

    def __reduce__(self) -> tuple[Any, ...]:
        """Made again from its fields where it goes to another process, not from its text."""
        return type(self), (self.violations, self.total, self.by_reason, *self._earlier)
