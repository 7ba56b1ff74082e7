"""Small runs with a known right answer, on one device, for the doctor; and how much memory a canary takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from jax_kvcanary import reference
from jax_kvcanary.buffers import fresh_records
from jax_kvcanary.config import CanaryConfig, CanaryLaunchCapacities, CanaryMode
from jax_kvcanary.constants import CanaryLaunchTag, RealKvHashMode
from jax_kvcanary.plan import Plan, PlanInput, VerifyPlan, plan
from jax_kvcanary.sources import RealKvSource
from jax_kvcanary.state import CanaryDeviceState
from jax_kvcanary.verify import verify_step
from jax_kvcanary.write import write_step

_NUM_SLOTS, _KV_BYTES, _CAPACITY = 11, 24, 13
_TABLE = np.array([[0, 0, 0, 0, 0], [7, 3, 9, 0, 0], [4, 5, 8, 6, 0]], np.int32)


def custom_calls(device: jax.Device) -> str | None:
    """Write two requests, change a byte of their KV, and verify them on a device, as the NumPy reference does.

    Returns:
        What differs from the reference, or None.
    """
    rows, nothing = np.array([1, 2], np.int32), np.zeros(2, np.int32)
    lengths = np.array([3, 4], np.int32)
    slots = np.concatenate([_TABLE[1, :3], _TABLE[2, :4]])
    tokens, positions = 100 + slots, np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
    kv = np.arange(_NUM_SLOTS * _KV_BYTES, dtype=np.uint8).reshape(_NUM_SLOTS, _KV_BYTES)
    damaged = kv.copy()
    damaged[_TABLE[1, 1], 3] += 1
    write_plan = reference.plan(PlanInput(rows, nothing, lengths), _TABLE, verify_capacity=_CAPACITY).write
    verify_plan = reference.plan(PlanInput(rows, lengths, nothing), _TABLE, verify_capacity=_CAPACITY).verify
    with jax.default_device(device):
        state = CanaryDeviceState.allocate(CanaryConfig(CanaryMode.LOG, ring_capacity=5))
        arguments = jax.tree.map(
            np.asarray, (fresh_records(_NUM_SLOTS), write_plan, verify_plan, tokens, positions, slots, kv, damaged, state)
        )
        want = _write_and_verify(reference.write_step, reference.verify_step, *arguments)
        got = jax.jit(partial(_write_and_verify, write_step, verify_step))(*jax.device_put(arguments, device))
    return _difference(_named(*got), _named(*want))


def _write_and_verify(
    write: Callable[..., Any],
    verify: Callable[..., Any],
    records: Any,
    write_plan: Any,
    verify_plan: Any,
    tokens: Any,
    positions: Any,
    slots: Any,
    kv: Any,
    damaged: Any,
    state: Any,
) -> tuple[Any, Any]:
    def reading(array: Any) -> dict[str, Any]:
        source = RealKvSource(array=array, num_bytes_per_token=_KV_BYTES, read_bytes=_KV_BYTES)
        return {"tag": CanaryLaunchTag.TAIL_K_FULL, "real_kv_sources": (source,), "real_kv_hash_mode": RealKvHashMode.ALL}

    records, state = write(records, write_plan, tokens, positions, slots, state, **reading(kv))
    return records, verify(records, verify_plan, state, **reading(damaged))


def _named(records: Any, state: Any) -> dict[str, Any]:
    return {"records": records, "state": state}


def plan_kernels(device: jax.Device) -> str | None:
    """Plan a batch with a padding row, a translation and expected tokens on a device, as the NumPy reference does.

    Returns:
        What differs from the reference, or None.
    """
    rows = PlanInput(*(np.array(values, np.int32) for values in ([2, 0, 1], [4, 3, 2], [1, 2, 5], [5, 5, 1])))
    lut = np.arange(_NUM_SLOTS, dtype=np.int32)[::-1].copy()
    options = {"verify_capacity": _CAPACITY, "write_req_capacity": 5, "swa_window_size": 3}

    def planned(function: Callable[..., Plan], rows: Any, table: Any, lut: Any, tokens: Any) -> Plan:
        return function(rows, table, full_to_swa_index_mapping=lut, expected_tokens=tokens, **options)

    arguments = (rows, _TABLE, lut, _TABLE + 50)
    want = planned(reference.plan, *arguments)
    got = jax.jit(partial(planned, plan))(*jax.device_put(arguments, device))
    return _difference(_entries_in_use(got, want), _entries_in_use(want, want))


def _entries_in_use(made: Plan, want: Plan) -> dict[str, Any]:
    """A plan without what is unspecified in it."""
    num_valid = int(want.verify.verify_num_valid[0])
    entries: VerifyPlan = jax.tree.map(lambda array: np.asarray(array)[:num_valid], made.verify)
    return {"verify": entries, "write": made.write, "num_invalid_rows": made.num_invalid_rows, "row_flags": made.row_flags}


def _difference(got: Any, want: Any) -> str | None:
    """The name of the first array that differs, or None."""
    for (path, got_array), want_array in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        if not np.array_equal(np.asarray(got_array), np.asarray(want_array)):
            return jax.tree_util.keystr(path, simple=True, separator=".")
    return None


def memory(num_slots: int) -> dict[str, int]:
    """Bytes that a canary takes on the device for a pool of K and V with this many slots: records, plan and log."""
    records = jax.eval_shape(partial(fresh_records, num_slots))
    state = jax.eval_shape(partial(CanaryDeviceState.allocate, CanaryConfig(CanaryMode.LOG)))
    entries = CanaryLaunchCapacities.from_pool(num_slots, 1).verify_capacity
    return {
        "records": 4 * records.size * records.dtype.itemsize,  # HEAD and TAIL of K and V
        "plan": 4 * entries * np.dtype(np.int32).itemsize,  # slot, predecessor, position and token of each entry
        "log": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)),
    }
