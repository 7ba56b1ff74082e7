"""Every rule of the contract on a case small enough to work out by hand, on the reference and on the device."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from helpers.backends import host
from helpers.states import fields, fresh_buffer, fresh_state, log_rows, multiset, records, with_log
from jax_kvcanary.constants import CanaryLaunchTag, RealKvHashMode
from jax_kvcanary.plan import PlanInput, VerifyPlan, WritePlan
from jax_kvcanary.sources import RealKvSource
from jax_kvcanary.state import from_int64, to_int64

TAG = CanaryLaunchTag.TAIL_K_FULL
NUM_SLOTS = 7
FRESH = [-1, -1, -1, -1]

# Reasons.
CHAIN, POSITION, REAL_KV, WRITE_TOKEN, WRITE_POSITION, TOKEN, RANGE = (1 << bit for bit in range(7))


def mix(x: int) -> int:
    """splitmix64 in other words than the reference's: NumPy's wrapping words."""
    word = np.array([x % 2**64], np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        word = (word ^ (word >> np.uint64(shift))) * np.uint64(factor)
    return int((word ^ (word >> np.uint64(31)))[0])


def link(prev_hash: int, token: int, position: int) -> int:
    """The hash behind a record, as the signed integer that records hold."""
    return signed(mix(mix(mix(prev_hash) ^ token % 2**64) ^ position % 2**64))


def signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


ANCHOR = signed(mix(0xC0FFEE1234567890))
AFTER_11 = link(ANCHOR, 11, 0)
AFTER_12 = link(AFTER_11, 12, 1)
AFTER_13 = link(AFTER_12, 13, 2)

#: Tokens 11, 12, 13 in slots 2, 4, 1; slots 0, 3, 5, 6 are fresh.
CHAIN_OF_THREE = {2: [11, 0, ANCHOR, 0], 4: [12, 1, AFTER_11, 0], 1: [13, 2, AFTER_12, 0]}


def buffer(content: dict[int, list[int]]) -> np.ndarray:
    """A canary buffer of NUM_SLOTS slots; those not given are fresh."""
    return records([content.get(slot, FRESH) for slot in range(NUM_SLOTS)])


def counters(state: object) -> SimpleNamespace:
    """The counters of TAG; all others must be 0."""
    state = host(state)
    tables = {
        "kernel_runs": to_int64(state.kernel_run_counters),
        "slot_runs": to_int64(state.slot_run_counters),
        "skips": state.verify_skip_counters,
        "reasons": state.fail_reason_counters,
    }
    for table in tables.values():
        assert not np.delete(table, TAG, axis=0).any()
    return SimpleNamespace(**{name: table[TAG].tolist() for name, table in tables.items()})


@pytest.fixture(params=["reference", "jit"])
def backend(request, get_backend):
    return get_backend(request.param)


@pytest.fixture(params=["reference", "eager", "jit_int64", "jit_x64"])
def wide_backend(request, get_backend):
    """A backend, called with int64 arrays."""
    return dataclasses.replace(get_backend(request.param), int_dtype=np.int64, on_device=request.param.startswith("jit"))


class TestVerify:
    CAPACITY = 5

    def verify(self, backend, content, entries, *, num_valid=None, enable=1, check_token=False, sources=(), mode=0, state=None):
        """Run one launch over (slot, position, prev_slot, expected_token) entries; the rows without their tag."""
        columns = np.full((4, self.CAPACITY), -7, np.int32)
        columns[:, : len(entries)] = np.reshape(entries, (-1, 4)).T
        slots, positions, prevs, tokens = (backend.array(column) for column in columns)
        num_valid = len(entries) if num_valid is None else num_valid
        scalars = (backend.array(np.array([value], np.int32)) for value in (num_valid, enable))
        with backend.active():
            self.state = backend.verify_step(
                backend.array(buffer(content)),
                VerifyPlan(slots, tokens, positions, prevs, *scalars),
                backend.own(fresh_state(9) if state is None else state),
                tag=TAG,
                check_expected_token=check_token,
                real_kv_sources=sources,
                real_kv_hash_mode=mode,
            )
        self.counters = counters(self.state)
        rows = log_rows(self.state)
        assert (rows[:, 0] == TAG).all()
        return rows[:, 1:].tolist()

    def test_sound_chain(self, backend):
        assert self.verify(backend, CHAIN_OF_THREE, [(2, 0, -1, 11), (4, 1, 2, 12), (1, 2, 4, -1)], check_token=True) == []
        assert vars(self.counters) == {"kernel_runs": 1, "slot_runs": 3, "skips": 0, "reasons": [0] * 8}

    def test_chain_hash(self, backend):
        rows = self.verify(backend, CHAIN_OF_THREE, [(1, 2, 2, -1)])
        assert rows == [[1, 2, 13, -1, AFTER_12, AFTER_11, CHAIN]]
        assert self.counters.reasons == [1, 0, 0, 0, 0, 0, 0, 0]

    def test_position(self, backend):
        rows = self.verify(backend, CHAIN_OF_THREE, [(4, 5, 2, -1)])
        assert rows == [[4, 1, 12, -1, AFTER_11, AFTER_11, POSITION]]
        assert self.counters.reasons == [0, 1, 0, 0, 0, 0, 0, 0]

    def test_token(self, backend):
        entries = [(4, 1, 2, 99)]
        assert self.verify(backend, CHAIN_OF_THREE, entries) == []
        rows = self.verify(backend, CHAIN_OF_THREE, entries, check_token=True)
        assert rows == [[4, 1, 12, 99, AFTER_11, AFTER_11, TOKEN]]
        assert self.counters.reasons == [0, 0, 0, 0, 0, 1, 0, 0]

    def test_token_of_another_width(self, backend):
        stored = 12 + 2**32
        rows = self.verify(backend, {4: [stored, 0, ANCHOR, 0]}, [(4, 0, -1, 12)], check_token=True)
        assert rows == [[4, 0, stored, 12, ANCHOR, ANCHOR, TOKEN]]

    def test_real_kv(self, backend):
        words = np.arange(3 * NUM_SLOTS, dtype="<u8").reshape(NUM_SLOTS, 3)
        hash_of_4 = signed(mix(mix(mix(12) ^ 13)))
        content = {4: [12, 0, ANCHOR, hash_of_4], 2: [11, 0, ANCHOR, 0]}
        source = RealKvSource(array=backend.array(words.view(np.uint8)), num_bytes_per_token=24, read_bytes=24)
        entries = [(4, 0, -1, -1), (2, 0, -1, -1)]
        rows = self.verify(backend, content, entries, sources=(source,), mode=RealKvHashMode.PARTIAL)
        assert rows == [[2, 0, 11, -1, ANCHOR, ANCHOR, REAL_KV]]
        for sources, mode in (((source,), RealKvHashMode.NONE), ((), RealKvHashMode.ALL)):
            rows = self.verify(backend, content, entries, sources=sources, mode=mode)
            assert rows == [[4, 0, 12, -1, ANCHOR, ANCHOR, REAL_KV]]

    def test_all_reasons_in_one_row(self, backend):
        rows = self.verify(backend, {4: [12, 1, 5, 6]}, [(4, 3, -1, 13)], check_token=True)
        assert rows == [[4, 1, 12, 13, 5, ANCHOR, CHAIN | POSITION | REAL_KV | TOKEN]]
        assert self.counters.reasons == [1, 1, 1, 0, 0, 1, 0, 0]

    def test_fresh_record(self, backend):
        rows = self.verify(backend, CHAIN_OF_THREE, [(3, 3, 1, 9)], check_token=True)
        assert rows == [[3, -1, -1, 9, -1, AFTER_13, CHAIN | POSITION | REAL_KV | TOKEN]]

    def test_zero_records_are_a_valid_chain(self, backend):
        """mix3(0, 0, 0) == 0: the reason why fresh records are not zeros."""
        assert self.verify(backend, {3: [0, 0, 0, 0], 5: [0, 0, 0, 0]}, [(5, 0, 3, -1)]) == []

    def test_slot_out_of_range(self, backend):
        entries = [(NUM_SLOTS, 3, 1, 9), (-1, 4, 1, 9), (2**31 - 1, 5, -1, 9), (-(2**31), 6, 2**31 - 1, -1)]
        rows = self.verify(backend, CHAIN_OF_THREE, entries, check_token=True)
        assert multiset(rows) == multiset([slot, position, -1, token, 0, NUM_SLOTS, RANGE] for slot, position, _, token in entries)
        assert self.counters.slot_runs == 4
        assert self.counters.reasons == [0, 0, 0, 0, 0, 0, 4, 0]
        rows = self.verify(backend, CHAIN_OF_THREE, entries[:1])
        assert rows == [[NUM_SLOTS, 3, -1, -1, 0, NUM_SLOTS, RANGE]]

    def test_prev_slot_out_of_range(self, backend):
        rows = self.verify(backend, CHAIN_OF_THREE, [(4, 1, NUM_SLOTS, 12)], check_token=True)
        assert rows == [[NUM_SLOTS, 1, -1, 12, 0, NUM_SLOTS, RANGE]]

    def test_slot_zero_is_skipped(self, backend):
        assert self.verify(backend, CHAIN_OF_THREE, [(0, 3, 1, 9), (0, 3, NUM_SLOTS, 9)], check_token=True) == []
        assert self.counters.slot_runs == 2

    def test_unreachable_predecessor(self, backend):
        assert self.verify(backend, CHAIN_OF_THREE, [(1, 2, 0, -1)]) == []
        rows = self.verify(backend, CHAIN_OF_THREE, [(1, 3, 0, -1)])
        assert rows == [[1, 2, 13, -1, AFTER_12, AFTER_12, POSITION]]

    def test_any_negative_predecessor_is_the_anchor(self, backend):
        assert self.verify(backend, CHAIN_OF_THREE, [(2, 0, -(2**31), -1)]) == []

    def test_disabled_plan(self, backend):
        assert self.verify(backend, CHAIN_OF_THREE, [(4, 5, 2, -1), (99, 0, 0, 0)], enable=0) == []
        assert vars(self.counters) == {"kernel_runs": 1, "slot_runs": 0, "skips": 1, "reasons": [0] * 8}

    def test_any_other_enable_is_on(self, backend):
        assert len(self.verify(backend, CHAIN_OF_THREE, [(4, 5, 2, -1)], enable=-3)) == 1

    def test_number_of_entries(self, backend):
        entries = [(4, 5, 2, -1)] * self.CAPACITY
        for num_valid, checked in ((-4, 0), (0, 0), (2, 2), (self.CAPACITY + 1, self.CAPACITY), (2**31 - 1, self.CAPACITY)):
            assert len(self.verify(backend, CHAIN_OF_THREE, entries, num_valid=num_valid)) == checked
            assert (self.counters.kernel_runs, self.counters.slot_runs) == (1, checked)


class TestWrite:
    NUM_TOKENS = 5
    ROWS = 3

    def write(
        self, backend, content, rows, entries, *, expected=None, num_rows=None, offsets=None, chain_assert=1, state=None, sources=(), mode=0
    ):
        """Run one launch.

        Args:
            rows: (number of entries, seed slot) of each row, padded with rows that nothing may read.
            entries: (slot, token, position), padded with skipped ones.
            expected: (token, position) of each entry, or None.
            offsets: instead of the rows' own.

        Returns:
            The records that are not fresh, by slot (without slot 0), and the rows without their tag.
        """
        lengths, seeds = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [])
        own_offsets = np.zeros(self.ROWS + 1, np.int32)
        own_offsets[1 : len(lengths) + 1] = np.cumsum(lengths)
        offsets = own_offsets if offsets is None else np.array(offsets, np.int32)
        seeds = np.array([*seeds, *[3] * (self.ROWS - len(seeds))], np.int32)
        padding = self.NUM_TOKENS - len(entries)
        slots, tokens, positions = np.array([*entries, *[(-1, 0, 0)] * padding], np.int64).T
        expected_columns = (None, None) if expected is None else np.array([*expected, *[(0, 0)] * padding], np.int64).T
        num_rows = len(rows) if num_rows is None else num_rows
        state = fresh_state(9, chain_assert=chain_assert) if state is None else state
        with backend.active():
            buf, self.state = backend.write_step(
                backend.array(buffer(content)),
                WritePlan(*(backend.array(np.array(value, np.int32)) for value in (offsets, seeds, [num_rows]))),
                backend.ints(tokens),
                backend.ints(positions),
                backend.ints(slots),
                backend.own(state),
                tag=TAG,
                real_kv_sources=sources,
                real_kv_hash_mode=mode,
                expected_input_tokens=backend.ints(expected_columns[0]),
                expected_input_positions=backend.ints(expected_columns[1]),
            )
        self.counters = counters(self.state)
        found = log_rows(self.state)
        assert (found[:, 0] == TAG).all()
        stored = {slot: record for slot, record in enumerate(fields(buf).tolist()) if slot and record != FRESH}
        return stored, found[:, 1:].tolist()

    def test_new_chain(self, backend):
        stored, rows = self.write(backend, {}, [(3, -1)], [(2, 11, 0), (4, 12, 1), (1, 13, 2)])
        assert stored == CHAIN_OF_THREE
        assert rows == []
        assert vars(self.counters) == {"kernel_runs": 1, "slot_runs": 3, "skips": 0, "reasons": [0] * 8}

    def test_chain_goes_on_from_its_seed(self, backend):
        stored, rows = self.write(backend, CHAIN_OF_THREE, [(1, 1)], [(5, 14, 3)])
        assert stored == CHAIN_OF_THREE | {5: [14, 3, AFTER_13, 0]}
        assert rows == []

    def test_seeds_are_read_before_the_launch(self, backend):
        """Row 0 overwrites the seed of row 1, and row 1 that of row 0."""
        stored, rows = self.write(backend, CHAIN_OF_THREE, [(1, 1), (1, 2)], [(2, 14, 3), (1, 22, 1)])
        assert stored == CHAIN_OF_THREE | {2: [14, 3, AFTER_13, 0], 1: [22, 1, AFTER_11, 0]}
        assert rows == []

    @pytest.mark.parametrize("seed", [0, -1, -(2**31)])
    def test_no_seed(self, backend, seed):
        """A chain without a seed starts at the anchor, at any position."""
        stored, rows = self.write(backend, {0: [5, 5, 5, 5]}, [(1, seed)], [(5, 14, 3)])
        assert stored == {5: [14, 3, ANCHOR, 0]}
        assert rows == []

    def test_seed_out_of_range(self, backend):
        stored, rows = self.write(backend, {}, [(2, NUM_SLOTS)], [(-1, 14, 3), (5, 15, 9)])
        assert stored == {5: [15, 9, ANCHOR, 0]}
        assert rows == [[NUM_SLOTS, 3, 14, -1, ANCHOR, NUM_SLOTS, RANGE]]

    def test_empty_row_has_no_findings(self, backend):
        assert self.write(backend, {}, [(0, 2**31 - 1)], []) == ({}, [])
        assert self.write(backend, {}, [(0, 99)], [], offsets=[4, 2, 2, 2]) == ({}, [])

    def test_entries_outside_the_token_arrays(self, backend):
        entries = [(1, 11, 0), (2, 12, 1), (3, 13, 2), (4, 14, 3), (5, 15, 4)]
        outside = [-1, -1, -1, -1, 0, self.NUM_TOKENS, RANGE]
        stored, rows = self.write(backend, {}, [(0, -1)], entries, offsets=[-2, 1, 1, 1])
        assert stored == {1: [11, 0, ANCHOR, 0]}
        assert rows == [outside]
        stored, rows = self.write(backend, {}, [(0, -1)] * 2, entries, offsets=[3, 4, 2**31 - 1, 0])
        assert stored == {4: [14, 3, ANCHOR, 0], 5: [15, 4, ANCHOR, 0]}
        assert rows == [outside]
        assert self.counters.slot_runs == 2
        assert self.counters.reasons == [0, 0, 0, 0, 0, 0, 1, 0]

    def test_no_entry_inside_the_token_arrays(self, backend):
        """One row for both ends; the seed, which is bad as well, is not looked at."""
        stored, rows = self.write(backend, {}, [(0, 99)], [], offsets=[7, 9, 0, 0])
        assert stored == {}
        assert rows == [[-1, -1, -1, -1, 0, self.NUM_TOKENS, RANGE]]

    def test_first_entry_inside_names_the_bad_seed(self, backend):
        _, rows = self.write(backend, {}, [(0, 99)], [(1, 11, 0)], offsets=[-1, 1, 0, 0])
        outside = [-1, -1, -1, -1, 0, self.NUM_TOKENS, RANGE]
        assert multiset(rows) == multiset([outside, [99, 0, 11, -1, ANCHOR, NUM_SLOTS, RANGE]])

    def test_negative_slot_is_skipped(self, backend):
        """Neither the chain nor the previous position moves."""
        stored, rows = self.write(backend, {2: [11, 0, ANCHOR, 0]}, [(3, 2)], [(-1, 98, 1), (-7, 99, 2), (4, 12, 1)])
        assert stored == {2: [11, 0, ANCHOR, 0], 4: [12, 1, AFTER_11, 0]}
        assert rows == []
        assert self.counters.slot_runs == 1

    def test_slot_out_of_range(self, backend):
        """Nothing else is checked of it, but the chain and the previous position move past it."""
        stored, rows = self.write(
            backend,
            {2: [11, 0, ANCHOR, 0]},
            [(2, 2)],
            [(NUM_SLOTS, 12, 1), (1, 13, 2)],
            expected=[(77, 77), (13, 2)],
        )
        assert stored == {2: [11, 0, ANCHOR, 0], 1: [13, 2, AFTER_12, 0]}
        assert rows == [[NUM_SLOTS, 1, 12, -1, AFTER_11, NUM_SLOTS, RANGE]]
        assert self.counters.slot_runs == 1
        _, rows = self.write(backend, {2: [11, 0, ANCHOR, 0]}, [(2, 2)], [(NUM_SLOTS, 12, 5), (1, 13, 6)])
        assert rows == [[NUM_SLOTS, 5, 12, -1, AFTER_11, NUM_SLOTS, RANGE]]

    def test_input_assert(self, backend):
        entries = [(2, 11, 0), (4, 12, 1), (1, 13, 2)]
        stored, rows = self.write(backend, {}, [(3, -1)], entries, expected=[(10, 0), (12, 7), (-1, -1)])
        assert stored == CHAIN_OF_THREE
        assert multiset(rows) == multiset(
            [
                [2, 0, 11, 10, ANCHOR, 0, WRITE_TOKEN],
                [4, 1, 12, 12, AFTER_11, 7, WRITE_POSITION],
                [1, 2, 13, -1, AFTER_12, -1, WRITE_TOKEN | WRITE_POSITION],
            ]
        )
        assert self.counters.reasons == [0, 0, 0, 2, 2, 0, 0, 0]

    def test_chain_position(self, backend):
        """One gap is one finding: the next position is compared with the one that was written."""
        gap, entries = {2: [11, 0, ANCHOR, 0]}, [(4, 12, 3), (1, 13, 4)]
        _, rows = self.write(backend, gap, [(2, 2)], entries)
        assert rows == [[4, 3, 12, 12, AFTER_11, 1, WRITE_POSITION]]
        assert self.counters.reasons == [0, 0, 0, 0, 1, 0, 0, 0]
        _, rows = self.write(backend, gap, [(2, 2)], entries, chain_assert=0)
        assert rows == []
        _, rows = self.write(backend, gap, [(2, 2)], entries, chain_assert=-1)
        assert len(rows) == 1

    def test_chain_position_and_input_assert_are_rows_of_their_own(self, backend):
        """The chain's row knows no other token than the one written."""
        _, rows = self.write(backend, {2: [11, 0, ANCHOR, 0]}, [(1, 2)], [(4, 12, 3)], expected=[(77, 1)])
        assert multiset(rows) == multiset(
            [[4, 3, 12, 77, AFTER_11, 1, WRITE_TOKEN | WRITE_POSITION], [4, 3, 12, 12, AFTER_11, 1, WRITE_POSITION]]
        )
        assert self.counters.reasons == [0, 0, 0, 1, 2, 0, 0, 0]

    def test_later_entry_of_a_row_stays(self, backend):
        stored, rows = self.write(backend, {}, [(3, -1)], [(2, 11, 0), (2, 12, 1), (1, 13, 2)])
        assert stored == {2: [12, 1, AFTER_11, 0], 1: [13, 2, AFTER_12, 0]}
        assert rows == []
        assert self.counters.slot_runs == 3

    def test_two_rows_with_one_slot(self, backend):
        stored, rows = self.write(backend, {}, [(1, -1), (1, -1)], [(2, 11, 0), (2, 21, 0)])
        assert stored in ({2: [11, 0, ANCHOR, 0]}, {2: [21, 0, ANCHOR, 0]})
        assert rows == []
        assert self.counters.slot_runs == 2

    def test_padding_slot_is_stored_and_counted(self, backend):
        stored, rows = self.write(backend, {}, [(3, -1)], [(0, 11, 0), (0, 12, 1), (1, 13, 2)])
        assert stored == {1: [13, 2, AFTER_12, 0]}
        assert rows == []
        assert self.counters.slot_runs == 3

    def test_real_kv_hash(self, backend):
        words = np.arange(3 * NUM_SLOTS, dtype="<u8").reshape(NUM_SLOTS, 3)
        source = RealKvSource(array=backend.array(words.view(np.uint8)), num_bytes_per_token=24, read_bytes=24)
        one, entries = signed(mix(mix(mix(mix(6) ^ 7) ^ 8))), [(2, 11, 0)]
        stored, _ = self.write(backend, {}, [(1, -1)], entries, sources=(source,), mode=RealKvHashMode.ALL)
        assert stored == {2: [11, 0, ANCHOR, one]}
        two = signed(mix(one % 2**64 ^ mix(mix(mix(6) ^ 7) ^ 8)))
        stored, _ = self.write(backend, {}, [(1, -1)], entries, sources=(source, source), mode=RealKvHashMode.ALL)
        assert stored == {2: [11, 0, ANCHOR, two]}

    def test_number_of_rows(self, backend):
        rows, entries = [(1, -1), (1, -1), (1, -1)], [(1, 11, 0), (2, 12, 0), (3, 13, 0)]
        for num_rows, written in ((-1, 0), (0, 0), (2, 2), (4, 3), (2**31 - 1, 3)):
            stored, _ = self.write(backend, {}, rows, entries, num_rows=num_rows)
            assert sorted(stored) == [1, 2, 3][:written]
            assert (self.counters.kernel_runs, self.counters.slot_runs) == (1, written)

    def test_wide_values(self, wide_backend):
        """Tokens, positions and slots keep all 64 bits, with and without JAX's 64-bit types."""
        token, position, slot = 2**40 + 5, -(2**50), 2**33 + 1
        after = link(ANCHOR, token, position)
        stored, rows = self.write(
            wide_backend,
            {},
            [(3, -1)],
            [(2, token, position), (slot, 12, 1), (-(2**40), 13, 2)],
            expected=[(5, position), (0, 0), (0, 0)],
        )
        assert stored == {2: [token, position, ANCHOR, 0]}
        assert multiset(rows) == multiset(
            [[2, position, token, 5, ANCHOR, position, WRITE_TOKEN], [slot, 1, 12, -1, after, NUM_SLOTS, RANGE]]
        )

    def test_position_after_the_largest_wraps(self, wide_backend):
        content = {2: [11, 2**63 - 1, ANCHOR, 0]}
        _, rows = self.write(wide_backend, content, [(1, 2)], [(4, 12, -(2**63))])
        assert rows == []
        _, rows = self.write(wide_backend, content, [(1, 2)], [(4, 12, 0)])
        assert rows == [[4, 0, 12, 12, link(ANCHOR, 11, 2**63 - 1), -(2**63), WRITE_POSITION]]


class TestLog:
    """Ring and counters, filled by verify launches that find two bad positions and one good slot."""

    def launch(self, backend, state):
        return TestVerify().verify(backend, CHAIN_OF_THREE, [(4, 5, 2, -1), (2, 0, -1, -1), (1, 6, 4, -1)], state=state)

    FOUND = ([4, 1, 12, -1, AFTER_11, AFTER_11, POSITION], [1, 2, 13, -1, AFTER_12, AFTER_12, POSITION])

    def test_rows_follow_those_of_earlier_launches(self, backend):
        earlier = [[TAG, *range(7)]]
        rows = self.launch(backend, with_log(fresh_state(9), earlier, 1))
        assert rows[0] == earlier[0][1:]
        assert multiset(rows[1:]) == multiset(self.FOUND)

    def test_ring_is_filled_once(self, backend):
        earlier = [[TAG, *range(7)]] * 2
        test = TestVerify()
        for state, kept in ((with_log(fresh_state(3), earlier, 2), 1), (with_log(fresh_state(2), earlier, 5), 0)):
            before = state.violation_log.count()
            rows = test.verify(backend, CHAIN_OF_THREE, [(4, 5, 2, -1), (1, 6, 4, -1)], state=state)
            assert rows[:2] == [row[1:] for row in earlier]
            assert len(rows) == 2 + kept
            assert not multiset(rows[2:]) - multiset(self.FOUND)
            assert host(test.state).violation_log.count() == before + 2
            assert test.counters.reasons == [0, 2, 0, 0, 0, 0, 0, 0]

    def test_count_saturates(self, backend):
        test = TestVerify()
        for before in (2**31 - 2, 2**31 - 1):
            state = with_log(fresh_state(1), [[TAG, *range(7)]], before)
            assert test.verify(backend, CHAIN_OF_THREE, [(4, 5, 2, -1), (1, 6, 4, -1)], state=state) == [[*range(7)]]
            assert host(test.state).violation_log.count() == 2**31 - 1

    def test_counters_carry_into_their_high_word(self, backend):
        runs = np.zeros(12, np.int64)
        runs[TAG] = 2**32 - 1
        state = dataclasses.replace(fresh_state(4), kernel_run_counters=from_int64(runs), slot_run_counters=from_int64(runs))
        test = TestVerify()
        test.verify(backend, CHAIN_OF_THREE, [(4, 1, 2, -1), (2, 0, -1, -1)], state=state)
        assert (test.counters.kernel_runs, test.counters.slot_runs) == (2**32, 2**32 + 1)


class TestPlan:
    TABLE = np.array([[0] * 6, [10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 24, 25], [30, 31, -1, 33, -9, 35]])

    def plan(self, backend, rows, *, table=TABLE, capacity=9, valid_lens=None, expected_tokens=None, lut=None, **options):
        """Plan (request row, prefix, extend) rows; entries as (slot, position, prev_slot, expected_token)."""
        rows = np.reshape(rows, (-1, 3)).T
        ints = backend.ints
        with backend.active():
            plan = backend.plan(
                PlanInput(*(ints(column) for column in rows), ints(valid_lens)),
                ints(table, np.shape(table)),
                verify_capacity=capacity,
                full_to_swa_index_mapping=ints(lut),
                expected_tokens=None if expected_tokens is None else ints(expected_tokens, np.shape(expected_tokens)),
                **options,
            )
        plan = host(plan)
        verify, write = plan.verify, plan.write
        assert write.write_num_valid_reqs.tolist() == [rows.shape[1]]
        columns = (
            verify.verify_slot_indices,
            verify.verify_expected_positions,
            verify.verify_prev_slot_indices,
            verify.verify_expected_tokens,
        )
        num_valid = int(verify.verify_num_valid[0])
        return SimpleNamespace(
            entries=[tuple(entry) for entry in np.stack(columns, axis=1)[:num_valid].tolist()],
            num_valid=num_valid,
            enable=int(verify.enable[0]),
            offsets=write.write_offsets.tolist(),
            seeds=write.write_seed_slot_indices.tolist(),
            invalid=int(plan.num_invalid_rows[0]),
        )

    def test_rows(self, backend):
        plan = self.plan(backend, [(2, 3, 1), (1, 0, 4), (1, 1, 0)], write_req_capacity=5)
        assert plan.entries == [(20, 0, -1, -1), (21, 1, 20, -1), (22, 2, 21, -1), (10, 0, -1, -1)]
        assert plan.enable == 1
        assert plan.offsets == [0, 1, 5, 5, 0, 0]
        assert plan.seeds[:3] == [22, -1, -1]
        assert plan.invalid == 0

    def test_padding_rows(self, backend):
        """They contribute nothing, whatever their lengths say, also between live rows."""
        plan = self.plan(backend, [(0, 3, 7), (2, 1, 2), (0, -5, -5), (1, 1, 3)])
        assert plan.entries == [(20, 0, -1, -1), (10, 0, -1, -1)]
        assert plan.offsets == [0, 0, 2, 2, 5]
        assert plan.seeds == [-1, 20, -1, 10]
        assert plan.invalid == 0

    def test_invalid_rows(self, backend):
        """Their tokens still count, so that the rows behind them do not shift."""
        plan = self.plan(backend, [(4, 2, 1), (-1, 2, 2), (1, 7, 3), (1, -1, 4), (1, 2, -5), (2, 6, 1)])
        assert plan.entries == [(20 + p, p, 19 + p if p else -1, -1) for p in range(6)]
        assert plan.offsets == [0, 1, 3, 6, 10, 10, 11]
        assert plan.seeds == [-1, -1, -1, -1, -1, 25]
        assert plan.invalid == 5

    def test_window(self, backend):
        """The first entry of a window names its real predecessor."""
        plan = self.plan(backend, [(2, 5, 1), (1, 2, 1), (1, 3, 1)], swa_window_size=3)
        assert plan.entries == [
            *[(22, 2, 21, -1), (23, 3, 22, -1), (24, 4, 23, -1)],
            *[(10, 0, -1, -1), (11, 1, 10, -1)],
            *[(10, 0, -1, -1), (11, 1, 10, -1), (12, 2, 11, -1)],
        ]
        assert plan.seeds == [24, 11, 12]

    def test_holes(self, backend):
        """A negative slot is an entry of its own; as a predecessor it is unreachable, as a seed it passes."""
        plan = self.plan(backend, [(3, 5, 1), (3, 3, 1)])
        assert plan.entries[:5] == [(30, 0, -1, -1), (31, 1, 30, -1), (-1, 2, 31, -1), (33, 3, 0, -1), (-9, 4, 33, -1)]
        assert plan.seeds == [-9, -1]

    def test_translation(self, backend):
        lut = [5, *[0] * 9, 7, -1, 2**31 - 1, 8, *[0] * 6, 6]
        plan = self.plan(backend, [(1, 5, 1), (2, 2, 1), (3, 3, 1)], lut=lut, capacity=11)
        end = 2**31 - 1
        assert plan.entries == [
            *[(7, 0, -1, -1), (0, 1, 7, -1), (end, 2, 0, -1), (8, 3, end, -1), (0, 4, 8, -1)],
            *[(6, 0, -1, -1), (end, 1, 6, -1)],
            *[(end, 0, -1, -1), (end, 1, end, -1), (-1, 2, end, -1)],
        ]
        assert plan.seeds == [0, end, -1]

    def test_expected_tokens(self, backend):
        tokens = np.arange(12).reshape(3, 4) + 100
        rows = [(1, 3, 0), (2, 5, 0), (3, 1, 0)]
        found = {
            offset: [
                entry[3]
                for entry in self.plan(
                    backend, rows, expected_tokens=tokens, valid_lens=[2, 99, 3], kv_token_id_vs_position_offset=offset
                ).entries
            ]
            for offset in (0, 1, -1)
        }
        assert found[0] == [104, 105, -1, 108, 109, 110, 111, -1, -1]
        assert found[1] == [105, -1, -1, 109, 110, 111, -1, -1, -1]
        assert found[-1] == [-1, 104, 105, -1, 108, 109, 110, 111, -1]

    def test_negative_valid_len(self, backend):
        plan = self.plan(backend, [(1, 2, 0)], expected_tokens=np.ones((2, 3), int), valid_lens=[-1])
        assert [entry[3] for entry in plan.entries] == [-1, -1]

    def test_overflow(self, backend):
        rows = [(1, 5, 1), (2, 4, 2)]
        plan = self.plan(backend, rows, capacity=9)
        assert (plan.num_valid, plan.enable) == (9, 1)
        plan = self.plan(backend, rows, capacity=8)
        assert (plan.num_valid, plan.enable) == (8, 0)
        assert plan.offsets == [0, 1, 3]
        assert plan.seeds == [14, 23]

    def test_totals_do_not_wrap(self, backend):
        """4096 rows of 2^20 tokens sum to 2^32: a small number in 32 bits."""
        rows = np.array([[1, 2**20, 2**20]] * 4096)
        plan = self.plan(backend, rows, table=np.zeros((2, 2**20), np.int8), capacity=3)
        assert (plan.num_valid, plan.enable) == (3, 0)
        assert plan.offsets == [min(r * 2**20, 2**31 - 1) for r in range(4097)]

    def test_offsets_saturate(self, backend):
        plan = self.plan(backend, [(1, 0, 2**31 - 2), (1, 0, 1), (1, 0, 1), (1, 0, 5)])
        assert plan.offsets == [0, 2**31 - 2, 2**31 - 1, 2**31 - 1, 2**31 - 1]

    def test_empty_batch(self, backend):
        plan = self.plan(backend, [], write_req_capacity=2)
        assert (plan.entries, plan.enable, plan.offsets, plan.invalid) == ([], 1, [0, 0, 0], 0)
        plan = self.plan(backend, [])
        assert (plan.entries, plan.offsets, plan.seeds) == ([], [0], [])

    def test_empty_tables(self, backend):
        plan = self.plan(backend, [(1, 0, 2), (1, 1, 1), (0, 1, 1)], table=np.zeros((2, 0)), lut=[])
        assert (plan.entries, plan.offsets, plan.seeds, plan.invalid) == ([], [0, 2, 3, 3], [-1, -1, -1], 1)
        plan = self.plan(backend, [(1, 2, 1)], lut=[], expected_tokens=np.zeros((2, 0)), valid_lens=[9])
        assert plan.entries == [(2**31 - 1, 0, -1, -1), (2**31 - 1, 1, 2**31 - 1, -1)]

    def test_no_room_at_all(self, backend):
        assert self.plan(backend, [(1, 0, 2)], capacity=0).enable == 1
        plan = self.plan(backend, [(1, 1, 2)], capacity=0)
        assert (plan.num_valid, plan.enable, plan.seeds) == (0, 0, [10])

    def test_wide_indices(self, wide_backend):
        """What does not fit int32 is out of range, and never the value of its low bits."""
        big = 2**32
        plan = self.plan(
            wide_backend,
            [(big + 1, 1, 1), (1, big + 1, 1), (1 - big, 1, 1), (1, 1 - big, 1), (1, 2, 1 - big), (1, 3, big + 2)],
            table=np.array([[0] * 3, [big + 4, -big + 4, 5]]),
            expected_tokens=np.array([[0] * 3, [big + 7, 8, -big + 9]]),
            valid_lens=[big] * 6,
        )
        end = 2**31 - 1
        assert plan.entries == [(end, 0, -1, -1), (-1, 1, end, 8), (5, 2, 0, -1)]
        assert plan.offsets == [0, 1, 2, 3, 4, 4, end]
        assert plan.seeds == [-1, -1, -1, -1, -1, 5]
        assert plan.invalid == 5


class TestArguments:
    """Arguments stay as they are, and wrong ones are refused by every backend in the same words."""

    @pytest.fixture(params=["reference", "eager"])
    def backend(self, request, get_backend):
        return get_backend(request.param)

    def plan_args(self, **changes):
        ints = {name: np.array([1, 2], np.int32) for name in ("req_pool_indices", "prefix_lens", "extend_seq_lens")}
        inputs = {name: changes.pop(name, value) for name, value in ints.items()}
        table = changes.pop("req_to_token", np.zeros((3, 4), np.int32))
        valid_lens = changes.pop("valid_lens", None)
        return (changes.pop("inputs", PlanInput(**inputs, expected_tokens_valid_lens=valid_lens)), table), {"verify_capacity": 4} | changes

    def verify_args(self, **changes):
        names = ("verify_slot_indices", "verify_expected_tokens", "verify_expected_positions", "verify_prev_slot_indices")
        arrays = {name: np.ones(3, np.int32) for name in names} | {name: np.ones(1, np.int32) for name in ("verify_num_valid", "enable")}
        arrays = {name: changes.pop(name, value) for name, value in arrays.items()}
        state = dataclasses.replace(fresh_state(3), **changes.pop("state", {}))
        return (changes.pop("canary_buf", fresh_buffer(5)), changes.pop("plan", VerifyPlan(**arrays)), state), {"tag": TAG} | changes

    def write_args(self, **changes):
        plan = {"write_offsets": [0, 1, 2], "write_seed_slot_indices": [-1, -1], "write_num_valid_reqs": [2]}
        plan = {name: changes.pop(name, np.array(value, np.int32)) for name, value in plan.items()}
        tokens = [changes.pop(name, np.array([2, 3], np.int32)) for name in ("input_ids", "positions", "out_cache_loc")]
        state = fresh_state(3)
        return (changes.pop("canary_buf", fresh_buffer(5)), changes.pop("plan", WritePlan(**plan)), *tokens, state), {"tag": TAG} | changes

    @pytest.mark.parametrize("operation", ["plan", "verify_step", "write_step"])
    def test_arguments_stay_as_they_are(self, backend, operation):
        args, keywords = getattr(self, operation.split("_")[0] + "_args")()
        before = jax.tree.map(np.array, args)
        getattr(backend, operation)(*args, **keywords)
        for leaf, was in zip(jax.tree.leaves(args), jax.tree.leaves(before), strict=True):
            np.testing.assert_array_equal(leaf, was)

    @pytest.mark.parametrize("dtype", [np.int64, np.float64])
    def test_numpy_sources_keep_their_64_bits(self, backend, dtype):
        """With 64-bit types off, JAX would halve them; twice as many slots as needed would hide that."""
        words = np.arange(1, 31, dtype=dtype).reshape(15, 2)
        source = RealKvSource(array=words, num_bytes_per_token=16, read_bytes=16)
        args, keywords = self.write_args(real_kv_sources=(source,), real_kv_hash_mode=2)
        buf, _ = backend.write_step(*args, **keywords)
        raw = words.view(np.uint64).tolist()
        assert fields(buf)[2:4, 3].tolist() == [signed(mix(mix(mix(a) ^ b))) for a, b in raw[2:4]]

    PLAN_ERRORS = (
        (TypeError, {"inputs": (1, 2)}, "`inputs` is of type tuple, but it must be a PlanInput."),
        (
            TypeError,
            {"prefix_lens": np.ones(2, np.int16)},
            "`inputs.prefix_lens` has dtype int16, but it must be int32 or int64.",
        ),
        (
            ValueError,
            {"extend_seq_lens": np.ones(3, np.int32)},
            "`inputs.extend_seq_lens` has shape [3], but the batch of 2 rows needs shape [2].",
        ),
        (
            ValueError,
            {"req_to_token": np.ones(3, np.int32)},
            "`req_to_token` has shape [3], but a table of slots by request row and position needs shape [any, any].",
        ),
        (TypeError, {"verify_capacity": 1.0}, "`verify_capacity` is 1.0 of type float, but it must be an int."),
        (ValueError, {"verify_capacity": -1}, "`verify_capacity` is -1, but it must be between 0 and 2147483646."),
        (
            ValueError,
            {"write_req_capacity": 1},
            "`write_req_capacity` is 1, but it must be between 2 and 2147483646, and at least the batch size 2.",
        ),
        (ValueError, {"swa_window_size": -1}, "`swa_window_size` is -1, but it must be between 0 and 2147483647."),
        (
            TypeError,
            {"full_to_swa_index_mapping": np.ones(2, np.uint8)},
            "`full_to_swa_index_mapping` has dtype uint8, but it must be int32 or int64.",
        ),
        (
            ValueError,
            {"expected_tokens": np.ones((2, 2), np.int32)},
            "`inputs.expected_tokens_valid_lens` is None, but it must be an array when `expected_tokens` is given.",
        ),
    )

    @pytest.mark.parametrize(("error", "changes", "message"), PLAN_ERRORS)
    def test_plan_errors(self, backend, error, changes, message):
        args, keywords = self.plan_args(**changes)
        with pytest.raises(error) as caught:
            backend.plan(*args, **keywords)
        assert str(caught.value) == message

    SOURCE = RealKvSource(array=np.zeros((4, 8), np.uint8), num_bytes_per_token=8, read_bytes=8)
    LAUNCH_ERRORS = (
        (TypeError, {"canary_buf": np.zeros((5, 32), np.int8)}, "`canary_buf` has dtype int8, but it must be uint8."),
        (
            ValueError,
            {"canary_buf": np.zeros((5, 4), np.uint8)},
            "`canary_buf` has shape [5, 4], but a canary buffer of 32-byte records needs shape [any, 32].",
        ),
        (
            ValueError,
            {"canary_buf": np.zeros((0, 32), np.uint8)},
            "`canary_buf.shape[0]` is 0, but it must be between 1 and 2147483647, since a pool has at least its padding slot.",
        ),
        (
            ValueError,
            {"real_kv_hash_mode": 3},
            "`real_kv_hash_mode` is 3, but it must be one of NONE (0), PARTIAL (1), ALL (2).",
        ),
        (
            ValueError,
            {"real_kv_sources": (SOURCE,), "real_kv_hash_mode": 1},
            "`real_kv_sources[0]` has the bytes of 4 slots, but the canary buffer has 5 slots.",
        ),
        (
            ValueError,
            {"real_kv_sources": (SOURCE,) * 5},
            "`real_kv_sources` has 5 sources, but one launch folds at most 4.",
        ),
    )
    VERIFY_ERRORS = (
        (TypeError, {"plan": None}, "`plan` is of type NoneType, but it must be a VerifyPlan, such as the `verify` of a Plan."),
        (TypeError, {"enable": np.ones(1, bool)}, "`plan.enable` has dtype bool, but it must be int32 or int64."),
        (
            ValueError,
            {"verify_prev_slot_indices": np.ones(2, np.int32)},
            "`plan.verify_prev_slot_indices` has shape [2], but a verify plan of 3 entries needs shape [3].",
        ),
        (
            TypeError,
            {"check_expected_token": 1},
            "`check_expected_token` is 1 of type int, but it must be True or False.",
        ),
        (
            TypeError,
            {"state": {"verify_skip_counters": np.zeros(12, np.int32)}},
            "`device_state.verify_skip_counters` has dtype int32, but it must be uint32.",
        ),
    )
    WRITE_ERRORS = (
        (TypeError, {"plan": None}, "`plan` is of type NoneType, but it must be a WritePlan, such as the `write` of a Plan."),
        (
            ValueError,
            {"write_offsets": np.ones(2, np.int32)},
            "`plan.write_offsets` has shape [2], but a write plan of 2 rows needs shape [3].",
        ),
        (TypeError, {"input_ids": np.ones(2, np.float32)}, "`input_ids` has dtype float32, but it must be int32 or int64."),
        (
            ValueError,
            {"positions": np.ones(3, np.int32)},
            "`positions` has shape [3], but one value for each of the 2 tokens of `input_ids` needs shape [2].",
        ),
        (
            ValueError,
            {"expected_input_tokens": np.ones(2, np.int32)},
            "`expected_input_positions` is None, but it must be an array when `expected_input_tokens` is given.",
        ),
        (
            ValueError,
            {"expected_input_positions": np.ones(2, np.int32)},
            "`expected_input_tokens` is None, but it must be an array when `expected_input_positions` is given.",
        ),
    )

    @pytest.mark.parametrize(("error", "changes", "message"), [*LAUNCH_ERRORS, *VERIFY_ERRORS])
    def test_verify_errors(self, backend, error, changes, message):
        args, keywords = self.verify_args(**changes)
        with pytest.raises(error) as caught:
            backend.verify_step(*args, **keywords)
        assert str(caught.value) == message

    @pytest.mark.parametrize(("error", "changes", "message"), [*LAUNCH_ERRORS, *WRITE_ERRORS])
    def test_write_errors(self, backend, error, changes, message):
        args, keywords = self.write_args(**changes)
        with pytest.raises(error) as caught:
            backend.write_step(*args, **keywords)
        assert str(caught.value) == message

    def test_unknown_tag(self, backend):
        args, keywords = self.verify_args(tag=12)
        with pytest.raises(ValueError, match=r"^`tag` is 12, but it must be one of HEAD_K_FULL \(0\), .*, SWEEP_V_SWA \(11\)\.$"):
            backend.verify_step(*args, **keywords)
