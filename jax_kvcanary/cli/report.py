"""``python -m jax_kvcanary report``: the picture of a dump."""

from __future__ import annotations

import argparse
import sys

from jax_kvcanary.constants import PoolKind
from jax_kvcanary.dump import load_dump
from jax_kvcanary.picture.incident import Incident
from jax_kvcanary.picture.text import MIN_WIDTH, print_incident

SUMMARY = "Draw the slot map and the findings of a dump, as text and as a PNG."

_MISSING = "{name} is not installed, so {what}; `pip install 'jax-kvcanary[plot]'` installs it."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("dump", metavar="DUMP", help="a file that `canary.dump` wrote")
    parser.add_argument("-o", "--output", metavar="PICTURE.png", help="draw a PNG too")
    parser.add_argument("--group", choices=[kind.name for kind in PoolKind], help="the pool to draw, unless told that of the first finding")
    parser.add_argument("--half", choices=["k", "v"], help="the records to draw, unless told those of the first finding")
    parser.add_argument("--width", type=_width, metavar="N", help="columns of the text, unless told those of the terminal")
    parser.add_argument("--no-color", action="store_true", help="text without colours")


def run(arguments: argparse.Namespace) -> int:
    """Draw; 0 when it is done, 1 when a package is missing, 2 when the dump cannot be read or has no such group or half."""
    try:
        dump = load_dump(arguments.dump)
        incident = Incident.of(dump, None if arguments.group is None else PoolKind[arguments.group], arguments.half)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    done = _text(incident, arguments.width, arguments.no_color)
    if arguments.output is not None:
        try:
            done = _png(incident, arguments.output) and done
        except OSError as error:
            print(error, file=sys.stderr)
            return 2
    return 0 if done else 1


def _text(incident: Incident, width: int | None, no_color: bool) -> bool:
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        print(incident.title)
        print(_MISSING.format(name="rich", what="there is no more text than this"), file=sys.stderr)
        return False
    console = Console(width=width, color_system=None if no_color else "auto", highlight=False, markup=False, emoji=False)
    print_incident(incident, console)
    return True


def _png(incident: Incident, output: str) -> bool:
    try:
        from jax_kvcanary.picture.png import save
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        print(_MISSING.format(name="matplotlib", what="there is no PNG"), file=sys.stderr)
        return False
    save(incident, output)
    print(f"\nWrote {output}")
    return True


def _width(text: str) -> int:
    width = int(text) if text.isdecimal() else 0
    if width < MIN_WIDTH:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {MIN_WIDTH}")
    return width
