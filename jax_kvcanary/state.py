"""Device-side state that every launch of one canary shares: the violation log and the counters."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvcanary._checks import ArrayLike, check_dtype, check_int, check_shape, check_type
from jax_kvcanary.config import CanaryConfig
from jax_kvcanary.constants import FAIL_REASON_COLUMNS, INT32_MAX, NUM_LAUNCH_TAGS, VIOLATION_FIELDS, CanaryLaunchTag


def to_int64(words: ArrayLike) -> np.ndarray:
    """Host view of a word-pair array as signed 64-bit integers.

    Args:
        words: uint32 [..., 2], low word first.

    Returns:
        NumPy int64 [...]. Waits for the device.

    Raises:
        TypeError: another dtype. ValueError: the last axis is not 2.
    """
    check_dtype(words, "words", np.uint32)
    if not words.shape or words.shape[-1] != 2:
        raise ValueError(f"`words` has shape {list(words.shape)}, but a word-pair array has a last axis of 2, low word first.")
    host = np.ascontiguousarray(np.asarray(words))
    return host.view("<i8").reshape(host.shape[:-1])


def from_int64(values: Any) -> np.ndarray:
    """The inverse of :func:`to_int64`: NumPy uint32 [..., 2] of 64-bit integers."""
    values = np.ascontiguousarray(values, dtype="<i8")
    return values.view("<u4").reshape(*values.shape, 2)


def forward_steps(kernel_runs: np.ndarray) -> int:
    """Forward passes that a canary has seen, by its launches, int64 [12].

    In every pass the tail of each group runs once to verify and once to write; a canary can lack one of the groups.
    """
    return int(max(kernel_runs[CanaryLaunchTag.TAIL_K_FULL], kernel_runs[CanaryLaunchTag.TAIL_K_SWA]) // 2)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("violation_ring", "violation_write_index", "violation_request_rows", "reset_count"),
    meta_fields=(),
)
@dataclass(frozen=True)
class ViolationLog:
    """Fill-once ring of violation rows, shared by all launches of a canary.

    Fields:
        violation_ring: uint32 [ring_capacity, 8, 2]; rows of eight int64, as word pairs.
        violation_write_index: int32 [1]; violations so far, those that found the ring full included.
        violation_request_rows: int32 [ring_capacity]; the row of ``req_to_token`` that each violation belongs to, -1 where it belongs to
            none. None keeps no such list.
        reset_count: int32 [1]; how often the log was emptied, by which a monitor knows that it was. None does not count.
    """

    violation_ring: ArrayLike
    violation_write_index: ArrayLike
    violation_request_rows: ArrayLike | None = None
    reset_count: ArrayLike | None = None

    #: Whether launches of the program that is being traced have written this log. No part of the pytree, so that a log which enters a
    #: program, or comes back from one, is not marked.
    launched: ClassVar[bool] = False

    @classmethod
    def allocate(cls, *, ring_capacity: int) -> ViolationLog:
        """An empty log with room for ``ring_capacity`` rows (at least 1)."""
        check_int(ring_capacity, "ring_capacity", 1, INT32_MAX)
        return cls(
            violation_ring=jnp.zeros((ring_capacity, VIOLATION_FIELDS, 2), jnp.uint32),
            violation_write_index=jnp.zeros((1,), jnp.int32),
            violation_request_rows=jnp.full((ring_capacity,), -1, jnp.int32),
            reset_count=jnp.zeros((1,), jnp.int32),
        )

    def reset(self) -> ViolationLog:
        """The log without any rows."""
        return dataclasses.replace(
            self,
            violation_write_index=jnp.zeros_like(self.violation_write_index),
            reset_count=None if self.reset_count is None else self.reset_count + 1,
        )

    def rows(self) -> np.ndarray:
        """The rows that the ring holds, NumPy int64 [n, 8]. Waits for the device."""
        return to_int64(self.violation_ring)[: self.count()]

    def count(self) -> int:
        """Violations so far, dropped rows included. Waits for the device."""
        return int(np.asarray(self.violation_write_index)[0])

    def is_errored(self) -> bool:
        """Whether anything was found. Waits for the device."""
        return self.count() > 0


@partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        "violation_log",
        "kernel_run_counters",
        "slot_run_counters",
        "fail_reason_counters",
        "verify_skip_counters",
        "enable_chain_position_assert",
        "req_to_verify_expected_tokens",
    ),
    meta_fields=(),
)
@dataclass(frozen=True)
class CanaryDeviceState:
    """What the launches of one canary count and log. Threaded through every step.

    Fields:
        violation_log: see :class:`ViolationLog`.
        kernel_run_counters: uint32 [12, 2], word pairs; launches of each tag.
        slot_run_counters: uint32 [12, 2], word pairs; entries verified and records stored under each tag.
        fail_reason_counters: uint32 [12, 8]; for each tag and bit of FailReason, the rows that carried it.
        verify_skip_counters: uint32 [12]; verify launches that a plan overflow switched off.
        enable_chain_position_assert: int32 [1]; whether writes check that positions follow their predecessor's.
        req_to_verify_expected_tokens: int32 [rows, width] or None; the token that each (request row, position) should hold.
    """

    violation_log: ViolationLog
    kernel_run_counters: ArrayLike
    slot_run_counters: ArrayLike
    fail_reason_counters: ArrayLike
    verify_skip_counters: ArrayLike
    enable_chain_position_assert: ArrayLike
    req_to_verify_expected_tokens: ArrayLike | None = None

    @classmethod
    def allocate(
        cls, config: CanaryConfig, *, req_to_token_alloc_size: int | None = None, max_context_len: int | None = None
    ) -> CanaryDeviceState:
        """Fresh state: empty log, zero counters, the chain-position check on.

        Args:
            config: its ``ring_capacity`` sizes the log; ``enable_verify_token_assert`` asks for the table of expected tokens.
            req_to_token_alloc_size: request rows of that table; required exactly when it is asked for.
            max_context_len: positions of that table; required exactly when it is asked for.

        Raises:
            ValueError: one of the two sizes is missing or not called for.
        """
        check_type(config, "config", CanaryConfig)
        sizes = {"req_to_token_alloc_size": req_to_token_alloc_size, "max_context_len": max_context_len}
        for name, size in sizes.items():
            if config.enable_verify_token_assert and size is None:
                raise ValueError(f"`{name}` is None, but it must be an int when `config.enable_verify_token_assert` is on.")
            if not config.enable_verify_token_assert and size is not None:
                raise ValueError(f"`{name}` is {size}, but it must be None when `config.enable_verify_token_assert` is off.")
        table = None
        if config.enable_verify_token_assert:
            rows = check_int(req_to_token_alloc_size, "req_to_token_alloc_size", 1, INT32_MAX)
            width = check_int(max_context_len, "max_context_len", 1, INT32_MAX)
            table = jnp.full((rows, width), -1, jnp.int32)
        return cls(
            violation_log=ViolationLog.allocate(ring_capacity=config.ring_capacity),
            kernel_run_counters=jnp.zeros((NUM_LAUNCH_TAGS, 2), jnp.uint32),
            slot_run_counters=jnp.zeros((NUM_LAUNCH_TAGS, 2), jnp.uint32),
            fail_reason_counters=jnp.zeros((NUM_LAUNCH_TAGS, FAIL_REASON_COLUMNS), jnp.uint32),
            verify_skip_counters=jnp.zeros((NUM_LAUNCH_TAGS,), jnp.uint32),
            enable_chain_position_assert=jnp.ones((1,), jnp.int32),
            req_to_verify_expected_tokens=table,
        )


def check_device_state(state: Any, name: str = "device_state") -> CanaryDeviceState:
    """Check type, dtypes and shapes of every field that the custom calls touch.

    Raises:
        TypeError: not a CanaryDeviceState, or a field of another dtype. ValueError: a field of another shape.
    """
    check_type(state, name, CanaryDeviceState)
    check_type(state.violation_log, f"{name}.violation_log", ViolationLog)
    log = state.violation_log
    for field, value, dtype, shape in (
        ("violation_log.violation_ring", log.violation_ring, np.uint32, (None, VIOLATION_FIELDS, 2)),
        ("violation_log.violation_write_index", log.violation_write_index, np.int32, (1,)),
        ("kernel_run_counters", state.kernel_run_counters, np.uint32, (NUM_LAUNCH_TAGS, 2)),
        ("slot_run_counters", state.slot_run_counters, np.uint32, (NUM_LAUNCH_TAGS, 2)),
        ("fail_reason_counters", state.fail_reason_counters, np.uint32, (NUM_LAUNCH_TAGS, FAIL_REASON_COLUMNS)),
        ("verify_skip_counters", state.verify_skip_counters, np.uint32, (NUM_LAUNCH_TAGS,)),
        ("enable_chain_position_assert", state.enable_chain_position_assert, np.int32, (1,)),
    ):
        check_dtype(value, f"{name}.{field}", dtype)
        check_shape(value, f"{name}.{field}", shape, "the state of a canary")
    if log.violation_request_rows is not None:
        capacity = log.violation_ring.shape[0]
        check_dtype(log.violation_request_rows, f"{name}.violation_log.violation_request_rows", np.int32)
        check_shape(
            log.violation_request_rows,
            f"{name}.violation_log.violation_request_rows",
            (capacity,),
            f"a violation ring of {capacity} rows",
        )
    return state


def zero_behind_launches(device_state: CanaryDeviceState) -> ArrayLike:
    """An int32 zero [1] that follows from what the launches so far have logged, in a way that XLA does not see through.

    What the launches read in place, and something else is about to change in place, needs an order between the two, or XLA copies it.
    """
    return jnp.minimum(device_state.violation_log.violation_write_index & INT32_MAX, 0)
