"""Plan kernels of ``jax_kvcanary``: Pallas on Triton for CUDA, the same formulas in plain jnp for the CPU."""

from jax_kvcanary.pallas.formulas import PlanArrays, PlanStatics, gather, live_and_valid_rows, translate, window_start
from jax_kvcanary.pallas.plan import PlanResults, plan_arrays

__all__ = [
    "PlanArrays",
    "PlanResults",
    "PlanStatics",
    "gather",
    "live_and_valid_rows",
    "plan_arrays",
    "translate",
    "window_start",
]
