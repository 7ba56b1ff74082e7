"""Attention of a decode step through the table of slots: a Pallas kernel on Triton, and the same in plain jnp.

    python tests/benchmarks/paged_attention.py [--check]

Prints the kernel's largest error against plain jnp, and on a GPU the speed at which it reads the cache. ``--check`` runs the kernel in
Pallas's interpreter at a small size, which needs no GPU.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

_MIN_DOT_ROWS = 16  # of Triton's matrix product; the query heads of one KV head are padded to as many
_LOG2_E = 1.4426950408889634
_NEVER = -1e30  # a score that no softmax sees; unlike -inf it stays finite when it is subtracted from itself


@dataclass(frozen=True)
class Tiles:
    """How the kernel spreads its work.

    Fields:
        block: positions that a program reads at once, a power of two.
        splits: parts that the context of a request is cut into, each with a program of its own.
        warps: of a program.
        stages: blocks in flight.
    """

    block: int = 64
    splits: int = 4
    warps: int = 4
    stages: int = 3


def paged_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array, requests: jax.Array, lengths: jax.Array, *, tiles: Tiles | None = None
) -> jax.Array:
    """Attention of one token a request over the request's tokens in the cache, on the platform that the program is compiled for.

    Args:
        q: [bs, heads, head_dim].
        k: [slots, kv_heads, head_dim]; one layer of a pool without pages; head_dim is a power of two.
        v: as ``k``.
        table: int32 [max_reqs, max_seq_len]; slot of each position, in range up to each request's length.
        requests: int32 [bs]; rows of the table.
        lengths: int32 [bs]; tokens in the cache, at least 1 each.
        tiles: see :class:`Tiles`.

    Returns:
        [bs, heads, head_dim], in the type of ``q``.
    """
    tiles = tiles or Tiles()
    on_gpu = functools.partial(paged_attention_triton, tiles=tiles)
    return jax.lax.platform_dependent(q, k, v, table, requests, lengths, cpu=paged_attention_jnp, cuda=on_gpu)


def paged_attention_jnp(q: jax.Array, k: jax.Array, v: jax.Array, table: jax.Array, requests: jax.Array, lengths: jax.Array) -> jax.Array:
    """:func:`paged_attention` with every request's keys and values gathered, for small sizes."""
    bs, heads, head_dim = q.shape
    slots = table[requests]
    visible = jnp.arange(table.shape[1]) < lengths[:, None]
    slots = jnp.where(visible, slots, 0)
    grouped = q.reshape(bs, k.shape[1], -1, head_dim).astype(jnp.float32) * head_dim**-0.5
    scores = jnp.einsum("bkgd,bckd->bkgc", grouped, k[slots].astype(jnp.float32))
    weights = jax.nn.softmax(jnp.where(visible[:, None, None, :], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bkgc,bckd->bkgd", weights, v[slots].astype(jnp.float32)).reshape(bs, heads, head_dim).astype(q.dtype)


def paged_attention_triton(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    table: jax.Array,
    requests: jax.Array,
    lengths: jax.Array,
    *,
    tiles: Tiles,
    interpret: bool = False,
) -> jax.Array:
    """:func:`paged_attention` with one program for each KV head, part of the context, and request; the parts are merged in jnp."""
    bs, heads, head_dim = q.shape
    kv_heads, splits = k.shape[1], tiles.splits
    group = heads // kv_heads
    # Neighbouring programs are the KV heads of one token: together they read whole rows of the pool.
    grid = (kv_heads, splits, bs)
    parts, weights = pl.pallas_call(
        functools.partial(_attention_kernel, group=group, tiles=tiles, max_seq_len=table.shape[1]),
        out_shape=(
            jax.ShapeDtypeStruct((bs, kv_heads, splits, group, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((bs, kv_heads, splits, group), jnp.float32),
        ),
        grid=grid,
        compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="benchmark_paged_attention",
    )(q, k, v, table, requests, lengths)
    weights = jnp.exp2(weights - weights.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    return jnp.einsum("bksg,bksgd->bkgd", weights, parts).reshape(bs, heads, head_dim).astype(q.dtype)


def _attention_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    table_ref: Any,
    requests_ref: Any,
    lengths_ref: Any,
    parts_ref: Any,
    weights_ref: Any,
    *,
    group: int,
    tiles: Tiles,
    max_seq_len: int,
) -> None:
    """Softmax over one part of one request's context, for the query heads of one KV head; and the logarithm of its weight, base 2."""
    kv_head, split, row = (pl.program_id(axis) for axis in range(3))
    head_dim = q_ref.shape[-1]
    lanes = max(pl.next_power_of_2(group), _MIN_DOT_ROWS)
    block = tiles.block
    length, request = lengths_ref[row], requests_ref[row]
    part = pl.cdiv(pl.cdiv(max_seq_len, tiles.splits), block) * block
    first = split * part
    end = jnp.minimum(first + part, length)

    lane = jnp.arange(lanes, dtype=jnp.int32)
    element = jnp.arange(head_dim, dtype=jnp.int32)
    is_head = lane < group
    at_query = (row, (kv_head * group + lane)[:, None], element[None, :])
    q = plgpu.load(q_ref.at[at_query], mask=jnp.broadcast_to(is_head[:, None], (lanes, head_dim)), other=0.0)

    def step(index: Any, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        best, total, out = carry
        position = first + index * block + jnp.arange(block, dtype=jnp.int32)
        live = position < end
        slot = plgpu.load(table_ref.at[request, position], mask=live, other=0)
        rows = (slot[:, None], kv_head, element[None, :])
        masked = jnp.broadcast_to(live[:, None], (block, head_dim))
        keys = plgpu.load(k_ref.at[rows], mask=masked, other=0.0)
        values = plgpu.load(v_ref.at[rows], mask=masked, other=0.0)
        scores = _dot(q, keys, contracted=1) * (head_dim**-0.5 * _LOG2_E)
        scores = jnp.where(live[None, :], scores, _NEVER)
        new_best = jnp.maximum(best, scores.max(axis=1))
        rescale = jnp.exp2(best - new_best)
        weights = jnp.exp2(scores - new_best[:, None])
        total = total * rescale + weights.sum(axis=1)
        out = out * rescale[:, None] + _dot(weights.astype(values.dtype), values, contracted=0)
        return new_best, total, out

    start = jnp.full((lanes,), _NEVER, jnp.float32), jnp.zeros((lanes,), jnp.float32), jnp.zeros((lanes, head_dim), jnp.float32)
    blocks = jnp.maximum(pl.cdiv(end - first, block), 0)
    best, total, out = jax.lax.fori_loop(0, blocks, step, start)
    nothing = total == 0.0  # a part behind the request's last token
    out = out / jnp.where(nothing, 1.0, total)[:, None]
    weight = jnp.where(nothing, _NEVER, best + jnp.log2(jnp.where(nothing, 1.0, total)))
    at_part = (row, kv_head, split, lane)
    plgpu.store(weights_ref.at[at_part], weight, mask=is_head)
    at_part = (row, kv_head, split, lane[:, None], element[None, :])
    plgpu.store(parts_ref.at[at_part], out, mask=jnp.broadcast_to(is_head[:, None], (lanes, head_dim)))


def _dot(a: jax.Array, b: jax.Array, *, contracted: int) -> jax.Array:
    """Matrix product in float32, with the rows or the columns of ``b`` summed over."""
    return jax.lax.dot_general(a, b, (((1,), (contracted,)), ((), ())), preferred_element_type=jnp.float32)


def main() -> None:
    """Check the kernel; measure it where there is a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="run a small size in Pallas's interpreter")
    interpret = parser.parse_args().check
    kv_heads, group, head_dim = (3, 4, 16) if interpret else (8, 4, 128)
    bs, context = (5, 331) if interpret else (256, 4096)
    slots = bs * context // 4
    keys = jax.random.split(jax.random.key(0), 5)
    q = jax.random.normal(keys[0], (bs, kv_heads * group, head_dim), jnp.bfloat16)
    k, v = (jax.random.normal(key, (slots, kv_heads, head_dim), jnp.bfloat16) for key in keys[1:3])
    table = jax.random.randint(keys[3], (bs + 1, context), 1, slots, jnp.int32)
    lengths = jax.random.randint(keys[4], (bs,), 1, context + 1, jnp.int32) if interpret else jnp.full((bs,), context, jnp.int32)
    lengths = lengths.at[0].set(1).at[1].set(context)
    operands = (q, k, v, table, jnp.arange(1, bs + 1, dtype=jnp.int32), lengths)
    some = 5  # rows that are compared: plain jnp gathers their keys and values
    want = paged_attention_jnp(q[:some], k, v, table, operands[4][:some], lengths[:some])
    for tiles in (Tiles(), Tiles(block=128), Tiles(splits=8), Tiles(splits=2), Tiles(warps=8), Tiles(stages=4), Tiles(stages=2)):
        attend = jax.jit(functools.partial(paged_attention_triton, tiles=tiles, interpret=interpret))
        try:
            got = attend(*operands)
        except Exception as failure:  # such as more shared memory than there is
            print(f"{tiles}: does not run, {str(failure)[:200]}")
            continue
        error = jnp.abs(got[:some].astype(jnp.float32) - want.astype(jnp.float32)).max()
        print(f"{tiles}: largest error {error:.4f}", end="" if not interpret else "\n")
        if interpret:
            continue
        times = []
        for _ in range(5):
            start = time.perf_counter()
            jax.block_until_ready([attend(*operands) for _ in range(10)])
            times.append((time.perf_counter() - start) / 10)
        num_bytes = 2 * bs * context * kv_heads * head_dim * k.dtype.itemsize
        print(f", {1e6 * statistics.median(times):.0f} us, {num_bytes / statistics.median(times) / 1e12:.2f} TB/s")


if __name__ == "__main__":
    main()
