"""The command ``tiltsam``."""

from __future__ import annotations

import argparse
import difflib
import inspect
import io
import math
import os
import signal
import sys
import tempfile
import tomllib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias, get_args

import tiltsam
from tiltsam.lab.errors import LabError, UserError
from tiltsam.lab.shutdown import (
    RESUMES,
    exit_with_message,
    flush_output,
    reraise_dropped_interrupts,
)

__all__ = ["main"]

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

SYNONYMS = {"tau": "example-tilt", "lr-schedule": "schedule", "lr-scheduler": "schedule"}
"""Names of flags in other programs, for the hint of an error."""

TRIALS_HELP = "include the trials of sweeps (default: only the runs that tested their choices)"


class _Command(argparse.ArgumentParser):
    """A parser of the command line. Flags cannot be abbreviated: ``--seed`` would mean ``--seeds``."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    command = ""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an ASCII or Latin-1 terminal or file shows ? for ± or λ
    try:
        with reraise_dropped_interrupts():
            args = _parse(argv)
            command = args.command
            with _plain_warnings(command):
                _check_packages(command)
                args.run(args)
            print(end="", flush=True)
    except KeyboardInterrupt as error:
        message = str(error) or f"interrupted{RESUMES.get(command, '')}"
        return exit_with_message(128 + getattr(error, "number", signal.SIGINT), command, message)
    except LabError as error:
        return exit_with_message(2, command or "sweep", error)  # whose TOML file is read before the command is known
    except BrokenPipeError:  # `tiltsam … | head` is not an error, but the work may be unfinished
        if command not in RESUMES:
            return 0
        return exit_with_message(
            128 + signal.SIGPIPE, command, f"stopped: standard output was closed{RESUMES[command]}"
        )
    except OSError as error:  # such as a full disk; what was saved before is intact
        where = f" ({error.filename})" if error.filename else ""
        return exit_with_message(2, command, f"{error.strerror or error}{where}")
    finally:
        flush_output()
    return 0


def build_parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser of ``tiltsam`` and those of its commands, by name; the documentation lists their flags."""
    from tiltsam.lab.devices import code_digest

    parser: argparse.ArgumentParser = _Command(
        prog="tiltsam",
        description="Tilted sharpness-aware minimisation and related methods for any torch optimizer.",
    )
    version = f"tiltsam {tiltsam.__version__} (code {code_digest()})"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    _add_demo(commands)
    _add_toys(commands)
    _add_train(commands)
    _add_compare(commands)
    _add_sharpness(commands)
    _add_report(commands)
    _add_reproduce(commands)
    _add_sweep(commands)
    _add_tasks(commands)
    _add_methods(commands)
    return parser, dict(commands.choices)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser, commands = build_parser()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        parser.exit(2, parser.format_help())
    if arguments[0] not in commands and (near := difflib.get_close_matches(arguments[0], commands, 1)):
        parser.error(f"invalid choice: {arguments[0]!r}; did you mean {near[0]}?")
    args, unknown = parser.parse_known_args(arguments)
    if args.command == "sweep" and args.task.endswith(".toml"):
        sweep = commands["sweep"]
        in_file, unknown_in_file = sweep.parse_known_args(_read_arguments(Path(args.task), sweep))
        task = in_file.task
        args, unknown = sweep.parse_known_args(arguments[1:], in_file)  # they win over those of the file
        args.command, args.task, unknown = "sweep", task, [*unknown_in_file, *unknown]
    if unknown:  # print the usage of the command, not that of tiltsam
        command = commands[args.command]
        flags = [flag.partition("=")[0] for flag in unknown if flag.startswith("--")]
        known = [flag[2:] for flag in command._option_string_actions if flag.startswith("--")]
        names = [SYNONYMS.get(flag[2:], flag[2:]) for flag in flags]
        close = [difflib.get_close_matches(name, known, 1) for name in names]
        hint = f"; did you mean {' and '.join('--' + found[0] for found in close)}?" if close and all(close) else ""
        if "--resume" in flags and args.command in RESUMES:
            hint = RESUMES[args.command] + " without it"
        command.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return args


def _read_arguments(path: Path, parser: argparse.ArgumentParser) -> list[str]:
    """Return the arguments in a TOML file: ``task``, and flags of the parser without their dashes.

    Raises:
        UserError: If the file cannot be read, or has a table in a table.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(content.get("task"), str):
        raise UserError(f"{path} must name a task")

    def text(value: object) -> str:
        return str(value).lower() if isinstance(value, bool) else str(value)

    arguments = [content.pop("task")]
    for name, value in content.items():
        flag = f"--{name.replace('_', '-')}"
        if value is False:
            negated, action = flag.replace("--", "--no-", 1), parser._option_string_actions.get(flag)
            if negated in parser._option_string_actions:
                arguments.append(negated)
            elif action is None or action.nargs != 0:
                arguments.append(f"{flag}=false")  # the parser rejects it by its name
        elif value is True:
            arguments.append(flag)
        elif isinstance(value, dict):  # [grid]
            if inner := [(k, n) for k, v in value.items() if isinstance(v, dict) for n in v]:
                key, setting = inner[0]
                raise UserError(f'{path}: write "{key}:{setting}" in [{name}] instead of a table [{name}.{key}]')
            rows = {k: v if isinstance(v, list) else [v] for k, v in value.items()}
            arguments += [flag, *(f"{k}={','.join(map(text, v))}" for k, v in rows.items())]
        elif isinstance(value, list):
            arguments += [flag, *map(text, value)]
        else:
            arguments.append(f"{flag}={text(value)}")
    return arguments


@contextmanager
def _plain_warnings(command: str) -> Iterator[None]:
    """Print warnings as one line, without the source line, inside the context."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        print(f"tiltsam {command}: warning: {' '.join(str(message).split())}", file=sys.stderr, flush=True)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _check_packages(command: str) -> None:
    """Raise if the lab's packages are missing, before a run instead of when its model is saved."""
    missing = [name for name in ("numpy", "rich", "safetensors", "scipy", "sklearn") if find_spec(name) is None]
    if missing and command not in ("methods", "toys"):
        raise UserError(f"needs {' and '.join(missing)}: pip install '.[lab]'")


def _add_task(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "task", metavar="TASK", help="a name printed by tiltsam tasks, or images:DIR, text:FILE, npz:FILE"
    )


def _add_folders(parser: argparse.ArgumentParser) -> None:
    """Add the flags of all commands that train."""
    parser.add_argument(
        "--out", type=Path, default=Path("runs"), metavar="DIR", help="folder of the runs (default: %(default)s)"
    )
    parser.add_argument(
        "--data-root", type=Path, metavar="DIR", help="folder of the data sets (default: $TILTSAM_DATA, or data)"
    )
    parser.add_argument("--download", action="store_true", help="download missing data sets and models")


def _add_log(parser: argparse.ArgumentParser) -> None:
    from tiltsam.lab.tracking import TrackerName

    parser.add_argument(
        "--log",
        choices=get_args(TrackerName),
        help="also write the metrics to this tracker; TensorBoard's files are in the folders of the runs",
    )


def _add_demo(commands: Commands) -> None:
    demo = commands.add_parser(
        "demo",
        help="compare SAM, TSAM, averages and a tilt on digits with noisy labels, in minutes",
        description="Train on digits with 20% noisy labels, at the same number of passes: plainly, with SAM, ASAM and "
        "TSAM, with averaged weights, and with a tilt over examples. Compare the runs and write a report. The same "
        "command resumes.",
        epilog="example: tiltsam demo --passes 600",
    )
    demo.add_argument("--passes", type=int, default=1300, metavar="INT", help="passes per run (default: %(default)s)")
    demo.add_argument(
        "--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="folder of the runs (default: %(default)s)"
    )
    demo.set_defaults(run=_demo)


# With noisy labels a larger rho is better than with clean ones. ASAM measures it in units of weights.
_DEMO = (
    "erm",
    "sam:rho=0.5",
    "asam:rho=5",
    "tsam:rho=0.5,num_samples=1",
    "tsam:rho=0.5,num_samples=3",
    "sam:rho=0.5,average=true",
    "erm:example_tilt=-1",
    "sam:rho=0.5,example_tilt=-1",
)


def _demo(args: argparse.Namespace) -> None:
    flags = ["--seeds", "5", "--passes", str(args.passes), "--out", str(args.out)]
    _compare(_parse(["compare", "digits", *flags, "--methods", *_DEMO]))
    print("On your own data: tiltsam compare npz:FILE --methods erm sam:rho=0.1 sam:rho=0.5 erm:example_tilt=-0.2")


def _add_toys(commands: Commands) -> None:
    toys = commands.add_parser(
        "toys",
        help="the paper's toy figures and theorems, with exact numbers",
        description="Draw the toy figures and check each statement of the paper numerically. Takes under a minute.",
        epilog="example: tiltsam toys --out figures",
    )
    toys.add_argument("--out", type=Path, default=Path("toys"), help="folder of the figures (default: %(default)s)")
    toys.add_argument("--no-figures", action="store_true", help="print the tables only")
    toys.set_defaults(run=_toys)


def _toys(args: argparse.Namespace) -> None:
    from tiltsam.lab.devices import one_thread
    from tiltsam.lab.theory import estimators, figures, findings

    drawn = not args.no_figures and _can_write_figures(args.out)
    with one_thread():
        print(findings.render(findings.table()), flush=True)
        qualities = estimators.study()
        print("\n" + estimators.render(qualities), flush=True)
        if drawn:
            print()
            for path in figures.draw_all(args.out, qualities=qualities):
                print(f"wrote {path}", flush=True)


def _add_train(commands: Commands) -> None:
    from tiltsam.lab.devices import ParallelMode
    from tiltsam.lab.flags import add_arguments

    train = commands.add_parser(
        "train",
        help="train one model with one method",
        description="Train a model and test it. Ctrl-C and SIGTERM save a checkpoint after the current step (a second\n"
        "Ctrl-C exits at once). The same command resumes from there, or after a kill from the last\ncheckpoint.",
        epilog=(
            "examples:\n"
            "  tiltsam train digits --method sam --rho 0.5 --seed 1\n"
            "  tiltsam train digits --method tsam:num_samples=1,rho=0.5 --average\n"
            "  tiltsam train glue/rte --model minilm --optimizer adamw --lr 5e-5 --epochs 3\n"
            "  torchrun --nproc-per-node 3 -m tiltsam train cifar100 --method tsam --num-samples 3 --parallel samples"
        ),
        usage="tiltsam train [-h] TASK [options]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(train, leave_out=("task",))
    train.add_argument(
        "--parallel",
        choices=get_args(ParallelMode),
        default="data",
        help="what torchrun's processes divide: each batch, or the samples of tsam (default: %(default)s)",
    )
    train.add_argument(
        "--until",
        type=float,
        default=1.0,
        metavar="FRACTION",
        help="pause when this fraction of the budget is used up; the same command without --until resumes",
    )
    _add_task(train)
    _add_folders(train)
    _add_log(train)
    train.set_defaults(run=_train)


def _train(args: argparse.Namespace) -> None:
    from tiltsam.lab.config import warn_if_tilt_has_no_effect
    from tiltsam.lab.console import RunDisplay, print_suspects
    from tiltsam.lab.data import data_loader, find_task
    from tiltsam.lab.devices import connect_ranks
    from tiltsam.lab.display import Display
    from tiltsam.lab.flags import from_arguments
    from tiltsam.lab.records import Record
    from tiltsam.lab.stats import format_score
    from tiltsam.lab.train import train

    config = from_arguments(args)
    find_task(config.task)  # before a folder is created for it
    record = Record.of(args.out, config)
    with connect_ranks(args.parallel, config.device) as distributed, ExitStack() as held:
        locked = held.enter_context(record.lock()) if distributed.is_main else None
        if not distributed.broadcast_object(locked):
            raise UserError(f"another process is training this run in {record.folder}")
        display = Display()
        if distributed.is_main:
            if idle := distributed.idle_ranks_warning(config.all_options().get("num_samples", 1)):
                warnings.warn(idle, stacklevel=2)
            warn_if_tilt_has_no_effect(config, config.method)
            display = held.enter_context(RunDisplay())
        result = train(
            config,
            record,
            data=data_loader(args.data_root, download=args.download, progress=display.loading),
            log=args.log,
            display=display,
            distributed=distributed,
            until=args.until,
        )
    if not distributed.is_main:
        return
    cost = f"{result['epoch']:g} epoch{'' if result['epoch'] == 1 else 's'}, {result['passes']:.0f} passes"
    if "score" not in result:
        print(f"paused after {cost}: {record.folder}; the same command without --until resumes")
        return
    print(f"test {format_score(result)} after {cost}, {result['seconds']:.1f} s: {record.folder}")
    print_suspects([record])
    if result.get("num_suspects") == 0:
        print("no labels look wrong; labels that the model has memorised are not found: to find them, train for less")


def _add_compare(commands: Commands) -> None:
    from tiltsam.lab.config import COMPARED
    from tiltsam.lab.flags import add_arguments

    compare = commands.add_parser(
        "compare",
        help="train several methods and compare them",
        description="Train several methods with several seeds, print mean ± standard error, and write a report. "
        "Finished runs are reused; the same command resumes.",
        epilog="example: tiltsam compare digits --methods erm sam:rho=0.5 tsam:num_samples=1,rho=0.5 --seeds 3",
        usage="tiltsam compare [-h] TASK [options]",
    )
    compare.add_argument(
        "--methods",
        nargs="+",
        default=list(COMPARED),
        metavar="METHOD",
        help="methods, optionally with settings, as in asam:rho=5 or tsam:num_samples=3,t=100 (default: "
        f"{' '.join(COMPARED)})",
    )
    compare.add_argument(
        "--seeds", type=int, default=3, metavar="INT", help="runs per method: seeds 0, 1, … (default: %(default)s)"
    )
    add_arguments(compare, leave_out=("task", "method", "seed"))
    _add_task(compare)
    _add_folders(compare)
    _add_log(compare)
    compare.set_defaults(run=_compare)


def _compare(args: argparse.Namespace) -> None:
    from tiltsam.lab.compare import compare, runs_by_method
    from tiltsam.lab.config import warn_if_tilt_has_no_effect
    from tiltsam.lab.console import RunDisplay, print_suspects, print_table
    from tiltsam.lab.data import data_loader, find_task
    from tiltsam.lab.flags import split_settings
    from tiltsam.lab.records import Record
    from tiltsam.lab.report import write_report
    from tiltsam.lab.report.runs import save_entries
    from tiltsam.lab.report.tables import printed_cells
    from tiltsam.lab.stats import count_of

    config, settings = split_settings(args)
    find_task(config.task)  # before a folder is created for it
    methods = runs_by_method(config, args.methods, args.seeds, settings)
    for name, runs in methods.items():
        warn_if_tilt_has_no_effect(runs[0], name)
    names = {runs[0].key(): name for name, runs in methods.items()}
    records = {run: Record.of(args.out, run) for runs in methods.values() for run in runs}
    with RunDisplay(names, [run for run, record in records.items() if record.result() is None]) as display:
        failures = compare(
            methods,
            args.out,
            data=data_loader(args.data_root, download=args.download, progress=display.loading),
            log=args.log,
            display=display,
        )
    folders = [record.folder for record in records.values()]
    task_folder = folders[0].parents[1]
    save_entries(task_folder, names)
    report = write_report(folders, task_folder / "report", compare_settings=True)
    results = printed_cells(report.sections[0].results)
    print_table(f"{config.task}: {count_of(args.seeds, 'seed')}, mean ± standard error", results)
    print(f"{report.summary}\nruns: {task_folder}")
    print_suspects(records.values())
    print(report.message())
    if failures.keys() >= records.keys():
        raise UserError("all runs failed")


def _add_sharpness(commands: Commands) -> None:
    sharpness = commands.add_parser(
        "sharpness",
        help="measure the flatness of trained models",
        description="Measure the flatness of trained runs: neighbourhood, worst case, Hessian. Print the main numbers "
        "and write a report.",
        epilog="example: tiltsam sharpness runs/digits",
    )
    sharpness.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folders of runs, or folders that contain runs"
    )
    sharpness.add_argument("--task", help="task to measure on (default: that of the runs)")
    sharpness.add_argument(
        "--split", choices=("train", "test"), default="train", help="examples to measure on (default: %(default)s)"
    )
    sharpness.add_argument("--examples", type=int, default=1000, help="number of examples (default: %(default)s)")
    sharpness.add_argument("--samples", type=int, default=50, help="draws per noise level (default: %(default)s)")
    sharpness.add_argument("--t", type=float, default=1.0, help="tilt of the tilted losses (default: %(default)s)")
    sharpness.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 (default: a GPU if there is one)")
    sharpness.add_argument(
        "--data-root", type=Path, metavar="DIR", help="folder of the data sets (default: $TILTSAM_DATA, or data)"
    )
    sharpness.add_argument("--out", type=Path, help="folder of the report (default: report, in the first RUN)")
    sharpness.add_argument("--trials", action="store_true", help=TRIALS_HELP)
    sharpness.add_argument("--no-figures", action="store_true", help="do not write figure files")
    sharpness.set_defaults(run=_sharpness)


def _sharpness(args: argparse.Namespace) -> None:
    from tiltsam.lab.console import LiveDisplay, print_table
    from tiltsam.lab.data import data_loader
    from tiltsam.lab.flatness import FlatnessPlan, find_runs, measure_runs, save_flatness
    from tiltsam.lab.report import write_report
    from tiltsam.lab.report.tables import FLATTER, MEANS, printed_cells

    if args.examples < 1 or args.samples < 2:
        raise UserError(
            f"--examples must be at least 1 and --samples at least 2, got {args.examples} and {args.samples}"
        )
    if not (math.isfinite(args.t) and args.t >= 0):
        raise UserError(f"--t must be a finite number of at least 0, got {args.t:g}")

    with LiveDisplay() as display:
        runs = find_runs(args.runs, trials=args.trials, skip_errors=True, display=display)
        for flat, about in measure_runs(
            runs,
            task=args.task,
            split=args.split,
            examples=args.examples,
            device=args.device,
            data=data_loader(args.data_root, progress=display.loading),
            plan=FlatnessPlan(num_samples=args.samples, t=args.t),
            reuse=True,
            skip_errors=True,
            display=display,
        ):
            save_flatness(runs[flat.name], flat, about)  # now: the next run may take long
    out = args.runs[0] / "report" if args.out is None else args.out
    report = write_report(args.runs, out, figures=not args.no_figures, trials=args.trials)
    tables = {section.task.name: section.flatness for section in report.sections if section.flatness is not None}
    for task, table in tables.items():
        print_table(f"{task}: flatness, {MEANS}", printed_cells(table))
    if not tables:
        raise UserError("none of the runs can be measured")
    print(f"{FLATTER}\nThe loss is that of the measured examples, without a tilt. The page defines the other columns.")
    print(report.message())


def _add_report(commands: Commands) -> None:
    parser = commands.add_parser(
        "report",
        help="write a page of tables and plots about runs",
        description="Write one self-contained HTML page about runs, finished or not, and next to it its plots as PNG "
        "and PDF and its tables as Markdown and LaTeX.",
        epilog="example: tiltsam report runs/digits",
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="runs, or folders that contain runs")
    parser.add_argument("--out", type=Path, help="folder to write to (default: report, in the first DIR)")
    parser.add_argument("--trials", action="store_true", help=TRIALS_HELP)
    parser.add_argument("--no-figures", action="store_true", help="do not write figure files")
    parser.set_defaults(run=_report)


def _report(args: argparse.Namespace) -> None:
    from tiltsam.lab.report import write_report

    out = args.folders[0] / "report" if args.out is None else args.out
    report = write_report(args.folders, out, figures=not args.no_figures, trials=args.trials)
    print(f"{report.summary}\n{report.message()}")


def _add_reproduce(commands: Commands) -> None:
    from tiltsam.lab.config import field_types

    parser = commands.add_parser(
        "reproduce",
        help="run an experiment of the paper and compare with its numbers; or two-tilts, one of our own",
        description="Run a table or figure of the paper's experiments and print our numbers next to the paper's, as "
        "mean ± standard error over seeds; or two-tilts, an experiment of our own with tilts over examples on digits, "
        "which takes minutes on a CPU. Finished runs are reused: to resume, run the same command again.",
        epilog="examples: tiltsam reproduce --list; tiltsam reproduce samples/cifar100-resnet18 --scale 0.1 --seeds 2",
    )
    parser.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="a name printed by --list, or NAME/PART, as in images/dtd-wrn or two-tilts/noise-0.2",
    )
    parser.add_argument("--list", action="store_true", help="list all names with their cost in passes")
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="fraction of the epochs, and of the examples and draws of a measurement (default: 1)",
    )
    parser.add_argument("--seeds", type=int, help="runs per cell, with seeds 0, 1, … (default: 3; two-tilts: 5)")
    parser.add_argument(
        "--workers", type=int, default=1, metavar="INT", help="two-tilts: processes on this machine (default: 1)"
    )
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="run these methods only (default: all)")
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        dest="changes",
        metavar="NAME=VALUE",
        help="change a setting, as in batch_size=128, of all methods that have it; METHOD:NAME=VALUE, as in "
        "tsam:rho=0.2, changes it for one method",
    )
    parser.add_argument(
        "--finished",
        action="store_true",
        help="train nothing: show the finished runs only, the other cells as not run",
    )
    parser.add_argument(
        "--precision",
        choices=get_args(field_types()["precision"]),
        default="fp32",
        help="bf16 uses autocast (default: fp32)",
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 (default: a GPU if there is one)")
    _add_folders(parser)
    parser.set_defaults(run=_reproduce)


def _reproduce(args: argparse.Namespace) -> None:
    from tiltsam.lab.console import RunDisplay
    from tiltsam.lab.paper.cost import print_costs
    from tiltsam.lab.paper.recipes import RECIPES, find_recipe, parse_changes, select_methods
    from tiltsam.lab.paper.reproduce import Reproduction, ReproductionPlan, reproduce
    from tiltsam.lab.paper.tables import print_header, print_results, write_numbers
    from tiltsam.lab.report import write_report
    from tiltsam.lab.two_tilts import NAME, SEEDS, STUDIES, restrict_methods

    first, names = (args.name or "").partition("/")[0], (*RECIPES, NAME)
    if first == NAME:
        _two_tilts(args)
        return
    if args.name and first not in names:
        close = difflib.get_close_matches(first, names, 1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise UserError(f"unknown name {args.name!r}: {hint}names are {', '.join(names)}, or NAME/PART")
    if args.name:
        recipes = [find_recipe(args.name).select(methods=args.methods)]
    elif args.list:
        recipes = select_methods([make() for make in RECIPES.values()], args.methods)
    else:
        raise UserError(f"pass a name: {', '.join((*RECIPES, NAME))} (see: tiltsam reproduce --list)")
    seeds = 3 if args.seeds is None else args.seeds
    changes = parse_changes(args.changes, recipes)
    plans = []
    for recipe in recipes:
        own = {name: value for name, value in changes.items() if any(cell.has(name) for cell in recipe.cells)}
        plans.append(ReproductionPlan(recipe, seeds, args.scale, args.device, args.precision, own))
    if args.list:
        ours = [] if args.name or changes else list(STUDIES.values())
        print_costs(plans, restrict_methods(ours, args.methods), SEEDS if args.seeds is None else args.seeds)
        return
    if args.workers != 1:
        raise UserError(f"--workers must be 1 for {args.name}, got {args.workers}: start the command several times")
    (plan,) = plans
    reproduction = Reproduction(plan, args.out)
    if args.finished and plan.recipe.measured:
        raise UserError(f"--finished cannot show {args.name}, which measures the trained models")
    if args.finished and not any(map(reproduction.records, plan.recipe.cells)):
        raise UserError(f"{args.out} has no finished run of {args.name} with these settings")
    print_header(plan)
    if not args.finished:
        with RunDisplay(plan.names()) as display:
            reproduction = reproduce(plan, args.out, root=args.data_root, download=args.download, display=display)
    print_results(reproduction)
    folder = args.out / "reproduced" / plan.recipe.name.replace("/", "-")
    write_numbers(reproduction, folder / "numbers.json")
    print(f"numbers: {folder / 'numbers.json'}")
    if folders := reproduction.folders():
        print(write_report(folders, folder, compare_settings=True).message())


def _two_tilts(args: argparse.Namespace) -> None:
    from tiltsam.lab.console import SweepDisplay, format_markdown, print_table
    from tiltsam.lab.paper.reproduce import check_size
    from tiltsam.lab.report import write_report
    from tiltsam.lab.stats import count_of
    from tiltsam.lab.two_tilts import SEEDS, cost_rows, num_runs, result_rows, run_study, select_studies

    if args.changes or args.finished:
        raise UserError(f"{args.name} does not take {'--set' if args.changes else '--finished'}")
    seeds = SEEDS if args.seeds is None else args.seeds
    check_size(seeds, args.scale)
    studies = select_studies(args.name, args.methods)
    if args.list:
        rows = cost_rows(studies, seeds, args.scale)
        print_table(f"seeds {seeds}, scale {args.scale:g}", [["name", "runs", "training passes"], *rows])
        return
    with _optuna_hint():
        import tiltsam.lab.sweep  # noqa: F401
    print(f"{sum(num_runs(study, seeds) for study in studies)} runs; the same command resumes", flush=True)
    folder = args.out / "reproduced" / args.name.replace("/", "-")
    text, sweeps = "", []
    for study in studies:
        with SweepDisplay() as display:
            result = run_study(
                study,
                args.out,
                seeds=seeds,
                scale=args.scale,
                device=args.device,
                precision=args.precision,
                workers=args.workers,
                display=display,
            )
        table = result_rows(study, result)
        title = study.title if args.scale == 1 else f"{study.title}, scale {args.scale:g}"
        print_table(f"{title}: {count_of(seeds, 'seed')}, mean ± standard error", table)
        text += f"### {title}\n\n{format_markdown(table)}\n\n"
        sweeps.append(result.path.parent)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tables.md").write_text(text, encoding="utf-8")
    print(f"tables: {folder / 'tables.md'}")
    print(write_report(sweeps, folder, compare_settings=True).message())


def _add_sweep(commands: Commands) -> None:
    from tiltsam.lab.config import COMPARED
    from tiltsam.lab.flags import add_arguments
    from tiltsam.lab.grids import ChoiceName, PrunerName, TrialSamplerName

    parser = commands.add_parser(
        "sweep",
        help="tune several methods with equal budgets, then test each choice",
        description="Give every METHOD the same number of trials, choose on the validation split, train each choice\n"
        "with several seeds and test it. The same command resumes an interrupted sweep. Started several times,\n"
        "here or on machines with the same --storage, it shares the work. Other flags hold for every trial.",
        epilog="examples:\n"
        "  tiltsam sweep digits --methods sam tsam:num_samples=1 --grid lr=0.01,0.03,0.1 rho=0.05,0.1,0.2 --workers 2\n"
        "  tiltsam sweep digits --methods sam --grid lr=1e-3..1e-1 rho=0.01..1 --sampler tpe --trials 30\n"
        "  tiltsam sweep benchmarks/studies/digits.toml",
        usage="tiltsam sweep [-h] TASK|FILE.toml --grid GRID [options]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("task", metavar="TASK", help="a task as for tiltsam train, or a TOML file of arguments")
    parser.add_argument(
        "--methods",
        nargs="+",
        default=list(COMPARED),
        metavar="METHOD",
        help="methods, optionally with settings that no grid changes, as in tsam:num_samples=1 (default: "
        f"{' '.join(COMPARED)})",
    )
    parser.add_argument(
        "--grid",
        nargs="+",
        action="extend",
        default=[],
        metavar="GRID",
        help="NAME=VALUE,VALUE,… for every method that has the setting; METHOD:NAME=… for one; NAME=LOW..HIGH is a "
        "log-uniform range; paper is the paper's grid",
    )
    parser.add_argument(
        "--sampler",
        dest="trial_sampler",  # "sampler" is a setting of TSAM
        choices=get_args(TrialSamplerName),
        default="grid",
        help="how trials are chosen (default: grid); TSAM's own sampler is set as in tsam:sampler=hmc",
    )
    parser.add_argument(
        "--trials", type=int, metavar="INT", help="trials per METHOD (default: the size of the largest grid)"
    )
    parser.add_argument(
        "--pruner",
        choices=get_args(PrunerName),
        default="none",
        help="halving stops the worse half of the trials at 25%% and at 50%% of the budget (default: none)",
    )
    parser.add_argument(
        "--choose-by",
        choices=get_args(ChoiceName),
        default="score",
        help="choose the highest validation score (default; ties: the lower loss); the lowest validation loss, which "
        "is misleading with noisy labels; or the highest mean accuracy of the classes, for long-tailed tasks",
    )
    parser.add_argument(
        "--trial-seeds", type=int, default=1, metavar="INT", help="runs per trial: seeds 0, 1, … (default: 1)"
    )
    parser.add_argument(
        "--seeds", type=int, default=3, metavar="INT", help="runs that test each choice: seeds 0, 1, … (default: 3)"
    )
    for name in ("epochs", "passes", "seconds"):
        parser.add_argument(
            f"--final-{name}", type=float, metavar="FLOAT", help=f"{name} of the tests, instead of the trials' budget"
        )
    parser.add_argument(
        "--final-validation",
        type=float,
        metavar="FLOAT",
        help="fraction held out in the tests; 0 trains each choice on all training examples",
    )
    parser.add_argument("--workers", type=int, default=1, metavar="INT", help="processes on this machine (default: 1)")
    parser.add_argument(
        "--storage",
        metavar="URL",
        default=os.environ.get("TILTSAM_STORAGE"),
        help="database (default: $TILTSAM_STORAGE, or sqlite:///OUT/sweeps.db)",
    )
    parser.add_argument(
        "--heartbeat",
        type=int,
        default=10,
        metavar="INT",
        help="seconds between heartbeats; after six missing ones another process takes over (default: 10)",
    )
    add_arguments(parser, leave_out=("task", "method", "sampler", "seed"))
    _add_folders(parser)
    _add_log(parser)
    parser.set_defaults(run=_sweep)


def _sweep(args: argparse.Namespace) -> None:
    with _optuna_hint():
        from tiltsam.lab.sweep import format_results, sweep
    from tiltsam.lab.console import SweepDisplay, print_table
    from tiltsam.lab.flags import split_settings
    from tiltsam.lab.grids import parse_grid
    from tiltsam.lab.report import write_report
    from tiltsam.lab.report.runs import read_sweep
    from tiltsam.lab.stats import count_of

    config, settings = split_settings(args)
    with SweepDisplay() as display:
        result = sweep(
            config,
            args.methods,
            parse_grid(args.grid, args.methods),
            args.out,
            sampler=args.trial_sampler,
            trials=args.trials,
            pruner=args.pruner,
            choose_by=args.choose_by,
            trial_seeds=args.trial_seeds,
            seeds=args.seeds,
            final_epochs=args.final_epochs,
            final_passes=args.final_passes,
            final_seconds=args.final_seconds,
            final_validation=args.final_validation,
            settings=settings,
            storage=args.storage,
            workers=args.workers,
            root=args.data_root,
            download=args.download,
            heartbeat=args.heartbeat,
            log=args.log,
            display=display,
        )
    tested = f", tested with {count_of(args.seeds, 'seed')}, mean ± standard error" if args.seeds else ""
    print_table(f"{args.task}: chosen by {result.value_name}{tested}", format_results(result))
    folder = result.path.parent
    report = None
    if any((run / "config.json").exists() for run in read_sweep(folder).tests):  # all may be on other machines
        report = write_report([folder], folder / "report", compare_settings=True)
        print(report.summary)
    for note in result.notes:
        print(note)
    print(f"result: {result.path}")
    if report is not None:
        print(report.message())
    if not any(row.config for row in result.entries):
        raise UserError("nothing was chosen: no trial finished with a finite loss")


def _add_tasks(commands: Commands) -> None:
    tasks = commands.add_parser("tasks", help="list the tasks and their data files", epilog="example: tiltsam tasks")
    tasks.set_defaults(run=_tasks)


def _tasks(args: argparse.Namespace) -> None:
    from tiltsam.lab.data import TASKS, data_root

    width = max(len(name) for name in TASKS)
    for name, task in TASKS.items():
        print(f"{name:{width}}  {task.description}")
        print(f"{'':{width}}    {task.files}")
    print(f"\nThe second line of each task names its files below {data_root()} (--data-root or $TILTSAM_DATA).")
    print("The test labels of GLUE and Tiny ImageNet are not public: their dev sets are used as test sets.")


def _add_methods(commands: Commands) -> None:
    methods = commands.add_parser("methods", help="list the methods and their cost", epilog="example: tiltsam methods")
    methods.set_defaults(run=_methods)


def _methods(args: argparse.Namespace) -> None:
    width = max(len(name) for name in tiltsam.METHODS)
    for name, method in tiltsam.METHODS.items():
        first, *_ = (inspect.getdoc(getattr(method, "func", method)) or "").split("\n")
        print(f"{name:{width}}  {first.replace('``', '')}".rstrip())


@contextmanager
def _optuna_hint() -> Iterator[None]:
    """Say how to install Optuna if an import inside the context lacks it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("optuna", "sqlalchemy"):
            raise
        raise UserError("needs Optuna: pip install optuna, or '.[sweep]' in a clone") from None


def _can_write_figures(folder: Path) -> bool:
    """Return whether matplotlib is installed, with a warning if not; create the folder, before the work is done.

    Raises:
        UserError: If the folder cannot be written.
    """
    if find_spec("matplotlib") is None:
        warnings.warn("no figures: matplotlib is not installed: pip install '.[plots]'", stacklevel=2)
        return False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from None
    return True
