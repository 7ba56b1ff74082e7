"""Faults of the pool: exactly one byte changes, where NumPy says it lies, and a donated pool stays in place. Steps with faults in them."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_kvcanary as kvc
from helpers.hlo import BUFFER_SIZE, NUM_SLOTS, custom_calls, large_copies
from helpers.perturbed import VALID, int32, make_batch, make_pool, make_target, nothing, own_slot, values_of, verified, written
from jax_kvcanary import FailReason, PerturbConfig, PerturbKind, PoolKind, RealKvHashMode, perturb
from jax_kvcanary.pools import FusedMHATokenToKVPool, MHATokenToKVPool
from jax_kvcanary.sources import replace_at_path

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8)
CONFIG = kvc.CanaryConfig("log", ring_capacity=101, real_kv_hash_mode=RealKvHashMode.ALL, real_kv_layers=(0, -1))
CAPACITIES = kvc.CanaryLaunchCapacities(67, 5)
CACHED = int32([-1, 9, 0, 31, 17, 2**31 - 1])


def bytes_of(pool):
    """The bytes of every array of a pool, uint8 [n]."""
    return [np.asarray(leaf).reshape(-1).view(np.uint8) for leaf in jax.tree.leaves(pool)]


def changed_bytes(before, after):
    """(leaf, byte address, old, new) of every byte that differs."""
    found = []
    for leaf, (old, new) in enumerate(zip(bytes_of(before), bytes_of(after), strict=True)):
        found += [(leaf, int(i), int(old[i]), int(new[i])) for i in np.flatnonzero(old != new)]
    return found


def filled(pool, seed=3):
    """A pool of random bytes, NaNs of every sort and subnormals among them."""
    rng = np.random.default_rng(seed)

    def fill(leaf):
        size = np.asarray(leaf).nbytes
        return jnp.asarray(rng.integers(0, 256, size, np.uint8).view(leaf.dtype).reshape(leaf.shape))

    return jax.tree.map(fill, pool)


def address(spec, row_bytes, slot, byte):
    row_stride = spec.row_stride_bytes or row_bytes
    token_stride = spec.token_stride_bytes or spec.num_bytes_per_token
    return spec.byte_offset + slot // spec.page_size * row_stride + slot % spec.page_size * token_stride + byte


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 5])
@pytest.mark.parametrize("pool_class", [MHATokenToKVPool, FusedMHATokenToKVPool])
def test_one_byte_changes_where_the_source_says(pool_class, page_size, dtype):
    pool = filled(pool_class.allocate(num_slots=35, num_layers=3, num_kv_heads=3, head_dim=16, page_size=page_size, dtype=dtype))
    config = kvc.CanaryConfig("log", real_kv_hash_mode=RealKvHashMode.ALL, real_kv_layers=(2, 0))
    canary, state = kvc.install_canary(pool, config, capacities=kvc.CanaryLaunchCapacities(9, 3))
    target = perturb.PerturbTarget.of(canary, state)
    flip = jax.jit(lambda key: perturb.flip_cached_kv(key, target, int32([7, 34, 13]), pool, probability=1.0))
    arrays = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves(pool))}
    sources, slots, odd_bits = set(), set(), set()
    for seed in range(25):
        changed, record = flip(jax.random.key(seed))
        values = values_of(record)
        spec = target.sources[values["source"]]
        array = spec.bind(pool).array
        row_bytes = array.nbytes // array.shape[0]
        want = (arrays[id(array)], address(spec, row_bytes, values["slot"], values["byte"]), values["before"], values["after"])
        assert changed_bytes(pool, changed) == [want]
        assert int32([7, 34, 13])[values["entry"]] == values["slot"]
        assert 0 <= values["byte"] < spec.read_bytes
        sources.add(values["source"])
        slots.add(values["slot"])
        odd_bits.add(values["byte"] % 2)
    assert (sources, slots, odd_bits) == ({0, 1, 2, 3}, {7, 13, 34}, {0, 1})


@pytest.mark.parametrize("kind", PoolKind)
def test_flips_hit_the_slots_of_their_kind(kind):
    batch, pool = make_batch(), make_pool()
    target = make_target(kind)
    names = {"live": perturb.flip_live_kv, "written": perturb.flip_written_kv, "cached": perturb.flip_cached_kv}
    hit = {name: set() for name in names}
    for name, function in names.items():
        given = CACHED if name == "cached" else batch
        flip = jax.jit(partial(lambda function, given, key: function(key, target, given, pool, probability=1.0), function, given))
        for seed in range(60):
            changed, record = flip(jax.random.key(seed))
            values = values_of(record)
            ((leaf, *_),) = changed_bytes(pool, changed)
            assert (leaf // 2, leaf % 2) == (int(kind), values["source"])
            hit[name].add(tuple(values[field] for field in ("row", "position", "entry", "slot")))
    table = batch.req_to_token
    live = {(row, position, -1, own_slot(kind, table[row, position])) for row, position in verified(kind)}
    assert hit["live"] <= live
    assert len(hit["live"]) > 7
    assert hit["written"] == {(row, p, entry, own_slot(kind, table[row, p])) for row, p, entry in written(kind)}
    assert hit["cached"] == {(-1, -1, entry, own_slot(kind, CACHED[entry])) for entry in (1, 3, 4)}
    assert set(VALID) == {row for row, *_ in hit["live"] | hit["written"]}


@pytest.mark.parametrize(
    ("mode", "first_byte", "bytes_hit"), [(1, 0, range(16)), (2, 0, range(48)), (2, 16, range(16, 48)), (1, 13, range(13, 16))]
)
def test_only_the_bytes_of_the_mode(mode, first_byte, bytes_hit):
    target = make_target(real_kv_hash_mode=RealKvHashMode(mode), first_byte=first_byte)
    flip = jax.jit(lambda key: perturb.flip_live_kv(key, target, make_batch(), make_pool(), probability=1.0)[1].byte)
    hit = {int(flip(jax.random.key(seed))) for seed in range(80)}
    assert hit <= set(bytes_hit)
    assert len(hit) >= min(len(bytes_hit), 16)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"real_kv_hash_mode": RealKvHashMode.NONE},
            "`target` has 2 sources and no byte to flip in any of them, from byte 0 on with `real_kv_hash_mode` NONE",
        ),
        ({"sources": ()}, "`target` has 0 sources and no byte to flip in any of them, from byte 0 on with `real_kv_hash_mode` ALL"),
        ({"first_byte": 48}, "`target` has 2 sources and no byte to flip in any of them, from byte 48 on with `real_kv_hash_mode` ALL"),
    ],
)
def test_no_byte_to_flip(changes, text):
    with pytest.raises(ValueError, match=r"^`target` has") as caught:
        perturb.flip_live_kv(jax.random.key(0), make_target(**changes), make_batch(), make_pool(), probability=1.0)
    assert str(caught.value) == f"{text}; take the target of a canary that hashes these bytes."


def test_a_dtype_without_bytes_to_flip():
    pool = jax.tree.map(lambda leaf: leaf.astype(jnp.complex64), make_pool().full_kv_pool)
    target = dataclasses.replace(make_target(), sources=(kvc.SourceSpec(path=("k_buffer", 0), num_bytes_per_token=96, read_bytes=96),))
    with pytest.raises(NotImplementedError) as caught:
        perturb.flip_cached_kv(jax.random.key(0), target, CACHED, pool, probability=1.0)
    assert str(caught.value) == "`pool` has a KV array of dtype complex64, but only bytes of integers and floats can be flipped."


# Putting an array back into a pool.


def test_replace_at_path():
    pool = {"a": [np.zeros(3), np.ones(3)], "b": make_pool()}
    new = np.full(3, 7.0)
    changed = replace_at_path(pool, ("a", 1), new)
    assert changed["a"][1] is new
    assert changed["a"][0] is pool["a"][0]
    assert replace_at_path(pool, ("b", "swa_kv_pool", "v_buffer", 0), new)["b"].swa_kv_pool.v_buffer == (new,)
    same = np.zeros(3)
    assert [leaf is new for leaf in replace_at_path([same, same], (1,), new)] == [False, True]


def test_what_is_no_leaf_cannot_be_replaced():
    with pytest.raises(ValueError, match=r"^`pool` of class dict has no leaf of its pytree at \('a',\), so it cannot be changed there\.$"):
        replace_at_path({"a": [np.zeros(3)]}, ("a",), np.ones(3))
    with pytest.raises(ValueError, match=r"^`pool` of class dict has nothing at \('b',\)"):
        replace_at_path({"a": np.zeros(3)}, ("b",), np.ones(3))
    static = jax.tree_util.Partial(int, 3)
    with pytest.raises(ValueError, match=r"has no leaf of its pytree at \('func',\)"):
        replace_at_path(static, ("func",), np.ones(3))


def decode(position):
    """One token each for three rows of a table that is all different."""
    table = np.arange(7 * 13, dtype=np.int32).reshape(7, 13)
    rows = int32([1, 2, 3])
    return kvc.ForwardBatch.decode(
        input_ids=100 * rows + position,
        positions=np.full(3, position, np.int32),
        out_cache_loc=table[rows, position],
        req_pool_indices=rows,
        req_to_token=table,
    )


def forward(batch, pool):
    k = jnp.broadcast_to((batch.input_ids * 3 + batch.positions)[:, None, None], (3, 2, 8)).astype(jnp.float32)
    for layer in range(2):
        pool = pool.write(layer, batch.out_cache_loc, k + layer, k * 2)
    return k.sum(), pool


def install():
    pool = MHATokenToKVPool.allocate(num_slots=NUM_SLOTS, num_layers=2, num_kv_heads=2, head_dim=8, dtype=jnp.float32)
    canary, state = kvc.install_canary(pool, CONFIG, capacities=CAPACITIES)
    return canary, canary.mark_init_finished(state), pool


# In place.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pool_class", [MHATokenToKVPool, FusedMHATokenToKVPool])
def test_a_donated_pool_is_copied_by_no_step_without_a_fault(pool_class, dtype):
    pool = pool_class.allocate(num_slots=1021, num_layers=2, num_kv_heads=2, head_dim=32 // dtype(0).itemsize, dtype=dtype)
    assert min(leaf.nbytes for leaf in jax.tree.leaves(pool)) >= BUFFER_SIZE
    canary, state = kvc.install_canary(pool, CONFIG, capacities=CAPACITIES)
    target = perturb.PerturbTarget.of(canary, state)

    def plant(pool, step):
        return perturb.flip_live_kv(jax.random.key(0), target, decode(6), pool, probability=1.0, step=step, warmup_steps=3)

    flip = jax.jit(plant, donate_argnums=0)
    text = flip.lower(pool, jnp.int32(0)).compile().as_text()
    assert large_copies(text[text.index("ENTRY") :]) == []  # the branch of a fault passes over the array that it hits
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pool)]
    happened = []
    for step in range(2, 5):
        pool, record = flip(pool, jnp.int32(step))
        happened.append(bool(record.happened))
        if not happened[-1]:
            assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(pool)] == before
    assert happened == [False, True, True]


def wrapped_step(config, **keywords):
    canary, state, pool = install()
    wrapped = perturb.wrap(canary, forward, config)
    return jax.jit(partial(wrapped, **keywords), donate_argnums=(0, 3)), (state, jnp.int32(0), decode(6), pool)


@pytest.mark.parametrize("kinds", [*((kind,) for kind in PerturbKind), tuple(PerturbKind)])
def test_a_step_with_faults_copies_nothing(kinds):
    slots = {"cached_slots": jnp.arange(9, dtype=jnp.int32)} if PerturbKind.CACHED_KV in kinds else {}
    step, arguments = wrapped_step(PerturbConfig(kinds, 0.5), **slots)
    text = step.lower(*arguments).compile().as_text()
    assert large_copies(text[text.index("ENTRY") :]) == []
    assert custom_calls(text) == [0, 0, 1, 1]


@pytest.mark.parametrize("config", [PerturbConfig(), PerturbConfig(("live_kv", "position"), 0.0)])
def test_without_faults_a_step_is_what_it_was(config):
    canary, state, pool = install()
    wrapped, plain = perturb.wrap(canary, forward, config), canary.wrap(forward)

    def program(step):
        def main(state, batch, pool):
            return step(state, batch, pool)[:4]

        return jax.jit(main).lower(state, decode(6), pool).as_text()

    assert program(lambda state, batch, pool: wrapped(state, 7, batch, pool)) == program(plain)
    changes = wrapped(state, 7, decode(6), pool)[4]
    assert list(changes) == [kind.value for kind in config.kinds]  # whoever reads them need not know the probability
    assert not any(change.happened for change in changes.values())


# A step that plants faults.


@pytest.mark.parametrize(
    ("kind", "reason", "later"),
    [
        (PerturbKind.REQ_TO_TOKEN, FailReason.VERIFY_POSITION_MISMATCH, 0),
        (PerturbKind.POSITION, FailReason.WRITE_POSITION_MISMATCH, 0),
        (PerturbKind.LIVE_KV, FailReason.VERIFY_REAL_KV_HASH_MISMATCH, 0),
        (PerturbKind.WRITTEN_KV, FailReason.VERIFY_REAL_KV_HASH_MISMATCH, 1),
        (PerturbKind.CACHED_KV, FailReason.VERIFY_REAL_KV_HASH_MISMATCH, 1),
        (PerturbKind.NEXT_TOKENS, None, None),
    ],
)
def test_wrap_plants_what_the_canary_finds(kind, reason, later):
    warmup, steps = 4, 7
    canary, state, pool = install()
    wrapped = perturb.wrap(canary, forward, PerturbConfig((kind,), 1.0, seed=5, warmup_steps=warmup))
    slots = {"cached_slots": int32([-1, 1 * 13, 2 * 13, 2 * 13 + 1])} if kind is PerturbKind.CACHED_KV else {}
    step = jax.jit(partial(wrapped, **slots), donate_argnums=(0, 3))
    first = None
    for number in range(steps):
        state, report, _, pool, changes = step(state, np.int64(number), decode(number), pool)
        assert set(changes) == {kind.value}
        values = values_of(changes[kind.value])
        assert values["happened"] == (number >= warmup)
        if number < warmup:
            assert values == nothing()
        if number == warmup:
            first = values
        found = kvc.to_int64(report.violation_ring)[: int(report.violation_write_index[0])]
        if reason is None or number < warmup + later:
            assert len(found) == 0
        elif number == warmup + later:
            assert first["slot"] in {row[1] for row in found.tolist() if row[7] & reason}


def test_wrap_is_the_same_for_the_same_seed_and_step():
    canary, state, pool = install()

    def changes(seed, step):
        wrapped = perturb.wrap(canary, forward, PerturbConfig(("position", "live_kv"), seed=seed))
        return {kind: values_of(record) for kind, record in jax.jit(wrapped)(state, step, decode(6), pool)[4].items()}

    want = changes(1, np.int32(3))
    assert want == changes(1, np.int64(3))
    assert want != changes(1, np.int32(4))
    assert want != changes(2, np.int32(3))


def test_wrap_passes_arguments_on():
    canary, state, pool = install()
    wrapped = perturb.wrap(canary, lambda scale, _, pool, *, shift: (scale + shift, pool), PerturbConfig(("live_kv",), 0.5))
    assert wrapped(state, 0, 3, decode(6), pool, shift=4)[2] == 7


@pytest.mark.parametrize(("kinds", "given"), [(("cached_kv",), False), (("live_kv",), True), ((), True)])
def test_cached_slots_are_given_exactly_when_they_are_used(kinds, given):
    canary, state, pool = install()
    wrapped = perturb.wrap(canary, forward, PerturbConfig(kinds))
    with pytest.raises(ValueError, match=r"^`cached_slots`") as caught:
        wrapped(state, 0, decode(6), pool, cached_slots=int32([3]) if given else None)
    assert str(caught.value) == (
        "`cached_slots` is an array, but it must be None when `config` lacks the kind cached_kv."
        if given
        else "`cached_slots` is None, but it must be an array when `config` has the kind cached_kv."
    )


def test_bad_arguments_of_wrap():
    canary, state, pool = install()
    with pytest.raises(TypeError, match=r"^`canary` is of type NoneType, but it must be a Canary, as install_canary returns it\.$"):
        perturb.wrap(None, forward, PerturbConfig())
    with pytest.raises(TypeError, match=r"^`config` is of type CanaryConfig, but it must be a PerturbConfig\.$"):
        perturb.wrap(canary, forward, CONFIG)
    wrapped = perturb.wrap(canary, forward, PerturbConfig(("live_kv",)))
    with pytest.raises(
        TypeError, match=r"^The wrapped forward takes the canary's state and the step's number first, and `batch` and `pool` as "
    ):
        wrapped(state, 0, pool)
    with pytest.raises(ValueError, match=r"^`step` is -1, but it must be between 0 and 2147483647\.$"):
        wrapped(state, -1, decode(6), pool)
