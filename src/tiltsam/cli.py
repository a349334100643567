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

    _add_lab(commands)
    methods = commands.add_parser("methods", help="the methods and what they cost", epilog="example: tiltsam methods")
    methods.set_defaults(run=_methods)

    args = parser.parse_args(argv)
    try:
        args.run(args)
    except (UserError, ImportError) as error:
        return _mistake(args.command, error)
    except _known_mistakes() as error:
        return _mistake(args.command, error)
    except BrokenPipeError:  # `tiltsam … | head` is no error
        sys.stderr.close()
        return 0
    except OSError as error:  # a full disk, an unwritable folder: what was saved before is intact
        where = f" ({error.filename})" if error.filename else ""
        return _mistake(args.command, f"{error.strerror or error}{where}")
    except KeyboardInterrupt:
        print(f"tiltsam {args.command}: interrupted", file=sys.stderr)
        return 130
    return 0


def _mistake(command: str, error: object) -> int:
    print(f"tiltsam {command}: {error}", file=sys.stderr)
    return 2


def _add_lab(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from tiltsam.lab.config import add_arguments

    train = commands.add_parser(
        "train",
        help="train one model with one method",
        description="Train a model. Killed at any moment, the same command goes on where it was.",
        epilog="example: tiltsam train digits --method tsam --t 20 --rho 0.5 --seed 1",
    )
    train.add_argument("task", help="what to learn (see: tiltsam tasks)")
    add_arguments(train, leave_out=("task",))
    train.set_defaults(run=_train)

    compare = commands.add_parser(
        "compare",
        help="train several methods and compare them",
        description="Run what is missing, reuse what is done, print mean ± standard error over seeds.",
        epilog="example: tiltsam compare digits --methods erm sam tsam --seeds 3",
    )
    compare.add_argument("task", help="what to learn (see: tiltsam tasks)")
    compare.add_argument("--methods", nargs="+", default=list(tiltsam.METHODS), help="default: all seven")
    compare.add_argument("--seeds", type=int, default=2, help="runs a method, seeds 0, 1, … (default: %(default)s)")
    add_arguments(compare, leave_out=("task", "method", "seed"))
    compare.set_defaults(run=_compare)

    for command in (train, compare):
        command.add_argument("--out", type=Path, default=Path("runs"), help="folder of the runs (default: %(default)s)")
        command.add_argument("--data-root", type=Path, help="folder of the data sets (default: $TILTSAM_DATA, or data)")
        command.add_argument("--download", action="store_true", help="fetch a data set that is missing")

    sharpness = commands.add_parser(
        "sharpness",
        help="how flat are trained models",
        description="Measure the flatness of trained runs and compare them: neighbourhood, worst case, Hessian.",
        epilog="example: tiltsam sharpness runs/digits --out flatness",
    )
    sharpness.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folders of runs, or folders that hold some"
    )
    sharpness.add_argument("--task", help="measure on this task (default: the runs' own)")
    sharpness.add_argument("--split", choices=("train", "test"), default="train", help="default: %(default)s")
    sharpness.add_argument("--examples", type=int, default=1000, help="examples to measure on (default: %(default)s)")
    sharpness.add_argument("--samples", type=int, default=50, help="draws a noise level (default: %(default)s)")
    sharpness.add_argument("--t", type=float, default=1.0, help="tilt of the t-weighted numbers (default: %(default)s)")
    sharpness.add_argument("--device", default="auto", help="default: a GPU if there is one")
    sharpness.add_argument("--data-root", type=Path, help="folder of the data sets (default: $TILTSAM_DATA, or data)")
    sharpness.add_argument(
        "--out", type=Path, default=Path("flatness"), help="folder for figures (default: %(default)s)"
    )
    sharpness.add_argument("--no-figures", action="store_true", help="print the table only")
    sharpness.set_defaults(run=_sharpness)

    tasks = commands.add_parser("tasks", help="the tasks and where their data belongs", epilog="example: tiltsam tasks")
    tasks.set_defaults(run=_tasks)


def _known_mistakes() -> tuple[type[Exception], ...]:
    """Errors that speak to the user in one line."""
    from tiltsam.lab.config import ConfigError
    from tiltsam.lab.record import RecordError
    from tiltsam.lab.tasks import DataError
    from tiltsam.lab.train import TrainError

    return ConfigError, DataError, RecordError, TrainError


def _train(args: argparse.Namespace) -> None:
    from tiltsam.lab.config import from_arguments
    from tiltsam.lab.record import Record
    from tiltsam.lab.screen import Screen
    from tiltsam.lab.train import train

    config = from_arguments(args)
    record = Record.of(args.out, config)
    with record.working() as mine:
        if not mine:
            raise UserError(f"another process is training this run in {record.folder}")
        with Screen() as screen:
            result = train(
                config,
                record,
                root=args.data_root,
                download=args.download,
                report=lambda progress: screen.report(config, progress),
            )
    print(f"test {result['metric']} {100 * result['score']:.2f} after {result['epoch']:g} epochs, ", end="")
    print(f"{result['passes']:.0f} passes, {result['seconds']:.1f} s: {record.folder}")


def _compare(args: argparse.Namespace) -> None:
    from tiltsam.lab.compare import compare, format_rows
    from tiltsam.lab.config import from_arguments
    from tiltsam.lab.screen import Screen, print_table

    if args.seeds < 1:
        raise UserError(f"--seeds must be at least 1, got {args.seeds}")
    cells = [from_arguments(args, method=m, seed=s) for s in range(args.seeds) for m in dict.fromkeys(args.methods)]
    with Screen() as screen:
        rows = compare(
            cells,
            args.out,
            root=args.data_root,
            download=args.download,
            report=screen.report,
            failed=lambda config, error: screen.say(f"{config.method} seed {config.seed}: {error}"),
        )
    first = cells[0]
    print_table(f"{first.task}: {args.seeds} seeds, mean ± standard error", format_rows(rows))
    if first.reestimate_batchnorm:
        print("BatchNorm's statistics were estimated anew at the trained weights before each test.")
    print(f"runs: {args.out}")


def _sharpness(args: argparse.Namespace) -> None:
    from tiltsam.flatness.comparison import Plan, format_table, table_rows
    from tiltsam.flatness.figures import write_figures
    from tiltsam.lab.flat import Bars, find_runs, measure_runs

    if not args.no_figures:
        _writable(args.out)
    if args.examples < 1 or args.samples < 2:
        raise UserError(
            f"--examples must be at least 1 and --samples at least 2, got {args.examples} and {args.samples}"
        )
    runs = find_runs(args.runs)
    plan = Plan(num_samples=args.samples, t=args.t)
    with Bars() as bars:
        flats = measure_runs(
            runs,
            task=args.task,
            split=args.split,
            examples=args.examples,
            device=args.device,
            root=args.data_root,
            plan=plan,
            progress=bars,
        )
    print(format_table(table_rows(flats)))
    for path in () if args.no_figures else write_figures(flats, args.out):
        print(f"wrote {path}")


def _tasks(args: argparse.Namespace) -> None:
    from tiltsam.lab.tasks import TASKS

    width = max(len(name) for name in TASKS)
    for name, task in TASKS.items():
        print(f"{name:{width}}  {task.description}")


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
