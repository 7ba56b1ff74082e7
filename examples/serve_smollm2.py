"""Serve SmolLM2-135M with a KV-cache canary, then again with a planted bug that the canary must catch.

Usage: python examples/serve_smollm2.py (needs the extra `demo` and the weights; see the message it prints where they are missing).
Exit code 0 only if the run without a fault was silent and the planted fault was caught.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import sys

from smollm2.demo import LIMITS, NEW_TOKENS, PLANT_AT_STEP, run_demo
from smollm2.weights import MissingDemoPackageError, require_packages


def main() -> int:
    parser = argparse.ArgumentParser(description="Serve SmolLM2-135M with a KV-cache canary, without and with a planted bug.")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS, help="tokens to generate for each prompt (default: %(default)s)")
    parser.add_argument("--slots", type=int, default=LIMITS.num_slots, help="slots of the KV pool (default: %(default)s)")
    parser.add_argument("--plant-at-step", type=int, default=PLANT_AT_STEP, help="step of the planted bug (default: %(default)s)")
    arguments = parser.parse_args()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # progress goes to stderr: keep the order where both go to one file
    try:
        require_packages()
        return run_demo(dataclasses.replace(LIMITS, num_slots=arguments.slots), arguments.new_tokens, arguments.plant_at_step)
    except MissingDemoPackageError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
