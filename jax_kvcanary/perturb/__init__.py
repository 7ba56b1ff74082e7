"""Fault injection: jittable functions that break a serving loop on purpose, to see the canary find it.

Every function takes a PRNG key, what to hit (:class:`PerturbTarget`), the batch or the pool, and a probability, and returns the batch
or the pool with at most one fault in it, and a :class:`Perturbation` that says what was changed. :func:`wrap` brackets a forward as
:meth:`Canary.wrap` does and plants the faults of a :class:`~jax_kvcanary.PerturbConfig`.

Which fault a sound canary finds, when, and as what:

- :func:`trample_req_to_token`: in the same step, before the forward, ``verify_position``.
- :func:`swap_next_tokens`: with the input assert on in the same step, ``write_token``; with the table of expected tokens in the row's
  next step, ``verify_token``.
- :func:`shift_position`: in the same step, ``write_position``, where the row has a prefix or the input assert is on; else in the row's
  next step, ``verify_position``.
- :func:`flip_live_kv`, called before ``post_forward``: in the same step, after the forward, ``verify_real_kv_hash``.
- :func:`flip_written_kv`, called behind ``post_forward``: in the row's next step, after the forward, ``verify_real_kv_hash``.
- :func:`flip_cached_kv`: in the next sweep over the slot, ``verify_real_kv_hash``, or after the forward of a step that uses it again.

What it cannot see: a byte of a slot just written that is flipped before ``post_forward`` has fingerprinted it, bytes that the mode does
not hash, and tokens that are swapped where nobody says what they should be. All of it is wrong content that is consistent.
"""

from jax_kvcanary.perturb.batches import shift_position, swap_next_tokens, trample_req_to_token
from jax_kvcanary.perturb.kv import flip_cached_kv, flip_live_kv, flip_written_kv
from jax_kvcanary.perturb.loop import wrap
from jax_kvcanary.perturb.target import Perturbation, PerturbTarget

__all__ = [
    "PerturbTarget",
    "Perturbation",
    "flip_cached_kv",
    "flip_live_kv",
    "flip_written_kv",
    "shift_position",
    "swap_next_tokens",
    "trample_req_to_token",
    "wrap",
]
