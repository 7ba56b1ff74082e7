"""Records, device states and rows of the log: building them, and telling two of them apart."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from helpers.backends import host
from jax_kvcanary.config import CanaryConfig
from jax_kvcanary.state import CanaryDeviceState, from_int64, to_int64


def fresh_state(ring_capacity: int, *, chain_assert: int = 1) -> CanaryDeviceState:
    """An empty state, NumPy arrays."""
    state = host(CanaryDeviceState.allocate(CanaryConfig(mode="log", ring_capacity=ring_capacity)))
    return dataclasses.replace(state, enable_chain_position_assert=np.array([chain_assert], np.int32))


def records(rows: Any) -> np.ndarray:
    """A canary buffer of records given as [num_slots, 4] integers."""
    return np.array(rows, "<i8").reshape(-1, 4).view(np.uint8)


def fields(canary_buf: Any) -> np.ndarray:
    """The records of a canary buffer, int64 [num_slots, 4]."""
    return np.ascontiguousarray(canary_buf).view("<i8")


def fresh_buffer(num_slots: int) -> np.ndarray:
    """A canary buffer that nothing has written."""
    return np.full((num_slots, 32), 0xFF, np.uint8)


def multiset(rows: Iterable[Sequence[int]]) -> Counter[tuple[int, ...]]:
    """Rows of the log without their order."""
    return Counter(tuple(int(field) for field in row) for row in rows)


def log_rows(state: CanaryDeviceState) -> np.ndarray:
    """The rows that the ring holds, whichever backend's state it is."""
    return host(state).violation_log.rows()


def assert_same_buffer(got: Any, want: Any) -> None:
    """Compare canary buffers; what the padding slot holds is open."""
    np.testing.assert_array_equal(fields(got)[1:], fields(want)[1:])


def assert_same_counters(got: CanaryDeviceState, want: CanaryDeviceState) -> None:
    """Compare everything in two states but the ring."""
    got, want = host(got), host(want)
    assert got.violation_log.count() == want.violation_log.count()
    for name in ("kernel_run_counters", "slot_run_counters"):
        np.testing.assert_array_equal(to_int64(getattr(got, name)), to_int64(getattr(want, name)), err_msg=name)
    for name in ("fail_reason_counters", "verify_skip_counters", "enable_chain_position_assert"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
    for got_leaf, want_leaf in zip(dataclasses.astuple(got), dataclasses.astuple(want), strict=True):
        if hasattr(got_leaf, "dtype"):
            assert (got_leaf.dtype, got_leaf.shape) == (want_leaf.dtype, want_leaf.shape)


def assert_same_state(got: CanaryDeviceState, want: CanaryDeviceState, *, rows_before: int = 0, all_rows: Any = None) -> None:
    """Compare two states after one launch.

    Args:
        got: the state under test.
        want: what it must be, up to the order of the rows that the launch wrote.
        rows_before: rows of the ring before the launch, which must stay where they are.
        all_rows: all rows that the launch found, where the ring had no room for some of them: any of them may stay.
    """
    assert_same_counters(got, want)
    got_rows, want_rows = log_rows(got), log_rows(want)
    assert got_rows.shape == want_rows.shape
    np.testing.assert_array_equal(got_rows[:rows_before], want_rows[:rows_before])
    gained = multiset(got_rows[rows_before:])
    if all_rows is None:
        assert want.violation_log.count() <= len(want.violation_log.rows()), "the ring is too small: which rows it keeps is open"
        assert gained == multiset(want_rows[rows_before:])
    else:
        assert not gained - multiset(all_rows)


def with_log(state: CanaryDeviceState, rows: Any, count: int) -> CanaryDeviceState:
    """A state whose ring already holds rows (no more than it has room for), with ``count`` violations so far."""
    ring = to_int64(state.violation_log.violation_ring).copy()
    ring[: len(rows)] = np.reshape(rows, (-1, 8))
    log = dataclasses.replace(state.violation_log, violation_ring=from_int64(ring), violation_write_index=np.array([count], np.int32))
    return dataclasses.replace(state, violation_log=log)
