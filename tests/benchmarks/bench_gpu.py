"""The benchmark on a GPU: kernels, plan and whole-model steps, each time beside a reference and, where there is one, its limit.

    python tests/benchmarks/bench_gpu.py [--json FILE] [--only SECTION ...]

A section is a module with rows(), and runs in a process of its own: what it takes of the GPU's memory, JAX most of it, is free again for
the next one. Nothing here is asserted: "ok" and "over" are printed beside the limits.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib
import importlib.metadata
import json
import multiprocessing
import re
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

from table import Row, text

SECTIONS = {"kernels": "kernel_rows", "plan": "plan_rows", "model": "model_rows"}


def main() -> None:
    """Run the sections that are asked for, print their tables and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write the rows to this file")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION", help=f"of {', '.join(SECTIONS)}")
    arguments = parser.parse_args()
    try:
        facts = about()
    except RuntimeError as error:
        sys.exit(str(error))
    print("  ".join(f"{name}: {value}" for name, value in facts.items()))
    results: list[dict[str, object]] = []
    for section in SECTIONS:
        if section not in arguments.only:
            continue
        print(f"\n{section}", flush=True)
        rows = section_rows(SECTIONS[section])
        print(text(rows), flush=True)
        results += [{"section": section, **dataclasses.asdict(row), "verdict": row.verdict()} for row in rows]
        if arguments.json:  # after every section, so that an error in a later one loses nothing
            with open(arguments.json, "w", encoding="utf-8") as file:
                json.dump({**facts, "rows": results}, file, indent=2)


def section_rows(module: str) -> list[Row]:
    """What rows() of a module returns in a new process, which ends with it; its errors are raised here."""
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(_import_rows, module).result()


def _import_rows(module: str) -> list[Row]:
    return importlib.import_module(module).rows()


def about() -> dict[str, str]:
    """What was measured with. JAX itself is not asked, since it would take most of the GPU's memory from the sections."""
    gpu, driver = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()[0].split(", ")
    release = re.search(r"release ([\d.]+)", _output("nvcc", "--version"))
    return {
        "gpu": gpu,
        "driver": driver,
        "cuda": release[1] if release else "unknown",
        "jax": importlib.metadata.version("jax"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        raise RuntimeError(f"There is no {command[0]} on PATH: this benchmark needs an NVIDIA GPU with its driver and the CUDA toolkit.")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
