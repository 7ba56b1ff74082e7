"""A radix tree over token ids that remembers the KV slots of prefixes served before, one slot a token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class RadixNode:
    """An edge of the tree and the node that it leads to: `key` has the edge's tokens, `value` a slot for each.

    The names are those of `kvc.CacheNode`, so that the canary can sweep the tree as it is.
    """

    __slots__ = ("children", "key", "last_used", "lock_ref", "parent", "value")

    def __init__(self, key: Sequence[int], value: Sequence[int], parent: RadixNode | None) -> None:
        self.key = list(key)
        self.value = list(value)
        self.parent = parent
        self.children: dict[int, RadixNode] = {}
        self.lock_ref = 0
        self.last_used = 0


class RadixTree:
    """Shared prefixes. The tree owns the slots it holds; a request that uses some of them locks their node.

    A lock counts on the node and on all its ancestors, so that what is unlocked is always a set of whole subtrees, and
    evicting leaves never takes a slot from a request.
    """

    def __init__(self) -> None:
        self.root = RadixNode((), (), None)
        self._clock = 0

    def match(self, tokens: Sequence[int]) -> tuple[list[int], RadixNode]:
        """Slots of the longest prefix of `tokens` in the tree, and the node at its end (split there where it must be)."""
        self._clock += 1
        node, slots, done = self.root, [], 0
        node.last_used = self._clock
        while done < len(tokens) and (child := node.children.get(tokens[done])) is not None:
            common = _common_length(child.key, tokens, done)
            if common < len(child.key):
                child = _split(child, common)
            child.last_used = self._clock
            slots.extend(child.value)
            node, done = child, done + common
        return slots, node

    def insert(self, tokens: Sequence[int], slots: Sequence[int]) -> tuple[list[int], RadixNode]:
        """Give the tree a prefix and its slots. Returns the slots that hold it from now on, and its node.

        Where the tree had a part already, its own slots stay, and those of the caller that differ are the caller's to free.
        """
        if len(tokens) != len(slots):
            raise ValueError(f"`slots` has {len(slots)} entries; it takes one for each of the {len(tokens)} tokens.")
        held, node = self.match(tokens)
        if len(held) < len(tokens):
            leaf = RadixNode(tokens[len(held) :], slots[len(held) :], node)
            leaf.last_used = self._clock
            node.children[leaf.key[0]] = leaf
            held, node = held + leaf.value, leaf
        return held, node

    def lock(self, node: RadixNode) -> None:
        """Keep the path down to `node` from being evicted."""
        for step in _upwards(node):
            step.lock_ref += 1

    def unlock(self, node: RadixNode) -> None:
        """Undo one `lock` of the same node."""
        for step in _upwards(node):
            step.lock_ref -= 1

    def num_slots(self) -> int:
        """Slots that the tree holds."""
        return sum(len(node.value) for node in self.nodes())

    def num_evictable(self) -> int:
        """Slots that `evict` could give back."""
        return sum(len(node.value) for node in self.nodes() if node.lock_ref == 0)

    def evict(self, count: int) -> list[int]:
        """Drop unlocked leaves, the longest unused first, until `count` slots are free or nothing is left to drop."""
        freed: list[int] = []
        while len(freed) < count:
            leaves = [node for node in self.nodes() if not node.children and node.lock_ref == 0]
            if not leaves:
                break
            leaf = min(leaves, key=lambda node: node.last_used)
            keep = max(0, len(leaf.value) - (count - len(freed)))
            freed.extend(leaf.value[keep:])
            if keep:
                leaf.key, leaf.value = leaf.key[:keep], leaf.value[:keep]
            else:
                assert leaf.parent is not None
                del leaf.parent.children[leaf.key[0]]
        return freed

    def nodes(self) -> Iterator[RadixNode]:
        """Every node but the root."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def _common_length(edge: Sequence[int], tokens: Sequence[int], start: int) -> int:
    length = 0
    for mine, theirs in zip(edge, tokens[start : start + len(edge)], strict=False):
        if mine != theirs:
            break
        length += 1
    return length


def _split(node: RadixNode, length: int) -> RadixNode:
    """Cut the edge to `node` after `length` tokens. `node` stays the lower part, so that requests keep what they locked."""
    assert node.parent is not None
    upper = RadixNode(node.key[:length], node.value[:length], node.parent)
    upper.lock_ref, upper.last_used = node.lock_ref, node.last_used
    upper.children[node.key[length]] = node
    node.parent.children[upper.key[0]] = upper
    node.key, node.value, node.parent = node.key[length:], node.value[length:], upper
    return upper


def _upwards(node: RadixNode) -> Iterator[RadixNode]:
    """`node` and its ancestors, without the root, which is never evicted."""
    step: RadixNode = node
    while step.parent is not None:
        yield step
        step = step.parent
