"""What a picture says: chains, the first finding, the map's cells, and the text of it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import jax_kvcanary as kvc
from helpers.dumps import CREATED, crowded, fresh, make_dump, write_chains
from helpers.incidents import INCIDENTS
from jax_kvcanary.constants import FailReason as Reason
from jax_kvcanary.constants import PoolKind
from jax_kvcanary.picture.chains import Chains
from jax_kvcanary.picture.grid import Grid
from jax_kvcanary.picture.incident import FindingKind, Incident, SlotState
from jax_kvcanary.reference import mix3
from jax_kvcanary.reference.hashes import ANCHOR_HASH, to_signed

BROKEN_CHAIN, BROKEN_POSITION = Reason.VERIFY_CHAIN_HASH_MISMATCH, Reason.VERIFY_POSITION_MISMATCH


@pytest.fixture(scope="module")
def incident(tmp_path_factory):
    """The incident of a fault by name, as the dump of it says; table and steps are those of the server unless left out."""
    servers, folder = {}, tmp_path_factory.mktemp("incidents")

    def make(name, *, kind=None, half=None, **options):
        server = servers.setdefault(name, INCIDENTS[name]()) if name not in servers else servers[name]
        return Incident.of(kvc.load_dump(server.dump(folder / "d", **options)), kind, half)

    return make


# Chains by hand.


def chain_of(*tokens):
    """Records of a request from position 0, int64 [n, 4], worked out with the ints of the reference."""
    rows, prev = [], ANCHOR_HASH
    for position, token in enumerate(tokens):
        rows.append((token, position, to_signed(prev), 0))
        prev = mix3(prev, token, position)
    return np.array(rows, np.int64)


def test_requests_come_back_from_their_records():
    records = fresh(11)
    records[[7, 3, 9]] = chain_of(5, 6, 7)
    records[[2, 8]] = chain_of(50, 60)
    chains = Chains.of(records)
    assert chains.path(3) == [7, 3, 9]
    assert chains.path(8) == [2, 8]
    assert chains.parent.tolist() == [-1, -1, -1, 7, -1, -1, -1, -1, 2, 3, -1]
    assert np.flatnonzero(chains.anchored).tolist() == [2, 7]
    assert np.flatnonzero(chains.written).tolist() == [2, 3, 7, 8, 9]
    assert chains.ends().tolist() == [8, 9]
    assert chains.branch.tolist() == [-1, -1, 2, 7, -1, -1, -1, 7, 2, 7, -1]
    assert (chains.before(9, 1), chains.behind(7, 9), chains.behind(9, 9)) == ([3], [3, 9], [])
    assert not chains.orphaned.any()
    assert not chains.ambiguous.any()


def test_a_shared_prefix_has_several_successors():
    records = fresh(11)
    records[[1, 2, 3, 4]] = chain_of(5, 6, 7, 8)
    records[[1, 2, 9]] = chain_of(5, 6, 70)
    records[[1, 5]] = chain_of(5, 60)
    chains = Chains.of(records)
    assert chains.parent[[2, 3, 4, 9, 5]].tolist() == [1, 2, 3, 2, 1]
    assert chains.path(4) == chains.path(1) == [1, 2, 3, 4]
    assert chains.path(9) == [1, 2, 9]
    assert chains.path(5) == [1, 5]
    assert chains.branch[[1, 2, 3, 4, 9, 5]].tolist() == [1, 1, 1, 1, 9, 5]
    assert chains.ends().tolist() == [4, 5, 9]


def test_of_equal_records_the_nearest_is_the_predecessor():
    records = fresh(23)
    records[[3, 4]] = chain_of(5, 6)
    records[[19, 20]] = chain_of(5, 6)
    records[[3, 4, 18]] = chain_of(5, 6, 7)  # nearer to 20
    records[[3, 4, 12]] = chain_of(5, 6, 8)  # as near to both
    chains = Chains.of(records)
    assert chains.parent[[4, 20, 18, 12]].tolist() == [3, 19, 20, 4]
    assert np.flatnonzero(chains.ambiguous).tolist() == [4, 12, 18, 20]
    assert [chains.with_hash(int(chains.hashes[4].view(np.int64)), near) for near in (1, 22)] == [4, 20]
    assert chains.with_hash(12345, 1) is None


def test_what_is_no_predecessor():
    records = fresh(9)
    records[0] = chain_of(5)[0]  # the padding slot
    records[4] = chain_of(5, 6)[1]  # so this one's predecessor is gone
    records[[5, 6]] = 0  # mix3(0, 0, 0) is 0: each would follow the other, and itself
    records[8] = -1, -1, 17, -1  # not quite a fresh one
    chains = Chains.of(records)
    assert (chains.parent == -1).all()
    assert np.flatnonzero(chains.orphaned).tolist() == [4, 5, 6, 8]
    assert Chains.of(fresh(3)).ends().tolist() == []
    assert Chains.of(fresh(1)).written.tolist() == [False]


@pytest.mark.parametrize("seed", [1, 2])
def test_chains_of_a_crowded_pool(seed):
    """Against the slots that the requests were written to, some of which share prefixes."""
    records, slots = crowded(997, 30, 31, seed)
    chains = Chains.of(records)
    for own in slots.tolist():
        assert chains.path(own[13]) == own
    assert len(np.unique(chains.branch[chains.written])) == 30
    assert chains.ends().tolist() == sorted(slots[:, -1].tolist())


# The first finding, in a sentence.

SENTENCES = {
    "double_handout": (
        "Slot 134 was overwritten: it held position 8 of request row 1, and now holds position 11 of request row 3.",
        "12 findings in 2 slots since step 10.",
    ),
    "kv_flip": (
        "KV bytes of slot 86 (position 6 of request row 2) changed, and its record did not.",
        "2 findings in 1 slot since step 10.",
    ),
    "trampled_row": (
        "Position 4 of request row 3 is read from slot 144, which holds position 7 of request row 1; the right record is in slot 15.",
        "8 findings in 2 slots since step 9.",
    ),
    "released_in_use": (
        "Slot 84 is read as position 5 of request row 3, but it is empty: released, or never written.",
        "4 findings in 2 slots since step 9.",
    ),
    "flood": (
        "KV bytes of slot 49 (position 0 of request row 3) changed, and its record did not.",
        "456 findings in at least 33 slots since step 9.",
    ),
    "no_such_slot": (
        "Position 2 of request row 1 has slot index 100000, which does not exist: the pool has 211 slots.",
        "4 findings in 1 slot since step 9.",
    ),
    "jump": (
        "Slot 93 was written with position 12 where position 11 of request row 3 was due.",
        "2 findings in 1 slot since step 9.",
    ),
    "window": (
        "Slot 15 holds position 13 of request row 3 where position 16 of request row 2 is expected.",
        "4 findings in 2 slots since step 12.",
    ),
    "sound": ("No finding in 12 steps.", "49 slots hold the records of 4 requests."),
}


@pytest.mark.parametrize("name", INCIDENTS)
def test_the_headline_names_request_slot_and_position(incident, name):
    got = incident(name)
    assert (got.headline, got.tally) == SENTENCES[name]


#: The letters that requests have where there is no table, by their rows.
ROWS_BY_LETTER = {
    "double_handout": {1: "A", 3: "B"},
    "trampled_row": {3: "A", 1: "B"},
    "window": {2: "A", 3: "B"},
    "jump": {3: "A"},
    "released_in_use": {3: "A"},
    "flood": {3: "A"},
    "kv_flip": {2: "A"},
}


@pytest.mark.parametrize("name", ROWS_BY_LETTER)
def test_the_records_alone_tell_the_same(incident, name):
    """Without table, steps and pool, the requests have letters, and everything else is the same."""
    got, known = incident(name, table=False, steps=False, pool=False), incident(name)
    want = known.headline
    for row, letter in ROWS_BY_LETTER[name].items():
        want = want.replace(f"request row {row}", f"request {letter}")
    assert got.headline == want
    assert got.tally == known.tally.split(" since")[0] + "."
    strip, known_strip = got.strips[0], known.strips[0]
    assert strip.cells[strip.focus] == known_strip.cells[known_strip.focus]
    if name != "window":  # there, records outlive the window, and a slot behind the broken one has none to follow
        assert strip.cells == known_strip.cells
    assert not got.has_steps


def test_the_strip_of_a_double_handout(incident):
    victim, other = incident("double_handout").strips
    assert [cell.slot for cell in victim.cells] == [125, 11, 144, 134, 108, 16, 205]
    assert [cell.position for cell in victim.cells] == [5, 6, 7, 8, 9, 10, 11]
    assert [cell.stored_position for cell in victim.cells] == [5, 6, 7, 11, 9, 10, 11]
    assert [cell.stored_token for cell in victim.cells] == [105, 106, 107, 777, 109, 110, 111]
    assert [cell.follows for cell in victim.cells] == [True, True, True, False, False, True, True]
    assert [cell.reasons for cell in victim.cells] == [0, 0, 0, BROKEN_CHAIN | BROKEN_POSITION, BROKEN_CHAIN, 0, 0]
    # The token that was overwritten follows from the hash that its successor names.
    assert [cell.expected_token for cell in victim.cells] == [None, None, None, 108, None, None, None]
    assert (victim.cells[victim.focus].slot, other.cells[other.focus].slot) == (134, 134)
    assert [cell.position for cell in other.cells] == [8, 9, 10, 11, 12, 13, 14]
    assert all(cell.follows for cell in other.cells)


def test_the_rightful_slot_of_a_trampled_row(incident):
    finding = incident("trampled_row").finding
    assert (finding.slot, finding.position, finding.rightful, finding.expected_token) == (144, 4, 15, 304)
    assert not finding.recovered
    assert not finding.overwritten
    assert (finding.previous, finding.successor) == (121, 84)


def test_the_table_says_which_slots_it_has_twice(incident):
    text = "The engine's table has slot 134 at two positions or more: no legal sharing does that."
    assert text in incident("double_handout").notes
    assert not [note for note in incident("sound").notes if "two positions" in note]  # a shared prefix is legal


def test_what_was_not_checked_is_said():
    records, slots = crowded(211, 3, 11)
    flip = (2, slots[1, 4], 4, records[slots[1, 4], 0], -1, 5, 5, 4)
    skips = np.zeros(12, np.uint32)
    skips[[0, 2]] = 3, 4
    notes = Incident.of(make_dump(records, [flip], count=9, verify_skip_counters=skips)).notes
    assert "7 times a verify had more entries than verify_capacity, and checked nothing." in notes
    assert "The log kept the first 1 of 9 findings; the counters have all of them." in notes
    nothing = make_dump(records, kernel_run_counters=np.zeros(12, np.int64))
    assert Incident.of(nothing).title == "No finding, but no step was checked either."


def test_findings_of_another_group_are_not_hidden(incident):
    full = incident("window", kind=PoolKind.FULL)
    assert full.title == "No finding in the FULL pool, but 4 findings in this dump."
    assert "The SWA pool has findings too: draw it with --group SWA." in full.notes
    assert incident("window").pool.group.kind is PoolKind.SWA
    assert [len(event.slots) for event in full.events] == [1, 1, 1, 1]


def test_a_slot_that_was_written_again_is_said(incident):
    server_dump = incident("kv_flip").pool.dump
    records = server_dump.groups[0].k_tail.copy()
    for record, now in (([5, 9, 7, 0], "which has token 5 at position 9"), ([-1] * 4, "which is empty")):
        records[86] = record
        group = dataclasses.replace(server_dump.groups[0], k_tail=records)
        got = Incident.of(dataclasses.replace(server_dump, groups=(group,)))
        assert got.finding.changed
        assert "Slot 86 was written again after the finding: the map and the strip show it as it is now." in got.notes
        assert got.headline.startswith("Slot 86 (position ")
        assert got.headline.endswith(f") was overwritten: first its KV bytes, and by now its record too, {now}.")


def test_groups_and_halves_that_a_dump_lacks(incident):
    with pytest.raises(ValueError, match=r"^`group` is SWA, but this dump has the groups FULL\.$"):
        incident("sound", kind=PoolKind.SWA)
    with pytest.raises(ValueError, match=r"^`half` is 'v', but the FULL group of this dump has records of k alone\.$"):
        incident("sound", half="v")


def test_the_first_finding_is_no_consequence_of_another():
    """Of the rows of one launch, in any order: not the successor's chain hash, and not the write behind it."""
    records, slots = crowded(211, 3, 11)
    a, b = slots[0], slots[1]
    old_hash = int(Chains.of(records).hashes[a[4]].view(np.int64))
    before = int(Chains.of(records).hashes[a[3]].view(np.int64))
    records[a[4]] = 777, 11, Chains.of(records).hashes[b[10]].view(np.int64), 0
    behind = int(Chains.of(records).hashes[a[4]].view(np.int64))
    rows = [
        (0, a[5], 5, records[a[5], 0], -1, old_hash, behind, BROKEN_CHAIN),
        (0, a[10], 10, 7, 7, 1, 12, Reason.WRITE_POSITION_MISMATCH),
        (0, a[4], 11, 777, -1, records[a[4], 2], before, BROKEN_CHAIN | BROKEN_POSITION),
    ]
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        got = Incident.of(make_dump(records, [rows[i] for i in order]))
        assert got.headline == f"Slot {a[4]} was overwritten: it held position 4 of request A, and now holds position 11 of request B."
        assert got.finding.victim.slots == tuple(a.tolist())


def test_slots_that_were_released_together_have_successors_of_their_own():
    """All fresh records have one hash: that a slot does not follow one says nothing of which."""
    records, slots = crowded(211, 3, 11)
    tokens, hashes = records[:, 0].copy(), Chains.of(records).hashes.view(np.int64)
    records[[slots[1, 7], slots[0, 4]]] = -1
    empty, rows = int(Chains.of(records).hashes[slots[0, 4]].view(np.int64)), []
    for request, position in ((1, 7), (0, 4)):
        before, own, behind = slots[request, position - 1 : position + 2]
        rows += [(2, own, -1, -1, -1, -1, hashes[before], 7), (2, behind, position + 1, tokens[behind], -1, hashes[own], empty, 1)]
    got = Incident.of(make_dump(records, rows))
    assert got.headline == f"Slot {slots[0, 4]} is read as position 4 of request A, but it is empty: released, or never written."
    assert (got.finding.successor, got.finding.expected_token) == (slots[0, 5], tokens[slots[0, 4]])
    assert got.finding.victim.slots == tuple(slots[0].tolist())


# States of slots, and cells.


def test_states_of_slots(incident):
    got = incident("double_handout")
    table, lens = got.pool.dump.req_to_token, got.pool.dump.req_lens
    state = np.full(211, SlotState.EMPTY)
    state[got.pool.chains.written] = SlotState.IDLE
    for row, own in ((2, SlotState.REQUEST), (3, SlotState.OTHER), (1, SlotState.VICTIM)):
        state[table[row, : lens[row]]] = own
    state[0] = SlotState.PADDING
    np.testing.assert_array_equal(got.state, state)
    assert np.bincount(state).tolist() == [164, 1, 4, 18 - 5, 0, 15 - 1, 15]
    assert got.last_position == 17
    np.testing.assert_allclose(got.age[table[2, : lens[2]]], np.arange(lens[2]) / 17, rtol=1e-6)


def test_a_live_slot_that_is_empty(incident):
    got = incident("released_in_use")
    assert np.flatnonzero(got.state == SlotState.HOLE).tolist() == [84]
    assert (SlotState.HOLE, "in a live request, but empty: 1 slot") in got.legend


def test_cells_of_a_grid():
    grid = Grid.fitting(1000, 16, 8)
    assert (grid.slots_per_cell, grid.cells, grid.rows) == (8, 125, 8)
    assert grid.sizes().tolist() == [8] * 125
    odd = Grid.fitting(997, 16, 8)
    assert odd.sizes().tolist() == [8] * 124 + [5]
    values = np.arange(997)
    assert odd.most(values).tolist() == [*range(7, 992, 8), 996]
    assert odd.sum(values)[-1] == sum(range(992, 997))
    assert odd.cell(np.array([0, 7, 8, 996])).tolist() == [0, 0, 1, 124]
    in_rows = odd.in_rows(odd.most(values), -1)
    assert in_rows.shape == (8, 16)
    assert in_rows[-1].tolist() == [903 + 8 * i for i in range(12)] + [996, -1, -1, -1]
    assert (Grid.fitting(128, 16, 8).slots_per_cell, Grid.fitting(129, 16, 8).slots_per_cell) == (1, 2)


@pytest.mark.parametrize("num_slots", [127, 1009, 20011])
def test_a_cell_never_hides_a_finding(num_slots):
    records, slots = crowded(num_slots, 5, num_slots // 8)
    found = np.sort(np.random.default_rng(num_slots).choice(slots.reshape(-1), 11, replace=False))
    dump = make_dump(records, [(2, slot, records[slot, 1], records[slot, 0], -1, 5, 5, 4) for slot in found])
    got = Incident.of(dump)
    assert got.marked.tolist() == found.tolist()
    assert set(got.marked_kind.tolist()) == {FindingKind.KV_BYTES}
    for columns in (16, 64):
        grid = Grid.fitting(num_slots, columns, 16)
        mask = np.zeros(num_slots, bool)
        mask[got.marked] = True
        assert np.flatnonzero(grid.most(mask)).tolist() == sorted({int(slot) // grid.slots_per_cell for slot in found})


def test_kinds_of_findings():
    records, slots = crowded(211, 3, 11)
    a = slots[0]
    rows = [
        (2, a[1], 1, 7, -1, 5, 5, Reason.VERIFY_REAL_KV_HASH_MISMATCH),
        (2, a[2], 2, 7, -1, 5, 6, BROKEN_CHAIN | Reason.VERIFY_REAL_KV_HASH_MISMATCH),
        (2, a[3], 3, 7, 8, 5, 5, Reason.VERIFY_TOKEN_MISMATCH),
        (2, a[1], 1, 7, 8, 5, 5, Reason.VERIFY_TOKEN_MISMATCH),
        (2, 300, 4, -1, -1, 0, 211, Reason.SLOT_OUT_OF_RANGE),
        (2, -1, -1, -1, -1, 0, 13, Reason.SLOT_OUT_OF_RANGE),
    ]
    got = Incident.of(make_dump(records, rows))
    want = {int(a[1]): FindingKind.KV_BYTES, int(a[2]): FindingKind.RECORD, int(a[3]): FindingKind.TOKEN}
    assert dict(zip(got.marked.tolist(), got.marked_kind.tolist(), strict=True)) == want
    assert got.off_map == 2
    assert got.kinds.tolist() == [FindingKind.KV_BYTES, FindingKind.RECORD, FindingKind.TOKEN, FindingKind.TOKEN, *[FindingKind.RANGE] * 2]


def test_a_million_slots_take_seconds():
    records, slots = crowded(1_000_003, 1000, 700)
    slot = slots[7, 500]
    dump = make_dump(records, [(2, slot, 500, records[slot, 0], -1, records[slot, 2], records[slot, 2], 4)])
    got = Incident.of(dump)
    assert got.finding.victim.slots == tuple(slots[7].tolist())
    assert got.headline == f"KV bytes of slot {slot} (position 500 of request A) changed, and its record did not."
    assert got.facts[1] == "1,000,003 slots"


def test_the_time_of_a_dump_is_shown():
    assert "dumped 2026-03-14 15:09:26 UTC" in Incident.of(make_dump(write_chains(fresh(7), np.array([[1, 2]]), np.array([[5, 6]])))).facts
    assert CREATED.tzinfo is not None


def test_a_parent_that_a_token_cannot_follow_is_no_slot(tmp_path):
    """Entry 3, of the second row, names entry 1, of the first."""
    pool = kvc.pools.MHATokenToKVPool.allocate(num_slots=31, num_layers=1, num_kv_heads=1, head_dim=8)
    canary, state = kvc.install_canary(pool, kvc.CanaryConfig("log"), capacities=kvc.CanaryLaunchCapacities(13, 3))
    batch = kvc.ForwardBatch.target_verify(
        input_ids=np.array([5, 6, 7, 8], np.int32),
        positions=np.array([0, 1, 0, 1], np.int32),
        out_cache_loc=np.array([9, 12, 4, 3], np.int32),
        parents=np.array([-1, 0, -1, 1], np.int32),
        topk=2,
        req_pool_indices=np.array([1, 2], np.int32),
        seq_lens=np.array([0, 0], np.int32),
        draft_token_num=2,
        req_to_token=np.zeros((3, 7), np.int32),
    )
    state, _ = canary.pre_forward(state, batch, pool)
    incident = Incident.of(kvc.load_dump(canary.dump(state, tmp_path / "d")))
    assert incident.headline == "Position 1 of request A names entry 1 of the token arrays as its parent, which it cannot follow."
