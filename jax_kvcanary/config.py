"""What a canary does, and how much room its launches have: the only place that reads the environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from jax_kvcanary._checks import check_enum, check_int, check_probability
from jax_kvcanary.constants import INT32_MAX, MAX_REAL_KV_SOURCES, PoolKind, RealKvHashMode

_ENV_PREFIX = "KVCANARY_"


class CanaryMode(str, Enum):
    """What the monitor does with a finding: nothing is installed, a warning is logged, or an error is raised."""

    NONE = "none"
    LOG = "log"
    RAISE = "raise"


@dataclass(frozen=True)
class CanaryConfig:
    """Static settings of a canary. Hashable; every field has a range that construction checks.

    Fields:
        mode: see :class:`CanaryMode`; a plain string is taken too.
        ring_capacity: rows of the violation ring, at least 1.
        sweep_interval: steps between two sweeps over the prefix cache, see :meth:`Canary.sweep_due`; 0 is never.
        real_kv_hash_mode: how many real KV bytes go into a TAIL record.
        enable_write_input_assert: compare the tokens and positions written with expected ones of the batch.
        enable_verify_token_assert: compare stored tokens with a table of expected ones.
        enable_v_half: give V a pair of canary buffers of its own where the pool has a V half.
        real_kv_layers: layers whose KV is hashed, one to four, negative ones counted from the end.
        stats_every_n_steps: steps between two lines of statistics; 0 is never.
        verify_stride: a step verifies every n-th position of each row, the next step those behind it, and so on: the cost of verifying
            is divided by n, and a fault is found up to n - 1 steps later. 1 verifies all of them in each step. Sweeps are not strided.
            The steps are the canary's own: in a loop that alternates between batches in a fixed rhythm, choose a stride that shares no
            factor with the length of the rhythm, or a request meets some of its positions only.

    Raises:
        ValueError: a value outside its range. TypeError: a value of another type.
    """

    mode: CanaryMode
    ring_capacity: int = 1024
    sweep_interval: int = 0
    real_kv_hash_mode: RealKvHashMode = RealKvHashMode.PARTIAL
    enable_write_input_assert: bool = False
    enable_verify_token_assert: bool = False
    enable_v_half: bool = True
    real_kv_layers: tuple[int, ...] = (0,)
    stats_every_n_steps: int = 0
    verify_stride: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", _enum_member(CanaryMode, self.mode, "mode"))
        object.__setattr__(self, "real_kv_hash_mode", _enum_member(RealKvHashMode, self.real_kv_hash_mode, "real_kv_hash_mode"))
        check_int(self.ring_capacity, "ring_capacity", 1, INT32_MAX)
        check_int(self.sweep_interval, "sweep_interval", 0, INT32_MAX)
        check_int(self.stats_every_n_steps, "stats_every_n_steps", 0, INT32_MAX)
        check_int(self.verify_stride, "verify_stride", 1, INT32_MAX)
        for name in ("enable_write_input_assert", "enable_verify_token_assert", "enable_v_half"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"`{name}` is {getattr(self, name)!r}, but it must be True or False.")
        object.__setattr__(self, "real_kv_layers", _check_layers(self.real_kv_layers))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> CanaryConfig:
        """The configuration that the ``KVCANARY_*`` environment variables describe.

        Unset variables keep their field's default; an unset ``KVCANARY_MODE`` is ``none``.
        ``KVCANARY_REAL_DATA`` is the real-KV hash mode (none, partial, all), ``KVCANARY_REAL_KV_LAYERS`` a comma-separated
        list of layers; flags are 1/0, true/false, yes/no or on/off in any case.

        Args:
            environ: where to look; None is the process's environment.

        Raises:
            ValueError: a value that cannot be read; the text names the variable, the value and what is allowed.
        """
        return cls(**_read_env(cls, _ENV_FIELDS, {"mode": CanaryMode.NONE}, environ))


class PerturbKind(str, Enum):
    """A fault that :mod:`jax_kvcanary.perturb` plants; each names the function that does it."""

    REQ_TO_TOKEN = "req_to_token"
    NEXT_TOKENS = "next_tokens"
    POSITION = "position"
    LIVE_KV = "live_kv"
    WRITTEN_KV = "written_kv"
    CACHED_KV = "cached_kv"


@dataclass(frozen=True)
class PerturbConfig:
    """Which faults to plant, and how often. Hashable; every field has a range that construction checks.

    Fields:
        kinds: the faults, see :class:`PerturbKind`; plain strings are taken too. None of them: nothing is ever changed.
        probability: of each of them, in each step, between 0 and 1.
        seed: of the random numbers; the same seed and step make the same fault of the same batch.
        warmup_steps: steps at the start that are left alone.
        target_group: whose slots are hit.

    Raises:
        ValueError: a value outside its range. TypeError: a value of another type.
    """

    kinds: tuple[PerturbKind, ...] = ()
    probability: float = 1.0
    seed: int = 0
    warmup_steps: int = 0
    target_group: PoolKind = PoolKind.FULL

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", _check_kinds(self.kinds))
        object.__setattr__(self, "probability", check_probability(self.probability, "probability"))
        check_int(self.seed, "seed", 0, INT32_MAX)
        check_int(self.warmup_steps, "warmup_steps", 0, INT32_MAX)
        object.__setattr__(self, "target_group", check_enum(self.target_group, "target_group", PoolKind))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> PerturbConfig:
        """The configuration that the ``KVCANARY_PERTURB_*`` environment variables describe.

        Unset variables keep their field's default. ``KVCANARY_PERTURB_KINDS`` is a comma-separated list of kinds, or none,
        ``KVCANARY_PERTURB_TARGET_GROUP`` full or swa.

        Args:
            environ: where to look; None is the process's environment.

        Raises:
            ValueError: a value that cannot be read; the text names the variable, the value and what is allowed.
        """
        return cls(**_read_env(cls, _PERTURB_ENV_FIELDS, {}, environ))


@dataclass(frozen=True)
class CanaryLaunchCapacities:
    """How many entries one plan can hold. Static, since they are array shapes.

    Fields:
        verify_capacity: verify entries of one step; a step that needs more skips its verify and is counted.
        write_req_capacity: rows of the largest batch.
    """

    verify_capacity: int
    write_req_capacity: int

    def __post_init__(self) -> None:
        check_int(self.verify_capacity, "verify_capacity", 1, INT32_MAX - 1)
        check_int(self.write_req_capacity, "write_req_capacity", 1, INT32_MAX - 1)

    @classmethod
    def from_pool(cls, pool_slot_count: int, max_batch_size: int, *, verify_capacity: int | None = None) -> CanaryLaunchCapacities:
        """Capacities for a pool: three verify entries a slot unless told, since a shared prefix counts once a request.

        Args:
            pool_slot_count: slots of the full pool.
            max_batch_size: rows of the largest batch.
            verify_capacity: overrides the default.
        """
        check_int(pool_slot_count, "pool_slot_count", 1, INT32_MAX)
        check_int(max_batch_size, "max_batch_size", 1, INT32_MAX - 1)
        if verify_capacity is None:
            verify_capacity = min(3 * pool_slot_count, INT32_MAX - 1)
        return cls(verify_capacity=verify_capacity, write_req_capacity=max_batch_size)


def _read_env(
    cls: type, fields: Mapping[str, tuple[str, Callable[[str, str], Any]]], required: dict[str, Any], environ: Mapping[str, str] | None
) -> dict[str, Any]:
    """Values of a configuration's fields by the variables that are set, behind those that it requires."""
    environ = os.environ if environ is None else environ
    values = dict(required)
    for suffix, (field, parse) in fields.items():
        text = environ.get(_ENV_PREFIX + suffix)
        if text is None:
            continue
        value = parse(_ENV_PREFIX + suffix, text.strip())
        try:
            cls(**{**required, field: value})
        except ValueError as error:  # the field's own message, under the name that the user set
            raise ValueError(str(error).replace(f"`{field}", f"`{_ENV_PREFIX}{suffix}", 1)) from None
        values[field] = value
    return values


def _enum_member(kind: type[Enum], value: Any, name: str) -> Enum:
    if not isinstance(value, bool):
        try:
            return kind(value)
        except ValueError:
            pass
    allowed = ", ".join(repr(m.value) if isinstance(m.value, str) else f"{m.name} ({m.value})" for m in kind)
    raise ValueError(f"`{name}` is {value!r}, but it must be one of {allowed}.")


def _check_layers(layers: Any) -> tuple[int, ...]:
    if isinstance(layers, (str, bytes)) or not hasattr(layers, "__iter__"):
        raise TypeError(f"`real_kv_layers` is {layers!r}, but it must be a tuple of layer numbers.")
    layers = tuple(layers)
    if not 1 <= len(layers) <= MAX_REAL_KV_SOURCES:
        raise ValueError(f"`real_kv_layers` has {len(layers)} layers, but it must name between 1 and {MAX_REAL_KV_SOURCES}.")
    return tuple(check_int(layer, f"real_kv_layers[{i}]", -INT32_MAX, INT32_MAX) for i, layer in enumerate(layers))


def _check_kinds(kinds: Any) -> tuple[PerturbKind, ...]:
    if isinstance(kinds, (str, bytes)) or not hasattr(kinds, "__iter__"):
        raise TypeError(f"`kinds` is {kinds!r}, but it must be a tuple of kinds of faults.")
    members: tuple[Any, ...] = tuple(_enum_member(PerturbKind, kind, f"kinds[{i}]") for i, kind in enumerate(kinds))
    for kind in members:
        if members.count(kind) > 1:
            raise ValueError(f"`kinds` names {kind.value!r} {members.count(kind)} times, but it must name each kind once at most.")
    return members


def _parse_int(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"`{name}` is {text!r}, but it must be a whole number.") from None


def _parse_flag(name: str, text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"`{name}` is {text!r}, but it must be 1, true, yes or on, or 0, false, no or off.")


def _parse_layers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"`{name}` is {text!r}, but it must be a comma-separated list of layer numbers, such as 0,-1.") from None


def _parse_mode(name: str, text: str) -> CanaryMode:
    try:
        return CanaryMode(text.lower())
    except ValueError:
        raise ValueError(f"`{name}` is {text!r}, but it must be none, log or raise.") from None


def _parse_hash_mode(name: str, text: str) -> RealKvHashMode:
    try:
        return RealKvHashMode[text.upper()]
    except KeyError:
        raise ValueError(f"`{name}` is {text!r}, but it must be none, partial or all.") from None


def _parse_float(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"`{name}` is {text!r}, but it must be a number.") from None


def _parse_kinds(name: str, text: str) -> tuple[PerturbKind, ...]:
    if text.lower() == "none":
        return ()
    try:
        return tuple(PerturbKind(part.strip().lower()) for part in text.split(","))
    except ValueError:
        allowed = ", ".join(kind.value for kind in PerturbKind)
        raise ValueError(f"`{name}` is {text!r}, but it must be none, or a comma-separated list of {allowed}.") from None


def _parse_group(name: str, text: str) -> PoolKind:
    try:
        return PoolKind[text.upper()]
    except KeyError:
        raise ValueError(f"`{name}` is {text!r}, but it must be full or swa.") from None


_ENV_FIELDS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "MODE": ("mode", _parse_mode),
    "RING_CAPACITY": ("ring_capacity", _parse_int),
    "SWEEP_INTERVAL": ("sweep_interval", _parse_int),
    "REAL_DATA": ("real_kv_hash_mode", _parse_hash_mode),
    "ENABLE_WRITE_INPUT_ASSERT": ("enable_write_input_assert", _parse_flag),
    "ENABLE_VERIFY_TOKEN_ASSERT": ("enable_verify_token_assert", _parse_flag),
    "ENABLE_V_HALF": ("enable_v_half", _parse_flag),
    "REAL_KV_LAYERS": ("real_kv_layers", _parse_layers),
    "STATS_EVERY_N_STEPS": ("stats_every_n_steps", _parse_int),
    "VERIFY_STRIDE": ("verify_stride", _parse_int),
}

_PERTURB_ENV_FIELDS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "PERTURB_KINDS": ("kinds", _parse_kinds),
    "PERTURB_PROBABILITY": ("probability", _parse_float),
    "PERTURB_SEED": ("seed", _parse_int),
    "PERTURB_WARMUP_STEPS": ("warmup_steps", _parse_int),
    "PERTURB_TARGET_GROUP": ("target_group", _parse_group),
}
