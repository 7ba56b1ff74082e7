"""From a prefix cache to the plan of a sweep: every cached slot, whether a request uses it or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from jax_kvcanary._checks import ArrayLike, check_dtype, check_enum, check_flag, check_int, check_shape, check_type
from jax_kvcanary.constants import INT32_MAX, PoolKind
from jax_kvcanary.plan import VerifyPlan
from jax_kvcanary.reference.plan import indices, token_ids, translate_slots

# Where the predecessor of a node's first slot is not the slot at some index of the walk: the anchor, or a slot without a record.
_START, _UNREACHABLE = -1, -2

_CAPACITY_FACTOR = 4


@runtime_checkable
class CacheNode(Protocol):
    """A node of a radix tree and the edge that leads to it, under the names that SGLang and sglang-jax use.

    Attributes:
        children: the nodes below; only the values of the mapping are looked at.
        key: token ids of the edge, or an object that has them as ``token_ids``. The root's is empty. The tree of an EAGLE pool may
            hold pairs instead, (token of the position, token of the next one); so does a key with a true ``is_bigram``, whose
            ``token_ids`` are the tokens themselves, one more than the edge has positions.
        value: full-pool slots, int32 or int64, one for each token: a list, a NumPy array or a JAX array. None where the node was
            evicted to the host.

    A node may have more, which is read where it is there:

    - ``lock_ref``, or one for each pool in ``full_lock_ref`` and ``swa_lock_ref``: requests that hold the node now;
    - ``swa_tombstone``: whether the window group has given up the node's slots.
    """

    children: Mapping[Any, Any]
    key: Any
    value: Any


class _Edge(NamedTuple):
    """A node whose slots are in the pool."""

    start: int  # position of its first token
    before: int  # index in the walk of the slot before its first one, or one of the two marks above
    slots: np.ndarray
    tokens: np.ndarray  # from its first position on
    listed: bool  # whether its slots get entries, or are predecessors only


def sweep_plan(
    root: CacheNode,
    *,
    kind: PoolKind = PoolKind.FULL,
    full_to_swa_index_mapping: ArrayLike | None = None,
    include_locked: bool = True,
    kv_token_id_vs_position_offset: int = 0,
    min_capacity: int = 256,
) -> VerifyPlan:
    """Plan a sweep over the slots that a radix tree holds, for :meth:`Canary.sweep`. Runs on the host and changes nothing.

    Each slot has one entry: its position, the slot before it on the way from the root, and the token that the tree has there.
    A node that was evicted to the host, or that is a tombstone of the window group, has no entries; what follows it has
    positions that count it and an unreachable predecessor.

    Args:
        root: the root of the tree.
        kind: the group to be swept; for SWA, tombstones are left out.
        full_to_swa_index_mapping: int32 or int64 [n]; for kind SWA, the pool's table from full-pool slots to the group's own, read
            as by :func:`plan`: an absent slot is skipped by the sweep, and the one behind it has an unreachable predecessor.
        include_locked: whether nodes that requests hold have entries too. In a full pool, each step verifies the slots of its
            requests anyway; in a window group only those in the window, so that the rest of a held node is checked by nobody.
        kv_token_id_vs_position_offset: slot of position p holds the token of position p plus this. Where that token is not the
            same node's, none is expected, since it depends on the branch.
        min_capacity: entries that the plan has room for, at least. Larger ones have room for this many times a power of four, so
            that a jitted sweep compiles for few sizes.

    Returns:
        The plan, NumPy int32; entries past ``verify_num_valid`` are 0, and ``enable`` is 1.

    Danger:
        The tree's keys must be the tokens that the steps wrote. Where an engine puts something else into them, such as the hash of
        an image, replace those ``verify_expected_tokens`` by -1. Slots of several pools in one tree cannot be told apart here.

    Raises:
        TypeError: something that is no node, a key or a value of a wrong dtype, or no lock counts where they are needed.
        ValueError: a key or a value of a wrong shape, a value with another length than its key, or an argument out of range.
    """
    check_type(root, "root", CacheNode, ", with `children`, `key` and `value`")
    kind = check_enum(kind, "kind", PoolKind)
    if full_to_swa_index_mapping is not None and kind is not PoolKind.SWA:
        raise ValueError(f"`full_to_swa_index_mapping` is given, but it must be None when `kind` is {kind.name}.")
    check_flag(include_locked, "include_locked")
    offset = check_int(kv_token_id_vs_position_offset, "kv_token_id_vs_position_offset", -INT32_MAX, INT32_MAX)
    check_int(min_capacity, "min_capacity", 1, INT32_MAX - 1)

    edges = list(_edges(root, kind, include_locked, offset))
    starts, before, lengths, num_tokens, listed = _columns(edges)
    edge = np.repeat(np.arange(len(edges)), lengths)  # of each slot
    index = np.arange(len(edge))
    along = index - (np.cumsum(lengths) - lengths)[edge]  # slots of the same edge before it

    slots = indices(_joined([e.slots for e in edges]), "node.value", (None,), "a walk over slots")
    slots = translate_slots(slots, full_to_swa_index_mapping)
    previous = np.where(along > 0, index - 1, before[edge])
    # As in a plan: a hole before a slot is reported by the entry at the hole.
    reachable = np.maximum(slots[np.maximum(previous, 0)], 0)
    prev_slots = np.where(previous == _START, -1, np.where(previous == _UNREACHABLE, 0, reachable))

    known = token_ids(_joined([*(e.tokens for e in edges), np.array([-1])]), "node.key", (None,), "a walk over tokens")
    token = along + offset
    is_known = (token >= 0) & (token < num_tokens[edge])
    expected = known[np.where(is_known, (np.cumsum(num_tokens) - num_tokens)[edge] + token, -1)]

    entries = listed[edge]
    count = int(entries.sum())
    capacity = _capacity(count, min_capacity)

    def padded(column: np.ndarray) -> np.ndarray:
        out = np.zeros(capacity, np.int32)
        out[:count] = column[entries]
        return out

    return VerifyPlan(
        verify_slot_indices=padded(slots),
        verify_expected_tokens=padded(expected),
        verify_expected_positions=padded(starts[edge] + along),
        verify_prev_slot_indices=padded(prev_slots),
        verify_num_valid=np.array([count], np.int32),
        enable=np.array([1], np.int32),
    )


def _edges(root: CacheNode, kind: PoolKind, include_locked: bool, offset: int) -> Iterator[_Edge]:
    """Every edge whose slots are in the pool, a parent before its children."""
    length, _ = _tokens(root.key, offset)
    if length:
        raise ValueError(f"`root` has a key of {length} tokens, but it must be the root of the tree, whose key is empty.")
    walked = 0
    stack: list[tuple[CacheNode, int, int]] = [(root, 0, _START)]
    while stack:
        node, start, before = stack.pop()
        length, tokens = _tokens(node.key, offset)
        end = start + length
        if node.value is not None and len(node.value) != length:
            raise ValueError(
                f"`root` has a node for the positions [{start}, {end}) with {length} tokens and {len(node.value)} slots, but a node has "
                "one slot for each token, or the value None."
            )
        if length:
            if node.value is None or (kind is PoolKind.SWA and getattr(node, "swa_tombstone", False)):
                before = _UNREACHABLE
            else:
                yield _Edge(start, before, _slots(node.value), tokens, include_locked or not _is_locked(node, kind))
                walked += length
                before = walked - 1
        stack.extend((child, end, before) for child in node.children.values())


def _tokens(key: Any, offset: int) -> tuple[int, np.ndarray]:
    """The positions of an edge, and its tokens from the first position on; bigrams know one more than there are positions."""
    tokens = np.asarray(getattr(key, "token_ids", key))
    if not tokens.size:  # an empty list has no dtype of its own
        return 0, np.empty(0, np.int64)
    check_dtype(tokens, "node.key", np.int32, np.int64)
    if tokens.ndim == 2:
        check_shape(tokens, "node.key", (None, 2), "a key of pairs")
        return len(tokens), np.append(tokens[:1, 0], tokens[:, 1]) if offset > 0 else tokens[:, 0]
    check_shape(tokens, "node.key", (None,), "a key of tokens")
    more = int(bool(getattr(key, "is_bigram", False)))
    length = len(key) if hasattr(key, "__len__") else len(tokens) - more
    return length, tokens[: length + more]


def _slots(value: ArrayLike) -> np.ndarray:
    slots = np.asarray(value)
    check_dtype(slots, "node.value", np.int32, np.int64)
    check_shape(slots, "node.value", (None,), "one slot for each token")
    return slots


def _is_locked(node: CacheNode, kind: PoolKind) -> bool:
    own = f"{kind.name.lower()}_lock_ref"
    users = getattr(node, own, getattr(node, "lock_ref", None))
    if users is None:
        raise TypeError(f"`root` has a node without `{own}` and `lock_ref`, but one of them is needed when `include_locked` is False.")
    return bool(users > 0)


def _columns(edges: list[_Edge]) -> tuple[np.ndarray, ...]:
    """Of each edge: start, before, slots, tokens, listed."""
    numbers = [(edge.start, edge.before, len(edge.slots), len(edge.tokens), edge.listed) for edge in edges]
    *columns, listed = np.array(numbers, np.int64).reshape(-1, 5).T
    return *columns, listed.astype(bool)


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.int64), *arrays])


def _capacity(count: int, min_capacity: int) -> int:
    capacity = min_capacity
    while capacity < count:
        capacity *= _CAPACITY_FACTOR
    return min(capacity, INT32_MAX - 1)
