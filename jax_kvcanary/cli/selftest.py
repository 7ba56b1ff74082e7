"""``python -m jax_kvcanary selftest``: whether this installation finds every fault that it must find, and nothing else."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax_kvcanary.selftest.matrix import LegalOutcome, Outcome

SUMMARY = "Plant faults in a little serving loop and see that the canary finds each of them, and nothing in legal traffic."

_SEEDS, _STEPS = 3, 2000
_QUICK_SEEDS, _QUICK_STEPS = 1, 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("--seeds", type=_count, metavar="N", help=f"plant each fault in N runs of their own ({_SEEDS})")
    parser.add_argument("--steps", type=_count, metavar="N", help=f"serve N steps of legal traffic in each mode ({_STEPS})")
    parser.add_argument("--quick", action="store_true", help=f"the same with {_QUICK_SEEDS} seed and {_QUICK_STEPS} steps, unless given")


def run(arguments: argparse.Namespace) -> int:
    """Print the matrix; 0 exactly when everything that must be found was found in time, and legal traffic was silent, else 1."""
    import jax

    from jax_kvcanary.selftest.faults import MODES, make_faults
    from jax_kvcanary.selftest.matrix import run_faults, run_legal
    from jax_kvcanary.selftest.program import Machine

    seeds = arguments.seeds or (_QUICK_SEEDS if arguments.quick else _SEEDS)
    steps = arguments.steps or (_QUICK_STEPS if arguments.quick else _STEPS)
    runs = f"{_plural(seeds, 'run')} of each fault, {_plural(steps, 'legal step')} in each mode"
    print(f"jax_kvcanary self test on {jax.devices()[0].device_kind}: {runs}.")
    faults = make_faults()
    legal, outcomes = [], []
    for mode in MODES:
        machine = Machine(mode)
        legal.append(run_legal(machine, steps, seed=steps))
        outcomes += run_faults(machine, faults, range(seeds))
    print("\n".join(matrix_lines(outcomes)))
    print("\n".join(legal_lines(legal)))
    problems = [f"{_name(outcome)}: {problem}" for outcome in outcomes for problem in outcome.problems]
    problems += [f"legal traffic, mode {outcome.mode.name}: {problem}" for outcome in legal for problem in outcome.problems]
    if problems:
        print(f"\nFAILED: {_plural(len(problems), 'problem')}.")
        print("\n".join(f"  {problem}" for problem in problems))
        return 1
    print("\nPassed: every fault was found where it must be, and legal traffic was silent.")
    return 0


def matrix_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """The matrix as a table: for each fault and group one line a mode."""
    rows = [("fault", "group", "mode", "result", "steps", "limit", "found as")]
    cells: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        cells.setdefault((outcome.fault.name, outcome.fault.group.name), []).append(outcome)
    names = list(dict.fromkeys(name for name, _ in cells))
    for (name, group), of_fault in sorted(cells.items(), key=lambda cell: names.index(cell[0][0])):
        for i, outcome in enumerate(of_fault):
            first = (name if group == of_fault[0].fault.group.name and i == 0 else "", group if i == 0 else "")
            rows.append((*first, outcome.mode.name, *_result(outcome)))
    return ["", *_table(rows)]


def legal_lines(outcomes: Sequence[LegalOutcome]) -> list[str]:
    """Legal traffic: what happened in it, and what the canary in each mode made of it."""
    events = outcomes[0].events
    lines = ["", "legal traffic: " + ", ".join(f"{count:,} {name}" for name, count in events.items())]
    rows = [("mode", "entries checked", "findings", "result")]
    rows += [(o.mode.name, f"{o.checked:,}", str(o.findings), "PROBLEM" if o.problems else "silent") for o in outcomes]
    return [*lines, *_table(rows)]


def _result(outcome: Outcome) -> tuple[str, str, str, str]:
    """What became of a fault in a mode, the largest number of steps, how many there may be, and the findings."""
    from jax_kvcanary.explain import reason_text

    tags: dict[str, list[str]] = {}
    for reasons, tag in sorted(outcome.found_as):
        tags.setdefault(reason_text(reasons), []).append(tag.name)
    as_what = "; ".join(f"{reasons} in {', '.join(names)}" for reasons, names in tags.items())
    worst = str(max(outcome.steps)) if outcome.steps else ""
    limit = "" if outcome.expected is None else str(outcome.expected.within)
    if outcome.problems:
        return "PROBLEM", worst, limit, as_what
    if outcome.expected is None:
        return "not seen in this mode, by design", "", "", ""
    return f"found {len(outcome.steps)} of {outcome.runs}", worst, limit, as_what


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def _name(outcome: Outcome) -> str:
    return f"{outcome.fault.name}, {outcome.fault.group.name}, mode {outcome.mode.name}"


def _plural(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"it is {text!r}, but it must be a whole number above 0")
    return int(text)
