"""Records taken out and put back, against NumPy; and their bytes."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_kvcanary as kvc
from helpers.backends import host
from helpers.moving import CAPACITIES, CONFIG, NAMES, NUM_SLOTS, SWA_SLOTS, WindowPool, row_out_of_range
from jax_kvcanary import CanaryLaunchTag as Tag

#: Sound ones, the padding slot, padding, one without a window's slot, one whose table value leaves the window's pool, and indices
#: past the pool.
SLOTS = [3, 0, -1, 11, 7, 36, 20, NUM_SLOTS, 5, -(2**31), 2**31 - 1]
LUT = {3: 4, 0: 9, 11: 22, 7: 0, 36: 1, 20: SWA_SLOTS, 5: -1}
OWN = [4, None, None, 22, None, 1, SWA_SLOTS, 2**31 - 1, None, None, 2**31 - 1]  # by hand, for the window's group
BAD_ROWS = [
    row_out_of_range(Tag.HEAD_K_FULL, NUM_SLOTS, NUM_SLOTS),
    row_out_of_range(Tag.HEAD_K_FULL, 2**31 - 1, NUM_SLOTS),
    row_out_of_range(Tag.HEAD_K_SWA, SWA_SLOTS, SWA_SLOTS),
    row_out_of_range(Tag.HEAD_K_SWA, 2**31 - 1, SWA_SLOTS),
    row_out_of_range(Tag.HEAD_K_SWA, 2**31 - 1, SWA_SLOTS),
]


def make_pool():
    lut = np.full(NUM_SLOTS, 2, np.int32)
    lut[list(LUT)] = list(LUT.values())
    return dataclasses.replace(WindowPool.allocate(), lut=jnp.asarray(lut))


def make_state(seed=1, config=CONFIG, **options):
    """A state of random records."""
    rng = np.random.default_rng(seed)
    _, state = kvc.install_canary(make_pool(), config, capacities=CAPACITIES, **options)
    return dataclasses.replace(state, groups=jax.tree.map(lambda b: jnp.asarray(rng.integers(0, 256, b.shape, np.uint8)), state.groups))


def random_records(n, seed=2, config=CONFIG):
    """Random records, NumPy."""
    rng = np.random.default_rng(seed)
    extracted = kvc.extract_records(make_state(config=config), np.full(n, -1, np.int32), pool=make_pool())
    return jax.tree.map(lambda a: rng.integers(0, 256, a.shape, np.uint8), host(extracted))


def own_slots(kind):
    """The slots with a record in the group, by index into SLOTS."""
    numbering = dict(enumerate(SLOTS if kind is kvc.PoolKind.FULL else OWN))
    num_slots = NUM_SLOTS if kind is kvc.PoolKind.FULL else SWA_SLOTS
    return {i: slot for i, slot in numbering.items() if slot is not None and 0 < slot < num_slots}


def jitted(function, **static):
    return jax.jit(partial(function, **static))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("how", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_extract_is_a_gather(how, x64, dtype):
    state, pool = make_state(), make_pool()
    with jax.enable_x64(x64):
        records = how(lambda state, slots, pool: kvc.extract_records(state, slots, pool=pool))(state, np.array(SLOTS, dtype), pool)
    assert [group.kind for group in records.groups] == [kvc.PoolKind.FULL, kvc.PoolKind.SWA]
    for got, group in zip(records.groups, state.groups, strict=True):
        for name in NAMES:
            want = np.full((len(SLOTS), 32), 0xFF, np.uint8)
            for i, slot in own_slots(group.kind).items():
                want[i] = np.asarray(getattr(group, name))[slot]
            np.testing.assert_array_equal(getattr(got, name), want)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("how", [lambda f: f, jax.jit, partial(jax.jit, donate_argnums=0)], ids=["eager", "jit", "donated"])
@pytest.mark.parametrize("where", [lambda records: records, partial(jax.tree.map, jnp.asarray)], ids=["NumPy", "device"])
def test_insert_is_a_scatter(where, how, x64, dtype):
    state, pool, records = make_state(), make_pool(), random_records(len(SLOTS))
    before = host(state)
    insert = how(lambda state, slots, records, pool: kvc.insert_records(state, slots, records, pool=pool))
    with jax.enable_x64(x64):
        after = insert(state, np.array(SLOTS, dtype), where(records), pool)
    for got, old, new in zip(after.groups, before.groups, records.groups, strict=True):
        for name in NAMES:
            want = getattr(old, name).copy()
            for i, slot in own_slots(old.kind).items():
                want[slot] = getattr(new, name)[i]
            np.testing.assert_array_equal(getattr(got, name), want)
    assert sorted(after.device_state.violation_log.rows().tolist()) == BAD_ROWS
    reasons = np.asarray(after.device_state.fail_reason_counters)
    assert (reasons[Tag.HEAD_K_FULL].tolist(), reasons[Tag.HEAD_K_SWA].tolist()) == ([0] * 6 + [2, 0], [0] * 6 + [3, 0])
    assert not np.asarray(after.device_state.kernel_run_counters).any()
    assert jax.tree.structure(after) == jax.tree.structure(before)


def test_indices_that_need_64_bits_are_findings():
    wide = np.array([2**31, 2**32 + 3, -(2**40)])
    state = kvc.insert_records(make_state(), wide, random_records(3), pool=make_pool())
    rows = [row_out_of_range(Tag.HEAD_K_FULL, 2**31 - 1, NUM_SLOTS)] * 2 + [row_out_of_range(Tag.HEAD_K_SWA, 2**31 - 1, SWA_SLOTS)] * 2
    assert state.device_state.violation_log.rows().tolist() == rows
    for got, want in zip(jax.tree.leaves(state.groups), jax.tree.leaves(make_state().groups), strict=True):
        np.testing.assert_array_equal(got, want)
    extracted = kvc.extract_records(make_state(), wide, pool=make_pool())
    assert all((np.asarray(array) == 0xFF).all() for array in jax.tree.leaves(extracted))


def test_no_slots():
    none = np.zeros(0, np.int32)
    records = kvc.extract_records(make_state(), none, pool=make_pool())
    assert {array.shape for array in jax.tree.leaves(records)} == {(0, 32)}
    again = kvc.CanaryRecords.from_bytes(records.to_bytes())
    state = kvc.insert_records(make_state(), none, again, pool=make_pool())
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(make_state()), strict=True):
        np.testing.assert_array_equal(got, want)


def test_in_a_scan():
    """Records of slots 1 to 5 change places with those of 6 to 10, twice: everything is as it was."""
    pool, state = make_pool(), make_state()
    a, b = np.arange(1, 6, dtype=np.int32), np.arange(6, 11, dtype=np.int32)
    pool = dataclasses.replace(pool, lut=jnp.arange(NUM_SLOTS) % SWA_SLOTS)
    before = host(state)

    @partial(jax.jit, donate_argnums=0)
    def swap(state):
        def body(state, _):
            both, reverse = np.concatenate([a, b]), np.concatenate([b, a])
            return kvc.insert_records(state, reverse, kvc.extract_records(state, both, pool=pool), pool=pool), None

        return jax.lax.scan(body, state, None, length=3)[0]

    after = swap(state)
    for got, want in zip(jax.tree.leaves(after.groups), jax.tree.leaves(before.groups), strict=True):
        swapped = want.copy()
        swapped[a], swapped[b] = want[b], want[a]
        np.testing.assert_array_equal(got, swapped)
    assert after.device_state.violation_log.count() == 0


def test_a_pool_is_needed_where_a_group_has_a_table_and_only_there():
    mha = kvc.pools.MHATokenToKVPool.allocate(num_slots=7, num_layers=1, num_kv_heads=1, head_dim=8)
    _, state = kvc.install_canary(mha, kvc.CanaryConfig("log"), capacities=CAPACITIES)
    records = kvc.extract_records(state, np.array([3], np.int32))
    kvc.insert_records(state, np.array([4], np.int32), records)
    kvc.insert_records(state, np.array([4], np.int32), kvc.extract_records(state, np.array([3], np.int32), pool=mha), pool=mha)
    text = r"^`pool` is None, but it must be the live pool, since the SWA group has a table of slots there\.$"
    for call in (
        lambda: kvc.extract_records(make_state(), np.array([3], np.int32)),
        lambda: kvc.insert_records(make_state(), np.array([3], np.int32), random_records(1)),
    ):
        with pytest.raises(ValueError, match=text):
            call()


# Bytes.


@pytest.mark.parametrize("v_half", [True, False])
@pytest.mark.parametrize("make", [bytes, bytearray, memoryview])
def test_bytes_there_and_back(make, v_half):
    config = dataclasses.replace(CONFIG, enable_v_half=v_half)
    records = random_records(13, config=config)
    on_device = jax.tree.map(jnp.asarray, records)
    assert jax.tree.all(jax.tree.map(lambda array: isinstance(array, np.ndarray), on_device.on_host()))
    data = on_device.to_bytes()
    assert data == records.to_bytes()
    assert len(data) == 20 + 2 * 8 + 2 * 13 * 32 * (4 if v_half else 2)
    back = kvc.CanaryRecords.from_bytes(make(data))
    assert jax.tree.structure(back) == jax.tree.structure(records)
    for got, want in zip(jax.tree.leaves(back), jax.tree.leaves(records), strict=True):
        np.testing.assert_array_equal(got, want)


def test_the_form_of_the_bytes():
    """Written out by hand: header, group, then the arrays."""
    rows = {name: np.full((1, 32), i, np.uint8) for i, name in enumerate(NAMES, 1)}
    group = kvc.GroupRecords(kind=kvc.PoolKind.SWA, kv_token_id_vs_position_offset=-2, **rows)
    header = b"KVCANREC" + b"\x01\x00" + b"\x01\x00" + b"\x01" + bytes(7)
    assert kvc.CanaryRecords((group,)).to_bytes() == header + b"\x01\x02\x00\x00\xfe\xff\xff\xff" + b"".join(
        bytes([i]) * 32 for i in (1, 2, 3, 4)
    )


def test_the_bytes_of_a_reused_buffer():
    data = bytearray(random_records(3).to_bytes())
    records = kvc.CanaryRecords.from_bytes(data)
    data[:] = bytes(len(data))
    np.testing.assert_array_equal(records.groups[1].v_tail, random_records(3).groups[1].v_tail)


def test_every_truncation_is_found():
    data = random_records(2).to_bytes()
    for length in range(len(data)):
        with pytest.raises(ValueError, match=rf"^`data` has {length} bytes, but .* bytes: it was cut short\.$"):
            kvc.CanaryRecords.from_bytes(data[:length])
    with pytest.raises(ValueError, match=r"^`data` has 549 bytes, but 2 records of its groups end at 548 bytes\.$"):
        kvc.CanaryRecords.from_bytes(data + b"\0")
