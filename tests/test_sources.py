"""Real-KV sources: how many slots a geometry holds, any rank and dtype, hashed where they are, and static descriptions."""

from __future__ import annotations

import dataclasses
import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_kvcanary as kvc
from helpers.backends import host
from helpers.states import fields, fresh_state, records
from jax_kvcanary.reference.hashes import to_signed

NONE, PARTIAL, ALL = kvc.RealKvHashMode


def slots_inside(source):
    """The rule read out aloud: slots from 0 on, as long as their bytes are inside the array."""
    slot = 0
    while True:
        page, in_page = divmod(slot, source.page_size)
        row_stride = math.prod(source.array.shape[1:]) * source.array.dtype.itemsize
        row_stride = row_stride if source.row_stride_bytes is None else source.row_stride_bytes
        token_stride = source.num_bytes_per_token if source.token_stride_bytes is None else source.token_stride_bytes
        if source.byte_offset + page * row_stride + in_page * token_stride + source.num_bytes_per_token > source.array.nbytes:
            return slot
        slot += 1


def random_geometry(rng):
    """A source over a few hundred bytes whose strides may leave gaps, or let pages overlap."""
    token_bytes = 8 * rng.randint(1, 5)
    strides = {
        "row_stride_bytes": rng.choice([None, 8 * rng.randint(1, 40)]),
        "token_stride_bytes": rng.choice([None, token_bytes + 8 * rng.randint(0, 3)]),
    }
    return kvc.RealKvSource(
        array=np.zeros((rng.randint(1, 17), 8 * rng.randint(1, 9)), np.uint8),
        page_size=rng.choice([1, 2, 3, 5, 7, 16]),
        num_bytes_per_token=token_bytes,
        read_bytes=8 * rng.randint(1, token_bytes // 8),
        byte_offset=8 * rng.choice([0, 0, 1, 3, 7]),
        **strides,
    )


def test_num_slots_is_the_brute_force_count():
    rng = random.Random(20011)
    counts = []
    while len(counts) < 1500:
        try:
            source = random_geometry(rng)
        except ValueError as error:
            if "but slot 0 needs the bytes" not in str(error):
                raise
            continue
        counts.append(source.num_slots)
        assert counts[-1] == slots_inside(source), source
    assert {1, 2, 3} < set(counts)


def test_default_geometry():
    source = kvc.RealKvSource(array=np.zeros((13, 3, 8), np.float16), num_bytes_per_token=48, read_bytes=24)
    assert (source.page_size, source.byte_offset, source.row_stride, source.token_stride) == (1, 0, 48, 48)
    assert (source.num_bytes, source.num_slots) == (13 * 48, 13)
    paged = kvc.RealKvSource(array=np.zeros((5, 7, 3, 8), np.float16), page_size=7, num_bytes_per_token=48, read_bytes=48)
    assert (paged.row_stride, paged.token_stride, paged.num_slots) == (336, 48, 35)


def test_a_source_of_one_axis():
    source = kvc.RealKvSource(array=np.zeros(17, np.uint64), num_bytes_per_token=16, read_bytes=8)
    assert (source.row_stride, source.num_slots) == (8, 16)


@pytest.mark.parametrize(("mode", "read"), [(NONE, 0), (PARTIAL, 16), (ALL, 40)])
def test_bytes_read(mode, read):
    source = kvc.RealKvSource(array=np.zeros((3, 48), np.uint8), num_bytes_per_token=48, read_bytes=40)
    assert source.bytes_read(mode) == read
    assert dataclasses.replace(source, read_bytes=8).bytes_read(mode) == min(read, 8)


# The hash that the custom calls put into a record, against the reference on the same bytes.


def written_hashes(sources, num_slots, mode, buffer_slots=None):
    """Field 3 of the records of slots 1 and up, all written in one launch."""
    slots = np.arange(1, num_slots, dtype=np.int32)
    plan = kvc.WritePlan(np.array([0, len(slots)], np.int32), np.array([-1], np.int32), np.array([1], np.int32))
    buf = kvc.fresh_records(buffer_slots or num_slots)
    state = fresh_state(3)
    buf, state = kvc.write_step(buf, plan, slots, slots, slots, state, tag=2, real_kv_sources=sources, real_kv_hash_mode=mode)
    assert host(state).violation_log.count() == 0
    return fields(buf)[1:num_slots, 3].tolist()


def reference_hashes(sources, num_slots, mode):
    sources = host(tuple(sources))
    return [to_signed(kvc.reference.real_kv_hash(sources, slot, mode)) for slot in range(1, num_slots)]


def random_array(shape, dtype, seed=7):
    """An array of random bytes that are legal in its dtype."""
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return jnp.asarray(np.random.default_rng(seed).integers(0, 2, shape).astype(bool))
    raw = np.random.default_rng(seed).integers(0, 100, (*shape, dtype.itemsize), np.uint8)
    return jnp.asarray(raw.view(dtype)[..., 0])


DTYPES = [
    jnp.bfloat16,
    jnp.float32,
    jnp.float16,
    jnp.float8_e4m3fn,
    jnp.float8_e5m2,
    jnp.bool_,
    jnp.complex64,
    jnp.int8,
    jnp.uint16,
    jnp.int32,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_any_dtype(dtype):
    array = random_array((7, 3, 8), dtype)
    size = 24 * array.dtype.itemsize
    source = kvc.RealKvSource(array=array, num_bytes_per_token=size, read_bytes=size)
    for mode in (PARTIAL, ALL):
        got = written_hashes((source,), 7, mode)
        assert got == reference_hashes((source,), 7, mode)
        assert len(set(got)) == 6


@pytest.mark.parametrize("shape", [(240,), (6, 40), (6, 5, 8), (2, 3, 5, 8), (1, 6, 5, 2, 4), (3, 1, 2, 5, 1, 8)])
def test_any_rank(shape):
    """Six slots of 40 bytes, however the array's axes cut them."""
    source = kvc.RealKvSource(array=random_array(shape, jnp.uint8), num_bytes_per_token=40, read_bytes=40, row_stride_bytes=40)
    flat = dataclasses.replace(source, array=source.array.reshape(-1))
    assert source.num_slots == flat.num_slots == 6
    assert written_hashes((source,), 6, ALL) == reference_hashes((flat,), 6, ALL)


@pytest.mark.parametrize("dtype", [jnp.int4, jnp.uint4, jnp.int2, jnp.float4_e2m1fn], ids=lambda dtype: np.dtype(dtype).name)
def test_elements_below_a_byte_are_refused(dtype):
    with pytest.raises(NotImplementedError) as caught:
        kvc.RealKvSource(array=np.zeros((7, 64), dtype), num_bytes_per_token=32, read_bytes=32)
    name = np.dtype(dtype).name
    assert str(caught.value) == f"`array` has dtype {name}, whose elements are smaller than a byte; pass the packed bytes as uint8."


@pytest.mark.parametrize("mode", [PARTIAL, ALL])
@pytest.mark.parametrize("layer", [0, 2])
def test_one_layer_of_a_stacked_pool(layer, mode):
    layers, slots, token = 3, 11, (2, 12)
    stacked = random_array((layers, slots, *token), jnp.bfloat16)
    in_place = kvc.RealKvSource(array=stacked, num_bytes_per_token=48, read_bytes=48, byte_offset=layer * slots * 48, row_stride_bytes=48)
    alone = kvc.RealKvSource(array=stacked[layer], num_bytes_per_token=48, read_bytes=48)
    assert in_place.num_slots == (layers - layer) * slots
    got = written_hashes((in_place,), slots, mode)
    assert got == reference_hashes((in_place,), slots, mode) == reference_hashes((alone,), slots, mode)


@pytest.mark.parametrize("mode", [PARTIAL, ALL])
@pytest.mark.parametrize("half", [0, 1], ids="kv")
@pytest.mark.parametrize("page_size", [1, 5])
def test_one_half_of_an_interleaved_pool(page_size, half, mode):
    """K and V of a token side by side, (pages, page_size, 2, heads, head_dim), in pages or not."""
    pages, token = 15 // page_size, (3, 4)
    both = random_array((pages, page_size, 2, *token), jnp.float32)
    in_place = kvc.RealKvSource(
        array=both, page_size=page_size, num_bytes_per_token=48, read_bytes=48, byte_offset=half * 48, token_stride_bytes=96
    )
    alone = kvc.RealKvSource(array=both[:, :, half], page_size=page_size, num_bytes_per_token=48, read_bytes=48)
    assert in_place.num_slots == 15
    got = written_hashes((in_place,), 15, mode)
    assert got == reference_hashes((in_place,), 15, mode) == reference_hashes((alone,), 15, mode)


def test_pages_with_gaps_and_several_sources():
    array = random_array((6, 21), jnp.uint32)
    odd = kvc.RealKvSource(
        array=array, page_size=3, num_bytes_per_token=16, read_bytes=8, byte_offset=8, row_stride_bytes=104, token_stride_bytes=24
    )
    other = kvc.RealKvSource(array=random_array((13, 5), jnp.complex64, seed=11), num_bytes_per_token=40, read_bytes=32)
    sources = (odd, other, odd)
    assert written_hashes(sources, 13, ALL) == reference_hashes(sources, 13, ALL)
    assert written_hashes(sources, 13, ALL) != written_hashes((odd, odd, other), 13, ALL)


def test_a_source_may_be_larger_than_the_buffer():
    source = kvc.RealKvSource(array=random_array((17, 16), jnp.uint8), num_bytes_per_token=16, read_bytes=16)
    assert written_hashes((source,), 5, ALL, buffer_slots=7) == reference_hashes((source,), 5, ALL)


def test_verify_reads_the_same_bytes():
    """A byte that the geometry gives to a slot shows there, and one in a gap nowhere."""
    array = np.array(random_array((5, 48), jnp.uint8))
    geometry = {"num_bytes_per_token": 32, "read_bytes": 24, "byte_offset": 8}
    want = reference_hashes((kvc.RealKvSource(array=array, **geometry),), 5, ALL)
    buf = records([(-1, -1, -1, -1), *((slot, slot, 99, value) for slot, value in enumerate(want, 1))])
    slots = np.arange(1, 5, dtype=np.int32)
    plan = kvc.VerifyPlan(slots, -np.ones_like(slots), slots, np.zeros_like(slots), np.array([4], np.int32), np.array([1], np.int32))

    @jax.jit
    def found(array):
        source = kvc.RealKvSource(array=array, **geometry)
        state = kvc.CanaryDeviceState.allocate(kvc.CanaryConfig("log", ring_capacity=5))
        return kvc.verify_step(buf, plan, state, tag=4, real_kv_sources=(source,), real_kv_hash_mode=ALL).violation_log

    assert found(array).count() == 0
    for byte in range(array.size):
        slot, at = divmod(byte, 48)
        broken = array.copy()
        broken.flat[byte] ^= 4
        rows = found(broken).rows()
        hit = slot > 0 and 8 <= at < 32
        assert [(row[1], row[7]) for row in rows.tolist()] == [(slot, kvc.FailReason.VERIFY_REAL_KV_HASH_MISMATCH)] * hit


# Sources as pytrees.


def make_source():
    return kvc.RealKvSource(array=random_array((7, 24), jnp.uint8), num_bytes_per_token=24, read_bytes=16)


def test_a_source_is_a_pytree_of_its_array():
    source = make_source()
    assert jax.tree.leaves(source) == [source.array]
    doubled = jax.tree.map(lambda array: jnp.concatenate([array, array]), source)
    assert (doubled.num_slots, doubled.read_bytes) == (14, 16)
    assert jax.tree.map(lambda array: array.shape, source).array == (7, 24)
    assert jax.tree.map(lambda _: None, source).array is None
    assert jax.tree.structure(source) == jax.tree.structure(jax.tree.map(jnp.zeros_like, source))
    assert jax.tree.structure(source) != jax.tree.structure(dataclasses.replace(source, read_bytes=24))


def test_a_source_under_jit_and_eval_shape():
    source, traces = make_source(), []

    @jax.jit
    def hashes(source):
        traces.append(source.read_bytes)
        slots = jnp.arange(1, 7, dtype=jnp.int32)
        plan = kvc.WritePlan(jnp.array([0, 6]), jnp.array([-1]), jnp.array([1]))
        state = kvc.CanaryDeviceState.allocate(kvc.CanaryConfig("log", ring_capacity=3))
        buf = kvc.fresh_records(7)
        return kvc.write_step(buf, plan, slots, slots, slots, state, tag=3, real_kv_sources=(source,), real_kv_hash_mode=ALL)[0]

    assert fields(hashes(source))[1:, 3].tolist() == reference_hashes((source,), 7, ALL)
    shape = jax.eval_shape(lambda source: source, source)
    assert isinstance(shape.array, jax.ShapeDtypeStruct)
    assert shape.num_slots == 7
    assert jax.eval_shape(hashes, shape).shape == (7, 32)
    hashes(jax.tree.map(lambda array: array + 1, source))
    hashes(dataclasses.replace(source, read_bytes=24))
    assert traces == [16, 24]  # a new array is no new program, a new geometry is


# Static descriptions.


@dataclasses.dataclass
class Layer:
    kv: object


SPEC = kvc.SourceSpec(
    path=("layers", 1, "kv"), page_size=3, num_bytes_per_token=16, read_bytes=8, byte_offset=8, row_stride_bytes=64, token_stride_bytes=24
)


class Pool:
    """A pool with a path of an attribute, an index and an attribute, and one through mappings."""

    def __init__(self, array):
        self.layers = [Layer(None), Layer(array)]
        self.by_name = {"k": {0: array}}


def test_a_description_binds_the_live_array():
    array = np.zeros((5, 64), np.uint8)
    source = SPEC.bind(Pool(array))
    assert source.array is array
    for field in dataclasses.fields(kvc.RealKvSource):
        if field.name != "array":
            assert getattr(source, field.name) == getattr(SPEC, field.name)
    fresh = np.ones((5, 64), np.uint8)
    assert SPEC.bind(Pool(fresh)).array is fresh


def test_paths_lead_through_mappings_and_from_any_root():
    array = np.zeros((5, 64), np.uint8)
    geometry = {"num_bytes_per_token": 64, "read_bytes": 64}
    assert kvc.SourceSpec(path=("by_name", "k", 0), **geometry).bind(Pool(array)).array is array
    assert kvc.SourceSpec(path=("k", 1), **geometry).bind({"k": (None, array)}).array is array
    assert kvc.SourceSpec(path=(0,), **geometry).bind([array]).array is array
    assert kvc.SourceSpec(path=(), **geometry).bind(array).array is array


@pytest.mark.parametrize(
    ("path", "step", "kind"),
    [
        (("heads", 0), "'heads'", "Pool"),
        (("layers", 2, "kv"), "2", "list"),
        (("layers", 1, "v"), "'v'", "Layer"),
        (("layers", 1, 0), "0", "Layer"),
        (("by_name", "v"), "'v'", "dict"),
        (("by_name", "k", 1), "1", "dict"),
        (("layers", "k"), "'k'", "list"),
    ],
)
def test_a_path_that_leads_nowhere(path, step, kind):
    spec = kvc.SourceSpec(path=path, num_bytes_per_token=64, read_bytes=64)
    with pytest.raises(ValueError, match=r"^`pool` of class Pool has nothing at") as caught:
        spec.bind(Pool(np.zeros((5, 64), np.uint8)))
    assert str(caught.value) == f"`pool` of class Pool has nothing at {path!r}: step {step} failed on a {kind}."


def test_binding_checks_the_geometry():
    with pytest.raises(ValueError, match=r"^`array` has 16 bytes, but slot 0 needs the bytes from 8 to 24\.$"):
        SPEC.bind(Pool(np.zeros((2, 8), np.uint8)))
    with pytest.raises(ValueError, match=r"^`read_bytes` is 24, but a slot has `num_bytes_per_token` = 16 bytes to read\.$"):
        dataclasses.replace(SPEC, read_bytes=24).bind(Pool(np.zeros((5, 64), np.uint8)))


def test_descriptions_are_hashable_values():
    same = dataclasses.replace(SPEC)
    assert (same, hash(same)) == (SPEC, hash(SPEC))
    changes = [
        {"path": ("layers", 0, "kv")},
        {"page_size": 5},
        {"num_bytes_per_token": 24},
        {"read_bytes": 16},
        {"byte_offset": 0},
        {"row_stride_bytes": None},
        {"token_stride_bytes": None},
    ]
    assert len({SPEC, *(dataclasses.replace(SPEC, **change) for change in changes)}) == 1 + len(changes)
