"""Incidents to take pictures of: a small server, its faults, and the dumps that it leaves."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np

import jax_kvcanary as kvc
from helpers.loop_replay import ReplayPool  # with its attacher

TOKENS, ROWS, MAX_REQS, MAX_SEQ_LEN, KV_BYTES = 37, 5, 7, 41, 16

PRE_FORWARD, POST_FORWARD = (
    jax.jit(method, static_argnums=0, donate_argnums=1) for method in (kvc.Canary.pre_forward, kvc.Canary.post_forward)
)


def int32(values):
    return np.array(values, np.int32)


class Server:
    """Requests that prefill and decode, slots handed out in a shuffled order, and a canary with a monitor around each step."""

    def __init__(self, num_slots=211, *, window=0, ring_capacity=101, hash_mode=kvc.RealKvHashMode.ALL):
        self.window = window
        sizes = {"full": num_slots} | ({"swa": num_slots // 2} if window else {})
        self.kv = {name: np.zeros((size, 1, KV_BYTES), np.uint8) for name, size in sizes.items()}
        rng = np.random.default_rng(5)
        self.free = {name: rng.permutation(np.arange(1, size)).tolist() for name, size in sizes.items()}
        self.lut = np.zeros(num_slots, np.int32) if window else None
        self.table = np.zeros((MAX_REQS, MAX_SEQ_LEN), np.int32)
        self.lens = np.zeros(MAX_REQS, np.int32)
        config = kvc.CanaryConfig("log", ring_capacity=ring_capacity, real_kv_hash_mode=hash_mode, enable_v_half=False)
        capacities = kvc.CanaryLaunchCapacities.from_pool(num_slots, ROWS)
        self.canary, state = kvc.install_canary(self.pool(), config, capacities=capacities, swa_window_size=window)
        self.state = self.canary.mark_init_finished(state)
        self.monitor = kvc.CanaryMonitor(self.canary)

    def pool(self):
        return ReplayPool(full=self.kv["full"].copy(), swa=self.kv["swa"].copy() if self.window else None, lut=self.lut)

    def take(self):
        """A free slot of each pool."""
        slot = self.free["full"].pop()
        if self.window:
            self.lut[slot] = self.free["swa"].pop()
        return slot

    def share(self, row, other, count):
        """Let a new request begin with another one's slots."""
        self.table[row, :count] = self.table[other, :count]
        self.lens[row] = count

    def step(self, work, *, slots=None, jump=0):
        """One forward of some requests, by row: tokens of each; slots of the first one's tokens may be given, and positions jump."""
        ids, positions, out = np.zeros((3, TOKENS), np.int32)
        rows, at = np.zeros((ROWS, 3), np.int32), 0
        for i, (row, tokens) in enumerate(work.items()):
            prefix = int(self.lens[row])
            rows[i] = row, prefix, len(tokens)
            for position, token in enumerate(tokens, prefix):
                self.table[row, position] = slots.pop(0) if slots else self.take()
                ids[at], positions[at], out[at] = token, position + jump, self.table[row, position]
                at += 1
            self.lens[row] += len(tokens)
        batch = kvc.ForwardBatch.extend(
            input_ids=ids,
            positions=positions,
            out_cache_loc=out,
            req_pool_indices=rows[:, 0].copy(),
            prefix_lens=rows[:, 1].copy(),
            extend_seq_lens=rows[:, 2].copy(),
            req_to_token=self.table.copy(),
        )
        self.state, canary_step = PRE_FORWARD(self.canary, self.state, batch, self.pool())
        for name, kv in self.kv.items():
            own = out[:at] if name == "full" else self.lut[out[:at]]
            kv[own, 0] = (ids[:at, None] * 7 + positions[:at, None] + np.arange(KV_BYTES)) % 251
        self.state, report = POST_FORWARD(self.canary, self.state, canary_step, batch, self.pool())
        self.monitor.observe(report, self.state)
        for row in work if self.window else ():  # slots that left the window go back
            for slot in self.table[row, : max(int(self.lens[row]) - self.window, 0)].tolist():
                if self.lut[slot]:
                    self.free["swa"].append(int(self.lut[slot]))
                    self.lut[slot] = 0

    def decode(self, *rows, steps=1):
        for _ in range(steps):
            self.step({row: [100 * row + int(self.lens[row])] for row in rows})

    def prefill(self, row, count):
        self.step({row: [100 * row + int(self.lens[row]) + i for i in range(count)]})

    def end(self, row, *, release=True):
        """A request ends; its slots are free again, those that no other row holds."""
        slots = self.table[row, : self.lens[row]].copy()
        self.lens[row] = 0
        if release:
            self.state = self.canary.release(self.state, slots, self.pool())
        self.free["full"][:0] = slots.tolist()

    def dump(self, path, *, table=True, steps=True, pool=True) -> Path:
        self.monitor.flush(self.state)
        more = {"req_to_token": self.table, "req_lens": self.lens} if table else {}
        violations = self.monitor.violations if steps else ()
        return self.canary.dump(self.state, path, **more, violations=violations, pool=self.pool() if pool else None)


def warmed_up(**options):
    """Four requests, two of which share a prefix; one has ended and was released, another ended without."""
    server = Server(**options)
    server.prefill(1, 9)
    server.prefill(4, 6)
    server.share(2, 1, 5)
    server.prefill(2, 7)
    server.prefill(3, 8)
    server.decode(1, 2, 3, 4, steps=3)
    server.end(4)
    server.prefill(5, 4)
    server.end(5, release=False)
    return server


def sound(**options):
    server = warmed_up(**options)
    server.decode(1, 2, 3, steps=4)
    return server


def double_handout(**options):
    """Request 3 gets a slot that request 1 still holds: position 8 of it."""
    server = warmed_up(**options)
    slot = int(server.table[1, 8])
    server.step({3: [777]}, slots=[slot])
    server.decode(1, 2, 3, steps=3)
    return server


def kv_flip(**options):
    """A byte of request 2's position 6 changes."""
    server = warmed_up(**options)
    server.decode(1, 2, 3)
    slot = int(server.table[2, 6])
    server.kv["full"][slot, 0, 3] ^= 16
    server.decode(1, 2, 3, steps=2)
    return server


def trampled_row(**options):
    """Position 4 of request 3 is read from the slot of position 7 of request 1."""
    server = warmed_up(**options)
    server.table[3, 4] = server.table[1, 7]
    server.decode(1, 2, 3, steps=2)
    return server


def released_in_use(**options):
    """Request 3's position 5 was released although it is live."""
    server = warmed_up(**options)
    server.state = server.canary.release(server.state, server.table[3, 5:6].copy(), server.pool())
    server.decode(1, 2, 3)
    return server


def flood(**options):
    """The KV of the whole pool is overwritten, and the server goes on."""
    server = warmed_up(**options)
    for kv in server.kv.values():
        kv[:] ^= 1
    server.decode(1, 2, 3, steps=12)
    return server


def no_such_slot(**options):
    """Request 1's position 2 names a slot behind the pool's end."""
    server = warmed_up(**options)
    server.table[1, 2] = 100_000
    server.decode(1, 2, 3)
    return server


def jump(**options):
    """Request 3 writes its next position as the one behind it."""
    server = warmed_up(**options)
    server.step({3: [55]}, jump=1)
    return server


def window(**options):
    """An SWA pool of 4 positions, in which request 2's last slot is handed out again."""
    server = warmed_up(window=4, **options)
    server.decode(1, 2, 3, steps=2)
    taken = server.lut[server.table[2, server.lens[2] - 1]]
    new = server.free["full"].pop()
    server.lut[new] = taken
    server.step({3: [888]}, slots=[new])
    server.decode(1, 2, 3)
    return server


def small():
    """Two requests in 31 slots; the second gets a slot of the first. The picture of it stands in the README."""
    server = Server(31)
    server.prefill(1, 5)
    server.prefill(2, 3)
    server.step({2: [203]}, slots=[int(server.table[1, 2])])
    server.decode(1, 2)
    return server


INCIDENTS = {
    function.__name__: function
    for function in (sound, double_handout, kv_flip, trampled_row, released_in_use, flood, no_such_slot, jump, window)
}
