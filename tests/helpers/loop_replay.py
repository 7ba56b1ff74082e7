"""Scenarios through the public inference-loop interface, with a pool class of the tests' own."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

import jax_kvcanary as kvc
from helpers.backends import Backend
from helpers.scenarios import Replay, Rows, sweep_plan


@partial(jax.tree_util.register_dataclass, data_fields=("full", "swa", "lut"), meta_fields=())
@dataclass(frozen=True)
class ReplayPool:
    """A pool of K bytes alone.

    Fields:
        full: uint8 [num_pages, page_size, kv_bytes_per_token].
        swa: the same for the window's pool, or None.
        lut: int32 [num_slots], full-pool slot to window slot, or None.
    """

    full: Any
    swa: Any = None
    lut: Any = None


def attach_replay_pool(
    pool: ReplayPool,
    config: kvc.CanaryConfig,  # noqa: ARG001 - attachers are called with it
    *,
    kv_token_id_vs_position_offset: int = 0,
) -> tuple[kvc.CanaryBufferGroup, ...]:
    """One group for each half of the pool, without a V half."""
    groups = []
    for kind, name, lut in ((kvc.PoolKind.FULL, "full", None), (kvc.PoolKind.SWA, "swa", ("lut",))):
        array = getattr(pool, name)
        if array is None:
            continue
        num_pages, page_size, token_bytes = array.shape
        source = kvc.SourceSpec(path=(name,), page_size=page_size, num_bytes_per_token=token_bytes, read_bytes=token_bytes)
        groups.append(
            kvc.CanaryBufferGroup(
                kind=kind,
                k_head=kvc.fresh_records(num_pages * page_size),
                k_tail=kvc.fresh_records(num_pages * page_size),
                real_kv_sources_k=(source,),
                swa_index_lut=lut,
                kv_token_id_vs_position_offset=kv_token_id_vs_position_offset,
            )
        )
    return tuple(groups)


kvc.register_pool_attacher(ReplayPool, attach_replay_pool)

#: The methods of a canary as a jitted step has them: the canary is static, the state is donated.
PRE_FORWARD, POST_FORWARD, SWEEP, RELEASE = (
    jax.jit(method, static_argnums=0, donate_argnums=1)
    for method in (kvc.Canary.pre_forward, kvc.Canary.post_forward, kvc.Canary.sweep, kvc.Canary.release)
)


class LoopReplay(Replay):
    """The canary as an engine uses it: ``pre_forward`` and ``post_forward`` around each forward."""

    def __init__(self, scenario: dict[str, Any], backend: Backend) -> None:
        super().__init__(scenario)
        self.backend = backend
        self.lut = np.zeros(self.num_slots["FULL"], np.int32) if "SWA" in self.groups else None
        config = kvc.CanaryConfig(
            mode=kvc.CanaryMode.LOG, ring_capacity=scenario["ring_capacity"], real_kv_hash_mode=self.hash_mode, enable_v_half=False
        )
        capacities = kvc.CanaryLaunchCapacities(
            verify_capacity=scenario["verify_capacity"],
            write_req_capacity=5,
        )
        with backend.active():
            canary, state = kvc.install_canary(
                self.live_pool(), config, capacities=capacities, swa_window_size=self.pool["swa_window_size"]
            )
            self.canary, self.state = canary, canary.mark_init_finished(state)

    def device_state(self) -> Any:
        return self.state.device_state

    def live_pool(self) -> ReplayPool:
        """The pool as the engine holds it now."""
        array = self.backend.array
        has_swa = "SWA" in self.groups
        return ReplayPool(
            full=array(self.kv["FULL"]), swa=array(self.kv["SWA"]) if has_swa else None, lut=array(self.lut) if has_swa else None
        )

    def chain_assert(self, event: dict[str, Any]) -> None:
        if event["on"]:
            self.state = self.canary.mark_init_finished(self.state)
        else:
            self.set_device_state(enable_chain_position_assert=self.backend.array(np.zeros(1, np.int32)))

    def set_device_state(self, **values: Any) -> None:
        self.state = dataclasses.replace(self.state, device_state=dataclasses.replace(self.state.device_state, **values))

    def copy_records(self, src: list[int], dst: list[int]) -> None:
        full, *others = self.state.groups
        moved = {}
        for end in ("k_head", "k_tail"):
            buf = np.array(getattr(full, end))
            buf[dst] = buf[src]
            moved[end] = self.backend.array(buf)
        self.state = dataclasses.replace(self.state, groups=(dataclasses.replace(full, **moved), *others))

    def release(self, event: dict[str, Any]) -> None:
        with self.backend.active():
            self.state = RELEASE(self.canary, self.state, self.backend.ints(event["slots"]), self.live_pool())

    def step(self, event: dict[str, Any]) -> Rows:
        self.switch_checks(event)
        offset = event["kv_token_id_vs_position_offset"]
        groups = tuple(dataclasses.replace(group, kv_token_id_vs_position_offset=offset) for group in self.state.groups)
        self.state = dataclasses.replace(self.state, groups=groups)
        batch = self.batch(event)
        with self.backend.active():
            self.state, step = PRE_FORWARD(self.canary, self.state, batch, self.live_pool())
        result = self.by_phase("HEAD")
        self.forward(event)
        with self.backend.active():
            self.state, _ = POST_FORWARD(self.canary, self.state, step, batch, self.live_pool())
        return result | self.by_phase("TAIL")

    def switch_checks(self, event: dict[str, Any]) -> None:
        """The checks of one event; they are static settings of a canary, and vary in a scenario."""
        table = event["expected_tokens"]
        config = dataclasses.replace(
            self.canary.config,
            enable_verify_token_assert=table is not None,
            enable_write_input_assert=event.get("expected_input_tokens") is not None,
        )
        self.canary = dataclasses.replace(self.canary, config=config)
        if event["op"] == "step":
            table = None if table is None else self.backend.array(np.array(table, np.int32))
            self.set_device_state(req_to_verify_expected_tokens=table)

    def batch(self, event: dict[str, Any]) -> kvc.ForwardBatch:
        ints = self.backend.ints
        names = ("req_pool_indices", "prefix_lens", "extend_seq_lens", "expected_tokens_valid_lens")
        return kvc.ForwardBatch(
            input_ids=ints(event["input_ids"]),
            positions=ints(event["positions"]),
            out_cache_loc=ints(event["out_cache_loc"]),
            plan_input=kvc.PlanInput(*(ints(event[name]) for name in names)),
            req_to_token=ints(self.req_to_token, self.req_to_token.shape),
            expected_input_tokens=ints(event["expected_input_tokens"]),
            expected_input_positions=ints(event["expected_input_positions"]),
        )

    def by_phase(self, phase: str) -> Rows:
        """The rows gained in a phase, by the group that their tag names."""
        result: Rows = {self.phase_key(group, phase): [] for group in self.groups}
        for row in self.gained():
            end, _, group = kvc.CanaryLaunchTag(row[0]).name.split("_")
            assert end == phase
            result[self.phase_key(group, phase)].append(row)
        return result

    def sweep(self, event: dict[str, Any]) -> list[Any]:
        self.switch_checks(event)
        plan = self.backend.own(sweep_plan(event))
        with self.backend.active():
            self.state, _ = SWEEP(self.canary, self.state, plan, self.live_pool())
        return self.gained()
