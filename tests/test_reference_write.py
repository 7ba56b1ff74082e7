"""Every rule of the contract on write on a case small enough to work out by hand, on the reference and on the device."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.states import fields, fresh_state, log_rows, multiset
from helpers.worked import (
    AFTER_11,
    AFTER_12,
    AFTER_13,
    ANCHOR,
    CHAIN_OF_THREE,
    FRESH,
    NUM_SLOTS,
    RANGE,
    TAG,
    WRITE_POSITION,
    WRITE_TOKEN,
    buffer,
    counters,
    link,
    mix,
    signed,
)
from jax_kvcanary.constants import RealKvHashMode
from jax_kvcanary.plan import WritePlan
from jax_kvcanary.sources import RealKvSource

#: Tokens 11 and 12, which the trees below grow from, in slots 2 and 4.
ROOT = {2: [11, 0, ANCHOR, 0], 4: [12, 1, AFTER_11, 0]}


class TestWrite:
    NUM_TOKENS = 5
    ROWS = 3

    def write(
        self,
        backend,
        content,
        rows,
        entries,
        *,
        expected=None,
        parents=None,
        num_rows=None,
        offsets=None,
        chain_assert=1,
        state=None,
        sources=(),
        mode=0,
    ):
        """Run one launch.

        Args:
            rows: (number of entries, seed slot) of each row, padded with rows that nothing may read.
            entries: (slot, token, position), padded with skipped ones.
            expected: (token, position) of each entry, or None.
            parents: the entry that each one follows, or None.
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
                parents=None if parents is None else backend.ints([*parents, *[99] * padding]),
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

    # Trees.

    def test_a_chain_as_a_tree(self, backend):
        stored, rows = self.write(backend, {}, [(3, -1)], [(2, 11, 0), (4, 12, 1), (1, 13, 2)], parents=[-1, 0, 1])
        assert (stored, rows) == (CHAIN_OF_THREE, [])

    def test_branches_follow_their_parents(self, backend):
        """Token 13 has two children, one of which has a child; token 23 is its sibling."""
        entries = [(1, 13, 2), (3, 23, 2), (5, 14, 3), (6, 15, 3), (0, 16, 4)]
        stored, rows = self.write(backend, ROOT, [(5, 4)], entries, parents=[-1, -7, 0, 0, 2])
        branches = {1: [13, 2, AFTER_12, 0], 3: [23, 2, AFTER_12, 0], 5: [14, 3, AFTER_13, 0], 6: [15, 3, AFTER_13, 0]}
        assert (stored, rows) == (ROOT | branches, [])
        assert self.counters.slot_runs == 5

    def test_position_follows_the_parent(self, backend):
        """The last entry would follow the one before it, but not its parent."""
        entries = [(1, 13, 2), (3, 14, 3), (5, 15, 4)]
        _, rows = self.write(backend, ROOT, [(3, 4)], entries, parents=[-1, 0, 0])
        assert rows == [[5, 4, 15, 15, AFTER_13, 3, WRITE_POSITION]]
        _, rows = self.write(backend, ROOT, [(3, 4)], entries, parents=[-1, 0, -1])
        assert rows == [[5, 4, 15, 15, AFTER_12, 2, WRITE_POSITION]]
        assert self.write(backend, ROOT, [(3, 4)], entries, parents=[-1, 0, 0], chain_assert=0)[1] == []

    def test_a_skipped_parent_hands_on_its_own(self, backend):
        entries = [(-1, 98, 9), (1, 13, 2), (-1, 99, 9), (3, 14, 3)]
        stored, rows = self.write(backend, ROOT, [(4, 4)], entries, parents=[-1, 0, 1, 2])
        assert (stored, rows) == (ROOT | {1: [13, 2, AFTER_12, 0], 3: [14, 3, AFTER_13, 0]}, [])

    def test_a_parent_without_a_slot_is_followed(self, backend):
        entries = [(NUM_SLOTS, 13, 2), (3, 14, 3)]
        stored, rows = self.write(backend, ROOT, [(2, 4)], entries, parents=[-1, 0])
        assert stored == ROOT | {3: [14, 3, AFTER_13, 0]}
        assert rows == [[NUM_SLOTS, 2, 13, -1, AFTER_12, NUM_SLOTS, RANGE]]

    @pytest.mark.parametrize("parent", [1, 2, 5, 99, 2**31 - 1])
    def test_parent_out_of_range(self, backend, parent):
        """Itself, a later entry, and none at all. The token follows the seed, its own child follows it, and both are silent else."""
        entries = [(1, 13, 2), (3, 14, 7), (5, 15, 8)]
        stored, rows = self.write(backend, ROOT, [(3, 4)], entries, parents=[-1, parent, 1])
        after = link(AFTER_12, 14, 7)
        assert stored == ROOT | {1: [13, 2, AFTER_12, 0], 3: [14, 7, AFTER_12, 0], 5: [15, 8, after, 0]}
        assert rows == [[parent, 7, 14, -1, AFTER_12, 1, RANGE]]

    def test_parent_in_another_row(self, backend):
        stored, rows = self.write(backend, {}, [(1, -1), (1, -1)], [(1, 11, 0), (2, 21, 0)], parents=[-1, 0])
        assert stored == {1: [11, 0, ANCHOR, 0], 2: [21, 0, ANCHOR, 0]}
        assert rows == [[0, 0, 21, -1, ANCHOR, 1, RANGE]]

    def test_parent_of_a_skipped_entry_is_not_looked_at(self, backend):
        _, rows = self.write(backend, ROOT, [(2, 4)], [(-1, 98, 9), (1, 13, 2)], parents=[99, 0])
        assert rows == []

    def test_wide_parents(self, wide_backend):
        _, rows = self.write(wide_backend, {}, [(2, -1)], [(1, 11, 0), (2, 12, 0)], parents=[-(2**40), 2**32])
        assert rows == [[2**32, 0, 12, -1, ANCHOR, 1, RANGE]]

    def test_of_siblings_in_one_slot_the_later_one_stays(self, backend):
        stored, _ = self.write(backend, ROOT, [(3, 4)], [(1, 13, 2), (1, 23, 2), (3, 14, 3)], parents=[-1, -1, 0])
        assert stored == ROOT | {1: [23, 2, AFTER_12, 0], 3: [14, 3, AFTER_13, 0]}
