"""The prefill process: takes prompts, answers each with its KV and records, and forgets it."""

from __future__ import annotations

import socket

import jax_kvcanary as kvc
from disaggregation import wire
from disaggregation.frames import Frame, FrameError, receive_frame, send_frame
from disaggregation.node import MAX_PROMPT, Node
from disaggregation.tiny import make_params

PREFILL_SLOTS = 29


def run_prefill(port: int) -> int:
    """Serve the decode process that listens at `port` of this machine, until it says stop or closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=wire.TIMEOUT_S) as connection:
        send_frame(connection, wire.hello())
        node = Node(make_params(), PREFILL_SLOTS)
        try:
            while (frame := receive_frame(connection)).kind == "prefill":
                send_frame(connection, answer(node, *wire.read_prefill(frame)))
        except FrameError:
            return 1  # nobody is left to report to
        except kvc.CanaryViolationError as error:
            send_frame(connection, Frame({"kind": "failed", "text": str(error)}))
            return 1
    return 0


def answer(node: Node, prompt: list[int], loss: wire.Loss | None) -> Frame:
    """One prompt: prefill, take KV and records out, release the slots."""
    row = 1
    (next_token,) = node.step([(row, prompt)], bucket=MAX_PROMPT)
    node.monitor.flush()  # a cache that is already wrong here is not sent
    slots, cache = node.slots(row), node.take(row)
    node.drop(row)
    return wire.cache(next_token, slots.tolist(), cache if loss is None else loss.apply(cache))
