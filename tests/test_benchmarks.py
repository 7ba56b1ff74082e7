"""The GPU benchmark's own parts that need no GPU: its table, its arithmetic, its errors, and that its programs compile and run."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent / "benchmarks"))

import bench_gpu
import kernel_rows
import model_rows
import plan_rows
from device_time import DeviceTimeError, Operation, difference, difference_text, median_operations
from table import Row, allow, compare, text
from wall_time import WallTimes, wall_times


def test_table():
    rows = [
        compare("write, 7 tokens", "ALL", 1234.56, "chain floor", 1000.0, 1.25),
        compare("verify", "NONE", 30.0, "baseline", 40.0, 0.5),
        compare("verify", "PARTIAL", 3.0, "baseline", 24.0),
        Row("step", "NONE", 1003.0, "step without", 1000.0, 1.0031, 1.003, spread=0.00042),
        allow("kernels", "NONE", 1007, 2014, "kernels"),
    ]
    assert text(rows).splitlines() == [
        "work             mode          measured  reference                     ratio            limit",
        "write, 7 tokens  ALL         1,234.6 µs  chain floor      1,000.0 µs  1.2346           1.2500  ok",
        "verify           NONE           30.0 µs  baseline            40.0 µs  0.7500           0.5000  over",
        "verify           PARTIAL         3.0 µs  baseline            24.0 µs  0.1250",
        "step             NONE        1,003.0 µs  step without     1,000.0 µs  1.0031  ±0.0004  1.0030  over",
        "kernels          NONE     1,007 kernels  allowed       2,014 kernels  0.5000           1.0000  ok",
    ]


@pytest.mark.parametrize(("ratio", "limit", "verdict"), [(1.25, 1.25, "ok"), (1.2501, 1.25, "over"), (99.0, None, "")])
def test_a_limit_is_the_most_that_the_ratio_may_be(ratio, limit, verdict):
    assert Row("write", "NONE", 1.0, "copy", 1.0, ratio, limit).verdict() == verdict


def test_a_ratio_of_wall_times_is_taken_within_rounds():
    # The clock of rounds 1 and 4 is slower: the medians' ratio would be 12.1 / 15, that of a round is 1.1 or 1.21.
    times = WallTimes({"off": (20.0, 10.0, 10.0, 20.0, 20.0), "on": (22.0, 12.1, 11.0, 22.0, 8.0)})
    assert times.median("on") == 12.1
    assert times.ratio("on", "off") == pytest.approx((1.1, 0.0))
    assert WallTimes({"off": (1.0, 1.0, 1.0), "on": (2.0, 7.0, 4.0)}).ratio("on", "off") == (4.0, 2.0)


def test_wall_times_are_taken_in_turn():
    order = []
    times = wall_times({kind: lambda kind=kind: order.append(kind) for kind in "abc"}, rounds=2, steps=2)
    assert "".join(order) == "aabbcc" + "ccbbaa" + "aabbcc"
    assert [len(us) for us in times.us.values()] == [2, 2, 2]
    assert all(us > 0 for kind in times.us for us in times.us[kind])


def test_the_operations_of_a_call_are_medians_over_calls():
    calls = [("gemm", 7e3), ("Memcpy D2D", 1e3), ("gemm", 5e3)], [("gemm", 9e3), ("gemm", 6e3), ("Memcpy D2D", 3e3)], [("gemm", 8e3)]
    calls[2].extend([("Memcpy D2D", 2e3), ("gemm", 1e3)])
    events = [(0.0, *event) for call in calls for event in call]
    assert median_operations(events, 3) == [Operation("gemm", 8.0), Operation("Memcpy D2D", 2.0), Operation("gemm", 5.0)]
    with pytest.raises(DeviceTimeError) as error:
        median_operations(events[:-1], 3)
    assert str(error.value) == (
        "The profile of 3 equal calls has 8 operations that do not repeat from call to call, so that they cannot be told apart: events "
        "were lost, or something else ran on the device."
    )


def operations(**times):
    """Operations by name, two underscores for a space."""
    return [Operation(name.replace("__", " "), us) for name, us in times.items()]


WITHOUT = operations(fusion=50.0, gemm_1=300.0, softmax=5.0, input_concatenate_fusion=70.0, loop_add_fusion_3=11.0, gemm_2=300.0)
WITH = [
    *operations(kvcanary_plan_offsets=3.0, kvcanary_plan_entries=9.0, loop_multiply_fusion=71.0, gemm_7=303.0, softmax=5.5),
    *operations(fusion_5=52.0, loop_add_fusion_4=11.0, gemm_8=300.0, Memcpy__D2D=2.5, loop_slice_fusion=2.0),
]


def test_what_moved_or_has_another_name_is_not_new():
    found = difference(WITHOUT, WITH)
    assert [operation.name for operation in found.added] == [
        "kvcanary_plan_offsets",
        "kvcanary_plan_entries",
        "Memcpy D2D",
        "loop_slice_fusion",
    ]
    assert found.removed == ()
    assert {(first.name, second.name) for first, second in found.moved} == {
        ("fusion", "fusion_5"),
        ("input_concatenate_fusion", "loop_multiply_fusion"),
    }
    assert (found.kernels, found.us) == (3, 3.0 + 9.0 + 2.5 + 2.0 + 2.0 + 1.0)
    assert difference_text("canary on", found).splitlines() == [
        "canary on: +3 kernels, +1 copies and fills, +19.50 us",
        "       +9.00 us in   +1  kvcanary_plan_entries",
        "       +3.00 us in   +1  kvcanary_plan_offsets",
        "       +2.50 us in   +1  Memcpy D2D",
        "       +2.00 us in   +1  loop_slice_fusion",
        "       +3.00 us in   +0  (2 operations that moved or have another name)",
    ]


def test_what_takes_another_time_is_not_the_same():
    added = "on: +0 kernels, +0 copies and fills, +20.00 us\n      +20.00 us in   +0  fusion"
    without = operations(fusion=50.0, gemm=300.0, softmax=5.0)
    for with_it in operations(gemm=300.0, softmax=5.0, fusion=70.0), operations(fusion=70.0, gemm=300.0, softmax=5.0):
        found = difference(without, with_it)
        assert (found.kernels, found.us, found.moved) == (0, 20.0, ())
        assert difference_text("on", found) == added


def test_the_longer_one_of_two_alike_is_the_new_one():
    found = difference(operations(Memcpy__D2D=2.0, gemm=300.0), [*operations(Memcpy__D2D=97.0), *operations(Memcpy__D2D=2.1, gemm=301.0)])
    assert (found.added, found.removed) == ((Operation("Memcpy D2D", 97.0),), ())
    found = difference(operations(gemm=300.0, Memcpy__D2D=2.0), [*operations(gemm=300.0, Memcpy__D2D=97.0), *operations(Memcpy__D2D=2.1)])
    assert (found.added, found.removed) == ((Operation("Memcpy D2D", 97.0),), ())


def test_a_long_difference_is_cut():
    others = {f"kernel{chr(97 + i)}": float(i) for i in range(13)}
    own = {f"kvcanary{chr(97 + i)}": 0.5 for i in range(5)}
    found = difference([], operations(**others, **own))
    assert difference_text("on", found).splitlines()[5:] == [
        "       +0.50 us in   +1  kvcanarye",
        "      +12.00 us in   +1  kernelm",
        "      +11.00 us in   +1  kernell",
        "      +10.00 us in   +1  kernelk",
        "      +45.00 us in  +10  (10 more kinds)",
    ]
    lines = difference_text("on", found, lines=4).splitlines()
    assert len(lines) == 1 + len(own) + 1
    assert lines[-1] == "      +78.00 us in  +13  (13 more kinds)"
    assert difference_text("on", difference([], [Operation("k" * 97, 1.0)])).endswith("  " + "k" * 87 + "...")


SOME_ROWS = "import os\nfrom table import allow\n\ndef rows():\n    return [allow('process', '-', os.getpid(), 7, 'of them')]\n"


def run_program(program, folder, *arguments, **variables):
    """A Python program with the benchmark's modules and those in a folder."""
    variables["PYTHONPATH"] = os.pathsep.join([str(folder), *sys.path])
    return subprocess.run([sys.executable, "-c", program, *arguments], env={**os.environ, **variables}, capture_output=True, text=True)


def test_a_section_runs_in_a_process_of_its_own(tmp_path):
    (tmp_path / "some_rows.py").write_text(SOME_ROWS)
    result = run_program("import bench_gpu, os; print(os.getpid(), *bench_gpu.section_rows('some_rows'))", tmp_path)
    own, row = result.stdout.split(" ", 1)
    (measured,) = re.findall(r"^Row\(work='process', mode='-', measured=(\d+), ", row)
    assert measured != own


def test_an_error_of_a_section_is_raised(tmp_path):
    (tmp_path / "no_rows.py").write_text("def rows():\n    raise ValueError('There is nothing to measure.')\n")
    result = run_program("import bench_gpu; bench_gpu.section_rows('no_rows')", tmp_path)
    assert result.returncode == 1
    assert result.stderr.endswith("\nValueError: There is nothing to measure.\n")


def test_the_file_says_what_was_measured_with(tmp_path):
    (tmp_path / "some_rows.py").write_text(SOME_ROWS)
    for name, said in ("nvidia-smi", "NVIDIA Some, 571.13"), ("nvcc", "Cuda compilation tools, release 13.7, V13.7.11"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{said}'\n")
        (tmp_path / name).chmod(0o755)
    program = "import bench_gpu; bench_gpu.SECTIONS = {'one': 'some_rows', 'other': 'some_rows'}; bench_gpu.main()"
    file = tmp_path / "rows.json"
    result = run_program(program, tmp_path, "--json", str(file), PATH=os.pathsep.join([str(tmp_path), os.environ["PATH"]]))
    assert result.returncode == 0, result.stderr
    found = json.loads(file.read_text())
    assert (found["gpu"], found["driver"], found["cuda"], found["jax"]) == ("NVIDIA Some", "571.13", "13.7", version("jax"))
    assert datetime.fromisoformat(found["date"]).tzinfo is not None
    assert [row["section"] for row in found["rows"]] == ["one", "other"]
    assert set(found["rows"][0]) == {"section", "verdict", *(field.name for field in dataclasses.fields(Row))}
    assert found["rows"][0]["verdict"] == "over"


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="where there is a GPU, device times have limits of their own")
def test_the_rows_of_plans_and_models(capsys):
    """On a CPU there are no device times, and wall times have no limit but those of whole steps."""
    full, idle = plan_rows.rows(7, 707, 1009)
    assert (full.limit, idle.limit) == (None, None)
    found = model_rows.rows(model_rows.TINY)
    print(text(found))
    assert [row.limit for row in found] == [1.0, None, 1.01, 1.003, 1.01]
    assert all(row.measured > 0 and row.reference_value > 0 for row in found)
    assert len(capsys.readouterr().out.splitlines()) < 25
    with pytest.raises(ValueError, match=r"^`entries` is 709, but it must be a multiple of `batch` = 7\.$"):
        plan_rows.rows(7, 709, 1009)


def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError) as error:
        kernel_rows.compile_program(tmp_path / "bench")
    assert str(error.value) == (
        "There is no nvcc on PATH, and the benchmark of the kernels is compiled with it: install the CUDA toolkit (12 or 13)."
    )


def test_no_driver(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError) as error:
        bench_gpu.about()
    assert str(error.value) == ("There is no nvidia-smi on PATH: this benchmark needs an NVIDIA GPU with its driver and the CUDA toolkit.")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="takes nvcc")
def test_the_program_compiles(tmp_path):
    kernel_rows.compile_program(tmp_path / "bench", arch="sm_90")
    assert (tmp_path / "bench").stat().st_size > 0


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="takes nvcc")
def test_an_error_of_the_compiler_is_shown(tmp_path):
    with pytest.raises(RuntimeError, match=r"^nvcc ended with status \d+:\n(.|\n)*sm_7") as error:
        kernel_rows.compile_program(tmp_path / "bench", arch="sm_7")
    assert "arch" in str(error.value)
