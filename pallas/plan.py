"""Drivers of the plan: two Triton kernels on CUDA, two jnp passes on the CPU, one set of formulas.

The offsets pass is one program: prefix sums over the batch, and every row's seed. The entries pass takes the entries in tiles, by a
fixed number of programs at most, each of which goes on until no tile in use is left: room that a step does not use costs nothing. The
threads of a tile find its first and last row together. A tile within one row, as most are of long contexts, reads the table in one run;
in others, each thread searches between the two rows.

Every result of the plan is an output of its own of a kernel: on a GPU, a slice or a constant would be a further launch.
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
    list_of_entry,
    lists_of_ends,
    plan_entries,
    plan_rows,
    sample_lists,
    verify_extent,
)


@dataclass(frozen=True)
class TileSizes:
    """Sizes of the Triton kernels. A warp has 32 threads; all but ``programs`` are powers of two.

    Fields:
        most_entries, fewest_entries: of a tile.
        entries_per_warp: of a tile; four a thread are stored at once.
        programs: of the entries kernel at most, so many that a large GPU runs them all at the same time.
        rows_per_warp: of the offsets kernel.
        most_rows_warps: of the offsets kernel.
    """

    most_entries: int = 1024
    fewest_entries: int = 256
    entries_per_warp: int = 128
    programs: int = 1024
    rows_per_warp: int = 128
    most_rows_warps: int = 8

    def entries(self, s: PlanStatics) -> tuple[int, int, int]:
        """Entries of a tile, warps and programs of the entries kernel, by what the batch can need."""
        wanted = pl.next_power_of_2(pl.cdiv(max(s.most_entries, 1), self.programs))
        tile = min(max(wanted, self.fewest_entries), self.most_entries)
        programs = min(max(pl.cdiv(s.most_entries, tile), 1), self.programs)
        return tile, max(tile // self.entries_per_warp, 1), programs

    def rows(self, s: PlanStatics) -> tuple[int, int]:
        """Rows of a block and warps of the offsets kernel, by the batch."""
        block = min(pl.next_power_of_2(max(s.batch_size, 1)), MAX_ROW_BLOCK)
        return block, min(max(block // self.rows_per_warp, 1), self.most_rows_warps)


TILES = TileSizes()


class OffsetsOutputs(NamedTuple):
    """Outputs of the offsets kernel, int32: their sizes, then references in the kernel and arrays outside of it."""

    verify_offsets: Any
    write_offsets: Any
    seeds: Any
    num_valid: Any
    enable: Any
    num_valid_reqs: Any
    num_invalid_rows: Any
    row_flags: Any


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
    row_flags: jax.Array | None


@functools.partial(jax.jit, static_argnames="statics")
def plan_arrays(arrays: PlanArrays, statics: PlanStatics) -> PlanResults:
    """Compute a plan on the platform that the surrounding program is compiled for.

    Args:
        arrays: int32 arrays, checked by the caller; tables must not be empty (pass a dummy, and size 0 in ``statics``).
        statics: sizes and switches.

    Returns:
        The plan's arrays. Entries past ``verify_num_valid`` are unspecified, and all of them where ``enable`` is 0. ``row_flags`` are
        zeros; None for a batch without rows.
    """
    present = _present(arrays)

    def on(driver: Any) -> Any:
        return lambda *values: driver(_named(present, values), statics)

    return jax.lax.platform_dependent(*_operands(arrays), cpu=on(_plan_jnp), cuda=on(_plan_triton))


def _plan_jnp(arrays: PlanArrays, s: PlanStatics) -> PlanResults:
    """Both passes in jnp: gathers over whole vectors."""
    bs, capacity = s.batch_size, s.write_req_capacity
    block = min(max(bs, 1), MAX_ROW_BLOCK)

    def step(before: RowSums, index: jax.Array) -> tuple[RowSums, RowOutputs]:
        out, after = plan_rows(gather, arrays, index * block + jnp.arange(block, dtype=jnp.int32), before, s)
        return after, out

    zero = varying_zero(_operands(arrays))  # results vary where the Triton kernels' do
    totals, out = jax.lax.scan(step, RowSums(zero, zero, zero), zero + jnp.arange(pl.cdiv(bs, block), dtype=jnp.int32))
    verify_ends, write_ends, seeds = (part.reshape(-1)[:bs] for part in out)
    verify_offsets = jnp.append(zero, verify_ends)
    num_valid, enable = verify_extent(totals.verify, s)
    entries = zero + jnp.arange(s.verify_capacity, dtype=jnp.int32)
    live = entries < num_valid * enable
    row = list_of_entry(gather, verify_offsets, 0, max(bs - 1, 0), bs, entries, live)
    return _results(
        plan_entries(gather, arrays, verify_offsets, row, entries, live, s),
        OffsetsOutputs(
            verify_offsets=verify_offsets,
            write_offsets=jnp.pad(jnp.append(zero, write_ends), (0, capacity - bs)),
            seeds=jnp.pad(seeds, (0, capacity - bs), constant_values=-1),
            num_valid=num_valid[None],
            enable=enable[None],
            num_valid_reqs=zero[None] + bs,
            num_invalid_rows=totals.invalid[None],
            row_flags=jnp.full(bs, zero),
        ),
        s,
    )


def _plan_triton(arrays: PlanArrays, s: PlanStatics) -> PlanResults:
    """Both passes as Pallas kernels on Triton."""
    operands, present = _operands(arrays), _present(arrays)
    block, warps = TILES.rows(s)
    sizes = OffsetsOutputs(s.batch_size + 1, s.write_req_capacity + 1, s.write_req_capacity, 1, 1, 1, 1, s.batch_size)
    # A kernel has no empty outputs.
    offsets = OffsetsOutputs(
        *pl.pallas_call(
            functools.partial(_offsets_kernel, present=present, statics=s, block=block),
            out_shape=int32_results(operands, *((max(size, 1),) for size in sizes)),
            grid=(1,),
            compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
            name="kvcanary_plan_offsets",
        )(*operands)
    )
    nothing = offsets.seeds[:0] if 0 in (s.verify_capacity, s.write_req_capacity) else None
    if not s.write_req_capacity:
        offsets = offsets._replace(seeds=nothing)
    if not s.verify_capacity:
        return _results(EntryOutputs(*(nothing,) * 4), offsets, s)
    tile, warps, programs = TILES.entries(s)
    entries = EntryOutputs(
        *pl.pallas_call(
            functools.partial(_entries_kernel, present=present, statics=s, block=tile, programs=programs),
            out_shape=int32_results(operands, *((s.verify_capacity,),) * 4),
            grid=(programs,),
            compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
            name="kvcanary_plan_entries",
        )(offsets.verify_offsets, *operands)
    )
    return _results(entries, offsets, s)


def _offsets_kernel(*refs: Any, present: tuple[str, ...], statics: PlanStatics, block: int) -> None:
    """One program: offsets, seeds and totals of all rows, a block of them at a time."""
    s = statics
    arrays = _named(present, refs)
    outputs = OffsetsOutputs(*refs[len(present) :])
    zero = jnp.int32(0)

    def step(index: Any, before: RowSums) -> RowSums:
        rows = index * block + jnp.arange(block, dtype=jnp.int32)
        out, after = plan_rows(load_ref, arrays, rows, before, s)
        in_batch = rows < s.batch_size
        plgpu.store(outputs.verify_offsets.at[rows + 1], out.verify_ends, mask=in_batch)
        plgpu.store(outputs.write_offsets.at[rows + 1], out.write_ends, mask=in_batch)
        plgpu.store(outputs.seeds.at[rows], out.seeds, mask=in_batch)
        plgpu.store(outputs.row_flags.at[rows], jnp.zeros_like(rows), mask=in_batch)
        # The thread of the last row has the total at hand; bringing it to all of them would take a sum.
        last = rows == max(s.batch_size - 1, 0)
        at = jnp.where(last, 0, rows + 1)
        num_valid, enable = verify_extent(out.verify_ends, s)
        plgpu.store(outputs.num_valid.at[at], num_valid, mask=last)
        plgpu.store(outputs.enable.at[at], enable, mask=last)
        return after

    outputs.verify_offsets[0] = zero
    outputs.write_offsets[0] = zero
    outputs.num_valid_reqs[0] = jnp.int32(s.batch_size)
    totals = RowSums(zero, zero, zero)
    blocks = pl.cdiv(max(s.batch_size, 1), block)
    totals = step(0, totals) if blocks == 1 else RowSums(*jax.lax.fori_loop(0, blocks, lambda i, t: step(i, RowSums(*t)), totals))
    outputs.num_invalid_rows[0] = totals.invalid
    _fill_unused_rows(outputs, s)


def _fill_unused_rows(outputs: OffsetsOutputs, s: PlanStatics) -> None:
    """What a batch smaller than the capacity leaves of the write plan."""
    unused = s.write_req_capacity - s.batch_size
    if not unused:
        return
    block = min(pl.next_power_of_2(unused), MAX_ROW_BLOCK)

    def step(index: Any, _: None) -> None:
        rows = s.batch_size + index * block + jnp.arange(block, dtype=jnp.int32)
        plgpu.store(outputs.write_offsets.at[rows + 1], jnp.zeros_like(rows), mask=rows < s.write_req_capacity)
        plgpu.store(outputs.seeds.at[rows], jnp.full_like(rows, -1), mask=rows < s.write_req_capacity)

    blocks = pl.cdiv(unused, block)
    if blocks == 1:
        step(0, None)
    else:
        jax.lax.fori_loop(0, blocks, step, None)


def _entries_kernel(verify_offsets_ref: Any, *refs: Any, present: tuple[str, ...], statics: PlanStatics, block: int, programs: int) -> None:
    """Tiles of entries, as many as are in use, dealt out to the programs in turn."""
    s = statics
    arrays = _named(present, refs)
    outputs = refs[len(present) :]
    # These loads wait for nothing, and all tiles share them.
    samples = sample_lists(load_ref, verify_offsets_ref, s.batch_size, min(pl.next_power_of_2(max(s.batch_size, 1)), block))
    num_valid, enable = verify_extent(verify_offsets_ref[s.batch_size], s)
    num_valid = num_valid * enable
    tiles = ((num_valid - 1) >> (block.bit_length() - 1)) + 1
    program = pl.program_id(0)
    local = jnp.arange(block, dtype=jnp.int32)

    def fill(turn: Any, _: None) -> None:
        first = (program + turn * programs) * block
        entries = first + local
        live = local < num_valid - first

        def store(row: jax.Array) -> None:
            out = plan_entries(load_ref, arrays, verify_offsets_ref, row, entries, live, s)

            def store_where(mask: jax.Array | None) -> None:
                for ref, value in zip(outputs, out, strict=True):
                    plgpu.store(ref.at[entries], value, mask=mask)

            # A mask keeps a thread from storing its entries at once; what is past the valid ones may hold anything.
            if s.verify_capacity % block == 0:
                store_where(None)
            else:
                whole = s.verify_capacity - first >= block
                pl.when(whole)(lambda: store_where(None))
                pl.when(~whole)(lambda: store_where(live))

        if s.batch_size <= 1:
            store(jnp.int32(0))
            return
        last = first + jnp.minimum(num_valid - first, block) - 1
        low, high = lists_of_ends(load_ref, verify_offsets_ref, samples, s.batch_size, first, last)
        pl.when(low == high)(lambda: store(low))
        pl.when(low != high)(lambda: store(list_of_entry(load_ref, verify_offsets_ref, low, high, s.batch_size, entries, live)))

    jax.lax.fori_loop(0, jax.lax.div(tiles + (programs - 1) - program, jnp.int32(programs)), fill, None)


def _results(entries: EntryOutputs, offsets: OffsetsOutputs, s: PlanStatics) -> PlanResults:
    return PlanResults(
        verify_slot_indices=entries.slot,
        verify_expected_positions=entries.position,
        verify_prev_slot_indices=entries.prev_slot,
        verify_expected_tokens=entries.expected_token,
        verify_num_valid=offsets.num_valid,
        enable=offsets.enable,
        row_offsets=offsets.verify_offsets,
        write_offsets=offsets.write_offsets,
        write_seed_slot_indices=offsets.seeds,
        write_num_valid_reqs=offsets.num_valid_reqs,
        num_invalid_rows=offsets.num_invalid_rows,
        row_flags=offsets.row_flags if s.batch_size else None,
    )


def _present(arrays: PlanArrays) -> tuple[str, ...]:
    return tuple(name for name, value in arrays._asdict().items() if value is not None)


def _operands(arrays: PlanArrays) -> list[Any]:
    return [value for value in arrays if value is not None]


def _named(present: tuple[str, ...], refs: tuple[Any, ...]) -> PlanArrays:
    return PlanArrays(**{**dict.fromkeys(PlanArrays._fields), **dict(zip(present, refs, strict=False))})
