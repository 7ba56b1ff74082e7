"""KV pools that a canary knows: reference pool classes, and how buffers are attached to a pool."""

from jax_kvcanary.pools.attach import attach_canary_buffers, register_pool_attacher
from jax_kvcanary.pools.fused import FusedMHATokenToKVPool
from jax_kvcanary.pools.mha import MHATokenToKVPool

__all__ = ["FusedMHATokenToKVPool", "MHATokenToKVPool", "attach_canary_buffers", "register_pool_attacher"]
