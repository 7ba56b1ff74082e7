"""Replays of faults that serving engines had, and of correct behaviour that must stay silent."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from helpers.scenarios import OperationsReplay, load_scenario, play, scenario_ids


def scenario_backend(get_backend, name, scenario):
    """The backend of a name; one with int64 tokens where the scenario has such."""
    backend = get_backend(name)
    return dataclasses.replace(backend, int_dtype=np.int64, x64=True) if scenario.get("needs_x64") else backend


@pytest.mark.parametrize("name", scenario_ids())
@pytest.mark.parametrize("backend_name", ["reference", "jit", "jit_x64"])
def test_operations(get_backend, backend_name, name):
    scenario = load_scenario(name)
    play(scenario, OperationsReplay(scenario, scenario_backend(get_backend, backend_name, scenario)))


@pytest.mark.parametrize("name", scenario_ids())
def test_loop(get_backend, name):
    from helpers.loop_replay import LoopReplay

    scenario = load_scenario(name)
    play(scenario, LoopReplay(scenario, scenario_backend(get_backend, "jit", scenario)))
