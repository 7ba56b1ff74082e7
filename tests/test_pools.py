"""The reference pools, and which of their bytes a canary fingerprints."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_kvcanary as kvc
from jax_kvcanary.pools import FusedMHATokenToKVPool, MHATokenToKVPool

NUM_SLOTS, LAYERS, HEADS, HEAD_DIM = 15, 3, 3, 4
HEAD_BYTES, TOKEN_BYTES = 8, 24  # of K or V in bfloat16
POOLS = (MHATokenToKVPool, FusedMHATokenToKVPool)
PAGE_SIZES = (1, 5)
CAPACITIES = kvc.CanaryLaunchCapacities.from_pool(NUM_SLOTS, 2)


def make_pool(pool_class, page_size=1, **changes):
    sizes = {"num_slots": NUM_SLOTS, "num_layers": LAYERS, "num_kv_heads": HEADS, "head_dim": HEAD_DIM, "page_size": page_size}
    return pool_class.allocate(**{**sizes, **changes})


def config(**changes):
    return kvc.CanaryConfig("log", ring_capacity=7, **changes)


def arrays_of(pool):
    """The arrays by field name."""
    return {field.name: getattr(pool, field.name) for field in dataclasses.fields(pool)}


def tokens_of(array):
    """A layer's array on the host, bytes of one slot a row, to be changed in place."""
    host = np.array(array)
    return host, host.view(np.uint8).reshape(NUM_SLOTS, -1)


def kv_of(pool, layer):
    """K and V of a layer, float32 [slots, heads, head_dim], however the pool keeps them."""
    if isinstance(pool, MHATokenToKVPool):
        parts = pool.k_buffer[layer], pool.v_buffer[layer]
    else:
        both = pool.kv_buffer[layer].reshape(NUM_SLOTS, HEADS, 2, HEAD_DIM)
        parts = both[:, :, 0], both[:, :, 1]
    return tuple(np.asarray(part, np.float32).reshape(NUM_SLOTS, HEADS, HEAD_DIM) for part in parts)


def values(tokens, seed):
    """Small whole numbers, exact in bfloat16."""
    return np.random.default_rng(seed).integers(-100, 100, (tokens, HEADS, HEAD_DIM)).astype(np.float32)


# Pools by themselves.


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("pool_class", POOLS)
def test_allocate(pool_class, page_size):
    pool = make_pool(pool_class, page_size)
    assert (pool.num_slots, pool.page_size) == (NUM_SLOTS, page_size)
    leading = (NUM_SLOTS,) if page_size == 1 else (NUM_SLOTS // page_size, page_size)
    heads = HEADS if pool_class is MHATokenToKVPool else 2 * HEADS
    leaves = jax.tree.leaves(pool)
    assert len(leaves) == LAYERS * len(arrays_of(pool))
    for leaf in leaves:
        assert (leaf.shape, leaf.dtype) == ((*leading, heads, HEAD_DIM), jnp.bfloat16)
        assert not np.asarray(leaf, np.float32).any()
    assert {leaf.dtype for leaf in jax.tree.leaves(make_pool(pool_class, dtype=jnp.float32))} == {np.dtype(np.float32)}


@pytest.mark.parametrize("pool_class", POOLS)
@pytest.mark.parametrize(("num_slots", "page_size"), [(16, 5), (0, 1), (-5, 5), (5, 0), (3, 5)])
def test_pages_must_fit(pool_class, num_slots, page_size):
    with pytest.raises(ValueError, match=r"^`num_slots`") as caught:
        make_pool(pool_class, page_size, num_slots=num_slots)
    assert str(caught.value) == f"`num_slots` is {num_slots}, but it must be a positive multiple of `page_size` = {page_size}."


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("pool_class", POOLS)
def test_write_stores_tokens_and_drops_what_has_no_slot(pool_class, page_size, jit):
    pool = make_pool(pool_class, page_size)
    slots = np.array([13, -1, 2, NUM_SLOTS, 7, -NUM_SLOTS, 2**31 - 1, 0, -(2**31), 14], np.int32)
    k, v = values(len(slots), 1), values(len(slots), 2)

    def write(pool, slots, k, v):
        return pool.write(1, slots, k, v)

    written = (jax.jit(write, donate_argnums=0) if jit else write)(pool, slots, k, v)
    assert isinstance(written, pool_class)
    inside = (slots >= 0) & (slots < NUM_SLOTS)
    for layer in range(LAYERS):
        for got, value in zip(kv_of(written, layer), (k, v), strict=True):
            want = np.zeros_like(got)
            if layer == 1:
                want[slots[inside]] = value[inside]
            np.testing.assert_array_equal(got, want)


def test_write_leaves_the_old_pool_alone():
    pool = make_pool(MHATokenToKVPool)
    pool.write(0, jnp.array([3]), values(1, 1), values(1, 2))
    assert not any(np.asarray(leaf, np.float32).any() for leaf in jax.tree.leaves(pool))


def test_interleaved_heads_alternate():
    k, v = values(1, 1), values(1, 2)
    pool = make_pool(FusedMHATokenToKVPool).write(2, jnp.array([3]), k, v)
    stored = np.asarray(pool.kv_buffer[2], np.float32)[3]
    np.testing.assert_array_equal(stored[0::2], k[0])
    np.testing.assert_array_equal(stored[1::2], v[0])


# Which bytes are fingerprinted.


def fill(pool):
    """Different bytes in every slot and layer."""
    slots = jnp.arange(NUM_SLOTS)
    for layer in range(LAYERS):
        pool = pool.write(layer, slots, values(NUM_SLOTS, layer), values(NUM_SLOTS, layer + 10))
    return pool


def stamp(pool, settings, slots):
    """A canary whose tail records of one request's slots fingerprint the pool, and a jitted sweep over them."""
    canary, state = kvc.install_canary(pool, settings, capacities=CAPACITIES)
    table = np.zeros((2, 8), np.int32)
    table[1, : len(slots)] = slots
    batch = kvc.ForwardBatch.extend(
        input_ids=np.arange(20, 20 + len(slots), dtype=np.int32),
        positions=np.arange(len(slots), dtype=np.int32),
        out_cache_loc=np.array(slots, np.int32),
        req_pool_indices=np.array([1], np.int32),
        prefix_lens=np.array([0], np.int32),
        extend_seq_lens=np.array([len(slots)], np.int32),
        req_to_token=table,
    )

    @jax.jit
    def prefill(state, pool):
        return canary.post_forward(*canary.pre_forward(state, batch, pool), batch, pool)[0]

    rows = kvc.PlanInput(*(np.array([n], np.int32) for n in (1, len(slots), 0)))
    verify_plan = kvc.plan(rows, table, verify_capacity=11).verify

    @jax.jit
    def sweep(state, pool):
        return canary.sweep(state, verify_plan, pool)[1]

    state = prefill(state, pool)
    return lambda live_pool: found(sweep(state, live_pool))


def found(report):
    """What a sweep found: {(half, slot, reasons)}."""
    rows = kvc.to_int64(report.violation_ring)[: int(report.violation_write_index[0])]
    return {(kvc.CanaryLaunchTag(row[0]).name.split("_")[1].lower(), row[1], kvc.FailReason(row[7])) for row in rows.tolist()}


def flipped(pool, name, layer, slot, byte):
    """The pool with one byte changed."""
    host, tokens = tokens_of(getattr(pool, name)[layer])
    tokens[slot, byte] ^= 1
    arrays = list(getattr(pool, name))
    arrays[layer] = jnp.asarray(host)
    return dataclasses.replace(pool, **{name: tuple(arrays)})


def halves_that_read(name, layer, byte, settings):
    """The halves whose records change with a byte of a token, as the attachers document it."""
    if settings.real_kv_hash_mode == kvc.RealKvHashMode.NONE or layer not in {hashed % LAYERS for hashed in settings.real_kv_layers}:
        return set()
    if name == "kv_buffer":  # K from the first head on, V from the second, each up to its last
        run = 2 * TOKEN_BYTES - HEAD_BYTES
        starts = {"k": 0, "v": HEAD_BYTES}
    else:
        run = TOKEN_BYTES
        starts = {name[0]: 0}
    read = min(16, run) if settings.real_kv_hash_mode == kvc.RealKvHashMode.PARTIAL else run
    halves = {half for half, start in starts.items() if start <= byte < start + read}
    return halves if settings.enable_v_half else halves - {"v"}


SETTINGS = {
    "all": config(real_kv_hash_mode=2),
    "partial": config(real_kv_hash_mode=1, real_kv_layers=(-1,)),
    "two layers": config(real_kv_hash_mode=2, real_kv_layers=(2, -3)),
    "no V": config(real_kv_hash_mode=2, enable_v_half=False),
    "none": config(real_kv_hash_mode=0),
}


@pytest.mark.parametrize("pool_class", POOLS)
@pytest.mark.parametrize(("name", "page_size"), [("all", 1), ("all", 5), ("partial", 5), ("two layers", 1), ("no V", 1), ("none", 1)])
def test_fingerprinted_bytes(pool_class, page_size, name):
    settings = SETTINGS[name]
    pool = fill(make_pool(pool_class, page_size))
    sweep = stamp(pool, settings, slots=[13, 4, 7])
    assert sweep(pool) == set()
    for name, layers in arrays_of(pool).items():
        for layer in range(len(layers)):
            for byte in range(tokens_of(layers[layer])[1].shape[1]):
                want = {(half, 4, kvc.FailReason.VERIFY_REAL_KV_HASH_MISMATCH) for half in halves_that_read(name, layer, byte, settings)}
                assert sweep(flipped(pool, name, layer, 4, byte)) == want, (name, layer, byte)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("pool_class", POOLS)
def test_each_slot_has_its_own_bytes(pool_class, page_size):
    pool = fill(make_pool(pool_class, page_size))
    sweep = stamp(pool, config(real_kv_hash_mode=2), slots=[13, 4, 7])
    name = next(iter(arrays_of(pool)))
    for slot in range(NUM_SLOTS):
        assert {entry[1] for entry in sweep(flipped(pool, name, 0, slot, 9))} == {slot} & {13, 4, 7}


# Attaching.


def attach(pool, **changes):
    (group,) = kvc.attach_canary_buffers(pool, config(**changes))
    return group


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("pool_class", POOLS)
def test_attached_group(pool_class, page_size):
    group = attach(make_pool(pool_class, page_size))
    assert group.kind is kvc.PoolKind.FULL
    assert (group.has_v_half, group.swa_index_lut, group.kv_token_id_vs_position_offset) == (True, None, 0)
    buffers = [group.k_head, group.k_tail, group.v_head, group.v_tail]
    for buffer in buffers:
        assert (buffer.shape, buffer.dtype) == ((NUM_SLOTS, 32), jnp.uint8)
        assert (np.asarray(buffer) == 0xFF).all()
    assert len({buffer.unsafe_buffer_pointer() for buffer in buffers}) == 4  # each can be donated
    assert len(group.real_kv_sources_k) == len(group.real_kv_sources_v) == 1
    assert {spec.page_size for spec in (*group.real_kv_sources_k, *group.real_kv_sources_v)} == {page_size}
    hash(jax.tree.structure(group))


def test_geometry_of_separate_arrays():
    group = attach(make_pool(MHATokenToKVPool, 5), real_kv_layers=(0, -1))
    for half, specs in (("k", group.real_kv_sources_k), ("v", group.real_kv_sources_v)):
        assert specs == tuple(
            kvc.SourceSpec(path=(f"{half}_buffer", layer), page_size=5, num_bytes_per_token=TOKEN_BYTES, read_bytes=TOKEN_BYTES)
            for layer in (0, 2)
        )


def test_geometry_of_interleaved_heads():
    group = attach(make_pool(FusedMHATokenToKVPool, 5), real_kv_layers=(1,))
    run = 2 * TOKEN_BYTES - HEAD_BYTES
    for offset, specs in ((0, group.real_kv_sources_k), (HEAD_BYTES, group.real_kv_sources_v)):
        assert specs == (
            kvc.SourceSpec(
                path=("kv_buffer", 1),
                page_size=5,
                num_bytes_per_token=run,
                read_bytes=run,
                byte_offset=offset,
                token_stride_bytes=2 * TOKEN_BYTES,
            ),
        )


@pytest.mark.parametrize("pool_class", POOLS)
def test_without_a_v_half(pool_class):
    group = attach(make_pool(pool_class), enable_v_half=False)
    assert (group.has_v_half, group.v_head, group.v_tail, group.real_kv_sources_v) == (False, None, None, ())
    assert group.halves == ("k",)
    assert len(group.real_kv_sources_k) == 1


@pytest.mark.parametrize("pool_class", POOLS)
def test_mode_none_binds_no_sources(pool_class):
    group = attach(make_pool(pool_class), real_kv_hash_mode=0, real_kv_layers=(LAYERS,))
    assert (group.real_kv_sources_k, group.real_kv_sources_v) == ((), ())


@pytest.mark.parametrize("layer", [LAYERS, -LAYERS - 1])
@pytest.mark.parametrize("pool_class", POOLS)
def test_a_layer_that_is_not_there(pool_class, layer):
    with pytest.raises(ValueError, match=r"^`config") as caught:
        attach(make_pool(pool_class), real_kv_layers=(0, layer))
    assert str(caught.value) == f"`config.real_kv_layers` names layer {layer}, but the pool has {LAYERS} layers."


def test_kv_bytes_that_are_no_words():
    with pytest.raises(ValueError, match=r"^`num_bytes_per_token` is 18, but byte counts must be multiples of 8"):
        attach(make_pool(MHATokenToKVPool, head_dim=3))
    with pytest.raises(ValueError, match=r"^`num_bytes_per_token` is 30, but byte counts must be multiples of 8"):
        attach(make_pool(FusedMHATokenToKVPool, head_dim=3))
    for pool_class in POOLS:
        assert attach(make_pool(pool_class, head_dim=3), real_kv_hash_mode=0).has_v_half


@pytest.mark.parametrize("pool_class", POOLS)
@pytest.mark.parametrize("offset", [1, -3])
def test_token_offset_reaches_the_groups(pool_class, offset):
    pool = make_pool(pool_class)
    (group,) = kvc.attach_canary_buffers(pool, config(), kv_token_id_vs_position_offset=offset)
    _, state = kvc.install_canary(pool, config(), capacities=CAPACITIES, kv_token_id_vs_position_offset=offset)
    assert group.kv_token_id_vs_position_offset == state.groups[0].kv_token_id_vs_position_offset == offset
