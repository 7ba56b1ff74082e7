"""Settings of fault injection: ranges, types and texts, and the environment they can come from."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

import jax_kvcanary as kvc
from jax_kvcanary import PerturbConfig, PerturbKind, PoolKind
from jax_kvcanary.config import _PERTURB_ENV_FIELDS

KINDS = "req_to_token, next_tokens, position, live_kv, written_kv, cached_kv"


def assert_raises(error, text, function, *args, **keywords):
    with pytest.raises(error) as caught:
        function(*args, **keywords)
    assert (type(caught.value), str(caught.value)) == (error, text)


def test_defaults_change_nothing():
    config = PerturbConfig()
    assert dataclasses.astuple(config) == ((), 1.0, 0, 0, PoolKind.FULL)


def test_values_become_their_types():
    config = PerturbConfig(["live_kv", PerturbKind.POSITION], 1, np.int64(3), 5, 1)
    assert config == PerturbConfig((PerturbKind.LIVE_KV, PerturbKind.POSITION), 1.0, 3, 5, PoolKind.SWA)
    assert hash(config) == hash(dataclasses.replace(config))
    assert [type(value) for value in (config.kinds, config.probability, config.target_group)] == [tuple, float, PoolKind]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1


@pytest.mark.parametrize(
    ("values", "error", "text"),
    [
        ({"kinds": "live_kv"}, TypeError, "`kinds` is 'live_kv', but it must be a tuple of kinds of faults."),
        ({"kinds": 3}, TypeError, "`kinds` is 3, but it must be a tuple of kinds of faults."),
        (
            {"kinds": ("live_kv", "kv")},
            ValueError,
            f"`kinds[1]` is 'kv', but it must be one of {', '.join(repr(kind) for kind in KINDS.split(', '))}.",
        ),
        (
            {"kinds": ("position", "live_kv", "position")},
            ValueError,
            "`kinds` names 'position' 2 times, but it must name each kind once at most.",
        ),
        ({"probability": -0.1}, ValueError, "`probability` is -0.1, but it must be between 0 and 1."),
        ({"probability": 1.5}, ValueError, "`probability` is 1.5, but it must be between 0 and 1."),
        ({"probability": float("nan")}, ValueError, "`probability` is nan, but it must be between 0 and 1."),
        ({"probability": True}, TypeError, "`probability` is True of type bool, but it must be a number."),
        ({"probability": "1"}, TypeError, "`probability` is '1' of type str, but it must be a number."),
        ({"seed": -1}, ValueError, "`seed` is -1, but it must be between 0 and 2147483647."),
        ({"seed": 1.0}, TypeError, "`seed` is 1.0 of type float, but it must be an int."),
        ({"warmup_steps": -1}, ValueError, "`warmup_steps` is -1, but it must be between 0 and 2147483647."),
        ({"target_group": 2}, ValueError, "`target_group` is 2, but it must be one of FULL (0), SWA (1)."),
        ({"target_group": "full"}, ValueError, "`target_group` is 'full', but it must be one of FULL (0), SWA (1)."),
    ],
)
def test_bad_values(values, error, text):
    assert_raises(error, text, PerturbConfig, **values)


GOOD_ENVIRONMENTS = [
    ("KINDS", "none", {}),
    ("KINDS", " NONE ", {}),
    ("KINDS", "live_kv", {"kinds": ("live_kv",)}),
    ("KINDS", " Cached_KV , position,req_to_token", {"kinds": ("cached_kv", "position", "req_to_token")}),
    ("KINDS", "next_tokens,written_kv", {"kinds": ("next_tokens", "written_kv")}),
    ("PROBABILITY", "0", {"probability": 0.0}),
    ("PROBABILITY", " 1e-3 ", {"probability": 0.001}),
    ("SEED", "17", {"seed": 17}),
    ("WARMUP_STEPS", "100", {"warmup_steps": 100}),
    ("TARGET_GROUP", "full", {}),
    ("TARGET_GROUP", "Swa", {"target_group": PoolKind.SWA}),
]


@pytest.mark.parametrize(("suffix", "text", "fields"), GOOD_ENVIRONMENTS)
def test_from_env(monkeypatch, suffix, text, fields):
    want = PerturbConfig(**fields)
    assert PerturbConfig.from_env({f"KVCANARY_PERTURB_{suffix}": text, f"KVCANARY_{suffix}": "?"}) == want
    monkeypatch.setenv(f"KVCANARY_PERTURB_{suffix}", text)
    assert PerturbConfig.from_env() == want


def test_from_env_reads_all_variables_together():
    environ = {
        "KVCANARY_PERTURB_KINDS": "live_kv",
        "KVCANARY_PERTURB_PROBABILITY": "0.25",
        "KVCANARY_PERTURB_SEED": "3",
        "KVCANARY_PERTURB_WARMUP_STEPS": "7",
        "KVCANARY_PERTURB_TARGET_GROUP": "swa",
    }
    assert PerturbConfig.from_env(environ) == PerturbConfig(("live_kv",), 0.25, 3, 7, PoolKind.SWA)
    assert {f"KVCANARY_{suffix}" for suffix in _PERTURB_ENV_FIELDS} == set(environ)


def test_from_env_of_nothing(monkeypatch):
    for suffix in _PERTURB_ENV_FIELDS:
        monkeypatch.delenv(f"KVCANARY_{suffix}", raising=False)
    assert PerturbConfig.from_env() == PerturbConfig.from_env({}) == PerturbConfig()


@pytest.mark.parametrize(
    ("suffix", "text", "rest"),
    [
        ("KINDS", "kv", f"is 'kv', but it must be none, or a comma-separated list of {KINDS}."),
        ("KINDS", "live_kv;position", f"is 'live_kv;position', but it must be none, or a comma-separated list of {KINDS}."),
        ("KINDS", "", f"is '', but it must be none, or a comma-separated list of {KINDS}."),
        ("KINDS", "position,position", "names 'position' 2 times, but it must name each kind once at most."),
        ("PROBABILITY", "often", "is 'often', but it must be a number."),
        ("PROBABILITY", "50%", "is '50%', but it must be a number."),
        ("PROBABILITY", "2", "is 2.0, but it must be between 0 and 1."),
        ("SEED", "x", "is 'x', but it must be a whole number."),
        ("SEED", "-1", "is -1, but it must be between 0 and 2147483647."),
        ("WARMUP_STEPS", "1.5", "is '1.5', but it must be a whole number."),
        ("TARGET_GROUP", "0", "is '0', but it must be full or swa."),
    ],
)
def test_from_env_of_what_cannot_be_read(suffix, text, rest):
    name = f"KVCANARY_PERTURB_{suffix}"
    assert_raises(ValueError, f"`{name}` {rest}", PerturbConfig.from_env, {name: text})


def test_every_value_is_documented():
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    section = re.search(r"### Fault injection\n(.*?)\n### ", text, flags=re.DOTALL).group(1)
    for suffix, (field, _) in _PERTURB_ENV_FIELDS.items():
        assert f"`KVCANARY_{suffix}`" in section
        assert f"| `{field}` |" in section
    for kind in PerturbKind:
        assert f"| `{kind.value}` |" in section
    assert {field.name for field in dataclasses.fields(PerturbConfig)} == {field for field, _ in _PERTURB_ENV_FIELDS.values()}
    assert kvc.PerturbConfig is PerturbConfig
