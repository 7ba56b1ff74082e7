"""The host's watch: what it says, when it reads, and what it does in each mode."""

from __future__ import annotations

import logging
import pickle
import re
from functools import partial

import jax
import numpy as np
import pytest

import jax_kvcanary as kvc
from helpers.reports import CAPACITIES, RING_CAPACITY, handle, make_monitor, make_report, row, steps_of
from jax_kvcanary import CanaryLaunchTag as Tag
from jax_kvcanary import FailReason as Reason

EXAMPLE = (
    "kv_canary violation: launch_tag=TAIL_K_FULL fail_reason=verify_chain_hash+verify_position slot_idx=7 position=3 stored_token=11 "
    "expected_token=-1 stored_chain_hash=0x0123456789abcdef expected_aux=0xfedcba9876543210"
)
EXAMPLE_ROW = (2, 7, 3, 11, -1, 0x0123456789ABCDEF, 0xFEDCBA9876543210 - 2**64, 3)

FIRST_LINE = re.compile(
    r"kv_canary violation: launch_tag=(?P<launch_tag>[A-Z_]+) fail_reason=(?P<fail_reason>[a-z_+]+) slot_idx=(?P<slot_idx>-?\d+) "
    r"position=(?P<position>-?\d+) stored_token=(?P<stored_token>-?\d+) expected_token=(?P<expected_token>-?\d+) "
    r"stored_chain_hash=0x(?P<stored_chain_hash>[0-9a-f]{16}) expected_aux=0x(?P<expected_aux>[0-9a-f]{16})"
)
REASON_NAMES = [
    "verify_chain_hash",
    "verify_position",
    "verify_real_kv_hash",
    "write_token",
    "write_position",
    "verify_token",
    "slot_out_of_range",
]


@pytest.fixture
def log(caplog):
    """The messages of the package's logger, all of them warnings."""
    caplog.set_level(logging.DEBUG, logger="jax_kvcanary")

    class Messages:
        def take(self):
            records = caplog.records[:]
            caplog.clear()
            assert {(record.name, record.levelname) for record in records} <= {("jax_kvcanary", "WARNING")}
            return [record.getMessage() for record in records]

    return Messages()


# Violations as text.


def test_first_line_of_the_documentation():
    violation = kvc.Violation.from_row(EXAMPLE_ROW)
    assert str(violation).splitlines()[0] == EXAMPLE
    assert violation == kvc.Violation(
        Tag.TAIL_K_FULL,
        Reason.VERIFY_CHAIN_HASH_MISMATCH | Reason.VERIFY_POSITION_MISMATCH,
        7,
        3,
        11,
        -1,
        0x0123456789ABCDEF,
        0xFEDCBA9876543210,
    )


@pytest.mark.parametrize("tag", list(Tag))
def test_first_lines_can_be_parsed(tag):
    for bits in range(1, 2**7):
        numbers = (3 * bits - 50, bits, -bits, 2**40 + bits)
        violation = kvc.Violation.from_row(np.array([tag, *numbers, -1, bits, bits]))
        parsed = FIRST_LINE.fullmatch(str(violation).splitlines()[0])
        assert parsed["launch_tag"] == tag.name
        assert parsed["fail_reason"] == "+".join(name for bit, name in enumerate(REASON_NAMES) if bits >> bit & 1)
        assert tuple(int(parsed[name]) for name in ("slot_idx", "position", "stored_token", "expected_token")) == numbers
        assert (parsed["stored_chain_hash"], parsed["expected_aux"]) == ("f" * 16, f"{bits:016x}")


@pytest.mark.parametrize(
    ("tag", "when", "where"),
    [
        (Tag.HEAD_K_FULL, "before the forward", "K records of the full pool"),
        (Tag.TAIL_V_FULL, "after the forward", "V records of the full pool"),
        (Tag.SWEEP_V_SWA, "in a sweep over cached slots", "V records of the sliding-window pool"),
    ],
)
def test_second_line_says_where_it_was_found(tag, when, where):
    lines = str(kvc.Violation.from_row(row(7, tag))).splitlines()
    assert lines[1] == f"  found {when}, in the {where}"
    lines = str(kvc.Violation.from_row(row(7, tag), step=9, earliest_step=9)).splitlines()
    assert lines[1] == f"  found at step 9, {when}, in the {where}"
    lines = str(kvc.Violation.from_row(row(7, tag), step=9, earliest_step=4)).splitlines()
    assert lines[1] == f"  found between steps 4 and 9, {when}, in the {where}"


def test_each_reason_is_explained():
    lines = str(kvc.Violation.from_row(row(7, reasons=127))).splitlines()
    assert [line.split(":")[0] for line in lines[2:]] == [f"  {name}" for name in ("expected", "found", *REASON_NAMES, "usual cause")]
    assert len(set(lines)) == 12


def test_error_shows_the_first_rows():
    violations = [kvc.Violation.from_row(row(slot), step=1) for slot in range(11)]
    error = kvc.CanaryViolationError(violations, 17)
    assert isinstance(error, RuntimeError)
    assert (error.violations, error.total) == (tuple(violations), 17)
    shown = [line for line in str(error).splitlines() if not line.startswith(" ")]
    assert shown == [*(violation.first_line() for violation in violations[:8]), "9 more violations were recorded."]
    few = kvc.CanaryViolationError(violations[:2])
    assert str(few) == "\n".join(map(str, violations[:2]))


# Modes.


def test_errors_go_to_other_processes_as_they_are():
    """A server's workers send what they raised to the process that waits for them."""
    violations = [kvc.Violation.from_row(row(slot), step=3, request_row=2) for slot in (7, 9)]
    error = kvc.CanaryViolationError(violations, 11, "TAIL_K_FULL verify_chain_hash 11", earlier=1, earlier_total=1)
    received = pickle.loads(pickle.dumps(error))
    assert received.new == tuple(violations[1:])
    assert (received.violations, received.total, received.by_reason, str(received)) == (tuple(violations), 11, error.by_reason, str(error))
    health = kvc.CanaryHealthError({Tag.TAIL_K_FULL: 100, Tag.SWEEP_K_FULL: 200}, 300, 17)
    received = pickle.loads(pickle.dumps(health))
    assert (received.tags, received.step, str(received)) == (health.tags, 300, str(health))


def test_log_mode_logs_each_row_once(log):
    monitor = make_monitor()
    rows = [row(slot) for slot in (3, 5, 7)]
    handle(monitor, make_report(1), make_report(2, rows[:2]), make_report(3, rows[:2]), make_report(4, rows))
    steps = (2, 2, 4)
    want = [str(kvc.Violation.from_row(entry, step=step, earliest_step=step)) for entry, step in zip(rows, steps, strict=True)]
    assert log.take() == want
    assert [str(violation) for violation in monitor.violations] == want
    handle(monitor, make_report(5, rows))
    assert log.take() == []


def test_silence_while_nothing_is_found(log):
    monitor = make_monitor()
    handle(monitor, *map(make_report, range(1, 6)))
    assert log.take() == []
    assert monitor.violations == ()


def test_raise_mode_raises_and_goes_on(log):
    monitor = make_monitor("raise")
    rows = [row(slot) for slot in (3, 5, 7)]
    monitor.observe(make_report(1), None)
    monitor.observe(make_report(2, rows[:2]), None)
    with pytest.raises(kvc.CanaryViolationError) as caught:
        monitor.observe(make_report(3, rows[:2]), None)
    assert [(found.slot_idx, found.step) for found in caught.value.violations] == [(3, 2), (5, 2)]
    assert str(caught.value) == "\n".join(map(str, monitor.violations))
    monitor.observe(make_report(4, rows), None)  # step 3 had nothing new
    with pytest.raises(kvc.CanaryViolationError) as caught:
        monitor.flush()
    assert [(found.slot_idx, found.step) for found in caught.value.violations] == [(3, 2), (5, 2), (7, 4)]
    handle(monitor, make_report(5, rows))
    assert log.take() == []


# Steps.


def test_several_steps_between_two_reports():
    monitor = make_monitor()
    rows = [row(slot) for slot in (3, 5, 7)]
    handle(monitor, make_report(8, rows[:1]), make_report(9, rows[:2]), make_report(17, rows))
    assert steps_of(monitor) == [(1, 8), (9, 9), (10, 17)]
    assert "  found between steps 10 and 17, after the forward" in str(monitor.violations[2])


def test_a_sweep_belongs_to_the_step_before_it():
    monitor = make_monitor()
    rows = [row(3), row(5, Tag.SWEEP_K_FULL)]
    handle(monitor, make_report(1, rows[:1]), make_report(1, rows))
    assert steps_of(monitor) == [(1, 1), (1, 1)]


def test_a_sweep_before_the_first_step():
    monitor = make_monitor()
    rows = [row(5, Tag.SWEEP_K_FULL), row(3)]
    handle(monitor, make_report(0, rows[:1]), make_report(1, rows))
    assert steps_of(monitor) == [(0, 0), (1, 1)]


def test_steps_of_a_canary_with_a_window_group_alone():
    monitor = make_monitor()
    handle(monitor, make_report(1, [row(3, Tag.TAIL_K_SWA)], tag=Tag.TAIL_K_SWA))
    assert steps_of(monitor) == [(1, 1)]


# What could not be checked.


def test_a_full_ring_says_how_many_are_missing(log):
    monitor = make_monitor()
    rows = [row(slot) for slot in range(RING_CAPACITY)]
    handle(monitor, make_report(1, rows[:3]))
    assert len(log.take()) == 3
    missing = "kv_canary: the violation ring of 5 rows is full; {} more violations were counted but not kept. By launch tag and "
    missing += "reason: TAIL_K_FULL verify_chain_hash {}."
    handle(monitor, make_report(2, rows, total=9))
    messages = log.take()
    assert [message.splitlines()[0] for message in messages] == [
        *(kvc.Violation.from_row(entry).first_line() for entry in rows[3:]),
        missing.format(4, 9),
    ]
    handle(monitor, make_report(3, rows, total=9))
    assert log.take() == []
    handle(monitor, make_report(4, rows, total=20))
    assert log.take() == [missing.format(11, 20)]
    assert len(monitor.violations) == RING_CAPACITY


def test_a_full_ring_still_raises():
    monitor = make_monitor("raise")
    rows = [row(slot) for slot in range(RING_CAPACITY)]
    for step, total, more in ((1, 5, 0), (2, 8, 3)):
        with pytest.raises(kvc.CanaryViolationError) as caught:
            handle(monitor, make_report(step, rows, total=total))
        assert len(caught.value.violations) == RING_CAPACITY
        assert caught.value.total == total
        told = f"{more} violations were counted, but the ring is full.\nBy launch tag and reason: "
        assert str(caught.value).startswith(told if more else "kv_canary violation: ")
    handle(monitor, make_report(3, rows, total=8))


@pytest.mark.parametrize("mode", ["log", "raise"])
def test_skipped_verifies_are_reported(log, mode):
    monitor = make_monitor(mode)
    handle(
        monitor,
        make_report(1),
        make_report(2, skips={Tag.HEAD_K_FULL: 1, Tag.TAIL_V_FULL: 1}),
        make_report(3, skips={Tag.HEAD_K_FULL: 1, Tag.TAIL_V_FULL: 1}),
        make_report(6, skips={Tag.HEAD_K_FULL: 4, Tag.TAIL_V_FULL: 1}),
    )
    text = "kv_canary: {} skipped its verify {} times up to step {}, because the step had more entries than verify_capacity."
    assert log.take() == [text.format("HEAD_K_FULL", 1, 2), text.format("TAIL_V_FULL", 1, 2), text.format("HEAD_K_FULL", 3, 6)]


@pytest.mark.parametrize("mode", ["log", "raise"])
def test_invalid_rows_are_reported(log, mode):
    monitor = make_monitor(mode)
    handle(monitor, make_report(1), make_report(2, invalid=3), make_report(3))
    assert log.take() == [
        "kv_canary: 3 rows of the batch of step 2 were invalid (request row, prefix or extend length out of range) and were not verified."
    ]


# Arguments.


@pytest.mark.parametrize(("bad", "kind"), [(None, "NoneType"), (kvc.CanaryConfig("log"), "CanaryConfig")])
def test_a_monitor_needs_a_canary(bad, kind):
    with pytest.raises(TypeError) as caught:
        kvc.CanaryMonitor(bad)
    assert str(caught.value) == f"`canary` is of type {kind}, but it must be a Canary, as install_canary returns it."


def test_observe_needs_a_report():
    monitor = make_monitor()
    monitor.observe(make_report(1, [row(3)]), None)
    for bad in (None, (), make_report):
        with pytest.raises(TypeError) as caught:
            monitor.observe(bad, None)
        assert str(caught.value) == f"`report` is of type {type(bad).__name__}, but it must be a CanaryReport."
    monitor.flush()  # the report before it is still there
    assert len(monitor.violations) == 1


# With a canary behind it.


@pytest.fixture
def loop():
    """A step that writes one slot after the other and verifies those before, its first state, and batches for it."""
    pool = kvc.pools.MHATokenToKVPool.allocate(num_slots=23, num_layers=1, num_kv_heads=1, head_dim=8)

    def start(mode):
        canary, state = kvc.install_canary(pool, kvc.CanaryConfig(mode, ring_capacity=3), capacities=CAPACITIES)
        return canary, canary.mark_init_finished(state)

    def decode(position, table):
        one = np.array([position], np.int32)
        return kvc.ForwardBatch.decode(
            input_ids=one, positions=one, out_cache_loc=table[1, one], req_pool_indices=np.array([1], np.int32), req_to_token=table
        )

    def step(canary, state, batch):
        state, between = canary.pre_forward(state, batch, pool)
        return canary.post_forward(state, between, batch, pool)

    table = np.arange(44, dtype=np.int32).reshape(2, 22) - 21  # row 1: slots 1, 2, 3 and so on
    return start, jax.jit(step, static_argnums=0, donate_argnums=1), partial(decode, table=table), table


def test_a_loop_in_raise_mode(loop):
    start, step, decode, table = loop
    canary, state = start("raise")
    monitor = kvc.CanaryMonitor(canary)
    for position in range(4):
        state, report = step(canary, state, decode(position))
        monitor.observe(report, state)
    wrong = table.copy()
    wrong[1, 2] = 9
    state, report = step(canary, state, decode(4, table=wrong))
    monitor.observe(report, state)
    state, report = step(canary, state, decode(5))
    with pytest.raises(kvc.CanaryViolationError) as caught:
        monitor.observe(report, state)
    assert {violation.step for violation in caught.value.violations} == {5}
    assert {violation.slot_idx for violation in caught.value.violations} <= {9, 4}
    assert len(caught.value.violations) == 3
    assert caught.value.total == 8
    state, report = step(canary, state, decode(6))
    monitor.observe(report, state)
    monitor.flush(state)


def test_a_scan_reports_a_range_of_steps(loop, log):
    start, step, decode, table = loop
    canary, state = start("log")
    monitor = kvc.CanaryMonitor(canary)
    batches = [decode(position, table=np.where(position >= 5, table // 2 * 2, table)) for position in range(8)]

    @partial(jax.jit, donate_argnums=0)
    def steps(state, stacked):
        return jax.lax.scan(lambda state, batch: step(canary, state, batch), state, stacked)

    state, reports = steps(state, jax.tree.map(lambda *leaves: np.stack(leaves), *batches))
    monitor.observe(jax.tree.map(lambda leaf: leaf[-1], reports), state)
    monitor.flush(state)
    messages = log.take()
    assert len(messages) == 4
    assert all(message.splitlines()[1].startswith("  found between steps 1 and 8, ") for message in messages[:3])
    assert messages[3].startswith("kv_canary: the violation ring of 3 rows is full; ")
