"""Faults of the batch: what they change, when, and that nothing else is touched."""

from __future__ import annotations

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_kvcanary as kvc
from helpers.perturbed import (
    FIRST_ENTRY,
    LIVE_TOKENS,
    MAX_REQS,
    VALID,
    int32,
    make_batch,
    make_pool,
    make_target,
    nothing,
    own_slot,
    values_of,
    verified,
    written,
)
from jax_kvcanary import PoolKind, perturb

KEYS = range(60)
BATCH_FAULTS = (perturb.trample_req_to_token, perturb.swap_next_tokens, perturb.shift_position)
FLIPS = (perturb.flip_live_kv, perturb.flip_written_kv)
EVERY_FAULT = (*BATCH_FAULTS, *FLIPS, perturb.flip_cached_kv)
TABLE = make_batch().req_to_token


def what(function, batch=None):
    """What a function takes beside its target and the pool."""
    return int32([7, 9, -1, 0]) if function is perturb.flip_cached_kv else batch or make_batch()


@cache
def compiled(function, kind=PoolKind.FULL):
    target = make_target(kind)
    return jax.jit(
        lambda key, what, pool, probability=1.0, step=0, warmup=0: function(
            key, target, what, pool, probability=probability, step=step, warmup_steps=warmup
        )
    )


def arrays(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def differences(before, after):
    """Indices of the elements of a batch that differ, by field."""
    found = {}
    for field in ("input_ids", "positions", "out_cache_loc", "req_to_token"):
        old, new = np.asarray(getattr(before, field)), np.asarray(getattr(after, field))
        assert (old.dtype, old.shape) == (new.dtype, new.shape)
        if (old != new).any():
            found[field] = [tuple(index) for index in np.argwhere(old != new).tolist()]
    for old, new in zip(arrays(before.plan_input), arrays(after.plan_input), strict=True):
        np.testing.assert_array_equal(old, new)
    return found


def planted(function, kind):
    """Batches and records of many keys."""
    batch, pool = make_batch(), make_pool()
    for seed in KEYS:
        changed, record = compiled(function, kind)(jax.random.key(seed), batch, pool)
        yield batch, changed, values_of(record)


@pytest.mark.parametrize("kind", PoolKind)
def test_trample(kind):
    hit, sources = set(), set()
    for batch, changed, record in planted(perturb.trample_req_to_token, kind):
        assert record["happened"] == 1
        row, position = record["row"], record["position"]
        assert differences(batch, changed) == {"req_to_token": [(row, position)]}
        assert (record["before"], record["after"]) == (TABLE[row, position], np.asarray(changed.req_to_token)[row, position])
        assert record["slot"] == own_slot(kind, record["after"])
        ((other, other_position),) = np.argwhere(record["after"] == TABLE).tolist()
        assert other_position != position
        hit.add((row, position))
        sources.add((other, other_position))
        assert {record[name] for name in ("entry", "other_entry", "source", "byte")} == {-1}
    assert hit <= verified(kind)
    assert sources <= verified(kind)
    assert {row for row, _ in hit} == {4, 5, 1}
    assert len(hit) > 7
    assert any(other != row for row, _ in hit for other, _ in sources)


@pytest.mark.parametrize("kind", PoolKind)
def test_swap(kind):
    last = {row: first + VALID[row][1] - 1 for row, first in FIRST_ENTRY.items()}
    pairs = set()
    for batch, changed, record in planted(perturb.swap_next_tokens, kind):
        entry, other = record["entry"], record["other_entry"]
        assert last[record["row"]] == entry
        assert other in last.values()
        assert differences(batch, changed) == {"input_ids": sorted([(entry,), (other,)])}
        ids = np.asarray(changed.input_ids)
        assert (ids[entry], ids[other]) == (batch.input_ids[other], batch.input_ids[entry]) == (record["after"], record["before"])
        assert record["position"] == batch.positions[entry]
        assert record["slot"] == own_slot(kind, batch.out_cache_loc[entry])
        pairs.add((entry, other))
    assert len(pairs) == 6


@pytest.mark.parametrize("kind", PoolKind)
def test_shift(kind):
    hit = set()
    for batch, changed, record in planted(perturb.shift_position, kind):
        assert differences(batch, changed) == {"positions": [(record["entry"],)]}
        assert record["after"] == np.asarray(changed.positions)[record["entry"]]
        assert record["before"] == record["position"] == batch.positions[record["entry"]]
        assert record["slot"] == own_slot(kind, batch.out_cache_loc[record["entry"]])
        hit.add((record["row"], record["position"], record["entry"], record["after"] - record["before"]))
    assert {place[:3] for place in hit} == written(kind)
    assert {place[3] for place in hit} == {-1, 1}
    assert {place[3] for place in hit if place[1] == 0} <= {1}


# When.


@pytest.mark.parametrize("function", EVERY_FAULT)
def test_probability_0_is_never(function):
    given, pool = what(function), make_pool()
    want = arrays(given if function in BATCH_FAULTS else pool)
    for seed in range(5):
        changed, record = compiled(function)(jax.random.key(seed), given, pool, 0.0)
        assert values_of(record) == nothing()
        for old, new in zip(want, arrays(changed), strict=True):
            np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("function", EVERY_FAULT)
def test_warm_up(function):
    given, pool = what(function), make_pool()
    steps = [
        values_of(compiled(function)(jax.random.key(1), given, pool, 1.0, step, warmup)[1])["happened"]
        for step, warmup in [(0, 0), (0, 1), (2, 3), (3, 3), (np.int64(2**31 - 2), 2**31 - 1), (2**31 - 1, 2**31 - 1)]
    ]
    assert steps == [1, 0, 0, 1, 0, 1]


def test_probability_is_a_rate():
    keys = jax.random.split(jax.random.key(3), 2000)
    function, batch, pool = compiled(perturb.swap_next_tokens), make_batch(), make_pool()
    _, happened = jax.lax.scan(lambda carry, key: (carry, function(key, batch, pool, 0.3)[1].happened), 0, keys)
    assert 500 < int(happened.sum()) < 700


@pytest.mark.parametrize("function", EVERY_FAULT)
def test_a_key_makes_the_same_fault_everywhere(function):
    """Eager and jitted, with int64 batches and 64-bit types, in a scan, with a raw key."""
    target, pool, key = make_target(PoolKind.SWA), make_pool(), jax.random.key(11)
    changed, record = compiled(function, PoolKind.SWA)(key, what(function), pool)
    want = values_of(record)
    assert want["happened"] == 1

    def assert_same(result, pick=lambda leaf: leaf):
        other, other_record = jax.tree.map(lambda leaf: pick(np.asarray(leaf)), result)
        assert values_of(other_record) == want
        for old, new in zip(arrays(changed), arrays(other), strict=True):
            np.testing.assert_array_equal(old, new)

    plant = partial(function, target=target, pool=pool, probability=1.0)
    name = "slots" if function is perturb.flip_cached_kv else "batch"
    wide = {name: what(function, make_batch(np.int64))}
    wide[name] = jax.tree.map(lambda leaf: np.asarray(leaf, np.int64), wide[name])
    assert_same(plant(key, **{name: what(function)}))
    assert_same(plant(jax.random.key_data(key), **{name: what(function)}))
    assert_same(plant(key, **wide))
    with jax.enable_x64(True):
        assert_same(plant(key, **wide))
        assert_same(jax.jit(lambda wide: plant(key, **wide))(wide))
    scanned = jax.jit(lambda given: jax.lax.scan(lambda i, _: (i + 1, plant(key, **given, step=i, warmup_steps=2)), 0, None, length=4)[1])
    result = scanned({name: what(function)})
    assert np.asarray(result[1].happened).tolist() == [False, False, True, True]
    assert_same(result, lambda leaf: leaf[3])


def test_int64_batches_keep_what_does_not_fit():
    batch = make_batch(np.int64)
    batch.input_ids[:] += 2**40
    batch.req_to_token[0] = 2**40
    changed, record = perturb.swap_next_tokens(jax.random.key(0), make_target(), batch, make_pool(), probability=1)
    entry, other = int(record.entry), int(record.other_entry)
    assert changed.input_ids.dtype == np.int64
    assert int(changed.input_ids[entry]) == batch.input_ids[other] > 2**40
    assert (int(record.before), int(record.after)) == (2**31 - 1, 2**31 - 1)
    trampled, _ = perturb.trample_req_to_token(jax.random.key(0), make_target(), batch, make_pool(), probability=1)
    assert (np.asarray(trampled.req_to_token)[0] == 2**40).all()


# Where there is nothing to change.


def rows_of(*rows):
    """The batch with other rows."""
    req, prefix, extend = int32(rows).reshape(-1, 3).T
    return dataclasses.replace(make_batch(), plan_input=kvc.PlanInput(req, prefix, extend))


@pytest.mark.parametrize(
    ("function", "batch"),
    [
        *((function, rows_of()) for function in (*BATCH_FAULTS, *FLIPS)),
        *((function, rows_of((0, 3, 5), (MAX_REQS, 1, 1), (-1, 1, 1))) for function in (*BATCH_FAULTS, *FLIPS)),
        (perturb.trample_req_to_token, rows_of((4, 1, 1))),  # one position, and none beside it
        (perturb.trample_req_to_token, rows_of((4, 1, 1), (5, 1, 1))),  # the same position in both rows
        (perturb.trample_req_to_token, dataclasses.replace(make_batch(), req_to_token=np.full_like(TABLE, 7))),
        (perturb.trample_req_to_token, dataclasses.replace(make_batch(), req_to_token=np.full_like(TABLE, -1))),
        (perturb.trample_req_to_token, dataclasses.replace(make_batch(), req_to_token=np.zeros_like(TABLE))),
        (perturb.swap_next_tokens, rows_of((4, 6, 1))),
        (perturb.swap_next_tokens, dataclasses.replace(make_batch(), input_ids=np.full_like(make_batch().input_ids, 7))),
        (perturb.swap_next_tokens, rows_of((4, 6, 0), (5, 4, 0))),
        (perturb.shift_position, rows_of((4, 6, 0), (5, 4, 0))),
        (perturb.shift_position, dataclasses.replace(make_batch(), out_cache_loc=np.full_like(make_batch().out_cache_loc, -1))),
        (perturb.flip_live_kv, rows_of((2, 0, 5))),
        (perturb.flip_live_kv, dataclasses.replace(make_batch(), req_to_token=np.full_like(TABLE, 61))),
        (perturb.flip_written_kv, rows_of((4, 6, 0))),
        (perturb.flip_written_kv, dataclasses.replace(make_batch(), out_cache_loc=np.zeros_like(make_batch().out_cache_loc))),
        (perturb.flip_cached_kv, int32([])),
        (perturb.flip_cached_kv, int32([-1, 0, 61, 2**31 - 1, -(2**31)])),
    ],
)
def test_nothing_to_change(function, batch):
    pool = make_pool()
    for seed in range(3):
        changed, record = function(jax.random.key(seed), make_target(), batch, pool, probability=1.0)
        assert values_of(record) == nothing()
        for old, new in zip(arrays(batch if function in BATCH_FAULTS else pool), arrays(changed), strict=True):
            np.testing.assert_array_equal(old, new)


def test_slots_that_the_window_has_lost_are_left_alone():
    pool = dataclasses.replace(make_pool(), full_to_swa_index_mapping=np.zeros_like(make_pool().full_to_swa_index_mapping))
    for function in (*BATCH_FAULTS, *FLIPS, perturb.flip_cached_kv):
        assert values_of(compiled(function, PoolKind.SWA)(jax.random.key(0), what(function), pool)[1]) == nothing()


def test_tokens_that_are_not_there_are_left_alone():
    """Rows that say they write more than the arrays hold are the canary's to report."""
    batch = rows_of((4, 3, LIVE_TOKENS + 20))
    for seed in range(20):
        changed, record = compiled(perturb.shift_position)(jax.random.key(seed), batch, make_pool())
        assert differences(batch, changed).keys() <= {"positions"}
        assert int(record.entry) < len(batch.input_ids)


# Messages.


@pytest.mark.parametrize("function", EVERY_FAULT)
@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"probability": 2}, ValueError, "`probability` is 2, but it must be between 0 and 1."),
        ({"probability": None}, TypeError, "`probability` is None of type NoneType, but it must be a number."),
        ({"probability": jnp.ones((), jnp.int32)}, TypeError, "`probability` has dtype int32, but it must be float32 or float64."),
        ({"probability": jnp.ones(2)}, ValueError, "`probability` has shape [2], but the probability of a fault needs shape []."),
        ({"step": -1}, ValueError, "`step` is -1, but it must be between 0 and 2147483647."),
        ({"step": 1.5}, TypeError, "`step` is 1.5 of type float, but it must be an int."),
        ({"step": jnp.ones(())}, TypeError, "`step` has dtype float32, but it must be int32 or int64."),
        ({"warmup_steps": int32([1])}, ValueError, "`warmup_steps` has shape [1], but the number of a step needs shape []."),
        ({"target": 3}, TypeError, "`target` is of type int, but it must be a PerturbTarget."),
    ],
)
def test_bad_arguments(function, changes, error, text):
    arguments = {"target": make_target(), "probability": 1.0, **changes}
    with pytest.raises(error) as caught:
        function(jax.random.key(0), arguments.pop("target"), what(function), make_pool(), **arguments)
    assert (type(caught.value), str(caught.value)) == (error, text)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"kind": 2}, ValueError, "`kind` is 2, but it must be one of FULL (0), SWA (1)."),
        ({"num_slots": 0}, ValueError, "`num_slots` is 0, but it must be between 1 and 2147483647."),
        ({"swa_window_size": -1}, ValueError, "`swa_window_size` is -1, but it must be between 0 and 2147483647."),
        ({"first_byte": -8}, ValueError, "`first_byte` is -8, but it must be between 0 and 2147483647."),
        ({"real_kv_hash_mode": 3}, ValueError, "`real_kv_hash_mode` is 3, but it must be one of NONE (0), PARTIAL (1), ALL (2)."),
        ({"sources": (3,)}, TypeError, "`sources[0]` is of type int, but it must be a SourceSpec."),
    ],
)
def test_bad_targets(changes, error, text):
    with pytest.raises(error) as caught:
        dataclasses.replace(make_target(), **changes)
    assert (type(caught.value), str(caught.value)) == (error, text)


def test_targets_are_what_the_canary_watches():
    full, swa = make_target(), make_target(PoolKind.SWA)
    assert (full.num_slots, full.swa_window_size, full.swa_index_lut) == (61, 0, None)
    assert (swa.num_slots, swa.swa_window_size, swa.swa_index_lut) == (37, 3, ("full_to_swa_index_mapping",))
    assert [spec.path for spec in swa.sources] == [("swa_kv_pool", "k_buffer", 0), ("swa_kv_pool", "v_buffer", 0)]
    assert len({full, swa, make_target()}) == 2
    canary, state = kvc.install_canary(
        kvc.pools.MHATokenToKVPool.allocate(num_slots=7, num_layers=1, num_kv_heads=1, head_dim=8),
        kvc.CanaryConfig("log"),
        capacities=kvc.CanaryLaunchCapacities(5, 3),
    )
    assert perturb.PerturbTarget.of(canary, state).real_kv_hash_mode is kvc.RealKvHashMode.PARTIAL
    with pytest.raises(ValueError, match=r"^`kind` is SWA, but this canary has the groups FULL\.$"):
        perturb.PerturbTarget.of(canary, state, PoolKind.SWA)
    with pytest.raises(TypeError, match=r"^`canary` is of type int, but it must be a Canary, as install_canary returns it\.$"):
        perturb.PerturbTarget.of(3, state)
