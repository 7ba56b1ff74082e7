"""The plan's Triton kernels, interpreted, against the reference: many tiles, few programs, and no access out of range."""

from __future__ import annotations

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.backends import PLAN_STATICS
from helpers.plans import assert_same_plan
from helpers.random_cases import PLAN_SHAPES, PlanShape, random_plan
from jax_kvcanary import reference
from jax_kvcanary.pallas import plan as kernels
from jax_kvcanary.plan import plan as device_plan

#: Tiles so small that a few rows take several, and programs so few that each has several tiles.
SMALL = kernels.TileSizes(most_entries=8, fewest_entries=4, entries_per_warp=4, programs=3, rows_per_warp=4, most_rows_warps=2)

SHAPES = (
    *PLAN_SHAPES,
    PlanShape(rows=1, table=(3, 61), verify_capacity=59),
    PlanShape(rows=7, table=(5, 31), verify_capacity=211, lut_len=23, expected=(4, 29), offset=1),
    PlanShape(rows=7, table=(5, 31), verify_capacity=128, write_req_capacity=19),  # whole tiles
    PlanShape(rows=37, table=(11, 5), verify_capacity=97, window=3, write_req_capacity=41),  # several looks for the rows of a tile
    PlanShape(rows=601, table=(7, 2), verify_capacity=997),
    PlanShape(rows=11, table=(5, 61), verify_capacity=151, window=41, lut_len=29, expected=(4, 53), stride=4),
)


@pytest.fixture
def interpreted(monkeypatch):
    """A jitted plan by interpreted kernels of small tiles, and a list to which accesses out of range are added."""
    outside: list[str] = []

    def check(name, ref, index, mask):
        within = jnp.bool_(True)
        for at, size in zip(index, ref.shape, strict=True):
            within &= jnp.all(~mask | ((at >= 0) & (at < size)))
        jax.debug.callback(lambda value: None if value else outside.append(name), within)

    load = kernels.load_ref

    def checked_load(ref, index, mask, other):
        check("load", ref, index, jnp.asarray(mask))
        return load(ref, index, mask, other)

    store = kernels.plgpu.store

    def checked_store(ref, value, *, mask=None):
        (index,) = ref.transforms[0].indices
        check("store", ref.ref, (index,), jnp.ones_like(value, bool) if mask is None else mask)
        store(ref, value, mask=mask)

    monkeypatch.setattr(kernels, "TILES", SMALL)
    monkeypatch.setattr(kernels, "load_ref", checked_load)
    monkeypatch.setattr(kernels.plgpu, "store", checked_store)
    monkeypatch.setattr(kernels.pl, "pallas_call", partial(kernels.pl.pallas_call, interpret=True))
    monkeypatch.setattr(sys.modules["jax_kvcanary.plan"], "plan_arrays", kernels._plan_triton)  # the package has a function of that name
    return outside


@pytest.mark.parametrize("wildness", [0.0, 0.1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernels_interpreted(interpreted, shape, wildness):
    rng = np.random.default_rng([shape.rows, shape.verify_capacity])
    plan = jax.jit(device_plan, static_argnames=PLAN_STATICS)
    for _ in range(7):
        args, keywords = random_plan(rng, shape, wildness, wide=False)
        narrow = jax.tree.map(lambda leaf: leaf.astype(np.int32) if isinstance(leaf, np.ndarray) else leaf, (args, keywords))
        got = plan(*narrow[0], **narrow[1])
        jax.effects_barrier()
        assert interpreted == []
        assert_same_plan(got, reference.plan(*args, **keywords))
