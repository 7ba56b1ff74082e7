"""What a launch leaves in the state: rows of the violation log, and counters (the contract's section 6)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jax_kvcanary._checks import check_enum
from jax_kvcanary.constants import INT32_MAX, CanaryLaunchTag, FailReason
from jax_kvcanary.reference.hashes import to_signed
from jax_kvcanary.state import CanaryDeviceState, ViolationLog, check_device_state, from_int64, to_int64


class Launch:
    """A private copy of the state that a launch started from; :meth:`finish` gives the state that it leaves."""

    def __init__(self, device_state: CanaryDeviceState, tag: Any) -> None:
        check_device_state(device_state)
        self._before = device_state
        self._tag = check_enum(tag, "tag", CanaryLaunchTag)
        self._ring = np.array(to_int64(device_state.violation_log.violation_ring))
        self._write_index = device_state.violation_log.count()
        self._kernel_runs = np.array(to_int64(device_state.kernel_run_counters))
        self._slot_runs = np.array(to_int64(device_state.slot_run_counters))
        self._fail_reasons = np.array(device_state.fail_reason_counters)
        self._skips = np.array(device_state.verify_skip_counters)
        self._kernel_runs[self._tag] = to_signed(int(self._kernel_runs[self._tag]) + 1)

    def record(
        self,
        reasons: FailReason,
        *,
        slot: int,
        position: int,
        stored_token: int,
        expected_token: int,
        stored_chain_hash: int,
        expected_aux: int,
    ) -> None:
        """Add a row to the ring while it has room, and count it in any case."""
        row = (self._tag, slot, position, stored_token, expected_token, stored_chain_hash, expected_aux, reasons)
        if 0 <= self._write_index < len(self._ring):
            self._ring[self._write_index] = [to_signed(int(field)) for field in row]
        self._write_index = min(self._write_index + 1, INT32_MAX)
        for reason in reasons:
            bit = reason.bit_length() - 1
            self._fail_reasons[self._tag, bit] = int(self._fail_reasons[self._tag, bit]) + 1 & 0xFFFFFFFF

    def count_slots(self, number: int) -> None:
        """Add the entries that a launch verified, or stored."""
        self._slot_runs[self._tag] = to_signed(int(self._slot_runs[self._tag]) + number)

    def count_skip(self) -> None:
        """Count a verify launch that its plan switched off."""
        self._skips[self._tag] = int(self._skips[self._tag]) + 1 & 0xFFFFFFFF

    def finish(self) -> CanaryDeviceState:
        """The state after the launch, NumPy arrays throughout."""
        table = self._before.req_to_verify_expected_tokens
        log = self._before.violation_log
        return dataclasses.replace(
            self._before,
            violation_log=ViolationLog(
                violation_ring=from_int64(self._ring),
                violation_write_index=np.array([self._write_index], np.int32),
                violation_request_rows=None if log.violation_request_rows is None else np.asarray(log.violation_request_rows),
                reset_count=None if log.reset_count is None else np.asarray(log.reset_count),
            ),
            kernel_run_counters=from_int64(self._kernel_runs),
            slot_run_counters=from_int64(self._slot_runs),
            fail_reason_counters=self._fail_reasons,
            verify_skip_counters=self._skips,
            enable_chain_position_assert=np.asarray(self._before.enable_chain_position_assert),
            req_to_verify_expected_tokens=None if table is None else np.asarray(table),
        )
