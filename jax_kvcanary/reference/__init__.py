"""The contract in plain NumPy and Python ints: what every backend must compute, written to be read.

``plan``, ``verify_step`` and ``write_step`` take the arguments of the operations of the same name in
:mod:`jax_kvcanary` and return the same types with NumPy arrays in them. They run on the host, at some ten thousand
entries a second, and never change an argument.
"""

from jax_kvcanary.reference.hashes import mix3, real_kv_hash, slot_hash, source_hash, splitmix64
from jax_kvcanary.reference.plan import plan
from jax_kvcanary.reference.verify import verify_step
from jax_kvcanary.reference.write import write_step

__all__ = ["mix3", "plan", "real_kv_hash", "slot_hash", "source_hash", "splitmix64", "verify_step", "write_step"]
