"""What a canary costs whole steps of a model: decode and prefill of a Llama, an idle decode step, and memory.

    python tests/benchmarks/model_rows.py [--tiny] [--only memory idle decode prefill] [--SIZE N ...]

The model has random weights and the shapes of a Llama of 8 billion parameters. Its KV at batch 256 and context 4096 would take 137 GB;
requests share prefixes as a prefix cache shares them, so that a quarter of the slots is enough. Attention reads, and the canary
verifies, as many tokens as without sharing. Attention's reads come from memory all the same, since a layer's KV is far larger than the
GPU's cache; the records of a buffer, 8 MB, fit into it, so that the canary finds three of four records there. ``--tiny`` tries
everything on a CPU, where the figures mean nothing.

A decode step is compared twice, under the same limits. The ratio of wall times is what a user sees, taken within each round of steps with
and without a canary; the clocks of a GPU wander by about as much as the limits allow, so that it is no more exact than the spread beside
it. Device time is what can be measured to that precision: the row has that of what only the step with a canary runs, over that of the
step without one. That the canary slows kernels of the model down is in it only where it is by more than a tenth.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from device_time import DeviceTimeError, device_operations, difference, difference_text, total_us
from llama import Shape, Weights, cudnn_attention_error, decode, prefill, random_weights
from steps import OFF, Cache, Steps, extend_batch, random_pool
from table import Row, allow, compare, text
from wall_time import WallTimes, wall_times

import jax_kvcanary as kvc

ON, STRIDE = "on", "verify_stride=16"
_SLOWDOWN = {ON: 0.010, STRIDE: 0.003}  # the most that a decode step may take longer, by the kind of canary
_PREFILL_SLOWDOWN = 0.010
_IDLE_KERNELS, _IDLE_US = 6, 25
_EXTRA_KIB = 1024
_MODE = "PARTIAL"
_SECTIONS = ("memory", "idle", "decode", "prefill")  # quick ones first
_ENDPOINTS = tuple(kvc.CanaryLaunchTag[f"{phase}_{half}_FULL"] for phase in ("HEAD", "TAIL") for half in "KV")


@dataclass(frozen=True)
class Sizes:
    """How large everything is.

    Fields:
        shape: of the model.
        batch: requests of a decode step, a multiple of ``sharing``.
        context: tokens of each request, the one being decoded included.
        sharing: requests that have a prefix in common.
        own: tokens of each request at its end that are its own, at least 2.
        prefill: tokens of the prefill.
        idle_slots: slots of the idle step's pool, the padding slot left out.
        idle_context: tokens in the cache before the idle step.
        steps: decode steps between two looks at the clock.
        rounds: how often that many are taken of each kind.
        prefill_steps: likewise for prefills.
        prefill_rounds: likewise.
    """

    shape: Shape = field(default_factory=Shape)
    batch: int = 256
    context: int = 4096
    sharing: int = 4
    own: int = 16
    prefill: int = 16384
    idle_slots: int = 262144
    idle_context: int = 100
    steps: int = 20
    rounds: int = 22
    prefill_steps: int = 2
    prefill_rounds: int = 8


TINY = Sizes(
    shape=Shape(layers=3, width=48, heads=6, kv_heads=3, head_dim=16, ffn=80, vocab=211),
    batch=12,
    context=61,
    own=5,
    prefill=129,
    idle_slots=1009,
    idle_context=23,
    steps=3,
    rounds=4,
)


def rows(sizes: Sizes = Sizes(), only: Sequence[str] = _SECTIONS) -> list[Row]:
    """Measure everything, or the sections named; a RuntimeError if a canary reports anything."""
    found: list[Row] = []
    if "memory" in only:
        found += _memory_rows(sizes)
    if "idle" in only:
        found += _idle_rows(sizes)
    if "decode" in only or "prefill" in only:
        start = time.perf_counter()
        weights = random_weights(sizes.shape)
        cache, table = _shared_prefix_cache(sizes)
        _say("weights, pool and records", start)
        if "decode" in only:
            found += _decode_rows(sizes, weights, cache, table)
        if "prefill" in only:
            found += _prefill_rows(sizes, weights, cache)
    return found


def _say(what: str, start: float) -> None:
    print(f"[{time.perf_counter() - start:6.1f} s] {what}", flush=True)


def _configs() -> dict[str, kvc.CanaryConfig]:
    """The canaries of a decode step: default, and one that verifies a part of the records in each step."""
    return {ON: kvc.CanaryConfig("log"), STRIDE: kvc.CanaryConfig("log", verify_stride=16)}


def _shared_prefix_cache(sizes: Sizes) -> tuple[Cache, np.ndarray]:
    """A pool with every request's tokens but the last one, stamped by all canaries; and the table, int32 [batch + 1, context]."""
    if sizes.batch % sizes.sharing:
        raise ValueError(f"`batch` is {sizes.batch}, but it must be a multiple of `sharing` = {sizes.sharing}.")
    if not 2 <= sizes.own < sizes.context:
        raise ValueError(f"`own` is {sizes.own}, but it must be from 2 to {sizes.context - 1}, less than `context`.")
    groups, shared = sizes.batch // sizes.sharing, sizes.context - sizes.own
    used = groups * shared + sizes.batch * sizes.own
    slots = np.random.default_rng(0).permutation(np.arange(1, used + 1, dtype=np.int32))
    prefixes, own = np.split(slots, [groups * shared])
    table = np.zeros((sizes.batch + 1, sizes.context), np.int32)
    # The requests of a group stand far apart in the batch, so that they do not find each other's KV in the GPU's cache.
    table[1:, :shared] = prefixes.reshape(groups, shared)[np.arange(sizes.batch) % groups]
    table[1:, shared:] = own.reshape(sizes.batch, sizes.own)

    shape = sizes.shape
    pool = random_pool(max(used, sizes.prefill) + 1, shape.layers, shape.kv_heads, shape.head_dim)
    cache = Cache(pool, _configs(), kvc.CanaryLaunchCapacities(sizes.batch * sizes.context, sizes.batch))
    everyone = np.arange(1, sizes.batch + 1, dtype=np.int32)
    cache.stamp(extend_batch(table, everyone[:groups], 0, shared, shape.vocab))
    cache.stamp(extend_batch(table, everyone, shared, sizes.own - 1, shape.vocab))
    cache.check()
    return cache, table


def _decode_rows(sizes: Sizes, weights: Weights, cache: Cache, table: np.ndarray) -> list[Row]:
    """The last token of every request decoded again and again: each step verifies the whole prefix and rewrites one record a request."""
    start = time.perf_counter()
    everyone = np.arange(1, sizes.batch + 1, dtype=np.int32)
    batch = extend_batch(table, everyone, sizes.context - 1, 1, sizes.shape.vocab)
    steps = Steps(cache, functools.partial(decode, sizes.shape), weights, batch)
    _compile(steps, steps.kinds)
    _check_entries(steps, sizes)
    times = wall_times({kind: steps.call(kind) for kind in steps.kinds}, rounds=sizes.rounds, steps=sizes.steps)
    work = f"decode step, batch {sizes.batch}, context {sizes.context}, {sizes.shape.layers} layers"
    found = [_slowdown(_named(work, kind), times, kind, 1 + _SLOWDOWN[kind]) for kind in cache.canaries]
    for kind, (_, added_us, without_us) in _device_costs(steps, repeats=3).items():
        name = _named("device time of the canary in that decode step", kind)
        found.append(compare(name, _MODE, added_us, "step without canary", without_us, _SLOWDOWN[kind]))
    cache.check()
    _say("decode", start)
    return found


def _prefill_rows(sizes: Sizes, weights: Weights, cache: Cache) -> list[Row]:
    """One request of many tokens and nothing in the cache; it takes slots over from the requests of the decode steps."""
    start = time.perf_counter()
    table = np.zeros((2, sizes.prefill), np.int32)
    table[1] = 1 + np.random.default_rng(2).permutation(sizes.prefill)
    batch = extend_batch(table, np.ones(1, np.int32), 0, sizes.prefill, sizes.shape.vocab)
    error = cudnn_attention_error(sizes.shape, sizes.prefill)
    if error is not None:
        print(f"The prefill's attention is plain jnp in chunks, since cuDNN's does not compile here: {str(error)[:200]}")
    forward = functools.partial(prefill, sizes.shape, cudnn=error is None)
    steps = Steps(cache, forward, weights, batch)
    kinds = (OFF, ON)
    _compile(steps, kinds)
    times = wall_times({kind: steps.call(kind) for kind in kinds}, rounds=sizes.prefill_rounds, steps=sizes.prefill_steps)
    cache.check()
    _say("prefill", start)
    work = f"prefill of {sizes.prefill} tokens, {sizes.shape.layers} layers, attention by {'cuDNN' if error is None else 'jnp'}"
    return [_slowdown(work, times, ON, 1 + _PREFILL_SLOWDOWN)]


def _memory_rows(sizes: Sizes) -> list[Row]:
    """What a prefill's canary adds to the memory of a forward without temporaries, among which XLA would pack its own.

    The plan and all that is donated are left out. The report, and what the halves of a step hand on to each other, count.
    """
    start = time.perf_counter()
    shape = sizes.shape
    pool = random_pool(sizes.prefill + 1, 1, shape.kv_heads, shape.head_dim)
    cache = Cache(pool, {ON: kvc.CanaryConfig("log")}, kvc.CanaryLaunchCapacities(sizes.batch * sizes.context, sizes.batch))
    table = np.zeros((2, sizes.prefill), np.int32)
    table[1] = 1 + np.arange(sizes.prefill)
    batch = extend_batch(table, np.ones(1, np.int32), 0, sizes.prefill, shape.vocab)
    steps = Steps(cache, _fill_with_kv, *_random_kv(shape, sizes.prefill), batch)
    for kind in steps.kinds:  # the programs that are asked for their memory are sound
        jax.block_until_ready(steps.step(kind))
    cache.check()
    without, with_it, plan = steps.memory(OFF), steps.memory(ON), steps.plan_bytes()
    parts = {
        "temporaries without it": without.temporary,
        "with it": with_it.temporary,
        "of these the plan": plan,
        "results without it": without.results,
        "with it, the report among them": with_it.results,
    }
    print("memory of a step that stores KV, KiB: " + ", ".join(f"{name} {size / 1024:.1f}" for name, size in parts.items()))
    extra = sum(with_it) - sum(without) - plan
    if extra < 0:
        raise RuntimeError(
            f"A step with a canary takes {-extra} bytes less than the step without one and the plan: its plan is not what is left out here."
        )
    _say("memory", start)
    work = f"memory beyond canary buffers and plan in a prefill of {sizes.prefill} tokens"
    return [allow(work, _MODE, extra / 1024, _EXTRA_KIB, "KiB")]


def _idle_rows(sizes: Sizes) -> list[Row]:
    """What the canary alone does when almost nothing is to be verified, beside a forward that only writes one token's KV."""
    start = time.perf_counter()
    shape = sizes.shape
    pool = random_pool(sizes.idle_slots + 1, 1, shape.kv_heads, shape.head_dim)
    cache = Cache(pool, {ON: kvc.CanaryConfig("log")}, kvc.CanaryLaunchCapacities(3 * sizes.idle_slots, 1))
    table = np.zeros((2, sizes.idle_context + 1), np.int32)
    table[1] = 1 + np.random.default_rng(3).permutation(sizes.idle_slots)[: sizes.idle_context + 1]
    only = np.ones(1, np.int32)
    cache.stamp(extend_batch(table, only, 0, sizes.idle_context, shape.vocab))
    batch = extend_batch(table, only, sizes.idle_context, 1, shape.vocab)
    steps = Steps(cache, _store_kv, *_random_kv(shape, 1), batch)
    work = f"idle decode step, batch 1, context {sizes.idle_context}, room for {3 * sizes.idle_slots} entries"
    costs = _device_costs(steps, repeats=20)
    if costs:
        kernels, added_us, _ = costs[ON]
        found = [
            allow(f"{work}: kernels of the canary", _MODE, kernels, _IDLE_KERNELS, "kernels"),
            allow(f"{work}: device time of the canary", _MODE, added_us, _IDLE_US),
        ]
    else:
        times = wall_times({kind: steps.call(kind) for kind in steps.kinds}, rounds=sizes.rounds, steps=sizes.steps)
        found = [_slowdown(f"{work} (wall time, no device profile)", times, ON, None)]
    cache.check()
    _say("idle", start)
    return found


def _random_kv(shape: Shape, tokens: int) -> list[jax.Array]:
    """K and V of one layer, [tokens, kv_heads, head_dim] each."""
    size = (tokens, shape.kv_heads, shape.head_dim)
    return [jax.random.normal(key, size, jnp.bfloat16) for key in jax.random.split(jax.random.key(2))]


def _store_kv(
    k: jax.Array, v: jax.Array, batch: kvc.ForwardBatch, pool: kvc.pools.MHATokenToKVPool
) -> tuple[jax.Array, kvc.pools.MHATokenToKVPool]:
    """A forward that only stores its tokens' KV, which it is given."""
    return batch.input_ids[:1], pool.write(0, batch.out_cache_loc, k, v)


def _fill_with_kv(
    k: jax.Array, v: jax.Array, batch: kvc.ForwardBatch, pool: kvc.pools.MHATokenToKVPool
) -> tuple[jax.Array, kvc.pools.MHATokenToKVPool]:
    """The same for tokens in all slots from 1 on, in order: no scatter, which takes memory of its own on some platforms."""
    filled = ((jax.lax.dynamic_update_slice(buffer, values, (1, 0, 0)),) for (buffer,), values in ((pool.k_buffer, k), (pool.v_buffer, v)))
    return batch.input_ids[:1], kvc.pools.MHATokenToKVPool(*filled)


def _compile(steps: Steps, kinds: Sequence[str]) -> None:
    start = time.perf_counter()
    for kind in kinds:
        steps.program(kind)
    _say(f"compiled {len(kinds)} programs", start)


def _check_entries(steps: Steps, sizes: Sizes) -> None:
    """Raise a RuntimeError unless a step of the default canary verifies and writes as many records as it should."""
    before = steps.cache.slots_seen(ON)
    steps.step(ON)
    seen = (steps.cache.slots_seen(ON) - before)[list(_ENDPOINTS)]
    expected = sizes.batch * (sizes.context - 1) + sizes.batch
    if (seen != expected).any():
        raise RuntimeError(
            f"A decode step saw {seen.tolist()} records at the endpoints of the canary, but it should see {expected} at each."
        )
    print(f"each decode step verifies {expected - sizes.batch} records and writes {sizes.batch} at each of {len(_ENDPOINTS)} endpoints")


def _device_costs(steps: Steps, *, repeats: int) -> dict[str, tuple[int, float, float]]:
    """What each canary runs on the device beyond the step without one, printed.

    Returns:
        By kind of canary the kernels, their device time and that of the step without a canary in microseconds; nothing, after a line that
        says why, where jax's profiler has no device times.
    """
    try:
        operations = {kind: device_operations(steps.call(kind), repeats=repeats) for kind in steps.kinds}
    except DeviceTimeError as error:
        print(f"Wall times only. {error}")
        return {}
    costs = {}
    for kind in steps.cache.canaries:
        found = difference(operations[OFF], operations[kind])
        print(difference_text(f"canary {kind}", found))
        costs[kind] = (found.kernels, found.us, total_us(operations[OFF]))
    return costs


def _named(work: str, kind: str) -> str:
    return work if kind == ON else f"{work}, {kind}"


def _slowdown(work: str, times: WallTimes, kind: str, limit: float | None) -> Row:
    ratio, spread = times.ratio(kind, OFF)
    return Row(work, _MODE, times.median(kind), "step without canary", times.median(OFF), ratio, limit, spread=spread)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="sizes for trying it on a CPU; other sizes given go before them")
    parser.add_argument("--only", nargs="+", choices=_SECTIONS, default=_SECTIONS)
    names = {kind: [size.name for size in dataclasses.fields(kind) if size.name != "shape"] for kind in (Shape, Sizes)}
    for name in (*names[Shape], *names[Sizes]):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    sizes = TINY if given["tiny"] else Sizes()
    shape, rest = ({name: given[name] for name in names[kind] if name in given} for kind in (Shape, Sizes))
    sizes = dataclasses.replace(sizes, shape=dataclasses.replace(sizes.shape, **shape), **rest)
    print(text(rows(sizes, given["only"])))


if __name__ == "__main__":
    main()
