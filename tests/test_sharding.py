"""The operations inside ``jax.shard_map`` on two devices: every device has its own state, and results are typed as varying."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_kvcanary as kvc
from helpers.backends import host
from helpers.states import assert_same_buffer, assert_same_state

NUM_SLOTS, TOKENS = 23, 7
CONFIG = kvc.CanaryConfig("log", ring_capacity=211, real_kv_hash_mode=kvc.RealKvHashMode.ALL)
OWN, SHARED = P("x"), P()

#: Arguments of a step, in order.
NAMES = (
    "indices",
    "prefixes",
    "extends",
    "valid_lens",
    "table",
    "expected",
    "lut",
    "tokens",
    "positions",
    "slots",
    "kv",
    "buf",
    "state",
)
BUF, STATE = len(NAMES) - 2, len(NAMES) - 1


def test_on_two_host_devices():
    """All other tests of this file, in a process that splits the host into two devices."""
    if jax.device_count() >= 2:
        pytest.skip("they ran in this process, which has two devices")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # no worker of a parallel run
    run = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "not on_two_host_devices"],
        env={**environment, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "skipped" not in run.stdout, run.stdout


@pytest.fixture
def mesh():
    """Two devices on the axis x."""
    if jax.device_count() < 2:
        pytest.skip("needs two devices; test_on_two_host_devices brings them")
    return jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])


def place(mesh, tree, spec=OWN):
    return jax.device_put(tree, NamedSharding(mesh, spec))


def pair(tree):
    """The tree twice, along a new leading axis."""
    return jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), tree)


def take(tree, index):
    return jax.tree.map(lambda leaf: leaf[index], tree)


def grow(tree):
    return jax.tree.map(lambda leaf: leaf[None], tree)


def per_device(function):
    """The function on one device's part of arguments and results that have an axis of devices."""
    return lambda *args: grow(function(*take(args, 0)))


def make_inputs():
    """What each device plans and writes, [2, ...]; tables name slots that nothing has written, so that verify finds a lot."""
    rng = np.random.default_rng(3)

    def ints(low, high, *shape):
        return rng.integers(low, high, shape).astype(np.int32)

    slots = np.stack([rng.permutation(np.arange(1, NUM_SLOTS))[:TOKENS] for _ in range(2)]).astype(np.int32)
    return (
        np.array([[1, 2], [2, 1]], np.int32),
        np.array([[5, 2], [3, 4]], np.int32),
        np.array([[3, 1], [2, 2]], np.int32),
        np.array([[4, 2], [1, 3]], np.int32),
        ints(1, NUM_SLOTS, 2, 3, 11),
        ints(0, 1000, 2, 3, 11),
        ints(1, NUM_SLOTS, 2, NUM_SLOTS),
        ints(0, 1000, 2, TOKENS),
        ints(0, 9, 2, TOKENS),
        slots,
        ints(0, 100, 2, NUM_SLOTS, 2, 4).astype(np.float32),
    )


def fresh():
    """A buffer and a state."""
    return kvc.fresh_records(NUM_SLOTS), kvc.CanaryDeviceState.allocate(CONFIG)


def step(indices, prefixes, extends, valid_lens, table, expected, lut, tokens, positions, slots, kv, buf, state):
    """Plan, verify and write of one device."""
    source = kvc.RealKvSource(array=kv, num_bytes_per_token=32, read_bytes=32)
    real_kv = {"tag": 2, "real_kv_sources": (source,), "real_kv_hash_mode": kvc.RealKvHashMode.ALL}
    plan = kvc.plan(
        kvc.PlanInput(indices, prefixes, extends, valid_lens),
        table,
        verify_capacity=31,
        write_req_capacity=3,
        full_to_swa_index_mapping=lut,
        expected_tokens=expected,
    )
    state = kvc.verify_step(buf, plan.verify, state, check_expected_token=True, **real_kv)
    return kvc.write_step(buf, plan.write, tokens, positions, slots, state, **real_kv)


def steps(*args):
    """Two steps, one after the other."""
    *inputs, buf, state = args
    return step(*inputs, *step(*inputs, buf, state))


def scanned(*args):
    """The same as a scan."""
    *inputs, buf, state = args
    return jax.lax.scan(lambda carry, _: (step(*inputs, *carry), None), (buf, state), None, length=2)[0]


jitted_steps = jax.jit(steps)


def assert_same_results(got, args):
    """A device's results are those of its arguments without a mesh."""
    (got_buf, got_state), (want_buf, want_state) = got, host(jitted_steps(*host(args)))
    assert want_state.violation_log.count() > 0
    assert_same_buffer(got_buf, want_buf)
    assert_same_state(got_state, want_state)


@pytest.mark.parametrize("function", [steps, scanned], ids=lambda function: function.__name__)
@pytest.mark.parametrize("how", ["eager", "jit", "donated"])
def test_devices_with_their_own_state(mesh, how, function):
    mapped = jax.shard_map(per_device(function), mesh=mesh, in_specs=OWN, out_specs=OWN)
    run = {"eager": mapped, "jit": jax.jit(mapped), "donated": jax.jit(mapped, donate_argnums=(BUF, STATE))}[how]
    args = (*place(mesh, make_inputs()), *place(mesh, pair(fresh())))
    copies = host((*make_inputs(), *pair(fresh())))  # views of the arguments themselves could keep them from being donated
    got = run(*args)
    kept = [jax.tree_util.keystr(path) for path, leaf in jax.tree_util.tree_leaves_with_path(args[BUF:]) if not leaf.is_deleted()]
    assert (kept == []) == (how == "donated"), kept
    for device in range(2):
        assert_same_results(take(host(got), device), take(copies, device))


def test_buffers_stay_where_they_are(mesh):
    mapped = jax.shard_map(per_device(step), mesh=mesh, in_specs=OWN, out_specs=OWN)
    run = jax.jit(mapped, donate_argnums=(BUF, STATE))
    inputs, (buf, state) = place(mesh, make_inputs()), place(mesh, pair(fresh()))

    def addresses(buf):
        return [shard.data.unsafe_buffer_pointer() for shard in buf.addressable_shards]

    before = addresses(buf)
    for _ in range(2):
        buf, state = run(*inputs, buf, state)
        assert addresses(buf) == before
    for device in range(2):
        assert_same_results(take(host((buf, state)), device), (*take(make_inputs(), device), *fresh()))


def test_what_is_shared_stays_shared(mesh):
    """Nothing varies: the results can be taken as replicated."""
    args = (*take(make_inputs(), 1), *fresh())
    mapped = jax.shard_map(steps, mesh=mesh, in_specs=SHARED, out_specs=SHARED)
    assert_same_results(host(jax.jit(mapped)(*place(mesh, args, SHARED))), args)


# One argument alone is the device's own.


def one_own(mesh, name):
    """Each device's arguments, the same placed on the mesh, and their specs."""
    own = NAMES.index(name)
    inputs, shared = (*make_inputs(), *pair(fresh())), (*take(make_inputs(), 0), *fresh())
    args = [inputs[i] if i == own else shared[i] for i in range(len(NAMES))]
    specs = tuple(OWN if i == own else SHARED for i in range(len(NAMES)))
    devices = [take_own(name, args, device) for device in range(2)]
    return devices, [place(mesh, arg, spec) for arg, spec in zip(args, specs, strict=True)], specs


def take_own(name, args, device=0):
    own = NAMES.index(name)
    return [take(arg, device) if i == own else arg for i, arg in enumerate(args)]


each_name = pytest.mark.parametrize("name", NAMES)


@each_name
def test_one_argument_that_varies(mesh, name):
    """Whichever argument is the device's own, so are the results."""
    devices, args, specs = one_own(mesh, name)
    mapped = jax.shard_map(lambda *args: grow(steps(*take_own(name, args))), mesh=mesh, in_specs=specs, out_specs=OWN)
    got = host(jax.jit(mapped)(*args))
    for device, own_args in enumerate(devices):
        assert_same_results(take(got, device), own_args)


@each_name
def test_results_that_vary_are_not_taken_as_replicated(mesh, name):
    _, args, specs = one_own(mesh, name)
    mapped = jax.shard_map(lambda *args: step(*take_own(name, args)), mesh=mesh, in_specs=specs, out_specs=SHARED)
    with pytest.raises(ValueError, match="require replication"):
        jax.jit(mapped)(*args)


# The loop.


def loop_step(canary, indices, prefixes, extends, _valid_lens, table, _expected, _lut, tokens, positions, slots, kv, state, pool):
    """Everything of the loop once; the KV that the forward writes is the device's own."""
    batch = kvc.ForwardBatch(tokens, positions, slots, kvc.PlanInput(indices, prefixes, extends), table)
    state, between = canary.pre_forward(state, batch, pool)
    pool = pool.write(0, slots, kv[:TOKENS], kv[:TOKENS] + 1)
    state, report = canary.post_forward(state, between, batch, pool)
    state, swept = canary.sweep(state, between.plans[0].verify, pool)
    state = canary.release(state, slots[:2], pool)
    return canary.mark_init_finished(state), pool, report, swept


def loop_steps(canary, *args):
    *inputs, state, pool = args

    def body(carry, _):
        state, pool, *reports = loop_step(canary, *inputs, *carry)
        return (state, pool), reports

    return jax.lax.scan(body, (state, pool), None, length=3)


def test_loop_on_devices_with_their_own_pool(mesh):
    pool = kvc.pools.MHATokenToKVPool.allocate(num_slots=NUM_SLOTS, num_layers=1, num_kv_heads=2, head_dim=4, dtype=jnp.float32)
    canary, state = kvc.install_canary(pool, CONFIG, capacities=kvc.CanaryLaunchCapacities(31, 3))
    run = partial(loop_steps, canary)
    mapped = jax.shard_map(per_device(run), mesh=mesh, in_specs=OWN, out_specs=OWN)
    args = (*place(mesh, make_inputs()), *place(mesh, pair((state, pool))))
    (got_state, got_pool), got_reports = host(jax.jit(mapped, donate_argnums=(BUF, STATE))(*args))
    for device in range(2):
        (want_state, want_pool), want_reports = host(jax.jit(run)(*take(make_inputs(), device), state, pool))
        assert want_state.device_state.violation_log.count() > 0
        assert_same_state(take(got_state.device_state, device), want_state.device_state)
        for got, want in zip(jax.tree.leaves(take(got_state.groups, device)), jax.tree.leaves(want_state.groups), strict=True):
            assert_same_buffer(got, want)
        np.testing.assert_array_equal(take(got_pool, device).k_buffer[0], want_pool.k_buffer[0])
        for got, want in zip(take(got_reports, device), want_reports, strict=True):
            for got_leaf, want_leaf in zip(jax.tree.leaves(got.summary), jax.tree.leaves(want.summary), strict=True):
                np.testing.assert_array_equal(got_leaf, want_leaf)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_loop_on_a_pool_that_is_split_over_devices(mesh, axis_type):
    """Without shard_map: the heads lie on two devices, and the partitioner brings them to the custom calls."""
    mesh = jax.make_mesh((2,), ("x",), (axis_type,), devices=mesh.devices.flatten())
    pool = kvc.pools.MHATokenToKVPool.allocate(num_slots=NUM_SLOTS, num_layers=1, num_kv_heads=2, head_dim=4, dtype=jnp.float32)
    split = place(mesh, pool, P(None, "x"))
    inputs, results = take(make_inputs(), 0), []
    for each in (pool, split):
        canary, state = kvc.install_canary(each, CONFIG, capacities=kvc.CanaryLaunchCapacities(31, 3))
        run = jax.jit(partial(loop_step, canary), donate_argnums=BUF)
        for _ in range(2):
            state, each, *_ = run(*inputs, state, each)
        results.append(host(state))
    assert results[0].device_state.violation_log.count() > 0
    assert_same_state(results[1].device_state, results[0].device_state)
    for got, want in zip(jax.tree.leaves(results[1].groups), jax.tree.leaves(results[0].groups), strict=True):
        assert_same_buffer(got, want)


# Expected tokens.

LISTS = ("table", "reqs", "tokens", "lengths", "starts")


def store(table, reqs, tokens, lengths, starts):
    """Lists, and a token behind each of them."""
    config = dataclasses.replace(CONFIG, enable_verify_token_assert=True)
    state = kvc.CanaryDeviceState.allocate(config, req_to_token_alloc_size=1, max_context_len=1)
    state = dataclasses.replace(state, req_to_verify_expected_tokens=table)
    state = kvc.set_expected_tokens(state, reqs, tokens, lengths, start_positions=starts)
    return kvc.append_expected_tokens(state, reqs, starts + lengths, reqs * 1000).req_to_verify_expected_tokens


def make_lists():
    """What each device stores, [2, ...]."""
    own = ([[3, 0, 1], [2, 3, 1]], [range(11, 18), range(21, 28)], [[3, 2, 2], [1, 4, 2]], [[0, 0, 4], [2, 1, 3]])
    rng = np.random.default_rng(5)
    return rng.integers(0, 9, (2, 5, 7)).astype(np.int32), *(np.array(values, np.int32) for values in own)


@pytest.mark.parametrize("own", LISTS)
def test_expected_tokens(mesh, own):
    """Whichever argument is the device's own, so is the table."""
    flags = [name == own for name in LISTS]
    lists = [values if flag else values[0] for values, flag in zip(make_lists(), flags, strict=True)]
    specs = tuple(OWN if flag else SHARED for flag in flags)
    args = [place(mesh, values, spec) for values, spec in zip(lists, specs, strict=True)]

    def one(*args):
        return store(*(arg[0] if flag else arg for arg, flag in zip(args, flags, strict=True)))

    got = host(jax.jit(jax.shard_map(lambda *args: one(*args)[None], mesh=mesh, in_specs=specs, out_specs=OWN))(*args))
    for device in range(2):
        want = store(*(values[device] if flag else values for values, flag in zip(lists, flags, strict=True)))
        np.testing.assert_array_equal(got[device], want)
        assert (np.asarray(want) >= 1000).any()
    with pytest.raises(ValueError, match="require replication"):
        jax.jit(jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=SHARED))(*args)


def test_expected_tokens_that_are_shared_stay_shared(mesh):
    lists = take(make_lists(), 1)
    got = jax.jit(jax.shard_map(store, mesh=mesh, in_specs=SHARED, out_specs=SHARED))(*place(mesh, lists, SHARED))
    np.testing.assert_array_equal(got, store(*lists))
