"""Makes ``tests/helpers`` importable, and gives every test the backends by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from helpers.backends import Backend, make_backend


@pytest.fixture(scope="session")
def get_backend() -> Callable[[str], Backend]:
    """A backend by name. The device's operations are imported when one of their backends is asked for, not before."""
    return make_backend
