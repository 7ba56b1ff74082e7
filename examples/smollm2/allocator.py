"""Which KV slots are free."""

from __future__ import annotations

from collections.abc import Iterable


class SlotAllocator:
    """A stack of free slots. Slot 0 is never handed out: it takes the dummy writes of padded tokens."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 2:
            raise ValueError(f"`num_slots` is {num_slots}; a pool needs at least 2, one of them for padding.")
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, 0, -1))

    @property
    def num_usable(self) -> int:
        """Slots that can be handed out in all."""
        return self.num_slots - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def free_slots(self) -> list[int]:
        """The free slots, the one handed out next last."""
        return list(self._free)

    def alloc(self, count: int) -> list[int]:
        """Hand out `count` slots; the caller has made sure that there are as many (ValueError otherwise)."""
        if not 0 <= count <= len(self._free):
            raise ValueError(f"`count` is {count}; {len(self._free)} slots are free.")
        return [self._free.pop() for _ in range(count)]

    def free(self, slots: Iterable[int]) -> None:
        """Take slots back. Whether they were handed out is not checked, as in most engines: that is the canary's work."""
        self._free.extend(slots)
