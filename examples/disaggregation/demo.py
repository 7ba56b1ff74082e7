"""The same prompts in one process, in two, and in two with something lost on the way; and what the command prints about it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_

from disaggregation import wire
from disaggregation.decode import DECODE_SLOTS, Outcome, admit_here, serve, start_prefill
from disaggregation.prefill import PREFILL_SLOTS
from disaggregation.tiny import CANARY, make_params
from jax_kvcanary import FailReason
from jax_kvcanary.violations import reason_text

PROMPTS = (b"KV goes a", b"long way over", b"a wire")
NEW_TOKENS = 8
LOST_KV = wire.Loss(request=1, layer=1, start=4, stop=8)
LOST_RECORD = wire.Loss(request=2)

#: Phase, slot and reasons of a violation.
Finding = tuple[str, int, FailReason]

#: What the record of a slot that nothing was inserted at differs in.
_NOT_INSERTED = FailReason.VERIFY_CHAIN_HASH_MISMATCH | FailReason.VERIFY_POSITION_MISMATCH | FailReason.VERIFY_REAL_KV_HASH_MISMATCH


def run_demo(prefill_command: Sequence[str]) -> int:
    """All runs. Returns the exit code: 0 only if the sound one was silent and both losses were caught where they happened."""
    params = make_params()
    prompts = [list(prompt) for prompt in PROMPTS]
    print(f"{len(prompts)} prompts of {', '.join(str(len(prompt)) for prompt in prompts)} tokens, {NEW_TOKENS} new tokens each\n")

    print("one process")
    alone = serve(params, prompts, NEW_TOKENS, admit_here)
    _print_tokens(alone)

    with start_prefill(prefill_command) as prefiller:
        print(
            f"\ntwo processes: prefill in {prefiller.process.pid} with {PREFILL_SLOTS} slots, decode in {os.getpid()} with {DECODE_SLOTS}; "
            f"canary in mode {CANARY.mode.value} in both\n"
        )
        sound = serve(params, prompts, NEW_TOKENS, prefiller.admit())
        slots_there = dict(prefiller.slots)
        lost_kv, lost_record = (serve(params, prompts, NEW_TOKENS, prefiller.admit(loss)) for loss in (LOST_KV, LOST_RECORD))

    print("a. everything arrives")
    problems = _report_sound(sound, alone, slots_there)
    what = f"the KV of positions {LOST_KV.start} to {LOST_KV.stop - 1} in layer {LOST_KV.layer}"
    print(f"\nb. request {LOST_KV.request} loses {what}: zeros arrive")
    problems += _report_loss(lost_kv, LOST_KV.request, _wanted_for_kv)
    print(f"\nc. request {LOST_RECORD.request} loses the records of its last token: they are not inserted")
    problems += _report_loss(lost_record, LOST_RECORD.request, _wanted_for_record)

    print("\n" + ("OK: a was silent and right, b and c were caught at the first step" if not problems else "\n".join(problems)))
    return 1 if problems else 0


def _wanted_for_kv(slots: Sequence[int]) -> set[Finding]:
    """The lost bytes and nothing else, seen by the phase that reads KV."""
    return {("TAIL", slot, FailReason.VERIFY_REAL_KV_HASH_MISMATCH) for slot in slots[LOST_KV.start : LOST_KV.stop]}


def _wanted_for_record(slots: Sequence[int]) -> set[Finding]:
    """The slot of the last token, and the one written behind it, whose position follows from nothing."""
    last = len(PROMPTS[LOST_RECORD.request]) - 1
    reasons = {slots[last]: _NOT_INSERTED, slots[last + 1]: FailReason.WRITE_POSITION_MISMATCH}
    return {(phase, slot, reason) for phase in ("HEAD", "TAIL") for slot, reason in reasons.items()}


def _report_sound(outcome: Outcome, alone: Outcome, slots_there: dict[int, list[int]]) -> list[str]:
    if outcome.error is not None or alone.error is not None:
        return [f"WRONG: a sound run has findings:\n{outcome.error or alone.error}"]
    for request, there in slots_there.items():
        here = outcome.slots[request][: len(there)]
        print(f"  request {request}: slots {' '.join(map(str, there))} there, {' '.join(map(str, here))} here")
    _print_tokens(outcome)
    if outcome.tokens != alone.tokens:
        return ["WRONG: two processes do not say what one says"]
    print("  silent, and the same tokens as in one process")
    return []


def _report_loss(outcome: Outcome, request: int, wanted_at: Callable[[Sequence[int]], set[Finding]]) -> list[str]:
    """Print what was found. A problem unless it is just what the loss makes of the request's slots, at the first step that reads them."""
    if outcome.error is None:
        return ["WRONG: a loss was not caught"]
    violations, step = outcome.error.violations, outcome.first_step.get(request)
    found: set[Finding] = {(violation.launch_tag.name.split("_")[0], violation.slot_idx, violation.fail_reason) for violation in violations}
    steps = sorted({violation.step or 0 for violation in violations})
    slots = sorted({violation.slot_idx for violation in violations})
    reasons = reduce(or_, (violation.fail_reason for violation in violations))
    print(f"  caught at step {', '.join(map(str, steps))}; the first that reads request {request} is {step}")
    print(f"  {reason_text(reasons)} at slots {', '.join(map(str, slots))}; the first of {len(violations)} findings:")
    print("  | " + str(violations[0]).replace("\n", "\n  | "))
    if steps != [step] or found != wanted_at(outcome.slots[request]):
        return [f"WRONG: these are not the findings that the loss in request {request} should give: {sorted(found)}"]
    return []


def _print_tokens(outcome: Outcome) -> None:
    for request, tokens in outcome.tokens.items():
        print(f"  request {request}: {tokens}")
