"""The command line: ``python -m jax_kvcanary <command>``.

Each command is a module with a line about it (``SUMMARY``), its arguments (``add_arguments``) and what it does (``run``), which returns
the exit code.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module

#: The commands, by the names of their modules.
COMMANDS = ("report",)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code. Arguments that argparse refuses end the process with exit code 2, as it does."""
    parser = argparse.ArgumentParser(prog="python -m jax_kvcanary", description="A canary for the KV cache of JAX inference loops.")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name in COMMANDS:
        module = import_module(f"jax_kvcanary.cli.{name}")
        command = commands.add_parser(name, help=module.SUMMARY, description=module.SUMMARY)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    arguments = parser.parse_args(argv)
    return int(arguments.run(arguments))
