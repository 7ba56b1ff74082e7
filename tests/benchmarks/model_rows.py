"""What a canary costs whole steps of a model: decode and prefill of a Llama, an idle decode step, and memory.

    python tests/benchmarks/model_rows.py [--tiny] [--only decode prefill idle] [--SIZE N ...]

The model has random weights and the shapes of a Llama of 8 billion parameters. Its KV at batch 256 and context 4096 would take 137 GB;
requests share prefixes as a prefix cache shares them, so that a quarter of the slots is enough. Attention reads, and the canary
verifies, as many tokens as without sharing. Attention's reads come from memory all the same, since a layer's KV is far larger than the
GPU's cache; the records of a buffer, 8 MB, fit into it, so that the canary finds three of four records there. ``--tiny`` tries
everything on a CPU, where the figures mean nothing.
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
from device_time import DeviceTimeError, Difference, device_operations, difference, print_operations, print_totals, total_us, wall_us
from llama import Shape, Weights, cudnn_attention_error, decode, prefill, random_weights
from steps import OFF, Cache, Steps, extend_batch, random_pool
from table import Row

import jax_kvcanary as kvc

ON, STRIDE = "on", "verify_stride=16"
_LIMITS = {ON: 1.010, STRIDE: 1.003}  # of a decode step, by the kind of canary
_PREFILL_LIMIT = 1.010
_IDLE_KERNELS, _IDLE_US = 6, 25
_EXTRA_KIB = 1024
_WITHOUT = "step without canary"
_SECTIONS = ("decode", "prefill", "idle")
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
        blocks: such blocks of each kind.
        prefill_steps: likewise for prefills.
        prefill_blocks: likewise.
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
    blocks: int = 7
    prefill_steps: int = 2
    prefill_blocks: int = 5


TINY = Sizes(
    shape=Shape(layers=3, width=48, heads=6, kv_heads=3, head_dim=16, ffn=80, vocab=211),
    batch=12,
    context=61,
    own=5,
    prefill=129,
    idle_slots=1009,
    idle_context=23,
    steps=3,
    blocks=3,
)


def rows(sizes: Sizes = Sizes(), only: Sequence[str] = _SECTIONS) -> list[Row]:
    """Measure everything, or the sections named; a RuntimeError if a canary reports anything."""
    found: list[Row] = []
    if "decode" in only or "prefill" in only:
        start = time.perf_counter()
        weights = random_weights(sizes.shape)
        cache, table = _shared_prefix_cache(sizes)
        _say("weights, pool and records", start)
        if "decode" in only:
            found += _decode_rows(sizes, weights, cache, table)
        if "prefill" in only:
            found += _prefill_rows(sizes, weights, cache)
        del weights, cache
    if "idle" in only:
        found += _idle_rows(sizes)
    return found


def _say(what: str, start: float) -> None:
    print(f"[{time.perf_counter() - start:6.1f} s] {what}", flush=True)


def _configs() -> dict[str, kvc.CanaryConfig]:
    """The canaries of a decode step: default, and one that verifies a part of the records in each step."""
    configs = {ON: kvc.CanaryConfig("log")}
    if "verify_stride" in {setting.name for setting in dataclasses.fields(kvc.CanaryConfig)}:
        strided: dict[str, int] = {"verify_stride": 16}
        configs[STRIDE] = kvc.CanaryConfig("log", **strided)
    else:
        print("`CanaryConfig` has no `verify_stride`: the rows with it are left out.")
    return configs


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
    _compile(steps, steps.kinds, "decode")
    _check_entries(steps, sizes)
    times = wall_us({kind: steps.call(kind) for kind in steps.kinds}, blocks=sizes.blocks, steps=sizes.steps)
    work = f"decode step, batch {sizes.batch}, context {sizes.context}, {sizes.shape.layers} layers"
    found = [
        _compared(work if kind == ON else f"{work}, {kind}", times[kind], times[OFF], _LIMITS[kind]) for kind in steps.kinds if kind != OFF
    ]
    _say("decode", start)
    for kind in cache.canaries:
        try:
            added, total = _device_difference(steps, kind, repeats=3)
        except DeviceTimeError as error:
            print(f"Wall times only. {error}")
            break
        name = "device time of the canary in that step" + ("" if kind == ON else f", {kind}")
        found.append(Row(name, "PARTIAL", added.us, "device time of the step", total, added.us / total, None))
    cache.check()
    _say("decode, profiled", start)
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
    _compile(steps, kinds, "prefill")
    times = wall_us({kind: steps.call(kind) for kind in kinds}, blocks=sizes.prefill_blocks, steps=sizes.prefill_steps)
    cache.check()
    _say("prefill", start)
    work = f"prefill of {sizes.prefill} tokens, {sizes.shape.layers} layers, attention by {'cuDNN' if error is None else 'jnp'}"
    kib = steps.extra_bytes(ON) / 1024
    return [
        _compared(work, times[ON], times[OFF], _PREFILL_LIMIT),
        _allowed("memory beyond canary buffers and plan in that prefill (KiB)", kib, f"{_EXTRA_KIB} KiB allowed", _EXTRA_KIB),
    ]


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

    def forward(batch: kvc.ForwardBatch, pool: kvc.pools.MHATokenToKVPool) -> tuple[jax.Array, kvc.pools.MHATokenToKVPool]:
        kv = jnp.broadcast_to(batch.input_ids[:, None, None], (1, shape.kv_heads, shape.head_dim)).astype(jnp.bfloat16)
        return batch.input_ids, pool.write(0, batch.out_cache_loc, kv, kv)

    steps = Steps(cache, forward, extend_batch(table, only, sizes.idle_context, 1, shape.vocab))
    work = f"idle decode step, batch 1, context {sizes.idle_context}, room for {3 * sizes.idle_slots} entries"
    try:
        added, _ = _device_difference(steps, ON, repeats=20)
    except DeviceTimeError as error:
        print(f"Wall times only. {error}")
        times = wall_us({kind: steps.call(kind) for kind in steps.kinds}, blocks=sizes.blocks, steps=sizes.steps)
        found = [_compared(f"{work} (wall time, no device profile)", times[ON], times[OFF], None)]
    else:
        found = [
            _allowed(f"{work}: kernels of the canary (a count)", added.kernels, f"{_IDLE_KERNELS} kernels allowed", _IDLE_KERNELS),
            _allowed(f"{work}: device time of the canary", added.us, f"{_IDLE_US} us allowed", _IDLE_US),
        ]
    cache.check()
    _say("idle", start)
    return found


def _compile(steps: Steps, kinds: Sequence[str], name: str) -> None:
    for kind in kinds:
        start = time.perf_counter()
        steps.program(kind)
        _say(f"compiled {name}, canary {kind}", start)


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


def _device_difference(steps: Steps, kind: str, *, repeats: int) -> tuple[Difference, float]:
    """What a kind of step runs beyond the step without a canary, printed; and the device time of all of it in microseconds."""
    off, on = (device_operations(steps.call(k), repeats=repeats) for k in (OFF, kind))
    found = difference(off, on)
    print_totals("step without canary", off)
    print_totals(f"step with canary, {kind}", on)
    print_operations("only with the canary", found.added)
    print_operations("only without it", found.removed)
    return found, total_us(on)


def _compared(work: str, measured: float, without: float, limit: float | None) -> Row:
    return Row(work, "PARTIAL", measured, _WITHOUT, without, measured / without, limit)


def _allowed(work: str, measured: float, reference: str, allowed: float) -> Row:
    """A figure beside the largest one that is all right; not always a time, then ``work`` says what it is."""
    return Row(work, "PARTIAL", measured, reference, allowed, measured / allowed, 1.0)


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
    for row in rows(sizes, given["only"]):
        print(row)


if __name__ == "__main__":
    main()
