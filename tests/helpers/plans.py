"""Comparing plans."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

ENTRIES = ("verify_slot_indices", "verify_expected_tokens", "verify_expected_positions", "verify_prev_slot_indices")


def assert_same_plan(got: Any, want: Any) -> None:
    """Compare two plans bit for bit, but for what is unspecified: entries that are not in use, and all of them in an overflow."""
    valid = int(want.verify.verify_num_valid[0]) * int(want.verify.enable[0])
    for part in ("verify", "write"):
        for field in dataclasses.fields(getattr(want, part)):
            used = slice(valid) if field.name in ENTRIES else slice(None)
            assert_same_array(getattr(getattr(got, part), field.name), getattr(getattr(want, part), field.name), field.name, used)
    assert_same_array(got.num_invalid_rows, want.num_invalid_rows, "num_invalid_rows")
    assert (got.row_flags is None) == (want.row_flags is None)
    if want.row_flags is not None:
        assert_same_array(got.row_flags, want.row_flags, "row_flags")


def assert_same_array(got: Any, want: Any, name: str, used: slice = slice(None)) -> None:
    """Compare two arrays of one shape and dtype where they are in use."""
    got, want = np.asarray(got), np.asarray(want)
    assert (got.dtype, got.shape) == (want.dtype, want.shape), name
    np.testing.assert_array_equal(got[used], want[used], err_msg=name)
