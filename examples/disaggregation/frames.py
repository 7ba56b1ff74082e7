"""Messages on a stream socket: three lengths, then a header in JSON, KV bytes and records.

Nothing that arrives is executed or unpickled. Lengths are bounded before memory is taken, and a connection that closes in the middle of
a frame is an error that says how much was missing.
"""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import dataclass
from typing import Any

_PREFIX = struct.Struct("<4sIQQ")  # magic, bytes of header, KV and records
_MAGIC = b"KVC1"
_MAX_HEADER = 1 << 20
_MAX_PART = 1 << 30


class FrameError(ConnectionError):
    """The other end closed the connection, stayed silent for too long, or sent what is no frame."""


@dataclass(frozen=True)
class Frame:
    """One message. `header["kind"]` says what it is."""

    header: dict[str, Any]
    kv: bytes = b""
    records: bytes = b""

    @property
    def kind(self) -> str:
        return str(self.header.get("kind"))


def send_frame(connection: socket.socket, frame: Frame) -> None:
    header = json.dumps(frame.header).encode()
    prefix = _PREFIX.pack(_MAGIC, len(header), len(frame.kv), len(frame.records))
    try:
        connection.sendall(b"".join([prefix, header, frame.kv, frame.records]))
    except OSError as error:
        raise FrameError(f"A frame of kind {frame.kind} could not be sent: {error}.") from error


def receive_frame(connection: socket.socket) -> Frame:
    magic, *lengths = _PREFIX.unpack(_receive(connection, _PREFIX.size, "the lengths of a frame"))
    if magic != _MAGIC:
        raise FrameError(f"A frame begins with {magic!r}, but it must begin with {_MAGIC!r}.")
    for length, limit, what in zip(lengths, (_MAX_HEADER, _MAX_PART, _MAX_PART), ("header", "KV", "records"), strict=True):
        if length > limit:
            raise FrameError(f"A frame announces {length} bytes of {what}, but at most {limit} are taken.")
    header, kv, records = (_receive(connection, length, what) for length, what in zip(lengths, ("a header", "KV", "records"), strict=True))
    try:
        content = json.loads(header)
    except ValueError as error:
        raise FrameError(f"The header of a frame is not JSON: {error}.") from error
    if not isinstance(content, dict):
        raise FrameError(f"The header of a frame is a {type(content).__name__}, but it must be a JSON object.")
    return Frame(content, kv, records)


def _receive(connection: socket.socket, length: int, what: str) -> bytes:
    data = bytearray()
    while len(data) < length:
        try:
            part = connection.recv(min(length - len(data), 1 << 20))
        except TimeoutError as error:
            raise FrameError(f"No more than {len(data)} of {length} bytes of {what} came before the time was up.") from error
        except OSError as error:
            raise FrameError(f"The connection broke after {len(data)} of {length} bytes of {what}: {error}.") from error
        if not part:
            raise FrameError(f"The connection was closed after {len(data)} of {length} bytes of {what}.")
        data += part
    return bytes(data)
