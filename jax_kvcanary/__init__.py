"""KV-cache canary for JAX: corrupted cache bookkeeping, reported at the step, slot and position where it happened.

See README.md for a loop that uses it, and :class:`Canary` for the pieces of one step.
"""

from importlib.metadata import version

from jax_kvcanary import perturb, pools, reference
from jax_kvcanary.batch import ForwardBatch
from jax_kvcanary.buffers import CanaryBufferGroup, fresh_records
from jax_kvcanary.canary import Canary, CanaryState, CanaryStep, install_canary
from jax_kvcanary.config import CanaryConfig, CanaryLaunchCapacities, CanaryMode, PerturbConfig, PerturbKind
from jax_kvcanary.constants import (
    CANARY_CHAIN_ANCHOR,
    CANARY_SLOT_BYTES,
    MAX_REAL_KV_SOURCES,
    REQ_POOL_IDX_PADDING,
    TOKEN_TO_KV_SLOT_PADDING,
    VIOLATION_FIELDS,
    CanaryLaunchTag,
    FailReason,
    PoolKind,
    RealKvHashMode,
)
from jax_kvcanary.monitor import CanaryMonitor
from jax_kvcanary.plan import Plan, PlanInput, VerifyPlan, WritePlan, plan
from jax_kvcanary.pools import attach_canary_buffers, register_pool_attacher
from jax_kvcanary.reference import mix3, splitmix64
from jax_kvcanary.report import CanaryReport
from jax_kvcanary.sources import RealKvSource, SourceSpec
from jax_kvcanary.state import CanaryDeviceState, ViolationLog, to_int64
from jax_kvcanary.verify import verify_step
from jax_kvcanary.violations import CanaryViolationError, Violation
from jax_kvcanary.write import write_step

__version__ = version("jax-kvcanary")

__all__ = [
    "CANARY_CHAIN_ANCHOR",
    "CANARY_SLOT_BYTES",
    "MAX_REAL_KV_SOURCES",
    "REQ_POOL_IDX_PADDING",
    "TOKEN_TO_KV_SLOT_PADDING",
    "VIOLATION_FIELDS",
    "Canary",
    "CanaryBufferGroup",
    "CanaryConfig",
    "CanaryDeviceState",
    "CanaryLaunchCapacities",
    "CanaryLaunchTag",
    "CanaryMode",
    "CanaryMonitor",
    "CanaryReport",
    "CanaryState",
    "CanaryStep",
    "CanaryViolationError",
    "FailReason",
    "ForwardBatch",
    "PerturbConfig",
    "PerturbKind",
    "Plan",
    "PlanInput",
    "PoolKind",
    "RealKvHashMode",
    "RealKvSource",
    "SourceSpec",
    "VerifyPlan",
    "Violation",
    "ViolationLog",
    "WritePlan",
    "__version__",
    "attach_canary_buffers",
    "fresh_records",
    "install_canary",
    "mix3",
    "perturb",
    "plan",
    "pools",
    "reference",
    "register_pool_attacher",
    "splitmix64",
    "to_int64",
    "verify_step",
    "write_step",
]
