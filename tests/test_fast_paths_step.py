"""A step's two phases on the device against the reference: the links that go from one to the other, and the report that comes with it."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_kvcanary as kvc
from helpers import loops, window_loop
from helpers.backends import host
from helpers.states import assert_same_buffer, assert_same_state, fields, log_rows, multiset
from jax_kvcanary import FailReason as Reason
from jax_kvcanary import RealKvHashMode as Mode
from jax_kvcanary import reference
from jax_kvcanary.pools import MHATokenToKVPool

ROWS, MAX_REQS, WIDTH = 7, 11, 601
CONFIG = kvc.CanaryConfig("log", ring_capacity=4001, real_kv_hash_mode=Mode.ALL)
SIZES = pytest.mark.parametrize("tokens", [89, 1301])
TREES = pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])


@dataclass
class Scene:
    """A step about to run, on records and KV that are anything: every entry is a finding, and every seed goes on from its own record.

    Fields:
        canary: with one FULL group, K and V.
        state: its records have small positions and, in HEAD and TAIL, K and V, the same chains.
        batch: rows with a prefix each, or without one where ``fresh``.
        pool: with random KV.
    """

    canary: kvc.Canary
    state: Any
    batch: kvc.ForwardBatch
    pool: Any

    @property
    def seeds(self) -> np.ndarray:
        """The slot that each row goes on from."""
        rows = self.batch.plan_input
        return self.batch.req_to_token[rows.req_pool_indices, rows.prefix_lens - 1]

    def damage(self, name: str, slots: Any, field: int = 2) -> None:
        """Change a field of some records of one buffer."""
        (group,) = self.state.groups
        buffer = np.array(getattr(group, name))
        fields(buffer)[slots, field] ^= 1
        self.state = dataclasses.replace(self.state, groups=(group.with_buffers(**{name: jnp.asarray(buffer)}),))

    def pre(self) -> Any:
        """The step, which :meth:`post` takes; the state is the one behind it."""
        self.state, step = pre_forward(self.canary, self.state, self.batch, self.pool)
        return step

    def post(self, step: Any) -> Any:
        """State and report; the scene stays as it is."""
        return post_forward(self.canary, self.state, step, self.batch, self.pool)


@partial(jax.jit, static_argnums=0)
def pre_forward(canary: kvc.Canary, state: Any, batch: Any, pool: Any) -> Any:
    return canary.pre_forward(state, batch, pool)


@partial(jax.jit, static_argnums=0)
def post_forward(canary: kvc.Canary, state: Any, step: Any, batch: Any, pool: Any) -> Any:
    return canary.post_forward(state, step, batch, pool)


def make_scene(tokens: int, *, seed: int = 0, tree: bool = False, fresh: Any = ()) -> Scene:
    """Rows of random lengths that add up to ``tokens``, all but those of ``fresh`` behind a prefix."""
    rng = np.random.default_rng([tokens, seed])
    num_slots = 2 * tokens + 211
    pool = MHATokenToKVPool.allocate(num_slots=num_slots, num_layers=1, num_kv_heads=3, head_dim=12)
    values = (jnp.asarray(rng.integers(0, 9, (num_slots, 3, 12)), jnp.bfloat16) for _ in range(2))
    pool = pool.write(0, jnp.arange(num_slots), *values)
    canary, state = kvc.install_canary(pool, CONFIG, capacities=kvc.CanaryLaunchCapacities(499, 13))
    state = canary.mark_init_finished(state)
    records = rng.integers(-(2**63), 2**63 - 1, (num_slots, 4))
    records[:, 1] = rng.integers(0, 500, num_slots)
    (group,) = state.groups
    # Arrays of their own: the same chains everywhere, so that what differs is what a test makes differ.
    buffers = {name: jnp.asarray(records.view(np.uint8).copy()) for name in group.buffer_names}
    state = dataclasses.replace(state, groups=(group.with_buffers(**buffers),))

    extends = np.diff([0, *np.sort(rng.integers(0, min(tokens, 400), ROWS - 1)), tokens]).astype(np.int32)
    extends = np.minimum(extends, 500)
    extends[-1] += tokens - extends.sum()
    prefixes = rng.integers(1, 53, ROWS).astype(np.int32)
    prefixes[list(fresh)] = 0
    reqs = rng.permutation(np.arange(1, MAX_REQS))[:ROWS].astype(np.int32)
    free = rng.permutation(np.arange(1, num_slots)).astype(np.int32)
    table = rng.permutation(free[tokens:])[rng.integers(0, tokens // 2, (MAX_REQS, WIDTH))].astype(np.int32)
    table[reqs, prefixes - 1] = free[-ROWS:]  # a seed of its own for each row
    positions = np.concatenate([prefix + np.arange(extend) for prefix, extend in zip(prefixes, extends, strict=True)])
    parents = None
    if tree:
        starts = np.repeat(np.cumsum(extends) - extends, extends)
        parents = np.maximum(starts, np.arange(tokens) - rng.integers(1, 50, tokens)).astype(np.int32)
        parents[parents == np.arange(tokens)] = -1
        for i, parent in enumerate(parents):
            positions[i] = positions[parent] + 1 if parent >= 0 else positions[starts[i]]
    batch = kvc.ForwardBatch(
        rng.integers(0, 50_000, tokens).astype(np.int32),
        positions.astype(np.int32),
        free[:tokens].copy(),
        kvc.PlanInput(reqs, prefixes, extends),
        table,
        parents=parents,
    )
    return Scene(canary, state, batch, pool)


def reference_phase(scene: Scene, state: Any, step: Any, phase: str) -> Any:
    """Buffers of the phase and the device's state behind it, by the reference."""
    (group,), (plan,) = state.groups, host(step.plans)
    device_state, buffers, batch = host(state.device_state), [], scene.batch
    kv = {"real_kv_hash_mode": CONFIG.real_kv_hash_mode if phase == "tail" else Mode.NONE}
    for endpoint in group.endpoints(phase, scene.pool):
        more = {"tag": endpoint.tag, "real_kv_sources": endpoint.sources, **kv}
        device_state = reference.verify_step(endpoint.canary_buf, plan.verify, device_state, **more)
        arrays = (batch.input_ids, batch.positions, step.out_cache_locs[0])
        buffer, device_state = reference.write_step(endpoint.canary_buf, plan.write, *arrays, device_state, **more, parents=batch.parents)
        buffers.append(buffer)
    return buffers, device_state


def check_step(scene: Scene, between: Any = lambda _: None) -> Any:
    """Run both phases, with something done to the records between them, compare each with the reference, and return the rows logged."""
    before = scene.state
    step = scene.pre()
    check_phase(scene, scene.state, before, step, "head")
    between(scene)
    after, _ = scene.post(step)
    check_phase(scene, after, scene.state, step, "tail")
    return log_rows(after.device_state)


def check_phase(scene: Scene, got: Any, before: Any, step: Any, phase: str) -> None:
    buffers, device_state = reference_phase(scene, before, step, phase)
    for half, want in zip("kv", buffers, strict=True):
        assert_same_buffer(getattr(got.groups[0], f"{half}_{phase}"), want)
    assert_same_state(got.device_state, device_state, rows_before=before.device_state.violation_log.count())


def assert_same_step(got: Any, want: Any) -> None:
    """Compare what two calls of ``post_forward`` returned, but for the order of rows in the log."""
    (got_state, got_report), (want_state, want_report) = got, want
    for one, other in zip(jax.tree.leaves(got_state.groups), jax.tree.leaves(want_state.groups), strict=True):
        assert_same_buffer(one, other)
    assert_same_state(got_state.device_state, want_state.device_state)
    np.testing.assert_array_equal(got_report.summary, want_report.summary)
    np.testing.assert_array_equal(got_report.row_flags, want_report.row_flags)


# Links.


@SIZES
@TREES
def test_a_step_is_that_of_the_reference(tokens, tree):
    """Also with a slot that a row names twice, one that is skipped, and padding."""
    scene = make_scene(tokens, tree=tree)
    slots = scene.batch.out_cache_loc
    last = tokens - 1 - int(scene.batch.plan_input.extend_seq_lens[-1])
    slots[[tokens - 1, tokens - 3]] = slots[tokens - 2], -1
    slots[last : last + 9 : 3] = 0
    rows = check_step(scene)
    assert {0, 1, 2, 3} == {int(row[0]) for row in rows}


@SIZES
@TREES
@pytest.mark.parametrize("names", [("k_tail",), ("v_tail",), ("k_tail", "v_tail"), ("v_head",), ("k_head", "v_tail")], ids="+".join)
def test_seeds_that_differ(tokens, tree, names):
    """Some rows of one phase or half go on from another record than those of the others, and are walked by themselves."""
    scene = make_scene(tokens, tree=tree)
    for i, name in enumerate(names):
        scene.damage(name, scene.seeds[[i, 3]])
    check_step(scene)


@SIZES
def test_a_seed_that_changes_between_the_phases(tokens):
    """The TAIL goes on from the records as it finds them: another chain in one row, another position in a second."""

    def between(scene):
        scene.damage("k_tail", scene.seeds[2], field=0)
        scene.damage("v_tail", scene.seeds[4], field=1)

    scene = make_scene(tokens)
    rows = check_step(scene, between)
    assert Reason.WRITE_POSITION_MISMATCH in {Reason(int(bits)) for bits in rows[:, 7]}


@SIZES
@TREES
def test_no_links_are_as_good_as_links(tokens, tree):
    scene = make_scene(tokens, tree=tree, fresh=[1, 5])
    scene.damage("v_tail", scene.seeds[[0, 3]])
    step = scene.pre()
    (links,) = step.links
    assert (links.dtype, links.shape) == (np.uint32, (4 * tokens + 2 * 13,))
    assert_same_step(scene.post(step), scene.post(dataclasses.replace(step, links=None)))


@SIZES
@TREES
@pytest.mark.parametrize("content", ["zeros", "small", "random", "of other records"])
def test_links_of_other_content(tokens, tree, content):
    """Where the hashes that the links start from are not those of the seeds, nothing else in them matters."""
    scene = make_scene(tokens, tree=tree)
    step = scene.pre()
    (links,) = step.links
    rng = np.random.default_rng(5)
    if content == "of other records":
        other = make_scene(tokens, seed=1, tree=tree)
        (changed,) = other.pre().links
    else:
        high = {"zeros": 1, "small": 9, "random": 2**32}[content]
        changed = jnp.asarray(rng.integers(0, high, links.shape, np.uint32))
    assert_same_step(scene.post(dataclasses.replace(step, links=(changed,))), scene.post(dataclasses.replace(step, links=None)))


@SIZES
@TREES
def test_links_whose_starts_agree_by_accident(tokens, tree):
    """Garbage behind starts that are right: what is stored is not specified, but it stays within the slots that the step writes."""
    scene = make_scene(tokens, tree=tree)
    step = scene.pre()
    (links,) = step.links
    rng = np.random.default_rng(7)
    before = {name: fields(getattr(scene.state.groups[0], name)) for name in ("k_tail", "v_tail")}
    untouched = np.setdiff1d(np.arange(len(before["k_tail"])), [0, *scene.batch.out_cache_loc])
    for high in (2**32, 2 * tokens, 5):
        changed = np.array(links)
        changed[: 4 * tokens] = rng.integers(0, high, 4 * tokens, np.uint32)
        state, _ = scene.post(dataclasses.replace(step, links=(jnp.asarray(changed),)))
        for name, was in before.items():
            np.testing.assert_array_equal(fields(getattr(state.groups[0], name))[untouched], was[untouched])


def test_links_of_another_length():
    scene = make_scene(89)
    step = scene.pre()
    (links,) = step.links
    for wrong in (links[:-1], jnp.concatenate([links, links]), links[None]):
        with pytest.raises(ValueError, match=r"^`step\.links` has shape ") as error:
            scene.canary.post_forward(scene.state, dataclasses.replace(step, links=(wrong,)), scene.batch, scene.pool)
        assert str(error.value) == (
            f"`step.links` has shape {list(wrong.shape)}, but a batch of 89 tokens and a plan of 13 rows needs shape [382]."
        )
    with pytest.raises(TypeError) as type_error:
        scene.canary.post_forward(scene.state, dataclasses.replace(step, links=(links.astype(jnp.int32),)), scene.batch, scene.pool)
    assert str(type_error.value) == "`step.links` has dtype int32, but it must be uint32."
    with pytest.raises(ValueError, match=r"^`step` has links for 2 groups, but `state` has 1 groups\.$"):
        scene.canary.post_forward(scene.state, dataclasses.replace(step, links=(links, links)), scene.batch, scene.pool)


def test_buffers_of_different_sizes_take_no_links():
    """What the HEAD finds about slots would not hold in a shorter TAIL, so that its chains are walked again."""
    scene = make_scene(89)
    (group,) = scene.state.groups
    shorter = {name: getattr(group, name)[:-7] for name in ("k_tail", "v_tail")}
    scene.state = dataclasses.replace(scene.state, groups=(group.with_buffers(**shorter),))
    scene.batch.out_cache_loc[[3, 40]] = len(group.k_head) - 2, len(group.k_head) - 5
    rows = check_step(scene)
    assert Reason.SLOT_OUT_OF_RANGE in {Reason(int(bits)) for bits in rows[:, 7]}
    step = scene.pre()
    useless = dataclasses.replace(step, links=(jnp.zeros((3,), jnp.uint32),))
    assert_same_step(scene.post(useless), scene.post(dataclasses.replace(step, links=None)))


# The report.


@cache
def batches():
    """Eight steps, sound at first; the last two have a row that no table has."""
    served = loops.serve(faults=True)
    for i in (6, 7):
        rows = served[i].plan_input
        reqs = rows.req_pool_indices.copy()
        reqs[1] = loops.MAX_REQS + 3
        served[i] = dataclasses.replace(served[i], plan_input=dataclasses.replace(rows, req_pool_indices=reqs))
    return served


def check_report(report: Any, state: Any, num_invalid_rows: Any, row_flags: Any) -> None:
    """Compare a report with the one that the state gives, where its content is specified, and types everywhere."""
    got, want = host(report), host(kvc.CanaryReport.of(state.device_state, num_invalid_rows, np.asarray(row_flags, np.int32)))
    for name, value in vars(want).items():
        assert (getattr(got, name).dtype, getattr(got, name).shape) == (value.dtype, value.shape), name
    rows = min(int(want.violation_write_index[0]), len(want.violation_ring))
    np.testing.assert_array_equal(got.violation_ring[:rows], want.violation_ring[:rows])
    np.testing.assert_array_equal(got.violation_request_rows[:rows], want.violation_request_rows[:rows])
    np.testing.assert_array_equal(got.summary, want.summary)
    np.testing.assert_array_equal(got.row_flags, want.row_flags)


def flags_of(state: Any, already: int, batch: kvc.ForwardBatch) -> Any:
    """The reasons of each row of a batch, by the requests of the rows of the log behind the first ones; the ring has room for all."""
    log = host(state).device_state.violation_log
    requests, reasons = log.violation_request_rows[already : log.count()], log.rows()[already:, 7]
    return [np.bitwise_or.reduce(reasons[requests == request], initial=0) for request in batch.plan_input.req_pool_indices.tolist()]


@pytest.mark.parametrize("ring_capacity", [1, 3, 67, 1021])
def test_the_report_is_that_of_the_state(ring_capacity):
    """While the ring is empty, filling, and full, and after it was emptied."""
    pool = loops.make_pool(MHATokenToKVPool)
    canary, state = loops.install(pool, dataclasses.replace(loops.CONFIG, ring_capacity=ring_capacity))
    counts, invalid = [], []
    for i, batch in enumerate([*batches(), *batches()[-3:]]):
        if i == 9:
            state = canary.reset_log(state)
        state, step = pre_forward(canary, state, batch, pool)
        _, pool = loops.forward(batch, pool)
        state, report = post_forward(canary, state, step, batch, pool)
        already = counts[-1] if counts and i != 9 else 0
        flags = flags_of(state, already, batch) if ring_capacity > 1000 else report.row_flags
        check_report(report, state, step.plans[0].num_invalid_rows, flags)
        counts.append(int(report.violation_write_index[0]))
        invalid.append(int(report.num_invalid_rows[0]))
        assert int(host(report).on_host()["reset_count"][0]) == (i >= 9)
    assert counts[0] == 0 < counts[6] < counts[8]
    assert counts[9] < counts[8]
    assert max(invalid) == 1


def test_a_state_without_request_rows_or_resets():
    """Logs made by hand may do without; the report then has no request rows, and no resets."""
    pool = loops.make_pool(MHATokenToKVPool)
    canary, state = loops.install(pool)
    log = dataclasses.replace(state.device_state.violation_log, violation_request_rows=None, reset_count=None)
    state = dataclasses.replace(state, device_state=dataclasses.replace(state.device_state, violation_log=log))
    state, step = pre_forward(canary, state, batches()[0], pool)
    _, report = post_forward(canary, state, step, batches()[0], pool)
    assert report.violation_request_rows is None
    assert host(report).on_host()["reset_count"].tolist() == [0]


def test_two_groups_report_once():
    """The last group's TAIL reports, with what all groups found."""
    pool = window_loop.make_pool(kvc.PoolKind.FULL, kvc.PoolKind.SWA)
    canary, state = window_loop.install(pool, mode="log")
    found = 0
    for position in range(9):
        batch = window_loop.decode(position)
        if position == 6:  # a record of each group
            groups = [group.with_buffers(v_head=group.v_head.at[window_loop.MAX_SEQ_LEN - 4].set(3)) for group in state.groups]
            state = dataclasses.replace(state, groups=tuple(groups))
        state, step = pre_forward(canary, state, batch, pool)
        pool = window_loop.forward(batch, pool)
        state, report = post_forward(canary, state, step, batch, pool)
        check_report(report, state, step.plans[0].num_invalid_rows, flags_of(state, found, batch))
        found = int(report.violation_write_index[0])
    tags = {int(row[0]) for row in loops.rows_of(host(report))}
    assert kvc.CanaryLaunchTag.HEAD_V_FULL in tags
    assert multiset(log_rows(state.device_state)) == multiset(loops.rows_of(host(report)))
    text = jax.jit(canary.post_forward).lower(state, step, batch, pool).as_text()
    assert re.findall(r"kvcanary_(\w*phase)\b", text) == ["phase", "report_phase"]
