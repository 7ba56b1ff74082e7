"""A serving step with faults in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_kvcanary._checks import ArrayLike, check_type
from jax_kvcanary.buffers import CanaryState
from jax_kvcanary.canary import Canary
from jax_kvcanary.config import PerturbConfig, PerturbKind
from jax_kvcanary.perturb.batches import shift_position, swap_next_tokens, trample_req_to_token
from jax_kvcanary.perturb.kv import flip_cached_kv, flip_live_kv, flip_written_kv
from jax_kvcanary.perturb.target import Perturbation, PerturbTarget, step_number
from jax_kvcanary.report import CanaryReport

#: What ``wrap`` returns of the faults: for each kind that is configured, what was changed in this step.
Changes = dict[str, Perturbation]

_OF_THE_BATCH = {
    PerturbKind.REQ_TO_TOKEN: trample_req_to_token,
    PerturbKind.NEXT_TOKENS: swap_next_tokens,
    PerturbKind.POSITION: shift_position,
}


def wrap(
    canary: Canary, forward: Callable[..., tuple[Any, Any]], config: PerturbConfig
) -> Callable[..., tuple[CanaryState, CanaryReport, Any, Any, Changes]]:
    """Bracket a forward as :meth:`Canary.wrap` does, and plant the faults that a configuration names.

    Faults of the batch and of live KV are planted before ``pre_forward``, those of KV just written and of cached KV after
    ``post_forward``. Without kinds, or with probability 0, nothing is added to the step.

    Args:
        canary: the canary.
        forward: ``forward(*args, batch, pool) -> (out, pool)``.
        config: which faults, how often, and of which group.

    Returns:
        ``wrapped(state, step, *args, batch, pool, cached_slots=None) -> (state, report, out, pool, changes)``, to be jitted with
        ``state`` and ``pool`` donated. ``step`` is the number of the step, an int or an int32 or int64 scalar. ``cached_slots``, int32
        or int64 [n], are the full-pool slots that only the prefix cache holds, padded with -1; they are required exactly when the kind
        ``cached_kv`` is configured. ``changes`` has a :class:`Perturbation` for each kind that is configured, by its text.

    Raises:
        TypeError: an argument of a wrong type.
    """
    check_type(canary, "canary", Canary, ", as install_canary returns it")
    check_type(config, "config", PerturbConfig)
    kinds = config.kinds if config.probability > 0 else ()
    bracketed = canary.wrap(forward)

    def wrapped(
        state: CanaryState, step: Any, *args: Any, cached_slots: ArrayLike | None = None, **kwargs: Any
    ) -> tuple[CanaryState, CanaryReport, Any, Any, Changes]:
        if len(args) < 2:
            raise TypeError(
                "The wrapped forward takes the canary's state and the step's number first, and `batch` and `pool` as its last two "
                "positional arguments."
            )
        wanted = PerturbKind.CACHED_KV in config.kinds
        if wanted != (cached_slots is not None):
            raise ValueError(
                f"`cached_slots` is {'None' if wanted else 'an array'}, but it must be {'an array' if wanted else 'None'} when `config` "
                f"{'has' if wanted else 'lacks'} the kind {PerturbKind.CACHED_KV.value}."
            )
        *others, batch, pool = args
        step = step_number(step)
        # A probability of 0 leaves the step as it is, and says so in the same form.
        changes: Changes = {} if kinds else {kind.value: Perturbation.of(jnp.zeros((), bool)) for kind in config.kinds}

        def plant(kind: PerturbKind, function: Callable[..., Any], *what: Any) -> Any:
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(config.seed), list(PerturbKind).index(kind)), step)
            target = PerturbTarget.of(canary, state, config.target_group)
            times = {"probability": config.probability, "step": step, "warmup_steps": config.warmup_steps}
            changed, changes[kind.value] = function(key, target, *what, **times)
            return changed

        for kind, function in _OF_THE_BATCH.items():
            if kind in kinds:
                batch = plant(kind, function, batch, pool)
        if PerturbKind.LIVE_KV in kinds:
            pool = plant(PerturbKind.LIVE_KV, flip_live_kv, batch, pool)
        state, report, out, pool = bracketed(state, *others, batch, pool, **kwargs)
        # A count is never negative, but XLA does not know it: the faults below wait for the launches above, which read the pool in place.
        # Without an order between the two, the pool would be copied.
        with jax.enable_x64(True):
            step = step + (state.device_state.violation_log.violation_write_index[0] < 0)
        if PerturbKind.WRITTEN_KV in kinds:
            pool = plant(PerturbKind.WRITTEN_KV, flip_written_kv, batch, pool)
        if PerturbKind.CACHED_KV in kinds:
            pool = plant(PerturbKind.CACHED_KV, flip_cached_kv, cached_slots, pool)
        return state, report, out, pool, changes

    return wrapped
