"""Runs the matrix of faults and modes, and legal traffic in every mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import jax

from jax_kvcanary.constants import CanaryLaunchTag, FailReason
from jax_kvcanary.selftest.engine import Engine, Pace
from jax_kvcanary.selftest.faults import Expected, Fault, Mode
from jax_kvcanary.selftest.program import Machine
from jax_kvcanary.selftest.steps import SWEEP_INTERVAL, Step

#: Steps of legal traffic before the faults of a seed. The fault comes with an arrival, so that rows with and without a prefix can be hit.
_BEFORE = (*[Pace.BUSY] * 17, Pace.SETTLE)
_FROM_THE_FAULT_ON = (Pace.ARRIVE, *[Pace.CALM] * (SWEEP_INTERVAL + 1))


@dataclass
class Outcome:
    """One cell of the matrix: a fault in a mode.

    Fields:
        fault, mode: which.
        runs: how often it was planted.
        steps: for each run in which it was found, how many steps later.
        found_as: reasons and launch tags of the findings that are the fault's own.
        problems: sentences that say what was not as it must be.
    """

    fault: Fault
    mode: Mode
    runs: int = 0
    steps: list[int] = field(default_factory=list)
    found_as: set[tuple[FailReason, CanaryLaunchTag]] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    @property
    def expected(self) -> Expected | None:
        """What it must be found as; None where the mode cannot see it."""
        return self.fault.expected.get(self.mode)


@dataclass
class LegalOutcome:
    """Legal traffic in a mode.

    Fields:
        mode: which.
        events: what happened, by name.
        findings: how many; none is legal.
        checked: entries that the canary verified, and records that it wrote.
        problems: sentences that say what was not as it must be.
    """

    mode: Mode
    events: Counter[str]
    findings: int
    checked: int
    problems: list[str] = field(default_factory=list)


def run_legal(machine: Machine, steps: int, seed: int) -> LegalOutcome:
    """Serve steps of legal traffic, and see that every launch checked what it should and found nothing."""
    machine.reset()
    engine = Engine(seed)
    for _ in range(steps):
        machine.step(engine.step())
    counters = machine.counters
    runs, entries = counters["kernel_runs"], counters["slot_runs"]
    outcome = LegalOutcome(machine.mode, engine.events, int(counters["findings"][0]), int(entries.sum()))
    problems = outcome.problems
    if outcome.findings:
        problems.append(f"{outcome.findings} findings in legal traffic, the first of them {machine.rows()[0].first_line()}")
    if counters["skips"].any():
        problems.append(f"{int(counters['skips'].sum())} verifies were skipped.")
    for tag in CanaryLaunchTag:
        launches = steps if "SWEEP" in tag.name else 2 * steps  # a sweep verifies, a phase verifies and writes
        if runs[tag] != launches:
            problems.append(f"{tag.name} ran {runs[tag]} times, but it should have run {launches} times.")
        phase, _, kind = tag.name.split("_")
        want = engine.entries[f"swept {kind}" if phase == "SWEEP" else kind]
        if entries[tag] != want:
            problems.append(f"{tag.name} counts {entries[tag]} entries, but it should count {want}.")
    return outcome


def run_faults(machine: Machine, faults: Iterable[Fault], seeds: Iterable[int]) -> list[Outcome]:
    """Plant every fault once for each seed, each behind the same legal steps."""
    outcomes = [Outcome(fault, machine.mode) for fault in faults]
    for seed in seeds:
        engine = Engine(seed)
        machine.reset()
        for pace in _BEFORE:
            machine.step(engine.step(pace))
        steps = [engine.step(pace) for pace in _FROM_THE_FAULT_ON]
        snapshot = machine.snapshot()
        for i, outcome in enumerate(outcomes):
            machine.restore(snapshot)
            if rows := machine.rows():
                outcome.problems.append(f"seed {seed}: before the fault there is a finding, {rows[0].first_line()}.")
            else:
                _run_fault(machine, outcome, steps, seed, jax.random.fold_in(jax.random.key(seed), i))
    return outcomes


def _run_fault(machine: Machine, outcome: Outcome, steps: list[Step], seed: int, key: jax.Array) -> None:
    """Plant a fault once, and watch until it is found or the steps are over."""
    fault, expected = outcome.fault, outcome.expected
    first, *others = steps
    change = machine.step(first, fault, key)
    if change is None or not change.happened:
        outcome.problems.append(f"seed {seed}: the fault could not be planted.")
        return
    outcome.runs += 1
    rows, later = machine.rows(), 0
    while not rows and later < len(others):
        machine.step(others[later])
        rows, later = machine.rows(), later + 1
    own = [] if expected is None else [row for row in rows if expected.matches(row, change, fault.group)]
    outcome.found_as |= {(row.fail_reason, row.launch_tag) for row in own}
    if own:
        outcome.steps.append(later)
    where = f"seed {seed}: slot {change.slot} of the {fault.group.name} group was hit"
    others_found = f"the first finding, {later} steps later, is {rows[0].first_line()}" if rows else "nothing was found"
    if expected is None and rows:
        outcome.problems.append(f"{where}, which this mode cannot see, but {others_found}.")
    if expected is not None and not own:
        outcome.problems.append(f"{where}, but {others_found}.")
    if expected is not None and own and later > expected.within:
        outcome.problems.append(f"{where} and found {later} steps later, but it must be found within {expected.within}.")
