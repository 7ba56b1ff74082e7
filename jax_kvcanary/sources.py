"""Where the real KV bytes of a slot lie: live sources, and static descriptions of them.

A :class:`RealKvSource` is an array with the geometry of its slots; the custom calls read it in place. In a
functional program the KV arrays are new values at every step, so a buffer group stores a :class:`SourceSpec`, the
geometry with a path into the pool pytree, and binds it to the live pool at each call.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvcanary._checks import ArrayLike, check_array, check_int, check_type
from jax_kvcanary.constants import MAX_REAL_KV_SOURCES, PARTIAL_READ_BYTES, RealKvHashMode

#: Largest byte count that a handler takes; offsets inside it stay far from int64 overflow.
_MAX_BYTES = 2**48

#: Steps from a pool to one of its arrays: attribute names, mapping keys and sequence indices.
PoolPath = tuple[str | int, ...]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("array",),
    meta_fields=(
        "page_size",
        "num_bytes_per_token",
        "read_bytes",
        "byte_offset",
        "row_stride_bytes",
        "token_stride_bytes",
    ),
)
@dataclass(frozen=True, kw_only=True)
class RealKvSource:
    """One array that holds real KV, and where the bytes of a slot lie in it.

    The bytes of slot ``s`` start at ``byte_offset + (s // page_size) * row_stride_bytes + (s % page_size) *
    token_stride_bytes``, counted over the array's bytes in row-major order. The strides let one layer of a stacked
    pool, or K inside an interleaved pool, be fingerprinted in place: the array is never sliced, cast or copied.

    Fields:
        array: any shape of rank 1 or more, any dtype of whole bytes.
        page_size: slots in one page (static).
        num_bytes_per_token: bytes that belong to one slot, a multiple of 8 (static).
        read_bytes: bytes of them that mode ALL hashes, a multiple of 8 (static).
        byte_offset: where slot 0 starts, a multiple of 8 (static).
        row_stride_bytes: bytes from one page to the next; None is the width of one row of the leading axis (static).
        token_stride_bytes: bytes from one slot to the next within a page; None is ``num_bytes_per_token`` (static).

    Danger:
        With 64-bit types off, ``jax.jit`` narrows a NumPy array of a 64-bit dtype before anything here sees it; pass such KV as a JAX
        array.

    Raises:
        ValueError: a number breaks a rule of the geometry. TypeError: a number is not an int.
    """

    array: ArrayLike
    page_size: int = 1
    num_bytes_per_token: int
    read_bytes: int
    byte_offset: int = 0
    row_stride_bytes: int | None = None
    token_stride_bytes: int | None = None

    def __post_init__(self) -> None:
        check_int(self.page_size, "page_size", 1, 2**31 - 1)
        check_bytes(self.num_bytes_per_token, "num_bytes_per_token", low=8)
        check_bytes(self.read_bytes, "read_bytes", low=8)
        check_bytes(self.byte_offset, "byte_offset", low=0)
        for name in ("row_stride_bytes", "token_stride_bytes"):
            if getattr(self, name) is not None:
                check_bytes(getattr(self, name), name, low=8)
        if self.read_bytes > self.num_bytes_per_token:
            raise ValueError(
                f"`read_bytes` is {self.read_bytes}, but a slot has `num_bytes_per_token` = {self.num_bytes_per_token} bytes to read."
            )
        if self.token_stride < self.num_bytes_per_token:
            raise ValueError(
                f"`token_stride_bytes` is {self.token_stride}, but it must be at least `num_bytes_per_token` = "
                f"{self.num_bytes_per_token}, or neighbouring slots would share bytes."
            )
        # Tree transformations rebuild a source around placeholders; only real arrays have bytes to check.
        if not hasattr(self.array, "shape") or not hasattr(self.array, "dtype"):
            return
        if not self.array.shape:
            raise ValueError("`array` is a scalar, but a source needs at least one axis.")
        if self.row_stride_bytes is None:
            check_bytes(self.row_stride, "row_stride_bytes", low=8)
        if self.num_slots < 1:
            raise ValueError(
                f"`array` has {self.num_bytes} bytes, but slot 0 needs the bytes from {self.byte_offset} to "
                f"{self.byte_offset + self.num_bytes_per_token}."
            )

    @property
    def row_stride(self) -> int:
        """Bytes from one page to the next, the default filled in."""
        if self.row_stride_bytes is not None:
            return self.row_stride_bytes
        return math.prod(self.array.shape[1:]) * item_bytes(self.array.dtype)

    @property
    def token_stride(self) -> int:
        """Bytes from one slot to the next within a page, the default filled in."""
        return self.num_bytes_per_token if self.token_stride_bytes is None else self.token_stride_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.array.shape) * item_bytes(self.array.dtype)

    @property
    def num_slots(self) -> int:
        """How many slots, counted from 0, have all their bytes inside the array."""
        room = self.num_bytes - self.byte_offset - self.num_bytes_per_token
        if room < 0:
            return 0
        last_in_page = (self.page_size - 1) * self.token_stride
        if room < last_in_page:
            return room // self.token_stride + 1
        whole_pages = (room - last_in_page) // self.row_stride + 1
        left = room - whole_pages * self.row_stride
        return whole_pages * self.page_size + (left // self.token_stride + 1 if left >= 0 else 0)

    def bytes_read(self, mode: RealKvHashMode) -> int:
        """Bytes of one slot that the mode hashes."""
        if mode is RealKvHashMode.NONE:
            return 0
        return min(PARTIAL_READ_BYTES, self.read_bytes) if mode is RealKvHashMode.PARTIAL else self.read_bytes


@dataclass(frozen=True, kw_only=True)
class SourceSpec:
    """Static description of a source: the geometry of :class:`RealKvSource`, and where its array is in the pool.

    Hashable, so that it can be metadata of a pytree. ``path`` names attributes, mapping keys and indices from the pool
    to the array: ``("k_buffer", 0)`` is ``pool.k_buffer[0]``.
    """

    path: PoolPath
    page_size: int = 1
    num_bytes_per_token: int
    read_bytes: int
    byte_offset: int = 0
    row_stride_bytes: int | None = None
    token_stride_bytes: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", tuple(self.path))  # a list would not hash

    def bind(self, pool: Any) -> RealKvSource:
        """The source with the array that the pool holds now."""
        geometry = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "path"}
        return RealKvSource(array=resolve_path(pool, self.path), **geometry)


def resolve_path(pool: Any, path: PoolPath) -> Any:
    """Follow a path from a pool to one of its arrays.

    Raises:
        ValueError: the pool has no such member; the text names the path and the step that failed.
    """
    value = pool
    for step in path:
        try:
            value = getattr(value, step) if isinstance(step, str) and not isinstance(value, Mapping) else value[step]
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            raise ValueError(
                f"`pool` of class {type(pool).__qualname__} has nothing at {path!r}: step {step!r} failed on a {type(value).__qualname__}."
            ) from error
    return value


def replace_at_path(pool: Any, path: PoolPath, array: Any) -> Any:
    """The pool with another array at a path.

    Raises:
        ValueError: the pool has no such member, or what is there is not a leaf of its pytree.
    """
    leaves, structure = jax.tree.flatten(pool)
    # A pool of marks shows which leaf the path leads to, whatever its class makes of attributes and indices.
    marks = [_Mark(i) for i in range(len(leaves))]
    mark = resolve_path(jax.tree.unflatten(structure, marks), path)
    if not isinstance(mark, _Mark):
        raise ValueError(f"`pool` of class {type(pool).__qualname__} has no leaf of its pytree at {path!r}, so it cannot be changed there.")
    leaves[mark.index] = array
    return jax.tree.unflatten(structure, leaves)


@dataclass(frozen=True)
class _Mark:
    """Stands for the leaf of a pytree with this index."""

    index: int


def check_sources(sources: Any, mode: Any, num_slots: int) -> tuple[RealKvSource, ...]:
    """Check the sources of one endpoint against its number of slots and return them as a tuple.

    Raises:
        TypeError: not a sequence of sources. ValueError: too many, or one that is too small for the buffer's slots.
    """
    if not isinstance(sources, (tuple, list)):
        raise TypeError(f"`real_kv_sources` is of type {type(sources).__name__}, but it must be a sequence of RealKvSource.")
    sources = tuple(sources)
    if len(sources) > MAX_REAL_KV_SOURCES:
        raise ValueError(f"`real_kv_sources` has {len(sources)} sources, but one launch folds at most {MAX_REAL_KV_SOURCES}.")
    for i, source in enumerate(sources):
        check_type(source, f"real_kv_sources[{i}]", RealKvSource)
        check_array(source.array, f"real_kv_sources[{i}].array")
        if source.num_slots < num_slots:
            raise ValueError(
                f"`real_kv_sources[{i}]` has the bytes of {source.num_slots} slots, but the canary buffer has {num_slots} slots."
            )
    return sources if mode is not RealKvHashMode.NONE else ()


def item_bytes(dtype: Any) -> int:
    """Bytes of one element; NotImplementedError for types that XLA packs below a byte."""
    dtype = np.dtype(dtype)
    limits: Any = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else None
    if limits is not None and limits(dtype).bits < 8:
        raise NotImplementedError(f"`array` has dtype {dtype}, whose elements are smaller than a byte; pass the packed bytes as uint8.")
    return dtype.itemsize


def check_bytes(value: Any, name: str, low: int) -> None:
    """Raise unless the value is a byte count of whole hashed words, at least ``low``."""
    check_int(value, name, low, _MAX_BYTES)
    if value % 8:
        raise ValueError(f"`{name}` is {value}, but byte counts must be multiples of 8, the width of one hashed word.")
