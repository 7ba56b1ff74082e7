"""Reports as a device would have made them, for a monitor without a loop."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import jax_kvcanary as kvc
from jax_kvcanary import CanaryLaunchTag as Tag
from jax_kvcanary import FailReason as Reason
from jax_kvcanary.state import from_int64

RING_CAPACITY = 5
CAPACITIES = kvc.CanaryLaunchCapacities(53, 2)


def row(slot, tag=Tag.TAIL_K_FULL, reasons=Reason.VERIFY_CHAIN_HASH_MISMATCH):
    return (int(tag), slot, 3, 11, -1, 5, 6, int(reasons))


def make_report(step, rows=(), total=None, *, skips=None, invalid=0, tag=Tag.TAIL_K_FULL, runs=None, resets=0, array=jnp.asarray):
    """What the device reports after some steps: the first rows of the ring, and how many violations there were.

    ``runs`` has launches by tag; None is the verify and the write of each step under ``tag``.
    """
    ring = np.zeros((RING_CAPACITY, 8), np.int64)
    ring[: len(rows)] = np.reshape(rows, (-1, 8))
    kernel_runs = np.zeros(12, np.int64)
    for ran, count in ({tag: 2 * step} if runs is None else runs).items():
        kernel_runs[ran] = count
    skip_counters = np.zeros(12, np.uint32)
    for skipped, count in (skips or {}).items():
        skip_counters[skipped] = count
    total = len(rows) if total is None else total
    reason_counters = np.zeros((12, 8), np.uint32)
    # What found no room was like the last row.
    for entry in [*rows, *[rows[-1]] * (total - len(rows))] if len(rows) else []:
        reason_counters[entry[0]] += np.array([entry[7] >> bit & 1 for bit in range(8)], np.uint32)
    write_index = np.array([total], np.int32)
    state = dataclasses.replace(
        kvc.CanaryDeviceState.allocate(kvc.CanaryConfig("log")),
        violation_log=kvc.ViolationLog(from_int64(ring), write_index, None, np.array([resets], np.int32)),
        kernel_run_counters=from_int64(kernel_runs),
        verify_skip_counters=skip_counters,
        fail_reason_counters=reason_counters,
    )
    return jax.tree.map(array, kvc.CanaryReport.of(state, np.array([invalid], np.int32)))


def tags_of(*kinds, phases=("HEAD", "TAIL"), halves="KV"):
    return {Tag[f"{phase}_{half}_{kind.name}"] for phase in phases for half in halves for kind in kinds}


class Watched:
    """A device array that notes what is done with it."""

    def __init__(self, events, label, value):
        self.events, self.label, self.value = events, label, value
        self.dtype, self.shape = value.dtype, value.shape

    def copy_to_host_async(self):
        self.events.append(("copy", self.label))

    def __array__(self, dtype=None, copy=None):
        self.events.append(("read", self.label))
        return np.array(self.value, dtype)


def make_monitor(mode="log"):
    """A monitor of such reports."""
    return kvc.CanaryMonitor(kvc.Canary(kvc.CanaryConfig(mode, ring_capacity=RING_CAPACITY), CAPACITIES))


def handle(monitor, *reports):
    """Have reports handled, the last one too."""
    for report in reports:
        monitor.observe(report, None)
    monitor.flush()


def steps_of(monitor):
    """The first and the last step that each violation may belong to."""
    return [(violation.earliest_step, violation.step) for violation in monitor.violations]
