"""A canary's state in a file, to look at an incident later: on another machine, without the engine, without a GPU.

The file is a NumPy archive (``.npz``) without pickled objects. ``format`` and ``version`` say what it is, ``meta`` is a JSON text with
all that is no array, and every other member is an array of :class:`CanaryDump` or of one of its groups, by name.
"""

from __future__ import annotations

import dataclasses
import json
import os
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jax_kvcanary._checks import ArrayLike, as_array, check_dtype, check_shape, check_type
from jax_kvcanary.buffers import CanaryState
from jax_kvcanary.config import CanaryConfig, CanaryLaunchCapacities
from jax_kvcanary.constants import FAIL_REASON_COLUMNS, NUM_LAUNCH_TAGS, VIOLATION_FIELDS, FailReason, PoolKind
from jax_kvcanary.reference.hashes import slot_records, to_signed
from jax_kvcanary.state import ViolationLog, forward_steps, to_int64
from jax_kvcanary.violations import Violation

if TYPE_CHECKING:
    from jax_kvcanary.canary import Canary

FORMAT = "jax_kvcanary dump"

#: Version of the files that are written; those of a later one are refused.
VERSION = 1

# What reading a file that is damaged, or crafted, can raise.
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, KeyError, TypeError, ValueError, AttributeError, NotImplementedError)

_BUFFERS = ("k_head", "k_tail", "v_head", "v_tail")

# Arrays of a dump and of a group: dtypes and shape, None for any length. Those of the last set may be absent.
_Layout = dict[str, tuple[Any, tuple[int | None, ...]]]
_INDICES = (np.int32, np.int64)
_ARRAYS: _Layout = {
    "violation_rows": (np.int64, (None, VIOLATION_FIELDS)),
    "violation_steps": (np.int64, (None,)),
    "violation_request_rows": (np.int64, (None,)),
    "kernel_run_counters": (np.int64, (NUM_LAUNCH_TAGS,)),
    "slot_run_counters": (np.int64, (NUM_LAUNCH_TAGS,)),
    "fail_reason_counters": (np.uint32, (NUM_LAUNCH_TAGS, FAIL_REASON_COLUMNS)),
    "verify_skip_counters": (np.uint32, (NUM_LAUNCH_TAGS,)),
    "expected_tokens": (np.int32, (None, None)),
    "req_to_token": (_INDICES, (None, None)),
    "req_lens": (_INDICES, (None,)),
}
_GROUP_ARRAYS: _Layout = {
    **dict.fromkeys(_BUFFERS, (np.int64, (None, 4))),
    "swa_lut": (_INDICES, (None,)),
}
_OPTIONAL = {"expected_tokens", "req_to_token", "req_lens", "v_head", "v_tail", "swa_lut"}


@dataclass(frozen=True)
class DumpedGroup:
    """The records of one group of a dump.

    Fields:
        kind: FULL or SWA.
        k_head, k_tail: int64 [num_slots, 4]; token, position, hash of the predecessor's record, hash of the real KV.
        v_head, v_tail: the same for V, or None for a pool without a V half.
        swa_lut: int32 or int64 [full slots]; this group's slot of each full-pool slot, 0 or negative where it has none. None where the dump
            was written without the pool, or where the group has no such table.
        kv_token_id_vs_position_offset: the slot of position p holds the token of position p plus this.
    """

    kind: PoolKind
    k_head: np.ndarray
    k_tail: np.ndarray
    v_head: np.ndarray | None = None
    v_tail: np.ndarray | None = None
    swa_lut: np.ndarray | None = None
    kv_token_id_vs_position_offset: int = 0

    @property
    def num_slots(self) -> int:
        """Slots of the group, the padding slot 0 included."""
        return len(self.k_tail)

    def records(self, half: str, phase: str) -> np.ndarray:
        """The records of a half ("k" or "v") behind a phase ("head" or "tail"); ValueError where there is no such half."""
        records: np.ndarray | None = getattr(self, f"{half}_{phase}")
        if records is None:
            raise ValueError(f"`half` is {half!r}, but the {self.kind.name} group of this dump has records of k alone.")
        return records


@dataclass(frozen=True)
class CanaryDump:
    """What a dump holds, as NumPy arrays.

    Fields:
        created: when the dump was written, UTC.
        environment: versions and device at that time, by name.
        config, capacities, swa_window_size: those of the canary.
        groups: the records.
        violation_rows: int64 [n, 8]; the rows of the ring, in the order of the contract's fields.
        violation_count: violations so far, those that found the ring full included.
        violation_steps: int64 [n]; the step that first showed each row, -1 where it is not known.
        violation_request_rows: int64 [n]; the row of ``req_to_token`` that each row belongs to, -1 where it is not known.
        kernel_run_counters, slot_run_counters: int64 [12]; see :class:`CanaryDeviceState`, like the two that follow.
        fail_reason_counters: uint32 [12, 8].
        verify_skip_counters: uint32 [12].
        expected_tokens: int32 [rows, width], the state's ``req_to_verify_expected_tokens``, or None.
        req_to_token: int32 or int64 [max_reqs, max_seq_len], or None; the engine's table as it was given.
        req_lens: int32 or int64 [max_reqs], or None; tokens of each row that are in the cache, 0 where the row is not live.
    """

    created: datetime
    environment: Mapping[str, str]
    config: CanaryConfig
    capacities: CanaryLaunchCapacities
    swa_window_size: int
    groups: tuple[DumpedGroup, ...]
    violation_rows: np.ndarray
    violation_count: int
    violation_steps: np.ndarray
    violation_request_rows: np.ndarray
    kernel_run_counters: np.ndarray
    slot_run_counters: np.ndarray
    fail_reason_counters: np.ndarray
    verify_skip_counters: np.ndarray
    expected_tokens: np.ndarray | None = None
    req_to_token: np.ndarray | None = None
    req_lens: np.ndarray | None = None

    @property
    def steps(self) -> int:
        """Forward passes so far."""
        return forward_steps(self.kernel_run_counters)

    def violations(self) -> tuple[Violation, ...]:
        """The rows of the ring, decoded."""
        steps = [None if step < 0 else step for step in self.violation_steps.tolist()]
        return tuple(
            Violation.from_row(row, step=step, request_row=request_row)
            for row, step, request_row in zip(self.violation_rows, steps, self.violation_request_rows, strict=True)
        )


def write_dump(
    path: str | os.PathLike[str],
    canary: Canary,
    state: CanaryState,
    *,
    req_to_token: ArrayLike | None = None,
    req_lens: ArrayLike | None = None,
    pool: Any = None,
    violations: Sequence[Violation] = (),
) -> Path:
    """Write a dump; see :meth:`Canary.dump`."""
    path = Path(path)
    _check_alive(state)
    if (req_to_token is None) != (req_lens is None):
        missing, given = ("req_lens", "req_to_token") if req_lens is None else ("req_to_token", "req_lens")
        raise ValueError(f"`{missing}` is None, but it must be an array when `{given}` is given.")
    log, device_state = state.device_state.violation_log, state.device_state
    rows = log.rows()
    arrays: dict[str, ArrayLike | None] = {
        "violation_rows": rows,
        "violation_steps": _steps_of_rows(rows, violations, resets=0 if log.reset_count is None else int(np.asarray(log.reset_count)[0])),
        "violation_request_rows": _request_rows(log),
        "kernel_run_counters": to_int64(device_state.kernel_run_counters),
        "slot_run_counters": to_int64(device_state.slot_run_counters),
        "fail_reason_counters": device_state.fail_reason_counters,
        "verify_skip_counters": device_state.verify_skip_counters,
        "expected_tokens": device_state.req_to_verify_expected_tokens,
    }
    if req_to_token is not None:
        table = _host_integers(req_to_token, "req_to_token", (None, None), "a table of slots")
        lens = _host_integers(req_lens, "req_lens", (len(table),), f"a table of {len(table)} request rows")
        arrays |= {"req_to_token": table, "req_lens": lens}
    for i, group in enumerate(state.groups):
        for name in _BUFFERS:
            buffer = getattr(group, name)
            arrays[f"group{i}_{name}"] = None if buffer is None else slot_records(np.asarray(buffer))
        if pool is not None and group.swa_index_lut is not None:
            arrays[f"group{i}_swa_lut"] = _host_integers(group.lut(pool), "pool", (None,), "the pool's table of window slots")
    meta = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": _environment(state),
        "config": dataclasses.asdict(canary.config),
        "capacities": dataclasses.asdict(canary.capacities),
        "swa_window_size": canary.swa_window_size,
        "violation_count": log.count(),
        "groups": [
            {"kind": group.kind.name, "kv_token_id_vs_position_offset": group.kv_token_id_vs_position_offset} for group in state.groups
        ],
    }
    members: dict[str, Any] = {name: np.asarray(array) for name, array in arrays.items() if array is not None}
    members |= {"format": np.array(FORMAT), "version": np.array(VERSION), "meta": np.array(json.dumps(meta))}
    part = path.with_name(path.name + ".part")  # whoever finds `path` finds all of it
    try:
        with part.open("wb") as file:
            np.savez(file, **members)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def load_dump(path: str | os.PathLike[str]) -> CanaryDump:
    """Read a file that :meth:`Canary.dump` wrote.

    Args:
        path: the file.

    Raises:
        OSError: the file cannot be read. ValueError: it is no dump, it is damaged or cut short, or a later version wrote it.
    """
    name = os.fspath(path)
    wanted = "it must be a whole file that `canary.dump` wrote"
    with open(path, "rb") as file:
        if not zipfile.is_zipfile(file):
            file.seek(0)
            cut = file.read(4) == b"PK\x03\x04"
            raise ValueError(f"`path` is {name!r}, which {'is cut short' if cut else 'is no dump'}, but {wanted}.")
        file.seek(0)
        try:
            with np.load(file, allow_pickle=False) as archive:
                is_dump = "format" in archive.files and str(archive["format"]) == FORMAT
                version = int(archive["version"]) if is_dump else 0
                members = {member: archive[member] for member in archive.files} if is_dump and version <= VERSION else {}
        except _DAMAGE as error:
            raise ValueError(f"`path` is {name!r}, a damaged dump: {str(error).rstrip('.')}.") from error
    if not is_dump:
        raise ValueError(f"`path` is {name!r}, which is no dump, but {wanted}.")
    if version > VERSION:
        raise ValueError(f"`path` is {name!r}, a dump of version {version}, but this jax_kvcanary reads none later than {VERSION}.")
    try:
        return _from_members(members)
    except _DAMAGE as error:
        raise ValueError(f"`path` is {name!r}, a damaged dump: {str(error).rstrip('.')}.") from error


def _from_members(members: dict[str, np.ndarray]) -> CanaryDump:
    meta = json.loads(str(members["meta"]))
    groups = tuple(
        DumpedGroup(
            kind=PoolKind[group["kind"]],
            kv_token_id_vs_position_offset=group["kv_token_id_vs_position_offset"],
            **_checked(members, _GROUP_ARRAYS, f"group{i}_"),
        )
        for i, group in enumerate(meta["groups"])
    )
    dump = CanaryDump(
        created=datetime.fromisoformat(meta["created"]),
        environment=meta["environment"],
        config=CanaryConfig(**{**meta["config"], "real_kv_layers": tuple(meta["config"]["real_kv_layers"])}),
        capacities=CanaryLaunchCapacities(**meta["capacities"]),
        swa_window_size=meta["swa_window_size"],
        violation_count=meta["violation_count"],
        groups=groups,
        **_checked(members, _ARRAYS, ""),
    )
    if not groups:
        raise ValueError("it has no group")
    num_rows = len(dump.violation_rows)
    for name in ("violation_steps", "violation_request_rows"):
        check_shape(getattr(dump, name), name, (num_rows,), f"a log of {num_rows} rows")
    if dump.req_to_token is not None:
        check_shape(dump.req_lens, "req_lens", (len(dump.req_to_token),), f"a table of {len(dump.req_to_token)} request rows")
    for group in groups:
        for name in _BUFFERS:
            if getattr(group, name) is not None:
                check_shape(getattr(group, name), name, (group.num_slots, 4), f"a group of {group.num_slots} slots")
    tags, reasons = dump.violation_rows[:, 0], dump.violation_rows[:, -1]
    if ((tags < 0) | (tags >= NUM_LAUNCH_TAGS) | (reasons < 1) | (reasons >= 2 * max(FailReason))).any():
        raise ValueError("its log has a row without a known launch tag and reason")
    return dump


def _checked(members: dict[str, np.ndarray], wanted: _Layout, prefix: str) -> dict[str, Any]:
    """The members of the names wanted, without those that are absent and may be."""
    found = {}
    for name, (dtypes, shape) in wanted.items():
        if prefix + name in members:
            found[name] = members[prefix + name]
            check_dtype(found[name], prefix + name, *(dtypes if isinstance(dtypes, tuple) else (dtypes,)))
            check_shape(found[name], prefix + name, shape, "a dump")
        elif name not in _OPTIONAL:
            raise ValueError(f"it has no {prefix + name}")
    return found


def _check_alive(state: CanaryState) -> None:
    for leaf in jax.tree.leaves(state):
        if isinstance(leaf, jax.core.Tracer):
            raise TypeError("`state` is traced, but it must be concrete: the host writes a dump, outside of jit.")
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise ValueError("`state` was donated to a step, but it must be the state that the step returned.")


def _host_integers(value: ArrayLike, name: str, shape: tuple[int | None, ...], meaning: str) -> np.ndarray:
    """An int32 or int64 array, on the host. What it holds is not checked: a dump must work when it makes no sense."""
    value = as_array(value)
    check_dtype(value, name, *_INDICES)
    check_shape(value, name, shape, meaning)
    return np.asarray(value)


def _steps_of_rows(rows: np.ndarray, violations: Sequence[Violation], *, resets: int = 0) -> np.ndarray:
    """The step of each row of the ring, int64 [n], -1 where none of the violations handled is this row.

    The monitor handles rows in order, some may be newer than what it saw, and it may have seen a log that was reset since. So the end of
    its list is the beginning of the ring. Of rows from before a reset, which may look the same, a monitor's say that they are.
    """
    for i, violation in enumerate(violations):
        check_type(violation, f"violations[{i}]", Violation)
    violations = [violation for violation in violations if violation.log_place is None or violation.log_place[0] == resets]
    known = np.array([_row(violation) for violation in violations], np.int64).reshape(-1, VIOLATION_FIELDS)
    steps = np.full(len(rows), -1, np.int64)
    for count in range(min(len(known), len(rows)), 0, -1):
        if (known[-count] == rows[0]).all() and (known[-count:] == rows[:count]).all():
            steps[:count] = [-1 if violation.step is None else violation.step for violation in violations[-count:]]
            break
    return steps


def _row(violation: Violation) -> list[int]:
    """The eight fields of the ring that a violation was decoded from."""
    return [
        violation.launch_tag,
        violation.slot_idx,
        violation.position,
        violation.stored_token,
        violation.expected_token,
        to_signed(violation.stored_chain_hash),
        to_signed(violation.expected_aux),
        violation.fail_reason,
    ]


def _request_rows(log: ViolationLog) -> np.ndarray:
    """The request row of each row of the ring, int64 [n], -1 where the log does not say."""
    rows = log.violation_request_rows
    return np.full(len(log.rows()), -1, np.int64) if rows is None else np.asarray(rows)[: log.count()].astype(np.int64)


def _environment(state: CanaryState) -> dict[str, str]:
    """What the dump was written with."""
    import jax_kvcanary  # not before: the package imports this module

    devices = sorted({str(device) for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array) for device in leaf.devices()})
    return {"jax_kvcanary": jax_kvcanary.__version__, "jax": jax.__version__, "numpy": np.__version__, "devices": ", ".join(devices)}
