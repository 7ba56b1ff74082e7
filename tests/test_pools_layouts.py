"""Sources for people's own pools: rows and packed pages read the bytes that NumPy indexing finds, and nothing else passes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_kvcanary as kvc
from jax_kvcanary import make_packed_source, make_row_source, reference

MODES = (kvc.RealKvHashMode.PARTIAL, kvc.RealKvHashMode.ALL)


def random_array(shape, dtype=np.uint8, seed=7):
    """An array of random bytes."""
    dtype = np.dtype(dtype)
    count = int(np.prod(shape)) * dtype.itemsize
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8).view(dtype).reshape(shape)


def assert_reads(spec, pool, tokens):
    """The source reads, for each slot, the bytes of the same row of ``tokens``, [slots, ...]."""
    tokens = np.ascontiguousarray(tokens).reshape(len(tokens), -1).view(np.uint8)
    alone = kvc.RealKvSource(array=tokens, num_bytes_per_token=tokens.shape[1], read_bytes=tokens.shape[1])
    source = spec.bind(pool)
    assert spec.read_bytes == tokens.shape[1]
    for mode in MODES:
        for slot in range(len(tokens)):
            assert reference.source_hash(source, slot, mode) == reference.source_hash(alone, slot, mode), slot


# Rows.


@pytest.mark.parametrize("dtype", [np.uint8, jnp.bfloat16, np.float32], ids=str)
@pytest.mark.parametrize("pages", [(), (5,)], ids=["slots", "pages"])
@pytest.mark.parametrize("token", [(24,), (3, 8), (3, 2, 4), (1, 3, 2, 4)], ids=str)
def test_one_array_a_layer(token, pages, dtype):
    array = random_array((15 // (pages or (1,))[0], *pages, *token), dtype)
    pool = {"kv": [None, array]}
    spec = make_row_source(pool, ("kv", 1), token_rank=len(token))
    size = 24 * np.dtype(dtype).itemsize
    page_size = (pages or (1,))[0]
    assert spec == kvc.SourceSpec(path=("kv", 1), page_size=page_size, num_bytes_per_token=size, read_bytes=size)
    assert_reads(spec, pool, array.reshape(15, *token))


@pytest.mark.parametrize("pages", [(), (5,)], ids=["slots", "pages"])
@pytest.mark.parametrize("layer", [0, 1, -1, -3])
def test_one_layer_of_a_stacked_array(layer, pages):
    page_size = (pages or (1,))[0]
    array = random_array((3, 15 // page_size, *pages, 2, 12), jnp.bfloat16)
    spec = make_row_source([array], (0,), token_rank=2, layer=layer)
    assert (spec.page_size, spec.row_stride_bytes, spec.byte_offset) == (page_size, page_size * 48, layer % 3 * 15 * 48)
    assert_reads(spec, [array], array[layer].reshape(15, 2, 12))


@pytest.mark.parametrize("layer", [None, 0, -1])
@pytest.mark.parametrize("pages", [(), (5,)], ids=["slots", "pages"])
@pytest.mark.parametrize("half", [0, 1], ids="kv")
def test_k_and_v_side_by_side(half, pages, layer):
    """A token's row is (2, heads, head_dim)."""
    page_size = (pages or (1,))[0]
    array = random_array((*(() if layer is None else (3,)), 15 // page_size, *pages, 2, 3, 4), np.float32)
    spec = make_row_source(array, (), token_rank=3, layer=layer, byte_offset=48 * half, num_bytes_per_token=48)
    own = array if layer is None else array[layer]
    assert_reads(spec, array, own.reshape(15, 2, 3, 4)[:, half])
    assert make_row_source(array, (), token_rank=3, layer=layer, byte_offset=48).num_bytes_per_token == 48  # up to the end


@pytest.mark.parametrize("half", [0, 1], ids="kv")
@pytest.mark.parametrize("token", [(6, 4), (3, 2, 4)], ids=["heads", "packs"])
def test_one_half_of_interleaved_heads(token, half):
    """From the half's first head to its last: K0, V0, K1, V1, K2 without V2, or V0 to V2 without K0."""
    array = random_array((3, 5, *token), jnp.bfloat16)
    spec = make_row_source(array, (), token_rank=len(token), byte_offset=8 * half, num_bytes_per_token=40)
    assert_reads(spec, array, array.reshape(15, 6, 4)[:, half : half + 5])


def test_slots_of_a_page_on_two_axes():
    """(pages, page_size / packing, packing, dim): one row a token."""
    array = random_array((3, 2, 2, 12), jnp.bfloat16)
    spec = make_row_source(array, (), token_rank=1, page_rank=2)
    assert (spec.page_size, spec.num_bytes_per_token) == (4, 24)
    assert_reads(spec, array, array.reshape(12, 12))
    stacked = make_row_source(array[None], (), token_rank=1, page_rank=2, layer=-1)
    assert_reads(stacked, array[None], array.reshape(12, 12))


def test_the_front_of_a_token():
    array = random_array((7, 48))
    spec = make_row_source(array, (), token_rank=1, read_bytes=16)
    assert (spec.num_bytes_per_token, spec.read_bytes) == (48, 16)
    assert reference.source_hash(spec.bind(array), 3, MODES[1]) == reference.source_hash(spec.bind(array), 3, MODES[0])


def test_shapes_are_enough():
    """A pool that is not allocated yet has a geometry all the same."""
    shapes = jax.eval_shape(lambda: {"kv": jnp.zeros((3, 15, 2, 8))})
    arrays = {"kv": np.zeros((3, 15, 2, 8), np.float32)}
    assert make_row_source(shapes, ("kv",), token_rank=2, layer=1) == make_row_source(arrays, ("kv",), token_rank=2, layer=1)


KV = np.zeros((3, 5, 2, 12), np.uint8)

ROW_ERRORS = [
    ({"path": ("v",)}, "`pool` of class dict has nothing at ('v',): step 'v' failed on a dict."),
    ({"path": ("none",)}, "`pool at ('none',)` is of type NoneType, but it must be an array."),
    ({"token_rank": 0}, "`token_rank` is 0, but it must be between 1 and 2147483647."),
    ({"token_rank": True}, "`token_rank` is True of type bool, but it must be an int."),
    (
        {"token_rank": 1},
        "`pool` has a KV array of shape [3, 5, 2, 12] at ('kv',), but it must have 2 axes, slots first, or 3, pages and page size first.",
    ),
    (
        {"token_rank": 4},
        "`pool` has a KV array of shape [3, 5, 2, 12] at ('kv',), but it must have 5 axes, slots first, or 6, pages and page size first.",
    ),
    (
        {"token_rank": 4, "layer": 0},
        "`pool` has a KV array of shape [3, 5, 2, 12] at ('kv',), but it must have 6 axes, layers and slots first, or 7, layers and pages "
        "and page size first.",
    ),
    (
        {"page_rank": 2},
        "`pool` has a KV array of shape [3, 5, 2, 12] at ('kv',), but it must have 5 axes: pages first, 2 for the slots of a page, 2 for a "
        "token.",
    ),
    ({"page_rank": -1}, "`page_rank` is -1, but it must be between 0 and 2147483647."),
    ({"layer": 3}, "`layer` is 3, but it must be between -3 and 2, since the array at ('kv',) has 3 layers."),
    ({"layer": -4}, "`layer` is -4, but it must be between -3 and 2, since the array at ('kv',) has 3 layers."),
    ({"layer": 1.0}, "`layer` is 1.0 of type float, but it must be an int."),
    ({"byte_offset": 4}, "`byte_offset` is 4, but byte counts must be multiples of 8, the width of one hashed word."),
    ({"byte_offset": 24}, "`num_bytes_per_token` is 0, but it must be between 8 and 281474976710656."),
    (
        {"byte_offset": 16, "num_bytes_per_token": 16},
        "`byte_offset` = 16 and `num_bytes_per_token` = 16 reach past the 24 bytes that a token has at ('kv',).",
    ),
    ({"num_bytes_per_token": 12}, "`num_bytes_per_token` is 12, but byte counts must be multiples of 8, the width of one hashed word."),
    ({"read_bytes": 32}, "`read_bytes` is 32, but a slot has `num_bytes_per_token` = 24 bytes to read."),
    ({"read_bytes": 12}, "`read_bytes` is 12, but byte counts must be multiples of 8, the width of one hashed word."),
    ({"path": ("odd",)}, "`num_bytes_per_token` is 21, but byte counts must be multiples of 8, the width of one hashed word."),
    (
        {"path": ("odd",), "num_bytes_per_token": 16},
        "`token_stride_bytes` is 21, but byte counts must be multiples of 8, the width of one hashed word.",
    ),
    ({"path": ("small",)}, "`array` has dtype int4, whose elements are smaller than a byte; pass the packed bytes as uint8."),
    ({"path": ("empty",)}, "`array` has 0 bytes, but slot 0 needs the bytes from 0 to 24."),
]


@pytest.mark.parametrize(("changes", "text"), ROW_ERRORS)
def test_rows_that_are_none(changes, text):
    pool = {
        "kv": KV,
        "none": None,
        "odd": np.zeros((5, 3, 7), np.uint8),
        "small": np.zeros((5, 2, 16), jnp.int4),
        "empty": KV[:0],
    }
    with pytest.raises((ValueError, TypeError, NotImplementedError)) as caught:
        make_row_source(pool, **{"path": ("kv",), "token_rank": 2, **changes})
    assert str(caught.value) == text


# Packed pages.


@pytest.mark.parametrize("layer", [None, 0, 1, -1])
@pytest.mark.parametrize("padding", [0, 40])
def test_packed_pages(padding, layer):
    page_size, size = 7, 72
    array = random_array((*(() if layer is None else (3,)), 5, page_size * size + padding))
    spec = make_packed_source({"kv": array}, ("kv",), page_size=page_size, num_bytes_per_token=size, layer=layer)
    own = array if layer is None else array[layer]
    assert_reads(spec, {"kv": array}, own[:, : page_size * size].reshape(35, size))


def test_values_and_scales_in_regions_of_a_page():
    """Pages of seven tokens: 7 * 576 bytes of values, 7 * 8 of scales, padding. Two sources, hashed in order."""
    array = random_array((5, 4608))
    values = make_packed_source(array, (), page_size=7, num_bytes_per_token=576)
    scales = make_packed_source(array, (), page_size=7, num_bytes_per_token=8, byte_offset=7 * 576)
    assert_reads(values, array, array[:, : 7 * 576].reshape(35, 576))
    assert_reads(scales, array, array[:, 7 * 576 : 7 * 584].reshape(35, 8))


def test_tokens_with_gaps_between():
    array = random_array((5, 3 * 32 + 8), seed=11)
    spec = make_packed_source(array, (), page_size=3, num_bytes_per_token=16, token_stride_bytes=32, byte_offset=8, read_bytes=16)
    assert_reads(spec, array, array[:, 8:].reshape(15, 32)[:, :16])
    wide = random_array((5, 26), np.uint32)  # pages of other elements are bytes all the same
    assert make_packed_source(wide, (), page_size=3, num_bytes_per_token=32, byte_offset=8).bind(wide).num_slots == 15


PACKED_ERRORS = [
    ({"path": ("v",)}, "`pool` of class dict has nothing at ('v',): step 'v' failed on a dict."),
    ({"page_size": 0}, "`page_size` is 0, but it must be between 1 and 2147483647."),
    ({"page_size": 4}, "`page_size` is 4, which needs 96 bytes a page, but a page at ('kv',) has 80 bytes."),
    ({"byte_offset": 16}, "`page_size` is 3, which needs 88 bytes a page, but a page at ('kv',) has 80 bytes."),
    ({"token_stride_bytes": 32}, "`page_size` is 3, which needs 88 bytes a page, but a page at ('kv',) has 80 bytes."),
    ({"num_bytes_per_token": 20}, "`num_bytes_per_token` is 20, but byte counts must be multiples of 8, the width of one hashed word."),
    ({"byte_offset": 4}, "`byte_offset` is 4, but byte counts must be multiples of 8, the width of one hashed word."),
    ({"token_stride_bytes": 28}, "`token_stride_bytes` is 28, but byte counts must be multiples of 8, the width of one hashed word."),
    (
        {"token_stride_bytes": 16},
        "`token_stride_bytes` is 16, but it must be at least `num_bytes_per_token` = 24, or neighbouring slots would share bytes.",
    ),
    ({"path": ("odd",)}, "`row_stride_bytes` is 81, but byte counts must be multiples of 8, the width of one hashed word."),
    ({"read_bytes": 32}, "`read_bytes` is 32, but a slot has `num_bytes_per_token` = 24 bytes to read."),
    ({"layer": 0}, "`pool` has pages of shape [5, 80] at ('kv',), but they must have 3 axes (layers, pages, page_bytes)."),
    ({"path": ("stack",)}, "`pool` has pages of shape [3, 5, 80] at ('stack',), but they must have 2 axes (pages, page_bytes)."),
    ({"path": ("stack",), "layer": 3}, "`layer` is 3, but it must be between -3 and 2, since the array at ('stack',) has 3 layers."),
]


@pytest.mark.parametrize(("changes", "text"), PACKED_ERRORS)
def test_packed_pages_that_are_none(changes, text):
    pool = {"kv": np.zeros((5, 80), np.uint8), "stack": np.zeros((3, 5, 80), np.uint8), "odd": np.zeros((5, 81), np.uint8)}
    with pytest.raises(ValueError, match=r"^`") as caught:
        make_packed_source(pool, **{"path": ("kv",), "page_size": 3, "num_bytes_per_token": 24, **changes})
    assert str(caught.value) == text
