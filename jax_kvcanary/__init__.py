"""KV-cache canary for JAX: corrupted cache bookkeeping, reported at the step, slot and position where it happened.

See README.md for a loop that uses it, and :class:`Canary` for the pieces of one step.
"""

from importlib.metadata import version

import jax_kvcanary._ffi  # noqa: F401 - first, for its sentence where the package is not installed
from jax_kvcanary import perturb, pools, reference
from jax_kvcanary.batch import ForwardBatch
from jax_kvcanary.buffers import CanaryBufferGroup, CanaryState, fresh_records
from jax_kvcanary.canary import Canary, CanaryStep
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
from jax_kvcanary.dump import CanaryDump, DumpedGroup, load_dump
from jax_kvcanary.expected_tokens import append_expected_tokens, set_expected_tokens
from jax_kvcanary.health import CanaryHealthError
from jax_kvcanary.install import install_canary
from jax_kvcanary.monitor import CanaryMonitor
from jax_kvcanary.oracle import TokenOracle
from jax_kvcanary.plan import Plan, PlanInput, VerifyPlan, WritePlan, plan
from jax_kvcanary.pools import attach_canary_buffers, make_packed_source, make_row_source, register_pool_attacher
from jax_kvcanary.records import CanaryRecords, GroupRecords, extract_records, insert_records
from jax_kvcanary.reference import mix3, splitmix64
from jax_kvcanary.report import CanaryReport
from jax_kvcanary.sources import RealKvSource, SourceSpec
from jax_kvcanary.state import CanaryDeviceState, ViolationLog, to_int64
from jax_kvcanary.statistics import CanaryMetrics
from jax_kvcanary.swa_statistics import SwaDivergence
from jax_kvcanary.sweep import CacheNode, sweep_plan
from jax_kvcanary.verify import verify_step
from jax_kvcanary.violations import CanaryViolationError, Violation, violations_to_dict
from jax_kvcanary.write import write_step

__version__ = version("jax-kvcanary")

__all__ = [
    "CANARY_CHAIN_ANCHOR",
    "CANARY_SLOT_BYTES",
    "MAX_REAL_KV_SOURCES",
    "REQ_POOL_IDX_PADDING",
    "TOKEN_TO_KV_SLOT_PADDING",
    "VIOLATION_FIELDS",
    "CacheNode",
    "Canary",
    "CanaryBufferGroup",
    "CanaryConfig",
    "CanaryDeviceState",
    "CanaryDump",
    "CanaryHealthError",
    "CanaryLaunchCapacities",
    "CanaryLaunchTag",
    "CanaryMetrics",
    "CanaryMode",
    "CanaryMonitor",
    "CanaryRecords",
    "CanaryReport",
    "CanaryState",
    "CanaryStep",
    "CanaryViolationError",
    "DumpedGroup",
    "FailReason",
    "ForwardBatch",
    "GroupRecords",
    "PerturbConfig",
    "PerturbKind",
    "Plan",
    "PlanInput",
    "PoolKind",
    "RealKvHashMode",
    "RealKvSource",
    "SourceSpec",
    "SwaDivergence",
    "TokenOracle",
    "VerifyPlan",
    "Violation",
    "ViolationLog",
    "WritePlan",
    "__version__",
    "append_expected_tokens",
    "attach_canary_buffers",
    "extract_records",
    "fresh_records",
    "insert_records",
    "install_canary",
    "load_dump",
    "make_packed_source",
    "make_row_source",
    "mix3",
    "perturb",
    "plan",
    "pools",
    "reference",
    "register_pool_attacher",
    "set_expected_tokens",
    "splitmix64",
    "sweep_plan",
    "to_int64",
    "verify_step",
    "violations_to_dict",
    "write_step",
]
