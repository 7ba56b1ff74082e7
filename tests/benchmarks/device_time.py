"""Device time of the kernels of a jitted call, by name and in order, from jax's own profiler; and wall times taken in turn."""

from __future__ import annotations

import difflib
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

_GPU_PLANES = "/device:GPU:"
_STREAM_LINE = "Stream"  # the other lines of the plane, such as "XLA Ops", tell the same time once more
_MEMORY_OPERATIONS = ("Memcpy", "Memset")


class DeviceTimeError(RuntimeError):
    """The profiler has no device times, or none that belong to single calls."""


@dataclass(frozen=True)
class Operation:
    """A kernel, a copy or a fill that one call runs on the device.

    Fields:
        name: as the profiler has it, without a C++ function's parameters.
        us: device time in microseconds, the median over the calls of a profile.
    """

    name: str
    us: float

    @property
    def is_kernel(self) -> bool:
        """Whether it is a kernel, not a memcpy or a memset."""
        return not self.name.startswith(_MEMORY_OPERATIONS)

    @property
    def kind(self) -> str:
        """The name without the numbers by which XLA tells the fusions of a module apart."""
        return re.sub(r"(_\d+)+$", "", self.name)


@dataclass(frozen=True)
class Difference:
    """What one program runs and another one does not, each list in order."""

    added: tuple[Operation, ...]
    removed: tuple[Operation, ...]

    @property
    def kernels(self) -> int:
        """Kernels that came in addition."""
        return count_kernels(self.added) - count_kernels(self.removed)

    @property
    def us(self) -> float:
        """Their device time in microseconds, copies and fills included."""
        return total_us(self.added) - total_us(self.removed)


def device_operations(call: Callable[[], Any], *, repeats: int = 5) -> list[Operation]:
    """What one call runs on the device, in order.

    Args:
        call: runs the work and returns arrays to wait for; called twice before the profile, so that everything is compiled.
        repeats: calls in the profile.

    Raises:
        DeviceTimeError: the trace has no plane of a GPU with streams on it, or its operations differ from call to call.
    """
    for _ in range(2):
        jax.block_until_ready(call())
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # a line for each Python call would slow the host down and fill the trace
        jax.profiler.start_trace(folder, profiler_options=options)
        try:
            for _ in range(repeats):
                jax.block_until_ready(call())
        finally:
            jax.profiler.stop_trace()
        return median_operations(_stream_events(folder), repeats)


def _stream_events(folder: str) -> list[tuple[float, str, float]]:
    """Start in ns, name and duration in ns of everything that ran on a GPU's streams, in order of time."""
    profiles = [jax.profiler.ProfileData.from_file(str(file)) for file in Path(folder).rglob("*.xplane.pb")]
    lines = {(plane.name, line.name): line for profile in profiles for plane in profile.planes for line in plane.lines}
    events = [
        (event.start_ns, _short_name(event.name), event.duration_ns)
        for (plane, name), line in lines.items()
        if plane.startswith(_GPU_PLANES) and name.startswith(_STREAM_LINE)
        for event in line.events
    ]
    if not events:
        planes = sorted({plane for plane, _ in lines})
        on_gpus = sorted(name for plane, name in lines if plane.startswith(_GPU_PLANES))
        raise DeviceTimeError(
            f"The trace of jax's profiler has nothing on streams of a GPU; its planes are {planes}, and those of GPUs have the lines "
            f"{on_gpus}. Device times need a GPU on which CUPTI can be used."
        )
    return sorted(events)


def _short_name(name: str) -> str:
    """A kernel's name without the parameters and the result of a demangled one, ``void f<(int)3>(int*)`` being ``f<(int)3>``."""
    if not name.endswith(")"):
        return name
    depth = 0
    for index in range(len(name) - 1, 0, -1):
        depth += (name[index] == ")") - (name[index] == "(")
        if depth == 0:
            return name[:index].removeprefix("void ")
    return name


def median_operations(events: Sequence[tuple[float, str, float]], repeats: int) -> list[Operation]:
    """One call's operations out of those of several equal calls.

    Args:
        events: start in ns, name and duration in ns, sorted; the calls do not overlap.
        repeats: number of calls.

    Raises:
        DeviceTimeError: the operations cannot be divided into equal calls.
    """
    size, rest = divmod(len(events), repeats)
    calls = [events[i * size : (i + 1) * size] for i in range(repeats)]
    names = [Counter(name for _, name, _ in call) for call in calls]
    if rest or any(other != names[0] for other in names[1:]):
        raise DeviceTimeError(
            f"The profile of {repeats} equal calls has {len(events)} operations that do not repeat from call to call, so that they cannot "
            "be told apart: events were lost, or something else ran on the device."
        )
    times: dict[tuple[str, int], list[float]] = {}
    for call in calls:  # streams may take turns differently, so the k-th operation of a name is compared with the k-th of that name
        seen: Counter[str] = Counter()
        for _, name, duration in call:
            times.setdefault((name, seen[name]), []).append(duration)
            seen[name] += 1
    return [Operation(name, statistics.median(durations) / 1e3) for (name, _), durations in times.items()]


def difference(without: Sequence[Operation], with_it: Sequence[Operation]) -> Difference:
    """What the second program runs in addition to the first, by the order of the names."""
    matcher = difflib.SequenceMatcher(None, [op.kind for op in without], [op.kind for op in with_it], autojunk=False)
    added: list[Operation] = []
    removed: list[Operation] = []
    for what, i, j, k, m in matcher.get_opcodes():
        if what != "equal":
            removed += without[i:j]
            added += with_it[k:m]
    return Difference(tuple(added), tuple(removed))


def total_us(operations: Sequence[Operation]) -> float:
    """Device time of all of them in microseconds."""
    return sum(operation.us for operation in operations)


def count_kernels(operations: Sequence[Operation]) -> int:
    """Kernels among them."""
    return sum(operation.is_kernel for operation in operations)


def print_operations(title: str, operations: Sequence[Operation]) -> None:
    """One line an operation, with its time; copies and fills are marked."""
    memory = len(operations) - count_kernels(operations)
    print(f"{title}: {count_kernels(operations)} kernels, {memory} copies and fills, {total_us(operations):.1f} us")
    for operation in operations:
        print(f"  {operation.us:10.2f} us  {'' if operation.is_kernel else '(memory) '}{operation.name}")


def print_totals(title: str, operations: Sequence[Operation], largest: int = 8) -> None:
    """Device time of everything, and of the kinds that take most of it."""
    kinds: dict[str, list[Operation]] = {}
    for operation in operations:
        kinds.setdefault(operation.kind, []).append(operation)
    print(f"{title}: {count_kernels(operations)} kernels, {total_us(operations):.1f} us")
    for kind, same in sorted(kinds.items(), key=lambda item: -total_us(item[1]))[:largest]:
        print(f"  {total_us(same):10.1f} us in {len(same):4}  {kind}")


def wall_us(calls: Mapping[str, Callable[[], Any]], *, blocks: int, steps: int) -> dict[str, float]:
    """Wall time of one step of each kind in microseconds: the median over blocks of steps, the kinds taken in turn.

    Args:
        calls: each runs one step and returns arrays to wait for.
        blocks: blocks of each kind that are measured; one more comes before them.
        steps: steps in a block, with nothing but its last one waited for.
    """
    times: dict[str, list[float]] = {kind: [] for kind in calls}
    order = list(calls)
    for block in range(blocks + 1):
        for kind in order:
            start = time.perf_counter()
            for _ in range(steps):
                out = calls[kind]()
            jax.block_until_ready(out)
            if block:
                times[kind].append((time.perf_counter() - start) / steps * 1e6)
        order.reverse()  # a drift of the clock hits all kinds alike
    return {kind: statistics.median(values) for kind, values in times.items()}
