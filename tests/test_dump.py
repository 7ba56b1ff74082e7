"""Dumps: what goes in comes out, the state stays as it is, and files that are none are told apart."""

from __future__ import annotations

import dataclasses
import json
import re
import zipfile
from datetime import UTC, datetime
from functools import partial

import jax
import numpy as np
import pytest

import jax_kvcanary as kvc
from helpers.backends import host
from helpers.incidents import INCIDENTS, Server, double_handout, window
from helpers.loops import CONFIG, Loop, install, make_pool, serve
from helpers.messages import assert_message
from helpers.states import fields
from jax_kvcanary import dump as dump_module
from jax_kvcanary.pools import MHATokenToKVPool


@pytest.fixture(scope="module")
def server():
    return double_handout()


@pytest.fixture(scope="module")
def dumped(server, tmp_path_factory):
    return server.dump(tmp_path_factory.mktemp("dumps") / "incident.npz")


def assert_same_state(dump, state):
    """What a dump holds of a state, compared with the arrays on the device."""
    state = host(state)
    assert [group.kind for group in dump.groups] == [group.kind for group in state.groups]
    for got, want in zip(dump.groups, state.groups, strict=True):
        for name in ("k_head", "k_tail", "v_head", "v_tail"):
            if getattr(want, name) is None:
                assert getattr(got, name) is None
            else:
                np.testing.assert_array_equal(getattr(got, name), fields(getattr(want, name)))
                assert getattr(got, name).dtype == np.int64
    device_state = state.device_state
    np.testing.assert_array_equal(dump.violation_rows, device_state.violation_log.rows())
    assert dump.violation_count == device_state.violation_log.count()
    for name in ("kernel_run_counters", "slot_run_counters"):
        np.testing.assert_array_equal(getattr(dump, name), kvc.to_int64(getattr(device_state, name)))
    for name in ("fail_reason_counters", "verify_skip_counters"):
        np.testing.assert_array_equal(getattr(dump, name), getattr(device_state, name))


@pytest.mark.parametrize("faults", [False, True])
def test_round_trip_of_a_pool_with_both_halves(tmp_path, faults):
    loop = Loop()
    for batch in serve(faults=faults):
        loop.step(batch)
    path = tmp_path / "dump"
    before = datetime.now(UTC)
    assert loop.canary.dump(loop.state, str(path)) == path
    dump = kvc.load_dump(path)
    assert_same_state(dump, loop.state)
    assert (dump.violation_count > 0) == faults
    assert (dump.config, dump.capacities, dump.swa_window_size) == (CONFIG, loop.canary.capacities, 0)
    assert (dump.req_to_token, dump.req_lens, dump.expected_tokens) == (None, None, None)
    assert dump.steps == 8
    assert before.replace(microsecond=0) <= dump.created <= datetime.now(UTC)
    assert dump.environment["jax_kvcanary"] == kvc.__version__
    assert dump.environment["jax"] == jax.__version__
    assert dump.groups[0].num_slots == 67
    np.testing.assert_array_equal(dump.groups[0].records("v", "head"), dump.groups[0].v_head)
    request_rows = np.asarray(loop.state.device_state.violation_log.violation_request_rows)
    expected = [kvc.Violation.from_row(row, request_row=request_rows[i]) for i, row in enumerate(dump.violation_rows)]
    assert list(dump.violations()) == expected


def test_round_trip_of_two_groups_without_v(tmp_path):
    server = window()
    dump = kvc.load_dump(server.dump(tmp_path / "window.npz"))
    assert [group.kind for group in dump.groups] == [kvc.PoolKind.FULL, kvc.PoolKind.SWA]
    assert_same_state(dump, server.state)
    full, swa = dump.groups
    assert (full.swa_lut, full.v_head, swa.v_tail) == (None, None, None)
    np.testing.assert_array_equal(swa.swa_lut, server.lut)
    assert (full.num_slots, swa.num_slots, dump.swa_window_size) == (211, 105, 4)
    np.testing.assert_array_equal(dump.req_to_token, server.table)
    np.testing.assert_array_equal(dump.req_lens, server.lens)
    with pytest.raises(ValueError, match=r"^`half` is 'v', but the SWA group of this dump has records of k alone\.$"):
        swa.records("v", "tail")
    without_pool = kvc.load_dump(server.dump(tmp_path / "no_pool.npz", pool=False))
    assert without_pool.groups[1].swa_lut is None


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("x64", [False, True])
def test_the_table_keeps_its_values(tmp_path, server, dtype, x64):
    table = server.table.astype(dtype)
    table[2, 3] = np.iinfo(dtype).max  # makes no sense, and is kept all the same
    lens = server.lens.astype(dtype)
    lens[1] = -5
    with jax.enable_x64(x64):
        server.canary.dump(server.state, tmp_path / "d", req_to_token=table, req_lens=lens)
    dump = kvc.load_dump(tmp_path / "d")
    for got, want in ((dump.req_to_token, table), (dump.req_lens, lens)):
        np.testing.assert_array_equal(got, want)
        assert got.dtype == dtype


def test_the_table_of_expected_tokens_is_kept(tmp_path):
    config = dataclasses.replace(CONFIG, enable_verify_token_assert=True)
    loop = Loop(config, req_to_token_alloc_size=3, max_context_len=5)
    table = np.arange(15, dtype=np.int32).reshape(3, 5)
    loop.set_expected_tokens(table)
    loop.canary.dump(loop.state, tmp_path / "d")
    np.testing.assert_array_equal(kvc.load_dump(tmp_path / "d").expected_tokens, table)


def test_the_state_goes_on(tmp_path):
    """Dumping after each donated step changes nothing of the state, and of what the loop finds."""
    plain, dumping = Loop(), Loop()
    for i, batch in enumerate(serve(faults=True)):
        assert dumping.step(batch) == plain.step(batch)
        kept = host(dumping.state)
        dumping.canary.dump(dumping.state, tmp_path / f"{i}")
        for got, want in zip(jax.tree.leaves(dumping.state), jax.tree.leaves(kept), strict=True):
            assert not got.is_deleted()
            np.testing.assert_array_equal(np.asarray(got), want)
        assert_same_state(kvc.load_dump(tmp_path / f"{i}"), dumping.state)


def test_a_dump_is_one_plain_file(tmp_path, dumped, server):
    with zipfile.ZipFile(dumped) as archive:
        assert not [name for name in archive.namelist() if not name.endswith(".npy")]
    with np.load(dumped, allow_pickle=False) as archive:
        assert (str(archive["format"]), int(archive["version"])) == ("jax_kvcanary dump", 1)
        assert json.loads(str(archive["meta"]))["config"]["mode"] == "log"
        assert not [name for name in archive.files if archive[name].dtype == object]
    # A new one takes the place of an old one; one that fails leaves nothing.
    target = tmp_path / "target"
    target.write_text("old")
    server.canary.dump(server.state, target)
    assert kvc.load_dump(target).violation_count == 12
    with pytest.raises(OSError, match="directory"):
        server.canary.dump(server.state, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


# Steps of the rows.


def test_rows_have_the_steps_of_the_monitor(dumped, server):
    dump = kvc.load_dump(dumped)
    assert dump.violation_steps.tolist() == [10] * 4 + [11] * 4 + [12] * 4
    assert [violation.step for violation in dump.violations()] == dump.violation_steps.tolist()
    assert dump.violation_request_rows.tolist() == [violation.request_row for violation in server.monitor.violations]
    assert [violation.request_row for violation in dump.violations()] == dump.violation_request_rows.tolist()
    assert len(server.monitor.violations) == 12


def row(slot, **changes):
    return dataclasses.replace(kvc.Violation.from_row((2, slot, 3, 11, -1, 5, -6, 3)), **changes)


def test_steps_after_a_reset_are_those_of_the_present_log(tmp_path):
    """A fault that stays looks the same in each step: found in step 2 before the reset, in step 3 since, and in step 4, not handled yet."""
    loop = Loop()
    monitor = kvc.CanaryMonitor(loop.canary)
    loop.extend(1, 0, 5)
    loop.state = loop.canary.release(loop.state, loop.requests.table[1, 4:5], loop.pool)
    for step in (2, 3, 4):
        if step == 3:
            loop.state = loop.canary.reset_log(loop.state)
        loop.extend(1, 5, 0)
        if step < 4:
            monitor.observe(kvc.CanaryReport.of(loop.state.device_state, np.zeros(1, np.int32)), loop.state)
            monitor.flush()
    dump = kvc.load_dump(loop.canary.dump(loop.state, tmp_path / "d", violations=monitor.violations))
    each = len(dump.violation_steps) // 2
    assert each == len(monitor.violations) // 2 > 0
    assert dump.violation_steps.tolist() == [3] * each + [-1] * each


@pytest.mark.parametrize(
    ("handled", "in_ring", "steps"),
    [
        ([], [7, 8], [-1, -1]),
        ([(7, 4), (8, 5)], [7, 8], [4, 5]),
        ([(7, 4)], [7, 8, 8], [4, -1, -1]),  # newer rows, which the monitor has not handled
        ([(9, 1), (7, 4), (8, 5)], [7, 8, 9], [4, 5, -1]),  # the log was reset behind the first one
        ([(7, 1), (7, 2)], [7, 7, 7], [1, 2, -1]),
        ([(9, 1)], [7], [-1]),
        ([(7, None)], [7], [-1]),
        ([(7, 1)], [], []),
    ],
)
def test_steps_by_the_end_of_the_monitors_list(handled, in_ring, steps):
    violations = [row(slot, step=step) for slot, step in handled]
    rows = np.array([(2, slot, 3, 11, -1, 5, -6, 3) for slot in in_ring], np.int64).reshape(-1, 8)
    assert dump_module._steps_of_rows(rows, violations).tolist() == steps


# What is refused.


def call_dump(tmp_path, **changes):
    canary, state = install(make_pool(MHATokenToKVPool))
    return canary.dump(**{"state": state, "path": tmp_path / "d", **changes})


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"state": 3}, TypeError, "`state` is of type int, but it must be a CanaryState."),
        (
            {"req_to_token": np.ones((2, 3), np.int32)},
            ValueError,
            "`req_lens` is None, but it must be an array when `req_to_token` is given.",
        ),
        ({"req_lens": np.ones(2, np.int32)}, ValueError, "`req_to_token` is None, but it must be an array when `req_lens` is given."),
        (
            {"req_to_token": np.ones((2, 3), np.int16), "req_lens": np.ones(2, np.int32)},
            TypeError,
            "`req_to_token` has dtype int16, but it must be int32 or int64.",
        ),
        (
            {"req_to_token": np.ones(3, np.int32), "req_lens": np.ones(2, np.int32)},
            ValueError,
            "`req_to_token` has shape [3], but a table of slots needs shape [any, any].",
        ),
        (
            {"req_to_token": np.ones((2, 3), np.int32), "req_lens": np.ones(3, np.int32)},
            ValueError,
            "`req_lens` has shape [3], but a table of 2 request rows needs shape [2].",
        ),
        ({"violations": [row(1), "x"]}, TypeError, "`violations[1]` is of type str, but it must be a Violation."),
    ],
)
def test_what_cannot_be_dumped(tmp_path, changes, error, text):
    assert_message(partial(call_dump, tmp_path), changes, error, text)
    assert list(tmp_path.iterdir()) == []


def test_a_donated_state_cannot_be_dumped(tmp_path):
    loop = Loop()
    gone = loop.state
    loop.extend(1, 0, 3)
    text = "`state` was donated to a step, but it must be the state that the step returned."
    assert_message(loop.canary.dump, {"state": gone, "path": tmp_path / "d"}, ValueError, text)
    loop.canary.dump(loop.state, tmp_path / "d")


def test_a_traced_state_cannot_be_dumped(tmp_path):
    canary, state = install(make_pool(MHATokenToKVPool))
    with pytest.raises(TypeError, match=r"^`state` is traced, but it must be concrete: the host writes a dump, outside of jit\."):
        jax.jit(lambda state: canary.dump(state, tmp_path / "d"))(state)


# Files that are no dumps.


def rewrite(dumped, path, **members):
    """A dump with some members replaced, or left out where None."""
    with np.load(dumped) as archive:
        arrays = {name: archive[name] for name in archive.files} | members
    with path.open("wb") as file:
        np.savez(file, **{name: array for name, array in arrays.items() if array is not None})


def change_meta(dumped, **values):
    with np.load(dumped) as archive:
        return np.array(json.dumps(json.loads(str(archive["meta"])) | values))


def assert_refused(path, text):
    with pytest.raises(ValueError, match=rf"^`path` is {re.escape(repr(str(path)))}, {text}\.$"):
        kvc.load_dump(str(path))


def test_foreign_files(tmp_path):
    wanted = "but it must be a whole file that `canary.dump` wrote"
    for name, content in {"empty": b"", "text": b"kv_canary violation: ...", "pickle": b"\x80\x04]."}.items():
        (tmp_path / name).write_bytes(content)
        assert_refused(tmp_path / name, f"which is no dump, {wanted}")
    np.savez(tmp_path / "other.npz", weights=np.ones(3))
    assert_refused(tmp_path / "other.npz", f"which is no dump, {wanted}")
    with zipfile.ZipFile(tmp_path / "document.zip", "w") as archive:
        archive.writestr("word/document.xml", "<w/>")
    assert_refused(tmp_path / "document.zip", f"which is no dump, {wanted}")
    with pytest.raises(FileNotFoundError):
        kvc.load_dump(tmp_path / "missing")


def test_pickled_objects_are_not_loaded(tmp_path, dumped):
    path = tmp_path / "d"
    rewrite(dumped, path, violation_rows=np.array([{}], object))
    assert_refused(path, "a damaged dump: Object arrays cannot be loaded when allow_pickle=False")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_truncated_files(tmp_path, dumped, share):
    content = dumped.read_bytes()
    path = tmp_path / "d"
    path.write_bytes(content[: int(len(content) * share)])
    assert_refused(path, "which is cut short, but it must be a whole file that `canary.dump` wrote")


def test_a_byte_that_changed_on_the_way(tmp_path, dumped):
    content = bytearray(dumped.read_bytes())
    with zipfile.ZipFile(dumped) as archive:
        content[archive.getinfo("group0_k_tail.npy").header_offset + 1000] ^= 1
    path = tmp_path / "d"
    path.write_bytes(content)
    assert_refused(path, "a damaged dump: Bad CRC-32 for file 'group0_k_tail.npy'")


def test_newer_files(tmp_path, dumped):
    path = tmp_path / "d"
    rewrite(dumped, path, version=np.array(2), violation_rows=None)
    assert_refused(path, "a dump of version 2, but this jax_kvcanary reads none later than 1")


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ({"group0_k_head": None}, "it has no group0_k_head"),
        ({"kernel_run_counters": None}, "it has no kernel_run_counters"),
        ({"meta": None}, "'meta'"),
        ({"kernel_run_counters": np.zeros(11, np.int64)}, r"`kernel_run_counters` has shape \[11\], but a dump needs shape \[12\]"),
        ({"group0_k_head": np.zeros((3, 4), np.int64)}, r"`k_head` has shape \[3, 4\], but a group of 211 slots needs shape \[211, 4\]"),
        ({"group0_k_head": np.zeros((211, 4))}, "`group0_k_head` has dtype float64, but it must be int64"),
        ({"violation_steps": np.zeros(5, np.int64)}, r"`violation_steps` has shape \[5\], but a log of 12 rows needs shape \[12\]"),
        ({"req_lens": np.zeros(5, np.int32)}, r"`req_lens` has shape \[5\], but a table of 7 request rows needs shape \[7\]"),
        ({"violation_rows": np.full((12, 8), 99)}, "its log has a row without a known launch tag and reason"),
    ],
)
def test_damaged_files(tmp_path, dumped, members, text):
    path = tmp_path / "d"
    rewrite(dumped, path, **members)
    assert_refused(path, f"a damaged dump: {text}")


def test_unknown_settings_are_damage(tmp_path, dumped):
    path = tmp_path / "d"
    rewrite(dumped, path, meta=change_meta(dumped, config={"mode": "log", "real_kv_layers": [0], "colour": 3}))
    assert_refused(path, r"a damaged dump: .*unexpected keyword argument 'colour'")
    rewrite(dumped, path, meta=change_meta(dumped, groups=[]))
    assert_refused(path, "a damaged dump: it has no group")


@pytest.mark.parametrize("name", INCIDENTS)
def test_every_incident_can_be_dumped(tmp_path, name):
    server = INCIDENTS[name]()
    assert isinstance(server, Server)
    assert_same_state(kvc.load_dump(server.dump(tmp_path / "d")), server.state)
    assert_same_state(kvc.load_dump(server.dump(tmp_path / "d", table=False, steps=False, pool=False)), server.state)
