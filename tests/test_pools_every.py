"""Every reference pool in every layout: what a write stores, which bytes are hashed, and what a loop on it finds."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_kvcanary as kvc
from helpers.loops import ROWS, TOKENS, Requests, findings, tokens_of
from helpers.pool_cases import CASES, LAYERS, SWA, Case
from jax_kvcanary import CanaryLaunchTag as Tag
from jax_kvcanary import FailReason as Reason
from jax_kvcanary import reference

every_case = pytest.mark.parametrize("case", CASES, ids=str)
BYTES_CHANGED = Reason.VERIFY_REAL_KV_HASH_MISMATCH


def config(**changes):
    return kvc.CanaryConfig("log", **{"ring_capacity": 101, "real_kv_hash_mode": 2, **changes})


def hashed_layers(sub, settings):
    return {layer % len(sub.layers) for layer in settings.real_kv_layers}


def group_of(groups, sub):
    (group,) = (group for group in groups if group.kind is sub.kind)
    return group


def filled(case):
    """A pool whose every slot was written, and the base number of each full-pool slot."""
    base = np.arange(case.make().num_slots, dtype=np.int32) * 5 + 3
    return case.write(case.make(), np.arange(len(base), dtype=np.int32), base), base


# Writes.


@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
@every_case
def test_a_donated_write_stores_what_numpy_says(case, x64):
    num_slots = max(sub.num_slots for sub in case.subs)
    slots = np.array([13, -1, 2, num_slots, 66, -num_slots, 2**31 - 1, 7, -(2**31), 41], np.int32)
    inside = (slots >= 0) & (slots < num_slots)
    base = np.arange(100, 100 + len(slots), dtype=np.int32)
    with jax.enable_x64(x64):
        written = jax.jit(case.write, donate_argnums=0)(case.make(), slots, base)
    assert jax.tree.structure(written) == jax.tree.structure(case.make())
    for sub in case.subs:
        for index, layer in enumerate(sub.layers):
            for name, stored in sub.family.stored(layer, base).items():
                got = sub.slot_bytes(written, name, index)
                want = np.zeros_like(got)
                want[sub.own_slots(slots[inside])] = stored[inside]
                np.testing.assert_array_equal(got, want, err_msg=f"{name} {layer}")


@every_case
def test_int64_slots_keep_their_value(case):
    """2^32 + 3 is no slot, and must not become slot 3."""
    base = np.arange(2, dtype=np.int32)
    wide = case.write(case.make(), np.array([2**32 + 3, 5], np.int64), base)
    narrow = case.write(case.make(), np.array([-1, 5], np.int32), base)
    for got, want in zip(jax.tree.leaves(wide), jax.tree.leaves(narrow), strict=True):
        np.testing.assert_array_equal(np.asarray(got).view(np.uint8), np.asarray(want).view(np.uint8))


@every_case
def test_layers_that_are_not_there(case):
    slots, base = np.array([3], np.int32), np.array([3], np.int32)
    last = case.make().write(-1, slots, *case.values(LAYERS - 1, base))
    same = case.make().write(LAYERS - 1, slots, *case.values(LAYERS - 1, base))
    for got, want in zip(jax.tree.leaves(last), jax.tree.leaves(same), strict=True):
        np.testing.assert_array_equal(np.asarray(got).view(np.uint8), np.asarray(want).view(np.uint8))
    for layer in (LAYERS, -LAYERS - 1):
        with pytest.raises(ValueError, match=r"^`layer`") as caught:
            case.make().write(layer, slots, *case.values(0, base))
        assert str(caught.value) == f"`layer` is {layer}, but it must be between -3 and 2, since the pool has 3 layers."


@every_case
def test_values_of_another_shape(case):
    slots = np.array([3, 4], np.int32)
    short = case.values(0, np.array([3], np.int32))
    with pytest.raises(ValueError, match=r"^`(k|latent|packed_tokens)` has shape \[1, .*\], but one token for each of the 2 `slots` needs"):
        case.make().write(0, slots, *short)
    with pytest.raises(TypeError, match=r"^`slots` has dtype float32"):
        case.make().write(0, slots.astype(np.float32), *short)


# Which bytes are hashed.


@pytest.mark.parametrize("mode", [kvc.RealKvHashMode.PARTIAL, kvc.RealKvHashMode.ALL], ids=["partial", "all"])
@every_case
def test_sources_hash_the_bytes_of_their_token(case, mode):
    pool, base = filled(case)
    settings = config(real_kv_hash_mode=mode, real_kv_layers=(-1, 0))
    groups = kvc.attach_canary_buffers(pool, settings)
    assert [group.kind for group in groups] == [sub.kind for sub in case.subs]
    for sub in case.subs:
        group = group_of(groups, sub)
        assert group.k_tail.shape == (sub.num_slots, kvc.CANARY_SLOT_BYTES)
        for half, (name, start, stop) in sub.family.hashed.items():
            bound = [spec.bind(pool) for spec in getattr(group, f"real_kv_sources_{half}")]
            alone = []
            for index in (-1, 0):
                tokens = np.zeros((sub.num_slots, stop - start), np.uint8)
                tokens[sub.own_slots(np.arange(len(base)))] = sub.family.stored(sub.layers[index], base)[name][:, start:stop]
                alone.append(kvc.RealKvSource(array=tokens, num_bytes_per_token=stop - start, read_bytes=stop - start))
            for slot in range(sub.num_slots):
                assert reference.real_kv_hash(bound, slot, mode) == reference.real_kv_hash(alone, slot, mode), (half, slot)


# The loop.


def forward(case: Case, batch, pool):
    return batch.input_ids, case.write(pool, batch.out_cache_loc, jnp.asarray(batch.input_ids) * 3 + batch.positions)


class PoolLoop:
    """Requests served on a case's pool: rows 1 and 3 are live; row 3 took over the slots of row 2, which ended."""

    def __init__(self, case, settings):
        self.case, self.pool = case, case.make()
        capacities = kvc.CanaryLaunchCapacities.from_pool(self.pool.num_slots, ROWS)
        self.canary, state = kvc.install_canary(self.pool, settings, capacities=capacities)
        self.state = self.canary.mark_init_finished(state)
        self.requests = Requests()
        self.step = jax.jit(self.canary.wrap(partial(forward, case)), donate_argnums=(0, 2))
        self.probe = jax.jit(self.canary.wrap(partial(forward, case)))

    def serve(self):
        """Five legal steps; what each found."""
        table, found = self.requests.table, []
        self.requests.place(1, 0, 7)
        self.requests.place(2, 0, 4)
        works = [[(1, 0, 7)], [(2, 0, 4)], [(1, 7, 2), (2, 3, 0)], [(3, 0, 4)], [(1, 9, 1), (3, 4, 1)]]
        for number, work in enumerate(works):
            if number == 2:
                self.requests.place(1, 7, 3)
            if number == 3:  # row 2 ended: its slots, in another order, are row 3's
                table[3, :4] = table[2, :4][::-1]
                self.requests.place(3, 4, 1)
            batch = self.requests.batch(*((row, prefix, tokens_of(row, prefix, count)) for row, prefix, count in work))
            self.state, report, _, self.pool = self.step(self.state, batch, self.pool)
            found.append(findings(report))
        return found

    def check(self, pool):
        """What a step without tokens finds on a pool, as sorted (tag, slot, reasons); the loop stays as it is."""
        batch = self.requests.batch((1, 10, []), (3, 5, []))
        return findings(self.probe(self.state, batch, pool)[1])


@cache
def served(case, settings):
    loop = PoolLoop(case, settings)
    return loop, loop.serve()


def changed_bytes(sub, name):
    """Bytes of a token worth changing: the ends of the token, of every hashed run, and of what PARTIAL reads."""
    size = sub.family.stored(0, np.array([1], np.int32))[name].shape[1]
    ends = {0, size - 1}
    for field, start, stop in sub.family.hashed.values():
        ends |= {start - 1, start, start + 15, start + 16, stop - 1, stop} if field == name else set()
    return sorted(byte for byte in ends if 0 <= byte < size)


@pytest.mark.parametrize(
    "settings", [config(real_kv_layers=(-1,)), config(real_kv_hash_mode=1, enable_v_half=False)], ids=["all", "partial"]
)
@every_case
def test_a_changed_byte_is_found_where_it_is_hashed(case, settings):
    loop, legal = served(case, settings)
    assert legal == [[]] * 5
    assert loop.check(loop.pool) == []
    live, dead = loop.requests.table[1, 3], loop.requests.free[0]
    for sub in case.subs:
        for name in sub.family.stored(0, np.array([1], np.int32)):
            for index in range(len(sub.layers)):
                for byte in changed_bytes(sub, name):
                    slot = int(sub.own_slots(live))
                    want = []
                    for half, (field, start, stop) in sub.family.hashed.items():
                        stop = min(stop, start + 16) if settings.real_kv_hash_mode == kvc.RealKvHashMode.PARTIAL else stop
                        reads = field == name and start <= byte < stop and index in hashed_layers(sub, settings)
                        if reads and (half == "k" or settings.enable_v_half):
                            want.append((Tag[f"TAIL_{half.upper()}_{sub.kind.name}"], slot, BYTES_CHANGED))
                    found = loop.check(sub.flipped(loop.pool, name, index, slot, byte))
                    assert found == want, (sub.kind.name, name, index, byte)
        for name, start, _ in sub.family.hashed.values():
            for index in range(len(sub.layers)):
                assert loop.check(sub.flipped(loop.pool, name, index, int(sub.own_slots(dead)), start)) == []


@pytest.mark.parametrize("v_half", [True, False], ids=["v", "no v"])
@every_case
def test_the_launches_of_a_pool(case, v_half):
    """Two launches a step for each phase, half and group that there is; none of the others."""
    settings = config(real_kv_layers=(-1,)) if v_half else config(real_kv_hash_mode=1, enable_v_half=False)
    loop, _ = served(case, settings)
    want = np.zeros(12, np.int64)
    for sub in case.subs:
        for half in sub.family.hashed if v_half else "k":
            for phase in ("HEAD", "TAIL"):
                want[Tag[f"{phase}_{half.upper()}_{sub.kind.name}"]] = 5 * 2
    np.testing.assert_array_equal(kvc.to_int64(loop.state.device_state.kernel_run_counters), want)
    slots = np.array([1], np.int32)
    plan = kvc.VerifyPlan(slots, -slots, 0 * slots, 0 * slots, 0 * slots, slots)
    for sub in case.subs:
        state, _ = loop.canary.sweep(loop.state, plan, loop.pool, kind=sub.kind)
        swept = want.copy()
        for half in sub.family.hashed if v_half else "k":
            swept[Tag[f"SWEEP_{half.upper()}_{sub.kind.name}"]] += 1
        np.testing.assert_array_equal(kvc.to_int64(state.device_state.kernel_run_counters), swept)


def test_the_cases_cover_every_reference_pool():
    classes = {type(case.make()) for case in CASES}
    assert classes == {value for name, value in vars(kvc.pools).items() if name.endswith(("Pool", "FP4"))}
    assert sum(sub.kind is SWA for case in CASES for sub in case.subs) == 5
    assert TOKENS >= 7
