"""Hashes of the contract's section 2 on Python ints and on NumPy arrays, and the layout of a record.

Hashes are ints in [0, 2^64), or uint64. Records and rows of the log hold them as signed 64-bit integers with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from jax_kvcanary._checks import ArrayLike, check_dtype
from jax_kvcanary.constants import CANARY_CHAIN_ANCHOR, CANARY_SLOT_BYTES, RealKvHashMode
from jax_kvcanary.sources import RealKvSource

#: Columns of a record, int64 each.
TOKEN, POSITION, PREV_HASH, REAL_KV_HASH = range(CANARY_SLOT_BYTES // 8)

_WORD_MASK = 2**64 - 1

#: An int, or a NumPy array of words: int64 or uint64, of at least one axis.
Word = TypeVar("Word", int, np.ndarray)


def _word(value: Word, name: str) -> Word:
    if isinstance(value, np.ndarray) and value.ndim:
        check_dtype(value, name, np.int64, np.uint64)
        return value.astype(np.uint64)  # the same bits; NumPy's products of uint64 wrap around
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"`{name}` is {value!r} of type {type(value).__name__}, but it must be an int.")
    return int(value) & _WORD_MASK


def splitmix64(x: Word) -> Word:
    """The finaliser of the generator splitmix64, without its increment: 0 stays 0.

    Args:
        x: any int, taken modulo 2^64; or an array of int64 or uint64.

    Returns:
        An int in [0, 2^64); for an array, uint64 of its shape.

    Raises:
        TypeError: neither of the two.
    """
    x = _word(x, "x")
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _WORD_MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _WORD_MASK
    return x ^ x >> 31


def mix3(a: Word, b: Word, c: Word) -> Word:
    """Hash of three words in order: one link of a chain is ``mix3(prev_hash, token, position)``.

    Args:
        a: any int, taken modulo 2^64; or an array of int64 or uint64. Likewise the others.
        b: the second word.
        c: the third word.

    Returns:
        An int in [0, 2^64); for arrays, uint64 of their common shape.

    Raises:
        TypeError: neither of the two.
    """
    return splitmix64(splitmix64(splitmix64(_word(a, "a")) ^ _word(b, "b")) ^ _word(c, "c"))


#: Hash that stands before the first token of a request.
ANCHOR_HASH = splitmix64(CANARY_CHAIN_ANCHOR)


def slot_records(canary_buf: ArrayLike) -> np.ndarray:
    """The records of a canary buffer, int64 [num_slots, 4]; a view where the buffer is a NumPy array."""
    return np.ascontiguousarray(canary_buf).view("<i8")


def record_hashes(records: np.ndarray) -> np.ndarray:
    """The chain's hash behind each of many records: uint64 [n] of int64 [n, 4].

    The real-KV hash is left out on purpose: requests that share a prefix may have had its bytes computed by batches
    of different shapes.
    """
    return mix3(records[:, PREV_HASH], records[:, TOKEN], records[:, POSITION])


def slot_hash(canary_buf: ArrayLike, slot: int) -> int:
    """The same behind one slot's record, or the anchor's hash where the slot is negative.

    Args:
        canary_buf: uint8 [num_slots, 32].
        slot: below num_slots.
    """
    if slot < 0:
        return ANCHOR_HASH
    token, position, prev_hash, _ = slot_records(canary_buf)[slot].tolist()
    return mix3(prev_hash, token, position)


def source_hash(source: RealKvSource, slot: int, mode: RealKvHashMode) -> int:
    """Hash of the bytes that a source holds for a slot: the first 16 of them in mode PARTIAL, ``read_bytes`` in ALL."""
    flat = np.ascontiguousarray(source.array).reshape(-1).view(np.uint8)
    page, token_in_page = divmod(slot, source.page_size)
    start = source.byte_offset + page * source.row_stride + token_in_page * source.token_stride
    acc = 0
    for word in flat[start : start + source.bytes_read(mode)].view("<u8").tolist():
        acc = splitmix64(acc ^ word)
    return acc


def real_kv_hash(sources: Sequence[RealKvSource], slot: int, mode: RealKvHashMode) -> int:
    """Hash of a slot's real KV over all sources in order; 0 where nothing is hashed."""
    acc = 0
    if mode != RealKvHashMode.NONE:
        for source in sources:
            acc = splitmix64(acc ^ source_hash(source, slot, mode))
    return acc


def to_signed(word: int) -> int:
    """The signed 64-bit integer with the bits of an int taken modulo 2^64."""
    word &= _WORD_MASK
    return word - 2**64 if word >> 63 else word
