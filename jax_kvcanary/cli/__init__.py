"""The command line: ``python -m jax_kvcanary <command>``.

Each command is a module of this package with ``SUMMARY``, a line; ``add_arguments(parser)``; and ``run(arguments)``, which returns the
exit code.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

#: The commands, by the names of their modules.
COMMANDS = ("doctor", "report", "selftest")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: the command and its arguments; None is those of the process.

    Returns:
        The command's exit code. Arguments that argparse refuses end the process with 2, as it does.
    """
    parser = argparse.ArgumentParser(prog="python -m jax_kvcanary", description="A KV-cache canary for JAX.")
    commands = parser.add_subparsers(required=True, metavar="command")
    for name in COMMANDS:
        module = importlib.import_module(f"jax_kvcanary.cli.{name}")
        command = commands.add_parser(name, help=module.SUMMARY, description=module.SUMMARY)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    arguments = parser.parse_args(argv)
    return arguments.run(arguments)
