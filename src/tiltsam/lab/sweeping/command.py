"""The command ``tiltsam sweep``. Optuna is imported when it runs, not when its options are listed."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import tiltsam
from tiltsam.lab.flags import add_arguments, shared_settings

__all__ = ["add_sweep"]

DESCRIPTION = """\
Try settings, the same number of trials for every METHOD; choose on the validation split; train the choice with several
seeds and test it. Interrupted or killed, the same command goes on; started again beside itself, here or on another
machine with the same --storage, it helps. All other flags hold for every trial."""


def add_sweep(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "sweep",
        help="choose settings on the validation split, then test",
        description=DESCRIPTION,
        epilog="example: tiltsam sweep digits --methods erm sam tsam --grid paper --trials 8 --epochs 20 --workers 2",
        usage="tiltsam sweep [-h] TASK --grid GRID [options]",
        allow_abbrev=False,
    )
    parser.add_argument("task", help="what to learn (see: tiltsam tasks)")
    parser.add_argument(
        "--methods",
        "--method",
        nargs="+",
        default=list(tiltsam.METHODS),
        metavar="METHOD",
        help="default: all seven; one may have settings of its own, as sam:average=true or tsam:num_samples=3,t=100, "
        "which no grid changes",
    )
    parser.add_argument(
        "--grid",
        action="append",
        required=True,
        metavar="GRID",
        help="NAME=VALUE,VALUE,… for every method that has the setting; METHOD:NAME=… for one; paper for the paper's",
    )
    parser.add_argument("--trials", type=int, help="trials a METHOD (default: all points of its grid)")
    parser.add_argument("--draw-seed", type=int, default=0, help="of the draw from a grid that has more (default: 0)")
    parser.add_argument("--seeds", type=int, default=3, help="tests of each choice, seeds 0, 1, … (default: 3)")
    parser.add_argument("--final-epochs", type=float, help="epochs of the tests (default: those of the trials)")
    parser.add_argument("--final-passes", type=float, help="passes of the tests (default: those of the trials)")
    parser.add_argument("--final-seconds", type=float, help="seconds of the tests (default: those of the trials)")
    parser.add_argument("--workers", type=int, default=1, help="processes on this machine (default: %(default)s)")
    parser.add_argument(
        "--storage",
        metavar="URL",
        default=os.environ.get("TILTSAM_STORAGE"),
        help="database for many machines (default: $TILTSAM_STORAGE, or sqlite:///OUT/sweeps.db)",
    )
    parser.add_argument(
        "--heartbeat",
        type=float,
        default=10.0,
        help="seconds between signs of life; after six the work of another machine is taken up (default: %(default)g)",
    )
    add_arguments(parser, leave_out=("task", "method"))
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder of the runs (default: %(default)s)")
    parser.add_argument("--data-root", type=Path, help="folder of the data sets (default: $TILTSAM_DATA, or data)")
    parser.add_argument("--download", action="store_true", help="fetch a data set or encoder that is missing")
    parser.set_defaults(run=_sweep)


def _sweep(args: argparse.Namespace) -> None:
    try:
        from tiltsam.lab.sweep import sweep
    except ModuleNotFoundError as error:
        if error.name not in ("optuna", "sqlalchemy"):
            raise
        raise ImportError("tiltsam sweep needs Optuna: pip install '.[sweep]'") from None
    from tiltsam.lab.console import print_table
    from tiltsam.lab.errors import SweepError
    from tiltsam.lab.report import write_report
    from tiltsam.lab.sweeping.grids import parse_grid
    from tiltsam.lab.sweeping.plan import Plan
    from tiltsam.lab.sweeping.results import tested_runs
    from tiltsam.lab.sweeping.screen import SweepDisplay
    from tiltsam.lab.sweeping.standing import format_edges, format_standings

    base, settings = shared_settings(args)
    with SweepDisplay() as screen:

        def begin(plan: Plan) -> None:
            number = len(next(iter(plan.points.values())))
            screen.print(f"study {plan.name}: {number} trials for each of {', '.join(plan.points)}")
            for note in plan.notes:
                screen.print(note)

        outcome = sweep(
            base,
            args.methods,
            parse_grid(args.grid),
            args.out,
            trials=args.trials,
            seeds=args.seeds,
            final_epochs=args.final_epochs,
            final_passes=args.final_passes,
            final_seconds=args.final_seconds,
            draw_seed=args.draw_seed,
            settings=settings,
            storage=args.storage,
            workers=args.workers,
            root=args.data_root,
            download=args.download,
            loading=screen.loading,
            heartbeat=args.heartbeat,
            begin=begin,
            report=screen.report,
            say=screen.print,
        )
    tested = ", then tested; mean ± standard error" if args.seeds else ""
    print_table(f"{args.task}: chosen on the validation split{tested}", format_standings(outcome.standings))
    for s in outcome.standings:
        if s.best is None:
            print(f"{s.method}: no trial came to a number")
        for line in format_edges(s):
            print(line)
    print(f"result: {outcome.path}")
    if any((run / "config.json").exists() for run in tested_runs(outcome.path.parent)):  # not all on other machines
        print(write_report([outcome.path.parent], outcome.path.parent / "report").message())
    if not outcome.best:
        raise SweepError("nothing could be chosen: no trial came to a number")
