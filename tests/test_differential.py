"""Random cases, legal and not, on the device against the reference."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.backends import Backend, host
from helpers.plans import assert_same_plan
from helpers.random_cases import LAUNCH_SHAPES, PLAN_SHAPES, random_plan, random_verify, random_write
from helpers.serving import KV_BYTES, NUM_SLOTS, WINDOW, CanaryAround, Engine, Step
from helpers.states import assert_same_buffer, assert_same_state, fields, fresh_state, log_rows
from jax_kvcanary import reference
from jax_kvcanary.constants import CanaryLaunchTag
from jax_kvcanary.plan import WritePlan
from jax_kvcanary.state import to_int64

WILDNESS = st.sampled_from([0.0, 0.05, 0.05, 0.2, 0.7])
SEEDS = st.integers(0, 2**32 - 1)

#: Backend and number of examples.
DEVICE_BACKENDS = [("jit", 150), ("jit_int64", 60), ("jit_x64", 60), ("int64", 9)]


def differential(examples: int) -> Any:
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None, print_blob=False)


def convert(tree: Any, backend: Backend) -> Any:
    """Arguments in the backend's own arrays: int64 ones become its integers."""

    def leaf(array: Any) -> Any:
        return backend.ints(array, array.shape) if array.dtype == np.int64 else backend.array(array)

    return jax.tree.map(leaf, tree)


def launch_arguments(args: tuple[Any, ...], keywords: dict[str, Any], backend: Backend) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a launch for a backend; its sources keep their dtype."""
    with jax.enable_x64(True):
        sources = jax.tree.map(jax.numpy.array, keywords["real_kv_sources"])
    arrays = {name: value for name, value in keywords.items() if isinstance(value, np.ndarray)}
    return convert(args, backend), keywords | convert(arrays, backend) | {"real_kv_sources": sources}


@pytest.mark.parametrize(("backend_name", "examples"), DEVICE_BACKENDS)
def test_plan(get_backend, backend_name, examples):
    backend = get_backend(backend_name)

    @differential(examples)
    @given(shape=st.sampled_from(PLAN_SHAPES), seed=SEEDS, wildness=WILDNESS)
    def check(shape, seed, wildness):
        args, keywords = random_plan(np.random.default_rng(seed), shape, wildness, wide=backend.int_dtype == np.int64)
        want = reference.plan(*args, **keywords)
        with backend.active():
            got = host(backend.plan(*convert(args, backend), **convert_plan_keywords(keywords, backend)))
        assert_same_plan(got, want)

    check()


def convert_plan_keywords(keywords: dict[str, Any], backend: Backend) -> dict[str, Any]:
    arrays = {name: value for name, value in keywords.items() if isinstance(value, np.ndarray)}
    return keywords | convert(arrays, backend)


def all_rows(operation: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> np.ndarray:
    """Every row that a launch finds, run on the reference with a ring that has room for all."""
    state = fresh_state(999, chain_assert=int(args[-1].enable_chain_position_assert[0]))
    out = operation(*args[:-1], state, **keywords)
    return log_rows(out[1] if isinstance(out, tuple) else out)


def check_log(got: Any, want: Any, before: Any, rows: np.ndarray) -> None:
    """Compare logs and counters; where the ring had no room for all rows, any of them may stay."""
    earlier, capacity = before.violation_log.count(), before.violation_log.violation_ring.shape[0]
    overflows = earlier + len(rows) > capacity
    assert_same_state(got, want, rows_before=min(earlier, capacity), all_rows=rows if overflows else None)


@pytest.mark.parametrize(("backend_name", "examples"), DEVICE_BACKENDS)
def test_verify(get_backend, backend_name, examples):
    backend = get_backend(backend_name)

    @differential(examples)
    @given(shape=st.sampled_from(LAUNCH_SHAPES), seed=SEEDS, wildness=WILDNESS)
    def check(shape, seed, wildness):
        args, keywords = random_verify(np.random.default_rng(seed), shape, wildness)
        want = reference.verify_step(*args, **keywords)
        device_args, device_keywords = launch_arguments(args, keywords, backend)
        with backend.active():
            got = backend.verify_step(*device_args, **device_keywords)
        check_log(got, want, args[-1], all_rows(reference.verify_step, args, keywords))
        np.testing.assert_array_equal(np.asarray(device_args[0]), args[0])
        if not wildness:
            assert want.violation_log.count() == args[-1].violation_log.count()

    check()


@pytest.mark.parametrize(("backend_name", "examples"), DEVICE_BACKENDS)
def test_write(get_backend, backend_name, examples):
    backend = get_backend(backend_name)

    @differential(examples)
    @given(shape=st.sampled_from(LAUNCH_SHAPES), seed=SEEDS, wildness=WILDNESS)
    def check(shape, seed, wildness):
        args, keywords = random_write(np.random.default_rng(seed), shape, wildness, wide=backend.int_dtype == np.int64)
        want_buf, want = reference.write_step(*args, **keywords)
        device_args, device_keywords = launch_arguments(args, keywords, backend)
        with backend.active():
            got_buf, got = backend.write_step(*device_args, **device_keywords)
        check_log(got, want, args[-1], all_rows(reference.write_step, args, keywords))
        check_buffer(np.asarray(got_buf), want_buf, args, keywords)
        if not wildness:
            assert want.violation_log.count() == args[-1].violation_log.count()

    check()


def check_buffer(got: np.ndarray, want: np.ndarray, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Compare buffers; of a slot that several rows wrote, the record of any of them may stay, whole."""
    differing = np.flatnonzero((fields(got) != fields(want)).any(axis=1))
    if differing[differing > 0].size == 0:
        return
    buf, plan, *tokens_and_state = args
    patched = want.copy()
    for row in range(min(int(plan.write_num_valid_reqs[0]), len(plan.write_seed_slot_indices))):
        alone = WritePlan(
            write_offsets=plan.write_offsets[row : row + 2],
            write_seed_slot_indices=plan.write_seed_slot_indices[row : row + 1],
            write_num_valid_reqs=np.ones(1, np.int32),
        )
        by_row, _ = reference.write_step(buf, alone, *tokens_and_state, **keywords)
        written = (fields(by_row) != fields(buf)).any(axis=1) & (fields(by_row) == fields(got)).all(axis=1)
        patched[written] = by_row[written]
    assert_same_buffer(got, patched)


@pytest.mark.parametrize(("backend_name", "seed"), [("jit", 1), ("jit", 2), ("jit", 3), ("jit_x64", 4)])
def test_legal_traffic_is_silent(get_backend, backend_name, seed):
    engine = Engine(seed)
    canaries = [CanaryAround(get_backend(name)) for name in ("reference", backend_name)]
    for _ in range(25):
        run_step(engine, engine.schedule(), canaries)
        assert canaries[0].found == 0
    slots = to_int64(host(canaries[0].state).slot_run_counters)
    assert (slots[[tag for tag in CanaryLaunchTag if "_K_" in tag.name and "SWEEP" not in tag.name]] > 200).all()


def run_step(engine: Engine, step: Step, canaries: list[CanaryAround]) -> None:
    """One forward with every canary around it; they must agree after each phase."""
    reference_canary, *others = canaries
    for phase in ("head", "tail"):
        earlier = [log_rows(canary.state) for canary in others]
        for canary in canaries:
            if phase == "head":
                canary.before_forward(step)
            else:
                canary.after_forward(step, engine.kv)
        for canary, rows in zip(others, earlier, strict=True):
            assert_same_state(canary.state, reference_canary.state)
            np.testing.assert_array_equal(log_rows(canary.state)[: len(rows)], rows)
            for key, buf in canary.buffers.items():
                assert_same_buffer(buf, reference_canary.buffers[key])
        if phase == "head":
            engine.forward(step)
    engine.after()


@dataclasses.dataclass(frozen=True)
class Scene:
    """A step about to run, in which something goes wrong."""

    engine: Engine
    step: Step
    canaries: list[CanaryAround]
    rng: np.random.Generator

    def victim(self) -> tuple[int, int]:
        """Request row and position of a cached token that this step verifies in both groups."""
        found = []
        for row, prefix, _, _ in zip(*dataclasses.astuple(self.step.inputs), strict=True):
            window = range(max(0, prefix - WINDOW), prefix)
            found += [(row, p) for p in window if row and self.step.lut[self.step.req_to_token[row, p]]]
        return found[self.rng.integers(len(found))]

    def victim_slot(self, group: str) -> int:
        slot = self.step.req_to_token[self.victim()]
        return slot if group == "FULL" else self.step.lut[slot]


def corrupt_record(scene, group, end, field):
    """Flip a bit in one field of a record."""
    slot, bit = scene.victim_slot(group), np.int64(1) << scene.rng.integers(63)
    for canary in scene.canaries:
        records = canary.records(group, end)
        records[slot, field] ^= bit
        canary.set_records(group, end, records)


def release_record(scene, group, end):
    slot = scene.victim_slot(group)
    for canary in scene.canaries:
        records = canary.records(group, end)
        records[slot] = -1
        canary.set_records(group, end, records)


def corrupt_kv(scene, group):
    scene.engine.kv[group][scene.victim_slot(group), scene.rng.integers(KV_BYTES)] ^= 1


def corrupt_table(scene):
    """A row of the table names a free slot."""
    scene.step.req_to_token[scene.victim()] = scene.engine.free["FULL"][0]


def corrupt_input(scene, name, value):
    getattr(scene.step, name)[0] = value


def corrupt_destination(scene):
    """A token is written over one that is cached, and the engine does not know."""
    scene.step.out_cache_loc[0] = scene.victim_slot("FULL")


CORRUPTIONS = {
    "token in a record": partial(corrupt_record, group="FULL", end="tail", field=0),
    "position in a record": partial(corrupt_record, group="SWA", end="tail", field=1),
    "hash in a record": partial(corrupt_record, group="FULL", end="head", field=2),
    "real-KV hash in a record": partial(corrupt_record, group="SWA", end="tail", field=3),
    "released record": partial(release_record, group="SWA", end="head"),
    "KV bytes": partial(corrupt_kv, group="FULL"),
    "KV bytes of the window": partial(corrupt_kv, group="SWA"),
    "table of slots": corrupt_table,
    "input token": partial(corrupt_input, name="input_ids", value=1000),
    "input position": partial(corrupt_input, name="positions", value=500),
    "slot that does not exist": partial(corrupt_input, name="out_cache_loc", value=NUM_SLOTS["FULL"]),
    "token that is not stored": partial(corrupt_input, name="out_cache_loc", value=-1),
    "stray write": corrupt_destination,
}


@pytest.mark.parametrize("seed", [11, 12])
@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_one_corruption_is_found(get_backend, kind, seed):
    engine = Engine(seed)
    canaries = [CanaryAround(get_backend(name)) for name in ("reference", "jit")]
    for _ in range(9):
        run_step(engine, engine.schedule(), canaries)
    assert canaries[0].found == 0
    step = engine.schedule()
    step = dataclasses.replace(step, expected_input_tokens=step.input_ids.copy(), expected_input_positions=step.positions.copy())
    CORRUPTIONS[kind](Scene(engine, step, canaries, np.random.default_rng(seed)))
    run_step(engine, step, canaries)
    run_step(engine, engine.schedule(), canaries)
    assert canaries[0].found > 0
