"""Makes ``tests/helpers`` importable, and gives every test the backends by name."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from helpers.backends import Backend, make_backend


@pytest.fixture(scope="session")
def get_backend() -> Callable[[str], Backend]:
    """A backend by name. The device's operations are imported when one of their backends is asked for, not before."""
    return make_backend


@pytest.fixture(params=["reference", "jit"])
def backend(request, get_backend):
    return get_backend(request.param)


@pytest.fixture(params=["reference", "eager", "jit_int64", "jit_x64"])
def wide_backend(request, get_backend):
    """A backend, called with int64 arrays."""
    return dataclasses.replace(get_backend(request.param), int_dtype=np.int64, on_device=request.param.startswith("jit"))
