"""What a dump says about the slots of one group: their records, their chains, and who holds them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jax_kvcanary.constants import INT32_MAX, REQ_POOL_IDX_PADDING, TOKEN_TO_KV_SLOT_PADDING, CanaryLaunchTag, FailReason, PoolKind
from jax_kvcanary.dump import CanaryDump, DumpedGroup
from jax_kvcanary.picture.chains import Chains


@dataclass(frozen=True)
class Findings:
    """The rows of the log that belong to one group, in the order of the ring.

    Fields:
        index: int64 [m]; their places in the ring.
        rows: int64 [m, 8].
        launch: int64 [m]; rows with the same number come from one launch, as far as the ring and the steps show it.
    """

    index: np.ndarray
    rows: np.ndarray
    launch: np.ndarray

    @classmethod
    def of(cls, dump: CanaryDump, kind: PoolKind) -> Findings:
        """The rows of a group, whichever half and phase found them."""
        mine = [tag for tag in CanaryLaunchTag if tag.name.endswith(f"_{kind.name}")]
        index = np.flatnonzero(np.isin(dump.violation_rows[:, 0], mine))
        return cls(index, dump.violation_rows[index], launches(dump)[index])

    @property
    def tags(self) -> np.ndarray:
        """int64 [m]."""
        return self.rows[:, 0]

    @property
    def slots(self) -> np.ndarray:
        """int64 [m]."""
        return self.rows[:, 1]

    @property
    def reasons(self) -> np.ndarray:
        """int64 [m]; bits of FailReason."""
        return self.rows[:, -1]


def launches(dump: CanaryDump) -> np.ndarray:
    """A number for each row of the ring, int64 [n], that goes up where the launch tag or the step changes."""
    tags, steps = dump.violation_rows[:, 0], dump.violation_steps
    changes = (np.diff(tags) != 0) | (np.diff(steps) != 0)
    return np.concatenate([np.zeros(min(len(tags), 1), np.int64), np.cumsum(changes)])


@dataclass(frozen=True)
class Table:
    """What the engine's table has for the live rows, in a group's own slots, row after row.

    Fields:
        num_slots: slots of the group.
        slots: int64 [entries]; as the table has them, so that not all of them need exist.
        rows: int64 [entries]; the row of each.
        positions: int64 [entries]; the position of each.
        lens: int64 [max_reqs]; entries of each row.
    """

    num_slots: int
    slots: np.ndarray
    rows: np.ndarray
    positions: np.ndarray
    lens: np.ndarray

    @classmethod
    def of(cls, dump: CanaryDump, group: DumpedGroup) -> Table | None:
        """The table of a dump, or None where the dump has none, or has no way to tell an SWA group's slots."""
        if dump.req_to_token is None or dump.req_lens is None:
            return None
        if group.kind is PoolKind.SWA and group.swa_lut is None:
            return None
        lens = np.clip(dump.req_lens, 0, dump.req_to_token.shape[1]).astype(np.int64)
        lens[REQ_POOL_IDX_PADDING : REQ_POOL_IDX_PADDING + 1] = 0
        rows = np.repeat(np.arange(len(lens)), lens)
        positions = np.arange(len(rows)) - np.repeat(np.cumsum(lens) - lens, lens)
        slots = dump.req_to_token[rows, positions].astype(np.int64)
        if group.swa_lut is not None:  # as the plan translates them
            inside = (slots >= 0) & (slots < len(group.swa_lut))
            slots[inside] = np.maximum(group.swa_lut[slots[inside]], 0)
            slots[~inside & (slots >= 0)] = INT32_MAX
        return cls(group.num_slots, np.minimum(slots, INT32_MAX), rows, positions, lens)

    @property
    def exists(self) -> np.ndarray:
        """Whether the slot of each entry has a record that means something: bool [entries]."""
        return (self.slots > TOKEN_TO_KV_SLOT_PADDING) & (self.slots < self.num_slots)

    def holders(self, slot: int) -> list[tuple[int, int]]:
        """The live (row, position) pairs whose entry is a slot."""
        at = self.slots == slot
        return list(zip(self.rows[at].tolist(), self.positions[at].tolist(), strict=True))

    def owners(self) -> np.ndarray:
        """The live row that holds each slot, int64 [num_slots], the lowest of several, -1 where none does."""
        owners = np.full(self.num_slots, -1, np.int64)
        owners[self.slots[self.exists][::-1]] = self.rows[self.exists][::-1]
        return owners

    def slots_of_row(self, row: int) -> np.ndarray:
        """The entries of a row, int64 [its length]."""
        end = int(self.lens[: row + 1].sum())
        return self.slots[end - int(self.lens[row]) : end]

    def slot(self, row: int, position: int) -> int | None:
        """The entry of a live position; None outside."""
        return int(self.slots_of_row(row)[position]) if 0 <= position < self.lens[row] else None


@dataclass(frozen=True)
class Pool:
    """One half of a group, as a picture looks at it."""

    dump: CanaryDump
    group: DumpedGroup
    half: str
    phase: str
    chains: Chains
    findings: Findings
    table: Table | None

    @classmethod
    def of(cls, dump: CanaryDump, kind: PoolKind | None = None, half: str | None = None) -> Pool:
        """A group and half of a dump; unless told, those of the first finding.

        Raises:
            ValueError: the dump has no such group, or the group no such half.
        """
        first = [CanaryLaunchTag(tag).name for tag in dump.violation_rows[:1, 0].tolist()]
        kinds = [group.kind for group in dump.groups]
        if kind is None:
            kind = next((k for k in kinds if first and first[0].endswith(k.name)), kinds[0])
        if kind not in kinds:
            raise ValueError(f"`group` is {kind.name}, but this dump has the groups {', '.join(k.name for k in kinds)}.")
        group = dump.groups[kinds.index(kind)]
        findings = Findings.of(dump, kind)
        names = [CanaryLaunchTag(tag).name.lower() for tag in findings.tags.tolist()]
        if half is None:
            half = next((name.split("_")[1] for name in names), "k") if group.v_tail is not None else "k"
        # A sweep looks at what the tail wrote.
        phase = next((name.split("_")[0] for name in names if name.split("_")[1] == half), "tail")
        phase = "head" if phase == "head" else "tail"
        return cls(dump, group, half, phase, Chains.of(group.records(half, phase)), findings, Table.of(dump, group))

    @property
    def num_slots(self) -> int:
        """Slots of the group."""
        return self.group.num_slots

    def exists(self, slot: int | None) -> bool:
        """Whether a slot has a record that means something."""
        return slot is not None and TOKEN_TO_KV_SLOT_PADDING < slot < self.num_slots

    def reasons_of_slot(self, slot: int) -> FailReason:
        """All reasons that the log has for a slot."""
        return FailReason(int(np.bitwise_or.reduce(self.findings.reasons[self.findings.slots == slot], initial=0)))

    def expected_token(self, row: int | None, position: int | None) -> int | None:
        """What the state's table of expected tokens has for a request's position, or None."""
        table = self.dump.expected_tokens
        if table is None or row is None or position is None:
            return None
        column = position + self.group.kv_token_id_vs_position_offset
        if row >= len(table) or not 0 <= column < table.shape[1] or table[row, column] == -1:
            return None
        return int(table[row, column])
