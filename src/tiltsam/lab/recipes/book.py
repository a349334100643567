"""The recipes: one function for every table and figure of the paper's experiments, returning its cells.

Settings are those of :mod:`tiltsam.lab.recipes.settings`, which says what the paper states and what was chosen where it
states nothing; a recipe says so of what is its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tiltsam.lab.config import TrainConfig
from tiltsam.lab.recipes import paper
from tiltsam.lab.recipes.paper import Number
from tiltsam.lab.recipes.settings import COLUMNS, column_config

__all__ = ["RECIPES", "Cell", "Recipe", "RecipeError", "find_recipe", "having"]

METHODS = ("erm", "sam", "esam1", "esam2", "pgn", "rsam", "tsam")
THREE = ("cifar100-resnet18", "dtd-vit", "noisy-resnet18")  # "the three datasets", with their models
FLATNESS = "cifar100-resnet18"  # where the paper measures it

Kind = Literal["scores", "minutes", "curves", "losses", "neighborhood", "eigenvalues"]


class RecipeError(Exception):
    """A recipe that is not there, told in one line."""


@dataclass(frozen=True)
class Cell:
    """One place of a table, or one curve of a figure: what is trained for it, and what the paper has there."""

    column: str
    """Of :data:`tiltsam.lab.recipes.settings.COLUMNS`."""
    row: str
    """As the table names it."""
    config: TrainConfig
    paper: tuple[Number, ...] = ()
    """Of the task's metrics, in their order; empty where only a figure shows it."""
    stopped_early: tuple[Number, ...] = ()
    """What the paper tells of the same run, stopped where it was best on the validation split."""


@dataclass(frozen=True)
class Recipe:
    """A table or figure."""

    name: str
    source: str
    """Its label in the paper."""
    kind: Kind
    """What is compared: final scores, minutes, scores along training, or what is measured on the trained models."""
    cells: tuple[Cell, ...]

    @property
    def about(self) -> list[str]:
        """The docstring of the recipe's function: a line that says what it is, then what was chosen for it."""
        text = inspect.getdoc(RECIPES[self.name.partition("/")[0]]) or ""
        return [" ".join(part.split()) for part in text.split("\n\n")]

    @property
    def columns(self) -> list[str]:
        """The columns, in order."""
        return list(dict.fromkeys(cell.column for cell in self.cells))

    @property
    def methods(self) -> set[str]:
        """The methods that are trained for it."""
        return {cell.config.method for cell in self.cells}

    def only(self, *, columns: Sequence[str] | None = None, methods: Sequence[str] | None = None) -> Recipe:
        """Some of its columns, or some methods.

        Raises:
            RecipeError: None is left, or there is no such column or method.
        """
        for what, wanted, there in (
            ("column", columns, set(self.columns)),
            ("method", methods, self.methods),
        ):
            if odd := [name for name in wanted or () if name not in there]:
                raise RecipeError(f"{self.name} has no {what} {odd[0]!r}: it has {', '.join(sorted(there))}")
        kept = [
            cell
            for cell in self.cells
            if (columns is None or cell.column in columns) and (methods is None or cell.config.method in methods)
        ]
        name = self.name if columns is None else f"{self.name}/{'+'.join(columns)}"
        return replace(self, name=name, cells=tuple(kept))


def find_recipe(name: str) -> Recipe:
    """The recipe of that name, or one column of it: ``images``, ``images/cifar100-resnet18``.

    Raises:
        RecipeError: There is none.

    Example:
        >>> [cell.config.method for cell in find_recipe("images/dtd-vit").cells]
        ['erm', 'sam', 'esam1', 'esam2', 'pgn', 'rsam', 'tsam']
    """
    first, slash, column = name.partition("/")
    if first not in RECIPES:
        raise RecipeError(f"no recipe {name!r}: one of {', '.join(RECIPES)}, or NAME/COLUMN (see: reproduce --list)")
    found = RECIPES[first]()
    return found.only(columns=[column]) if slash else found


def having(recipes: Sequence[Recipe], methods: Sequence[str] | None) -> list[Recipe]:
    """Of recipes those that have any of the methods, with these alone.

    Raises:
        RecipeError: None has one of the methods.
    """
    if methods is None:
        return list(recipes)
    known = {recipe.name: recipe.methods.intersection(methods) for recipe in recipes}
    if odd := [method for method in methods if method not in set().union(*known.values())]:
        raise RecipeError(f"no recipe has a method {odd[0]!r}")
    return [recipe.only(methods=sorted(known[recipe.name])) for recipe in recipes if known[recipe.name]]


def _methods(column: str, methods: Sequence[str], printed: dict[str, tuple[Number, ...]]) -> list[Cell]:
    return [Cell(column, m.upper(), column_config(column, m), printed.get(m, ())) for m in methods]


# ------------------------------------------------------------------------------------------------- the main tables


def images() -> Recipe:
    """Test accuracy on images: four data sets with two models each, seven methods."""
    cells = [cell for column, rows in paper.IMAGES.items() for cell in _methods(column, METHODS, rows)]
    return Recipe("images", "table:main", "scores", tuple(cells))


def glue() -> Recipe:
    """GLUE: DistilBERT on nine tasks, five methods.

    The published development sets are the test sets; MNLI is the matched one. Not stated: all settings but the grids.
    """
    methods = ("erm", "sam", "esam1", "esam2", "tsam")
    cells = [cell for column, rows in paper.GLUE.items() for cell in _methods(column, methods, rows)]
    return Recipe("glue", "table:main", "scores", tuple(cells))


# ------------------------------------------------------------------------------------------------- what TSAM is set to


def samples() -> Recipe:
    """The number of samples s: SAM, and TSAM with 3 and 5."""
    cells = []
    for column, printed in paper.SAMPLES.items():
        cells += _methods(column, ("sam",), printed)
        for s in (3, 5):
            config = column_config(column, "tsam", num_samples=s)
            cells.append(Cell(column, f"TSAM, s={s}", config, printed[f"s={s}"]))
    return Recipe("samples", "table:s", "scores", tuple(cells))


def hmc_steps() -> Recipe:
    """The number N of HMC steps to a sample, s = 3, and N = 1 with s = 5.

    Not stated: momentum, step size and acceptance for N > 1. Chosen: what Algorithm 2 does at N = 1, again: N
    normalised ascents of rho/N each from one random start, all accepted; N+1 passes a sample.
    """
    cells = []
    for column, printed in paper.HMC_STEPS.items():
        for n, s in ((1, 3), (1, 5), (2, 3), (3, 3)):
            config = column_config(column, "tsam", num_samples=s, ascent_steps=n)
            cells.append(Cell(column, f"TSAM, N={n} (s={s})", config, printed[f"{n},{s}"]))
    return Recipe("hmc-steps", "tab:N", "scores", tuple(cells))


def tilt() -> Recipe:
    """The tilt t along training, s = 3: SAM, and TSAM with t of 0, 1, 5, 20, 100.

    A figure; the numbers beside SAM and the best t are those of table:s. The learning rate is the same for every t,
    where the paper tuned it for each.
    """
    cells = []
    for column in THREE:
        printed = paper.SAMPLES[column]
        early = (paper.SAM_EARLY_STOPPED,) if column == "noisy-resnet18" else ()
        cells += [replace(cell, stopped_early=early) for cell in _methods(column, ("sam",), printed)]
        for t in (0.0, 1.0, 5.0, 20.0, 100.0):
            best = t == COLUMNS[column].t
            config = column_config(column, "tsam", t=t, num_samples=3)
            cells.append(Cell(column, f"TSAM, t={t:g}", config, printed["s=3"] if best else ()))
    return Recipe("tilt", "fig:multiple_t", "curves", tuple(cells))


def schedule() -> Recipe:
    """A schedule of t on noisy CIFAR-100: fixed, rising from zero, falling to zero.

    A figure; the number beside the fixed t is that of table:main. Not stated: between which values t moves, and s.
    Chosen: between 0 and 1, the best fixed t, at every step; s = 5, as in the main table.
    """
    column = "noisy-resnet18"
    rows: dict[str, Literal["constant", "up", "down"]] = {"fixed": "constant", "rising": "up", "falling": "down"}
    cells = []
    for row, way in rows.items():
        printed = paper.IMAGES[column]["tsam"] if way == "constant" else ()
        cells.append(Cell(column, f"TSAM, t {row}", column_config(column, "tsam", t_schedule=way), printed))
    return Recipe("schedule", "fig:schedult_t", "curves", tuple(cells))


def naive() -> Recipe:
    """Naive sampling on CIFAR-100, t = 20: perturbations uniform in the ball against Algorithm 2.

    A figure; the number beside Algorithm 2 is that of table:main. Stated: t = 20, and that s went up to 10. Chosen: s
    of 3, 5 and 10, in a ball of radius 20. The paper's formula divides by a sum of exp(L): a misprint for exp(tL).
    """
    column = "cifar100-resnet18"
    cells = [Cell(column, "TSAM, Algorithm 2", column_config(column, "tsam"), paper.IMAGES[column]["tsam"])]
    for s in (3, 5, 10):
        config = column_config(column, "tsam", sampler="uniform", radius=20.0, num_samples=s)
        cells.append(Cell(column, f"TSAM, naive, s={s}", config))
    return Recipe("naive", "fig:compare_random_sampling", "curves", tuple(cells))


# ------------------------------------------------------------------------------------------------- along training


def convergence() -> Recipe:
    """Convergence of ERM, SAM and TSAM on three data sets.

    A figure; the final numbers are those of table:main, and so are the runs.
    """
    cells = [cell for column in THREE for cell in _methods(column, ("erm", "sam", "tsam"), paper.IMAGES[column])]
    return Recipe("convergence", "fig:convergence", "curves", tuple(cells))


def runtime() -> Recipe:
    """Minutes of a run, by method, on three data sets.

    Not stated: the device, and the models: those of table:s are taken. Minutes of other devices compare by their ratio
    to ERM's.
    """
    cells = [cell for column in THREE for cell in _methods(column, METHODS, paper.MINUTES[column])]
    return Recipe("runtime", "table:runtime", "minutes", tuple(cells))


# ------------------------------------------------------------------------------------------------- flatness


def losses() -> Recipe:
    """Losses of models trained by ERM, SAM and TSAM, under the objectives of all three.

    Not stated: the data set and model (CIFAR-100 and ResNet-18, as in the paragraph around it), and on what the
    objectives are evaluated: all training and test examples in batches of 64, without label smoothing or augmentation.
    """
    return Recipe("losses", "table:train_test", "losses", tuple(_methods(FLATNESS, ("erm", "sam", "tsam"), {})))


def sharpness() -> Recipe:
    """Mean and variance of the loss around the minima of ERM, SAM and TSAM, against the noise's std.

    A figure. The std's and the 500 draws are those of the authors' code. Not stated: on how many examples: 5000 of
    training, always the same.
    """
    return Recipe("sharpness", "fig:sharpness", "neighborhood", tuple(_methods(FLATNESS, ("erm", "sam", "tsam"), {})))


def eigenvalues() -> Recipe:
    """The five largest eigenvalues of the Hessian at the minima of ERM, SAM and TSAM.

    Told in the text. Not stated: of which loss, and on how many examples: that of training, without label smoothing, on
    5000 of them, always the same.
    """
    cells = _methods(FLATNESS, ("erm", "sam", "tsam"), paper.EIGENVALUES)
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
"""By the name that ``tiltsam reproduce`` takes."""
