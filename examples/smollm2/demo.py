"""The same prompts served with a canary, without one, and with a planted bug; and what the command prints about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

import jax
import numpy as np

import jax_kvcanary as kvc
from jax_kvcanary.explain import reason_text
from jax_kvcanary.pools import MHATokenToKVPool
from smollm2.engine import Engine, Run, Served
from smollm2.model import ModelConfig, Params
from smollm2.planted_bug import EarlyFree
from smollm2.progress import Progress
from smollm2.scheduler import Limits, Request
from smollm2.tokenizer import Tokenizer, load_tokenizer
from smollm2.weights import load_params, model_config, open_gguf

# The pool is small on purpose: all prompts and answers together do not fit.
LIMITS = Limits(num_slots=176, max_batch=8, max_seq_len=128, chunk=24, token_buckets=(8, 64))
NEW_TOKENS = 24
SWEEP_INTERVAL = 8
PLANT_AT_STEP = 17  # no step with a sweep, whose report would show the bug in its own step


@dataclass(frozen=True)
class Prompt:
    """A text to go on from, and the step at which it arrives. `shown` is what the demo prints of it."""

    text: str
    arrival_step: int
    shown: str


def _plain(text: str, arrival_step: int) -> Prompt:
    line = text.replace("\n", "⏎")
    return Prompt(text, arrival_step, line if len(line) <= 60 else "…" + line[-60:])


def _chat(question: str, arrival_step: int) -> Prompt:
    """A question behind a system prompt that all questions share."""
    system = "You are a friendly teacher. Answer every question in one short sentence."
    turns = (("system", system), ("user", question))
    text = "".join(f"<|im_start|>{who}\n{what}<|im_end|>\n" for who, what in turns) + "<|im_start|>assistant\n"
    return Prompt(text, arrival_step, f"(system prompt) {question}")


PROMPTS = (
    _plain("The capital of France is", 0),
    _chat("Why is the sky blue?", 0),
    _plain(
        "The lighthouse keeper had lived on the island for thirty years. Every evening he climbed the narrow stairs, cleaned the great "
        "lamp with a soft cloth, filled it with oil, and lit it just as the sun went down. Ships passed far out on the water, and he "
        "wrote their names in a book. One night, in the middle of a storm, he saw",
        1,
    ),
    _plain("Once upon a time, in a small village by the sea,", 2),
    _chat("How many legs does a spider have?", 4),
    _plain("def fibonacci(n):\n", 5),
    _plain("Water boils at 100 degrees Celsius. Water freezes at", 6),
    _plain("A recipe for pancakes. Ingredients: flour, milk, eggs,", 7),
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
        """Note `sentence` as a problem unless `holds`; returns `holds`."""
        if not holds:
            self.problems.append(sentence)
        return holds


def load(show_progress: bool = True) -> Loaded:
    """Open the GGUF file and load everything in it. `MissingDemoPackageError` where the demo's packages are missing."""
    progress = Progress("weights") if show_progress else None
    reader = open_gguf()
    config = model_config(reader)

    def tick(done: int, total: int) -> None:
        if progress is not None:
            progress.update(f"{done} of {total} tensors")

    params = load_params(reader, config, tick)
    if progress is not None:
        count = sum(leaf.size for leaf in jax.tree.leaves(params))
        progress.done(f"{count / 1e6:.1f} M parameters in {config.num_layers} layers")
    return Loaded(params, config, load_tokenizer(reader))


def make_requests(tokenizer: Tokenizer, new_tokens: int = NEW_TOKENS) -> list[Request]:
    """Fresh requests for `PROMPTS`, numbered from 1."""
    return [
        Request(rid, tuple(tokenizer.encode(prompt.text)), new_tokens, prompt.arrival_step) for rid, prompt in enumerate(PROMPTS, start=1)
    ]


def kv_bytes_equal(a: MHATokenToKVPool, b: MHATokenToKVPool) -> bool:
    """Whether two pools hold the same bytes in every slot but slot 0, which takes the dummy writes of padding."""
    return all(
        np.array_equal(np.asarray(x)[1:].view(np.uint8), np.asarray(y)[1:].view(np.uint8))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def decode_times(plain: Served, checked: Served, bucket: int) -> list[tuple[float, float]]:
    """Seconds without and with the canary of the steps that only decoded, in one static shape. The runs had one schedule."""
    return [
        (a.seconds, b.seconds) for a, b in zip(plain.times, checked.times, strict=True) if a.is_decode and a.bucket == b.bucket == bucket
    ]


def run_demo(limits: Limits = LIMITS, new_tokens: int = NEW_TOKENS, plant_at_step: int = PLANT_AT_STEP) -> int:
    """Load, serve, print. Returns the exit code."""
    loaded = load()
    device = jax.devices()[0]
    sizes = " or ".join(map(str, limits.token_buckets))
    print(f"SmolLM2-135M-Instruct, float32, JAX {jax.__version__} on {device.platform} ({device.device_kind})")
    print(f"pool of {limits.num_slots} slots; {limits.max_batch} rows; chunks of {limits.chunk} tokens; steps of {sizes} tokens")
    verdict = Verdict()
    off, on = (
        Engine(loaded.params, loaded.config, limits, kvc.CanaryConfig(mode=mode, sweep_interval=SWEEP_INTERVAL))
        for mode in (kvc.CanaryMode.NONE, kvc.CanaryMode.RAISE)
    )
    try:
        plain, checked = _serve_side_by_side(loaded, off, on, new_tokens)
    except kvc.CanaryViolationError as error:
        print(f"\nFAILED: the canary reported a finding although nothing was planted.\n{error}")
        return 1
    _print_texts(checked, loaded.tokenizer)
    _print_work(checked, verdict)
    _print_checks(plain, checked, verdict)
    _print_times(decode_times(plain, checked, limits.token_buckets[0]), limits.token_buckets[0], device.platform, verdict)
    _serve_with_bug(loaded, on, new_tokens, plant_at_step, verdict)

    print("\n== verdict")
    for problem in verdict.problems:
        print(f"FAILED: {problem}")
    if not verdict.problems:
        print("The run without a fault was silent, and the planted fault was caught.")
    return 1 if verdict.problems else 0


def _serve_side_by_side(loaded: Loaded, off: Engine, on: Engine, new_tokens: int) -> tuple[Served, Served]:
    """Serve without and with the canary, one step of each in turn: what else the machine does then disturbs both alike."""
    progress = Progress("serving with and without the canary")
    progress.announce("compiling")
    plain, checked = (Run(engine, make_requests(loaded.tokenizer, new_tokens), stop_token=loaded.tokenizer.eos) for engine in (off, on))
    more = True
    while more:
        more = plain.advance()
        more = checked.advance() or more
        progress.update(_progress_text(checked, loaded.tokenizer))
    served = plain.finish(), checked.finish()
    progress.done(f"{checked.steps} steps, {sum(map(len, served[1].outputs.values()))} tokens")
    return served


def _progress_text(run: Run, tokenizer: Tokenizer) -> str:
    tokens = sum(len(request.output) for request in run.requests)
    finished = sum(request.finished for request in run.requests)
    latest = max(run.scheduler.running, key=lambda request: len(request.output), default=None)
    text = "" if latest is None else f", …{tokenizer.decode(latest.output)[-30:]!r}"
    return f"step {run.steps}, {tokens} tokens, {finished} of {len(run.requests)} answers{text}"


def _print_texts(served: Served, tokenizer: Tokenizer) -> None:
    print("\n== texts")
    for rid, prompt in enumerate(PROMPTS, start=1):
        answer = tokenizer.decode(served.outputs[rid]).strip().replace("\n", "⏎")
        print(f"[{rid}] {prompt.shown} → {answer}")


def _print_work(served: Served, verdict: Verdict) -> None:
    stats = served.stats
    print("\n== what the run contained")
    print(f"{served.steps} steps; {stats.chunks} times a prompt was cut, the rest of it left to later steps")
    print(f"{stats.shared_prefix_tokens} prompt tokens found in the radix tree; {stats.merged_slots} duplicate slots merged into it")
    print(f"{stats.retractions} retractions, {stats.recomputed_tokens} tokens computed again; {stats.evicted_slots} cached slots evicted")
    verdict.expect(stats.chunks > 0, "No prompt was prefilled in chunks.")
    verdict.expect(stats.shared_prefix_tokens > 0, "No prefix was shared.")
    verdict.expect(stats.retractions > 0 and stats.recomputed_tokens > 0, "No request was retracted and prefilled again.")


def _print_checks(plain: Served, checked: Served, verdict: Verdict) -> None:
    checks = checked.checks
    print("\n== what the canary checked")
    if checks is None:
        verdict.expect(False, "The canary was not installed.")
        return
    for tag, launches in checks.launches.items():
        print(f"{tag}: {launches} launches, {checks.slots[tag]} records")
    print(f"The scheduler counts {checks.expected_verified} records to verify and {checks.expected_written} to write for HEAD and TAIL.")
    print(f"In {checks.expected_sweeps} sweeps, one every {SWEEP_INTERVAL} steps, its radix tree had {checks.expected_swept} records.")
    verdict.expect(checks.expected_swept > 0, "No sweep checked anything.")
    facts = (
        (checks.is_complete, "the launches and records are those that the scheduler counts"),
        (plain.outputs == checked.outputs, "the tokens are the same as without the canary"),
        (kv_bytes_equal(plain.pool, checked.pool), "the KV bytes are the same as without the canary"),
    )
    for holds, fact in facts:
        verdict.expect(holds, f"This does not hold: {fact}.")
        print(f"{'yes' if holds else 'NO '} {fact}")
    print("No finding.")


def _print_times(pairs: list[tuple[float, float]], bucket: int, platform: str, verdict: Verdict) -> None:
    print("\n== step time")
    if not verdict.expect(bool(pairs), "No step only decoded, so no step time was measured."):
        return
    off, on = (1e3 * median(times) for times in zip(*pairs, strict=True))
    difference = 1e3 * median(with_canary - without for without, with_canary in pairs)
    print(f"decode step of {bucket} tokens: {off:.2f} ms without the canary, {on:.2f} ms with it")
    print(f"median difference of a step and the same step with the canary: {difference:+.2f} ms ({100 * difference / off:+.1f} %)")
    print(f"Over {len(pairs)} steps of each run, taken in turn, from the call to the last result, the canary's host part included.")
    if platform == "cpu":
        print("On a CPU the canary shares one pool of threads with the model and whatever else runs: expect the figures to vary.")


def _serve_with_bug(loaded: Loaded, engine: Engine, new_tokens: int, plant_at_step: int, verdict: Verdict) -> None:
    """Serve with a bug in the allocator, and print what the canary says."""
    print("\n== the same prompts with a planted bug")
    progress = Progress("serving with a planted bug")
    bug = EarlyFree(plant_at_step)
    run = Run(engine, make_requests(loaded.tokenizer, new_tokens), stop_token=loaded.tokenizer.eos, before_step=bug)
    try:
        while run.advance():
            progress.update(_progress_text(run, loaded.tokenizer))
        run.finish()
    except kvc.CanaryViolationError as error:
        progress.done(f"stopped by the canary in step {run.steps}")
        _print_findings(bug, error, run.steps, verdict)
        return
    progress.done(f"{run.steps} steps")
    verdict.expect(False, "The planted bug was not reported." if bug.done else "The run was over before the bug was planted.")


def _print_findings(bug: EarlyFree, error: kvc.CanaryViolationError, stopped_at: int, verdict: Verdict) -> None:
    planted = bug.done
    if planted is None:
        verdict.expect(False, f"The canary reported a finding before anything was planted: {error}")
        return
    print(
        f"planted: in step {planted.step} the allocator hands out slot {planted.slot} to request {planted.thief}, "
        f"while request {planted.victim} still holds it for its position {planted.position}"
    )
    for finding in error.violations:
        reason = reason_text(finding.fail_reason)
        print(f"caught:  step {finding.step}, slot {finding.slot_idx}, position {finding.position}, {reason} ({finding.launch_tag.name})")
    print(f"The monitor handles a report when the next one comes, so serving stopped in step {stopped_at}. The first finding in full:")
    print(error.violations[0])
    verdict.expect(
        any(finding.slot_idx == planted.slot for finding in error.violations), "No finding names the slot that was handed out twice."
    )
