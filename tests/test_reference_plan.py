"""Plans, and the arguments of every operation, on cases small enough to work out by hand: reference and device."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from helpers.backends import host
from helpers.states import fields, fresh_buffer, fresh_state
from helpers.worked import (
    TAG,
    mix,
    signed,
)
from jax_kvcanary.plan import PlanInput, VerifyPlan, WritePlan
from jax_kvcanary.sources import RealKvSource


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
