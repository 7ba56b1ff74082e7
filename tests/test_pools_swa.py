"""Sliding-window groups on real pools: what lies in the window is checked, what left it may be anybody's."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_kvcanary as kvc
from helpers.loops import NUM_SLOTS, UNWRITTEN, int32
from helpers.states import fields
from helpers.windows import CONFIG, POOLS, SWA_SLOTS, WINDOW, WindowLoop
from jax_kvcanary import CanaryLaunchTag as Tag
from jax_kvcanary import FailReason as Reason
from jax_kvcanary.constants import INT32_MAX
from jax_kvcanary.pools import DeepSeekV4TokenToKVPool, MHATokenToKVPool, SWAKVPool

#: What the record of another request's token differs in.
STOLEN = Reason.VERIFY_CHAIN_HASH_MISMATCH | Reason.VERIFY_POSITION_MISMATCH
CHAIN, RANGE = Reason.VERIFY_CHAIN_HASH_MISMATCH, Reason.SLOT_OUT_OF_RANGE

every_pool = pytest.mark.parametrize("name", POOLS)


def swa_tags(loop):
    group = loop.state.groups[-1]
    assert group.kind is kvc.PoolKind.SWA
    return [Tag[f"{phase}_{half.upper()}_SWA"] for phase in ("HEAD", "TAIL") for half in group.halves]


def in_swa(loop, *entries):
    """The same findings in every SWA launch, and none in the FULL group."""
    return sorted((int(tag), int(slot), int(reasons)) for tag in swa_tags(loop) for slot, reasons in entries)


def runs(loop, name="slot_run_counters"):
    return kvc.to_int64(getattr(loop.state.device_state, name))


@every_pool
def test_a_long_run_through_few_slots_is_silent(name):
    """Two requests write more tokens than the SWA pool has slots: those behind the windows are used again and again."""
    loop = WindowLoop(name)
    found = [loop.extend(1, 0, 9), loop.extend(2, 0, 3), loop.extend(1, 9, 4)]
    verified, written = {"FULL": 9, "SWA": WINDOW}, 16
    for length in range(10):
        found += [loop.extend(1, 13 + length, 1), loop.extend(2, 3 + length, 1)]
        verified["FULL"] += 13 + length + 3 + length
        verified["SWA"] += WINDOW + min(3 + length, WINDOW)
        written += 2
    assert written > SWA_SLOTS
    assert found == [[]] * len(found)
    # Window positions only.
    want = np.zeros(12, np.int64)
    for group in loop.state.groups:
        for half in group.halves:
            for phase in ("HEAD", "TAIL"):
                want[Tag[f"{phase}_{half.upper()}_{group.kind.name}"]] = verified[group.kind.name] + written
    np.testing.assert_array_equal(runs(loop), want)
    assert (runs(loop, "kernel_run_counters") == 2 * 23 * (want > 0)).all()


@every_pool
def test_a_slot_behind_the_window_may_be_anybodys(name):
    """Legal: position 3 has left the window when its SWA slot goes to another request."""
    loop = WindowLoop(name)
    assert loop.extend(1, 0, 9, retire=False) == []
    behind = loop.swa_slot(1, 3)
    loop.retire(1, 4)
    assert loop.extend(2, 0, 1, swa_slots=[behind]) == []
    assert loop.extend(1, 9, 1) == []


@every_pool
def test_a_slot_inside_the_window_may_not(name):
    """The fault that looks like it: position 5 is in the window still, and its table entry too."""
    loop = WindowLoop(name)
    assert loop.extend(1, 0, 9) == []
    inside, behind = loop.swa_slot(1, 5), loop.swa_slot(1, 6)
    assert loop.extend(2, 0, 1, swa_slots=[inside]) == []
    assert loop.extend(1, 9, 1) == in_swa(loop, (inside, STOLEN), (behind, CHAIN))


@every_pool
@pytest.mark.parametrize("stale", [False, True], ids=["cleared", "stale"])
def test_the_chain_goes_on_through_the_start_of_the_window(name, stale):
    """The first position of the window names its predecessor, as long as the table does."""
    loop = WindowLoop(name)
    assert loop.extend(1, 0, 9, retire=False) == []
    before, first = loop.swa_slot(1, 3), loop.swa_slot(1, 4)
    assert loop.extend(1, 9, 0, retire=False) == []  # the predecessor is intact, and compared
    if not stale:
        loop.retire(1, 4)
    assert loop.extend(2, 0, 1, swa_slots=[before]) == []
    assert loop.extend(1, 9, 0, retire=False) == (in_swa(loop, (first, CHAIN)) if stale else [])


@pytest.mark.parametrize("absent", [0, -1, -(2**31)])
def test_absent_entries_are_never_a_finding(absent):
    """A hole in the middle of the window: its entry is skipped, and the next one's predecessor is unreachable."""
    loop = WindowLoop()
    assert loop.extend(1, 0, 9) == []
    before = runs(loop)[Tag.TAIL_K_SWA]
    hole = loop.swa_slot(1, 6)
    loop.map([loop.full_slot(1, 6)], [absent])
    assert loop.extend(2, 0, 1, swa_slots=[hole]) == []
    assert loop.extend(1, 9, 1) == []
    assert runs(loop)[Tag.TAIL_K_SWA] == before + 1 + WINDOW + 1
    # The fault that looks like it: an entry that names the wrong slot.
    loop.map([loop.full_slot(1, 6)], [loop.swa_slot(1, 8)])
    wrong, behind = loop.swa_slot(1, 8), loop.swa_slot(1, 7)
    assert loop.extend(1, 10, 0) == in_swa(loop, (wrong, STOLEN), (behind, CHAIN))


@every_pool
def test_a_token_without_a_slot_goes_to_the_padding_slot(name):
    loop = WindowLoop(name)
    assert loop.extend(1, 0, 4, swa_slots=[1, 2, 0, 3]) == []
    assert loop.extend(1, 4, 1, swa_slots=[5]) == []
    group = loop.state.groups[-1]
    assert fields(group.k_tail)[1:6, 1].tolist() == [0, 1, 3, -1, 4]


def test_negative_slots_are_not_looked_up():
    """The last entry of the table, which -1 would reach in a wrapped lookup, names a live slot."""
    loop = WindowLoop()
    assert loop.extend(1, 0, 6) == []
    live = loop.swa_slot(1, 5)
    loop.map([NUM_SLOTS - 1], [live])
    batch = loop.requests.batch((2, 0, [7]))
    kept = [np.array(leaf) for group in loop.state.groups for leaf in jax.tree.leaves(group)]
    swa_pool = np.array(loop.pool.swa_kv_pool.k_buffer[0][live], np.float32)
    assert loop.step(dataclasses.replace(batch, out_cache_loc=int32([-1] * 13))) == []
    for before, after in zip(kept, (leaf for group in loop.state.groups for leaf in jax.tree.leaves(group)), strict=True):
        np.testing.assert_array_equal(np.asarray(after), before)
    np.testing.assert_array_equal(np.asarray(loop.pool.swa_kv_pool.k_buffer[0][live], np.float32), swa_pool)
    # In a request's row a negative slot is a finding under its own number.
    table = loop.requests.table.copy()
    table[1, 4] = -1
    found = loop.step(dataclasses.replace(loop.requests.batch((1, 6, [])), req_to_token=table))
    full = [(int(Tag[f"{phase}_{half}_FULL"]), -1, int(RANGE)) for phase in ("HEAD", "TAIL") for half in "KV"]
    assert found == sorted(full + in_swa(loop, (-1, RANGE)))


@pytest.mark.parametrize("slot", [NUM_SLOTS, NUM_SLOTS + 1000, INT32_MAX])
def test_an_index_past_the_table_is_a_finding(slot):
    loop = WindowLoop()
    assert loop.extend(1, 0, 6) == []
    table = loop.requests.table.copy()
    table[1, 5] = slot
    found = loop.step(dataclasses.replace(loop.requests.batch((1, 6, [])), req_to_token=table))
    full = [(int(Tag[f"{phase}_{half}_FULL"]), slot, int(RANGE)) for phase in ("HEAD", "TAIL") for half in "KV"]
    assert found == sorted(full + in_swa(loop, (INT32_MAX, RANGE)))
    # Written, it is one too, and nothing is stored.
    before = [np.array(leaf).view(np.uint8) for leaf in jax.tree.leaves(loop.pool)]
    batch = loop.requests.batch((2, 0, [7]))
    where = batch.out_cache_loc.copy()
    where[:] = -1
    where[0] = slot
    found = loop.step(dataclasses.replace(batch, out_cache_loc=where))
    assert found == sorted(full + in_swa(loop, (INT32_MAX, RANGE)))
    for leaf, kept in zip(jax.tree.leaves(loop.pool), before, strict=True):
        np.testing.assert_array_equal(np.asarray(leaf).view(np.uint8), kept)


def test_a_table_that_names_a_slot_past_the_swa_pool():
    loop = WindowLoop()
    assert loop.extend(1, 0, 6) == []
    loop.map([loop.full_slot(1, 5)], [SWA_SLOTS])
    assert loop.extend(1, 6, 0) == in_swa(loop, (SWA_SLOTS, RANGE))


@every_pool
def test_changed_bytes_are_found_in_the_window_alone(name):
    loop = WindowLoop(name)
    assert loop.extend(1, 0, 9, retire=False) == []
    swa_pool = getattr(loop.pool, "swa_kv_pool", loop.pool)

    def scribbled(position):
        """The pool with the KV of a position in the SWA pool overwritten, in its first layer."""
        index = next(index for index, (is_swa, _) in enumerate(getattr(loop.pool, "layers_mapping", [(True, 0)])) if is_swa)
        values = POOLS[name][1].values(7, np.array([1], np.int32))
        return loop.pool.write(index, int32([loop.full_slot(1, position)]), *values)

    assert swa_pool.num_slots == SWA_SLOTS
    for position, inside in ((0, False), (3, False), (4, True), (8, True)):
        sound = jax.tree.map(jnp.copy, loop.pool)
        loop.pool = scribbled(position)
        want = [
            (tag, slot, reasons) for tag, slot, reasons in in_swa(loop, (loop.swa_slot(1, position), Reason.VERIFY_REAL_KV_HASH_MISMATCH))
        ]
        tails = {int(Tag.TAIL_K_SWA), int(Tag.TAIL_V_SWA)}
        assert loop.extend(1, 9, 0, retire=False) == [entry for entry in want if inside and entry[0] in tails]
        loop.pool = sound
    assert loop.extend(1, 9, 1) == []


@every_pool
def test_release_reaches_the_swa_records(name):
    """Released by their full-pool slots, tokens lose their SWA records while the table still names them."""
    loop = WindowLoop(name)
    assert loop.extend(1, 0, 4) == []
    freed, behind = loop.swa_slot(1, 2), loop.swa_slot(1, 3)
    loop.state = loop.canary.release(loop.state, int32([loop.full_slot(1, 2), -1]), loop.pool)
    found = loop.extend(1, 4, 0)
    swa = {(tag, slot): reasons for tag, slot, reasons in found if Tag(tag).name.endswith("SWA")}
    assert swa == {(int(tag), slot): int(reasons) for tag in swa_tags(loop) for slot, reasons in ((freed, UNWRITTEN), (behind, CHAIN))}


# The pool by itself.


def allocate(**changes):
    sizes = {"num_slots": 11, "swa_num_slots": 5, "num_layers": 4, "swa_layers": (1, 3), "num_kv_heads": 1, "head_dim": 8}
    return SWAKVPool.allocate(**{**sizes, **changes})


def test_layers_go_to_their_sub_pool():
    pool = allocate()
    assert pool.layers_mapping == ((False, 0), (True, 0), (False, 1), (True, 1))
    assert (pool.num_slots, pool.page_size, pool.swa_kv_pool.num_slots) == (11, 1, 5)
    pool = pool.map_slots(int32([7, 9]), int32([2, 4]))
    for layer in range(4):
        value = np.full((2, 1, 8), layer + 1, np.float32)
        pool = pool.write(layer, int32([7, 9]), value, value + 10)
    for sub_pool, slots, layers in ((pool.full_kv_pool, [7, 9], (1, 3)), (pool.swa_kv_pool, [2, 4], (2, 4))):
        for half, more in (("k_buffer", 0), ("v_buffer", 10)):
            for index, value in enumerate(layers):
                want = np.zeros((sub_pool.num_slots, 1, 8), np.float32)
                want[slots] = value + more
                np.testing.assert_array_equal(np.asarray(getattr(sub_pool, half)[index], np.float32), want)


@pytest.mark.parametrize("make", [allocate, lambda: DeepSeekV4TokenToKVPool.allocate(num_slots=5, full_num_slots=11, num_layers=1)])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_the_table_is_set_functionally(make, dtype):
    pool = make()
    mapped = pool.map_slots(np.array([3, -1, 11, 0, 10, -11], dtype), np.array([2, 4, 4, 4, 1, 4], dtype))
    assert np.asarray(pool.full_to_swa_index_mapping).tolist() == [0] * 11
    assert np.asarray(mapped.full_to_swa_index_mapping).tolist() == [0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 1]
    assert mapped.full_to_swa_index_mapping.dtype == np.int32
    unmap = jax.jit(lambda pool, slots: pool.unmap_slots(slots), donate_argnums=0)
    assert np.asarray(unmap(mapped, np.array([10, -8], dtype)).full_to_swa_index_mapping).tolist() == [0, 0, 0, 2] + [0] * 7


def test_layers_of_both_kinds():
    for chosen, count in (((), 0), (range(4), 4)):
        with pytest.raises(ValueError, match=r"^`swa_layers`") as caught:
            allocate(swa_layers=chosen)
        assert str(caught.value) == (
            f"`swa_layers` names {count} of the 4 layers, but a pool with a sliding window needs layers of both kinds."
        )
    with pytest.raises(ValueError, match=r"^`swa_layers` is 4, but it must be between 0 and 3\.$"):
        allocate(swa_layers=(4,))


# Attaching.


def attach(pool, **changes):
    return kvc.attach_canary_buffers(pool, dataclasses.replace(CONFIG, **changes))


def test_layers_count_within_each_sub_pool():
    groups = attach(allocate(swa_layers=(1, 2, 3)), real_kv_layers=(-1,), enable_v_half=False)
    paths = [spec.path for group in groups for spec in group.real_kv_sources_k]
    assert paths == [("full_kv_pool", "k_buffer", 0), ("swa_kv_pool", "k_buffer", 2)]
    assert [group.swa_index_lut for group in groups] == [None, ("full_to_swa_index_mapping",)]
    with pytest.raises(ValueError, match=r"^`config") as caught:
        attach(allocate(swa_layers=(1, 2, 3)), real_kv_layers=(1,))
    assert str(caught.value) == (
        "`config.real_kv_layers` names layer 1, but the pool has 1 layers. This is about the sub-pool `pool.full_kv_pool`."
    )


def test_the_table_is_checked():
    pool = allocate()
    for table, error, text in (
        (None, TypeError, "`pool.full_to_swa_index_mapping` is of type NoneType, but it must be an array."),
        (jnp.zeros(11), TypeError, "`pool.full_to_swa_index_mapping` has dtype float32, but it must be int32 or int64."),
        (
            jnp.zeros((11, 1), jnp.int32),
            ValueError,
            "`pool.full_to_swa_index_mapping` has shape [11, 1], but a table from full-pool slots to SWA slots needs shape [any].",
        ),
        (
            jnp.zeros(10, jnp.int32),
            ValueError,
            "`pool.full_to_swa_index_mapping` has 10 entries, but it must have one for each of the 11 full-pool slots.",
        ),
    ):
        with pytest.raises(error) as caught:
            attach(dataclasses.replace(pool, full_to_swa_index_mapping=table))
        assert str(caught.value) == text
    assert len(attach(dataclasses.replace(pool, full_to_swa_index_mapping=np.zeros(17, np.int64)))) == 2


def test_sub_pools_of_a_class_that_is_not_known():
    with pytest.raises(NotImplementedError, match=r"has no canary attacher; .* This is about the sub-pool `pool\.swa_kv_pool`\.$"):
        attach(dataclasses.replace(allocate(), swa_kv_pool=object()))
    with pytest.raises(ValueError, match=r"^`pool\.full_kv_pool` is attached by 2 groups, but a sub-pool must be a pool without"):
        attach(dataclasses.replace(allocate(), full_kv_pool=allocate()))


def test_sub_pools_may_differ():
    pool = dataclasses.replace(
        allocate(), swa_kv_pool=MHATokenToKVPool.allocate(num_slots=6, num_layers=2, num_kv_heads=2, head_dim=4, page_size=3)
    )
    groups = attach(pool)
    assert [group.k_head.shape[0] for group in groups] == [11, 6]
    assert [spec.page_size for group in groups for spec in group.real_kv_sources_v] == [1, 1, 3, 3]
