"""The contract's vectors on every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.backends import BACKENDS, Backend, host
from helpers.states import assert_same_buffer, fields, log_rows, multiset, records
from helpers.vectors import load_vectors, plan_arguments, verify_arguments, write_arguments
from jax_kvcanary import reference
from jax_kvcanary.state import to_int64

#: Every case runs on the reference and jitted; where a case compiles programs of its own, the other backends run some of them.
STRIDES = {
    "plan": {"eager": 7, "int64": 17, "jit_int64": 17, "jit_x64": 17},
    "verify": {"int64": 3, "jit_int64": 3, "jit_x64": 3},
    "write": {"int64": 3, "jit_int64": 3, "jit_x64": 3},
}

ENTRY_ARRAYS = ("verify_slot_indices", "verify_expected_positions", "verify_prev_slot_indices", "verify_expected_tokens")


def cases(name: str) -> list[Any]:
    """(backend, case) for each vector of a file."""
    return [
        pytest.param(backend, case, id=f"{backend}-{number}")
        for backend in BACKENDS
        for number, case in list(enumerate(load_vectors(name)))[:: STRIDES[name].get(backend, 1)]
    ]


class TestPlan:
    @pytest.mark.parametrize(("backend_name", "case"), cases("plan"))
    def test_vector(self, get_backend, backend_name, case):
        backend = get_backend(backend_name)
        args, keywords = plan_arguments(case["inputs"], backend)
        with backend.active():
            plan = host(backend.plan(*args, **keywords))
        self.check(plan, case["inputs"], case["outputs"])

    def check(self, plan, inputs, want):
        capacity, row_capacity = inputs["verify_capacity"], inputs["write_req_capacity"]
        for name in ENTRY_ARRAYS:
            entries = getattr(plan.verify, name)
            assert (entries.dtype, entries.shape) == (np.int32, (capacity,))
            if want["enable"]:
                np.testing.assert_array_equal(entries[: want["verify_num_valid"]], want[name], err_msg=name)
        for part, name in (
            (plan.verify, "verify_num_valid"),
            (plan.verify, "enable"),
            (plan.write, "write_num_valid_reqs"),
            (plan, "num_invalid_rows"),
        ):
            value = getattr(part, name)
            assert (value.dtype, value.shape) == (np.int32, (1,))
            assert value[0] == want[name], name
        bs = want["write_num_valid_reqs"]
        for name, length, valid in (
            ("write_offsets", row_capacity + 1, row_capacity + 1),
            ("write_seed_slot_indices", row_capacity, bs),
        ):
            value = getattr(plan.write, name)
            assert (value.dtype, value.shape) == (np.int32, (length,))
            np.testing.assert_array_equal(value[:valid], want[name][:valid], err_msg=name)


def check_state(state: Any, inputs: dict[str, Any], want: dict[str, Any], all_rows: Any) -> None:
    """Compare what one launch left in a fresh state; ``all_rows`` gives all findings where the ring was too small."""
    state, tag, capacity = host(state), inputs["tag"], inputs["ring_capacity"]
    assert state.violation_log.count() == want["violation_count"]
    kept = multiset(log_rows(state))
    assert kept.total() == min(want["violation_count"], capacity)
    if want["violation_rows"] is None:
        all_rows = multiset(all_rows())
        assert not kept - all_rows
    else:
        all_rows = multiset(want["violation_rows"])
        assert kept == all_rows

    zeros = np.zeros(12, np.int64)
    kernel_runs, slot_runs, skips, fail_reasons = zeros.copy(), zeros.copy(), zeros.copy(), np.zeros((12, 8), np.int64)
    kernel_runs[tag] = 1
    slot_runs[tag] = want["slot_run_count"]
    skips[tag] = inputs.get("enable", 1) == 0
    for row, times in all_rows.items():
        fail_reasons[tag] += times * (row[7] >> np.arange(8) & 1)
    np.testing.assert_array_equal(to_int64(state.kernel_run_counters), kernel_runs)
    np.testing.assert_array_equal(to_int64(state.slot_run_counters), slot_runs)
    np.testing.assert_array_equal(state.verify_skip_counters, skips)
    np.testing.assert_array_equal(state.fail_reason_counters, fail_reasons)


class TestVerify:
    @pytest.mark.parametrize(("backend_name", "case"), cases("verify"))
    def test_vector(self, get_backend, backend_name, case):
        backend, inputs = get_backend(backend_name), case["inputs"]
        args, keywords = verify_arguments(inputs, backend)
        with backend.active():
            state = backend.verify_step(*args, **keywords)
        check_state(state, inputs, case["outputs"], lambda: self.all_rows(get_backend("reference"), inputs))
        np.testing.assert_array_equal(fields(args[0]), fields(records(inputs["canary_buf"])))

    def all_rows(self, backend: Backend, inputs):
        args, keywords = verify_arguments(inputs | {"ring_capacity": 999}, backend)
        return log_rows(reference.verify_step(*args, **keywords))


class TestWrite:
    @pytest.mark.parametrize(("backend_name", "case"), cases("write"))
    def test_vector(self, get_backend, backend_name, case):
        backend, inputs = get_backend(backend_name), case["inputs"]
        args, keywords = write_arguments(inputs, backend)
        with backend.active():
            buf, state = backend.write_step(*args, **keywords)
        assert_same_buffer(buf, records(case["outputs"]["canary_buf"]))
        check_state(state, inputs, case["outputs"], lambda: self.all_rows(get_backend("reference"), inputs))

    def all_rows(self, backend: Backend, inputs):
        args, keywords = write_arguments(inputs | {"ring_capacity": 999}, backend)
        return log_rows(reference.write_step(*args, **keywords)[1])
