"""The recipes: one function per table or figure of the paper's experiments, which returns its cells.

Settings are those of :mod:`tiltsam.lab.paper.settings`. The docstring of a recipe says what else the paper leaves open
and what is chosen; ``tiltsam reproduce`` prints it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tiltsam.lab.config import TrainConfig, field_types, has_setting, method_options
from tiltsam.lab.errors import ConfigError
from tiltsam.lab.flags import parse_setting
from tiltsam.lab.paper import numbers
from tiltsam.lab.paper.numbers import PaperNumber
from tiltsam.lab.paper.settings import COLUMNS, column_config

__all__ = ["RECIPES", "Recipe", "RecipeCell", "cells_with", "find_recipe", "parse_changes", "select_methods"]

PAPER_METHODS = ("erm", "sam", "esam1", "esam2", "pgn", "rsam", "tsam")
THREE_COLUMNS = ("cifar100-resnet18", "dtd-vit", "noisy-resnet18")  # the paper's "three datasets", with their models
FLATNESS_COLUMN = "cifar100-resnet18"  # the column on which the paper measures flatness
_MEASURED = ("losses", "neighborhood", "eigenvalues")


@dataclass(frozen=True)
class RecipeCell:
    """One cell of a table, or one curve of a figure: the run behind it, and the paper's numbers."""

    column: str
    """A name in :data:`tiltsam.lab.paper.settings.COLUMNS`."""
    row: str
    """Name of the row."""
    config: TrainConfig
    paper: tuple[PaperNumber, ...] = ()
    """One per metric of the task; empty if only a figure shows the result."""
    stopped_early: tuple[PaperNumber, ...] = ()
    """The paper's number for the same run with early stopping on the validation split."""

    @property
    def method(self) -> str:
        """The paper's name of the method, in lower case. ``esam1`` is SAM for the budget of TSAM."""
        return self.row.partition(",")[0].lower()

    def has(self, name: str) -> bool:
        """Return whether the cell has a setting: ``NAME``, or ``METHOD:NAME`` if it is of that method."""
        method, _, setting = name.rpartition(":")
        return method in ("", self.method) and has_setting(self.config.method, setting)

    def value(self, name: str) -> Any:
        """Return the value of a setting that the cell has."""
        setting = name.rpartition(":")[2]
        if setting in field_types():
            return getattr(self.config, setting)
        return self.config.options.get(setting, method_options(self.config.method)[setting].default)


@dataclass(frozen=True)
class Recipe:
    """A table or figure of the paper."""

    name: str
    source: str
    """Label in the paper."""
    kind: Literal["scores", "minutes", "curves", "losses", "neighborhood", "eigenvalues"]
    """What is compared: final scores, minutes, scores during training, or measurements of the trained models."""
    cells: tuple[RecipeCell, ...]

    @property
    def description(self) -> list[str]:
        """Paragraphs: the first says what the recipe shows, the others what is chosen for it."""
        text = inspect.getdoc(RECIPES[self.name.partition("/")[0]]) or ""
        return [" ".join(part.split()) for part in text.split("\n\n")]

    @property
    def columns(self) -> list[str]:
        """The columns, in order."""
        return list(dict.fromkeys(cell.column for cell in self.cells))

    @property
    def methods(self) -> set[str]:
        """The paper's names of the methods to train."""
        return {cell.method for cell in self.cells}

    @property
    def measured(self) -> bool:
        """Whether the trained models are measured, seed by seed."""
        return self.kind in _MEASURED

    def select(self, *, columns: Sequence[str] | None = None, methods: Sequence[str] | None = None) -> Recipe:
        """Return the recipe restricted to some columns or methods.

        Raises:
            ConfigError: If the recipe has no such column or method.
        """
        for what, wanted, known in (("column", columns, set(self.columns)), ("method", methods, self.methods)):
            if unknown := [name for name in wanted or () if name not in known]:
                raise ConfigError(f"{self.name} has no {what} {unknown[0]!r}; choose from {', '.join(sorted(known))}")
        selected = [
            cell
            for cell in self.cells
            if (columns is None or cell.column in columns) and (methods is None or cell.method in methods)
        ]
        name = self.name if columns is None else f"{self.name}/{'+'.join(columns)}"
        return replace(self, name=name, cells=tuple(selected))


def find_recipe(name: str) -> Recipe:
    """Return a recipe, or one column of it: ``images``, ``images/cifar100-resnet18``.

    Raises:
        ConfigError: If there is no such recipe or column.

    Example:
        >>> [cell.method for cell in find_recipe("images/dtd-vit").cells]
        ['erm', 'sam', 'esam1', 'esam2', 'pgn', 'rsam', 'tsam']
    """
    first, slash, column = name.partition("/")
    if first not in RECIPES:
        raise ConfigError(f"no recipe {name!r}; choose from {', '.join(RECIPES)}, or pass NAME/COLUMN (see --list)")
    recipe = RECIPES[first]()
    return recipe.select(columns=[column]) if slash else recipe


def select_methods(recipes: Sequence[Recipe], methods: Sequence[str] | None) -> list[Recipe]:
    """Return the recipes that use any of the methods, restricted to those methods; ``None`` selects all.

    Raises:
        ConfigError: If no recipe uses one of the methods.
    """
    if methods is None:
        return list(recipes)
    if unknown := [method for method in methods if not any(method in recipe.methods for recipe in recipes)]:
        raise ConfigError(f"no recipe has a method {unknown[0]!r}")
    selected = [(recipe, sorted(recipe.methods.intersection(methods))) for recipe in recipes]
    return [recipe.select(methods=names) for recipe, names in selected if names]


def cells_with(recipes: Sequence[Recipe], name: str) -> list[RecipeCell]:
    """Return the cells that have a setting: ``NAME``, or ``METHOD:NAME`` for those of one method.

    Raises:
        ConfigError: If there are none.
    """
    cells = [cell for recipe in recipes for cell in recipe.cells if cell.has(name)]
    if not cells:
        names = ", ".join(recipe.name for recipe in recipes)
        methods = ", ".join(sorted({method for recipe in recipes for method in recipe.methods}))
        raise ConfigError(f"--set: no cell of {names} has {name!r}; methods: {methods}")
    return cells


def parse_changes(texts: Sequence[str], recipes: Sequence[Recipe]) -> dict[str, Any]:
    """Parse ``NAME=VALUE`` and ``METHOD:NAME=VALUE``, with the paper's name of the method.

    Raises:
        ConfigError: If the syntax is wrong, a name is given twice, or no cell of the recipes has it.

    Example:
        >>> parse_changes(["batch-size=128", "tsam:rho=0.2"], [find_recipe("samples")])
        {'batch_size': 128, 'tsam:rho': 0.2}
    """
    changes: dict[str, Any] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        name = name.replace("-", "_")
        if not equals:
            raise ConfigError(f"--set must be NAME=VALUE or METHOD:NAME=VALUE, got {text!r}")
        if name in changes:
            raise ConfigError(f"--set: {name} must be given once")
        method = cells_with(recipes, name)[0].config.method
        try:
            changes[name] = parse_setting(name.rpartition(":")[2], value, method)
        except ConfigError as error:
            raise ConfigError(f"--set {name}: {error}") from None
    return changes


def _cells(
    column: str, methods: Sequence[str], printed: dict[str, tuple[PaperNumber, ...]] | None = None
) -> list[RecipeCell]:
    """Return one cell per method, with the settings of the paper."""
    return [RecipeCell(column, m.upper(), column_config(column, m), (printed or {}).get(m, ())) for m in methods]


# ------------------------------------------------------------------------------------------------- the main tables


def images() -> Recipe:
    """Test accuracy on images: four data sets with two models each, seven methods."""
    cells = [cell for column, rows in numbers.IMAGES.items() for cell in _cells(column, PAPER_METHODS, rows)]
    return Recipe("images", "table:main", "scores", tuple(cells))


def glue() -> Recipe:
    """GLUE: DistilBERT on nine tasks, five methods.

    The published development sets serve as test sets; MNLI is the matched one. Not stated: all settings except the
    grids.
    """
    methods = ("erm", "sam", "esam1", "esam2", "tsam")
    cells = [cell for column, rows in numbers.GLUE.items() for cell in _cells(column, methods, rows)]
    return Recipe("glue", "table:main", "scores", tuple(cells))


# ------------------------------------------------------------------------------------------------- settings of TSAM


def samples() -> Recipe:
    """The number of samples s: SAM, and TSAM with 1, 3 and 5.

    The paper has no s = 1: that row is ours.
    """
    cells = []
    for column, printed in numbers.SAMPLES.items():
        cells += _cells(column, ("sam",), printed)
        for s in (1, 3, 5):
            config = column_config(column, "tsam", num_samples=s)
            cells.append(RecipeCell(column, f"TSAM, s={s}", config, printed.get(f"s={s}", ())))
    return Recipe("samples", "table:s", "scores", tuple(cells))


def hmc_steps() -> Recipe:
    """The number N of HMC steps per sample with s = 3, and N = 1 with s = 5.

    Not stated: momentum, step size and acceptance for N > 1. Chosen: repeat what Algorithm 2 does for N = 1, that is N
    normalised ascents of rho/N each from one random start, all accepted. A sample takes N+1 passes.
    """
    cells = []
    for column, printed in numbers.HMC_STEPS.items():
        for n, s in ((1, 3), (1, 5), (2, 3), (3, 3)):
            config = column_config(column, "tsam", num_samples=s, ascent_steps=n)
            cells.append(RecipeCell(column, f"TSAM, N={n} (s={s})", config, printed[f"{n},{s}"]))
    return Recipe("hmc-steps", "tab:N", "scores", tuple(cells))


def tilt() -> Recipe:
    """The tilt t during training, s = 3: SAM, and TSAM with t of 0, 1, 5, 20, 100.

    A figure; the numbers next to SAM and the best t are those of table:s. All t use the same learning rate; the paper
    tuned it for each.
    """
    cells = []
    for column in THREE_COLUMNS:
        printed = numbers.SAMPLES[column]
        early = (numbers.SAM_EARLY_STOPPED,) if column == "noisy-resnet18" else ()
        cells += [replace(cell, stopped_early=early) for cell in _cells(column, ("sam",), printed)]
        for t in (0.0, 1.0, 5.0, 20.0, 100.0):
            best = t == COLUMNS[column].t
            config = column_config(column, "tsam", t=t, num_samples=3)
            cells.append(RecipeCell(column, f"TSAM, t={t:g}", config, printed["s=3"] if best else ()))
    return Recipe("tilt", "fig:multiple_t", "curves", tuple(cells))


def schedule() -> Recipe:
    """A schedule of t on noisy CIFAR-100: fixed, rising from zero, falling to zero.

    A figure; the number next to the fixed t is that of table:main. Not stated: the range of t, and s. Chosen: t between
    0 and 1, the best fixed t, updated at every step; s = 5, as in the main table.
    """
    column = "noisy-resnet18"
    rows: dict[str, Literal["constant", "up", "down"]] = {"fixed": "constant", "rising": "up", "falling": "down"}
    cells = []
    for row, direction in rows.items():
        printed = numbers.IMAGES[column]["tsam"] if direction == "constant" else ()
        config = column_config(column, "tsam", t_schedule=direction)
        cells.append(RecipeCell(column, f"TSAM, t {row}", config, printed))
    return Recipe("schedule", "fig:schedult_t", "curves", tuple(cells))


def naive() -> Recipe:
    """Naive sampling on CIFAR-100, t = 20: perturbations uniform in a ball, compared with Algorithm 2.

    A figure; the number next to Algorithm 2 is that of table:main. Stated: t = 20, and s up to 10. Chosen: s of 3, 5
    and 10, in a ball of radius 20. The paper's formula divides by a sum of exp(L), a misprint for exp(tL).
    """
    column = "cifar100-resnet18"
    cells = [RecipeCell(column, "TSAM, Algorithm 2", column_config(column, "tsam"), numbers.IMAGES[column]["tsam"])]
    for s in (3, 5, 10):
        config = column_config(column, "tsam", sampler="uniform", radius=20.0, num_samples=s)
        cells.append(RecipeCell(column, f"TSAM, naive, s={s}", config))
    return Recipe("naive", "fig:compare_random_sampling", "curves", tuple(cells))


# ------------------------------------------------------------------------------------------------- during training


def convergence() -> Recipe:
    """Convergence of ERM, SAM and TSAM on three data sets.

    A figure; the final numbers are those of table:main, and the runs are shared with it.
    """
    cells = [
        cell for column in THREE_COLUMNS for cell in _cells(column, ("erm", "sam", "tsam"), numbers.IMAGES[column])
    ]
    return Recipe("convergence", "fig:convergence", "curves", tuple(cells))


def runtime() -> Recipe:
    """Minutes per run of each method on three data sets.

    Not stated: the device and the models. Chosen: the models of table:s. Compare minutes on another device by their
    ratio to ERM.
    """
    cells = [cell for column in THREE_COLUMNS for cell in _cells(column, PAPER_METHODS, numbers.MINUTES[column])]
    return Recipe("runtime", "table:runtime", "minutes", tuple(cells))


# ------------------------------------------------------------------------------------------------- flatness


def losses() -> Recipe:
    """Losses of models trained by ERM, SAM and TSAM, under the objectives of all three.

    Not stated: the data set, the model, and the examples. Chosen: CIFAR-100 and ResNet-18, as in the paragraph around
    the table; all training and test examples in batches of 64, without label smoothing or augmentation.
    """
    return Recipe("losses", "table:train_test", "losses", tuple(_cells(FLATNESS_COLUMN, ("erm", "sam", "tsam"))))


def sharpness() -> Recipe:
    """Mean and variance of the loss around the minima of ERM, SAM and TSAM, by the standard deviation of the noise.

    A figure. The standard deviations and the 500 draws are those of the authors' code. Not stated: the number of
    examples. Chosen: 5000 training examples, the same for all models.
    """
    return Recipe("sharpness", "fig:sharpness", "neighborhood", tuple(_cells(FLATNESS_COLUMN, ("erm", "sam", "tsam"))))


def eigenvalues() -> Recipe:
    """The five largest eigenvalues of the Hessian at the minima of ERM, SAM and TSAM.

    Printed in the text. Not stated: which loss, and on how many examples. Chosen: the training loss without label
    smoothing, on 5000 training examples, the same for all models.
    """
    cells = _cells(FLATNESS_COLUMN, ("erm", "sam", "tsam"), numbers.EIGENVALUES)
    return Recipe("eigenvalues", "sec:experiments:sharpness", "eigenvalues", tuple(cells))


RECIPES: dict[str, Callable[[], Recipe]] = {
    "images": images,
    "glue": glue,
    "samples": samples,
    "hmc-steps": hmc_steps,
    "tilt": tilt,
    "schedule": schedule,
    "naive": naive,
    "convergence": convergence,
    "runtime": runtime,
    "losses": losses,
    "sharpness": sharpness,
    "eigenvalues": eigenvalues,
}
"""Recipes by the name that ``tiltsam reproduce`` takes."""
