"""Putting a canary on a pool: its buffers, its state, and its static side."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_kvcanary._checks import check_int, check_type
from jax_kvcanary._ffi import CUDA_MISSING
from jax_kvcanary.buffers import CanaryState
from jax_kvcanary.canary import Canary
from jax_kvcanary.config import CanaryConfig, CanaryLaunchCapacities, CanaryMode
from jax_kvcanary.constants import INT32_MAX, PoolKind
from jax_kvcanary.pools import attach_canary_buffers
from jax_kvcanary.state import CanaryDeviceState


def install_canary(
    pool: Any,
    config: CanaryConfig,
    *,
    capacities: CanaryLaunchCapacities,
    swa_window_size: int = 0,
    kv_token_id_vs_position_offset: int = 0,
    req_to_token_alloc_size: int | None = None,
    max_context_len: int | None = None,
) -> tuple[Canary, CanaryState] | tuple[None, None]:
    """Attach canary buffers to a pool and allocate the state.

    The chain-position check is off until :meth:`Canary.mark_init_finished`, so that warm-up steps stay silent.

    Args:
        pool: an object of a class with an attacher, see :func:`register_pool_attacher`.
        config: settings; mode NONE installs nothing.
        capacities: room of the plans.
        swa_window_size: positions that an SWA group verifies; 0 is all.
        kv_token_id_vs_position_offset: slot of position p holds the token of position p plus this.
        req_to_token_alloc_size: rows of the table of expected tokens; given exactly when ``config.enable_verify_token_assert`` is on.
        max_context_len: positions of that table; likewise.

    Returns:
        The canary and its state, or (None, None) for mode NONE.

    Raises:
        NotImplementedError: no attacher for the pool's class. RuntimeError: the pool is on a GPU and the CUDA module is missing.
        TypeError, ValueError: a wrong argument.
    """
    check_type(config, "config", CanaryConfig)
    check_type(capacities, "capacities", CanaryLaunchCapacities)
    check_int(swa_window_size, "swa_window_size", 0, INT32_MAX)
    if config.mode is CanaryMode.NONE:
        return None, None
    devices = _devices(pool)
    if CUDA_MISSING is not None and any(device.platform in ("gpu", "cuda") for device in devices):
        raise RuntimeError(CUDA_MISSING)
    groups = attach_canary_buffers(pool, config, kv_token_id_vs_position_offset=kv_token_id_vs_position_offset)
    device_state = CanaryDeviceState.allocate(config, req_to_token_alloc_size=req_to_token_alloc_size, max_context_len=max_context_len)
    off = jnp.zeros_like(device_state.enable_chain_position_assert)
    state = CanaryState(groups, dataclasses.replace(device_state, enable_chain_position_assert=off))
    if len(devices) == 1 and devices != _devices(off):
        state = jax.device_put(state, next(iter(devices)))
    tables = tuple(group.swa_index_lut for group in groups if group.kind is PoolKind.SWA and group.swa_index_lut is not None)
    return Canary(config, capacities, swa_window_size, tables), state


def _devices(tree: Any) -> set[jax.Device]:
    """The devices of a pytree's concrete arrays."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)]
    return set().union(*(array.devices() for array in arrays))
