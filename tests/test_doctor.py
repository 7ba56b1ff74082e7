"""The doctor: what it says where all is well, and where something is broken."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_kvcanary as kvc
from jax_kvcanary import _ffi, cli
from jax_kvcanary.cli import doctor, trial

(DEFAULT,) = jnp.zeros(()).devices()
HERE = f"{DEFAULT.platform}:{DEFAULT.id}"
TARGETS = ["kvcanary_verify", "kvcanary_write", "kvcanary_phase", "kvcanary_report_phase"]


@pytest.fixture
def ask(capsys):
    """Exit code and text of the command."""

    def call(*arguments):
        code = cli.main(["doctor", *arguments])
        return code, capsys.readouterr().out

    return call


@pytest.fixture
def ask_json(ask):
    """Exit code and report of the command, which have to agree; every problem has a sentence and a remedy."""

    def call(*arguments):
        code, text = ask("--json", *arguments)
        report = json.loads(text)
        assert code == (0 if report["can_run"] else 1)
        for check in report["checks"]:
            assert check["text"].endswith(".")
            assert (check["remedy"] is None) == check["ok"]
            assert check["ok"] or check["remedy"].endswith(".")
        return report

    return call


def problems(report):
    """Name, text and remedy of the checks that are not ok."""
    return [(check["name"], check["text"], check["remedy"]) for check in report["checks"] if not check["ok"]]


def check_of(report, name):
    (check,) = [check for check in report["checks"] if check["name"] == name]
    return check


def joined(text):
    return " ".join(text.split())


# All is well.


def test_a_sound_installation(ask):
    code, text = ask()
    assert code == 0
    lines = text.splitlines()
    assert lines[-1] == f"The canary can run on the default device, {HERE}."
    assert re.search(rf"^  jax +{re.escape(importlib.metadata.version('jax'))}$", text, re.MULTILINE)
    assert re.search(rf"^  jax-kvcanary +{re.escape(kvc.__version__)}$", text, re.MULTILINE)
    assert re.search(rf"^  {HERE} +.*, the default$", text, re.MULTILINE)
    assert re.search(rf"^  cpu +{', '.join(TARGETS)}$", text, re.MULTILINE)
    assert f"  ok       custom calls on {HERE}: A small write and verify gave the right answer." in lines
    assert f" ok plan on {HERE}: A small plan " in joined(text)
    assert max(map(len, lines)) <= 120


def test_a_sound_installation_as_json(ask_json):
    report = ask_json("--slots", "1000")
    assert report["can_run"]
    assert [problem for problem in problems(report) if problem[0] != "driver"] == []
    assert report["default_device"] == HERE
    assert report["versions"]["jaxlib"] == importlib.metadata.version("jaxlib")
    assert [device["name"] for device in report["devices"] if device["default"]] == [HERE]
    assert report["targets"] == {"cpu": TARGETS, "CUDA": TARGETS if _ffi.CUDA_MISSING is None else []}
    assert report["cuda_missing"] == _ffi.CUDA_MISSING
    platforms = dict.fromkeys(device["platform"] for device in report["devices"])
    names = [check["name"].split(":")[0] for check in report["checks"] if check["name"] != "driver"]
    runs = [f"{what} on {name}" for name in platforms for what in ("custom calls", "plan")]
    assert names == ["versions", "package", "devices", "targets", *runs, "memory"]


def test_memory_is_what_a_canary_takes(ask, ask_json):
    slots = 1009
    pool = kvc.pools.MHATokenToKVPool.allocate(num_slots=slots, num_layers=1, num_kv_heads=1, head_dim=8)
    capacities = kvc.CanaryLaunchCapacities.from_pool(slots, 1)
    _, state = kvc.install_canary(pool, kvc.CanaryConfig("log"), capacities=capacities)
    verify = kvc.plan(kvc.PlanInput(*np.ones((3, 1), np.int32)), np.ones((2, 3), np.int32), verify_capacity=capacities.verify_capacity)
    entries = [leaf for leaf in jax.tree.leaves(verify.verify) if leaf.size == capacities.verify_capacity]
    memory = ask_json("--slots", str(slots))["memory"]
    assert memory == {
        "slots": slots,
        "records": sum(leaf.nbytes for leaf in jax.tree.leaves(state.groups)),
        "plan": sum(leaf.nbytes for leaf in entries),
        "log": sum(leaf.nbytes for leaf in jax.tree.leaves(state.device_state)),
    }
    text = "A canary beside K and V of 1,048,576 slots takes 128.0 MiB of records, 48.0 MiB for a plan and 0.1 MiB for its log."
    assert text in joined(ask("--slots", str(2**20))[1])
    assert ask_json()["memory"] is None


def test_as_a_process(tmp_path):
    done = subprocess.run([sys.executable, "-m", "jax_kvcanary", "doctor", "--json"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["default_device"] == HERE


# Something is broken.


@dataclass(frozen=True)
class OtherDevice:
    """A device that nothing can run on."""

    platform: str
    id: int = 0
    device_kind: str = "a kind"


def pretend(monkeypatch, device):
    """The default device is this one, and the real one comes behind it."""

    def check_devices(devices, report):
        devices[:] = [device, DEFAULT]
        report.devices = [
            {"name": doctor._name(each), "platform": each.platform, "kind": "", "default": each is device} for each in devices
        ]
        return doctor.Check("devices", True, "There are two.", decides=True)

    monkeypatch.setattr(doctor, "check_devices", check_devices)


def test_a_gpu_without_the_cuda_module(monkeypatch, ask, ask_json):
    missing = kvc._cpu.CUDA_MISSING
    pretend(monkeypatch, OtherDevice("cuda"))
    monkeypatch.setattr(_ffi, "CUDA_MISSING", missing)
    monkeypatch.setattr(_ffi, "TARGETS", {**_ffi.TARGETS, "CUDA": ()})
    monkeypatch.setattr(trial, "plan_kernels", lambda _: None)
    report = ask_json()
    assert not report["can_run"]
    assert report["cuda_missing"] == missing
    assert problems(report)[0] == (
        "custom calls on cuda:0",
        "jax_kvcanary was installed without its CUDA module, so its custom calls cannot run on a GPU.",
        "Install the CUDA toolkit's nvcc and reinstall jax_kvcanary with -C cmake.define.KVCANARY_CUDA=ON.",
    )
    assert check_of(report, "plan on cuda:0")["text"] == "A small plan by the Triton kernels gave the right answer."
    code, text = ask()
    assert code == 1
    assert text.splitlines()[-1] == "The canary cannot run on the default device, cuda:0."
    assert "PROBLEM custom calls on cuda:0: jax_kvcanary was installed without its CUDA module" in joined(text)
    assert "What to do: Install the CUDA toolkit's nvcc and reinstall jax_kvcanary" in joined(text)


def test_kernels_that_do_not_compile(monkeypatch, ask_json):
    def refuse(device):
        raise NotImplementedError("no\n  such instruction")

    pretend(monkeypatch, OtherDevice("gpu", id=3))
    monkeypatch.setattr(_ffi, "CUDA_MISSING", None)
    monkeypatch.setattr(trial, "custom_calls", lambda _: None)
    monkeypatch.setattr(trial, "plan_kernels", refuse)
    name, text, remedy = problems(ask_json())[0]
    assert (name, text) == ("plan on gpu:3", "NotImplementedError: no such instruction.")
    assert remedy == (
        "The kernels are Pallas on Triton, which takes a GPU of compute capability 8.0 or above; install a supported jax for its CUDA: run "
        "`pip install '.[cuda12]'` or `pip install '.[cuda13]'` in the folder that holds pyproject.toml."
    )


def test_a_platform_that_nothing_was_written_for(monkeypatch, ask_json):
    pretend(monkeypatch, OtherDevice("tpu"))
    report = ask_json()
    assert not report["can_run"]
    assert problems(report)[0] == (
        "custom calls on tpu:0",
        "jax_kvcanary has no custom calls for the platform tpu.",
        "Keep the pool on a CPU or on an NVIDIA GPU.",
    )
    assert check_of(report, f"custom calls on {HERE}")["ok"]


def test_another_device_that_is_broken_is_no_obstacle(monkeypatch, ask_json):
    """Only the default device decides."""
    pretend(monkeypatch, DEFAULT)
    found = doctor.check_devices

    def one_more(devices, report):
        check = found(devices, report)
        devices[1:] = [OtherDevice("tpu")]
        return check

    monkeypatch.setattr(doctor, "check_devices", one_more)
    report = ask_json()
    assert report["can_run"]
    assert [name for name, _, _ in problems(report) if name != "driver"] == ["custom calls on tpu:0", "plan on tpu:0"]


def spoiled(function, spoil):
    return lambda *args, **options: spoil(function(*args, **options))


def wrong_slots(plan):
    return dataclasses.replace(plan, verify=dataclasses.replace(plan.verify, verify_slot_indices=plan.verify.verify_slot_indices + 1))


@pytest.mark.parametrize(
    ("name", "spoil", "check", "array"),
    [
        ("write_step", lambda out: (out[0].at[5, 9].add(1), out[1]), "custom calls", "records"),
        ("write_step", lambda out: (out[0] * 0 + 255, out[1]), "custom calls", "records"),
        (
            "verify_step",
            lambda state: jax.tree.map(lambda leaf: leaf * 0, state),
            "custom calls",
            "state.violation_log.violation_ring",
        ),
        ("plan", wrong_slots, "plan", "verify.verify_slot_indices"),
    ],
)
def test_a_wrong_answer(monkeypatch, ask_json, name, spoil, check, array):
    monkeypatch.setattr(trial, name, spoiled(getattr(trial, name), spoil))
    report = ask_json()
    assert not report["can_run"]
    found = check_of(report, f"{check} on {HERE}")
    assert f"ran, but its result differs from the NumPy reference in `{array}`." in found["text"]
    assert "pip install" in found["remedy"]


def test_the_small_run_finds_what_it_planted():
    """The byte that was changed is a finding, so that a verify that does nothing is a wrong answer."""
    states = []
    verify = trial.reference.verify_step

    def watched(*args, **options):
        states.append(verify(*args, **options))
        return states[-1]

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(trial.reference, "verify_step", watched)
        assert trial.custom_calls(DEFAULT) is None
    ((tag, slot, *_, reasons),) = states[0].violation_log.rows().tolist()
    assert (tag, slot, reasons) == (kvc.CanaryLaunchTag.TAIL_K_FULL, 3, kvc.FailReason.VERIFY_REAL_KV_HASH_MISMATCH)


@pytest.mark.parametrize("version", ["0.13.0", "0.13.0rc1", "0.9.2", "1.0"])
def test_a_version_that_is_not_supported(monkeypatch, ask_json, version):
    """It is said, and what runs all the same runs."""
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == "jax" else real(name))
    report = ask_json()
    assert report["can_run"]
    name, text, remedy = problems(report)[0]
    bound = next(r for r in importlib.metadata.requires("jax-kvcanary") if re.fullmatch(r"jax[^\w;][^;]*", r)).removeprefix("jax")
    assert (name, text) == ("versions", f"Installed is jax {version}, where {bound} is supported.")
    assert f"'jax{bound}'" in remedy


@pytest.mark.parametrize(
    ("version", "bounds", "inside"),
    [
        ("0.10", ">=0.10,<0.13", True),
        ("0.12.0.1", "<0.13, >=0.10", True),
        ("0.9.9", ">=0.10", False),
        ("0.13", "<0.13", False),
        ("3.11.7", ">=3.11,<3.14", True),
        ("2.0.0", "==2.0", True),
        ("2.0.1", "<=2.0", False),
        ("2.0.1", ">2.0", True),
        ("0.11.0.dev20260701", ">=0.10.0", True),
        ("5", "", True),
    ],
)
def test_bounds_of_versions(version, bounds, inside):
    assert doctor._within(version, bounds) is inside


def test_a_driver_that_jax_does_not_use(monkeypatch, tmp_path, ask_json):
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX  555.42\nGCC version: 12\n")
    monkeypatch.setattr(doctor, "_NVIDIA_DRIVER", driver)
    for device, ok in ((OtherDevice("tpu"), DEFAULT.platform == "gpu"), (OtherDevice("gpu"), True)):
        pretend(monkeypatch, device)
        check = check_of(ask_json(), "driver")
        assert check["ok"] == ok
        assert not check["decides"]
        sees = "and jax sees a GPU" if ok else "but jax sees no GPU"
        assert check["text"] == f"An NVIDIA driver is loaded (NVRM version: NVIDIA UNIX 555.42), {sees}."


def process(code, tmp_path, **variables):
    """A Python process, and the end of what it printed."""
    return subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env={**os.environ, **variables})


#: Finders that keep the native module from being imported, as it would fail if it were not there or did not fit.
BREAK = """
import importlib.abc, runpy, sys
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "jax_kvcanary._cpu":
            raise {error}
sys.meta_path.insert(0, Finder())
"""
NOT_THERE = (
    "ModuleNotFoundError('no')",
    "jax_kvcanary's native module is not there: the package was imported from its source folder without being installed; "
    "run `pip install -e .` in the folder that holds pyproject.toml, or start Python elsewhere.",
)
DOES_NOT_FIT = (
    "ImportError('undefined symbol: x')",
    "jax_kvcanary's native module _cpu cannot be loaded (undefined symbol: x): it was built for another Python or another system; run "
    "`pip install --force-reinstall --no-deps .` in the folder that holds pyproject.toml.",
)


@pytest.mark.parametrize(("error", "text"), [NOT_THERE, DOES_NOT_FIT])
def test_a_native_module_that_cannot_be_imported(tmp_path, error, text):
    """The package itself fails then; run by its path, the doctor still says everything."""
    run = f"sys.argv = ['doctor', '--json']\nrunpy.run_path({doctor.__file__!r}, run_name='__main__')"
    done = process(BREAK.format(error=error) + run, tmp_path)
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert not report["can_run"]
    assert check_of(report, "package")["text"] == f"ImportError: {text}"
    assert check_of(report, "devices")["ok"]
    assert report["default_device"] == HERE
    assert report["versions"]["jax-kvcanary"] == kvc.__version__


def test_a_native_module_that_is_not_there_as_a_command(tmp_path):
    error, text = NOT_THERE
    run = "sys.argv = ['-m', 'doctor']\nrunpy.run_module('jax_kvcanary', run_name='__main__', alter_sys=True)"
    done = process(BREAK.format(error=error) + run, tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-2:] == [f"ImportError: {text}", f"`python {doctor.__file__}` says what else is missing."]


def test_no_device(tmp_path):
    done = process("import runpy; runpy.run_module('jax_kvcanary.cli.doctor', run_name='__main__')", tmp_path, JAX_PLATFORMS="nonsense")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "The canary cannot run on the default device."
    assert re.search(r"^  PROBLEM  devices: \w+Error: .*nonsense", done.stdout, re.MULTILINE | re.DOTALL)
    assert "What to do: Look at the environment variable JAX_PLATFORMS" in done.stdout


# The command line.


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    assert doctor.SUMMARY in joined(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "the following arguments are required: command"),
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["doctor", "--slots", "0"], "argument --slots: it is '0', but it must be a whole number above 0"),
        (["doctor", "--slots", "1e6"], "argument --slots: it is '1e6', but it must be a whole number above 0"),
    ],
)
def test_wrong_arguments(capsys, arguments, text):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert text in capsys.readouterr().err
