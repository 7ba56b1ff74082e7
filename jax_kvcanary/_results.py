"""Types of results that a custom call or a kernel adds to a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def results_like(types: Sequence[tuple[tuple[int, ...], Any]], operands: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """Result types for the shapes and dtypes given, for results that depend on all operands.

    Under ``shard_map`` a result that is not said to vary over a mesh axis is taken to be the same everywhere. The types
    come from tracing a sum over the operands, so that results vary wherever one operand does.
    """

    def depend_on_all(*values: Any) -> list[jax.Array]:
        zero = sum((jnp.sum(jnp.ravel(v)[:0] != 0, dtype=jnp.int32) for v in values), jnp.zeros((), jnp.int32))
        return [jnp.broadcast_to(zero.astype(dtype), shape) for shape, dtype in types]

    with jax.enable_x64(True):  # int64 operands keep their type
        return jax.eval_shape(depend_on_all, *operands)
