"""KV pools that a canary knows: reference pool classes, and how buffers are attached to a pool."""

from jax_kvcanary.pools.attach import attach_canary_buffers, register_pool_attacher
from jax_kvcanary.pools.deepseek_v4 import DeepSeekV4TokenToKVPool, attach_deepseek_v4, pack_deepseek_v4_tokens
from jax_kvcanary.pools.fp4 import MHATokenToKVPoolFP4
from jax_kvcanary.pools.fused import FusedMHATokenToKVPool, attach_fused
from jax_kvcanary.pools.layouts import make_packed_source, make_row_source
from jax_kvcanary.pools.mha import MHATokenToKVPool, attach_mha
from jax_kvcanary.pools.mla import MLATokenToKVPool, attach_mla
from jax_kvcanary.pools.swa import SWAKVPool, attach_swa

for _pool_class, _attacher in (
    (MHATokenToKVPool, attach_mha),
    (MHATokenToKVPoolFP4, attach_mha),
    (FusedMHATokenToKVPool, attach_fused),
    (MLATokenToKVPool, attach_mla),
    (SWAKVPool, attach_swa),
    (DeepSeekV4TokenToKVPool, attach_deepseek_v4),
    ("sgl_jax.srt.mem_cache.memory_pool.MHATokenToKVPool", attach_fused),
    ("sgl_jax.srt.mem_cache.memory_pool.MLATokenToKVPool", attach_mla),
    ("sgl_jax.srt.mem_cache.memory_pool.SWAKVPool", attach_swa),
):
    register_pool_attacher(_pool_class, _attacher)

__all__ = [
    "DeepSeekV4TokenToKVPool",
    "FusedMHATokenToKVPool",
    "MHATokenToKVPool",
    "MHATokenToKVPoolFP4",
    "MLATokenToKVPool",
    "SWAKVPool",
    "attach_canary_buffers",
    "make_packed_source",
    "make_row_source",
    "pack_deepseek_v4_tokens",
    "register_pool_attacher",
]
