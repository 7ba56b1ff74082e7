"""Device time of the kernels of a jitted call, by name and in order, from jax's own profiler: what one program runs beyond another."""

from __future__ import annotations

import difflib
import re
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

_GPU_PLANES = "/device:GPU:"
_STREAM_LINE = "Stream"  # the other lines of the plane, such as "XLA Ops", tell the same time once more
_MEMORY_OPERATIONS = ("Memcpy", "Memset")
_CANARY = "kvcanary"  # in the names of all kernels of this project: a namespace in CUDA, a prefix in Pallas
_SAME_US, _SAME_SHARE = 1.0, 0.1  # two programs' times of one operation differ by less than the one or the other
_NAME_LENGTH = 90


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

    @property
    def is_canary(self) -> bool:
        """Whether it is a kernel of this project."""
        return _CANARY in self.name

    @property
    def is_fusion(self) -> bool:
        """Whether XLA fused it. Such a name says what is in it, or nothing, and may be another one in another program."""
        return "fusion" in self.kind and not self.is_canary


@dataclass(frozen=True)
class Difference:
    """What one program runs and another one does not.

    Fields:
        added: what the second program has and the first one lacks, in order.
        removed: what the first program has and the second one lacks, in order.
        moved: the same work in another place or, as a fusion, under another name: as the first program has it, and the second.
    """

    added: tuple[Operation, ...]
    removed: tuple[Operation, ...]
    moved: tuple[tuple[Operation, Operation], ...]

    @property
    def kernels(self) -> int:
        """Kernels that came in addition."""
        return count_kernels(self.added) - count_kernels(self.removed)

    @property
    def moved_us(self) -> float:
        """By how much what moved takes longer, in microseconds."""
        return sum(second.us - first.us for first, second in self.moved)

    @property
    def us(self) -> float:
        """Device time that came in addition, in microseconds, copies and fills included."""
        return total_us(self.added) - total_us(self.removed) + self.moved_us


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
    """What the second program runs in addition to the first.

    Both are lined up by the order of the names. Pairs that take about as long are the same work, and count nothing. So are those among
    what is left over in both, which moved.
    """
    matcher = difflib.SequenceMatcher(None, [op.kind for op in without], [op.kind for op in with_it], autojunk=False)
    added: list[Operation] = []
    removed: list[Operation] = []
    for what, i, j, k, m in matcher.get_opcodes():
        same = what == "equal"
        removed += [op for n, op in enumerate(without[i:j]) if not (same and _as_long(op, with_it[k + n]))]
        added += [op for n, op in enumerate(with_it[k:m]) if not (same and _as_long(without[i + n], op))]
    moved: list[tuple[Operation, Operation]] = []
    for alike in (_same_kind, _both_fusions):  # the names that agree first
        for first in tuple(removed):
            candidates = [second for second in added if alike(first, second) and _as_long(first, second)]
            if candidates:
                second = min(candidates, key=lambda operation: abs(operation.us - first.us))
                moved.append((first, second))
                removed.remove(first)
                added.remove(second)
    return Difference(tuple(added), tuple(removed), tuple(moved))


def _same_kind(first: Operation, second: Operation) -> bool:
    return first.kind == second.kind


def _both_fusions(first: Operation, second: Operation) -> bool:
    return first.is_fusion and second.is_fusion


def _as_long(first: Operation, second: Operation) -> bool:
    return abs(first.us - second.us) <= max(_SAME_US, _SAME_SHARE * first.us)


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


def difference_text(title: str, found: Difference, lines: int = 10) -> str:
    """A line for all of it and one for each kind: this project's kernels, then what else costs or saves most.

    Args:
        title: what the difference is.
        found: the difference.
        lines: the most there are, unless this project has more kinds of kernels than that.
    """
    kinds: dict[str, tuple[bool, int, float]] = {}
    for sign, operations in ((1, found.added), (-1, found.removed)):
        for operation in operations:
            _, count, us = kinds.get(operation.kind, (False, 0, 0.0))
            kinds[operation.kind] = (operation.is_canary, count + sign, us + sign * operation.us)
    ordered = sorted(kinds, key=lambda kind: (not kinds[kind][0], -abs(kinds[kind][2])))
    own = sum(is_own for is_own, _, _ in kinds.values())
    room = lines - 1 - bool(found.moved)
    shown = len(ordered) if len(ordered) <= room else max(own, room - 1)
    others = len(found.added) - len(found.removed) - found.kernels
    text = [f"{title}: {found.kernels:+} kernels, {others:+} copies and fills, {found.us:+.2f} us"]
    text += [_difference_line(*kinds[kind][1:], _shortened(kind)) for kind in ordered[:shown]]
    if rest := [kinds[kind] for kind in ordered[shown:]]:
        count, us = sum(count for _, count, _ in rest), sum(us for _, _, us in rest)
        text.append(_difference_line(count, us, f"({len(rest)} more kinds)"))
    if found.moved:
        text.append(_difference_line(0, found.moved_us, f"({len(found.moved)} operations that moved or have another name)"))
    return "\n".join(text)


def _difference_line(count: int, us: float, what: str) -> str:
    return f"  {us:+10.2f} us in {count:+4}  {what}"


def _shortened(name: str) -> str:
    return name if len(name) <= _NAME_LENGTH else name[: _NAME_LENGTH - 3] + "..."
