"""The toy figures: files, axes, legends and colours."""

import builtins

import pytest

from tiltsam.lab.errors import UserError
from tiltsam.lab.theory import estimators, figures
from tiltsam.lab.theory.estimators import ESTIMATORS
from tiltsam.lab.theory.figures import COLORS, CONSISTENT, FIGURES, INCONSISTENT


@pytest.fixture
def _few_draws(monkeypatch):
    """Draw the figures from fewer samples."""
    study, draw = estimators.study, estimators.draw_perturbations
    monkeypatch.setattr(estimators, "study", lambda: study((1.0,), (1, 3, 10), num_draws=400))
    monkeypatch.setattr(
        estimators, "draw_perturbations", lambda sampler, delta, num_draws: draw(sampler, delta=delta, num_draws=500)
    )


@pytest.fixture
def saved(monkeypatch):
    """Collect the figures that are saved."""
    from matplotlib.figure import Figure

    found = []
    savefig = Figure.savefig

    def save(self, *args, **kwargs):
        found.append(self)
        savefig(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", save)
    return found


@pytest.mark.usefixtures("_few_draws")
def test_draw_all(tmp_path, saved):
    from matplotlib.image import imread

    paths = figures.draw_all(tmp_path / "new" / "folder")
    assert [p.stem for p in paths] == list(FIGURES)
    for path, fig in zip(paths, saved, strict=True):
        pixels = imread(path)
        assert pixels.shape[1] >= 150 * fig.get_figwidth()  # at least 150 dots per inch
        assert pixels[..., :3].std() > 0.05
        assert fig.get_supxlabel()
        for ax in fig.axes:
            assert ax.lines
            legend = ax.get_legend()
            if legend is not None:  # next to or below the axes, not over the data
                assert not ax.get_window_extent().overlaps(legend.get_window_extent())
    trajectories = saved[0]
    ends = [ax.texts[0].get_text() for ax in trajectories.axes]
    assert ends == [f"θ = {x}" for x in ("0.358", "0.913", "1.445", "2.466", "0.500", "0.421", "0.421", "0.421")]
    assert ["noise" in ax.get_title() and "no noise" not in ax.get_title() for ax in trajectories.axes] == [
        *(False, True, True, True),
        *(False, True, True, True),
    ]
    for ax in trajectories.axes:
        assert [line.get_marker() for line in ax.lines].count("*") == 1


def test_estimators_have_distinct_styles():
    assert sorted((*CONSISTENT, *INCONSISTENT)) == sorted(ESTIMATORS)
    assert set(ESTIMATORS) <= set(COLORS)
    styles = [(COLORS[name], name in figures._DASHED) for name in ESTIMATORS]
    assert len(set(styles)) == len(styles)


def test_draw_all_names_extra_without_matplotlib(monkeypatch, tmp_path):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"pip install '\.\[plots\]'"):
        figures.draw_all(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
