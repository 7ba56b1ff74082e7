"""Settings: ranges, types and texts of every field, and the environment they can come from."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

import jax_kvcanary as kvc

INT_FIELDS = {"ring_capacity": 1, "sweep_interval": 0, "stats_every_n_steps": 0, "verify_stride": 1}
FLAGS = ("enable_write_input_assert", "enable_verify_token_assert", "enable_v_half")

DEFAULTS = {
    "ring_capacity": 1024,
    "sweep_interval": 0,
    "real_kv_hash_mode": kvc.RealKvHashMode.PARTIAL,
    "enable_write_input_assert": False,
    "enable_verify_token_assert": False,
    "enable_v_half": True,
    "real_kv_layers": (0,),
    "stats_every_n_steps": 0,
    "verify_stride": 1,
}


def assert_raises(error, text, function, *args, **keywords):
    with pytest.raises(error) as caught:
        function(*args, **keywords)
    assert (type(caught.value), str(caught.value)) == (error, text)


def test_defaults():
    assert dataclasses.asdict(kvc.CanaryConfig("raise")) == {"mode": kvc.CanaryMode.RAISE, **DEFAULTS}


def test_mode_has_no_default():
    with pytest.raises(TypeError, match="mode"):
        kvc.CanaryConfig()


@pytest.mark.parametrize("mode", list(kvc.CanaryMode))
def test_mode_is_an_enumeration_or_its_text(mode):
    by_text = kvc.CanaryConfig(mode.value)
    assert by_text.mode is mode
    assert by_text == kvc.CanaryConfig(mode)
    assert hash(by_text) == hash(kvc.CanaryConfig(mode))


@pytest.mark.parametrize("hash_mode", list(kvc.RealKvHashMode))
def test_hash_mode_is_an_enumeration_or_its_number(hash_mode):
    by_number = kvc.CanaryConfig("log", real_kv_hash_mode=int(hash_mode))
    assert by_number.real_kv_hash_mode is hash_mode
    assert by_number == kvc.CanaryConfig("log", real_kv_hash_mode=hash_mode)


@pytest.mark.parametrize("bad", ["loud", "LOG", "", None, 1, True, b"log", ("log",)])
def test_bad_mode(bad):
    assert_raises(ValueError, f"`mode` is {bad!r}, but it must be one of 'none', 'log', 'raise'.", kvc.CanaryConfig, bad)


@pytest.mark.parametrize("bad", [3, -1, "all", None, True, False, 0.5])
def test_bad_hash_mode(bad):
    text = f"`real_kv_hash_mode` is {bad!r}, but it must be one of NONE (0), PARTIAL (1), ALL (2)."
    assert_raises(ValueError, text, kvc.CanaryConfig, "log", real_kv_hash_mode=bad)


@pytest.mark.parametrize(("name", "low"), INT_FIELDS.items())
def test_int_ranges(name, low):
    for value in (low, 2**31 - 1, np.int64(7)):
        assert getattr(kvc.CanaryConfig("log", **{name: value}), name) == value
    for value in (low - 1, -(2**31), 2**31):
        text = f"`{name}` is {value}, but it must be between {low} and 2147483647."
        assert_raises(ValueError, text, kvc.CanaryConfig, "log", **{name: value})


@pytest.mark.parametrize("name", INT_FIELDS)
@pytest.mark.parametrize(("bad", "shown"), [(1.0, "1.0 of type float"), ("7", "'7' of type str"), (True, "True of type bool")])
def test_int_types(name, bad, shown):
    assert_raises(TypeError, f"`{name}` is {shown}, but it must be an int.", kvc.CanaryConfig, "log", **{name: bad})


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("bad", [0, 1, None, "true", np.True_])
def test_flag_types(name, bad):
    assert_raises(TypeError, f"`{name}` is {bad!r}, but it must be True or False.", kvc.CanaryConfig, "log", **{name: bad})


@pytest.mark.parametrize("layers", [(0,), [3, -1], (0, 1, 2, -(2**31) + 1), range(2, 5), np.array([5, -7])])
def test_layers_become_a_tuple(layers):
    got = kvc.CanaryConfig("log", real_kv_layers=layers).real_kv_layers
    assert type(got) is tuple
    assert got == tuple(layers)
    assert all(type(layer) is int for layer in got)


@pytest.mark.parametrize(
    ("layers", "error", "text"),
    [
        ((), ValueError, "`real_kv_layers` has 0 layers, but it must name between 1 and 4."),
        ((0, 1, 2, 3, 4), ValueError, "`real_kv_layers` has 5 layers, but it must name between 1 and 4."),
        (3, TypeError, "`real_kv_layers` is 3, but it must be a tuple of layer numbers."),
        ("0", TypeError, "`real_kv_layers` is '0', but it must be a tuple of layer numbers."),
        (None, TypeError, "`real_kv_layers` is None, but it must be a tuple of layer numbers."),
        ((0, 1.0), TypeError, "`real_kv_layers[1]` is 1.0 of type float, but it must be an int."),
        ((True,), TypeError, "`real_kv_layers[0]` is True of type bool, but it must be an int."),
        ((0, 2**31), ValueError, "`real_kv_layers[1]` is 2147483648, but it must be between -2147483647 and 2147483647."),
        ((-(2**31),), ValueError, "`real_kv_layers[0]` is -2147483648, but it must be between -2147483647 and 2147483647."),
    ],
)
def test_bad_layers(layers, error, text):
    assert_raises(error, text, kvc.CanaryConfig, "log", real_kv_layers=layers)


def test_configurations_are_hashable_values():
    config = kvc.CanaryConfig("log", real_kv_layers=[0, -1], ring_capacity=17)
    same = kvc.CanaryConfig(kvc.CanaryMode.LOG, real_kv_layers=(0, -1), ring_capacity=17)
    assert (config, hash(config)) == (same, hash(same))
    changed = [
        {"mode": "raise"},
        {"ring_capacity": 19},
        {"sweep_interval": 1},
        {"real_kv_hash_mode": 2},
        {"enable_write_input_assert": True},
        {"enable_verify_token_assert": True},
        {"enable_v_half": False},
        {"real_kv_layers": (0,)},
        {"stats_every_n_steps": 1},
        {"verify_stride": 3},
    ]
    assert len({config, *(dataclasses.replace(config, **change) for change in changed)}) == 1 + len(changed)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.ring_capacity = 3


GOOD_ENVIRONMENTS = [
    ("MODE", "none", {"mode": kvc.CanaryMode.NONE}),
    ("MODE", " Raise\n", {"mode": kvc.CanaryMode.RAISE}),
    ("MODE", "LOG", {"mode": kvc.CanaryMode.LOG}),
    ("RING_CAPACITY", "1", {"ring_capacity": 1}),
    ("RING_CAPACITY", "\t4099 ", {"ring_capacity": 4099}),
    ("SWEEP_INTERVAL", "0", {"sweep_interval": 0}),
    ("SWEEP_INTERVAL", "+17", {"sweep_interval": 17}),
    ("REAL_DATA", "none", {"real_kv_hash_mode": kvc.RealKvHashMode.NONE}),
    ("REAL_DATA", "Partial", {"real_kv_hash_mode": kvc.RealKvHashMode.PARTIAL}),
    ("REAL_DATA", " ALL ", {"real_kv_hash_mode": kvc.RealKvHashMode.ALL}),
    ("REAL_KV_LAYERS", "7", {"real_kv_layers": (7,)}),
    ("REAL_KV_LAYERS", " 0, 3 ,-1", {"real_kv_layers": (0, 3, -1)}),
    ("STATS_EVERY_N_STEPS", "101", {"stats_every_n_steps": 101}),
    ("VERIFY_STRIDE", "7", {"verify_stride": 7}),
    *(
        ("ENABLE_WRITE_INPUT_ASSERT", text, {"enable_write_input_assert": value})
        for value, texts in ((True, ("1", "true", "Yes", " ON ")), (False, ("0", "FALSE", "no", "off\n")))
        for text in texts
    ),
    ("ENABLE_VERIFY_TOKEN_ASSERT", "1", {"enable_verify_token_assert": True}),
    ("ENABLE_VERIFY_TOKEN_ASSERT", "off", {"enable_verify_token_assert": False}),
    ("ENABLE_V_HALF", "0", {"enable_v_half": False}),
    ("ENABLE_V_HALF", "yes", {"enable_v_half": True}),
]


@pytest.mark.parametrize(("suffix", "text", "fields"), GOOD_ENVIRONMENTS)
def test_from_env(monkeypatch, suffix, text, fields):
    want = kvc.CanaryConfig(**{"mode": "none", **fields})
    assert kvc.CanaryConfig.from_env({f"KVCANARY_{suffix}": text, f"OTHER_{suffix}": "?"}) == want
    monkeypatch.setenv(f"KVCANARY_{suffix}", text)
    assert kvc.CanaryConfig.from_env() == want


def test_from_env_reads_all_variables_together():
    environ = {
        "KVCANARY_MODE": "log",
        "KVCANARY_RING_CAPACITY": "31",
        "KVCANARY_SWEEP_INTERVAL": "5",
        "KVCANARY_REAL_DATA": "all",
        "KVCANARY_ENABLE_WRITE_INPUT_ASSERT": "1",
        "KVCANARY_ENABLE_VERIFY_TOKEN_ASSERT": "1",
        "KVCANARY_ENABLE_V_HALF": "0",
        "KVCANARY_REAL_KV_LAYERS": "1,-2",
        "KVCANARY_STATS_EVERY_N_STEPS": "3",
        "KVCANARY_VERIFY_STRIDE": "5",
    }
    want = kvc.CanaryConfig("log", 31, 5, kvc.RealKvHashMode.ALL, True, True, False, (1, -2), 3, 5)
    assert kvc.CanaryConfig.from_env(environ) == want


def test_from_env_of_nothing(monkeypatch):
    for suffix, _, _ in GOOD_ENVIRONMENTS:
        monkeypatch.delenv(f"KVCANARY_{suffix}", raising=False)
    assert kvc.CanaryConfig.from_env() == kvc.CanaryConfig.from_env({}) == kvc.CanaryConfig("none")


FLAG_RULE = "1, true, yes or on, or 0, false, no or off"
LAYERS_RULE = "a comma-separated list of layer numbers, such as 0,-1"


@pytest.mark.parametrize(
    ("suffix", "text", "shown", "rule"),
    [
        ("MODE", "loud", "'loud'", "none, log or raise"),
        ("MODE", "", "''", "none, log or raise"),
        ("RING_CAPACITY", " many ", "'many'", "a whole number"),
        ("RING_CAPACITY", "1.5", "'1.5'", "a whole number"),
        ("RING_CAPACITY", "", "''", "a whole number"),
        ("SWEEP_INTERVAL", "0x10", "'0x10'", "a whole number"),
        ("STATS_EVERY_N_STEPS", "1e3", "'1e3'", "a whole number"),
        ("VERIFY_STRIDE", "half", "'half'", "a whole number"),
        ("REAL_DATA", "some", "'some'", "none, partial or all"),
        ("REAL_DATA", "1", "'1'", "none, partial or all"),
        ("ENABLE_WRITE_INPUT_ASSERT", "2", "'2'", FLAG_RULE),
        ("ENABLE_VERIFY_TOKEN_ASSERT", "y", "'y'", FLAG_RULE),
        ("ENABLE_V_HALF", " Maybe", "'Maybe'", FLAG_RULE),
        ("REAL_KV_LAYERS", "0,", "'0,'", LAYERS_RULE),
        ("REAL_KV_LAYERS", "0;1", "'0;1'", LAYERS_RULE),
        ("REAL_KV_LAYERS", "", "''", LAYERS_RULE),
    ],
)
def test_from_env_of_what_cannot_be_read(suffix, text, shown, rule):
    message = f"`KVCANARY_{suffix}` is {shown}, but it must be {rule}."
    assert_raises(ValueError, message, kvc.CanaryConfig.from_env, {f"KVCANARY_{suffix}": text})


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        ("RING_CAPACITY", "0"),
        ("SWEEP_INTERVAL", "-1"),
        ("STATS_EVERY_N_STEPS", str(2**31)),
        ("VERIFY_STRIDE", "0"),
        ("REAL_KV_LAYERS", "0,1,2,3,4"),
    ],
)
def test_from_env_out_of_range_names_the_variable(suffix, text):
    with pytest.raises(ValueError, match=rf"`KVCANARY_{suffix}`"):
        kvc.CanaryConfig.from_env({f"KVCANARY_{suffix}": text})


def test_nothing_else_reads_the_environment():
    package = Path(kvc.__file__).parent
    kernels = Path(kvc.pallas.__file__).parent
    files = [*package.rglob("*.py"), *kernels.rglob("*.py")]
    assert len(files) > 20
    readers = {path.name for path in files if re.search(r"os\.environ|getenv|import environ", path.read_text())}
    assert readers == {"config.py"}


@pytest.mark.parametrize(
    ("slots", "verify"), [(1, 3), (1021, 3063), (2**31 - 1, 2**31 - 2), (715827882, 2147483646), (715827883, 2147483646)]
)
def test_capacities_from_pool(slots, verify):
    got = kvc.CanaryLaunchCapacities.from_pool(slots, 7)
    assert got == kvc.CanaryLaunchCapacities(verify_capacity=verify, write_req_capacity=7)
    assert hash(got) == hash(kvc.CanaryLaunchCapacities(verify, 7))


def test_capacities_from_pool_with_a_verify_capacity():
    assert kvc.CanaryLaunchCapacities.from_pool(1021, 7, verify_capacity=11) == kvc.CanaryLaunchCapacities(11, 7)


@pytest.mark.parametrize("name", ["verify_capacity", "write_req_capacity"])
def test_bad_capacities(name):
    good = {"verify_capacity": 5, "write_req_capacity": 3}
    for value in (0, -1, 2**31 - 1):
        text = f"`{name}` is {value}, but it must be between 1 and 2147483646."
        assert_raises(ValueError, text, kvc.CanaryLaunchCapacities, **{**good, name: value})
    text = f"`{name}` is None of type NoneType, but it must be an int."
    assert_raises(TypeError, text, kvc.CanaryLaunchCapacities, **{**good, name: None})


@pytest.mark.parametrize(
    ("args", "error", "text"),
    [
        ((0, 3), ValueError, "`pool_slot_count` is 0, but it must be between 1 and 2147483647."),
        ((2**31, 3), ValueError, "`pool_slot_count` is 2147483648, but it must be between 1 and 2147483647."),
        ((5.0, 3), TypeError, "`pool_slot_count` is 5.0 of type float, but it must be an int."),
        ((5, 0), ValueError, "`max_batch_size` is 0, but it must be between 1 and 2147483646."),
        ((5, "3"), TypeError, "`max_batch_size` is '3' of type str, but it must be an int."),
    ],
)
def test_bad_arguments_of_from_pool(args, error, text):
    assert_raises(error, text, kvc.CanaryLaunchCapacities.from_pool, *args)
