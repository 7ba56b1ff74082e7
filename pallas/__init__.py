"""Plan kernels of ``jax_kvcanary``: Pallas on Triton for CUDA, the same formulas in plain jnp for the CPU."""

from jax_kvcanary.pallas.plan import PlanArrays, PlanStatics, plan_arrays

__all__ = ["PlanArrays", "PlanStatics", "plan_arrays"]
