"""The command ``tiltsam``."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path

import tiltsam

__all__ = ["main"]


class UserError(Exception):
    """A mistake of the user's: one line on the screen, exit code 2, no traceback."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="tiltsam",
        description="Tilted sharpness-aware minimisation and its relatives: flat minima for any torch optimizer.",
    )
    parser.add_argument("--version", action="version", version=f"tiltsam {tiltsam.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    toys = commands.add_parser(
        "toys",
        help="the paper's toy figures and theorems, with exact numbers",
        description="Draw the toy figures and print what was found beside what the paper states. Under a minute.",
        epilog="example: tiltsam toys --out figures",
    )
    toys.add_argument("--out", type=Path, default=Path("toys"), help="folder for the figures (default: %(default)s)")
    toys.add_argument("--no-figures", action="store_true", help="print the tables only")
    toys.set_defaults(run=_toys)

    methods = commands.add_parser("methods", help="the methods and what they cost", epilog="example: tiltsam methods")
    methods.set_defaults(run=_methods)

    args = parser.parse_args(argv)
    try:
        args.run(args)
    except (UserError, ImportError) as error:
        print(f"tiltsam {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"tiltsam {args.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `tiltsam … | head` is no error
        sys.stderr.close()
    return 0


def _toys(args: argparse.Namespace) -> None:
    from tiltsam.toys import estimators, figures, theory

    if not args.no_figures:
        _writable(args.out)
    print(theory.render(theory.table()), flush=True)
    qualities = estimators.study()
    print("\n" + estimators.render(qualities), flush=True)
    if not args.no_figures:
        print()
        for path in figures.draw_all(args.out, qualities=qualities):
            print(f"wrote {path}", flush=True)


def _methods(args: argparse.Namespace) -> None:
    width = max(len(name) for name in tiltsam.METHODS)
    for name, method in tiltsam.METHODS.items():
        first = (inspect.getdoc(method) or "").splitlines()[0]
        print(f"{name:{width}}  {first}")


def _writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".tiltsam-probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from None
