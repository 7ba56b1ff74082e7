"""Input checks and integer narrowing, in one place, before any backend sees an argument.

Every message is a full sentence: the argument in backticks, what it was, and what is allowed.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvcanary.constants import CANARY_SLOT_BYTES, INT32_MAX

#: A JAX array (concrete or traced) or a NumPy array.
ArrayLike = Any

_INDEX_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))


def as_array(value: ArrayLike) -> ArrayLike:
    """The value itself where it is an array already, else a NumPy array of it (Python lists and integers)."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return value
    array = np.asarray(value)
    return array if array.size else array.astype(np.int64)  # an empty list has no dtype of its own


def check_array(value: Any, name: str) -> None:
    """Raise TypeError unless the value has a dtype and a shape."""
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        raise TypeError(f"`{name}` is of type {type(value).__name__}, but it must be an array.")


def check_type(value: Any, name: str, wanted: type, hint: str = "") -> None:
    """Raise TypeError unless the value is an instance of the class."""
    if not isinstance(value, wanted):
        raise TypeError(f"`{name}` is of type {type(value).__name__}, but it must be a {wanted.__name__}{hint}.")


def check_flag(value: Any, name: str) -> None:
    """Raise TypeError unless the value is a Python bool: a traced one cannot choose what is compiled."""
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` is {value!r} of type {type(value).__name__}, but it must be True or False.")


def check_enum(value: Any, name: str, kind: type[IntEnum]) -> Any:
    """The member of an enumeration that the value names; ValueError lists the members."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        try:
            return kind(int(value))
        except ValueError:
            pass
    raise ValueError(f"`{name}` is {value!r}, but it must be one of {', '.join(f'{m.name} ({m.value})' for m in kind)}.")


def check_shape(value: ArrayLike, name: str, shape: tuple[int | None, ...], meaning: str) -> None:
    """Raise ValueError unless the shape matches; None in ``shape`` allows any length of that axis."""
    got = tuple(value.shape)
    if len(got) != len(shape) or any(want not in (None, have) for have, want in zip(got, shape, strict=True)):
        wanted = "[" + ", ".join("any" if want is None else str(want) for want in shape) + "]"
        raise ValueError(f"`{name}` has shape {list(got)}, but {meaning} needs shape {wanted}.")


def check_dtype(value: ArrayLike, name: str, *dtypes: Any) -> None:
    """Raise TypeError unless the value is an array of one of the dtypes given."""
    check_array(value, name)
    allowed = [np.dtype(dtype) for dtype in dtypes]
    if np.dtype(value.dtype) not in allowed:
        raise TypeError(f"`{name}` has dtype {value.dtype}, but it must be {' or '.join(str(d) for d in allowed)}.")


def check_int(value: Any, name: str, low: int, high: int, why: str = "") -> int:
    """A Python int between ``low`` and ``high``, both included; TypeError or ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"`{name}` is {value!r} of type {type(value).__name__}, but it must be an int.")
    if not low <= value <= high:
        raise ValueError(f"`{name}` is {value}, but it must be between {low} and {high}{why}.")
    return int(value)


def check_probability(value: Any, name: str) -> float:
    """A Python number between 0 and 1, both included, as a float; TypeError or ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"`{name}` is {value!r} of type {type(value).__name__}, but it must be a number.")
    if not 0 <= value <= 1:
        raise ValueError(f"`{name}` is {value}, but it must be between 0 and 1.")
    return float(value)


def check_canary_buffer(value: ArrayLike, name: str) -> int:
    """Check a canary buffer, uint8 [num_slots, 32], and return its number of slots."""
    check_dtype(value, name, np.uint8)
    check_shape(value, name, (None, CANARY_SLOT_BYTES), "a canary buffer of 32-byte records")
    return check_int(value.shape[0], f"{name}.shape[0]", 1, INT32_MAX, ", since a pool has at least its padding slot")


def integer_array(value: ArrayLike, name: str, shape: tuple[int | None, ...], meaning: str) -> ArrayLike:
    """Check an int32 or int64 array and return it on the device with every value as it was.

    With 64-bit types off, JAX narrows NumPy's int64 silently; here such an array stays int64.
    """
    value = as_array(value)
    check_dtype(value, name, *_INDEX_DTYPES)
    check_shape(value, name, shape, meaning)
    return on_device(value)


def on_device(value: ArrayLike) -> ArrayLike:
    """A NumPy array as a JAX array of the same dtype, whether 64-bit types are on or off; other values as they are."""
    if isinstance(value, np.ndarray):
        with jax.enable_x64(True):
            return jnp.asarray(value)
    return value


def index_array(value: ArrayLike, name: str, shape: tuple[int | None, ...], meaning: str) -> jax.Array:
    """Check an int32 or int64 array of indices or lengths and narrow it to int32.

    An int64 value that does not fit becomes 2^31 - 1, which every user of it finds out of range, or -1 where negative.
    """
    value = integer_array(value, name, shape, meaning)
    if value.dtype == np.int32:
        return value
    with jax.enable_x64(True):
        narrow = jnp.where(value > INT32_MAX, INT32_MAX, jnp.where(value < -(2**31), -1, value))
        return narrow.astype(jnp.int32)


def token_array(value: ArrayLike, name: str, shape: tuple[int | None, ...], meaning: str) -> jax.Array:
    """Check an int32 or int64 array of expected tokens and narrow it to int32.

    A token that does not fit becomes -1, "unknown": a narrowed value would be reported although the token was right.
    """
    value = integer_array(value, name, shape, meaning)
    if value.dtype == np.int32:
        return value
    with jax.enable_x64(True):
        return jnp.where((value > INT32_MAX) | (value < -(2**31)), -1, value).astype(jnp.int32)
