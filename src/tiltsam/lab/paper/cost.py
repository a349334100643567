"""The cost of a recipe in forward+backward passes: of training exactly, of measuring about."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tiltsam.lab import two_tilts
from tiltsam.lab.config import TrainConfig
from tiltsam.lab.console import print_table
from tiltsam.lab.flatness import PAPER_STDS
from tiltsam.lab.paper.reproduce import ReproductionPlan
from tiltsam.lab.paper.settings import COLUMNS, training_examples
from tiltsam.lab.schedules import passes_per_step
from tiltsam.lab.two_tilts import TiltStudy

__all__ = ["measuring_passes", "num_passes", "num_steps", "print_costs"]


def num_steps(config: TrainConfig, examples: int) -> int:
    """Return the steps of a run whose budget is in epochs, on so many training examples."""
    per_epoch = examples // min(config.batch_size, examples)
    return math.ceil(config.epochs * per_epoch - 1e-9)


def num_passes(config: TrainConfig, examples: int | None = None) -> float:
    """Return the forward+backward passes of a run whose budget is in epochs; a forward pass alone counts a third.

    By default the run trains on as many examples as the published data set has.

    Example:
        >>> from tiltsam.lab.paper.settings import column_config
        >>> num_passes(column_config("cifar100-resnet18", "tsam"))  # 200 epochs of 703 steps of 2·5 passes
        1406000.0
    """
    return passes_per_step(config) * num_steps(config, training_examples(config) if examples is None else examples)


def measuring_passes(plan: ReproductionPlan, config: TrainConfig) -> float:
    """Estimate the passes that measuring one run takes, in batches of the training size."""
    batches = plan.num_examples / config.batch_size
    if plan.recipe.kind == "neighborhood":
        return (len(PAPER_STDS) * plan.num_draws + 1) * batches / 3
    if plan.recipe.kind == "eigenvalues":
        return 50 * 2 * batches  # about ten Hessian-vector products of two passes per eigenvalue
    if plan.recipe.kind == "losses":
        # ERM takes a forward pass (1/3), SAM and each of TSAM's samples an ascent and a forward pass (4/3). CIFAR's
        # test set is a fifth of its training set.
        s = COLUMNS["cifar100-resnet18"].num_samples
        return (1 / 3 + (1 + s) * 4 / 3) * 1.2 * training_examples(config) / config.batch_size
    return 0.0


def print_costs(
    plans: Sequence[ReproductionPlan], studies: Sequence[TiltStudy] = (), study_seeds: int = two_tilts.SEEDS
) -> None:
    """Print what each recipe shows, then the runs and passes of recipes, their columns, and studies of two-tilts."""
    width = max(len(plan.recipe.name) for plan in plans)
    for plan in plans:
        print(f"{plan.recipe.name:{width}}  {plan.recipe.description[0]} ({plan.recipe.source})")
    if studies:
        print(f"{two_tilts.NAME:{width}}  tilts over examples, on digits (our own experiment: docs/example-tilt.md)")
    rows = [["name", "runs", "training passes", "measuring passes, about"]]
    for plan in plans:
        rows.append([plan.recipe.name, *_costs(plan)])
        if len(plan.recipe.columns) > 1:
            for column in plan.recipe.columns:
                part = replace(plan, recipe=plan.recipe.select(columns=[column]))
                rows.append([f"  {part.recipe.name}", *_costs(part)])
    seeds, scale = f"{plans[0].seeds}", plans[0].scale
    if studies:
        number = sum(two_tilts.num_runs(study, study_seeds) for study in studies)
        rows.append([two_tilts.NAME, f"{number}", f"{number * two_tilts.PASSES * scale:,.0f}", ""])
        rows += [[f"  {name}", *cells, ""] for name, *cells in two_tilts.cost_rows(studies, study_seeds, scale)]
        seeds += f" ({two_tilts.NAME}: {study_seeds})" if study_seeds != plans[0].seeds else ""
    print_table(f"seeds {seeds}, scale {scale:g}", rows)
    print(
        "\nA pass is a forward and a backward pass over a batch; evaluation is not counted. Recipes share runs: a "
        "finished run is not trained again."
    )


def _costs(plan: ReproductionPlan) -> list[str]:
    """Return the runs, training passes and measuring passes of a plan."""
    configs = list(dict.fromkeys(config for cell in plan.recipe.cells for config in plan.configs(cell)))
    training = math.fsum(map(num_passes, configs))
    measuring = math.fsum(measuring_passes(plan, config) for config in configs)
    return [f"{len(configs)}", f"{training:,.0f}", f"{measuring:,.0f}" if plan.recipe.measured else ""]
