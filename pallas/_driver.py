"""What the drivers of all kernels have in common."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from jax_kvcanary._results import results_like

# jax announces the end of this backend at every lowering; the upper bound on jax in pyproject.toml is what heeds it.
warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning)


def load_ref(ref: Any, index: tuple[Any, ...], mask: jax.Array, other: int) -> jax.Array:
    """The ``load`` of the Triton kernels: elements of a reference where the mask is set."""
    return plgpu.load(ref.at[index], mask=mask, other=other)


def int32_results(operands: Sequence[Any], *shapes: tuple[int, ...]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Types of a kernel's int32 results, varying as its operands do."""
    return tuple(results_like([(shape, jnp.int32) for shape in shapes], operands))
