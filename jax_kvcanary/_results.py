"""Types of results that a custom call or a kernel adds to a program.

Under ``shard_map`` a value that is not said to vary over a mesh axis is taken to be the same everywhere. A result varies
wherever one operand does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def varying_zero(operands: Sequence[Any]) -> jax.Array:
    """An int32 zero that varies over a mesh wherever one of the integer operands does. XLA folds it to a constant."""
    return sum((jnp.sum(value != value, dtype=jnp.int32) for value in operands), jnp.zeros((), jnp.int32))


def results_like(types: Sequence[tuple[tuple[int, ...], Any]], operands: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """Result types for the shapes and dtypes given, varying as the operands do."""

    def depend_on_all(*values: Any) -> list[jax.Array]:
        zero = varying_zero(values)
        return [jnp.broadcast_to(zero.astype(dtype), shape) for shape, dtype in types]

    with jax.enable_x64(True):  # int64 operands keep their type
        return jax.eval_shape(depend_on_all, *operands)
