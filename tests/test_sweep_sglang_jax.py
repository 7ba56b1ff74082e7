"""Sweeps of sglang-jax's own radix cache, as version 0.0.2 has it, where that is installed."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

import jax_kvcanary as kvc
from helpers.trees import entries_of

radix_cache = pytest.importorskip(
    "sgl_jax.srt.mem_cache.radix_cache", reason="sglang-jax and what its radix cache imports are not installed", exc_type=ImportError
)


class Cache:
    """The engine's cache, and beside it the slot of every cached token, by what stands before and beside it up to the end of its page."""

    def __init__(self, page_size):
        allocator = SimpleNamespace(free=lambda slots: self.forget(set(slots.tolist())))
        self.cache = radix_cache.RadixCache(None, allocator, page_size=page_size)
        self.page_size = page_size
        self.slots = {}
        self.next_slot = 1

    def forget(self, freed):
        self.slots = {place: slot for place, slot in self.slots.items() if slot not in freed}

    def places(self, tokens):
        """One for each token: (tokens up to the end of its page, its position)."""
        return [(tuple(tokens[: (p // self.page_size + 1) * self.page_size]), p) for p in range(len(tokens))]

    def insert(self, tokens):
        """A request ends: what it shares stays the cache's."""
        tokens = tokens[: len(tokens) // self.page_size * self.page_size]
        slots = list(range(self.next_slot, self.next_slot + len(tokens)))[::-1]
        self.next_slot += len(tokens)
        shared = self.cache.insert(tokens, slots)
        self.slots.update(list(zip(self.places(tokens), slots, strict=True))[shared:])

    def match(self, tokens):
        return self.cache.match_prefix(tokens).last_device_node

    @property
    def root(self):
        return self.cache.root_node

    def expected(self, without=()):
        """Sorted (slot, position, predecessor, token) of all cached tokens but some."""
        entries = []
        for (tokens, position), slot in self.slots.items():
            if (tokens, position) not in without:
                before = self.slots[self.places(tokens)[position - 1]] if position else -1
                entries.append((slot, position, before, tokens[position]))
        return sorted(entries)

    def held_by(self, node):
        """The places of every token on the way down to a node."""
        tokens = []
        while node is not self.root:
            tokens[:0] = node.key
            node = node.parent
        return set(self.places(tokens))


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("seed", range(10))
def test_random_traffic(page_size, seed):
    rng = random.Random(seed)
    cache, locked, most = Cache(page_size), [], 0
    for _ in range(60):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 20))]
        action = rng.randrange(6)
        if action < 3:
            cache.insert(tokens)
        elif action == 3:
            locked.append(cache.match(tokens))
            cache.cache.inc_lock_ref(locked[-1])
        elif action == 4 and locked:
            cache.cache.dec_lock_ref(locked.pop(rng.randrange(len(locked))))
        else:
            cache.cache.evict(rng.randrange(8))
        plan = kvc.sweep_plan(cache.root, min_capacity=3)
        assert sorted(entries_of(plan)) == cache.expected()
        held = set().union(*(cache.held_by(node) for node in locked))
        plan = kvc.sweep_plan(cache.root, include_locked=False)
        assert sorted(entries_of(plan)) == cache.expected(without=held)
        most = max(most, len(cache.slots))
    assert most > 20


def test_a_node_that_is_on_the_host_only():
    cache = Cache(1)
    cache.insert([5, 6, 7])
    cache.insert([5, 6, 8, 9])
    cache.match([5, 6]).value = None
    assert sorted(entries_of(kvc.sweep_plan(cache.root))) == [(1, 2, 0, 7), (4, 3, 5, 9), (5, 2, 0, 8)]
