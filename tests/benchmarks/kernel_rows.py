"""Device times of the kernels of write and verify beside the baseline's and the hardware's floors.

The times come from a CUDA program of its own (cuda/bench.cu), without JAX: this module compiles it for the GPU that is there, runs it
and reads a line of JSON for each row. The program also checks that this project and the baseline leave the same records and findings.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path

from table import Row, compare

HERE = Path(__file__).resolve().parent
FFI = HERE.parents[1] / "ffi"


def rows() -> list[Row]:
    """Compile, run and read.

    Raises:
        RuntimeError: There is no nvcc on PATH, the program does not compile, or it ended with an error.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "bench"
        compile_program(program)
        lines = _run([str(program)], "The benchmark of the kernels").splitlines()
    return [compare(**json.loads(line)) for line in lines]


def compile_program(target: Path, arch: str = "native") -> None:
    """Build the program for `arch`, an architecture as nvcc's -arch names it.

    Raises:
        RuntimeError: There is no nvcc on PATH, or it reports an error.
    """
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise RuntimeError(
            "There is no nvcc on PATH, and the benchmark of the kernels is compiled with it: install the CUDA toolkit (12 or 13)."
        )
    includes = [option for folder in (FFI, FFI / "include", HERE / "cuda") for option in ("-I", str(folder))]
    sources = [str(HERE / "cuda" / "bench.cu"), *(str(source) for source in sorted((FFI / "cuda").glob("*.cu")))]
    _run([nvcc, "-O3", "-std=c++17", f"-arch={arch}", *includes, *sources, "-o", str(target)], "nvcc")


def _run(command: list[str], name: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{name} ended with status {result.returncode}:\n{result.stdout}{result.stderr}")
    return result.stdout
