"""Drivers of the plan: two Triton kernels on CUDA, two jnp passes on the CPU, one set of formulas.

The offsets pass is one program: prefix sums over the batch, and every row's seed. The entries pass gives each
verify entry a thread, which finds its row by binary search.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jax_kvcanary._results import varying_zero
from jax_kvcanary.pallas._driver import int32_results, load_ref
from jax_kvcanary.pallas.formulas import (
    MAX_ROW_BLOCK,
    EntryOutputs,
    PlanArrays,
    PlanStatics,
    RowOutputs,
    RowSums,
    gather,
    plan_entries,
    plan_rows,
)


@dataclass(frozen=True)
class TileSizes:
    """Tile sizes of the Triton kernels: threads of a block are 32 times its warps."""

    entries: int = 512
    entries_warps: int = 8
    rows_per_warp: int = 128
    max_rows_warps: int = 8


TILES = TileSizes()


class PlanResults(NamedTuple):
    """Arrays of a finished plan, int32; see the contract's table of plan outputs for their meaning."""

    verify_slot_indices: jax.Array
    verify_expected_positions: jax.Array
    verify_prev_slot_indices: jax.Array
    verify_expected_tokens: jax.Array
    verify_num_valid: jax.Array
    enable: jax.Array
    row_offsets: jax.Array
    write_offsets: jax.Array
    write_seed_slot_indices: jax.Array
    write_num_valid_reqs: jax.Array
    num_invalid_rows: jax.Array


@functools.partial(jax.jit, static_argnames="statics")
def plan_arrays(arrays: PlanArrays, statics: PlanStatics) -> PlanResults:
    """Compute a plan on the platform that the surrounding program is compiled for.

    Args:
        arrays: int32 arrays, checked by the caller; tables must not be empty (pass a dummy, and size 0 in ``statics``).
        statics: sizes and switches.

    Returns:
        The plan's arrays. Entries past ``verify_num_valid`` are unspecified, and all of them where ``enable`` is 0.
    """
    present = _present(arrays)

    def on(driver: Any) -> Any:
        return lambda *values: driver(_named(present, values), statics)

    return jax.lax.platform_dependent(*_operands(arrays), cpu=on(_plan_jnp), cuda=on(_plan_triton))


def _plan_jnp(arrays: PlanArrays, s: PlanStatics) -> PlanResults:
    """Both passes in jnp: gathers over whole vectors."""
    rows_out = s.write_req_capacity + 1
    block = min(max(rows_out, 1), MAX_ROW_BLOCK)
    blocks = pl.cdiv(rows_out, block)

    def step(before: RowSums, index: jax.Array) -> tuple[RowSums, RowOutputs]:
        out, after = plan_rows(gather, arrays, index * block + jnp.arange(block, dtype=jnp.int32), before, s)
        return after, out

    zero = varying_zero(_operands(arrays))  # results vary where the Triton kernels' do
    totals, out = jax.lax.scan(step, RowSums(zero, zero, zero), zero + jnp.arange(blocks, dtype=jnp.int32))
    verify_offsets, write_offsets, seeds = (part.reshape(-1) for part in out)
    num_valid, enable = _verify_extent(totals.verify, s)
    indices = zero + jnp.arange(s.verify_capacity, dtype=jnp.int32)
    entries = plan_entries(gather, arrays, verify_offsets, indices, num_valid * enable, s)
    in_batch = jnp.arange(rows_out) <= s.batch_size
    return _results(
        entries,
        RowOutputs(verify_offsets[: s.batch_size + 1], jnp.where(in_batch, write_offsets[:rows_out], 0), seeds[: s.write_req_capacity]),
        jnp.stack([num_valid, enable, totals.invalid]),
        s,
    )


def _plan_triton(arrays: PlanArrays, s: PlanStatics) -> PlanResults:
    """Both passes as Pallas kernels on Triton."""
    operands = _operands(arrays)
    rows_out = s.write_req_capacity + 1
    block = min(pl.next_power_of_2(rows_out), MAX_ROW_BLOCK)
    warps = min(pl.next_power_of_2(pl.cdiv(block, TILES.rows_per_warp)), TILES.max_rows_warps)
    verify_offsets, write_offsets, seeds, scalars = pl.pallas_call(
        functools.partial(_offsets_kernel, present=_present(arrays), statics=s, block=block),
        out_shape=int32_results(operands, (s.batch_size + 1,), (rows_out,), (max(s.write_req_capacity, 1),), (3,)),
        grid=(1,),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        name="kvcanary_plan_offsets",
    )(*operands)
    if s.verify_capacity:
        grid = (pl.cdiv(s.verify_capacity, TILES.entries),)
        entries = EntryOutputs(
            *pl.pallas_call(
                functools.partial(_entries_kernel, present=_present(arrays), statics=s, block=TILES.entries),
                out_shape=int32_results(operands, *((s.verify_capacity,),) * 4),
                grid=grid,
                compiler_params=plgpu.CompilerParams(num_warps=TILES.entries_warps, num_stages=1),
                name="kvcanary_plan_entries",
            )(verify_offsets, scalars, *operands)
        )
    else:
        entries = EntryOutputs(*(seeds[:0],) * 4)
    return _results(entries, RowOutputs(verify_offsets, write_offsets, seeds[: s.write_req_capacity]), scalars, s)


def _offsets_kernel(*refs: Any, present: tuple[str, ...], statics: PlanStatics, block: int) -> None:
    """One program: offsets, seeds and totals of all rows, a block of them at a time."""
    s = statics
    arrays = _named(present, refs)
    verify_offsets_ref, write_offsets_ref, seeds_ref, scalars_ref = refs[len(present) :]

    def step(index: Any, before: RowSums) -> RowSums:
        rows = index * block + jnp.arange(block, dtype=jnp.int32)
        out, after = plan_rows(load_ref, arrays, rows, before, s)
        in_batch = rows <= s.batch_size
        plgpu.store(verify_offsets_ref.at[rows], out.verify_offsets, mask=in_batch)
        plgpu.store(write_offsets_ref.at[rows], jnp.where(in_batch, out.write_offsets, 0), mask=rows <= s.write_req_capacity)
        plgpu.store(seeds_ref.at[rows], out.seeds, mask=rows < s.write_req_capacity)
        return after

    zero = jnp.int32(0)
    totals = RowSums(zero, zero, zero)
    blocks = pl.cdiv(s.write_req_capacity + 1, block)
    totals = step(0, totals) if blocks == 1 else RowSums(*jax.lax.fori_loop(0, blocks, lambda i, t: step(i, RowSums(*t)), totals))
    num_valid, enable = _verify_extent(totals.verify, s)
    scalars_ref[0] = num_valid
    scalars_ref[1] = enable
    scalars_ref[2] = totals.invalid


def _entries_kernel(
    verify_offsets_ref: Any, scalars_ref: Any, *refs: Any, present: tuple[str, ...], statics: PlanStatics, block: int
) -> None:
    """One thread an entry; a block behind the last entry ends at once."""
    s = statics
    arrays = _named(present, refs)
    outputs = refs[len(present) :]
    first = pl.program_id(0) * block
    num_valid = scalars_ref[0] * scalars_ref[1]

    @pl.when(first < num_valid)
    def _() -> None:
        entries = first + jnp.arange(block, dtype=jnp.int32)
        out = plan_entries(load_ref, arrays, verify_offsets_ref, entries, num_valid, s)
        for ref, value in zip(outputs, out, strict=True):
            plgpu.store(ref.at[entries], value, mask=entries < num_valid)


def _verify_extent(total: jax.Array, s: PlanStatics) -> tuple[jax.Array, jax.Array]:
    """Active entries and the enable flag; an overflow is exact, since the sums saturate above any capacity."""
    return jnp.minimum(total, s.verify_capacity), (total <= s.verify_capacity).astype(jnp.int32)


def _results(entries: EntryOutputs, rows: RowOutputs, scalars: jax.Array, s: PlanStatics) -> PlanResults:
    return PlanResults(
        verify_slot_indices=entries.slot,
        verify_expected_positions=entries.position,
        verify_prev_slot_indices=entries.prev_slot,
        verify_expected_tokens=entries.expected_token,
        verify_num_valid=scalars[0:1],
        enable=scalars[1:2],
        row_offsets=rows.verify_offsets,
        write_offsets=rows.write_offsets,
        write_seed_slot_indices=rows.seeds,
        write_num_valid_reqs=jnp.full_like(scalars[0:1], s.batch_size),
        num_invalid_rows=scalars[2:3],
    )


def _present(arrays: PlanArrays) -> tuple[str, ...]:
    return tuple(name for name, value in arrays._asdict().items() if value is not None)


def _operands(arrays: PlanArrays) -> list[Any]:
    return [value for value in arrays if value is not None]


def _named(present: tuple[str, ...], refs: tuple[Any, ...]) -> PlanArrays:
    return PlanArrays(**{**dict.fromkeys(PlanArrays._fields), **dict(zip(present, refs, strict=False))})
