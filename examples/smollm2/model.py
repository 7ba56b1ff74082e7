"""The forward pass of a Llama model over a slot-based KV pool: plain JAX, float32, no framework."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

import jax_kvcanary as kvc
from jax_kvcanary.pools import MHATokenToKVPool

# The default on an accelerator may round float32 operands; the demo compares tokens across batch shapes.
_matmul = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


@dataclass(frozen=True)
class ModelConfig:
    """What the parameters do not say themselves. Hashable: a static argument of the jitted step."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_base: float
    rms_epsilon: float


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerParams:
    """One layer. Matrices are (out, in), all float32; `width` is num_heads * head_dim."""

    attn_norm: Array  # [width]
    q: Array  # [num_heads * head_dim, width], rotary halves
    k: Array  # [num_kv_heads * head_dim, width], rotary halves
    v: Array  # [num_kv_heads * head_dim, width]
    o: Array  # [width, num_heads * head_dim]
    ffn_norm: Array  # [width]
    gate: Array  # [ffn, width]
    up: Array  # [ffn, width]
    down: Array  # [width, ffn]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Params:
    """The whole model. The embedding is also the output head."""

    embedding: Array  # [vocab, width]
    output_norm: Array  # [width]
    layers: tuple[LayerParams, ...]


def allocate_pool(config: ModelConfig, num_slots: int) -> MHATokenToKVPool:
    """A zeroed pool: one K and one V array a layer, float32 [num_slots, num_kv_heads, head_dim]. Slot 0 is for padding."""
    return MHATokenToKVPool.allocate(
        num_slots=num_slots,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=jnp.float32,
    )


def forward(params: Params, batch: kvc.ForwardBatch, pool: MHATokenToKVPool, config: ModelConfig) -> tuple[Array, MHATokenToKVPool]:
    """Run the tokens of one step, write their K and V into the pool, and return the logits that follow each row.

    `batch` holds int32 arrays: input_ids, positions, out_cache_loc [tokens], live tokens packed in row order at the front;
    req_pool_indices, prefix_lens, extend_seq_lens [rows]; req_to_token [max_reqs, max_seq_len]. A prefill chunk and a decoded
    token differ in nothing but their length. Returns float32 logits [rows, vocab] at the last token of each row (of a row
    of padding, whatever token is at the index) and the pool with the new entries.
    """
    rows = batch.plan_input
    ends = jnp.cumsum(rows.extend_seq_lens)  # [rows]
    row_of_token = jnp.searchsorted(ends, jnp.arange(batch.input_ids.shape[0]), side="right")  # [tokens], == rows: padding
    is_live = row_of_token < ends.shape[0]
    request = jnp.where(is_live, rows.req_pool_indices[jnp.where(is_live, row_of_token, 0)], 0)  # [tokens]

    context = batch.req_to_token[jnp.maximum(request, 0)]  # [tokens, max_seq_len]
    visible = jnp.arange(context.shape[1])[None, :] <= batch.positions[:, None]
    context = jnp.where(visible & (context >= 0), context, 0)

    x = params.embedding[batch.input_ids]  # [tokens, width]
    rotation = _rotary_angles(batch.positions, config)
    for index, layer in enumerate(params.layers):
        h = _rms_norm(x, layer.attn_norm, config.rms_epsilon)
        q = _rotate(_split_heads(_matmul("ti,oi->to", h, layer.q), config.head_dim), rotation)
        k = _rotate(_split_heads(_matmul("ti,oi->to", h, layer.k), config.head_dim), rotation)
        v = _split_heads(_matmul("ti,oi->to", h, layer.v), config.head_dim)
        pool = pool.write(index, batch.out_cache_loc, k, v)
        attended = _attend(q, pool.k_buffer[index][context], pool.v_buffer[index][context], visible)
        x = x + _matmul("ti,oi->to", attended, layer.o)
        h = _rms_norm(x, layer.ffn_norm, config.rms_epsilon)
        gated = jax.nn.silu(_matmul("ti,oi->to", h, layer.gate)) * _matmul("ti,oi->to", h, layer.up)
        x = x + _matmul("ti,oi->to", gated, layer.down)

    last = _rms_norm(x[jnp.maximum(ends - 1, 0)], params.output_norm, config.rms_epsilon)  # [rows, width]
    return _matmul("ri,vi->rv", last, params.embedding), pool


def _rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon) * weight


def _split_heads(x: Array, head_dim: int) -> Array:
    """[tokens, heads * head_dim] → [tokens, heads, head_dim]."""
    return x.reshape(x.shape[0], -1, head_dim)


def _rotary_angles(positions: Array, config: ModelConfig) -> tuple[Array, Array]:
    """Cosines and sines, float32 [tokens, 1, head_dim // 2] each."""
    half = config.head_dim // 2
    frequencies = config.rope_base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions.astype(jnp.float32)[:, None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def _rotate(x: Array, rotation: tuple[Array, Array]) -> Array:
    """Rotary embedding of [tokens, heads, head_dim] in the form that pairs the two halves of a head."""
    cos, sin = rotation
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _attend(q: Array, k: Array, v: Array, visible: Array) -> Array:
    """Grouped-query attention of each token over its own context.

    q [tokens, heads, head_dim]; k, v [tokens, context, kv_heads, head_dim]; visible bool [tokens, context]. Returns
    [tokens, heads * head_dim].
    """
    tokens, heads, head_dim = q.shape
    grouped = q.reshape(tokens, k.shape[2], heads // k.shape[2], head_dim)
    scores = _matmul("tkgd,tckd->tkgc", grouped, k) * head_dim**-0.5
    weights = jax.nn.softmax(jnp.where(visible[:, None, None, :], scores, -jnp.inf), axis=-1)
    return _matmul("tkgc,tckd->tkgd", weights, v).reshape(tokens, heads * head_dim)
