"""The GPU benchmark's own parts that need no GPU: its table, what it says about a missing compiler, and that its program compiles."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent / "benchmarks"))

import bench_gpu
import kernel_rows
from table import Row, compare, text


def test_table():
    rows = [
        compare("write, 7 tokens", "ALL", 1234.56, "chain floor", 1000.0, 1.25),
        compare("verify", "NONE", 30.0, "baseline", 40.0, 0.5),
        compare("verify", "PARTIAL", 3.0, "baseline", 24.0),
    ]
    assert text(rows).splitlines() == [
        "work             mode       measured  reference                ratio  limit",
        "write, 7 tokens  ALL      1,234.6 µs  chain floor  1,000.0 µs  1.235  1.250  ok",
        "verify           NONE        30.0 µs  baseline        40.0 µs  0.750  0.500  over",
        "verify           PARTIAL      3.0 µs  baseline        24.0 µs  0.125",
    ]


@pytest.mark.parametrize(("ratio", "limit", "verdict"), [(1.25, 1.25, "ok"), (1.2501, 1.25, "over"), (99.0, None, "")])
def test_a_limit_is_the_most_that_the_ratio_may_be(ratio, limit, verdict):
    assert Row("write", "NONE", 1.0, "copy", 1.0, ratio, limit).verdict() == verdict


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
