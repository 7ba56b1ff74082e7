"""The fault of the demo's second run: an allocator that hands out a slot which a live request still holds."""

from __future__ import annotations

from dataclasses import dataclass

from smollm2.scheduler import Scheduler


@dataclass(frozen=True)
class DoubleHandout:
    """What the fault did."""

    step: int
    slot: int
    position: int  # of the token whose K and V the slot holds
    victim: int  # rid of the request that holds the slot
    thief: int  # rid of the request that is given it as well


@dataclass
class EarlyFree:
    """Frees one slot of a running request too early, once, from step `at_step` on.

    This is what dropping a reference twice does: the free list and the request both believe that the slot is theirs, and the next
    allocation hands it out. No bookkeeping of the scheduler sees it: the slot goes straight to the allocator.

    A hook for `Engine.serve(before_step=…)`. `done` says what was planted, None as long as nothing was.
    """

    at_step: int
    done: DoubleHandout | None = None

    def __call__(self, step: int, scheduler: Scheduler) -> None:
        if self.done is not None or step < self.at_step or len(scheduler.running) < 2:
            return
        thief, *others = scheduler.running  # the oldest one is served first, so it gets what was freed last
        victim = max(others, key=lambda request: len(request.prompt) + request.max_new_tokens - request.num_computed)
        if victim.num_computed == 0:
            return
        position = victim.num_computed // 2
        slot = scheduler.slots_of(victim)[position]
        if slot in scheduler.slots_of(thief):
            return
        scheduler.allocator.free([slot])
        self.done = DoubleHandout(step, slot, position, victim.rid, thief.rid)
