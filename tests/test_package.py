"""The package as a whole: its names, the constants that C++ shares, and what it says where CUDA is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jax_kvcanary as kvc
from jax_kvcanary import _cpu, _ffi, _launch, constants, install, report

#: Every name of the public surface's description.
PUBLIC = [
    "PoolKind",
    "CanaryLaunchTag",
    "RealKvHashMode",
    "FailReason",
    "CanaryMode",
    "CanaryConfig",
    "CanaryLaunchCapacities",
    "RealKvSource",
    "CanaryBufferGroup",
    "PlanInput",
    "VerifyPlan",
    "WritePlan",
    "Plan",
    "ViolationLog",
    "CanaryDeviceState",
    "ForwardBatch",
    "Violation",
    "plan",
    "verify_step",
    "write_step",
    "set_expected_tokens",
    "append_expected_tokens",
    "splitmix64",
    "mix3",
    "to_int64",
    "attach_canary_buffers",
    "register_pool_attacher",
    "make_row_source",
    "make_packed_source",
    "install_canary",
    "Canary",
    "CanaryState",
    "CanaryMonitor",
    "CanaryViolationError",
]

NO_CUDA = (
    "jax_kvcanary was installed without its CUDA module, so its custom calls cannot run on a GPU; install the CUDA toolkit's nvcc and "
    "reinstall jax_kvcanary with -C cmake.define.KVCANARY_CUDA=ON."
)


def test_constants_of_both_languages_agree():
    shared = _cpu.constants()
    modules = {"MAX_ENDPOINTS": _launch, "SUMMARY_WORDS": report}
    assert shared == {name: getattr(modules.get(name, constants), name) for name in shared}
    assert set(shared) == {
        "CANARY_CHAIN_ANCHOR",
        "CANARY_SLOT_BYTES",
        "FAIL_REASON_COLUMNS",
        "MAX_ENDPOINTS",
        "SUMMARY_WORDS",
        "MAX_REAL_KV_SOURCES",
        "NUM_LAUNCH_TAGS",
        "VIOLATION_FIELDS",
    }


def test_constants_of_the_contract():
    assert kvc.CANARY_CHAIN_ANCHOR == 0xC0FFEE1234567890
    assert (kvc.CANARY_SLOT_BYTES, kvc.VIOLATION_FIELDS, kvc.MAX_REAL_KV_SOURCES) == (32, 8, 4)
    assert (kvc.REQ_POOL_IDX_PADDING, kvc.TOKEN_TO_KV_SLOT_PADDING) == (0, 0)
    assert {mode.name: mode.value for mode in kvc.RealKvHashMode} == {"NONE": 0, "PARTIAL": 1, "ALL": 2}
    assert {kind.name: kind.value for kind in kvc.PoolKind} == {"FULL": 0, "SWA": 1}
    names = [f"{phase}_{half}_{kind}" for kind in ("FULL", "SWA") for phase in ("HEAD", "TAIL", "SWEEP") for half in "KV"]
    assert [tag.name for tag in sorted(kvc.CanaryLaunchTag)] == names
    assert sorted(kvc.CanaryLaunchTag) == list(range(12))
    assert {reason.name: reason.value for reason in kvc.FailReason} == {
        "VERIFY_CHAIN_HASH_MISMATCH": 1,
        "VERIFY_POSITION_MISMATCH": 2,
        "VERIFY_REAL_KV_HASH_MISMATCH": 4,
        "WRITE_TOKEN_MISMATCH": 8,
        "WRITE_POSITION_MISMATCH": 16,
        "VERIFY_TOKEN_MISMATCH": 32,
        "SLOT_OUT_OF_RANGE": 64,
    }


def test_handlers():
    targets = (_ffi.VERIFY_TARGET, _ffi.WRITE_TARGET, _ffi.PHASE_TARGET, _ffi.REPORT_PHASE_TARGET)
    assert targets == ("kvcanary_verify", "kvcanary_write", "kvcanary_phase", "kvcanary_report_phase")
    assert set(_cpu.registrations()) == set(_cpu.cuda_missing_registrations()) == set(targets)


def test_all_but_reports_go_into_command_buffers():
    """The host holds a report while it launches the next step, whose own then lies elsewhere."""
    cuda = pytest.importorskip("jax_kvcanary._cuda", reason="the package was built without its CUDA module")
    assert set(cuda.command_buffer_targets()) == set(cuda.registrations()) - {_ffi.REPORT_PHASE_TARGET}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_there(name):
    assert getattr(kvc, name).__module__.startswith("jax_kvcanary")
    assert name in kvc.__all__


def test_all_is_complete_and_sorted():
    def is_own(value):
        return isinstance(value, int) or getattr(value, "__module__", "").startswith("jax_kvcanary")

    own = {name for name, value in vars(kvc).items() if not name.startswith("_") and is_own(value)}
    assert set(kvc.__all__) == own | {"__version__", "perturb", "pools", "reference"}

    def kind_then_name(name):
        return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)

    assert kvc.__all__ == sorted(kvc.__all__, key=kind_then_name)
    assert len(kvc.__all__) == len(set(kvc.__all__))


def test_version():
    assert kvc.__version__ == importlib.metadata.version("jax-kvcanary")


def test_public_things_are_documented():
    for name in kvc.__all__:
        value = getattr(kvc, name)
        if callable(value) or isinstance(value, types.ModuleType):
            assert value.__doc__, name


def python_files():
    package, kernels = Path(kvc.__file__).parent, Path(kvc.pallas.__file__).parent
    tests = Path(__file__).parent
    return {path for folder in (package, kernels, tests, tests.parent / "examples") for path in folder.rglob("*.py")}


def test_nothing_imports_what_jax_keeps_to_itself():
    files = python_files()
    assert len(files) > 40
    private = re.compile(r"^\s*(from|import)\s+jax\._src|jax\._src\.\w+\(", re.MULTILINE)
    assert [path.name for path in files if private.search(path.read_text())] == []


# Where CUDA is missing.


def test_cuda_is_there_or_its_absence_is_explained():
    built = importlib.util.find_spec("jax_kvcanary._cuda") is not None
    assert NO_CUDA == _cpu.CUDA_MISSING
    assert (None if built else NO_CUDA) == _ffi.CUDA_MISSING
    assert install.CUDA_MISSING == _ffi.CUDA_MISSING


def make_pool():
    return kvc.pools.MHATokenToKVPool.allocate(num_slots=7, num_layers=1, num_kv_heads=1, head_dim=8)


def installed(mode="log"):
    return kvc.install_canary(make_pool(), kvc.CanaryConfig(mode), capacities=kvc.CanaryLaunchCapacities(5, 3))


@dataclass(frozen=True)
class Device:
    """A device as far as it is looked at."""

    platform: str


@pytest.mark.parametrize("platform", ["gpu", "cuda"])
def test_a_pool_on_a_gpu_needs_the_cuda_module(monkeypatch, platform):
    found = install._devices
    monkeypatch.setattr(install, "_devices", lambda tree: {*found(tree), Device(platform)})
    monkeypatch.setattr(install, "CUDA_MISSING", NO_CUDA)
    with pytest.raises(RuntimeError) as caught:
        installed()
    assert (type(caught.value), str(caught.value)) == (RuntimeError, NO_CUDA)
    assert installed("none") == (None, None)
    monkeypatch.setattr(install, "CUDA_MISSING", None)
    monkeypatch.setattr(install, "_devices", found)
    assert installed()[0].config.mode is kvc.CanaryMode.LOG


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a pool elsewhere needs its platform's module")
def test_a_pool_on_the_host_needs_no_cuda_module(monkeypatch):
    monkeypatch.setattr(install, "CUDA_MISSING", NO_CUDA)
    assert installed()[0].config.mode is kvc.CanaryMode.LOG


def test_the_state_is_where_the_pool_is():
    _, state = installed()
    assert install._devices(state) == install._devices(make_pool())


@pytest.mark.skipif(_ffi.CUDA_MISSING is None, reason="the CUDA module is installed")
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="takes a GPU")
def test_programs_for_a_gpu_fail_with_the_sentence():
    """Without the CUDA module its targets are registered all the same, with handlers that say what is missing."""
    state = kvc.CanaryDeviceState.allocate(kvc.CanaryConfig("log"))
    table = jnp.ones((2, 3), jnp.int32)
    verify_plan = kvc.plan(kvc.PlanInput(table[0], table[0], table[0]), table, verify_capacity=5).verify
    with pytest.raises(Exception, match="installed without its CUDA module"):
        jax.block_until_ready(kvc.verify_step(kvc.fresh_records(3), verify_plan, state, tag=0))


def test_the_source_folder_alone_says_what_is_missing(tmp_path):
    """Where the sources stand before an installation, or without one, the first import says so."""
    shutil.copytree(Path(kvc.__file__).parent, tmp_path / "jax_kvcanary", ignore=shutil.ignore_patterns("*.so", "pallas", "__pycache__"))
    code = (
        "import sys\n"
        "sys.meta_path = [f for f in sys.meta_path if isinstance(f, type)]  # without the finders of an editable installation\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "import jax_kvcanary\n"
    )
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert "the package was imported from its source folder without being installed" in run.stderr
