"""A Llama in plain JAX with random weights, for what a step of it costs: decode through a pool of slots, and prefill."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from paged_attention import paged_attention

import jax_kvcanary as kvc

_EPSILON = 1e-5
_ROPE_BASE = 500_000.0
_QUERIES_AT_ONCE = 512  # of the prefill attention without cuDNN, which would else keep a score for each pair of tokens

#: attend(q, k, v, pool, layer, batch) -> [tokens, heads, head_dim]; k and v are those of the batch's tokens, and in the pool already.
Attend = Callable[[jax.Array, jax.Array, jax.Array, Any, int, kvc.ForwardBatch], jax.Array]


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; the defaults are those of a Llama of 8 billion parameters."""

    layers: int = 32
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    ffn: int = 14336
    vocab: int = 128256


class Layer(NamedTuple):
    """Weights of one layer, bfloat16, (in, out); those that read the same input lie side by side."""

    qkv: Any  # [width, (heads + 2 kv_heads) head_dim]
    out: Any  # [heads head_dim, width]
    gate_up: Any  # [width, 2 ffn]
    down: Any  # [ffn, width]
    norms: Any  # [2, width]


class Weights(NamedTuple):
    """Weights of a model, bfloat16."""

    embedding: Any  # [vocab, width]
    layers: tuple[Layer, ...]
    norm: Any  # [width]
    head: Any  # [width, vocab]


def random_weights(shape: Shape, seed: int = 0) -> Weights:
    """Weights made on the device, scaled so that activations keep their size."""
    queries = shape.heads * shape.head_dim
    layer_shapes = (
        (shape.width, queries + 2 * shape.kv_heads * shape.head_dim),
        (queries, shape.width),
        (shape.width, 2 * shape.ffn),
        (shape.ffn, shape.width),
    )

    @functools.partial(jax.jit, static_argnums=1)
    def matrices(key: jax.Array, shapes: tuple[tuple[int, int], ...]) -> list[jax.Array]:
        keys = jax.random.split(key, len(shapes))
        return [jax.random.normal(key, s, jnp.bfloat16) * s[0] ** -0.5 for key, s in zip(keys, shapes, strict=True)]

    ends, *keys = jax.random.split(jax.random.key(seed), shape.layers + 1)
    norms = jnp.ones((2, shape.width), jnp.bfloat16)
    layers = tuple(Layer(*matrices(key, layer_shapes), norms) for key in keys)
    embedding, head = matrices(ends, ((shape.vocab, shape.width), (shape.width, shape.vocab)))
    return Weights(embedding, layers, norms[0], head)


def decode(shape: Shape, weights: Weights, batch: kvc.ForwardBatch, pool: Any) -> tuple[jax.Array, Any]:
    """One token of each request. Returns the likeliest next tokens, int32 [bs], and the pool."""
    hidden, pool = _layers(shape, _attend_to_cache, weights, batch, pool)
    return _next_tokens(weights, hidden), pool


def prefill(shape: Shape, weights: Weights, batch: kvc.ForwardBatch, pool: Any, *, cudnn: bool) -> tuple[jax.Array, Any]:
    """All tokens of one request that has none in the cache. Returns the likeliest next token, int32 [1], and the pool."""
    hidden, pool = _layers(shape, _attend_with_cudnn if cudnn else _attend_in_chunks, weights, batch, pool)
    return _next_tokens(weights, hidden[-1:]), pool


def cudnn_attention_error(shape: Shape, tokens: int) -> Exception | None:
    """Why cuDNN cannot do the attention of a prefill here; None where it can. Compiles it, runs nothing."""
    of = [jax.ShapeDtypeStruct((tokens, heads, shape.head_dim), jnp.bfloat16) for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
    try:
        _causal_cudnn.lower(*of).compile()
    except Exception as error:  # whichever layer turns it down, each has exceptions of its own
        return error
    return None


def _layers(shape: Shape, attend: Attend, weights: Weights, batch: kvc.ForwardBatch, pool: Any) -> tuple[jax.Array, Any]:
    """All layers: the last hidden state [tokens, width], and the pool with the batch's K and V."""
    hidden = weights.embedding[batch.input_ids]
    turn = _rotation(batch.positions, shape.head_dim)
    for index, layer in enumerate(weights.layers):
        q, k, v = _project(layer, hidden, turn, shape)
        pool = pool.write(index, batch.out_cache_loc, k, v)
        hidden = _feed_forward(layer, hidden, attend(q, k, v, pool, index, batch))
    return hidden, pool


# Jitted, so that a layer is traced and lowered once for all of them; XLA inlines both.
@functools.partial(jax.jit, static_argnames="shape")
def _project(layer: Layer, hidden: jax.Array, turn: tuple[jax.Array, jax.Array], shape: Shape) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rotated queries and keys, and values, [tokens, heads, head_dim] each."""
    heads = (_norm(hidden, layer.norms[0]) @ layer.qkv).reshape(len(hidden), -1, shape.head_dim)
    q, k, v = jnp.split(heads, [shape.heads, shape.heads + shape.kv_heads], axis=1)
    return _rotate(q, turn), _rotate(k, turn), v


@jax.jit
def _feed_forward(layer: Layer, hidden: jax.Array, attended: jax.Array) -> jax.Array:
    hidden = hidden + attended.reshape(len(hidden), -1) @ layer.out
    gate, up = jnp.split(_norm(hidden, layer.norms[1]) @ layer.gate_up, 2, axis=-1)
    return hidden + (jax.nn.silu(gate) * up) @ layer.down


def _next_tokens(weights: Weights, hidden: jax.Array) -> jax.Array:
    return jnp.argmax(_norm(hidden, weights.norm) @ weights.head, axis=-1).astype(jnp.int32)


def _norm(hidden: jax.Array, weight: jax.Array) -> jax.Array:
    wide = hidden.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + _EPSILON)).astype(hidden.dtype) * weight


def _rotation(positions: jax.Array, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, float32 [tokens, 1, head_dim // 2] each."""
    half = head_dim // 2
    angles = positions.astype(jnp.float32)[:, None, None] * _ROPE_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    return jnp.cos(angles), jnp.sin(angles)


def _rotate(heads: jax.Array, turn: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotary embedding of [tokens, heads, head_dim] that pairs the halves of a head."""
    cos, sin = turn
    first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(heads.dtype)


def _attend_to_cache(q: jax.Array, k: jax.Array, v: jax.Array, pool: Any, layer: int, batch: kvc.ForwardBatch) -> jax.Array:
    del k, v  # the pool has them
    lengths = batch.plan_input.prefix_lens + batch.plan_input.extend_seq_lens
    return _paged_attention(q, pool.k_buffer[layer], pool.v_buffer[layer], batch.req_to_token, batch.plan_input.req_pool_indices, lengths)


_paged_attention = jax.jit(paged_attention)


def _attend_with_cudnn(q: jax.Array, k: jax.Array, v: jax.Array, pool: Any, layer: int, batch: kvc.ForwardBatch) -> jax.Array:
    del pool, layer, batch
    return _causal_cudnn(q, k, v)


@jax.jit
def _causal_cudnn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q[None], k[None], v[None], is_causal=True, implementation="cudnn")[0]


def _attend_in_chunks(q: jax.Array, k: jax.Array, v: jax.Array, pool: Any, layer: int, batch: kvc.ForwardBatch) -> jax.Array:
    """Causal attention without cuDNN: some queries at a time against all keys, so that not all scores exist at once."""
    del pool, layer, batch
    tokens, heads, head_dim = q.shape
    chunk = next(size for size in range(min(_QUERIES_AT_ONCE, tokens), 0, -1) if tokens % size == 0)
    grouped = q.reshape(tokens // chunk, chunk, k.shape[1], -1, head_dim)

    def attend(first_and_queries: tuple[jax.Array, jax.Array]) -> jax.Array:
        first, queries = first_and_queries
        scores = jnp.einsum("tkgd,ckd->kgtc", queries, k, preferred_element_type=jnp.float32) * head_dim**-0.5
        visible = jnp.arange(tokens) <= first + jnp.arange(chunk)[:, None]
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1).astype(v.dtype)
        return jnp.einsum("kgtc,ckd->tkgd", weights, v)

    return jax.lax.map(attend, (jnp.arange(0, tokens, chunk), grouped)).reshape(tokens, heads, head_dim)
