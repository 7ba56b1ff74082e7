"""Radix trees by hand and at random, and what a sweep of them must check, from every path root to node."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np

INT32_MAX = 2**31 - 1


@dataclass(eq=False)
class Node:
    """A node with everything that a sweep reads."""

    key: Any
    value: Any
    lock_ref: int = 0
    swa_tombstone: bool = False
    children: dict[Any, Node] = field(default_factory=dict)

    def add(self, key: Any, value: Any, **more: Any) -> Node:
        """A new child."""
        child = Node(key, value, **more)
        self.children[len(self.children)] = child
        return child


class Key:
    """Token ids in an object, as engines with namespaces have them."""

    def __init__(self, token_ids: Any, *, is_bigram: bool = False) -> None:
        self.token_ids, self.is_bigram = token_ids, is_bigram

    def __len__(self) -> int:
        return max(len(self.token_ids) - self.is_bigram, 0)


def empty_root() -> Node:
    return Node([], [])


KEYS = {
    "list": list,
    "tuple": tuple,
    "int32": lambda tokens: np.array(tokens, np.int32),
    "int64": lambda tokens: np.array(tokens, np.int64),
    "object": lambda tokens: Key(list(tokens)),
}
VALUES = {
    "list": list,
    "int32": lambda slots: np.array(slots, np.int32),
    "int64": lambda slots: np.array(slots, np.int64),
    "jax": lambda slots: jnp.array(slots, jnp.int32),
}


@dataclass(frozen=True)
class Plain:
    """A node of a random tree in plain Python, beside the one that a sweep sees."""

    start: int
    tokens: list[int]  # of the edge, and of the position behind it
    slots: list[int]
    evicted: bool
    tombstone: bool
    locked: bool
    parent: Plain | None


def random_tree(seed: int, *, num_nodes: int = 23, bigrams: bool = False, num_slots: int = 500) -> tuple[Node, list[Plain]]:
    """A tree of all kinds of nodes, keys and values; with bigrams the keys hold pairs."""
    rng = np.random.default_rng(seed)
    free = rng.permutation(np.arange(1, num_slots)).tolist()
    root = empty_root()
    nodes: list[tuple[Node, Plain | None]] = [(root, None)]
    for _ in range(num_nodes):
        above, parent = nodes[rng.integers(len(nodes))]
        length = int(rng.integers(1, 6))
        start = 0 if parent is None else parent.start + len(parent.slots)
        tokens = rng.integers(0, 50_000, length + 1).tolist()
        slots = [free.pop() for _ in range(length)]
        plain = Plain(start, tokens, slots, *(bool(rng.random() < share) for share in (0.2, 0.3, 0.4)), parent)
        if bigrams:
            pairs = list(pairwise(tokens))
            key = [pairs, Key(pairs), Key(tokens, is_bigram=True)][rng.integers(3)]
        else:
            key = KEYS[rng.choice(list(KEYS))](tokens[:-1])
        value = None if plain.evicted else VALUES[rng.choice(list(VALUES))](slots)
        node = above.add(key, value, lock_ref=int(plain.locked) * int(rng.integers(1, 4)), swa_tombstone=plain.tombstone)
        nodes.append((node, plain))
    return root, [plain for _, plain in nodes if plain is not None]


def expected_entries(nodes: list[Plain], *, swa: bool, lut: Any, include_locked: bool, offset: int, bigrams: bool) -> list[tuple[int, ...]]:
    """Sorted (slot, position, predecessor, token) of a sweep."""

    def own(slot: int | None) -> int:
        if slot is None:
            return 0
        if lut is None or slot < 0:
            return slot
        return max(int(lut[slot]), 0) if slot < len(lut) else INT32_MAX

    def entries() -> Iterator[tuple[int, ...]]:
        for node in nodes:
            path = []
            above: Plain | None = node
            while above is not None:
                absent = above.evicted or (swa and above.tombstone)
                path[:0] = [None] * len(above.slots) if absent else above.slots
                above = above.parent
            if node.locked and not include_locked:
                continue
            for position in range(node.start, len(path)):
                if path[position] is None:
                    continue
                j = position + offset - node.start
                known = node.tokens if bigrams else node.tokens[:-1]
                yield (
                    own(path[position]),
                    position,
                    -1 if position == 0 else max(own(path[position - 1]), 0),
                    known[j] if 0 <= j < len(known) else -1,
                )

    return sorted(entries())


def entries_of(plan: Any) -> list[tuple[int, ...]]:
    """The same of a plan, in its order."""
    count = int(plan.verify_num_valid[0])
    columns = (plan.verify_slot_indices, plan.verify_expected_positions, plan.verify_prev_slot_indices, plan.verify_expected_tokens)
    return list(zip(*(column[:count].tolist() for column in columns), strict=True))
