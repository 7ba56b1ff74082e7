"""Writes around the borders at which a launch takes another path: sizes, lengths of rows, skips, slots named twice, seeds that differ.

Every case is compared with the NumPy reference, bit for bit.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from helpers import launches
from helpers.launches import INT32_MAX, ROOMY, TAGS, Write, check_write, in_order, make_write
from helpers.states import assert_same_buffer, assert_same_state, fields, fresh_state, log_rows
from jax_kvcanary import FailReason as Reason

#: Tokens around the borders of a warp, a tile, and a launch of one block.
BORDERS = (1, 31, 32, 33, 255, 256, 257, 1023, 1024, 1025, 2500)
SIZES = pytest.mark.parametrize("tokens", [701, 1301])


def split(rng, total, rows):
    """Lengths of rows that add up to a total; some are 0."""
    cuts = np.sort(rng.integers(0, total + 1, rows - 1))
    return np.diff([0, *cuts, total])


def reasons_of(rows):
    return Reason(int(np.bitwise_or.reduce(rows[:, 7], initial=0)))


def int32(*values):
    return np.array(values, np.int32)


def damage_seeds(case, rows, endpoints, field=2):
    """Give the seeds of some rows another record in some endpoints."""
    rows = [r for r in rows if case.plan.write_seed_slot_indices[r] > 0]
    assert rows
    for e in endpoints:
        fields(case.buffers[e])[case.plan.write_seed_slot_indices[rows], field] ^= 1 + e


# Sizes.


@pytest.mark.parametrize("seeds", ["one chain", "differing seeds"])
@pytest.mark.parametrize(("tokens", "endpoints"), [(tokens, 1 + i % 4) for i, tokens in enumerate(BORDERS)])
def test_token_counts(tokens, endpoints, seeds):
    """Everything at once: some skips, slots outside the buffer, expected inputs, positions that follow nothing."""
    if seeds == "differing seeds":
        endpoints = 2 + endpoints % 3
    rng = np.random.default_rng(tokens)
    case = make_write(rng, split(rng, tokens, 5), endpoints=endpoints, capacity=7, dtype=np.int64 if tokens % 2 else np.int32)
    case.plan.write_seed_slot_indices[:5] = rng.choice(np.setdiff1d(np.arange(1, len(case.buffers[0])), case.slots), 5, replace=False)
    if seeds == "differing seeds":
        damage_seeds(case, [1, 3, 4], [endpoints - 1])
    case.with_expected(rng, 0.01)
    case.slots[rng.random(tokens) < 0.03] = -1
    case.slots[rng.random(tokens) < 0.01] = len(case.buffers[0])
    case.positions[rng.random(tokens) < 0.01] += 3
    rows = check_write(case)
    if tokens > 1000:
        assert reasons_of(rows) == Reason.SLOT_OUT_OF_RANGE | Reason.WRITE_TOKEN_MISMATCH | Reason.WRITE_POSITION_MISMATCH


@SIZES
def test_a_donated_step_of_one_endpoint(get_backend, tokens):
    """The public operation, jitted, with its buffer and state updated in place."""
    rng = np.random.default_rng(tokens)
    case = make_write(rng, split(rng, tokens, 5), endpoints=1, padding=11)
    case.positions[::53] += 1
    outcomes = []
    for name in ("reference", "jit"):
        backend = get_backend(name)
        arrays = backend.own((case.buffers[0], case.plan, *case.arrays, fresh_state(ROOMY)))
        outcomes.append(backend.write_step(*arrays, tag=TAGS[0]))
    (want_buffer, want), (got_buffer, got) = outcomes
    assert_same_buffer(got_buffer, want_buffer)
    assert_same_state(got, want)
    assert log_rows(got).size > 0


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(("long", "short"), [(1500, 701), (509, 401)])
def test_rows_of_very_different_lengths(long, short, dtype):
    """One long row among many of one token and some of none, a plan with more room than rows, and tokens that no row has."""
    rng = np.random.default_rng(long)
    lengths = np.ones(short, np.int64)
    lengths[rng.integers(0, short, 53)] = 0
    lengths[short // 3] = long
    case = make_write(rng, lengths, capacity=997, padding=43, dtype=dtype)
    damage_seeds(case, range(0, short, 7), [1])
    case.positions[::97] += 1
    rows = check_write(case, attribute=False)
    assert reasons_of(rows) == Reason.WRITE_POSITION_MISMATCH


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0], [0, 3, 0]])
@pytest.mark.parametrize("padding", [0, 37, 1031])
def test_rows_without_entries(lengths, padding):
    """Tokens behind the last row are padding and write nothing."""
    case = make_write(np.random.default_rng(3), lengths, capacity=5, padding=padding)
    assert len(check_write(case)) == 0


# Skips.

SKIPS = {
    "the first": [0],
    "the last": [-1],
    "around a warp": [31, 32, 63, 96],
    "around a tile": [255, 256, 511, 512, 513],
    "a warp": [range(32, 64)],
    "a tile": [range(256, 512)],
    "two tiles and a bit": [range(200, 530)],
    "all but one": [range(300), range(301, 10_000)],
    "all": [range(10_000)],
}


@pytest.mark.parametrize("skips", SKIPS)
@SIZES
def test_skipped_entries(tokens, skips):
    """A skipped entry hands on the chain and the position before it; findings behind one say so."""
    rng = np.random.default_rng(tokens)
    case = make_write(rng, [tokens - 2, 2])
    case.plan.write_seed_slot_indices[0] = seed = np.setdiff1d(np.arange(1, 90), case.slots)[0]
    case.positions[: tokens - 2] += fields(case.buffers[0])[seed, 1] + 1 - case.positions[0]
    for part in SKIPS[skips]:
        at = np.arange(tokens - 2)[part] if isinstance(part, int) else [i for i in part if i < tokens - 2]
        case.slots[at] = -7
    case.with_expected(rng, 0.02)
    rows = check_write(case)
    skipped = case.slots[: tokens - 2] < 0
    # An entry behind a skip stands more than one position behind the entry that it follows.
    behind = np.flatnonzero(~skipped[1:] & skipped[:-1]) + 1
    first = [0] if not skipped[0] else []
    follows = np.setdiff1d(behind, first)
    chain_rows = rows[(rows[:, 7] == Reason.WRITE_POSITION_MISMATCH) & (rows[:, 3] == rows[:, 4])]
    assert set(case.slots[follows].tolist()) <= set(chain_rows[:, 1].tolist())
    if skips == "all":
        assert not set(chain_rows[:, 1].tolist()) & set(case.slots[: tokens - 2].tolist())


# Values.


@SIZES
def test_values_beyond_int32(tokens):
    """Slots whose low words are those of a record, tokens and positions of all widths, and the successor of the largest position."""
    rng = np.random.default_rng(tokens)
    case = make_write(rng, split(rng, tokens, 3), dtype=np.int64, endpoints=3)
    wide = np.array([2**31 - 1, 2**31, 2**32 + 5, 2**63 - 1, -(2**40) + 3, -(2**63), -(2**32)])
    for values, share in ((case.slots, 0.05), (case.tokens, 0.3), (case.positions, 0.1)):
        at = rng.random(tokens) < share
        values[at] = rng.choice(wide, at.sum())
    case.positions[11:13] = [2**63 - 1, -(2**63)]
    case.with_expected(rng, 0.02)
    rows = check_write(case)
    outside = rows[rows[:, 7] == Reason.SLOT_OUT_OF_RANGE]
    assert set(outside[:, 1].tolist()) == {2**31 - 1, 2**31, 2**32 + 5, 2**63 - 1}


# Slots that several entries name.


@pytest.mark.parametrize("apart", [1, 5, 31, 32, 33, 255, 256, 600])
@SIZES
def test_the_later_entry_of_a_row_stays(tokens, apart):
    rng = np.random.default_rng(apart)
    case = make_write(rng, [tokens], endpoints=2)
    twice = rng.permutation(tokens - apart)[:23]
    case.slots[twice + apart] = case.slots[twice]
    assert len(set(case.slots.tolist())) < tokens
    check_write(case)


@pytest.mark.parametrize("tokens", [33, 1023, 1025, 2500])
def test_three_slots_that_a_row_names_over_and_over(tokens):
    rng = np.random.default_rng(tokens)
    case = make_write(rng, [tokens, 0], endpoints=3, num_slots=41 + tokens)
    case.slots = rng.choice([7, 11, len(case.buffers[0]) - 1], tokens).astype(np.int32)
    case.plan.write_seed_slot_indices[0] = 3
    damage_seeds(case, [0], [2], field=0)
    check_write(case)


@pytest.mark.parametrize("tokens", [997, 2003])
def test_one_whole_record_of_a_slot_that_rows_share(tokens):
    """Any of the rows may have it, but no half of one and half of another."""
    rng = np.random.default_rng(tokens)
    case = make_write(rng, split(rng, tokens, 13), endpoints=2)
    case.slots[rng.random(tokens) < 0.4] = 17
    case.slots[rng.random(tokens) < 0.2] = 19
    case.slots[rng.random(tokens) < 0.2] = 0  # padding, whose record is open
    damage_seeds(case, range(0, 13, 2), [1])
    check_write(case)


@SIZES
def test_marks_that_look_like_claims(tokens):
    """What stood in a record before may be any number, also that of an entry of this launch."""
    rng = np.random.default_rng(tokens)
    case = make_write(rng, [tokens - 50, 50])
    case.slots[-50:] = case.slots[:50]
    case.slots[100:150] = case.slots[150:200]
    for buffer in case.buffers:
        fields(buffer)[:, 3] = rng.integers(0, tokens + 2, len(buffer))
        fields(buffer)[case.slots[100:150], 3] = np.arange(101, 151)
    check_write(case)


@SIZES
def test_a_seed_that_another_row_overwrites(tokens):
    """Seeds are read as they were before the launch, whichever row comes first."""
    rng = np.random.default_rng(tokens)
    case = make_write(rng, split(rng, tokens, 7), endpoints=2)
    starts = case.plan.write_offsets
    case.plan.write_seed_slot_indices[:7] = case.slots[[-1, -2, -3, 0, 1, 2, 3]]  # of other rows, and of their own
    case.plan.write_seed_slot_indices[2] = case.slots[starts[2]]
    check_write(case)


# Seeds that differ between endpoints, so that rows are walked again.


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("rows", [[0], [1, 4], range(9)], ids=["one", "two", "all"])
@pytest.mark.parametrize("tokens", [97, 1501])
def test_endpoints_of_different_chains(tokens, rows, tree):
    rng = np.random.default_rng(tokens)
    case = make_write(rng, split(rng, tokens, 9), endpoints=4, dtype=np.int64 if tree else np.int32)
    unused = np.setdiff1d(np.arange(1, len(case.buffers[0])), case.slots)
    case.plan.write_seed_slot_indices[:9] = rng.choice(unused, 9, replace=False)
    damage_seeds(case, rows, [1, 3])
    damage_seeds(case, rows, [2], field=1)  # another position, too
    case.slots[rng.random(tokens) < 0.05] = -1
    again = rng.permutation(tokens)[:11]
    case.slots[again] = case.slots[again - 1]
    if tree:
        case.with_parents(rng)
    rows = check_write(case)
    assert Reason.WRITE_POSITION_MISMATCH in reasons_of(rows)


@pytest.mark.parametrize("tokens", [33, 257, 1025])
def test_trees(tokens):
    """Chains as trees, stars, and parents at every distance, across the borders of a warp."""
    rng = np.random.default_rng(tokens)
    for shape in ("chain", "star", "comb", "random"):
        case = make_write(rng, split(rng, tokens, 3), endpoints=2)
        case.with_parents(rng)
        if shape != "random":
            parents = case.optional["parents"]
            for row in case.ranges:
                for i in row:
                    parents[i] = {"chain": i - 1, "star": row.start, "comb": i - 32}[shape]
                    parents[i] = -1 if parents[i] < row.start or parents[i] == i else parents[i]
        case.slots[rng.random(tokens) < 0.1] = -1
        check_write(case)


# Plans made by hand.

DISORDER = {
    "back to the front": [0, 500, 250, 600],
    "a row behind the end": [0, 600, 5],
    "the last first": [500, 701, 0, 300],
    "all of them backwards": [650, 400, 100, 0],
    "the same entries three times": [0, 701, 0, 701, 0, 701],
    "past the end and back": [0, INT32_MAX, -5, 400],
}


@pytest.mark.parametrize("offsets", DISORDER)
@pytest.mark.parametrize("tokens", [701, 1301])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_offsets_that_decrease(tokens, offsets, tree):
    """Rows that share entries are written one after the other."""
    rng = np.random.default_rng(tokens)
    offsets = DISORDER[offsets]
    case = make_write(rng, [tokens], endpoints=2)
    case.plan = type(case.plan)(
        np.array(offsets, np.int32), rng.integers(-1, 50, len(offsets) - 1).astype(np.int32), int32(len(offsets) - 1)
    )
    assert not in_order(case)
    case.slots[rng.random(tokens) < 0.1] = 23
    case.slots[rng.random(tokens) < 0.1] = -1
    if tree:
        case.with_parents(rng)
    check_write(case)


@pytest.mark.parametrize(
    "offsets",
    [[-9, 700, 900], [0, 5000, 6000], [2000, 2003, INT32_MAX], [-9, -5, 300], [-(2**31), -(2**31), INT32_MAX], [300, 300, 702]],
    ids=str,
)
@pytest.mark.parametrize("tokens", [701, 1301])
def test_offsets_outside_the_token_arrays(tokens, offsets):
    rng = np.random.default_rng(tokens)
    case = make_write(rng, [tokens], endpoints=2)
    case.plan = type(case.plan)(np.array(offsets, np.int32), int32(3, INT32_MAX), int32(2))
    cut = [r for r, (b, e) in enumerate(itertools.pairwise(offsets)) if b < e and (b < 0 or e > tokens)]
    rows = check_write(case)
    assert (rows[:, 1] == -1).sum() == 2 * len(cut)


@pytest.mark.parametrize("count", [0, -1, -(2**31), 3, 5, 6, INT32_MAX])
@SIZES
def test_other_counts_of_rows_than_there_are(tokens, count):
    """The counter may say anything; rows beyond the arrays are none, and those beyond the counter write nothing."""
    rng = np.random.default_rng(tokens)
    case = make_write(rng, split(rng, tokens, 5), endpoints=2)
    case.plan.write_num_valid_reqs[0] = count
    check_write(case)


def test_endpoints_of_different_sizes():
    """V has fewer slots than K: what K stores may be outside of V, and a seed of K none of V."""
    for tokens in (701, 1301):
        rng = np.random.default_rng(tokens)
        case = make_write(rng, split(rng, tokens, 5), endpoints=2)
        case.buffers[1] = case.buffers[1][: tokens // 2].copy()
        case.plan.write_seed_slot_indices[:3] = [tokens // 2, tokens // 2 - 1, tokens // 2 + 1]
        case.slots[rng.random(tokens) < 0.2] = tokens // 2 + 3
        assert Reason.SLOT_OUT_OF_RANGE in reasons_of(check_write(case))


def test_a_case_that_goes_wrong_is_seen():
    """The comparison tells a record that is half of one entry and half of another."""
    rng = np.random.default_rng(1)
    case: Write = make_write(rng, [3, 3])
    case.slots[[0, 3]] = 9
    (endpoint, _), (one, other) = case.endpoints, (0, 3)
    records = launches._records_of_entries(case, endpoint)
    got, _ = launches.reference.write_step(endpoint.canary_buf, case.plan, *case.arrays, launches.fresh_state(ROOMY), tag=endpoint.tag)
    want = got.copy()
    fields(got)[9] = [*records[one, :3], 0]
    launches._check_records(case, endpoint, got, want)
    fields(got)[9] = [*records[one, :2], records[other, 2], 0]
    with pytest.raises(AssertionError):
        launches._check_records(case, endpoint, got, want)
