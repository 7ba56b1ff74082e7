"""The decode process: starts the other one, takes its caches in, and goes on from there."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from smollm2.model import Params

import jax_kvcanary as kvc
from disaggregation import wire
from disaggregation.frames import Frame, FrameError, receive_frame, send_frame
from disaggregation.node import MAX_BATCH, MAX_PROMPT, Node

DECODE_SLOTS = 61
_POLL_S = 0.2
_STOP_S = 10.0

#: Gives a prompt a row of the node, its tokens in the pool, and returns the token after it.
Admit = Callable[[Node, int, Sequence[int]], int]


@dataclass
class Outcome:
    """What a run gave. With `error`, the tokens end where the canary stopped it."""

    tokens: dict[int, list[int]] = field(default_factory=dict)  # generated, by request
    slots: dict[int, list[int]] = field(default_factory=dict)  # of all tokens in the pool, by request
    first_step: dict[int, int] = field(default_factory=dict)  # step that first read a request's prompt
    error: kvc.CanaryViolationError | None = None


def serve(params: Params, prompts: Sequence[Sequence[int]], new_tokens: int, admit: Admit) -> Outcome:
    """Serve prompts with one decode step after each arrival, then to the end; request r has row r + 1."""
    node, outcome = Node(params, DECODE_SLOTS), Outcome()

    def decode() -> None:
        live = [request for request, tokens in outcome.tokens.items() if len(tokens) < new_tokens]
        for request in live:
            outcome.first_step.setdefault(request, node.steps + 1)
        try:
            following = node.step([(request + 1, outcome.tokens[request][-1:]) for request in live], bucket=MAX_BATCH)
        finally:
            outcome.slots.update({request: node.slots(request + 1).tolist() for request in live})
        for request, token in zip(live, following, strict=True):
            outcome.tokens[request].append(token)

    try:
        for request, prompt in enumerate(prompts):
            outcome.tokens[request] = [admit(node, request + 1, prompt)]
            decode()
        while any(len(tokens) < new_tokens for tokens in outcome.tokens.values()):
            decode()
        node.monitor.flush()
        for request in outcome.tokens:
            node.drop(request + 1)
    except kvc.CanaryViolationError as error:
        outcome.error = error
    return outcome


def admit_here(node: Node, row: int, prompt: Sequence[int]) -> int:
    """Prefill in this process."""
    return node.step([(row, prompt)], bucket=MAX_PROMPT)[0]


@dataclass
class Prefiller:
    """The connection to a prefill process. `slots` are those that it had each request's prompt in, of the last run."""

    connection: socket.socket
    process: subprocess.Popen[bytes]
    slots: dict[int, list[int]] = field(default_factory=dict)

    def admit(self, loss: wire.Loss | None = None) -> Admit:
        """Have prompts prefilled in the other process, and take in what comes; `loss` befalls its request on the way."""

        def admit(node: Node, row: int, prompt: Sequence[int]) -> int:
            lost = loss if loss is not None and loss.request == row - 1 else None
            send_frame(self.connection, wire.prefill(prompt, lost))
            next_token, self.slots[row - 1], cache = wire.read_cache(receive_frame(self.connection))
            node.put(row, cache)
            return next_token

        return admit


@contextlib.contextmanager
def start_prefill(command: Sequence[str]) -> Iterator[Prefiller]:
    """Start `command` with a port at its end, and wait until it has connected there and said hello.

    Whatever happens, the process is gone afterwards.

    Raises:
        FrameError: it ended, stayed silent, or hashes other bytes than this process.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = subprocess.Popen([*command, str(server.getsockname()[1])], stdin=subprocess.DEVNULL)
        try:
            with _accept(server, process) as connection:
                connection.settimeout(wire.TIMEOUT_S)
                greeting = receive_frame(connection).header
                if greeting != wire.hello().header:
                    raise FrameError(f"The prefill process says {greeting}, but this process needs {wire.hello().header}.")
                yield Prefiller(connection, process)
                send_frame(connection, Frame({"kind": "stop"}))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_STOP_S)
        finally:
            process.kill()
            process.wait()


def _accept(server: socket.socket, process: subprocess.Popen[bytes]) -> socket.socket:
    server.settimeout(_POLL_S)
    deadline = time.monotonic() + wire.TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            return server.accept()[0]
        except TimeoutError:
            if process.poll() is not None:
                raise FrameError(f"The prefill process ended with exit code {process.returncode} before it connected.") from None
    raise FrameError(f"The prefill process did not connect within {wire.TIMEOUT_S:.0f} seconds.")
