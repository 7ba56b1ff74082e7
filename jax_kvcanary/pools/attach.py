"""From a pool's class to its canary buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax_kvcanary._checks import check_int, check_type
from jax_kvcanary.buffers import CanaryBufferGroup
from jax_kvcanary.config import CanaryConfig
from jax_kvcanary.constants import INT32_MAX

#: attacher(pool, config, *, kv_token_id_vs_position_offset) -> the pool's groups.
PoolAttacher = Callable[..., tuple[CanaryBufferGroup, ...]]

# Classes by their qualified name are engines' own: knowing the name takes no import of the engine. The package fills this in.
_ATTACHERS: dict[type | str, PoolAttacher] = {}


def register_pool_attacher(pool_class: type | str, attacher: PoolAttacher) -> None:
    """Teach :func:`attach_canary_buffers` a pool class; a later registration replaces an earlier one.

    Args:
        pool_class: the class itself, or its qualified name, such as "engine.memory.Pool", which needs no import. Subclasses are not
            meant: their layout may differ.
        attacher: ``attacher(pool, config, *, kv_token_id_vs_position_offset)`` returns the pool's groups.

    Raises:
        TypeError: an argument of another type.
    """
    if not isinstance(pool_class, (type, str)):
        raise TypeError(f"`pool_class` is {pool_class!r}, but it must be a class or its qualified name as text.")
    if not callable(attacher):
        raise TypeError(f"`attacher` is {attacher!r}, but it must be a function of a pool and a configuration.")
    _ATTACHERS[pool_class] = attacher


def attacher_of(pool: Any) -> PoolAttacher:
    """The attacher of a pool's class; NotImplementedError lists those there are."""
    pool_class = type(pool)
    name = f"{pool_class.__module__}.{pool_class.__qualname__}"
    attacher = _ATTACHERS.get(pool_class) or _ATTACHERS.get(name)
    if attacher is None:
        known = ", ".join(sorted(key if isinstance(key, str) else f"{key.__module__}.{key.__qualname__}" for key in _ATTACHERS))
        raise NotImplementedError(
            f"`pool` is of class {name}, which has no canary attacher; supported are {known}, and register_pool_attacher adds others."
        )
    return attacher


def attach_canary_buffers(pool: Any, config: CanaryConfig, *, kv_token_id_vs_position_offset: int = 0) -> tuple[CanaryBufferGroup, ...]:
    """Fresh canary buffers for a pool.

    Args:
        pool: an object of a registered class.
        config: which layers are hashed, how, and whether V has buffers of its own.
        kv_token_id_vs_position_offset: slot of position p holds the token of position p plus this: 1 for EAGLE draft pools.

    Returns:
        One group for each pool or sub-pool.

    Raises:
        NotImplementedError: no attacher for the pool's class; the text lists those there are.
        ValueError: a layer that the pool does not have, or KV bytes that cannot be hashed in 8-byte words.
    """
    check_type(config, "config", CanaryConfig)
    check_int(kv_token_id_vs_position_offset, "kv_token_id_vs_position_offset", -INT32_MAX, INT32_MAX)
    attacher = attacher_of(pool)
    groups = tuple(attacher(pool, config, kv_token_id_vs_position_offset=kv_token_id_vs_position_offset))
    for group in groups:
        for spec in (*group.real_kv_sources_k, *group.real_kv_sources_v):
            spec.bind(pool)  # a geometry that does not fit the pool is reported now, not in the first step
    return groups
