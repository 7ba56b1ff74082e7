"""Every rule of the contract on verify and the log on a case small enough to work out by hand, on the reference and on the device."""

from __future__ import annotations

import dataclasses

import numpy as np

from helpers.backends import host
from helpers.states import fresh_state, log_rows, multiset, with_log
from helpers.worked import (
    AFTER_11,
    AFTER_12,
    AFTER_13,
    ANCHOR,
    CHAIN,
    CHAIN_OF_THREE,
    NUM_SLOTS,
    POSITION,
    RANGE,
    REAL_KV,
    TAG,
    TOKEN,
    buffer,
    counters,
    mix,
    signed,
)
from jax_kvcanary.constants import RealKvHashMode
from jax_kvcanary.plan import VerifyPlan
from jax_kvcanary.sources import RealKvSource
from jax_kvcanary.state import from_int64


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
