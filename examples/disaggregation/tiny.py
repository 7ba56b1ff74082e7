"""A model that needs no download: small, random weights from a fixed key. Its tokens are bytes and make no sense."""

from __future__ import annotations

import jax
from smollm2.model import LayerParams, ModelConfig, Params

import jax_kvcanary as kvc

MODEL = ModelConfig(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, rope_base=10_000.0, rms_epsilon=1e-5)
VOCABULARY = 256
_FFN = 128

#: All layers are hashed, in full: the receiver must read the very bytes that the sender wrote.
CANARY = kvc.CanaryConfig(mode=kvc.CanaryMode.RAISE, real_kv_hash_mode=kvc.RealKvHashMode.ALL, real_kv_layers=(0, 1))


def make_params(seed: int = 5) -> Params:
    """Normal weights, float32; every process that calls this has the same model."""
    width, heads, kv_heads = (n * MODEL.head_dim for n in (MODEL.num_heads, MODEL.num_heads, MODEL.num_kv_heads))
    keys = iter(jax.random.split(jax.random.key(seed), 1 + 7 * MODEL.num_layers))

    def matrix(rows: int, columns: int, scale: float = 1.0) -> jax.Array:
        return scale * columns**-0.5 * jax.random.normal(next(keys), (rows, columns))

    layers = tuple(
        LayerParams(
            attn_norm=jax.numpy.ones(width),
            q=matrix(heads, width, 2.0),
            k=matrix(kv_heads, width, 2.0),
            v=matrix(kv_heads, width),
            o=matrix(width, heads, 2.0),
            ffn_norm=jax.numpy.ones(width),
            gate=matrix(_FFN, width),
            up=matrix(_FFN, width),
            down=matrix(width, _FFN, 2.0),
        )
        for _ in range(MODEL.num_layers)
    )
    return Params(embedding=matrix(VOCABULARY, width, 4.0), output_norm=jax.numpy.ones(width), layers=layers)
