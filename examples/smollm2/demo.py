"""Three runs of the same prompts, and what the command prints about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import jax
import numpy as np

import jax_kvcanary as kvc
from jax_kvcanary.pools import MHATokenToKVPool
from smollm2.engine import BeforeStep, Engine, Served, StepTime
from smollm2.model import ModelConfig, Params
from smollm2.planted_bug import DoubleHandout, EarlyFree
from smollm2.progress import Progress
from smollm2.scheduler import Limits, Request, Scheduler
from smollm2.tokenizer import Tokenizer, load_tokenizer
from smollm2.weights import load_params, model_config, open_gguf

# The pool is small on purpose: all prompts and answers together do not fit.
LIMITS = Limits(num_slots=176, max_batch=8, max_seq_len=128, chunk=24, token_buckets=(8, 64))
NEW_TOKENS = 24
PLANT_AT_STEP = 16

_TEACHER = (
    "<|im_start|>system\nYou are a friendly teacher. Answer every question in one short sentence.<|im_end|>\n"
    "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
)

# (text, step at which it arrives)
PROMPTS: tuple[tuple[str, int], ...] = (
    ("The capital of France is", 0),
    (_TEACHER.format(question="Why is the sky blue?"), 0),
    (
        "The lighthouse keeper had lived on the island for thirty years. Every evening he climbed the narrow stairs, cleaned the great "
        "lamp with a soft cloth, filled it with oil, and lit it just as the sun went down. Ships passed far out on the water, and he "
        "wrote their names in a book. One night, in the middle of a storm, he saw",
        1,
    ),
    ("Once upon a time, in a small village by the sea,", 2),
    (_TEACHER.format(question="How many legs does a spider have?"), 4),
    ("def fibonacci(n):\n", 5),
    ("Water boils at 100 degrees Celsius. Water freezes at", 6),
    ("A recipe for pancakes. Ingredients: flour, milk, eggs,", 7),
)


@dataclass(frozen=True)
class Loaded:
    """The model and its tokenizer."""

    params: Params
    config: ModelConfig
    tokenizer: Tokenizer


@dataclass
class Verdict:
    """What was found wrong. Empty means that the demo may exit with 0."""

    problems: list[str] = field(default_factory=list)

    def expect(self, holds: bool, sentence: str) -> bool:
        """Note `sentence` as a problem unless `holds`."""
        if not holds:
            self.problems.append(sentence)
        return holds


def load(progress: bool = True) -> Loaded:
    """Open the GGUF file and load everything in it. `MissingDemoPackageError` where the demo's packages are missing."""
    reader = open_gguf()
    config = model_config(reader)
    shown = Progress("weights") if progress else None

    def tick(done: int, total: int) -> None:
        if shown is not None:
            shown.update(f"{done} of {total} tensors")

    params = load_params(reader, config, tick)
    jax.block_until_ready(params)
    if shown is not None:
        count = sum(leaf.size for leaf in jax.tree.leaves(params))
        shown.done(f"{count / 1e6:.1f} M parameters in {config.num_layers} layers")
    return Loaded(params, config, load_tokenizer(reader))


def make_requests(tokenizer: Tokenizer, new_tokens: int = NEW_TOKENS) -> list[Request]:
    """Fresh requests for `PROMPTS`, numbered from 1."""
    return [
        Request(rid, tuple(tokenizer.encode(text)), new_tokens, arrival_step)
        for rid, (text, arrival_step) in enumerate(PROMPTS, start=1)
    ]


def kv_bytes_equal(a: MHATokenToKVPool, b: MHATokenToKVPool) -> bool:
    """Whether two pools hold the same bytes in every slot but slot 0, which takes the dummy writes of padding."""
    return all(
        np.array_equal(np.asarray(x)[1:].view(np.uint8), np.asarray(y)[1:].view(np.uint8))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def decode_times(
    plain: Sequence[StepTime], checked: Sequence[StepTime], bucket: int
) -> tuple[list[float], list[float]]:
    """Seconds of the steps that decoded in both runs, in one static shape."""
    pairs = [
        (a.seconds, b.seconds)
        for a, b in zip(plain, checked, strict=True)
        if a.is_decode and b.is_decode and a.bucket == b.bucket == bucket
    ]
    return [a for a, _ in pairs], [b for _, b in pairs]


def run_demo(limits: Limits = LIMITS, new_tokens: int = NEW_TOKENS, plant_at_step: int = PLANT_AT_STEP) -> int:
    """Load, serve three times, print. Returns the exit code."""
    loaded = load()
    device = jax.devices()[0]
    print(f"SmolLM2-135M-Instruct, float32, JAX {jax.__version__} on {device.platform} ({device.device_kind})")
    sizes = " or ".join(map(str, limits.token_buckets))
    print(
        f"pool of {limits.num_slots} slots; {limits.max_batch} rows; chunks of {limits.chunk} tokens; steps of {sizes} tokens"
    )
    verdict = Verdict()
    off = Engine(loaded.params, loaded.config, limits, kvc.CanaryConfig(mode=kvc.CanaryMode.NONE))
    on = Engine(loaded.params, loaded.config, limits, kvc.CanaryConfig(mode=kvc.CanaryMode.RAISE))

    plain = _serve("run 1 of 3, no canary", off, loaded, new_tokens)
    try:
        checked = _serve("run 2 of 3, canary", on, loaded, new_tokens)
    except kvc.CanaryViolationError as error:
        print(f"\nThe canary reported a finding in a run without a planted bug:\n{error}")
        return 1
    _print_texts(checked, loaded.tokenizer)
    _print_work(checked, verdict)
    _print_checks(plain, checked, verdict)
    _print_times(plain, checked, limits, device.platform)

    bug = EarlyFree(plant_at_step)
    last_step = 0

    def plant(step: int, scheduler: Scheduler) -> None:
        nonlocal last_step
        last_step = step
        bug(step, scheduler)

    try:
        _serve("run 3 of 3, canary and planted bug", on, loaded, new_tokens, plant)
    except kvc.CanaryViolationError as error:
        _print_findings(bug.done, error, last_step, verdict)
    else:
        verdict.expect(False, "The planted bug was not reported.")

    print("\n== verdict")
    for problem in verdict.problems:
        print(f"FAILED: {problem}")
    if not verdict.problems:
        print("The run without a fault was silent, and the planted fault was caught.")
    return 1 if verdict.problems else 0


def _serve(
    label: str, engine: Engine, loaded: Loaded, new_tokens: int, before_step: BeforeStep | None = None
) -> Served:
    """One run, with its progress."""
    progress = Progress(label)
    requests = make_requests(loaded.tokenizer, new_tokens)

    def show(step: int, scheduler: Scheduler) -> None:
        tokens = sum(len(request.output) for request in requests)
        finished = sum(request.finished for request in requests)
        latest = max(scheduler.running, key=lambda request: len(request.output), default=None)
        text = "" if latest is None else repr(loaded.tokenizer.decode(latest.output))[-48:]
        progress.update(f"step {step}, {tokens} tokens, {finished} of {len(requests)} answers {text}")

    progress.announce("compiling")
    try:
        served = engine.serve(requests, stop_token=loaded.tokenizer.eos, before_step=before_step, after_step=show)
    except kvc.CanaryViolationError:
        progress.done("stopped by the canary")
        raise
    progress.done(f"{served.steps} steps, {sum(map(len, served.outputs.values()))} tokens")
    return served


def _print_texts(served: Served, tokenizer: Tokenizer) -> None:
    print("\n== texts")
    for rid, (prompt, _) in enumerate(PROMPTS, start=1):
        answer = tokenizer.decode(served.outputs[rid])
        shown = tokenizer.decode(tokenizer.encode(prompt))
        print(f"[{rid}] {_one_line(shown, keep_end=60)} →{_one_line(' ' + answer)}")


def _one_line(text: str, keep_end: int | None = None) -> str:
    line = text.replace("\n", "⏎")
    return line if keep_end is None or len(line) <= keep_end else "…" + line[-keep_end:]


def _print_work(served: Served, verdict: Verdict) -> None:
    stats = served.stats
    print("\n== what the run contained")
    print(f"{served.steps} steps; {stats.chunks} times a prompt was cut for a later chunk")
    print(
        f"{stats.shared_prefix_tokens} prompt tokens found in the radix tree; {stats.merged_slots} duplicate slots merged"
    )
    print(
        f"{stats.retractions} retractions, {stats.recomputed_tokens} tokens computed again; {stats.evicted_slots} cached slots evicted"
    )
    verdict.expect(stats.chunks > 0, "No prompt was prefilled in chunks.")
    verdict.expect(stats.shared_prefix_tokens > 0, "No prefix was shared.")
    verdict.expect(
        stats.retractions > 0 and stats.recomputed_tokens > 0, "No request was retracted and prefilled again."
    )


def _print_checks(plain: Served, checked: Served, verdict: Verdict) -> None:
    checks = checked.checks
    print("\n== what the canary checked")
    if not verdict.expect(checks is not None, "The canary was not installed."):
        return
    assert checks is not None
    for tag, launches in checks.launches.items():
        print(f"{tag}: {launches} launches, {checks.slots[tag]} records")
    print(
        f"each launch tag: {checks.expected_verified} records verified and {checks.expected_written} written in {checked.steps} steps, "
        "by the scheduler's count"
    )
    complete = verdict.expect(checks.is_complete, "The canary's counters differ from the scheduler's.")
    tokens = verdict.expect(plain.outputs == checked.outputs, "The tokens differ with and without the canary.")
    kv_bytes = verdict.expect(
        kv_bytes_equal(plain.pool, checked.pool), "The KV bytes differ with and without the canary."
    )
    print(
        f"counters as expected: {_yes(complete)}; tokens as without the canary: {_yes(tokens)}; KV bytes too: {_yes(kv_bytes)}"
    )
    print("findings: none")


def _yes(holds: bool) -> str:
    return "yes" if holds else "NO"


def _print_times(plain: Served, checked: Served, limits: Limits, platform: str) -> None:
    bucket = limits.token_buckets[0]
    pairs = decode_times(plain.times, checked.times, bucket)
    off, on = (1e3 * median(times) for times in pairs)
    print("\n== step time")
    difference = f"{on - off:+.2f} ms, {100 * (on / off - 1):+.1f} %"
    print(f"decode step of {bucket} tokens: {off:.2f} ms without the canary, {on:.2f} ms with it ({difference})")
    print(
        f"Medians over the same {len(pairs[0])} steps of both runs, from the call to the last result, the canary's host part included."
    )
    if platform == "cpu":
        print("On a CPU the canary and the model take turns on one pool of threads, and other processes disturb both.")


def _print_findings(
    planted: DoubleHandout | None, error: kvc.CanaryViolationError, last_step: int, verdict: Verdict
) -> None:
    print("\n== the planted bug")
    if planted is None:
        verdict.expect(False, f"The canary reported a finding before anything was planted: {error}")
        return
    print(
        f"planted at step {planted.step}: the allocator gives slot {planted.slot} to request {planted.thief}, "
        f"while request {planted.victim} holds it for position {planted.position}"
    )
    findings = sorted(error.violations, key=lambda violation: violation.step)
    for finding in findings:
        reason = " + ".join(_reasons(finding.fail_reason))
        print(
            f"caught: step {finding.step}, slot {finding.slot_idx}, position {finding.position}, {finding.launch_tag.name}: {reason}"
        )
    print(f"The host stopped at step {last_step}. The first report:")
    print(str(findings[0]))
    verdict.expect(
        any(finding.slot_idx == planted.slot for finding in findings),
        "No finding names the slot that was handed out twice.",
    )


def _reasons(reason: kvc.FailReason) -> list[str]:
    return [str(bit.name).lower().removesuffix("_mismatch") for bit in kvc.FailReason if bit in reason]
