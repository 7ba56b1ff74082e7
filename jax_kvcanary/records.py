"""Records on the move: taken out of a canary, put into another one or elsewhere in the same, and wiped where slots are freed.

A record names no slot: it holds a token, a position and two hashes. So it may follow its KV to any slot of any pool, and the chain of
a request goes on there, as long as every record of it goes along.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kvcanary._checks import ArrayLike, check_array, check_dtype, check_enum, check_shape, check_type, index_array
from jax_kvcanary.buffers import CanaryBufferGroup, CanaryState
from jax_kvcanary.constants import CANARY_SLOT_BYTES, FRESH_RECORD_BYTE, TOKEN_TO_KV_SLOT_PADDING, CanaryLaunchTag, PoolKind
from jax_kvcanary.log import log_slots_out_of_range
from jax_kvcanary.plan import translate_slots
from jax_kvcanary.state import CanaryDeviceState

_MAGIC = b"KVCANREC"
_VERSION = 1
_HEADER = struct.Struct("<8sHHQ")  # magic, version, groups, records a group
_GROUP_HEADER = struct.Struct("<BBxxi")  # kind, halves, token offset
_HALVES = ("k", "v")


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("k_head", "k_tail", "v_head", "v_tail"),
    meta_fields=("kind", "kv_token_id_vs_position_offset"),
)
@dataclass(frozen=True, kw_only=True)
class GroupRecords:
    """Records of one group, on the device or on the host.

    Fields:
        kind: the group they are of (static).
        k_head, k_tail: uint8 [n, 32].
        v_head, v_tail: the same for V, or None for a group without a V half.
        kv_token_id_vs_position_offset: of the group they are of (static).
    """

    kind: PoolKind
    k_head: ArrayLike
    k_tail: ArrayLike
    v_head: ArrayLike | None = None
    v_tail: ArrayLike | None = None
    kv_token_id_vs_position_offset: int = 0

    @property
    def has_v_half(self) -> bool:
        """Whether V has records of its own."""
        return self.v_head is not None or self.v_tail is not None

    @property
    def arrays(self) -> dict[str, ArrayLike]:
        """The arrays there are, by the name of the canary buffer they belong to."""
        arrays = {"k_head": self.k_head, "k_tail": self.k_tail}
        return {**arrays, "v_head": self.v_head, "v_tail": self.v_tail} if self.has_v_half else arrays


@partial(jax.tree_util.register_dataclass, data_fields=("groups",), meta_fields=())
@dataclass(frozen=True)
class CanaryRecords:
    """Records of n slots, for each group of the canary they were taken from. A pytree: ``jax.tree.map`` cuts or pads it.

    Fields:
        groups: see :class:`GroupRecords`.
    """

    groups: tuple[GroupRecords, ...]

    @property
    def num_slots(self) -> int:
        """How many slots the records are of."""
        return int(self.groups[0].k_head.shape[0]) if self.groups else 0

    def on_host(self) -> CanaryRecords:
        """The records in NumPy arrays. Waits for the device."""
        return jax.device_get(self)

    def to_bytes(self) -> bytes:
        """The records as bytes to store or send: a header, then the arrays, 64 or 128 bytes a slot and group. Waits for the device.

        Raises:
            TypeError: an array of another dtype. ValueError: an array of another shape.
        """
        if self.groups:
            check_array(self.groups[0].k_head, "records.groups[0].k_head")
        n = self.num_slots
        _check_lengths(self, n)
        parts = [_HEADER.pack(_MAGIC, _VERSION, len(self.groups), n)]
        for group in self.groups:
            parts.append(_GROUP_HEADER.pack(group.kind, 2 if group.has_v_half else 1, group.kv_token_id_vs_position_offset))
        parts += [np.asarray(array).tobytes() for group in self.groups for array in group.arrays.values()]
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> CanaryRecords:
        """The inverse of :meth:`to_bytes`, in read-only NumPy arrays.

        Nothing is trusted but the form: what records hold is checked by the steps that verify them.

        Raises:
            TypeError: not bytes. ValueError: not records, of another version, or cut short.
        """
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise TypeError(f"`data` is of type {type(data).__name__}, but it must be bytes, a bytearray or a memoryview.")
        data = bytes(data)  # the caller may use its buffer again
        if not data.startswith(_MAGIC[: len(data)]):
            raise ValueError(f"`data` begins with {data[: len(_MAGIC)]!r}, but the records of a canary begin with {_MAGIC!r}.")
        _check_size(data, _HEADER.size, "its header has")
        _, version, num_groups, n = _HEADER.unpack_from(data)
        if version != _VERSION:
            raise ValueError(f"`data` is in version {version} of its format, but this package reads version {_VERSION}.")
        start = _HEADER.size + num_groups * _GROUP_HEADER.size
        _check_size(data, start, f"its header and {num_groups} groups have")
        headers = list(_GROUP_HEADER.iter_unpack(data[_HEADER.size : start]))
        for kind, halves, _ in headers:
            if kind not in list(PoolKind) or halves not in (1, 2):
                raise ValueError(
                    f"`data` has a group of kind {kind} with {halves} halves, but a group is of kind 0 (FULL) or 1 (SWA) with 1 or 2."
                )
        size = n * CANARY_SLOT_BYTES
        total = start + sum(2 * halves for _, halves, _ in headers) * size
        _check_size(data, total, f"{n} records of its groups end at")
        if len(data) > total:
            raise ValueError(f"`data` has {len(data)} bytes, but {n} records of its groups end at {total} bytes.")
        groups, at = [], start
        for kind, halves, offset in headers:
            arrays = {}
            for half in _HALVES[:halves]:
                for phase in ("head", "tail"):
                    arrays[f"{half}_{phase}"] = np.frombuffer(data, np.uint8, size, at).reshape(n, CANARY_SLOT_BYTES)
                    at += size
            groups.append(GroupRecords(kind=PoolKind(kind), kv_token_id_vs_position_offset=offset, **arrays))
        return cls(tuple(groups))


def extract_records(state: CanaryState, slots: ArrayLike, *, pool: Any = None) -> CanaryRecords:
    """The records of slots, to go wherever the slots' KV goes: another pool, the host, other slots of the same pool.

    The state stays as it is: release the slots if they are freed. Take the records out when the step that wrote them last is behind,
    and before the pool's SWA table forgets the slots.

    Args:
        state: the canary's state.
        slots: int32 or int64 [n] full-pool slots, an SWA group's translated through its table. Negative ones and slot 0 pad the array
            and give fresh records, as do slots that the table maps to 0, and indices past the pool or the table: a fresh
            record is reported by the step that verifies it, wherever it was moved.
        pool: the live pool; required when a group has an SWA table, and only that is read.

    Returns:
        The records, on the device.

    Raises:
        TypeError: an argument of another type or dtype. ValueError: another rank, or no pool where a group needs its table.
    """
    check_type(state, "state", CanaryState)
    slots = index_array(slots, "slots", (None,), "full-pool slots to extract")
    groups = []
    for group in state.groups:
        own = _own_slots(group, slots, pool)
        buffers = {name: jnp.asarray(getattr(group, name)) for name in group.buffer_names}
        arrays = {name: buffer.at[_inside(buffer, own)].get(mode="fill", fill_value=FRESH_RECORD_BYTE) for name, buffer in buffers.items()}
        groups.append(GroupRecords(kind=group.kind, kv_token_id_vs_position_offset=group.kv_token_id_vs_position_offset, **arrays))
    return CanaryRecords(tuple(groups))


def insert_records(state: CanaryState, slots: ArrayLike, records: CanaryRecords, *, pool: Any = None) -> CanaryState:
    """Put records at slots whose KV was moved there. Call it before the first step that reads or extends them.

    Inside one pool: take all records out before putting any back, then release the slots that nobody has any more, and only those. In
    this order one donated program does it without a copy of a buffer.

    Args:
        state: the canary's state; updated in place under donation.
        slots: int32 or int64 [n] full-pool slots, each at most once, an SWA group's translated through its table. Negative ones, slot
            0 and slots that the table maps to 0 are skipped. An index past the pool or the table is a finding,
            SLOT_OUT_OF_RANGE under HEAD_K of the group, and the next report has it.
        records: n records, JAX or NumPy arrays, of a canary with the same groups and halves.
        pool: the live pool with the table as it is for the new slots; required when a group has an SWA table, and only that is read.

    Danger:
        Both canaries must hash the same layers with the same mode, and each token must have the same bytes in both pools. Otherwise
        every step reports the records as changed KV.

    Raises:
        TypeError: an argument of another type or dtype. ValueError: another rank or length, other groups, or no pool where a group
            needs its table.
    """
    check_type(state, "state", CanaryState)
    check_type(records, "records", CanaryRecords, ", as extract_records returns it")
    slots = index_array(slots, "slots", (None,), "full-pool slots to insert records at")
    theirs, ours = _describe(records.groups), _describe(state.groups)
    if theirs != ours:
        raise ValueError(f"`records` is of a canary with {theirs}, but this canary has {ours}.")
    _check_lengths(records, slots.shape[0])
    return _store(state, slots, pool, [group.arrays for group in records.groups])


def release_records(state: CanaryState, slots: ArrayLike, pool: Any, *, kinds: Sequence[PoolKind] | None = None) -> CanaryState:
    """The work of :meth:`jax_kvcanary.Canary.release`."""
    check_type(state, "state", CanaryState)
    slots = index_array(slots, "slots", (None,), "full-pool slots to release")
    have = [group.kind for group in state.groups]
    if kinds is None:
        kinds = have
    elif not isinstance(kinds, (tuple, list)):
        raise TypeError(f"`kinds` is {kinds!r} of type {type(kinds).__name__}, but it must be None or a tuple of PoolKind.")
    kinds = [check_enum(kind, f"kinds[{i}]", PoolKind) for i, kind in enumerate(kinds)]
    for kind in kinds:
        if kind not in have:
            raise ValueError(f"`kinds` names {kind.name}, but this canary has the groups {', '.join(each.name for each in have)}.")
    fresh = jnp.uint8(FRESH_RECORD_BYTE)
    return _store(state, slots, pool, [dict.fromkeys(group.buffer_names, fresh) if group.kind in kinds else {} for group in state.groups])


def _store(state: CanaryState, slots: jax.Array, pool: Any, contents: Sequence[Mapping[str, ArrayLike]]) -> CanaryState:
    """Each group's contents, by buffer name, at its own numbering of the slots; those past its end go to the log.

    A group without contents stays as it is.
    """
    groups, device_state = [], state.device_state
    for group, arrays in zip(state.groups, contents, strict=True):
        if arrays:
            group, device_state = _store_in_group(group, device_state, _own_slots(group, slots, pool), arrays)
        groups.append(group)
    return CanaryState(tuple(groups), device_state)


def _store_in_group(
    group: CanaryBufferGroup, device_state: CanaryDeviceState, own: jax.Array, arrays: Mapping[str, ArrayLike]
) -> tuple[CanaryBufferGroup, CanaryDeviceState]:
    stored = {}
    for name, content in arrays.items():
        buffer = jnp.asarray(getattr(group, name))
        stored[name] = buffer.at[_inside(buffer, own)].set(content, mode="drop")
    # Records are moved and released between steps, so a bad slot stands with what the next step finds first.
    tag = CanaryLaunchTag[f"HEAD_K_{group.kind.name}"]
    return group.with_buffers(**stored), log_slots_out_of_range(device_state, own, group.k_head.shape[0], tag=tag)


def _own_slots(group: CanaryBufferGroup, slots: jax.Array, pool: Any) -> jax.Array:
    """Full-pool slots in the group's own numbering, int32 [n]; padding stays padding, whatever the table has for slot 0."""
    if group.swa_index_lut is not None and pool is None:
        raise ValueError(f"`pool` is None, but it must be the live pool, since the {group.kind.name} group has a table of slots there.")
    return translate_slots(jnp.where(slots == TOKEN_TO_KV_SLOT_PADDING, -1, slots), group.lut(pool))


def _inside(buffer: jax.Array, slots: jax.Array) -> jax.Array:
    """The slots that have a record in the buffer; the index past its end in place of all others, which a scatter drops."""
    num_slots = buffer.shape[0]
    return jnp.where((slots > TOKEN_TO_KV_SLOT_PADDING) & (slots < num_slots), slots, num_slots)


def _describe(groups: Sequence[CanaryBufferGroup | GroupRecords]) -> str:
    """Everything in which records and the groups that take them must agree."""
    each = [
        f"{group.kind.name} ({'K and V' if group.has_v_half else 'K alone'}, token offset {group.kv_token_id_vs_position_offset})"
        for group in groups
    ]
    return f"the groups {', '.join(each)}" if each else "no groups"


def _check_lengths(records: CanaryRecords, n: int) -> None:
    """Check every array of the records: uint8 [n, 32]."""
    for i, group in enumerate(records.groups):
        for name, array in group.arrays.items():
            check_dtype(array, f"records.groups[{i}].{name}", np.uint8)
            check_shape(array, f"records.groups[{i}].{name}", (n, CANARY_SLOT_BYTES), f"one record for each of {n} slots")


def _check_size(data: bytes, size: int, what: str) -> None:
    if len(data) < size:
        raise ValueError(f"`data` has {len(data)} bytes, but {what} {size} bytes: it was cut short.")
