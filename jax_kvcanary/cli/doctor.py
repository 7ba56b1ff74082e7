"""``python -m jax_kvcanary doctor``: whether the canary can run here, and what to install where it cannot.

Everything but the standard library is imported by the check that needs it, and each check is caught by itself, so that whatever is
broken is reported with the rest. Where ``import jax_kvcanary`` fails, ``python -m`` does not come this far: run this file by its path.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import platform
import re
import sys
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SUMMARY = "Say whether the canary can run on this machine, and what to install where it cannot."

_DISTRIBUTION = "jax-kvcanary"
_CUDA_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_GPU_PLATFORMS = ("gpu", "cuda")

_FOLDER = "in the folder that holds pyproject.toml"
_INSTALL = f"Run `pip install .` {_FOLDER}."
_REINSTALL = f"Build jax_kvcanary again for this Python and this jax: run `pip install --force-reinstall --no-deps .` {_FOLDER}."
_REINSTALL_CUDA = (
    f"Build the CUDA module again, with the nvcc of the CUDA that jax uses: run `pip install --force-reinstall --no-deps . "
    f"-C cmake.define.KVCANARY_CUDA=ON` {_FOLDER}."
)
_TRITON = (
    "The kernels are Pallas on Triton, which takes a GPU of compute capability 8.0 or above; install a supported jax for its CUDA: run "
    f"`pip install '.[cuda12]'` or `pip install '.[cuda13]'` {_FOLDER}."
)
_JAX = "Look at the environment variable JAX_PLATFORMS and at what `import jax; jax.print_environment_info()` prints, and reinstall jax."


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Fields:
        name: what.
        ok: whether it is as it should be.
        text: a sentence that says how it is.
        remedy: a sentence that says what to do, where it is not ok.
        decides: whether the canary can run on the default device only where this is ok.
    """

    name: str
    ok: bool
    text: str
    remedy: str | None = None
    decides: bool = False


@dataclass
class Report:
    """All that the doctor found.

    Fields:
        versions: of Python, packages and platforms.
        devices: name, platform, kind, and whether it is the default one.
        targets: names of the targets that can run on each of XLA's platforms.
        cuda_missing: one sentence that says why there are none for CUDA, or None.
        checks: in the order in which they were made.
        memory: bytes of a canary, or None where no pool size was given.
    """

    versions: dict[str, str] = field(default_factory=dict)
    devices: list[dict[str, Any]] = field(default_factory=list)
    targets: dict[str, list[str]] = field(default_factory=dict)
    cuda_missing: str | None = None
    checks: list[Check] = field(default_factory=list)
    memory: dict[str, int] | None = None

    @property
    def can_run(self) -> bool:
        """Whether the canary can run on the default device."""
        return all(check.ok for check in self.checks if check.decides)

    @property
    def default_device(self) -> str | None:
        """Name of the default device, where there is one."""
        return next((device["name"] for device in self.devices if device["default"]), None)

    def as_dict(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {"can_run": self.can_run, "default_device": self.default_device, **asdict(self)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--slots", type=_slots, metavar="N", help="say how much memory a canary takes beside a pool of N slots")


def run(arguments: argparse.Namespace) -> int:
    """Print the report; 0 exactly when the canary can run on the default device, else 1."""
    report = examine(arguments.slots)
    print(json.dumps(report.as_dict(), indent=2) if arguments.json else text_of(report))
    return 0 if report.can_run else 1


def examine(num_slots: int | None = None) -> Report:
    """Look at everything; never raises because of what is broken.

    Args:
        num_slots: slots of a pool whose canary's memory is wanted, or None.
    """
    report = Report(versions=_versions())
    report.checks.append(_guarded("versions", _INSTALL, check_versions))
    # Imported before a device is asked for, as a server does it: a handler that jax does not take shows when it starts its platforms.
    package = _guarded("package", _REINSTALL, check_package, decides=True)
    report.checks.append(package)
    devices: list[Any] = []
    report.checks.append(_guarded("devices", _JAX, check_devices, devices, report, decides=True))
    if _NVIDIA_DRIVER.exists():
        report.checks.append(_guarded("driver", _JAX, check_driver, devices))
    if package.ok:
        report.checks.append(_guarded("targets", _REINSTALL, check_targets, report))
        for device in _one_of_each_platform(devices):
            report.checks += _check_device(device, decides=device is devices[0])
        if num_slots is not None:
            report.checks.append(_guarded("memory", _REINSTALL, check_memory, num_slots, report))
    return report


def _check_device(device: Any, *, decides: bool) -> list[Check]:
    """The small runs on a device."""
    gpu = device.platform in _GPU_PLATFORMS
    calls, kernels = f"custom calls on {_name(device)}", f"plan on {_name(device)}"
    build, triton = (_REINSTALL_CUDA, _TRITON) if gpu else (_REINSTALL, _REINSTALL)
    return [
        _guarded(calls, build, check_custom_calls, calls, device, build, decides, decides=decides),
        _guarded(kernels, triton, check_plan, kernels, device, triton, decides, decides=decides),
    ]


def check_versions() -> Check:
    """Python and the packages against the bounds of the installed package's metadata."""
    bounds = {"Python": importlib.metadata.metadata(_DISTRIBUTION)["Requires-Python"]}
    for requirement in importlib.metadata.requires(_DISTRIBUTION) or ():
        if ";" not in requirement:  # those behind a marker belong to extras
            name, bound = re.fullmatch(r"([\w.-]+)\s*(.*)", requirement).groups()  # type: ignore[union-attr]
            bounds[name] = bound
    wrong = []
    for name, bound in bounds.items():
        have = platform.python_version() if name == "Python" else importlib.metadata.version(name)
        if not _within(have, bound):
            wrong.append(f"{name} {have}, where {bound} is supported")
    if not wrong:
        return Check("versions", True, "All versions are supported.")
    wanted = " ".join(f"'{name}{bound}'" for name, bound in bounds.items() if name != "Python")
    return Check("versions", False, f"Installed is {', and '.join(wrong)}.", f"Run `pip install {wanted}` with a supported Python.")


def check_package() -> Check:
    """Whether the package and its native module can be imported."""
    try:
        importlib.import_module("jax_kvcanary")
    except ModuleNotFoundError as error:
        return Check("package", False, f"{error}.", _INSTALL, decides=True)
    return Check("package", True, "jax_kvcanary and its native module can be imported.", decides=True)


def check_devices(devices: list[Any], report: Report) -> Check:
    """Fill in jax's devices, the default one first, and the versions of their platforms."""
    import jax
    import jax.numpy as jnp

    (default,) = jnp.zeros((), jnp.int32).devices()
    found = [default, *(device for device in jax.local_devices() if device != default)]
    with contextlib.suppress(RuntimeError):  # jax was told to leave the CPU out
        found += [device for device in jax.local_devices(backend="cpu") if device not in found]
    devices[:] = found
    for device in found:
        report.devices.append(
            {"name": _name(device), "platform": device.platform, "kind": device.device_kind, "default": device is default}
        )
        version = str(device.client.platform_version)
        if version != device.platform:
            report.versions[f"{device.platform} platform"] = " ".join(version.split())
    return Check("devices", True, f"The default device is {_name(default)}, {default.device_kind}.", decides=True)


def check_driver(devices: list[Any]) -> Check:
    """Whether jax uses a GPU whose driver is loaded."""
    line = _NVIDIA_DRIVER.read_text().splitlines()[0]
    driver = f"An NVIDIA driver is loaded ({' '.join(line.split())})"
    if any(device.platform in _GPU_PLATFORMS for device in devices):
        return Check("driver", True, f"{driver}, and jax sees a GPU.")
    remedy = (
        f"To use the GPU, install jax for CUDA: run `pip install '.[cuda12]'` or `pip install '.[cuda13]'` {_FOLDER}, and do not let "
        "JAX_PLATFORMS leave cuda out."
    )
    return Check("driver", False, f"{driver}, but jax sees no GPU.", remedy)


def check_targets(report: Report) -> Check:
    """Fill in which targets can run where; that there are none for CUDA is a problem only for a device that needs them."""
    from jax_kvcanary import _ffi

    report.targets = {name: list(targets) for name, targets in _ffi.TARGETS.items()}
    report.cuda_missing = _ffi.CUDA_MISSING
    return Check(
        "targets", True, f"Targets are registered for {' and '.join(name for name, targets in report.targets.items() if targets)}."
    )


def check_custom_calls(name: str, device: Any, remedy: str, decides: bool) -> Check:
    """Run a small write and a small verify, and compare with the reference."""
    from jax_kvcanary import _ffi
    from jax_kvcanary.cli import trial

    if device.platform in _GPU_PLATFORMS:
        if _ffi.CUDA_MISSING is not None:
            what, _, to_do = _ffi.CUDA_MISSING.partition("; ")
            return Check(name, False, f"{what}.", to_do[:1].upper() + to_do[1:], decides)
    elif device.platform != "cpu":
        text = f"jax_kvcanary has no custom calls for the platform {device.platform}."
        return Check(name, False, text, "Keep the pool on a CPU or on an NVIDIA GPU.", decides)
    return _answer(name, "A small write and verify", trial.custom_calls(device), remedy, decides)


def check_plan(name: str, device: Any, remedy: str, decides: bool) -> Check:
    """Run a small plan, on a GPU with its Triton kernels, and compare with the reference."""
    from jax_kvcanary.cli import trial

    what = "A small plan by the Triton kernels" if device.platform in _GPU_PLATFORMS else "A small plan"
    return _answer(name, what, trial.plan_kernels(device), remedy, decides)


def check_memory(num_slots: int, report: Report) -> Check:
    """Fill in how much memory a canary takes."""
    from jax_kvcanary.cli import trial

    report.memory = {"slots": num_slots, **trial.memory(num_slots)}
    records, plan, log = (_mib(report.memory[name]) for name in ("records", "plan", "log"))
    text = f"A canary beside K and V of {num_slots:,} slots takes {records} of records, {plan} for a plan and {log} for its log."
    return Check("memory", True, text)


def text_of(report: Report) -> str:
    """The report for a person."""
    lines = ["Versions"]
    lines += [f"  {name:<20} {version}" for name, version in report.versions.items()]
    lines += ["Devices"]
    for device in report.devices:
        lines += [f"  {device['name']:<20} {device['kind']}{', the default' if device['default'] else ''}"]
    lines += [] if report.devices else ["  none"]
    lines += ["XLA FFI targets"]
    lines += [f"  {name:<20} {', '.join(targets) or 'none'}" for name, targets in report.targets.items()]
    lines += [] if report.targets else ["  none"]
    lines += _wrapped(f"  {'':<20} ", report.cuda_missing or "", 23)
    lines += ["Checks"]
    for check in report.checks:
        lines += _wrapped(f"  {'ok' if check.ok else 'PROBLEM':<8} {check.name}: ", check.text, 11)
        if not check.ok:
            lines += _wrapped(f"  {'':<8} What to do: ", str(check.remedy), 11)
    where = "on the default device" + (f", {report.default_device}" if report.default_device else "")
    lines += [f"The canary can{'' if report.can_run else 'not'} run {where}."]
    return "\n".join(lines)


def _versions() -> dict[str, str]:
    """Python and the packages that matter; CUDA plugins only where one is installed."""
    found = {"python": platform.python_version()}
    for name in (_DISTRIBUTION, "jax", "jaxlib", "numpy", *_CUDA_PLUGINS):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name not in _CUDA_PLUGINS:
                found[name] = "not installed"
    if not any(name in found for name in _CUDA_PLUGINS):
        found["CUDA plugin of jax"] = "not installed"
    return found


def _guarded(name: str, remedy: str, check: Callable[..., Check], *args: Any, decides: bool = False) -> Check:
    """The check's own result, or one that has the text of the exception that stopped it."""
    try:
        return check(*args)
    except Exception as error:
        text = " ".join(str(error).split()).removesuffix(".") or "an exception without a text"
        return Check(name, False, f"{type(error).__name__}: {text}.", remedy, decides)


def _answer(name: str, what: str, difference: str | None, remedy: str, decides: bool) -> Check:
    if difference is None:
        return Check(name, True, f"{what} gave the right answer.", decides=decides)
    return Check(name, False, f"{what} ran, but its result differs from the NumPy reference in `{difference}`.", remedy, decides)


def _one_of_each_platform(devices: list[Any]) -> list[Any]:
    return list({device.platform: device for device in reversed(devices)}.values())[::-1]


def _name(device: Any) -> str:
    return f"{device.platform}:{device.id}"


def _within(version: str, bounds: str) -> bool:
    """Whether a version lies within bounds such as ``>=0.10,<0.13``; what follows its numbers is ignored."""
    for bound in bounds.replace(" ", "").split(","):
        if not bound:
            continue
        operator = bound.rstrip("0123456789.")
        have, limit = _numbers(version), _numbers(bound.removeprefix(operator))
        width = max(len(have), len(limit))
        have, limit = (numbers + (0,) * (width - len(numbers)) for numbers in (have, limit))
        if not {">=": have >= limit, "<=": have <= limit, ">": have > limit, "<": have < limit, "==": have == limit}[operator]:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.match(r"[\d.]*", version)[0].strip(".").split("."))  # type: ignore[index]


def _slots(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"it is {text!r}, but it must be a whole number above 0")
    return int(text)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def _wrapped(start: str, text: str, indent: int) -> list[str]:
    margin = " " * indent
    return textwrap.wrap(text, 120, initial_indent=start, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=SUMMARY)
    add_arguments(parser)
    sys.exit(run(parser.parse_args()))
