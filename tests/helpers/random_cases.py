"""Random arguments of the three operations, legal and not, in a few odd shapes so that compiled programs are reused.

Everything is drawn from one NumPy generator. ``wildness`` is the share of values that a sane engine would not produce.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from helpers.states import fields, fresh_buffer, fresh_state, with_log
from jax_kvcanary import reference
from jax_kvcanary.constants import CanaryLaunchTag, RealKvHashMode
from jax_kvcanary.plan import PlanInput, VerifyPlan, WritePlan
from jax_kvcanary.sources import RealKvSource

Rng = np.random.Generator

INT32_MAX = 2**31 - 1
#: Values at the ends of int32, and around 0.
EDGES = (-1, -2, -(2**31), INT32_MAX, INT32_MAX - 1, 0)
#: Values that int32 does not hold.
WIDE = (2**31, 2**32, 2**32 + 1, -(2**31) - 1, -(2**32), -(2**32) + 2, 2**63 - 1, -(2**63))


def sprinkle(rng: Rng, values: Any, wildness: float, wild: Sequence[int]) -> np.ndarray:
    """The values as int64, a share of them replaced by wild ones."""
    values = np.array(values, np.int64)
    return np.where(rng.random(values.shape) < wildness, rng.choice(np.array(wild, np.int64), values.shape), values)


# Plans.


@dataclass(frozen=True)
class PlanShape:
    """Shapes and static values of a plan: all that a compiled plan depends on."""

    rows: int
    table: tuple[int, int]
    verify_capacity: int
    write_req_capacity: int | None = None
    window: int = 0
    lut_len: int | None = None
    expected: tuple[int, int] | None = None
    offset: int = 0
    stride: int = 1


PLAN_SHAPES = (
    PlanShape(rows=5, table=(7, 11), verify_capacity=29),
    PlanShape(rows=3, table=(5, 13), verify_capacity=23, write_req_capacity=7, window=4, lut_len=31, expected=(5, 13), offset=1),
    PlanShape(rows=1, table=(2, 17), verify_capacity=17, lut_len=19, expected=(3, 5), offset=-1),
    PlanShape(rows=0, table=(3, 5), verify_capacity=11, write_req_capacity=2, expected=(3, 5)),
    PlanShape(rows=13, table=(3, 7), verify_capacity=53, window=11, expected=(2, 11), offset=2),
    PlanShape(rows=2, table=(3, 1), verify_capacity=1, lut_len=0, window=1),
    PlanShape(rows=7, table=(5, 17), verify_capacity=31, expected=(4, 13), offset=1, stride=3),
    PlanShape(rows=3, table=(5, 13), verify_capacity=17, write_req_capacity=5, window=5, lut_len=31, stride=2),
    PlanShape(rows=2, table=(3, 11), verify_capacity=7, stride=INT32_MAX),
)


def random_plan(rng: Rng, shape: PlanShape, wildness: float, *, wide: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of ``plan``; int64 arrays, which fit int32 unless ``wide``."""
    max_reqs, max_seq_len = shape.table
    edges = EDGES + (WIDE if wide else ())
    num_slots = 31

    def ints(low: int, high: int, size: Any, wild: Sequence[int] = ()) -> np.ndarray:
        return sprinkle(rng, rng.integers(low, high + 1, size), wildness, [*edges, *wild])

    inputs = PlanInput(
        req_pool_indices=ints(0, max_reqs - 1, shape.rows, [max_reqs]),
        prefix_lens=ints(0, max_seq_len if rng.random() < 0.5 else max_seq_len // 3, shape.rows, [max_seq_len, max_seq_len + 1]),
        extend_seq_lens=ints(0, 4, shape.rows),
        expected_tokens_valid_lens=None if shape.expected is None else ints(0, shape.expected[1] + 2, shape.rows),
    )
    keywords = {
        "verify_capacity": shape.verify_capacity,
        "write_req_capacity": shape.write_req_capacity,
        "swa_window_size": shape.window,
        "kv_token_id_vs_position_offset": shape.offset,
        "full_to_swa_index_mapping": None if shape.lut_len is None else ints(0, 16, shape.lut_len),
        "expected_tokens": None if shape.expected is None else ints(0, 9999, shape.expected),
        "verify_stride": shape.stride,
        "verify_phase": None if shape.stride == 1 else sprinkle(rng, rng.integers(-9, 10, 1), max(wildness, 0.3), edges),
    }
    table = ints(1, num_slots - 1, shape.table, [num_slots, -1])
    return (inputs, table), keywords


# Sources.


def _words(rng: Rng, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array of any bits: among floats, of every kind of NaN."""
    dtype = np.dtype(dtype)
    raw = rng.integers(0, 256, int(np.prod(shape)) * dtype.itemsize, np.uint8)
    return raw.view(dtype).reshape(shape)


def _bytes(rng: Rng, n: int) -> RealKvSource:
    return RealKvSource(array=_words(rng, (n, 40), np.uint8), num_bytes_per_token=40, read_bytes=24)


def _padded_rows(rng: Rng, n: int) -> RealKvSource:
    return RealKvSource(array=_words(rng, (n, 72), np.uint8), num_bytes_per_token=8, read_bytes=8, byte_offset=16)


def _paged_float32(rng: Rng, n: int) -> RealKvSource:
    """[pages, 5, 6]: the usual paged pool."""
    return RealKvSource(array=_words(rng, (-(-n // 5), 5, 6), np.float32), page_size=5, num_bytes_per_token=24, read_bytes=16)


def _interleaved_bfloat16(rng: Rng, n: int) -> RealKvSource:
    """[slots, K or V, 12]: V is the second half of each row."""
    return RealKvSource(array=_words(rng, (n, 2, 12), jnp.bfloat16), num_bytes_per_token=24, read_bytes=24, byte_offset=24)


def _stacked_int64(rng: Rng, n: int) -> RealKvSource:
    """[layers, slots, 3]: the second of three layers."""
    return RealKvSource(
        array=_words(rng, (3, n, 3), np.int64), num_bytes_per_token=24, read_bytes=8, byte_offset=24 * n, row_stride_bytes=24
    )


def _rank5_float16(rng: Rng, n: int) -> RealKvSource:
    """[pages, K or V, 3, 2, 4]: V of each page lies behind its K."""
    return RealKvSource(
        array=_words(rng, (-(-n // 3), 2, 3, 2, 4), np.float16), page_size=3, num_bytes_per_token=16, read_bytes=16, byte_offset=48
    )


def _flat(rng: Rng, n: int) -> RealKvSource:
    """One axis, gaps between pages and between slots, and no byte behind the last slot's."""
    page, slot = divmod(n - 1, 3)
    size = 8 + page * 88 + slot * 24 + 16
    return RealKvSource(
        array=_words(rng, (size,), np.uint8),
        page_size=3,
        num_bytes_per_token=16,
        read_bytes=16,
        byte_offset=8,
        row_stride_bytes=88,
        token_stride_bytes=24,
    )


SourceMaker = Callable[[Rng, int], RealKvSource]

#: Sources of one endpoint, and the mode that reads them.
SOURCES: tuple[tuple[tuple[SourceMaker, ...], RealKvHashMode], ...] = (
    ((), RealKvHashMode.NONE),
    ((), RealKvHashMode.ALL),
    ((_bytes,), RealKvHashMode.NONE),
    ((_bytes,), RealKvHashMode.PARTIAL),
    ((_paged_float32,), RealKvHashMode.ALL),
    ((_interleaved_bfloat16, _stacked_int64), RealKvHashMode.ALL),
    ((_rank5_float16, _flat, _padded_rows), RealKvHashMode.PARTIAL),
    ((_flat, _bytes, _interleaved_bfloat16, _rank5_float16), RealKvHashMode.ALL),
)


# Launches.


@dataclass(frozen=True)
class LaunchShape:
    """Shapes and static values of a launch."""

    num_slots: int
    entries: int  # verify entries, or tokens
    rows: int
    ring_capacity: int
    sources: int  # index in SOURCES
    tag: CanaryLaunchTag = CanaryLaunchTag.TAIL_K_FULL
    check: bool = False  # expected tokens in a verify, expected inputs in a write


LAUNCH_SHAPES = (
    LaunchShape(num_slots=31, entries=29, rows=5, ring_capacity=101, sources=0, check=True),
    LaunchShape(num_slots=31, entries=29, rows=5, ring_capacity=101, sources=7, check=True),
    LaunchShape(num_slots=53, entries=37, rows=7, ring_capacity=7, sources=5, tag=CanaryLaunchTag.SWEEP_V_SWA),
    LaunchShape(num_slots=53, entries=37, rows=7, ring_capacity=101, sources=6, check=True, tag=CanaryLaunchTag.TAIL_V_FULL),
    LaunchShape(num_slots=23, entries=17, rows=3, ring_capacity=101, sources=4, tag=CanaryLaunchTag.TAIL_K_SWA),
    LaunchShape(num_slots=23, entries=17, rows=3, ring_capacity=3, sources=3, check=True),
    LaunchShape(num_slots=131, entries=101, rows=2, ring_capacity=401, sources=0, check=True),  # rows longer than a warp
    LaunchShape(num_slots=5, entries=11, rows=2, ring_capacity=101, sources=2, tag=CanaryLaunchTag.HEAD_K_FULL),
    LaunchShape(num_slots=1, entries=3, rows=1, ring_capacity=101, sources=1),
    LaunchShape(num_slots=5, entries=0, rows=0, ring_capacity=101, sources=0),
    LaunchShape(num_slots=5, entries=0, rows=2, ring_capacity=101, sources=3),
)


@dataclass(frozen=True)
class World:
    """A buffer full of chains with the sources that it fingerprints; ``chains`` has the slots of each."""

    canary_buf: np.ndarray
    sources: tuple[RealKvSource, ...]
    mode: RealKvHashMode
    chains: list[list[int]]
    state: Any


def random_world(rng: Rng, shape: LaunchShape) -> World:
    """Sound chains in some of the slots, fresh records in the others, and a log that earlier launches have begun."""
    makers, mode = SOURCES[shape.sources]
    sources = tuple(make(rng, shape.num_slots) for make in makers)
    slots = rng.permutation(np.arange(1, shape.num_slots))
    used = slots[: rng.integers(0, len(slots) + 1)]
    cuts = np.sort(rng.integers(0, len(used) + 1, 3))
    offsets = np.array([0, *cuts, len(used)], np.int32)
    positions = np.concatenate([np.arange(length) for length in np.diff(offsets)])
    buf, _ = reference.write_step(
        fresh_buffer(shape.num_slots),
        WritePlan(offsets, np.full(4, -1, np.int32), np.array([4], np.int32)),
        rng.integers(0, 50, len(used)),
        positions,
        used,
        fresh_state(1),
        tag=shape.tag,
        real_kv_sources=sources,
        real_kv_hash_mode=mode,
    )
    fields(buf)[0] = rng.integers(-(2**63), 2**63 - 1, 4)
    chains = [chain.tolist() for chain in np.split(used, cuts) if len(chain)]

    earlier = int(rng.integers(0, 3))
    rows = rng.integers(-(2**63), 2**63 - 1, (min(earlier, shape.ring_capacity), 8))
    state = with_log(fresh_state(shape.ring_capacity, chain_assert=int(rng.integers(0, 2))), rows, earlier)
    return World(buf, sources, mode, chains, state)


def corrupt(rng: Rng, world: World, wildness: float) -> World:
    """The world with bits flipped in some records, some made fresh, and bytes changed in the sources."""
    records = fields(world.canary_buf).copy()
    for slot in np.flatnonzero(rng.random(len(records)) < wildness):
        if rng.random() < 0.2:
            records[slot] = -1
        else:
            records[slot, rng.integers(4)] ^= np.int64(1) << np.int64(rng.integers(63))
    sources = []
    for source in world.sources:
        flat = source.array.copy().reshape(-1).view(np.uint8)
        flat[rng.random(len(flat)) < wildness / 50] ^= 0x40
        sources.append(dataclasses.replace(source, array=flat.view(source.array.dtype).reshape(source.array.shape)))
    return dataclasses.replace(world, canary_buf=records.view(np.uint8), sources=tuple(sources))


def random_verify(rng: Rng, shape: LaunchShape, wildness: float) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of ``verify_step``, NumPy arrays."""
    world = random_world(rng, shape)
    tokens = fields(world.canary_buf)[:, 0]
    entries = [(slot, int(tokens[slot]), p, chain[p - 1] if p else -1) for chain in world.chains for p, slot in enumerate(chain)]
    chosen = [entries[i] for i in rng.integers(0, len(entries), shape.entries)] if entries else [(0, -1, 0, -1)] * shape.entries
    columns = np.array(chosen, np.int64).reshape(-1, 4)
    world = corrupt(rng, world, wildness)
    slots, expected, positions, prevs = (
        sprinkle(rng, column, wildness, [*EDGES, shape.num_slots, shape.num_slots - 1, 1]).astype(np.int32) for column in columns.T
    )
    num_valid = sprinkle(rng, [rng.integers(0, shape.entries + 1) if rng.random() < 0.3 else shape.entries], wildness, EDGES)
    enable = rng.choice([1, 1, 1, 1, 7, 0], 1)
    plan = VerifyPlan(slots, expected, positions, prevs, num_valid.astype(np.int32), enable.astype(np.int32))
    return (world.canary_buf, plan, world.state), _launch_keywords(shape, world) | {"check_expected_token": shape.check}


def random_write(rng: Rng, shape: LaunchShape, wildness: float, *, wide: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of ``write_step``; the integers are int64, which fit int32 unless ``wide``.

    Some rows are trees. Rows share no entries then: who wrote the end of a shared one would be open.
    """
    world = random_world(rng, shape)
    edges = EDGES + (WIDE if wide else ())
    live = int(rng.integers(0, shape.entries + 1)) if rng.random() < 0.5 else shape.entries
    offsets = np.array([0, *np.sort(rng.integers(0, live + 1, max(shape.rows - 1, 0))), live][: shape.rows + 1])
    tree = rng.random() < 0.4
    seeds, positions, parents = [], np.zeros(shape.entries, np.int64), np.full(shape.entries, -1, np.int64)
    for start, end in itertools.pairwise(offsets):
        chain = world.chains[rng.integers(len(world.chains))] if world.chains and rng.random() < 0.7 else []
        cut = int(rng.integers(0, len(chain) + 1))
        seeds.append(chain[cut - 1] if cut else -1)
        positions[start:end] = np.arange(cut, cut + end - start)
        for i in range(start, end) if tree else ():
            parents[i] = rng.integers(max(start, i - 40), i) if i > start and rng.random() < 0.9 else -1
            positions[i] = cut if parents[i] < 0 else positions[parents[i]] + 1
    slots = rng.integers(0, shape.num_slots, shape.entries)  # some twice
    if rng.random() < 0.5:
        slots = np.resize(rng.permutation(shape.num_slots), shape.entries)
    tokens = rng.integers(0, 50, shape.entries)
    optional = {}
    if shape.check:
        optional = {
            "expected_input_tokens": sprinkle(rng, tokens, wildness, edges),
            "expected_input_positions": sprinkle(rng, positions, wildness, edges),
        }
    if tree:
        optional["parents"] = sprinkle(rng, parents, wildness, [*edges, *range(0, shape.entries, 7), shape.entries])
    world = corrupt(rng, world, wildness)
    plan = WritePlan(
        sprinkle(rng, offsets, 0 if tree else wildness / 4, [*EDGES, shape.entries + 1, shape.entries]).astype(np.int32),
        sprinkle(rng, seeds, wildness, [*EDGES, shape.num_slots, shape.num_slots - 1]).astype(np.int32),
        sprinkle(rng, [shape.rows], wildness, EDGES).astype(np.int32),
    )
    arguments = (
        world.canary_buf,
        plan,
        sprinkle(rng, tokens, wildness, edges),
        sprinkle(rng, positions, wildness, edges),
        sprinkle(rng, slots, wildness, [*edges, shape.num_slots, shape.num_slots + 1]),
        world.state,
    )
    return arguments, _launch_keywords(shape, world) | optional


def _launch_keywords(shape: LaunchShape, world: World) -> dict[str, Any]:
    return {"tag": shape.tag, "real_kv_sources": world.sources, "real_kv_hash_mode": world.mode}
