"""The acceptance matrix: every fault is found in its mode, in time, over 20 seeds, and 2,000 steps of legal traffic are silent."""

from __future__ import annotations

import re
from functools import cache

import numpy as np
import pytest

from jax_kvcanary import FailReason, PoolKind
from jax_kvcanary.cli import main
from jax_kvcanary.cli import selftest as command
from jax_kvcanary.selftest import engine as engine_module
from jax_kvcanary.selftest import faults as faults_module
from jax_kvcanary.selftest import matrix, program
from jax_kvcanary.selftest.engine import Engine
from jax_kvcanary.selftest.faults import ALL, INPUTS, MODES, NONE, PARTIAL, TOKENS, make_faults
from jax_kvcanary.selftest.steps import ROWS, SWEEP_INTERVAL

SEEDS, LEGAL_STEPS = 20, 2000

TRAMPLE = "entry of the request table trampled"
SWAP = "two next tokens swapped"
SHIFT = "position shifted"
LIVE = "byte of a live slot flipped"
LIVE_PAST = "byte of a live slot flipped, past the first 16"
CACHED = "byte of a cached, unused slot flipped"
WRITTEN = "byte of a slot just written flipped"
WRITTEN_BEFORE = "byte of a slot just written flipped, before its fingerprint"

#: Steps within which each fault must be found, by mode; the modes that are left out cannot see it.
WITHIN = {
    TRAMPLE: dict.fromkeys(MODES, 0),
    SWAP: {INPUTS: 0, TOKENS: 1},
    SHIFT: {NONE: 1, PARTIAL: 1, ALL: 1, INPUTS: 0, TOKENS: 1},
    LIVE: {PARTIAL: 0, ALL: 0},
    LIVE_PAST: {ALL: 0},
    CACHED: {PARTIAL: 2, ALL: 2},
    WRITTEN: {PARTIAL: 1, ALL: 1},
    WRITTEN_BEFORE: {},
}
REASONS = {
    TRAMPLE: {FailReason.VERIFY_POSITION_MISMATCH},
    SWAP: {FailReason.WRITE_TOKEN_MISMATCH, FailReason.VERIFY_TOKEN_MISMATCH},
    SHIFT: {FailReason.WRITE_POSITION_MISMATCH, FailReason.VERIFY_POSITION_MISMATCH},
    LIVE: {FailReason.VERIFY_REAL_KV_HASH_MISMATCH},
    LIVE_PAST: {FailReason.VERIFY_REAL_KV_HASH_MISMATCH},
    CACHED: {FailReason.VERIFY_REAL_KV_HASH_MISMATCH},
    WRITTEN: {FailReason.VERIFY_REAL_KV_HASH_MISMATCH},
}


@cache
def faults():
    return make_faults()


MACHINE = program.Machine  # which some tests replace


@cache
def machine(mode):
    return MACHINE(mode)


@cache
def outcomes(mode):
    return matrix.run_faults(machine(mode), faults(), range(SEEDS))


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_every_fault_is_found_in_its_mode(mode):
    assert [(outcome.fault.name, outcome.fault.group.name, outcome.problems) for outcome in outcomes(mode) if outcome.problems] == []
    assert sorted({outcome.fault.name for outcome in outcomes(mode)}) == sorted(WITHIN)
    for outcome in outcomes(mode):
        within = WITHIN[outcome.fault.name].get(mode)
        assert outcome.runs == SEEDS
        if within is None:
            assert (outcome.expected, outcome.steps, outcome.found_as) == (None, [], set())
            continue
        assert outcome.expected.within == within
        assert len(outcome.steps) == SEEDS
        assert max(outcome.steps) <= within
        for reasons, tag in outcome.found_as:
            assert any(reason in reasons for reason in REASONS[outcome.fault.name])
            assert tag.name.endswith(f"_{outcome.fault.group.name}")


def test_every_fault_is_planted_in_both_groups():
    planted = sorted((fault.name, fault.group) for fault in faults())
    assert planted == sorted((name, kind) for name in WITHIN for kind in PoolKind)


def test_the_seeds_differ():
    """A shifted position is found at once in rows with a prefix, a step later in others: both are among the seeds."""
    by_name = {(outcome.fault.name, outcome.fault.group): outcome for outcome in outcomes(ALL)}
    assert set(by_name[SHIFT, PoolKind.FULL].steps) == {0, 1}
    for name in (LIVE, LIVE_PAST, CACHED, WRITTEN):
        halves = {tag.name.split("_")[1] for _, tag in by_name[name, PoolKind.FULL].found_as}
        assert halves == {"K", "V"}


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_legal_traffic_is_silent(mode):
    outcome = matrix.run_legal(machine(mode), LEGAL_STEPS, seed=5)
    assert outcome.problems == []
    assert outcome.findings == 0
    assert outcome.checked > 100 * LEGAL_STEPS
    for event in (
        "chunks",
        "drafts rejected",
        "prefixes shared",
        "requests ended",
        "requests retracted",
        "cache entries evicted",
        "slots moved",
        "slots released",
        "slots used again",
        "sweeps",
        "window slots taken back",
    ):
        assert outcome.events[event] > LEGAL_STEPS / 20, event


def test_the_engine_is_what_its_seed_says():
    def steps(seed):
        engine = Engine(seed)
        return [engine.step() for _ in range(30)]

    one, same, other = steps(3), steps(3), steps(4)
    for a, b in zip(one, same, strict=True):
        np.testing.assert_array_equal(a.input_ids, b.input_ids)
        np.testing.assert_array_equal(a.req_to_token, b.req_to_token)
    assert any((a.input_ids != b.input_ids).any() for a, b in zip(one, other, strict=True))
    padding = [np.flatnonzero(step.req_pool_indices == 0) for step in one]
    assert any(len(rows) and rows[0] < ROWS - len(rows) for rows in padding)  # between live rows, not behind them only


# It notices what is wrong.


def test_a_blind_canary_fails():
    """One that hashes nothing, where all is said to be hashed."""
    blind = program.Machine(NONE)
    blind.mode = ALL
    chosen = [fault for fault in faults() if fault.name in (LIVE, WRITTEN_BEFORE) and fault.group is PoolKind.FULL]
    hidden, undetectable = matrix.run_faults(blind, chosen, range(2))
    assert undetectable.problems == []
    assert hidden.runs == 2
    assert hidden.steps == []
    for seed, problem in enumerate(hidden.problems):
        assert re.fullmatch(rf"seed {seed}: slot \d+ of the FULL group was hit, but nothing was found\.", problem)


def test_a_canary_that_sees_too_much_fails():
    seeing = program.Machine(ALL)
    seeing.mode = NONE
    (fault,) = (fault for fault in faults() if fault.name == LIVE and fault.group is PoolKind.SWA)
    (outcome,) = matrix.run_faults(seeing, [fault], [0])
    (problem,) = outcome.problems
    text = r"seed 0: slot \d+ of the SWA group was hit, which this mode cannot see, but the first finding, 0 steps later, is kv_canary "
    assert re.match(text, problem)


def test_a_finding_in_time_is_required():
    (fault,) = (fault for fault in faults() if fault.name == CACHED and fault.group is PoolKind.FULL)
    late = faults_module.Expected(0, FailReason.VERIFY_REAL_KV_HASH_MISMATCH, "SWEEP")
    (outcome,) = matrix.run_faults(
        machine(ALL), [faults_module.Fault(fault.name, fault.group, fault.moment, fault.function, {ALL: late}, True)], [0]
    )
    (problem,) = outcome.problems
    assert re.fullmatch(r"seed 0: slot \d+ of the FULL group was hit and found [12] steps later, but it must be found within 0\.", problem)
    assert outcome.steps[0] in range(1, SWEEP_INTERVAL + 1)


def test_legal_traffic_with_a_bug_fails(monkeypatch):
    """A slot moves, and nobody tells the pool."""
    monkeypatch.setattr(engine_module.StepBuilder, "move_full", lambda *_: None)
    outcome = matrix.run_legal(machine(PARTIAL), 40, seed=5)
    assert outcome.findings > 0
    assert re.match(
        rf"{outcome.findings} findings in legal traffic, the first of them kv_canary violation: launch_tag=", outcome.problems[0]
    )


def test_a_launch_that_checks_too_little_fails(monkeypatch):
    engine = Engine(5)
    monkeypatch.setattr(matrix, "Engine", lambda _: engine)
    engine.entries["swept FULL"] = 7
    problems = matrix.run_legal(machine(NONE), 20, seed=5).problems
    swept = engine.entries["swept FULL"]
    assert swept > 7
    assert problems == [f"SWEEP_{half}_FULL counts {swept - 7} entries, but it should count {swept}." for half in "KV"]


# The command.


@pytest.fixture
def small(monkeypatch):
    """A matrix of two faults in one mode, on a machine that is compiled already."""
    chosen = tuple(fault for fault in faults() if fault.name in (LIVE, SWAP) and fault.group is PoolKind.FULL)
    monkeypatch.setattr(faults_module, "MODES", (ALL,))
    monkeypatch.setattr(faults_module, "make_faults", lambda: chosen)
    monkeypatch.setattr(program, "Machine", machine)


@pytest.mark.usefixtures("small")
def test_the_command_prints_the_matrix(capsys):
    assert main(["selftest", "--seeds", "2", "--steps", "30"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"jax_kvcanary self test on .+: 2 runs of each fault, 30 legal steps in each mode\.", lines[0])
    assert lines[2].split() == ["fault", "group", "mode", "result", "steps", "limit", "found", "as"]
    table = [re.split(r"\s{2,}", line) for line in lines[4:6]]
    assert table[0][:4] == [SWAP, "FULL", "ALL", "not seen in this mode, by design"]
    assert table[1][:6] == [LIVE, "FULL", "ALL", "found 2 of 2", "0", "0"]
    assert re.fullmatch(r"verify_real_kv_hash in TAIL_[KV]_FULL(, TAIL_V_FULL)?", table[1][6])
    legal = next(line for line in lines if line.startswith("legal traffic: "))
    assert re.search(r"\d+ tokens", legal)
    assert re.split(r"\s{2,}", lines[-3])[0::2] == ["ALL", "0"]
    assert lines[-1] == "Passed: every fault was found where it must be, and legal traffic was silent."


@pytest.mark.usefixtures("small")
def test_the_command_fails_with_what_is_wrong(capsys, monkeypatch):
    blind = program.Machine(NONE)
    monkeypatch.setattr(blind, "mode", ALL)
    monkeypatch.setattr(program, "Machine", lambda _: blind)
    assert main(["selftest", "--quick"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "1 run of" in lines[0]
    assert "200 legal steps" in lines[0]
    assert any(re.split(r"\s{2,}", line)[:4] == [LIVE, "FULL", "ALL", "PROBLEM"] for line in lines)
    assert lines[-2] == "FAILED: 1 problem."
    assert re.fullmatch(rf"  {LIVE}, FULL, mode ALL: seed 0: slot \d+ of the FULL group was hit, but nothing was found\.", lines[-1])
    monkeypatch.setattr(blind, "mode", NONE)


@pytest.mark.parametrize("bad", ["0", "-1", "1.5", "x", ""])
@pytest.mark.parametrize("option", ["--seeds", "--steps"])
def test_bad_arguments(capsys, option, bad):
    with pytest.raises(SystemExit) as stopped:
        main(["selftest", f"{option}={bad}"])
    assert stopped.value.code == 2
    assert f"argument {option}: it is {bad!r}, but it must be a whole number above 0" in capsys.readouterr().err


def test_the_command_is_listed(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    assert " ".join(command.SUMMARY.split()) in " ".join(capsys.readouterr().out.split())
