"""Registration of the native handlers with XLA, and the one sentence for where they are missing."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

import jax

VERIFY_TARGET = "kvcanary_verify"
WRITE_TARGET = "kvcanary_write"
PHASE_TARGET = "kvcanary_phase"
REPORT_PHASE_TARGET = "kvcanary_report_phase"


#: Names of the targets that can run on each of XLA's platforms.
TARGETS: dict[str, tuple[str, ...]] = {}

#: The doctor, which runs by its path where the package cannot be imported.
_DOCTOR = Path(__file__).parent / "cli" / "doctor.py"


def _load(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"jax_kvcanary.{name}")
    except ModuleNotFoundError as error:
        text = (
            "jax_kvcanary's native module is not there: the package was imported from its source folder without being installed; "
            "run `pip install -e .` in the folder that holds pyproject.toml, or start Python elsewhere."
        )
        cause: ImportError = error
    except ImportError as error:
        text = (
            f"jax_kvcanary's native module {name} cannot be loaded ({error}): it was built for another Python or another system; "
            "run `pip install --force-reinstall --no-deps .` in the folder that holds pyproject.toml."
        )
        cause = error
    failure = ImportError(text)
    failure.add_note(f"`python {_DOCTOR}` says what else is missing.")
    raise failure from cause


def _register() -> str | None:
    """Register every handler; returns why CUDA is missing, or None where it is there."""
    cpu = _load("_cpu")
    for name, handler in cpu.registrations().items():
        jax.ffi.register_ffi_target(name, handler, platform="cpu")
    if importlib.util.find_spec("jax_kvcanary._cuda") is None:
        # A program for a GPU then fails with the sentence that says what is missing, not with an unknown target.
        handlers, missing = cpu.cuda_missing_registrations(), str(cpu.CUDA_MISSING)
    else:
        handlers, missing = _load("_cuda").registrations(), None
    for name, handler in handlers.items():
        jax.ffi.register_ffi_target(name, handler, platform="CUDA")
    TARGETS.update(cpu=tuple(cpu.registrations()), CUDA=() if missing else tuple(handlers))
    return missing


#: One sentence that says why custom calls cannot run on CUDA, or None where they can.
CUDA_MISSING = _register()
