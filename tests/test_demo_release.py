"""The demo's engine releases what its scheduler frees: a slot freed too early is reported in that step, before anyone has it again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import jax_kvcanary as kvc
from jax_kvcanary import FailReason as Reason

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from disaggregation.tiny import MODEL, make_params
from smollm2.engine import Engine, Run
from smollm2.scheduler import Limits, Request, Scheduler

LIMITS = Limits(num_slots=41, max_batch=3, max_seq_len=32, chunk=8, token_buckets=(3, 8))
LOG = kvc.CanaryConfig(mode=kvc.CanaryMode.LOG, real_kv_hash_mode=kvc.RealKvHashMode.ALL)
POSITION = 3
UNWRITTEN = Reason.VERIFY_CHAIN_HASH_MISMATCH | Reason.VERIFY_POSITION_MISMATCH | Reason.VERIFY_REAL_KV_HASH_MISMATCH


class FreedTooEarly:
    """From a hook on: the scheduler frees a slot that a running request still has in its row, and hands it out last of all."""

    def __init__(self, at_step: int) -> None:
        self.at_step = at_step
        self.slot = 0

    def __call__(self, step: int, scheduler: Scheduler) -> None:
        if step == self.at_step:
            self.slot = scheduler.slots_of(scheduler.running[0])[POSITION]
            scheduler._free([self.slot])
            free = scheduler.allocator._free
            free.insert(0, free.pop())


def requests() -> list[Request]:
    stem = (7, 7, 1, 2, 3, 4)
    return [Request(rid, (*stem, *prompt), 9, arrival_step=rid) for rid, prompt in enumerate([(5, 6), (8,), (9, 10, 11)])]


@pytest.fixture(scope="module")
def params():
    return make_params()


def serve(params, bug=None):
    """A run to its end, and what its canary found."""
    run = Run(Engine(params, MODEL, LIMITS, LOG), requests(), stop_token=-1, before_step=bug)
    while run.advance():
        pass
    return run.finish(), run.monitor.violations


def test_a_slot_that_is_freed_while_it_is_in_use_is_reported_in_that_step(params):
    sound, silence = serve(params)
    assert silence == ()
    bug = FreedTooEarly(at_step=5)
    served, violations = serve(params, bug)
    first = [violation for violation in violations if violation.step == bug.at_step]
    assert violations[: len(first)] == tuple(first)
    assert {violation.launch_tag.name for violation in first} == {"HEAD_K_FULL", "HEAD_V_FULL", "TAIL_K_FULL", "TAIL_V_FULL"}
    freed = [violation for violation in first if violation.slot_idx == bug.slot]
    others = [violation for violation in first if violation.slot_idx != bug.slot]
    # The record is fresh: nobody has written the slot since.
    assert {(v.fail_reason, v.position, v.stored_token) for v in freed} == {(UNWRITTEN, -1, -1)}
    # Next to it, only the successor's chain.
    assert {(v.fail_reason, v.position) for v in others} == {(Reason.VERIFY_CHAIN_HASH_MISMATCH, POSITION + 1)}
    # The model itself notices nothing: the bytes are still there.
    assert served.outputs == sound.outputs


def test_the_run_frees_and_reuses_slots_in_silence(params):
    """The legal case: slots of retracted requests and evicted prefixes are released and written again."""
    tight = Limits(num_slots=29, max_batch=3, max_seq_len=32, chunk=8, token_buckets=(3, 8))
    run = Run(Engine(params, MODEL, tight, LOG), requests(), stop_token=-1)
    while run.advance():
        pass
    served = run.finish()
    assert min(served.stats.evicted_slots, served.stats.retractions) > 0
    assert run.monitor.violations == ()
    assert served.checks.is_complete
