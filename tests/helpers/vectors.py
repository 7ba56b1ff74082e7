"""The contract's vectors in ``tests/data/vectors``, as arguments of the operations."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from helpers.backends import Backend
from helpers.states import fresh_state, records
from jax_kvcanary.plan import PlanInput, VerifyPlan, WritePlan
from jax_kvcanary.sources import RealKvSource

DATA = Path(__file__).parent.parent / "data"


@cache
def load_vectors(name: str) -> Any:
    """The content of a file of vectors."""
    return json.loads((DATA / "vectors" / f"{name}.json").read_text())


def plan_arguments(inputs: dict[str, Any], backend: Backend) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of ``plan``."""
    rows = (backend.ints(inputs[name]) for name in ("req_pool_indices", "prefix_lens", "extend_seq_lens", "expected_tokens_valid_lens"))
    names = ("verify_capacity", "write_req_capacity", "swa_window_size", "kv_token_id_vs_position_offset")
    keywords = {name: inputs[name] for name in names}
    keywords["full_to_swa_index_mapping"] = backend.ints(inputs["full_to_swa_index_mapping"])
    keywords["expected_tokens"] = _table(inputs["expected_tokens"], backend)
    return (PlanInput(*rows), _table(inputs["req_to_token"], backend)), keywords


def verify_arguments(inputs: dict[str, Any], backend: Backend) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of ``verify_step``."""
    plan = VerifyPlan(
        verify_slot_indices=_int32(inputs["verify_slot_indices"], backend),
        verify_expected_tokens=_int32(inputs["verify_expected_tokens"], backend),
        verify_expected_positions=_int32(inputs["verify_expected_positions"], backend),
        verify_prev_slot_indices=_int32(inputs["verify_prev_slot_indices"], backend),
        verify_num_valid=_int32([inputs["verify_num_valid"]], backend),
        enable=_int32([inputs["enable"]], backend),
    )
    state = backend.own(fresh_state(inputs["ring_capacity"]))
    keywords = _launch_keywords(inputs, backend) | {"check_expected_token": inputs["check_expected_token"]}
    return (backend.array(records(inputs["canary_buf"])), plan, state), keywords


def write_arguments(inputs: dict[str, Any], backend: Backend) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of ``write_step``."""
    plan = WritePlan(
        write_offsets=_int32(inputs["write_offsets"], backend),
        write_seed_slot_indices=_int32(inputs["write_seed_slot_indices"], backend),
        write_num_valid_reqs=_int32([inputs["write_num_valid_reqs"]], backend),
    )
    state = backend.own(fresh_state(inputs["ring_capacity"], chain_assert=inputs["enable_chain_position_assert"]))
    tokens = (backend.ints(inputs[name]) for name in ("input_ids", "positions", "out_cache_loc"))
    keywords = _launch_keywords(inputs, backend)
    for name in ("expected_input_tokens", "expected_input_positions"):
        keywords[name] = backend.ints(inputs[name])
    return (backend.array(records(inputs["canary_buf"])), plan, *tokens, state), keywords


def _launch_keywords(inputs: dict[str, Any], backend: Backend) -> dict[str, Any]:
    sources = []
    for source in inputs["real_kv_sources"]:
        geometry = {name: value for name, value in source.items() if name != "hex"}
        raw = np.frombuffer(bytes.fromhex(source["hex"]), np.uint8)
        sources.append(RealKvSource(array=backend.array(raw), **geometry))
    return {"tag": inputs["tag"], "real_kv_hash_mode": inputs["real_kv_hash_mode"], "real_kv_sources": tuple(sources)}


def _table(values: Any, backend: Backend) -> Any:
    return None if values is None else backend.ints(values, np.shape(values))


def _int32(values: Any, backend: Backend) -> Any:
    """Plans are int32 whatever the inputs are."""
    return backend.array(np.asarray(values, np.int32))
