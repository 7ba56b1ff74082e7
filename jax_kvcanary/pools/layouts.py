"""Where a token's bytes lie in the layouts that pools use: descriptions of sources, made from a pool and a path in it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from jax_kvcanary._checks import ArrayLike, check_array, check_int
from jax_kvcanary.constants import INT32_MAX
from jax_kvcanary.sources import PoolPath, SourceSpec, check_bytes, item_bytes, resolve_path


@dataclass(frozen=True)
class RowLayout:
    """What the axes of a KV array count: layers where it is stacked, slots or pages and their slots, then a token's own.

    Fields:
        num_layers: layers of a stacked array, or None.
        num_slots: slots of one layer.
        page_shape: the axes that count the slots of a page; () without pages.
        token_shape: the axes that belong to one token.
        item_bytes: bytes of one element.
    """

    num_layers: int | None
    num_slots: int
    page_shape: tuple[int, ...]
    token_shape: tuple[int, ...]
    item_bytes: int

    @property
    def page_size(self) -> int:
        """Slots in one page; 1 without pages."""
        return math.prod(self.page_shape)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return math.prod(self.token_shape) * self.item_bytes


def row_layout(array: ArrayLike, path: PoolPath, token_rank: int, *, stacked: bool = False, page_rank: int | None = None) -> RowLayout:
    """Read the axes of a KV array.

    Args:
        array: the array; only its shape and dtype are looked at.
        path: where it is in the pool, for messages.
        token_rank: trailing axes that belong to one token.
        stacked: whether the leading axis counts layers.
        page_rank: axes that count the slots of a page; None takes none or one, whichever the rank leaves.

    Raises:
        ValueError: another rank. NotImplementedError: elements smaller than a byte.
    """
    shape = tuple(array.shape)
    leading = shape[int(stacked) : max(len(shape) - token_rank, 0)]
    ranks = (0, 1) if page_rank is None else (page_rank,)
    if len(leading) - 1 not in ranks:
        first = "layers and " * stacked
        few = token_rank + 1 + stacked
        if page_rank is None:
            wanted = f"{few} axes, {first}slots first, or {few + 1}, {first}pages and page size first"
        else:
            wanted = f"{few + page_rank} axes: {first}pages first, {page_rank} for the slots of a page, {token_rank} for a token"
        raise ValueError(f"`pool` has a KV array of shape {list(shape)} at {path!r}, but it must have {wanted}.")
    return RowLayout(
        num_layers=shape[0] if stacked else None,
        num_slots=math.prod(leading),
        page_shape=leading[1:],
        token_shape=shape[len(shape) - token_rank :],
        item_bytes=item_bytes(array.dtype),
    )


def make_row_source(
    pool: Any,
    path: PoolPath,
    *,
    token_rank: int,
    layer: int | None = None,
    page_rank: int | None = None,
    byte_offset: int = 0,
    num_bytes_per_token: int | None = None,
    read_bytes: int | None = None,
) -> SourceSpec:
    """Describe tokens whose bytes are one run in the trailing axes of an array.

    The array's axes are, in order: layers, where ``layer`` is given; slots, or pages and the slots of a page; a token's own. With
    ``byte_offset`` and ``num_bytes_per_token`` the source is a part of each token, such as K where K and V of a token share a row.

    Args:
        pool: the pool; only shapes and dtypes are looked at.
        path: steps from the pool to the array: ``("k_buffer", 0)`` is ``pool.k_buffer[0]``.
        token_rank: how many trailing axes belong to one token, at least 1.
        layer: index on the leading axis of an array for all layers, negative from the end; None for an array of one layer.
        page_rank: how many axes count the slots of a page; None is none or one, whichever the array's rank leaves.
        byte_offset: where the part starts in a token's bytes, a multiple of 8.
        num_bytes_per_token: bytes of the part, a multiple of 8; None is up to the end of the token.
        read_bytes: bytes of it that mode ALL hashes, a multiple of 8; None is all of them.

    Returns:
        A description that fits the pool.

    Danger:
        A layer's source ends where the array ends: give its canary buffers as many slots as the layer has, no more.

    Raises:
        ValueError: no such path or layer, an array of another rank, a part outside the token, or bytes that are no 8-byte words.
        TypeError: a number is not an int. NotImplementedError: elements smaller than a byte.
    """
    path = tuple(path)
    array = _array_at(pool, path)
    check_int(token_rank, "token_rank", 1, INT32_MAX)
    if page_rank is not None:
        check_int(page_rank, "page_rank", 0, INT32_MAX)
    layout = row_layout(array, path, token_rank, stacked=layer is not None, page_rank=page_rank)
    check_bytes(byte_offset, "byte_offset", low=0)
    if num_bytes_per_token is None:
        num_bytes_per_token = layout.token_bytes - byte_offset
    check_bytes(num_bytes_per_token, "num_bytes_per_token", low=8)
    if byte_offset + num_bytes_per_token > layout.token_bytes:
        raise ValueError(
            f"`byte_offset` = {byte_offset} and `num_bytes_per_token` = {num_bytes_per_token} reach past the {layout.token_bytes} bytes "
            f"that a token has at {path!r}."
        )
    check_bytes(layout.token_bytes, "token_stride_bytes", low=8)
    return _fitting(
        pool,
        SourceSpec(
            path=path,
            page_size=layout.page_size,
            num_bytes_per_token=num_bytes_per_token,
            read_bytes=num_bytes_per_token if read_bytes is None else read_bytes,
            byte_offset=_layer_index(layer, layout.num_layers, path) * layout.num_slots * layout.token_bytes + byte_offset,
            row_stride_bytes=None if layer is None else layout.page_size * layout.token_bytes,
            token_stride_bytes=None if num_bytes_per_token == layout.token_bytes else layout.token_bytes,
        ),
    )


def make_packed_source(
    pool: Any,
    path: PoolPath,
    *,
    page_size: int,
    num_bytes_per_token: int,
    layer: int | None = None,
    byte_offset: int = 0,
    token_stride_bytes: int | None = None,
    read_bytes: int | None = None,
) -> SourceSpec:
    """Describe tokens in pages that are rows of raw bytes, perhaps with padding at their end.

    The array is (pages, page_bytes), or (layers, pages, page_bytes) where ``layer`` is given. A page whose values and scales lie in two
    regions is described by two sources.

    Args:
        pool: the pool; only shapes and dtypes are looked at.
        path: steps from the pool to the array.
        page_size: slots in one page.
        num_bytes_per_token: bytes of one token, a multiple of 8.
        layer: index on the leading axis of an array for all layers, negative from the end; None for an array of one layer.
        byte_offset: where the first token starts in a page, a multiple of 8.
        token_stride_bytes: bytes from one token to the next in a page, a multiple of 8; None is ``num_bytes_per_token``.
        read_bytes: bytes of a token that mode ALL hashes, a multiple of 8; None is all of them.

    Returns:
        A description that fits the pool.

    Raises:
        ValueError: no such path or layer, an array of another rank, pages that are too small, or bytes that are no 8-byte words.
        TypeError: a number is not an int. NotImplementedError: elements smaller than a byte.
    """
    path = tuple(path)
    array = _array_at(pool, path)
    check_int(page_size, "page_size", 1, INT32_MAX)
    check_bytes(num_bytes_per_token, "num_bytes_per_token", low=8)
    check_bytes(byte_offset, "byte_offset", low=0)
    stride = num_bytes_per_token if token_stride_bytes is None else token_stride_bytes
    check_bytes(stride, "token_stride_bytes", low=8)
    axes = ("layers", "pages", "page_bytes")[layer is None :]
    if len(array.shape) != len(axes):
        raise ValueError(
            f"`pool` has pages of shape {list(array.shape)} at {path!r}, but they must have {len(axes)} axes ({', '.join(axes)})."
        )
    layout = row_layout(array, path, 1, stacked=layer is not None)
    page_bytes = layout.token_bytes
    needed = byte_offset + (page_size - 1) * stride + num_bytes_per_token
    if needed > page_bytes:
        raise ValueError(f"`page_size` is {page_size}, which needs {needed} bytes a page, but a page at {path!r} has {page_bytes} bytes.")
    check_bytes(page_bytes, "row_stride_bytes", low=8)
    return _fitting(
        pool,
        SourceSpec(
            path=path,
            page_size=page_size,
            num_bytes_per_token=num_bytes_per_token,
            read_bytes=num_bytes_per_token if read_bytes is None else read_bytes,
            byte_offset=_layer_index(layer, layout.num_layers, path) * layout.num_slots * page_bytes + byte_offset,
            row_stride_bytes=None if layer is None else page_bytes,
            token_stride_bytes=token_stride_bytes,
        ),
    )


def _array_at(pool: Any, path: PoolPath) -> ArrayLike:
    array = resolve_path(pool, path)
    check_array(array, f"pool at {path!r}")
    return array


def _layer_index(layer: int | None, num_layers: int | None, path: PoolPath) -> int:
    """The layer counted from 0; 0 for an array of one layer."""
    if layer is None or num_layers is None:
        return 0
    return check_int(layer, "layer", -num_layers, num_layers - 1, f", since the array at {path!r} has {num_layers} layers") % num_layers


def _fitting(pool: Any, spec: SourceSpec) -> SourceSpec:
    """The description, once binding it has checked the geometry."""
    spec.bind(pool)
    return spec
