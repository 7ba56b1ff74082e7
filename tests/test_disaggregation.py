"""The example with two processes: its frames, its command, and what it does when a process dies."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import jax_kvcanary as kvc

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from disaggregation import decode, demo, wire
from disaggregation.frames import Frame, FrameError, receive_frame, send_frame
from disaggregation.node import MAX_PROMPT, Cache, Node, kv_shape
from disaggregation.tiny import make_params

COMMAND = [sys.executable, str(Path(__file__).resolve().parents[1] / "examples" / "disaggregated_serving.py")]
TIMEOUT_S = 300


@pytest.fixture
def ends():
    """Both ends of a connection, with little patience."""
    pair = socket.socketpair()
    for end in pair:
        end.settimeout(5)
    yield pair
    for end in pair:
        end.close()


# The command.


def test_the_command():
    # A process of its own must not take the GPU's memory from this one.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    run = subprocess.run(COMMAND, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    one, two, a, b, c, verdict = run.stdout.split("\n\n")[1:]
    tokens = [line for line in one.splitlines() if "[" in line]
    assert len(tokens) == len(demo.PROMPTS)
    assert len({token for line in tokens for token in json.loads(line.split(": ")[1])}) > 8  # not one byte over and over
    assert "canary in mode raise in both" in two
    assert [line for line in a.splitlines() if "[" in line] == tokens
    assert a.endswith("silent, and the same tokens as in one process")
    here = [int(slot) for slot in a.splitlines()[2].split("there, ")[1].removesuffix(" here").split()]
    lost = ", ".join(map(str, sorted(here[demo.LOST_KV.start : demo.LOST_KV.stop])))
    assert "  caught at step 2; the first that reads request 1 is 2\n" in b
    assert f"  verify_real_kv_hash at slots {lost}; the first of 8 findings:\n" in b
    assert "kv_canary violation: launch_tag=TAIL_" in b
    assert "  caught at step 3; the first that reads request 2 is 3\n  verify_chain_hash+verify_position+verify_real_kv_hash+" in c
    assert verdict == "OK: a was silent and right, b and c were caught at the first step\n"


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("import sys; sys.exit(3)", "The prefill process ended with exit code 3 before it connected."),
        (
            "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[-1]))).close()",
            "The connection was closed after 0 of 24 bytes of the lengths of a frame.",
        ),
        (
            "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[-1]))).sendall(b'GET / HTTP/1.1' + bytes(99))",
            "A frame begins with b'GET ', but it must begin with b'KVC1'.",
        ),
    ],
)
def test_a_prefill_process_that_dies_is_an_error_at_once(script, text):
    start = time.monotonic()
    with pytest.raises(FrameError) as caught, decode.start_prefill([sys.executable, "-c", script]):
        pass
    assert str(caught.value) == text
    assert time.monotonic() - start < 60


def fake_prefill(greeting, after):
    """A process that greets, and then does something else."""
    send = textwrap.dedent(
        f"""
        import socket, sys, time
        connection = socket.create_connection(("127.0.0.1", int(sys.argv[-1])))
        connection.sendall({greeting!r})
        {after}
        """
    )
    return [sys.executable, "-c", send]


def frame_bytes(frame):
    header = json.dumps(frame.header).encode()
    return struct.pack("<4sIQQ", b"KVC1", len(header), len(frame.kv), len(frame.records)) + header + frame.kv + frame.records


def ask(command, processes):
    """Start a prefill process and ask it for a prompt."""
    with decode.start_prefill(command) as prefiller:
        processes.append(prefiller.process)
        prefiller.admit()(None, 1, [1, 2, 3])


def test_another_hash_mode_is_refused():
    greeting = wire.hello()
    greeting.header["real_kv_hash_mode"] = "PARTIAL"
    with pytest.raises(FrameError, match=r"^The prefill process says .*PARTIAL.*, but this process needs .*ALL"):
        ask(fake_prefill(frame_bytes(greeting), "time.sleep(600)"), [])


def test_a_prefill_process_that_dies_later_is_an_error():
    processes = []
    with pytest.raises(FrameError, match=r"closed after 0 of 24 bytes|could not be sent|broke after"):
        ask(fake_prefill(frame_bytes(wire.hello()), "connection.recv(24)"), processes)
    assert processes[0].returncode is not None


def test_a_prefill_process_that_hangs_is_killed(monkeypatch):
    monkeypatch.setattr(wire, "TIMEOUT_S", 10.0)
    processes = []
    with pytest.raises(FrameError, match=r"^No more than 0 of 24 bytes of the lengths of a frame came before the time was up\.$"):
        ask(fake_prefill(frame_bytes(wire.hello()), "time.sleep(600)"), processes)
    assert processes[0].returncode == -9


def test_a_prefill_process_that_never_connects_is_killed(monkeypatch):
    monkeypatch.setattr(wire, "TIMEOUT_S", 1.0)
    with pytest.raises(FrameError, match=r"^The prefill process did not connect within 1 seconds\.$"):
        ask([sys.executable, "-c", "import time; time.sleep(600)"], [])


def test_the_prefill_process_ends_when_the_other_one_dies():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(120)
        process = subprocess.Popen([*COMMAND, "--prefill-for", str(server.getsockname()[1])], stderr=subprocess.PIPE)
        try:
            connection, _ = server.accept()
            connection.settimeout(120)
            with connection:
                assert receive_frame(connection) == wire.hello()
            assert (process.wait(120), process.stderr.read()) == (1, b"")
        finally:
            process.kill()
            process.communicate()


# Frames.


@pytest.mark.parametrize(
    "frame",
    [Frame({"kind": "stop"}), Frame({"kind": "cache", "text": "é\n"}, b"\0\xff" * 5, b""), Frame({}, bytes(3), bytes(range(256)) * 8191)],
    ids=["header", "KV", "large"],
)
def test_frames_there_and_back(ends, frame):
    sender = threading.Thread(target=send_frame, args=(ends[0], frame))
    sender.start()
    assert receive_frame(ends[1]) == frame
    sender.join(5)


def test_frames_follow_each_other(ends):
    first, second = Frame({"kind": "a"}, b"12", b"3"), Frame({"kind": "b"}, b"", b"45")
    send_frame(ends[0], first)
    send_frame(ends[0], second)
    assert [receive_frame(ends[1]), receive_frame(ends[1])] == [first, second]


def test_every_cut_of_a_frame_is_an_error():
    data = frame_bytes(Frame({"kind": "cache"}, b"12345", b"678"))
    for length in range(len(data)):
        here, there = socket.socketpair()
        with here, there:
            here.sendall(data[:length])
            here.shutdown(socket.SHUT_WR)
            with pytest.raises(FrameError, match=r"^The connection was closed after \d+ of \d+ bytes of "):
                receive_frame(there)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (struct.pack("<4sIQQ", b"KVC1", 2, 2**40, 0), "A frame announces 1099511627776 bytes of KV, but at most 1073741824 are taken."),
        (struct.pack("<4sIQQ", b"KVC1", 2**21, 0, 0), "A frame announces 2097152 bytes of header, but at most 1048576 are taken."),
        (struct.pack("<4sIQQ", b"KVC1", 2, 0, 0) + b"[]", "The header of a frame is a list, but it must be a JSON object."),
        (struct.pack("<4sIQQ", b"KVC1", 2, 0, 0) + b"{]", "The header of a frame is not JSON: "),
        (struct.pack("<4sIQQ", b"KVC1", 1, 0, 0) + b"\xff", "The header of a frame is not JSON: "),
    ],
)
def test_what_is_no_frame(ends, data, text):
    ends[0].sendall(data)
    with pytest.raises(FrameError) as caught:
        receive_frame(ends[1])
    assert str(caught.value).startswith(text)


# Caches.


@pytest.fixture(scope="module")
def params():
    return make_params()


@pytest.fixture
def sender(params):
    """A node that has prefilled a prompt of five tokens."""
    node = Node(params, 29)
    node.step([(1, [3, 1, 4, 1, 5])], bucket=MAX_PROMPT)
    return node


def test_a_cache_there_and_back(sender):
    cache = sender.take(1)
    assert cache.kv.shape == kv_shape(5)
    token, slots, back = wire.read_cache(wire.cache(7, sender.slots(1).tolist(), cache))
    assert (token, slots) == (7, sender.slots(1).tolist())
    np.testing.assert_array_equal(back.kv, cache.kv)
    for got, want in zip(jax.tree.leaves(back.records), jax.tree.leaves(cache.records), strict=True):
        np.testing.assert_array_equal(got, want)
    for slot, position in zip(slots, range(5), strict=True):
        np.testing.assert_array_equal(cache.kv[1, 0, position], sender.pool.k_buffer[1][slot])
        np.testing.assert_array_equal(cache.records.groups[0].v_tail[position], sender.state.groups[0].v_tail[slot])


def test_a_node_releases_what_it_drops(sender):
    slots = sender.slots(1)
    sender.drop(1)
    assert all((np.asarray(buffer)[slots] == 0xFF).all() for buffer in jax.tree.leaves(sender.state.groups))
    assert sender.slots(1).tolist() == []


def test_losses(sender):
    cache = sender.take(1)
    kv = wire.Loss(0, layer=1, start=2, stop=4).apply(cache)
    assert not kv.kv[1, :, 2:4].any()
    kv.kv[1, :, 2:4] = cache.kv[1, :, 2:4]
    np.testing.assert_array_equal(kv.kv, cache.kv)
    assert kv.records is cache.records
    record = wire.Loss(0).apply(cache)
    assert (record.records.num_slots, cache.records.num_slots) == (4, 5)
    assert wire.read_prefill(wire.prefill([1, 2], wire.Loss(3, 1, 2, 4))) == ([1, 2], wire.Loss(3, 1, 2, 4))
    assert wire.read_prefill(wire.prefill([1, 2], None)) == ([1, 2], None)


def test_bad_caches(sender):
    sound = wire.cache(7, [], sender.take(1))
    six = jax.tree.map(lambda array: np.concatenate([array, array[:1]]), sender.take(1).records).to_bytes()
    for changes, text in (
        ({"header": {"kind": "failed", "text": "a report"}}, "The prefill process gave up: a report"),
        ({"header": {"kind": "stop"}}, "A frame of kind stop came in place of a cache."),
        ({"header": {**sound.header, "num_tokens": 17}}, "A cache has 17 tokens, but it must have between 1 and 16."),
        ({"header": {**sound.header, "num_tokens": "5"}}, "A cache has '5' tokens, but it must have between 1 and 16."),
        ({"kv": sound.kv[:-1]}, "A cache of 5 tokens has 2559 bytes of KV, but its shape is [2, 2, 5, 2, 16] of float32."),
        ({"records": sound.records[:-1]}, "The records of a cache cannot be read: `data` has 667 bytes, but 5 records"),
        ({"records": six}, "A cache of 5 tokens has the records of 6."),
    ):
        with pytest.raises(FrameError) as caught:
            wire.read_cache(Frame(**{"header": sound.header, "kv": sound.kv, "records": sound.records, **changes}))
        assert str(caught.value).startswith(text)


def test_the_demo_says_what_is_wrong(params, capsys):
    """Its verdict is no formality: a silent loss, a finding in a sound run, and other tokens are all problems."""
    prompts = [list(prompt) for prompt in demo.PROMPTS[:2]]
    alone = decode.serve(params, prompts, 4, decode.admit_here)
    assert alone.error is None
    assert demo._report_sound(alone, alone, alone.slots) == []
    assert demo._report_loss(alone, 1, demo._wanted_for_kv) == ["WRONG: a loss was not caught"]
    other = decode.serve(params, prompts[::-1], 4, decode.admit_here)
    assert demo._report_sound(other, alone, other.slots) == ["WRONG: two processes do not say what one says"]

    def admit_with_loss(node, row, prompt):
        token = decode.admit_here(node, row, prompt)
        if row == 2:
            cache = node.take(row)
            node.drop(row)
            node.put(row, Cache(wire.Loss(1, layer=1, start=4, stop=7).apply(cache).kv, cache.records))
        return token

    faulty = decode.serve(params, prompts, 4, admit_with_loss)  # three positions, where four should be lost
    assert isinstance(faulty.error, kvc.CanaryViolationError)
    assert [len(text) for text in demo._report_sound(faulty, alone, {})] == [len(f"WRONG: a sound run has findings:\n{faulty.error}")]
    (problem,) = demo._report_loss(faulty, 1, demo._wanted_for_kv)
    assert problem.startswith("WRONG: these are not the findings that the loss in request 1 should give: [('TAIL', ")
    assert "verify_real_kv_hash at slots" in capsys.readouterr().out
