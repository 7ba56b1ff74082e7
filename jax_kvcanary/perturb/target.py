"""What a fault may hit, and the record of what it did."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_kvcanary._checks import ArrayLike, check_enum, check_int, check_type, integer_array
from jax_kvcanary.buffers import CanaryState
from jax_kvcanary.canary import Canary
from jax_kvcanary.constants import INT32_MAX, PoolKind, RealKvHashMode
from jax_kvcanary.sources import PoolPath, RealKvSource, SourceSpec, resolve_path


@dataclass(frozen=True, kw_only=True)
class PerturbTarget:
    """The group whose slots a fault hits. Static and hashable; :meth:`of` takes it from an installed canary.

    Fields:
        kind: FULL or SWA.
        num_slots: slots of the group.
        sources: where the group's KV is; none where nothing is hashed.
        swa_index_lut: path in the pool to the table from full-pool slots to the group's, or None.
        swa_window_size: positions that the group verifies; 0 is all.
        real_kv_hash_mode: only bytes that this mode hashes are flipped.
        first_byte: bytes of each source that are left alone; 16 leaves those that PARTIAL hashes alone.
    """

    kind: PoolKind
    num_slots: int
    sources: tuple[SourceSpec, ...] = ()
    swa_index_lut: PoolPath | None = None
    swa_window_size: int = 0
    real_kv_hash_mode: RealKvHashMode = RealKvHashMode.ALL
    first_byte: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", check_enum(self.kind, "kind", PoolKind))
        object.__setattr__(self, "sources", tuple(self.sources))
        object.__setattr__(self, "real_kv_hash_mode", check_enum(self.real_kv_hash_mode, "real_kv_hash_mode", RealKvHashMode))
        for i, spec in enumerate(self.sources):
            check_type(spec, f"sources[{i}]", SourceSpec)
        check_int(self.num_slots, "num_slots", 1, INT32_MAX)
        check_int(self.swa_window_size, "swa_window_size", 0, INT32_MAX)
        check_int(self.first_byte, "first_byte", 0, INT32_MAX)

    @classmethod
    def of(cls, canary: Canary, state: CanaryState, kind: PoolKind = PoolKind.FULL) -> PerturbTarget:
        """The target that a canary watches: its window, its hash mode, and its group of a kind, with K's sources before V's.

        A canary that is watched for what it cannot see needs the target of another one, such as one in mode ALL on the same pool.

        Raises:
            TypeError: a wrong type. ValueError: the canary has no such group.
        """
        check_type(canary, "canary", Canary, ", as install_canary returns it")
        check_type(state, "state", CanaryState, ", as install_canary returns it")
        kind = check_enum(kind, "kind", PoolKind)
        groups = state.groups_of(kind)
        return cls(
            kind=kind,
            num_slots=groups[0].k_head.shape[0],
            sources=tuple(spec for group in groups for spec in (*group.real_kv_sources_k, *group.real_kv_sources_v)),
            swa_index_lut=groups[0].swa_index_lut,
            swa_window_size=canary.swa_window_size if kind is PoolKind.SWA else 0,
            real_kv_hash_mode=canary.config.real_kv_hash_mode,
        )

    def lut(self, pool: Any) -> ArrayLike | None:
        """The pool's live table from full-pool slots to this group's, or None."""
        return None if self.swa_index_lut is None else resolve_path(pool, self.swa_index_lut)

    def bytes_to_flip(self, source: RealKvSource) -> range:
        """The bytes of a slot in one source that may be flipped."""
        return range(self.first_byte, source.bytes_read(self.real_kv_hash_mode))


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("happened", "row", "position", "entry", "other_entry", "slot", "source", "byte", "before", "after"),
    meta_fields=(),
)
@dataclass(frozen=True, kw_only=True)
class Perturbation:
    """What a function of this package changed: scalars, int32 but the first; -1 where one does not apply, and all where nothing happened.

    Fields:
        happened: bool; whether anything was changed.
        row: request row, of ``req_to_token``.
        position: position in the request.
        entry: entry of the token arrays, or of the slots given.
        other_entry: the entry that it was swapped with.
        slot: the slot that a finding will name, in the target group's own numbering.
        source: index in ``PerturbTarget.sources``.
        byte: byte of the slot in that source.
        before, after: the table's entry (full-pool slots), token, position or byte. A token or slot that does not fit int32 becomes
            2^31 - 1, or -1 where negative.
    """

    happened: ArrayLike
    row: ArrayLike
    position: ArrayLike
    entry: ArrayLike
    other_entry: ArrayLike
    slot: ArrayLike
    source: ArrayLike
    byte: ArrayLike
    before: ArrayLike
    after: ArrayLike

    @classmethod
    def of(cls, happened: jax.Array, **values: jax.Array) -> Perturbation:
        """The record of a fault, or of none, by the fields that apply."""
        names = [name for name in cls.__dataclass_fields__ if name != "happened"]
        nothing = jnp.full((), -1, jnp.int32)
        known = {name: jnp.where(happened, value, nothing).astype(jnp.int32) for name, value in values.items()}
        return cls(happened=happened, **{name: known.get(name, nothing) for name in names})


def step_number(step: Any, name: str = "step") -> Any:
    """A step as a Python int, or as an int32 or int64 scalar such as the counter of a scan."""
    if hasattr(step, "dtype"):
        return integer_array(step, name, (), "the number of a step")
    return check_int(step, name, 0, INT32_MAX)
