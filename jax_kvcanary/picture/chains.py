"""Chains of records: which slot follows which, found out from the records alone.

A record names its predecessor by hash, not by slot. So the predecessor is the slot whose record has that hash, and whole requests come
back without the engine's table. Requests that share a prefix branch off it: the records of a pool are a forest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jax_kvcanary.constants import FRESH_RECORD_BYTE, TOKEN_TO_KV_SLOT_PADDING
from jax_kvcanary.reference.hashes import ANCHOR_HASH, POSITION, PREV_HASH, record_hashes


@dataclass(frozen=True)
class HashIndex:
    """Slots by hash, and among those of one hash by number.

    Fields:
        size: slots of the buffer.
        values: uint64 [m], ascending; every hash that a slot has.
        counts: int64 [m]; how many slots have each.
        keys: int64, ascending; ``place in values * size + slot`` of every slot.
    """

    size: int
    values: np.ndarray
    counts: np.ndarray
    keys: np.ndarray

    @classmethod
    def of(cls, hashes: np.ndarray, slots: np.ndarray) -> HashIndex:
        """The index of some slots of a buffer whose hashes are uint64 [n]."""
        values, place, counts = np.unique(hashes[slots], return_inverse=True, return_counts=True)
        return cls(len(hashes), values, counts, np.sort(place.reshape(-1) * len(hashes) + slots))

    def find(self, words: np.ndarray, near: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Slots by hash.

        Args:
            words: int64 or uint64 [m].
            near: int64 [m]; where several slots have a hash, the one nearest to this slot is taken, the lower one of two.

        Returns:
            int64 [m], the slots, -1 where no slot has the hash; and bool [m], whether several have it.
        """
        slots, several = np.full(len(words), -1, np.int64), np.zeros(len(words), bool)
        if not len(self.values):
            return slots, several
        words = words.view(np.uint64)
        place = np.minimum(np.searchsorted(self.values, words), len(self.values) - 1)
        known = np.flatnonzero(self.values[place] == words)
        place, near = place[known], near[known]
        above = np.searchsorted(self.keys, place * self.size + near)
        below, above = np.maximum(above - 1, 0), np.minimum(above, len(self.keys) - 1)
        distance = [
            np.where(self.keys[at] // self.size == place, np.abs(self.keys[at] % self.size - near), self.size + 1) for at in (below, above)
        ]
        slots[known] = self.keys[np.where(distance[0] <= distance[1], below, above)] % self.size
        several[known] = self.counts[place] > 1
        return slots, several


@dataclass(frozen=True)
class Chains:
    """Predecessors of all slots of a buffer, and what follows from them.

    A slot's *branch* is the slot at which its request leaves a longer one, or where its chain begins: two slots of one branch belong to
    the same request. Where a branch forks, the longest continuation keeps its name.

    Fields:
        records: int64 [n, 4].
        hashes: uint64 [n]; the hash behind each record.
        written: bool [n]; neither the padding slot nor a fresh record.
        parent: int64 [n]; the slot before each one, -1 where there is none.
        anchored: bool [n]; the first of its request.
        ambiguous: bool [n]; several slots hold the same predecessor, and ``parent`` is the nearest one.
        branch: int64 [n]; -1 for slots that are not written.
        next_slot: int64 [n]; the longest continuation of each slot, -1 where its request ends.
        index: finds written slots by hash.
    """

    records: np.ndarray
    hashes: np.ndarray
    written: np.ndarray
    parent: np.ndarray
    anchored: np.ndarray
    ambiguous: np.ndarray
    branch: np.ndarray
    next_slot: np.ndarray
    index: HashIndex

    @classmethod
    def of(cls, records: np.ndarray) -> Chains:
        """The chains of a buffer's records, int64 [n, 4]."""
        fresh = (records == np.full(8, FRESH_RECORD_BYTE, np.uint8).view(np.int64)).all(axis=1)
        written = ~fresh
        written[TOKEN_TO_KV_SLOT_PADDING] = False
        hashes = record_hashes(records)
        prev_hashes = records[:, PREV_HASH].view(np.uint64)
        anchored = written & (prev_hashes == np.uint64(ANCHOR_HASH))
        # A record that leads to itself, such as one of zeros, would be everyone's predecessor and its own.
        index = HashIndex.of(hashes, np.flatnonzero(written & (hashes != prev_hashes)))
        parent, ambiguous = np.full(len(records), -1, np.int64), np.zeros(len(records), bool)
        children = np.flatnonzero(written & ~anchored)
        parent[children], ambiguous[children] = index.find(prev_hashes[children], children)
        next_slot = _longest_continuations(parent)
        follows = np.flatnonzero(parent >= 0)
        continues = np.zeros(len(records), bool)
        continues[follows] = next_slot[parent[follows]] == follows
        branch = _pointer_ends(np.where(continues, parent, -1))
        return cls(records, hashes, written, parent, anchored, ambiguous, np.where(written, branch, -1), next_slot, index)

    @property
    def orphaned(self) -> np.ndarray:
        """Slots written behind a record that is not there any more: overwritten, released, or evicted from a window; bool [n]."""
        return self.written & ~self.anchored & (self.parent < 0)

    def position(self, slot: int) -> int:
        """The position that a slot's record holds."""
        return int(self.records[slot, POSITION])

    def with_hash(self, word: int, near: int) -> int | None:
        """The written slot with a hash, the one nearest to a slot where several have it; None where none has."""
        found, _ = self.index.find(np.array([word], np.int64), np.array([near]))
        return None if found[0] < 0 else int(found[0])

    def before(self, slot: int, count: int) -> list[int]:
        """Up to ``count`` slots that lead to a slot, in order, without it."""
        return _walk(self.parent, slot, count)[::-1]

    def behind(self, slot: int, count: int) -> list[int]:
        """Up to ``count`` slots that continue a slot, in order, without it."""
        return _walk(self.next_slot, slot, count)

    def path(self, slot: int) -> list[int]:
        """All slots of the request through a slot: what leads to it, itself, and its longest continuation."""
        size = len(self.parent)
        return [*self.before(slot, size), slot, *self.behind(slot, size)]

    def ends(self) -> np.ndarray:
        """The last slots of requests, int64: written, and nothing follows."""
        return np.flatnonzero(self.written & (self.next_slot < 0))


def _walk(pointer: np.ndarray, slot: int, count: int) -> list[int]:
    """Up to ``count`` slots behind a pointer; ``parent`` has no cycles, since no two hashes of one could be chosen."""
    slots: list[int] = []
    while len(slots) < count and (slot := int(pointer[slot])) >= 0:
        slots.append(slot)
    return slots


def _jumps(pointer: np.ndarray) -> list[np.ndarray]:
    """The pointer, and its doublings, until all have ended; never more than a cycle-free pointer needs."""
    jumps = [pointer]
    for _ in range(len(pointer).bit_length()):
        last = jumps[-1]
        if not (last >= 0).any():
            break
        jumps.append(np.where(last >= 0, last[last], -1))
    return jumps


def _pointer_ends(pointer: np.ndarray) -> np.ndarray:
    """Where each slot ends up when it follows the pointer as far as it goes."""
    ends = np.arange(len(pointer))
    for jump in reversed(_jumps(pointer)):
        ends = np.where(jump[ends] >= 0, jump[ends], ends)
    return ends


def _longest_continuations(parent: np.ndarray) -> np.ndarray:
    """For each slot the child with the longest way to an end, the lower one of equals, -1 where there is none."""
    size = len(parent)
    # Slots that lead to each one, then the most of its descendants: at each doubling, those within twice the distance.
    jumps = _jumps(parent)
    depth, at = np.zeros(size, np.int64), np.arange(size)
    for i in reversed(range(len(jumps))):
        more = jumps[i][at] >= 0
        depth[more] += 1 << i
        at = np.where(more, jumps[i][at], at)
    deepest = depth.copy()
    for jump in jumps:
        moving = np.flatnonzero(jump >= 0)
        seen = deepest[moving]
        np.maximum.at(deepest, jump[moving], seen)
    children = np.flatnonzero(parent >= 0)
    order = np.lexsort((-children, deepest[children]))  # the last one stays
    next_slot = np.full(size, -1, np.int64)
    next_slot[parent[children[order]]] = children[order]
    return next_slot
