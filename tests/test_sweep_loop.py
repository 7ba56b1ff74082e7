"""Sweeps between the steps of a loop: silent over a sound prefix cache, and findings at slots that no request uses."""

from __future__ import annotations

import dataclasses
import logging
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_kvcanary as kvc
from helpers.loops import CONFIG, NUM_SLOTS, Loop, at, int32, tokens_of
from helpers.trees import Node, empty_root, entries_of
from helpers.window_pool import WindowPool
from jax_kvcanary import CanaryLaunchTag as Tag
from jax_kvcanary import FailReason as Reason
from jax_kvcanary import PoolKind

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from smollm2.radix import RadixTree

FULL_SWEEP, SWA_SWEEP = (Tag.SWEEP_K_FULL, Tag.SWEEP_V_FULL), (Tag.SWEEP_K_SWA, Tag.SWEEP_V_SWA)
SWEEP = jax.jit(kvc.Canary.sweep, static_argnums=0, static_argnames="kind", donate_argnums=1)

#: Two prompts behind one prefix, and one that leaves it early.
STEM = [101, 102, 103, 104, 105]
PROMPTS = ([*STEM, 6, 7, 8], [*STEM, 9, 10], [101, 102, 40, 41, 42])


class CachedLoop(Loop):
    """A loop whose requests leave their slots to a radix tree when they end, which is at once."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.tree = RadixTree()

    def serve(self, tokens, written=None):
        """Findings of one request: the prefix from the tree, the rest in one step. ``written`` are its tokens as the pool has them."""
        held, _ = self.tree.match(tokens)
        self.requests.table[1, : len(held)] = held
        self.requests.place(1, len(held), len(tokens) - len(held))
        found = self.step(self.requests.batch((1, len(held), (written or tokens)[len(held) :])))
        self.tree.insert(tokens, self.requests.table[1, : len(tokens)].tolist())
        return found

    def serve_all(self):
        assert [self.serve(prompt) for prompt in PROMPTS] == [[]] * len(PROMPTS)

    def slots_of(self, tokens):
        slots, _ = self.tree.match(tokens)
        assert len(slots) == len(tokens)
        return slots

    def evict(self, count, *, release=True):
        """Drop cached slots, and give them to the next request."""
        freed = self.tree.evict(count)
        assert len(freed) == count
        if release:
            self.state = self.canary.release(self.state, int32(freed), self.pool)
        self.requests.free.extend(freed)
        return freed

    def sweep(self, root=None, **options):
        """Findings of a sweep."""
        plan = kvc.sweep_plan(root or self.tree.root, **options)
        self.state, report = SWEEP(self.canary, self.state, plan, self.pool, kind=options.get("kind", PoolKind.FULL))
        return self.gained(report)

    def counters(self, name):
        return dict(zip(Tag, kvc.to_int64(getattr(self.state.device_state, name)).tolist(), strict=True))

    def flip(self, slot, *, half="v_buffer", pool="", layer=-1):
        """Change one bit of a slot's KV."""

        def flipped(part):
            buffers = [np.array(buffer) for buffer in getattr(part, half)]
            buffers[layer].reshape(NUM_SLOTS, -1).view(np.uint8)[slot, 5] ^= 4
            return dataclasses.replace(part, **{half: tuple(map(jnp.asarray, buffers))})

        self.pool = dataclasses.replace(self.pool, **{pool: flipped(getattr(self.pool, pool))}) if pool else flipped(self.pool)


# Sound trees.


@pytest.mark.parametrize("release", [True, False], ids=["release", "keep"])
def test_a_sound_tree_is_silent(release):
    """Shared prefixes, nodes that are split, evicted slots that others write again."""
    loop, swept, branches = CachedLoop(), 0, 0
    for turn in range(4):
        for prompt in PROMPTS:
            assert loop.serve([*prompt, 200 + turn]) == []
            assert loop.sweep() == []
            swept += loop.tree.num_slots()
        branches = max(branches, sum(len(node.children) > 1 for node in loop.tree.nodes()))
        loop.evict(5 + turn, release=release)
        assert loop.sweep() == []
        swept += loop.tree.num_slots()
    assert branches >= 2
    for tag in FULL_SWEEP:
        assert loop.counters("kernel_run_counters")[tag] == 16
        assert loop.counters("slot_run_counters")[tag] == swept > 200


def test_a_tree_of_a_draft_pool():
    """The slot of position p holds the token of position p + 1: known within a node, and from pairs everywhere."""
    loop = CachedLoop(kv_token_id_vs_position_offset=1)
    assert loop.serve(STEM, written=[*STEM[1:], 9]) == []
    slots = loop.slots_of(STEM)
    assert loop.sweep(kv_token_id_vs_position_offset=1) == []
    pairs = empty_root()
    pairs.add(list(zip(STEM, [*STEM[1:], 9], strict=True)), slots)
    assert loop.sweep(pairs, kv_token_id_vs_position_offset=1) == []
    found = sorted(entry for slot in slots for entry in at(FULL_SWEEP, slot, Reason.VERIFY_TOKEN_MISMATCH))
    assert loop.sweep() == loop.sweep(pairs) == found
    pairs.children[0].key[4] = (105, 8)
    assert loop.sweep(pairs, kv_token_id_vs_position_offset=1) == at(FULL_SWEEP, slots[4], Reason.VERIFY_TOKEN_MISMATCH)


def test_an_evicted_node_in_between_is_silent_and_what_follows_is_checked():
    loop = CachedLoop()
    loop.serve_all()
    node = loop.tree.match(STEM)[1]
    slots = loop.slots_of(PROMPTS[0])
    before = loop.tree.num_slots()
    released, node.value = node.value, None
    loop.state = loop.canary.release(loop.state, int32(released), loop.pool)
    assert loop.sweep() == []
    assert loop.counters("slot_run_counters")[Tag.SWEEP_K_FULL] == before - len(released)
    loop.flip(slots[6])
    assert loop.sweep() == at(FULL_SWEEP[1:], slots[6], Reason.VERIFY_REAL_KV_HASH_MISMATCH)


# Faults that no request notices, and what looks like them.


@pytest.mark.parametrize(("half", "tag"), [("k_buffer", Tag.SWEEP_K_FULL), ("v_buffer", Tag.SWEEP_V_FULL)])
def test_bytes_of_a_cached_slot(half, tag):
    loop = CachedLoop()
    loop.serve_all()
    slot = loop.slots_of(PROMPTS[0])[6]
    loop.flip(slot, half=half)
    assert loop.serve([300, 301]) == []  # no request uses it
    assert loop.sweep() == at([tag], slot, Reason.VERIFY_REAL_KV_HASH_MISMATCH)


def test_bytes_of_a_freed_slot_are_nobodys():
    loop = CachedLoop()
    loop.serve_all()
    slot = loop.slots_of(PROMPTS[0])[6]
    loop.tree.match(PROMPTS[1])
    loop.tree.match(PROMPTS[2])
    assert slot in loop.evict(2)
    loop.flip(slot)
    assert loop.serve([300]) == []
    assert loop.sweep() == []


def test_a_cached_slot_that_is_handed_out_again():
    loop = CachedLoop()
    loop.serve_all()
    slots = loop.slots_of(PROMPTS[0])
    loop.requests.free.append(slots[6])
    assert loop.serve([300]) == []
    assert loop.requests.table[1, 0] == slots[6]
    stolen = Reason.VERIFY_CHAIN_HASH_MISMATCH | Reason.VERIFY_POSITION_MISMATCH | Reason.VERIFY_TOKEN_MISMATCH
    found = at(FULL_SWEEP, slots[6], stolen) + at(FULL_SWEEP, slots[7], Reason.VERIFY_CHAIN_HASH_MISMATCH)
    assert loop.sweep() == sorted(found)


def test_a_freed_slot_that_is_handed_out_again():
    loop = CachedLoop()
    loop.serve_all()
    slot = loop.slots_of(PROMPTS[0])[7]
    loop.tree.match(PROMPTS[1])
    loop.tree.match(PROMPTS[2])
    assert loop.evict(1, release=False) == [slot]
    assert loop.serve([300]) == []
    assert loop.requests.table[1, 0] == slot
    assert loop.sweep() == []


def test_a_wrong_token_in_the_tree():
    loop = CachedLoop()
    loop.serve_all()
    node = loop.tree.match(STEM)[1]
    slot = loop.slots_of(STEM)[4]
    node.key[-1] += 1
    assert loop.sweep() == at(FULL_SWEEP, slot, Reason.VERIFY_TOKEN_MISMATCH)
    node.value = None  # its tokens only count
    assert loop.sweep() == []


def test_a_slot_that_was_released_and_is_still_in_the_tree():
    loop = CachedLoop()
    loop.serve_all()
    slots = loop.slots_of(PROMPTS[2])
    loop.state = loop.canary.release(loop.state, int32(slots[-1:]), loop.pool)
    fresh = Reason.VERIFY_CHAIN_HASH_MISMATCH | Reason.VERIFY_POSITION_MISMATCH | Reason.VERIFY_REAL_KV_HASH_MISMATCH
    assert loop.sweep() == at(FULL_SWEEP, slots[-1], fresh | Reason.VERIFY_TOKEN_MISMATCH)


def test_a_slot_that_does_not_exist():
    loop = CachedLoop()
    loop.serve_all()
    node = loop.tree.match(PROMPTS[2])[1]
    node.value[-1] = NUM_SLOTS
    assert loop.sweep() == at(FULL_SWEEP, NUM_SLOTS, Reason.SLOT_OUT_OF_RANGE)


def test_nodes_that_requests_hold_may_be_left_out():
    loop = CachedLoop()
    loop.serve_all()
    held = loop.tree.match(STEM)[1]
    loop.tree.lock(held)
    slots = loop.slots_of(PROMPTS[0])
    loop.flip(slots[4], half="k_buffer")
    loop.flip(slots[5], half="k_buffer")
    held_slot, other = (at(FULL_SWEEP[:1], slot, Reason.VERIFY_REAL_KV_HASH_MISMATCH) for slot in slots[4:6])
    assert loop.sweep(include_locked=False) == other
    assert loop.sweep() == sorted(held_slot + other)


# A window group.


class WindowLoop(CachedLoop):
    """A pool with a window: every full slot has a window slot at first."""

    def __init__(self):
        super().__init__(pool_class=WindowPool, swa_window_size=4)
        self.set_lut(np.append(0, 1 + (np.arange(NUM_SLOTS - 1) * 5 + 3) % (NUM_SLOTS - 1)))

    def set_lut(self, lut):
        self.lut = lut
        self.pool = dataclasses.replace(self.pool, lut=jnp.asarray(lut, jnp.int32))

    def sweep_window(self, root):
        return self.sweep(root, kind=PoolKind.SWA, full_to_swa_index_mapping=self.pool.lut)


@pytest.fixture
def window():
    """A loop that served one line of nodes, the line as a tree, and the nodes."""
    loop, root = WindowLoop(), empty_root()
    tokens = tokens_of(1, 0, 11)
    assert loop.serve(tokens) == []
    slots = loop.slots_of(tokens)
    line, node = [], root
    for start, end in ((0, 3), (3, 7), (7, 11)):
        node = node.add(tokens[start:end], slots[start:end])
        line.append(node)
    return loop, root, line


def test_each_tag_of_a_sweep_runs(window):
    loop, root, _ = window
    assert loop.sweep(root) == loop.sweep_window(root) == []
    runs, slots = loop.counters("kernel_run_counters"), loop.counters("slot_run_counters")
    for tag in FULL_SWEEP + SWA_SWEEP:
        assert (runs[tag], slots[tag]) == (1, 11)


def test_tombstones(window):
    """Their window slots are somebody else's; the full pool still has theirs."""
    loop, root, (_, middle, last) = window
    lut = loop.lut.copy()
    taken = lut[middle.value]
    lut[middle.value] = 0
    lut[loop.requests.free[-4:]] = taken
    loop.set_lut(lut)
    assert loop.serve(tokens_of(2, 0, 4)) == []
    middle.swa_tombstone = True
    assert loop.sweep(root) == loop.sweep_window(root) == []
    assert loop.counters("slot_run_counters")[Tag.SWEEP_K_SWA] == 7
    middle.swa_tombstone = False  # absent in the table all the same: entries that are skipped
    assert loop.sweep_window(root) == []
    stale = lut.copy()
    stale[middle.value] = taken
    loop.set_lut(stale)  # a table that forgot to forget
    stolen = Reason.VERIFY_CHAIN_HASH_MISMATCH | Reason.VERIFY_POSITION_MISMATCH | Reason.VERIFY_TOKEN_MISMATCH
    found = [entry for slot in taken[1:] for entry in at(SWA_SWEEP, slot, stolen)]
    found += at(SWA_SWEEP, taken[0], stolen & ~Reason.VERIFY_POSITION_MISMATCH)  # both have it at position 3
    found += at(SWA_SWEEP, lut[last.value[0]], Reason.VERIFY_CHAIN_HASH_MISMATCH)
    assert loop.sweep_window(root) == sorted(found)


@pytest.mark.parametrize("half", [0, 1], ids=["k", "v"])
def test_bytes_of_a_window_slot(window, half):
    loop, root, (first, _, last) = window
    lut = loop.lut.copy()
    absent, slot = lut[first.value[1]], lut[last.value[2]]
    lut[first.value[1]] = 0
    loop.set_lut(lut)
    loop.flip(absent, half=("k_buffer", "v_buffer")[half], pool="swa")
    assert loop.sweep(root) == loop.sweep_window(root) == []
    loop.flip(slot, half=("k_buffer", "v_buffer")[half], pool="swa")
    assert loop.sweep(root) == []
    assert loop.sweep_window(root) == at([SWA_SWEEP[half]], slot, Reason.VERIFY_REAL_KV_HASH_MISMATCH)


def test_a_table_that_is_too_short(window):
    loop, root, (_, _, last) = window
    loop.set_lut(loop.lut[: max(last.value)])
    found = loop.sweep_window(root)
    assert set(found) == set(at(SWA_SWEEP, 2**31 - 1, Reason.SLOT_OUT_OF_RANGE))


# Compilations.


def test_a_growing_tree_compiles_for_few_sizes():
    loop, sizes = CachedLoop(), []

    @partial(jax.jit, static_argnums=0)
    def sweep(canary, state, plan, pool):
        sizes.append(plan.verify_slot_indices.shape[0])
        return canary.sweep(state, plan, pool)

    root = node = empty_root()
    for count in range(0, 5000, 37):
        plan = kvc.sweep_plan(root)
        assert len(entries_of(plan)) == count
        sweep(loop.canary, loop.state, plan, loop.pool)
        node = node.add(list(range(37)), [0] * 37)
    assert sizes == [256, 1024, 4096, 16384]


# With a monitor.


def run_with_sweeps(mode, handle):
    """Twelve steps, a sweep behind every third, and the KV of a cached slot changed behind step 7."""
    loop = CachedLoop(dataclasses.replace(CONFIG, mode=mode, sweep_interval=3))
    monitor = kvc.CanaryMonitor(loop.canary)
    swept_at = []

    def observed(state, report):
        loop.state = state
        try:
            monitor.observe(report, state)
        except kvc.CanaryViolationError as error:
            handle(step, error)

    step_of = jax.jit(loop.canary.wrap(lambda batch, pool: (batch.input_ids, pool)), donate_argnums=(0, 2))
    root = empty_root()
    for step in range(1, 13):
        loop.requests.place(1, step - 1, 1)
        state, report, _, loop.pool = step_of(loop.state, loop.requests.batch((1, step - 1, [step])), loop.pool)
        observed(state, report)
        if step == 1:
            root.add([step], loop.requests.table[1, :1].tolist())
        if step == 7:
            loop.requests.table[1, 0] = 0  # no request looks at it any more
            loop.flip(root.children[0].value[0])
        if loop.canary.sweep_due(step):
            swept_at.append(step)
            observed(*SWEEP(loop.canary, loop.state, kvc.sweep_plan(root), loop.pool))
    assert swept_at == [3, 6, 9, 12]
    return loop, monitor


def test_a_monitor_between_steps_and_sweeps(caplog):
    caplog.set_level(logging.WARNING, logger="jax_kvcanary")
    loop, monitor = run_with_sweeps("log", None)
    assert [violation.step for violation in monitor.violations] == [9]
    monitor.flush(loop.state)
    assert [(v.launch_tag, v.step, v.earliest_step) for v in monitor.violations] == [(Tag.SWEEP_V_FULL, step, step) for step in (9, 12)]
    messages = [record.getMessage().splitlines()[1] for record in caplog.records]
    assert messages == [f"  found at step {step}, in a sweep over cached slots, in the V records of the full pool" for step in (9, 12)]


def test_a_monitor_in_raise_mode_raises_for_a_sweep():
    raised = []
    loop, monitor = run_with_sweeps("raise", lambda step, error: raised.append((step, [v.step for v in error.violations])))
    assert raised == [(10, [9])]  # the report that follows the sweep's
    with pytest.raises(kvc.CanaryViolationError) as caught:
        monitor.flush(loop.state)
    assert [violation.step for violation in caught.value.violations] == [9, 12]


def test_a_finding_of_a_step_is_that_steps_when_a_sweep_follows():
    """The sweep's report has the step's rows too."""
    loop = CachedLoop()
    monitor = kvc.CanaryMonitor(loop.canary)
    loop.serve_all()
    slot = loop.slots_of(PROMPTS[0])[2]
    loop.flip(slot)
    assert loop.serve([*PROMPTS[0], 1]) != []
    loop.state, report = SWEEP(loop.canary, loop.state, kvc.sweep_plan(loop.tree.root), loop.pool)
    monitor.observe(report, loop.state)
    monitor.flush(loop.state)
    assert {(v.launch_tag, v.slot_idx, v.step, v.earliest_step) for v in monitor.violations} == {
        (Tag.TAIL_V_FULL, slot, 4, 1),
        (Tag.SWEEP_V_FULL, slot, 4, 1),
    }


def test_a_node_is_all_that_a_tree_needs():
    """The example's nodes and those of the tests are nodes, a tree is not."""
    tree = RadixTree()
    assert isinstance(tree.root, kvc.CacheNode)
    assert isinstance(Node([], []), kvc.CacheNode)
    assert not isinstance(tree, kvc.CacheNode)
