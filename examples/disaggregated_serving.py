"""Prefill in one process, decode in another: KV and canary records go over a socket, once sound and twice with a loss.

Usage: python examples/disaggregated_serving.py (no download; some seconds on a CPU). It starts the prefill process itself.
Exit code 0 only if the sound run was silent and both losses were caught; 2 where a process failed.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from disaggregation.demo import run_demo
from disaggregation.frames import FrameError
from disaggregation.prefill import run_prefill


def main() -> int:
    parser = argparse.ArgumentParser(description="Prefill in one process, decode in another, with a canary in both.")
    parser.add_argument("--prefill-for", type=int, metavar="PORT", help="be the prefill process of the decode process at this port")
    arguments = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # two processes may share one GPU
    try:
        if arguments.prefill_for is not None:
            return run_prefill(arguments.prefill_for)
        return run_demo([sys.executable, str(Path(__file__).resolve()), "--prefill-for"])
    except FrameError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
