"""From a pool's class to its groups: attachers by class and by name, engines' own pools, and pools that cannot be attached."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_kvcanary as kvc
from jax_kvcanary.pools import (
    DeepSeekV4TokenToKVPool,
    FusedMHATokenToKVPool,
    MHATokenToKVPool,
    MHATokenToKVPoolFP4,
    MLATokenToKVPool,
    SWAKVPool,
)

NUM_SLOTS = 15
CAPACITIES = kvc.CanaryLaunchCapacities.from_pool(NUM_SLOTS, 2)


def config(**changes):
    return kvc.CanaryConfig("log", ring_capacity=7, **changes)


def attach(pool, **changes):
    """The pool's groups."""
    return kvc.attach_canary_buffers(pool, config(**changes))


# Attachers by class and by name.


@pytest.fixture
def attachers(monkeypatch):
    """A registry whose changes end with the test."""
    from jax_kvcanary.pools import attach as module

    monkeypatch.setattr(module, "_ATTACHERS", dict(module._ATTACHERS))


class UnknownPool:
    """A class that no attacher knows."""


def unknown_class_text(*more):
    known = sorted(
        [
            "jax_kvcanary.pools.deepseek_v4.DeepSeekV4TokenToKVPool",
            "jax_kvcanary.pools.fp4.MHATokenToKVPoolFP4",
            "jax_kvcanary.pools.fused.FusedMHATokenToKVPool",
            "jax_kvcanary.pools.mha.MHATokenToKVPool",
            "jax_kvcanary.pools.mla.MLATokenToKVPool",
            "jax_kvcanary.pools.swa.SWAKVPool",
            "sgl_jax.srt.mem_cache.memory_pool.MHATokenToKVPool",
            "sgl_jax.srt.mem_cache.memory_pool.MLATokenToKVPool",
            "sgl_jax.srt.mem_cache.memory_pool.SWAKVPool",
            *more,
        ]
    )
    return (
        f"`pool` is of class {__name__}.UnknownPool, which has no canary attacher; supported are {', '.join(known)}, and "
        "register_pool_attacher adds others."
    )


def test_unknown_class(monkeypatch):
    from jax_kvcanary.pools import attach as module

    def is_built_in(key):  # other tests' classes may be registered too
        return isinstance(key, str) or key.__module__.startswith("jax_kvcanary")

    built_in = {key: value for key, value in module._ATTACHERS.items() if is_built_in(key)}
    monkeypatch.setattr(module, "_ATTACHERS", built_in)
    with pytest.raises(NotImplementedError) as caught:
        kvc.attach_canary_buffers(UnknownPool(), config())
    assert str(caught.value) == unknown_class_text()
    kvc.register_pool_attacher("engine.memory.Pool", lambda *_, **__: ())
    with pytest.raises(NotImplementedError) as caught:
        kvc.install_canary(UnknownPool(), config(), capacities=CAPACITIES)
    assert str(caught.value) == unknown_class_text("engine.memory.Pool")


@pytest.mark.usefixtures("attachers")
def test_subclasses_are_not_meant():
    class Other(MHATokenToKVPool):
        pass

    with pytest.raises(NotImplementedError, match="which has no canary attacher"):
        kvc.attach_canary_buffers(Other((), ()), config())


def one_group(calls):
    """An attacher that notes its arguments."""

    def attacher(pool, settings, *, kv_token_id_vs_position_offset):
        calls.append((pool, settings, kv_token_id_vs_position_offset))
        return [kvc.CanaryBufferGroup(kind=kvc.PoolKind.SWA, k_head=kvc.fresh_records(3), k_tail=kvc.fresh_records(3))]

    return attacher


@pytest.mark.usefixtures("attachers")
@pytest.mark.parametrize("key", [UnknownPool, f"{__name__}.UnknownPool"], ids=["class", "name"])
def test_register(key):
    pool, settings, calls = UnknownPool(), config(), []
    kvc.register_pool_attacher(key, one_group(calls))
    groups = kvc.attach_canary_buffers(pool, settings, kv_token_id_vs_position_offset=7)
    assert calls == [(pool, settings, 7)]
    assert isinstance(groups, tuple)
    assert groups[0].kind is kvc.PoolKind.SWA
    replaced = []
    kvc.register_pool_attacher(key, one_group(replaced))
    kvc.attach_canary_buffers(pool, settings)
    assert (len(calls), len(replaced)) == (1, 1)


@pytest.mark.usefixtures("attachers")
def test_geometry_of_a_registered_attacher_is_checked():
    def attacher(pool, settings, *, kv_token_id_vs_position_offset):  # noqa: ARG001
        spec = kvc.SourceSpec(path=("kv",), num_bytes_per_token=32, read_bytes=32)
        return (kvc.CanaryBufferGroup(kind=kvc.PoolKind.FULL, k_head=None, k_tail=None, real_kv_sources_k=(spec,)),)

    kvc.register_pool_attacher(UnknownPool, attacher)
    with pytest.raises(ValueError, match=r"has nothing at \('kv',\): step 'kv' failed on a UnknownPool\.$"):
        kvc.attach_canary_buffers(UnknownPool(), config())


# Engines' own pools.


def engine_pool(name, **fields):
    """An object with the qualified class name and the fields of one of sglang-jax's pools, without an import of the engine."""
    module = "sgl_jax.srt.mem_cache.memory_pool"
    return type(name, (SimpleNamespace,), {"__module__": module, "__qualname__": name})(**fields)


@pytest.mark.parametrize("layout", [{}, {"page_size": 5}, {"page_size": 5, "packing": 2}, {"packing": 2}], ids=str)
def test_interleaved_heads_of_sglang_jax(layout):
    """Its releases have three axes, its later layout five: pages, page size, packs of heads."""
    own = FusedMHATokenToKVPool.allocate(num_slots=NUM_SLOTS, num_layers=3, num_kv_heads=3, head_dim=4, **layout)
    (group,), (want,) = (
        attach(pool, real_kv_layers=(0, -1)) for pool in (engine_pool("MHATokenToKVPool", kv_buffer=list(own.kv_buffer)), own)
    )
    assert jax.tree.structure(group) == jax.tree.structure(want)
    assert [leaf.shape for leaf in jax.tree.leaves(group)] == [(NUM_SLOTS, 32)] * 4
    # Packs and pages are only other names for the same bytes.
    flat = FusedMHATokenToKVPool.allocate(
        num_slots=NUM_SLOTS, num_layers=3, num_kv_heads=3, head_dim=4, page_size=layout.get("page_size", 1)
    )
    for half in ("real_kv_sources_k", "real_kv_sources_v"):
        assert getattr(group, half) == getattr(attach(flat, real_kv_layers=(0, -1))[0], half)


@pytest.mark.parametrize(
    ("shape", "page_size"), [((15, 20), 1), ((15, 1, 20), 1), ((3, 5, 20), 5), ((3, 5, 1, 20), 5), ((3, 2, 2, 20), 4)], ids=str
)
def test_latent_rows_of_sglang_jax(shape, page_size):
    """Rows (slots, 1, dim), or pages whose slots may be counted by two axes, (pages, page_size / packing, packing, dim)."""
    (group,) = attach(engine_pool("MLATokenToKVPool", kv_buffer=[jnp.zeros(shape, jnp.bfloat16)] * 2), real_kv_layers=(-1,))
    assert (group.kind, group.halves, group.real_kv_sources_v) == (kvc.PoolKind.FULL, ("k",), ())
    assert group.k_tail.shape == (np.prod(shape[:-1]), 32)
    want = kvc.SourceSpec(path=("kv_buffer", 1), page_size=page_size, num_bytes_per_token=40, read_bytes=40)
    assert group.real_kv_sources_k == (want,)


def test_the_sliding_window_pool_of_sglang_jax():
    def sub_pool(slots):
        return engine_pool("MHATokenToKVPool", kv_buffer=[jnp.zeros((slots, 6, 4), jnp.bfloat16)] * 2)

    fields = {"full_kv_pool": sub_pool(15), "swa_kv_pool": sub_pool(7)}
    table = np.zeros(15 + 7 + 1, np.int64)  # on the host, longer than the full pool
    full, swa = attach(engine_pool("SWAKVPool", **fields, full_to_swa_index_mapping=table))
    assert (full.kind, full.swa_index_lut, full.k_head.shape[0]) == (kvc.PoolKind.FULL, None, 15)
    assert (swa.kind, swa.swa_index_lut, swa.v_tail.shape[0]) == (kvc.PoolKind.SWA, ("full_to_swa_index_mapping",), 7)
    assert [spec.path for spec in swa.real_kv_sources_v] == [("swa_kv_pool", "kv_buffer", 0)]
    with pytest.raises(TypeError, match=r"^`pool\.full_to_swa_index_mapping` is of type NoneType"):  # before its allocator is there
        attach(engine_pool("SWAKVPool", **fields, full_to_swa_index_mapping=None))


# Pools that cannot be attached.


def mha(**changes):
    sizes = {"num_slots": NUM_SLOTS, "num_layers": 3, "num_kv_heads": 2, "head_dim": 8}
    return MHATokenToKVPool.allocate(**{**sizes, **changes})


def text_of(error, pool, **changes):
    with pytest.raises(error) as caught:
        attach(pool, **changes)
    return str(caught.value)


ATTACHED_BY_FIELD = [
    (FusedMHATokenToKVPool(()), "kv_buffer"),
    (MHATokenToKVPool((), ()), "k_buffer"),
    (MHATokenToKVPoolFP4((), (), (), ()), "k_buffer"),
    (MLATokenToKVPool((), 5), "kv_buffer"),
    (DeepSeekV4TokenToKVPool((), jnp.zeros(5, jnp.int32), 3), "kv_buffer"),
    (MHATokenToKVPool(jnp.zeros((0, 5, 2, 8)), jnp.zeros((0, 5, 2, 8))), "k_buffer"),
]


@pytest.mark.parametrize(("pool", "name"), ATTACHED_BY_FIELD)
def test_pools_without_layers(pool, name):
    assert text_of(ValueError, pool) == f"`pool.{name}` is empty, but it must hold the KV arrays of at least one layer."


def test_layers_must_be_alike():
    pool = mha()
    longer = (pool.k_buffer[0], pool.k_buffer[1], jnp.zeros((16, 2, 8), jnp.bfloat16))
    assert text_of(ValueError, dataclasses.replace(pool, k_buffer=longer)) == (
        "`pool.k_buffer` has bfloat16[15, 2, 8] in layer 0 and bfloat16[16, 2, 8] in layer 2, but all its layers must be alike."
    )
    wider = (pool.v_buffer[0], pool.v_buffer[1].astype(jnp.float32))
    assert text_of(ValueError, dataclasses.replace(pool, v_buffer=wider)) == (
        "`pool.v_buffer` has bfloat16[15, 2, 8] in layer 0 and float32[15, 2, 8] in layer 1, but all its layers must be alike."
    )


def test_v_of_another_shape_than_k():
    """Legal: V heads of another size. Not: another number of slots."""
    (group,) = attach(dataclasses.replace(mha(), v_buffer=mha(head_dim=12).v_buffer))
    assert [spec.read_bytes for spec in (*group.real_kv_sources_k, *group.real_kv_sources_v)] == [32, 48]
    pool = dataclasses.replace(mha(), v_buffer=mha(num_slots=14).v_buffer)
    assert text_of(ValueError, pool) == "`pool.v_buffer` has 14 slots, but it must have as many as `pool.k_buffer`, 15."


def test_a_v_that_is_missing():
    pool = dataclasses.replace(mha(), v_buffer=None)
    assert text_of(ValueError, pool) == "`pool.v_buffer` is None, but it must hold the KV arrays of at least one layer."
    assert not attach(pool, enable_v_half=False)[0].has_v_half


@pytest.mark.parametrize("dtype", [jnp.int4, jnp.uint4, jnp.float4_e2m1fn], ids=str)
@pytest.mark.parametrize("stacked", [False, True])
def test_elements_below_a_byte(dtype, stacked):
    """XLA packs them as it likes: packed bytes, as in the FP4 pool, can be hashed."""
    arrays = jax.ShapeDtypeStruct((2, 15, 2, 16), dtype) if stacked else (jax.ShapeDtypeStruct((15, 2, 16), dtype),) * 2
    text = f"`array` has dtype {np.dtype(dtype)}, whose elements are smaller than a byte; pass the packed bytes as uint8."
    assert text_of(NotImplementedError, MHATokenToKVPool(arrays, arrays)) == text
    assert attach(MHATokenToKVPoolFP4.allocate(num_slots=15, num_layers=2, num_kv_heads=2, head_dim=16))[0].has_v_half


@pytest.mark.parametrize("axes", [2, 6])
def test_interleaved_heads_of_another_rank(axes):
    assert text_of(ValueError, FusedMHATokenToKVPool((jnp.zeros((3,) * axes),))) == (
        f"`pool.kv_buffer` has layers of shape {[3] * axes}, but they must have 3 axes (slots, 2 * kv_heads, head_dim), 4 with "
        "pages and page size first, or 5 with the heads in packs too."
    )


@pytest.mark.parametrize("axes", [1, 5])
def test_latent_rows_of_another_rank(axes):
    assert text_of(ValueError, MLATokenToKVPool(jnp.zeros((2, *(3,) * axes)), 1)) == (
        f"`pool.kv_buffer` has layers of shape {[3] * axes}, but they must have 2 axes (slots, rank + rope), 3 with one axis for "
        "the slots of a page, or 4 with two."
    )


def test_separate_arrays_of_another_rank():
    arrays = (jnp.zeros((3, 2)),)
    assert text_of(ValueError, MHATokenToKVPool(arrays, arrays)) == (
        "`pool` has a KV array of shape [3, 2] at ('k_buffer', 0), but it must have 3 axes, slots first, or 4, pages and page size first."
    )
    assert text_of(ValueError, MHATokenToKVPool(jnp.zeros((3, 5, 2)), None)) == (
        "`pool` has a KV array of shape [3, 5, 2] at ('k_buffer',), but it must have 4 axes, layers and slots first, or 5, layers and "
        "pages and page size first."
    )


@pytest.mark.parametrize("v_half", [True, False])
def test_a_latent_has_no_v(v_half):
    """``enable_v_half`` changes nothing where there is no V."""
    pools = (
        MLATokenToKVPool.allocate(num_slots=15, num_layers=2, kv_lora_rank=13, qk_rope_head_dim=7),
        DeepSeekV4TokenToKVPool.allocate(num_slots=15, full_num_slots=21, num_layers=2),
    )
    for pool in pools:
        (group,), (other,) = (attach(pool, enable_v_half=half) for half in (v_half, True))
        assert jax.tree.structure(group) == jax.tree.structure(other)
        assert (group.v_head, group.v_tail, group.real_kv_sources_v) == (None, None, ())


def test_sizes_that_do_not_fit():
    for allocate, text in (
        (lambda: mha(num_layers=0), r"^`num_layers` is 0, but it must be between 1 and"),
        (
            lambda: FusedMHATokenToKVPool.allocate(num_slots=5, num_layers=1, num_kv_heads=3, head_dim=8, packing=4),
            r"^`packing` is 4, but it must divide 2 \* `num_kv_heads` = 6\.$",
        ),
        (
            lambda: MHATokenToKVPoolFP4.allocate(num_slots=5, num_layers=1, num_kv_heads=3, head_dim=8),
            r"^`head_dim` is 8 with `num_kv_heads` = 3, but it must be even, and a token's elements a multiple of 16\.$",
        ),
        (
            lambda: DeepSeekV4TokenToKVPool.allocate(num_slots=5, full_num_slots=7, num_layers=1, page_size=2),
            r"^`num_slots` is 5, but it must be a positive multiple of `page_size` = 2\.$",
        ),
        (lambda: SWAKVPool.allocate(num_slots=5, swa_num_slots=3, num_layers=2, swa_layers=()), r"^`swa_layers` names 0 of the 2 layers"),
    ):
        with pytest.raises(ValueError, match=text):
            allocate()
