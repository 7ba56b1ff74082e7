"""What the two processes say to each other, and how a cache becomes a frame.

| kind | from | carries |
| --- | --- | --- |
| hello | prefill | what both must agree on: the KV of a token, and what its record hashes |
| prefill | decode | a prompt, and what shall get lost |
| cache | prefill | the next token, the sender's slots, KV and records of the prompt |
| failed | prefill | why it gave up |
| stop | decode | nothing: the other process ends |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

import jax_kvcanary as kvc
from disaggregation.frames import Frame, FrameError
from disaggregation.node import KV_DTYPE, MAX_PROMPT, Cache, kv_shape
from disaggregation.tiny import CANARY

#: Seconds without a word from the other process after which it counts as dead. It may be compiling.
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Loss:
    """What gets lost between the two pools: KV of some positions in one layer (zeros arrive), or the last token's record."""

    request: int
    layer: int | None = None  # None: the record
    start: int = 0
    stop: int = 0

    def apply(self, cache: Cache) -> Cache:
        if self.layer is None:
            return Cache(cache.kv, jax.tree.map(lambda array: array[:-1], cache.records))
        kv = cache.kv.copy()
        kv[self.layer, :, self.start : self.stop] = 0
        return Cache(kv, cache.records)


def hello() -> Frame:
    """Records of a canary that hashes other bytes would all be findings: better to refuse them at the door."""
    return Frame(
        {
            "kind": "hello",
            "kv_of_a_token": list(kv_shape(1)),
            "dtype": KV_DTYPE.name,
            "real_kv_hash_mode": CANARY.real_kv_hash_mode.name,
            "real_kv_layers": list(CANARY.real_kv_layers),
        }
    )


def prefill(prompt: Sequence[int], loss: Loss | None) -> Frame:
    return Frame({"kind": "prefill", "prompt": list(prompt), "loss": None if loss is None else asdict(loss)})


def read_prefill(frame: Frame) -> tuple[list[int], Loss | None]:
    loss = frame.header["loss"]
    return frame.header["prompt"], None if loss is None else Loss(**loss)


def cache(next_token: int, slots: Sequence[int], content: Cache) -> Frame:
    header = {"kind": "cache", "next_token": next_token, "num_tokens": content.kv.shape[2], "slots": list(slots)}
    return Frame(header, np.ascontiguousarray(content.kv).tobytes(), content.records.to_bytes())


def read_cache(frame: Frame) -> tuple[int, list[int], Cache]:
    """Next token, the sender's slots, and the cache. Sizes are checked; what the bytes hold is the canary's work."""
    header: dict[str, Any] = frame.header
    if frame.kind == "failed":
        raise FrameError(f"The prefill process gave up: {header['text']}")
    if frame.kind != "cache":
        raise FrameError(f"A frame of kind {frame.kind} came in place of a cache.")
    count = header["num_tokens"]
    if not isinstance(count, int) or not 1 <= count <= MAX_PROMPT:
        raise FrameError(f"A cache has {count!r} tokens, but it must have between 1 and {MAX_PROMPT}.")
    shape = kv_shape(count)
    if len(frame.kv) != math.prod(shape) * KV_DTYPE.itemsize:
        raise FrameError(f"A cache of {count} tokens has {len(frame.kv)} bytes of KV, but its shape is {list(shape)} of {KV_DTYPE}.")
    kv = np.frombuffer(frame.kv, KV_DTYPE).reshape(shape)
    try:
        records = kvc.CanaryRecords.from_bytes(frame.records)
    except ValueError as error:
        raise FrameError(f"The records of a cache cannot be read: {error}") from error
    if records.num_slots > count:
        raise FrameError(f"A cache of {count} tokens has the records of {records.num_slots}.")
    return header["next_token"], header["slots"], Cache(kv, records)
