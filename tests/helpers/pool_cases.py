"""Every reference pool and layout, with what NumPy says about it: the values written, the bytes stored, the bytes hashed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

import jax_kvcanary as kvc
from jax_kvcanary.pools import (
    DeepSeekV4TokenToKVPool,
    FusedMHATokenToKVPool,
    MHATokenToKVPool,
    MHATokenToKVPoolFP4,
    MLATokenToKVPool,
    SWAKVPool,
)

LAYERS = 3
#: A prime without pages; with pages of 7 the next multiple.
NUM_SLOTS, PAGED_SLOTS, PAGE_SIZE = 67, 70, 7
FULL, SWA = kvc.PoolKind


def grid(base: Any, layer: int, shift: int, shape: tuple[int, ...]) -> Any:
    """Small whole numbers, float32 [tokens, *shape], that differ by token, layer, half and place; NumPy or JAX as ``base`` is."""
    place = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    base = base.reshape(-1, *[1] * len(shape))
    return ((base * 7 + place * (layer + 1 + shift)) % 61 - 30).astype(np.float32)


def as_bytes(values: Any, dtype: Any = None) -> np.ndarray:
    """uint8 [tokens, bytes] of values [tokens, ...] in a dtype."""
    values = np.asarray(values) if dtype is None else np.asarray(values).astype(dtype)
    return np.ascontiguousarray(values.reshape(len(values), -1)).view(np.uint8)


@dataclass(frozen=True, eq=False)
class Family:
    """What pools of one class do with tokens.

    Fields:
        values: (layer, base) -> what ``write`` takes behind the slots.
        stored: (layer, base) -> by field name, the bytes that each token then has, uint8 [tokens, bytes].
        hashed: by half, the field whose bytes from start to stop are fingerprinted.
    """

    values: Callable[[int, Any], tuple[Any, ...]]
    stored: Callable[[int, Any], dict[str, np.ndarray]]
    hashed: dict[str, tuple[str, int, int]]


def mha_family(heads: int, head_dim: int, dtype: Any) -> Family:
    def values(layer, base):
        return tuple(grid(base, layer, shift, (heads, head_dim)) for shift in (0, 5))

    def stored(layer, base):
        k, v = values(layer, base)
        return {"k_buffer": as_bytes(k, dtype), "v_buffer": as_bytes(v, dtype)}

    size = heads * head_dim * np.dtype(dtype).itemsize
    return Family(values, stored, {"k": ("k_buffer", 0, size), "v": ("v_buffer", 0, size)})


def fused_family(heads: int, head_dim: int, dtype: Any) -> Family:
    values = mha_family(heads, head_dim, dtype).values

    def stored(layer, base):
        interleaved = np.zeros((len(base), 2 * heads, head_dim), np.float32)
        interleaved[:, 0::2], interleaved[:, 1::2] = values(layer, base)
        return {"kv_buffer": as_bytes(interleaved, dtype)}

    head = head_dim * np.dtype(dtype).itemsize
    size = 2 * heads * head
    return Family(values, stored, {"k": ("kv_buffer", 0, size - head), "v": ("kv_buffer", head, size)})


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def quantised_fp4(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Packed bytes and scales of values [tokens, ...], by trying every scale and every code."""
    blocks = values.reshape(len(values), -1, 16).astype(np.float64)
    scales = np.zeros(blocks.shape[:2], np.uint8)
    for exponent in range(-126, 127)[::-1]:
        fits = np.abs(blocks).max(-1) <= 6 * 2.0**exponent
        scales[fits] = exponent + 127
    in_scale = blocks / 2.0 ** (scales[..., None].astype(int) - 127.0)
    codes = np.abs(np.abs(in_scale)[..., None] - E2M1).argmin(-1) + 8 * (in_scale < 0)
    codes = codes.reshape(len(values), -1)
    return (codes[:, 0::2] + 16 * codes[:, 1::2]).astype(np.uint8), scales


def fp4_family(heads: int, head_dim: int) -> Family:
    def values(layer, base):
        stretch = (1 + base % 5).reshape(-1, 1, 1)  # so that tokens differ in their scales
        return tuple(grid(base, layer, shift, (heads, head_dim)) * stretch.astype(np.float32) for shift in (0, 5))

    def stored(layer, base):
        result = {}
        for half, numbers in zip("kv", values(layer, base), strict=True):
            result[f"{half}_buffer"], result[f"{half}_scale_buffer"] = quantised_fp4(np.asarray(numbers))
        return result

    size = heads * head_dim // 2
    return Family(values, stored, {"k": ("k_buffer", 0, size), "v": ("v_buffer", 0, size)})


def mla_family(rank: int, rope: int, dtype: Any) -> Family:
    def values(layer, base):
        return grid(base, layer, 0, (rank,)), grid(base, layer, 5, (rope,))

    def stored(layer, base):
        return {"kv_buffer": as_bytes(np.concatenate(values(layer, base), axis=1), dtype)}

    return Family(values, stored, {"k": ("kv_buffer", 0, (rank + rope) * np.dtype(dtype).itemsize)})


def packed_family() -> Family:
    def values(layer, base):
        return ((grid(base, layer, 0, (584,)) + 30).astype(np.uint8),)

    def stored(layer, base):
        return {"kv_buffer": np.asarray(values(layer, base)[0])}

    return Family(values, stored, {"k": ("kv_buffer", 0, 584)})


@dataclass(frozen=True, eq=False)
class Sub:
    """One group of a case: where its arrays are in the pool, and which layers and slots of the model they hold.

    Fields:
        family: what its arrays hold.
        num_slots: slots of the sub-pool.
        kind: of its group.
        prefix: path from the pool to the sub-pool.
        layers: the model's layers in it.
        table: for an SWA group, its slot for each full-pool slot.
        packed_page_size: slots in a page of raw bytes, or None for arrays of rows.
    """

    family: Family
    num_slots: int
    kind: kvc.PoolKind = FULL
    prefix: tuple[str, ...] = ()
    layers: tuple[int, ...] = tuple(range(LAYERS))
    table: Any = None
    packed_page_size: int | None = None

    def own_slots(self, slots: Any) -> np.ndarray:
        """Full-pool slots in the group's own numbering."""
        return np.asarray(slots) if self.table is None else self.table[np.asarray(slots)]

    def rows(self, pool: Any, name: str, index: int) -> tuple[np.ndarray, np.ndarray]:
        """One layer's array on the host, and its bytes by slot, uint8 [slots, bytes]: a view of the array."""
        array = np.array(getattr(self._within(pool), name)[index])
        if self.packed_page_size is None:
            return array, array.reshape(self.num_slots, -1).view(np.uint8)
        runs = np.lib.stride_tricks.as_strided(array, (len(array), self.packed_page_size, 584), (array.strides[0], 584, 1), writeable=True)
        return array, runs

    def slot_bytes(self, pool: Any, name: str, index: int) -> np.ndarray:
        """The bytes by slot, uint8 [slots, bytes]."""
        return self.rows(pool, name, index)[1].reshape(self.num_slots, -1)

    def flipped(self, pool: Any, name: str, index: int, slot: int, byte: int) -> Any:
        """The pool with one byte of a slot changed."""
        array, rows = self.rows(pool, name, index)
        at = (slot, byte) if self.packed_page_size is None else (*divmod(slot, self.packed_page_size), byte)
        rows[at] ^= 1
        sub_pool = self._within(pool)
        buffer = getattr(sub_pool, name)
        if isinstance(buffer, tuple):
            buffer = (*buffer[:index], jnp.asarray(array), *buffer[index + 1 :])
        else:
            stack = np.array(buffer)
            stack[index] = array
            buffer = jnp.asarray(stack)
        sub_pool = dataclasses.replace(sub_pool, **{name: buffer})
        return dataclasses.replace(pool, **{self.prefix[0]: sub_pool}) if self.prefix else sub_pool

    def _within(self, pool: Any) -> Any:
        return getattr(pool, self.prefix[0]) if self.prefix else pool


@dataclass(frozen=True, eq=False)
class Case:
    """A pool by name, how to allocate it, and its groups."""

    name: str
    make: Callable[[], Any]
    subs: tuple[Sub, ...]

    def __str__(self) -> str:
        return self.name

    def values(self, layer: int, base: Any) -> tuple[Any, ...]:
        """What is written to a layer of the model for tokens of these base numbers."""
        (sub,) = (sub for sub in self.subs if layer in sub.layers)
        return sub.family.values(layer, base)

    def write(self, pool: Any, slots: Any, base: Any) -> Any:
        """The pool with tokens stored in all layers of the model."""
        for layer in range(LAYERS):
            pool = pool.write(layer, slots, *self.values(layer, base))
        return pool


def whole(name: str, pool_class: Any, family: Family, **options: Any) -> Case:
    """A case of one FULL group."""
    num_slots = PAGED_SLOTS if "page_size" in options else NUM_SLOTS
    return Case(name, partial(pool_class.allocate, num_slots=num_slots, num_layers=LAYERS, **options), (Sub(family, num_slots),))


def scrambled(num_slots: int) -> np.ndarray:
    """A table that gives every slot an SWA slot of another number."""
    table = np.zeros(num_slots, np.int32)
    table[1:] = 1 + np.arange(num_slots - 1)[::-1]
    return table


def with_table(allocate: Callable[[], Any], table: np.ndarray) -> Any:
    return allocate().map_slots(np.arange(len(table)), table)


def windowed(name: str, pool_class: Any, family: Family, **options: Any) -> Case:
    """A case of a FULL group with the model's layers 0 and 2, and an SWA group with layer 1."""
    num_slots = PAGED_SLOTS if "page_size" in options else NUM_SLOTS
    table = scrambled(num_slots)
    sizes = {"num_slots": num_slots, "swa_num_slots": num_slots, "num_layers": LAYERS, "swa_layers": (1,)}
    make = partial(with_table, partial(SWAKVPool.allocate, pool_class=pool_class, **sizes, **options), table)
    full = Sub(family, num_slots, FULL, ("full_kv_pool",), (0, 2))
    return Case(name, make, (full, Sub(family, num_slots, SWA, ("swa_kv_pool",), (1,), table)))


def deepseek(name: str, page_size: int) -> Case:
    num_slots = PAGED_SLOTS if page_size > 1 else NUM_SLOTS
    table = scrambled(num_slots)
    sizes = {"num_slots": num_slots, "full_num_slots": num_slots, "num_layers": LAYERS, "page_size": page_size}
    make = partial(with_table, partial(DeepSeekV4TokenToKVPool.allocate, **sizes), table)
    return Case(name, make, (Sub(packed_family(), num_slots, SWA, (), tuple(range(LAYERS)), table, page_size),))


BF16, F32, FP8 = jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn
SIZES = {"num_kv_heads": 3, "head_dim": 4}
MLA_SIZES = {"kv_lora_rank": 13, "qk_rope_head_dim": 7}
PAGES, STACKED = {"page_size": PAGE_SIZE}, {"stacked": True}

CASES = (
    whole("mha", MHATokenToKVPool, mha_family(3, 4, BF16), **SIZES),
    whole("mha pages", MHATokenToKVPool, mha_family(3, 4, F32), **SIZES, **PAGES, dtype=F32),
    whole("mha stacked", MHATokenToKVPool, mha_family(3, 4, F32), **SIZES, **STACKED, dtype=F32),
    whole("mha stacked pages", MHATokenToKVPool, mha_family(3, 4, BF16), **SIZES, **PAGES, **STACKED),
    whole("fused", FusedMHATokenToKVPool, fused_family(3, 4, BF16), **SIZES),
    whole("fused pages", FusedMHATokenToKVPool, fused_family(3, 4, F32), **SIZES, **PAGES, dtype=F32),
    whole("fused stacked", FusedMHATokenToKVPool, fused_family(3, 4, BF16), **SIZES, **STACKED),
    whole("fused packed", FusedMHATokenToKVPool, fused_family(3, 4, BF16), **SIZES, **PAGES, packing=2),
    whole(
        "fused packed stacked",
        FusedMHATokenToKVPool,
        fused_family(4, 8, FP8),
        num_kv_heads=4,
        head_dim=8,
        dtype=FP8,
        packing=4,
        **STACKED,
    ),
    whole("fp4", MHATokenToKVPoolFP4, fp4_family(2, 24), num_kv_heads=2, head_dim=24),
    whole("fp4 pages", MHATokenToKVPoolFP4, fp4_family(1, 32), num_kv_heads=1, head_dim=32, **PAGES),
    whole("mla", MLATokenToKVPool, mla_family(13, 7, BF16), **MLA_SIZES),
    whole("mla pages", MLATokenToKVPool, mla_family(13, 7, BF16), **MLA_SIZES, **PAGES),
    whole("mla stacked", MLATokenToKVPool, mla_family(13, 7, F32), **MLA_SIZES, **STACKED, dtype=F32),
    windowed("swa mha", MHATokenToKVPool, mha_family(3, 4, BF16), **SIZES),
    windowed("swa fused stacked pages", FusedMHATokenToKVPool, fused_family(3, 4, F32), **SIZES, **PAGES, **STACKED, dtype=F32),
    windowed("swa mla", MLATokenToKVPool, mla_family(13, 7, BF16), **MLA_SIZES),
    deepseek("deepseek v4", 1),
    deepseek("deepseek v4 pages", PAGE_SIZE),
)
