"""Types of results that a custom call or a kernel adds to a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def result_like(shape: tuple[int, ...], *, dtype: Any, operands: Sequence[Any]) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a result that depends on all operands.

    Under ``shard_map`` a result that is not said to vary over a mesh axis is taken to be the same everywhere. The type
    comes from tracing a sum over the operands, so that it varies wherever one of them does.
    """

    def depend_on_all(*values: Any) -> jax.Array:
        zero = sum((jnp.sum(jnp.ravel(v)[:0]).astype(dtype) for v in values), jnp.zeros((), dtype))
        return jnp.broadcast_to(zero, shape)

    return jax.eval_shape(depend_on_all, *operands)
