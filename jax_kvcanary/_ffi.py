"""Registration of the native handlers with XLA, and the one sentence for where they are missing."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

import jax

VERIFY_TARGET = "kvcanary_verify"
WRITE_TARGET = "kvcanary_write"


def _load_cpu_module() -> ModuleType:
    try:
        return importlib.import_module("jax_kvcanary._cpu")
    except ModuleNotFoundError as error:
        raise ImportError(
            "jax_kvcanary's native module is not there: the package was imported from its source folder without being installed; "
            "run `pip install -e .` in the folder that holds pyproject.toml, or start Python elsewhere."
        ) from error


def _register() -> str | None:
    """Register every handler; returns why CUDA is missing, or None where it is there."""
    cpu = _load_cpu_module()
    for name, handler in cpu.registrations().items():
        jax.ffi.register_ffi_target(name, handler, platform="cpu")
    if importlib.util.find_spec("jax_kvcanary._cuda") is None:
        # A program for a GPU then fails with the sentence that says what is missing, not with an unknown target.
        handlers, missing = cpu.cuda_missing_registrations(), str(cpu.CUDA_MISSING)
    else:
        handlers, missing = importlib.import_module("jax_kvcanary._cuda").registrations(), None
    for name, handler in handlers.items():
        jax.ffi.register_ffi_target(name, handler, platform="CUDA")
    return missing


#: One sentence that says why custom calls cannot run on CUDA, or None where they can.
CUDA_MISSING = _register()
