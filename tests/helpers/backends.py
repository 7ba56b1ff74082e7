"""The three operations on every backend, behind one interface, so that one test runs on all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvcanary import reference


@dataclass(frozen=True)
class Backend:
    """Operations, and the arrays to call them with.

    Fields:
        name: one of the keys of BACKENDS.
        plan, verify_step, write_step: the operations; some donate what they update.
        int_dtype: of the integer arrays given to them.
        on_device: whether arguments are JAX arrays, else NumPy arrays.
        x64: whether JAX runs with 64-bit types on.
    """

    name: str
    plan: Callable[..., Any]
    verify_step: Callable[..., Any]
    write_step: Callable[..., Any]
    int_dtype: Any = np.int32
    on_device: bool = True
    x64: bool = False

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Where this backend's operations are to be called."""
        with jax.enable_x64(self.x64):
            yield

    def ints(self, values: Any, shape: Sequence[int] = (-1,)) -> Any:
        """An array of this backend's integers; None stays None."""
        return None if values is None else self.array(np.asarray(values, self.int_dtype).reshape(shape))

    def array(self, value: Any) -> Any:
        """An array of its own dtype that nobody else holds, so that it can be donated."""
        if not self.on_device:
            return np.array(value)
        with jax.enable_x64(True):
            return jnp.array(value)

    def own(self, tree: Any) -> Any:
        """The tree with arrays that nobody else holds."""
        return jax.tree.map(self.array, tree)


def host(tree: Any) -> Any:
    """The tree with NumPy arrays."""
    return jax.tree.map(np.asarray, tree)


@cache
def make_backend(name: str) -> Backend:
    """The backend of a name in BACKENDS."""
    if name == "reference":
        return Backend(name, reference.plan, reference.verify_step, reference.write_step, on_device=False)
    from jax_kvcanary import plan, verify_step, write_step

    if name == "eager":
        return Backend(name, plan, verify_step, write_step)
    if name == "int64":
        # NumPy's int64 with 64-bit types off: JAX would narrow it silently.
        return Backend(name, plan, verify_step, write_step, int_dtype=np.int64, on_device=False)
    jitted = _jitted(plan, verify_step, write_step)
    return {
        "jit": Backend(name, *jitted),
        "jit_int64": Backend(name, *jitted, int_dtype=np.int64),
        "jit_x64": Backend(name, *jitted, int_dtype=np.int64, x64=True),
    }[name]


#: Arguments of ``plan`` that choose what is compiled.
PLAN_STATICS = ("verify_capacity", "write_req_capacity", "swa_window_size", "kv_token_id_vs_position_offset", "verify_stride")

#: The reference, and the device's operations as users call them: eager, jitted with donation, with either integer type.
BACKENDS = ("reference", "eager", "int64", "jit", "jit_int64", "jit_x64")


@cache
def _jitted(plan: Any, verify_step: Any, write_step: Any) -> tuple[Any, Any, Any]:
    return (
        jax.jit(
            plan,
            static_argnames=PLAN_STATICS,
        ),
        jax.jit(
            verify_step,
            static_argnames=("tag", "real_kv_hash_mode", "check_expected_token"),
            donate_argnames=("device_state",),
        ),
        jax.jit(write_step, static_argnames=("tag", "real_kv_hash_mode"), donate_argnames=("canary_buf", "device_state")),
    )
