"""The command ``tiltsam reproduce``. What it needs is imported when it runs, not when its options are listed."""

from __future__ import annotations

import argparse
import math
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiltsam.lab.recipes.reproduce import Outcome, Plan

__all__ = ["add_reproduce"]

DESCRIPTION = """\
Run a table or figure of the paper's experiments and print our numbers beside the paper's, mean ± standard error over
seeds. What is done is reused; killed at any moment, the same command goes on."""


def add_reproduce(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "reproduce",
        help="a table or figure of the paper, ours beside theirs",
        description=DESCRIPTION,
        epilog="examples: tiltsam reproduce --list; tiltsam reproduce samples/cifar100-resnet18 --scale 0.1 --seeds 2",
    )
    parser.add_argument(
        "name", nargs="?", metavar="TABLE-OR-FIGURE", help="a name of --list, or NAME/COLUMN for one column of it"
    )
    parser.add_argument("--list", action="store_true", help="all names, with passes and hours on this device")
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="share of the epochs, and of what sharpness and eigenvalues measure (default: 1, all)",
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs a cell, seeds 0, 1, … (default: %(default)s)")
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="some of the methods (default: all)")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="default: fp32")
    parser.add_argument("--device", default="auto", help="default: a GPU if there is one")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder of the runs (default: %(default)s)")
    parser.add_argument("--data-root", type=Path, help="folder of the data sets (default: $TILTSAM_DATA, or data)")
    parser.add_argument("--download", action="store_true", help="fetch a data set or model that is missing")
    parser.set_defaults(run=_reproduce)


def _reproduce(args: argparse.Namespace) -> None:
    from tiltsam.lab.recipes.book import RECIPES, RecipeError, find_recipe, having
    from tiltsam.lab.recipes.reproduce import Plan

    if args.list:
        if args.name:
            recipes = [find_recipe(args.name).only(methods=args.methods)]
        else:
            recipes = having([make() for make in RECIPES.values()], args.methods)
        _list([Plan(r, args.seeds, args.scale, args.device, args.precision) for r in recipes])
        return
    if args.name is None:
        raise RecipeError(f"which table or figure? One of {', '.join(RECIPES)} (see: tiltsam reproduce --list)")
    recipe = find_recipe(args.name).only(methods=args.methods)
    _run(Plan(recipe, args.seeds, args.scale, args.device, args.precision), args)


def _list(plans: Sequence[Plan]) -> None:
    """All recipes and their columns, with what they cost."""
    from tiltsam.lab.devices import resolve_device
    from tiltsam.lab.screen import print_table

    device = resolve_device(plans[0].device)
    width = max(len(plan.recipe.name) for plan in plans)
    for plan in plans:
        print(f"{plan.recipe.name:{width}}  {plan.recipe.about[0]} ({plan.recipe.source})")
    rows = [["name", "runs", "training passes", "measuring, about", "hours"]]
    for plan in plans:
        recipe = plan.recipe
        rows.append([recipe.name, *_cost(plan)])
        if len(recipe.columns) > 1:
            for column in recipe.columns:
                part = replace(plan, recipe=recipe.only(columns=[column]))
                rows.append([f"  {part.recipe.name}", *_cost(part)])
    first = plans[0]
    print_table(f"{_seeds(first)}, scale {first.scale:g}, {first.precision}", rows)
    print(
        f"\nPasses (a forward and a backward one, on a batch) of training are exact; hours are for {device}, from a "
        "short timing of each model, evaluation not counted. Recipes share runs: one that is done is not run again."
    )
    if any(row[-1] == "?" for row in rows):
        print("?: the model needs transformers to be timed: pip install '.[text]'")


def _cost(plan: Plan) -> list[str]:
    """Runs, passes of training, passes of measuring, and hours."""
    from tiltsam.lab.recipes.cost import num_passes, seconds_per_pass, training_examples
    from tiltsam.lab.recipes.reproduce import MEASURED

    configs = {config: config for cell in plan.recipe.cells for config in plan.configs(cell)}
    passes = measuring = seconds = 0.0
    for config in configs:
        mine = num_passes(config)
        more = 0.0
        if plan.recipe.kind in MEASURED:
            more = plan.much.passes(plan.recipe.kind, config.batch_size, training_examples(config))
        passes, measuring = passes + mine, measuring + more
        seconds += (mine + more) * seconds_per_pass(config, plan.device, _tell)
    hours = "?" if math.isnan(seconds) else f"{seconds / 3600:.3g}" if seconds < 36e5 else f"{seconds / 3600:,.0f}"
    return [str(len(configs)), f"{passes:,.0f}", f"{measuring:,.0f}" if measuring else "", hours]


def _seeds(plan: Plan) -> str:
    return "1 seed" if plan.seeds == 1 else f"{plan.seeds} seeds"


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _run(plan: Plan, args: argparse.Namespace) -> None:
    from tiltsam.lab.recipes.reproduce import reproduce
    from tiltsam.lab.screen import Bars, Screen

    _announce(plan)
    with Screen(plan.names()) as screen, Bars() as bars:
        outcome = reproduce(
            plan,
            args.out,
            root=args.data_root,
            download=args.download,
            loading=screen.loading,
            report=screen.report,
            say=screen.say,
            measuring=screen.gives_way_to(bars),
        )
    _show(outcome)


def _announce(plan: Plan) -> None:
    """What is run, what the paper leaves open, and what is not as in the recipe."""
    recipe = plan.recipe
    print(f"{recipe.name} ({recipe.source}): {recipe.about[0]}")
    for part in recipe.about[1:]:
        print(textwrap.fill(part, 120))
    print("Settings that the paper leaves open, such as learning rates, are chosen: see docs/reproduce.md.")
    for line in plan.changes():
        print(line)
    sys.stdout.flush()


def _show(outcome: Outcome) -> None:
    from tiltsam.lab.recipes.tables import tables, write_json
    from tiltsam.lab.report.command import report
    from tiltsam.lab.screen import print_table

    plan = outcome.plan
    for table in tables(outcome):
        print_table(table.title, table.rows)
    spread = "" if plan.seeds == 1 else ", mean ± standard error"
    print(f"\nours: {_seeds(plan)}{spread}; paper: in parentheses the error that it prints; –: there is no number")
    for line in plan.changes():
        print(line)
    for column, told in outcome.data.items():
        print(f"{column}: {told}")
    for column, problem in outcome.problems.items():
        print(f"{column} was not run: {problem}")
    for seed, problem in outcome.unmeasured.items():
        print(f"seed {seed} was not measured: {problem}")
    folder = outcome.out / "reproduced" / plan.recipe.name.replace("/", "-")
    write_json(outcome, folder / "numbers.json")
    print(f"numbers: {folder / 'numbers.json'}")
    if folders := outcome.folders():
        report(folders, folder)
