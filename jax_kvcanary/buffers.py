"""The canary buffers of a pool's groups, and the state that they are part of."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_kvcanary._checks import ArrayLike, check_int
from jax_kvcanary._launch import Endpoint
from jax_kvcanary.constants import CANARY_SLOT_BYTES, FRESH_RECORD_BYTE, INT32_MAX, CanaryLaunchTag, PoolKind
from jax_kvcanary.sources import PoolPath, SourceSpec, resolve_path
from jax_kvcanary.state import CanaryDeviceState


def fresh_records(num_slots: int) -> jax.Array:
    """A canary buffer that nothing has written: uint8 [num_slots, 32], every byte 0xFF."""
    check_int(num_slots, "num_slots", 1, INT32_MAX)
    return jnp.full((num_slots, CANARY_SLOT_BYTES), FRESH_RECORD_BYTE, jnp.uint8)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("k_head", "k_tail", "v_head", "v_tail"),
    meta_fields=("kind", "real_kv_sources_k", "real_kv_sources_v", "swa_index_lut", "kv_token_id_vs_position_offset"),
)
@dataclass(frozen=True, kw_only=True)
class CanaryBufferGroup:
    """Canary buffers of one pool, or of one sub-pool, and where its real KV is.

    HEAD buffers are checked and written before the forward, TAIL buffers behind it with the real KV mixed in; apart, the
    two phases cannot overwrite each other's evidence.

    Fields:
        kind: FULL or SWA (static).
        k_head, k_tail: uint8 [num_slots, 32].
        v_head, v_tail: the same for V, or None for a pool without a V half.
        real_kv_sources_k, real_kv_sources_v: up to four descriptions of the KV that a TAIL record fingerprints (static).
        swa_index_lut: path in the pool to the table from full-pool slots to this group's, or None (static).
        kv_token_id_vs_position_offset: slot of position p holds the token of position p plus this: 0 for target pools, 1 for
            EAGLE draft pools (static).
    """

    kind: PoolKind
    k_head: ArrayLike
    k_tail: ArrayLike
    v_head: ArrayLike | None = None
    v_tail: ArrayLike | None = None
    real_kv_sources_k: tuple[SourceSpec, ...] = ()
    real_kv_sources_v: tuple[SourceSpec, ...] = ()
    swa_index_lut: PoolPath | None = None
    kv_token_id_vs_position_offset: int = 0

    @property
    def has_v_half(self) -> bool:
        """Whether V has buffers of its own."""
        return self.v_head is not None

    @property
    def halves(self) -> tuple[str, ...]:
        """The halves with buffers, in launch order: k, and v where there is one."""
        return ("k", "v") if self.has_v_half else ("k",)

    @property
    def buffer_names(self) -> tuple[str, ...]:
        """Field names of the buffers there are."""
        return tuple(f"{half}_{phase}" for half in self.halves for phase in ("head", "tail"))

    @property
    def is_uniform(self) -> bool:
        """Whether all buffers have as many slots, as those of a pool do: then what one phase finds about slots holds in the other."""
        return len({getattr(self, name).shape[0] for name in self.buffer_names}) == 1

    def with_buffers(self, **buffers: Any) -> CanaryBufferGroup:
        """The group with some of its buffers replaced, by field name."""
        return dataclasses.replace(self, **buffers)

    def lut(self, pool: Any) -> ArrayLike | None:
        """The pool's live table from full-pool slots to this group's, or None."""
        return None if self.swa_index_lut is None else resolve_path(pool, self.swa_index_lut)

    def launch_tag(self, phase: str, half: str) -> CanaryLaunchTag:
        """The tag of a phase ("head", "tail" or "sweep") and a half ("k" or "v") of this group."""
        return CanaryLaunchTag[f"{phase}_{half}_{self.kind.name}".upper()]

    def endpoints(self, phase: str, pool: Any) -> list[Endpoint]:
        """The endpoints of a phase ("head", "tail" or "sweep"), K first; those behind the forward with their live sources."""
        buffer = "head" if phase == "head" else "tail"
        return [
            Endpoint(
                canary_buf=getattr(self, f"{half}_{buffer}"),
                tag=self.launch_tag(phase, half),
                sources=() if phase == "head" else tuple(spec.bind(pool) for spec in getattr(self, f"real_kv_sources_{half}")),
            )
            for half in self.halves
        ]


@partial(jax.tree_util.register_dataclass, data_fields=("groups", "device_state"), meta_fields=())
@dataclass(frozen=True)
class CanaryState:
    """Everything of a canary that lives on the device. Thread it through the step, donated.

    Fields:
        groups: the canary buffers, one group for each pool or sub-pool.
        device_state: log and counters.
    """

    groups: tuple[CanaryBufferGroup, ...]
    device_state: CanaryDeviceState

    def groups_of(self, kind: PoolKind) -> tuple[CanaryBufferGroup, ...]:
        """The groups of one kind.

        Raises:
            ValueError: there are none.
        """
        chosen = tuple(group for group in self.groups if group.kind is kind)
        if not chosen:
            have = ", ".join(group.kind.name for group in self.groups)
            raise ValueError(f"`kind` is {kind.name}, but this canary has the groups {have}.")
        return chosen
