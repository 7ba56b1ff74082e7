"""A player of the scenarios in ``tests/data/scenarios``; their README says what each event means.

:class:`Replay` keeps what a serving engine owns (the table of slots, the translation, the KV bytes) and follows the
events; a subclass puts a canary beside it. :func:`play` compares what the canary finds with what it should.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from helpers.backends import Backend, host
from helpers.states import fresh_buffer, fresh_state, log_rows, multiset
from jax_kvcanary.constants import INT32_MAX, CanaryLaunchTag, RealKvHashMode
from jax_kvcanary.plan import PlanInput, VerifyPlan
from jax_kvcanary.sources import RealKvSource
from jax_kvcanary.state import to_int64

DATA = Path(__file__).parent.parent / "data"

#: Every scenario's file: the stories of the README, and one more that uses what these leave out.
SCENARIOS = {path.stem: path for folder in ("scenarios", "more_scenarios") for path in sorted((DATA / folder).glob("*.json"))}

#: Rows gained, by phase.
Rows = dict[str, Any]


def scenario_ids() -> list[str]:
    """The names of all scenarios."""
    return list(SCENARIOS)


def load_scenario(name: str) -> dict[str, Any]:
    """A scenario by name."""
    return json.loads(SCENARIOS[name].read_text())


class Replay:
    """The engine's side of a scenario, on the host."""

    def __init__(self, scenario: dict[str, Any]) -> None:
        self.scenario = scenario
        self.pool = pool = {"page_size": 1, "groups": ["FULL"], **scenario["pool"]}
        self.groups: list[str] = pool["groups"]
        self.num_slots = {"FULL": pool["num_slots"], "SWA": pool.get("swa_num_slots")}
        self.hash_mode = RealKvHashMode[pool["hash_mode"]]
        self.req_to_token = np.zeros((pool["max_reqs"], pool["max_seq_len"]), np.int32)
        self.lut: np.ndarray | None = None
        page_size, token_bytes = pool["page_size"], pool["kv_bytes_per_token"]
        self.kv = {group: np.zeros((self.num_slots[group] // page_size, page_size, token_bytes), np.uint8) for group in self.groups}
        self.rows_seen = 0

    # What a subclass does.

    def step(self, event: dict[str, Any]) -> Rows:
        """One forward; the rows gained by phase, in the keys of ``expect``."""
        raise NotImplementedError

    def sweep(self, event: dict[str, Any]) -> list[Any]:
        """One sweep; the rows gained."""
        raise NotImplementedError

    def chain_assert(self, event: dict[str, Any]) -> None:
        """Switch the chain-position check."""
        raise NotImplementedError

    def copy_records(self, src: list[int], dst: list[int]) -> None:
        """Copy records of the FULL group, all reads before the first store."""
        raise NotImplementedError

    def release(self, event: dict[str, Any]) -> None:
        """Make records of the FULL group fresh."""
        raise NotImplementedError

    def device_state(self) -> Any:
        """The canary's state."""
        raise NotImplementedError

    # What the engine does.

    def set_rows(self, event: dict[str, Any]) -> None:
        for row, runs in event["rows"].items():
            for start, slots in runs:
                self.req_to_token[int(row), start : start + len(slots)] = slots

    def set_lut(self, event: dict[str, Any]) -> None:
        self.lut = np.array(event["lut"], np.int32)

    def set_kv(self, event: dict[str, Any]) -> None:
        self.store_kv("FULL", event["slots"])

    def copy_slots(self, event: dict[str, Any]) -> None:
        src, dst = event["src"], event["dst"]
        if event["records"]:
            self.copy_records(src, dst)
        if event["kv"]:
            token_rows = self.kv["FULL"].reshape(self.num_slots["FULL"], -1)
            token_rows[dst] = token_rows[src]

    def forward(self, event: dict[str, Any]) -> None:
        """What the model's forward writes."""
        written = event["kv_written"]
        for group, slots in written.items() if len(self.groups) > 1 else [("FULL", written)]:
            self.store_kv(group, slots)

    def store_kv(self, group: str, slots: dict[str, str]) -> None:
        token_rows = self.kv[group].reshape(self.num_slots[group], -1)
        for slot, content in slots.items():
            token_rows[int(slot)] = np.frombuffer(bytes.fromhex(content), np.uint8)

    def phase_key(self, group: str, phase: str) -> str:
        return phase if len(self.groups) == 1 else f"{group}.{phase}"

    def gained(self) -> list[Any]:
        """Rows that the ring gained since the last call."""
        rows = log_rows(self.device_state())
        gained, self.rows_seen = rows[self.rows_seen :].tolist(), len(rows)
        return gained


def play(scenario: dict[str, Any], replay: Replay) -> None:
    """Follow the events of a scenario, and check every expectation in it."""
    for number, event in enumerate(scenario["events"]):
        result = getattr(replay, event["op"])(event)
        if event["op"] == "step":
            expected = {key: [rows] for key, rows in event["expect"].items()} if "expect" in event else event["expect_any"]
            assert result.keys() == expected.keys(), f"event {number}"
            for phase, allowed in expected.items():
                check_rows(result[phase], allowed, f"event {number}, {phase}")
        elif event["op"] == "sweep":
            check_rows(result, [event["expect"]] if "expect" in event else event["expect_any"], f"event {number}, sweep")

    state = host(replay.device_state())
    totals = scenario["expect_total_any"] if "expect_total_any" in scenario else [scenario["expect_total"]]
    assert state.violation_log.count() in totals
    counters = {
        "fail_reasons": state.fail_reason_counters,
        "verify_skips": state.verify_skip_counters,
        "kernel_runs": to_int64(state.kernel_run_counters),
        "slot_runs": to_int64(state.slot_run_counters),
    }
    for name, entries in scenario["expect_counters"].items():
        table = counters[name]
        got = [[*map(int, index), int(table[tuple(index)])] for index in np.argwhere(table)]
        assert got == sorted(entries), name


def check_rows(got: Iterable[Any], allowed: list[Any], where: str) -> None:
    """One of the allowed multisets of rows must be the one gained."""
    assert multiset(got) in [multiset(rows) for rows in allowed], f"{where}: {got}"


class OperationsReplay(Replay):
    """The canary as three plain operations."""

    def __init__(self, scenario: dict[str, Any], backend: Backend) -> None:
        super().__init__(scenario)
        self.backend = backend
        self.buffers = {
            (group, end): backend.array(fresh_buffer(self.num_slots[group])) for group in self.groups for end in ("head", "tail")
        }
        self.state = backend.own(fresh_state(scenario["ring_capacity"]))

    def device_state(self) -> Any:
        return self.state

    def chain_assert(self, event: dict[str, Any]) -> None:
        on = self.backend.array(np.array([event["on"]], np.int32))
        self.state = dataclasses.replace(self.state, enable_chain_position_assert=on)

    def copy_records(self, src: list[int], dst: list[int]) -> None:
        for end in ("head", "tail"):
            buf = np.array(self.buffers["FULL", end])
            buf[dst] = buf[src]
            self.buffers["FULL", end] = self.backend.array(buf)

    def release(self, event: dict[str, Any]) -> None:
        for end in ("head", "tail"):
            buf = np.array(self.buffers["FULL", end])
            buf[event["slots"]] = 0xFF
            self.buffers["FULL", end] = self.backend.array(buf)

    def step(self, event: dict[str, Any]) -> Rows:
        plans = {group: self.plan(event, group) for group in self.groups}
        result: Rows = {}
        for group in self.groups:
            result[self.phase_key(group, "HEAD")] = self.launches(event, group, "head", plans[group])
        self.forward(event)
        for group in self.groups:
            result[self.phase_key(group, "TAIL")] = self.launches(event, group, "tail", plans[group])
        return result

    def plan(self, event: dict[str, Any], group: str) -> Any:
        ints = self.backend.ints
        names = ("req_pool_indices", "prefix_lens", "extend_seq_lens", "expected_tokens_valid_lens")
        with self.backend.active():
            return self.backend.plan(
                PlanInput(*(ints(event[name]) for name in names)),
                ints(self.req_to_token, self.req_to_token.shape),
                verify_capacity=self.scenario["verify_capacity"],
                swa_window_size=self.pool["swa_window_size"] if group == "SWA" else 0,
                full_to_swa_index_mapping=ints(self.lut) if group == "SWA" else None,
                expected_tokens=self.expected_tokens(event),
                kv_token_id_vs_position_offset=event["kv_token_id_vs_position_offset"],
            )

    def expected_tokens(self, event: dict[str, Any]) -> Any:
        table = event["expected_tokens"]
        return None if table is None else self.backend.ints(table, np.shape(table))

    def launches(self, event: dict[str, Any], group: str, end: str, plan: Any) -> list[Any]:
        """Verify and write of one group in one phase; the rows gained."""
        ints = self.backend.ints
        tag = CanaryLaunchTag[f"{end.upper()}_K_{group}"]
        read_kv = {"real_kv_sources": (self.source(group),), "real_kv_hash_mode": self.hash_mode} if end == "tail" else {}
        slots = np.array(event["out_cache_loc"], np.int64)
        with self.backend.active():
            self.state = self.backend.verify_step(
                self.buffers[group, end],
                plan.verify,
                self.state,
                tag=tag,
                check_expected_token=event["expected_tokens"] is not None,
                **read_kv,
            )
            self.buffers[group, end], self.state = self.backend.write_step(
                self.buffers[group, end],
                plan.write,
                ints(event["input_ids"]),
                ints(event["positions"]),
                ints(translate(slots, self.lut) if group == "SWA" else slots),
                self.state,
                tag=tag,
                expected_input_tokens=ints(event["expected_input_tokens"]),
                expected_input_positions=ints(event["expected_input_positions"]),
                **read_kv,
            )
        return self.gained()

    def sweep(self, event: dict[str, Any]) -> list[Any]:
        with self.backend.active():
            self.state = self.backend.verify_step(
                self.buffers["FULL", "tail"],
                self.backend.own(sweep_plan(event)),
                self.state,
                tag=CanaryLaunchTag.SWEEP_K_FULL,
                real_kv_sources=(self.source("FULL"),),
                real_kv_hash_mode=self.hash_mode,
                check_expected_token=event["expected_tokens"] is not None,
            )
        return self.gained()

    def source(self, group: str) -> RealKvSource:
        token_bytes = self.pool["kv_bytes_per_token"]
        return RealKvSource(
            array=self.backend.array(self.kv[group]),
            page_size=self.pool["page_size"],
            num_bytes_per_token=token_bytes,
            read_bytes=token_bytes,
        )


def sweep_plan(event: dict[str, Any]) -> VerifyPlan:
    """The plan of a sweep, NumPy arrays."""
    slots = event["slots"]
    tokens = [-1] * len(slots) if event["expected_tokens"] is None else event["expected_tokens"]
    columns = (slots, tokens, event["positions"], event["prevs"], [event.get("num_valid", len(slots))], [event.get("enable", 1)])
    return VerifyPlan(*(np.array(column, np.int32) for column in columns))


def translate(slots: np.ndarray, lut: np.ndarray | None) -> np.ndarray:
    """Full-pool slots to the window group's (the contract's section 8)."""
    assert lut is not None, "a case with a window group sets its table before the first step"
    inside = (slots >= 0) & (slots < len(lut))
    return np.where(slots < 0, slots, np.where(inside, np.maximum(lut[np.where(inside, slots, 0)], 0), INT32_MAX))
