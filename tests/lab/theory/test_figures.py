"""The figures are drawn, on every one of its axes something is seen, and legends keep off the data."""

import builtins

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from tiltsam.lab.theory import estimators
from tiltsam.lab.theory import figures as toy_figures
from tiltsam.lab.theory.estimators import ESTIMATORS
from tiltsam.lab.theory.figures import COLORS, FIGURES


@pytest.fixture
def _quick(monkeypatch):
    """The same figures from fewer draws."""
    study, draw = estimators.study, estimators.draw_perturbations
    monkeypatch.setattr(estimators, "study", lambda: study((1.0,), (1, 3, 10), num_draws=400))
    monkeypatch.setattr(
        estimators, "draw_perturbations", lambda sampler, delta, num_draws: draw(sampler, delta=delta, num_draws=500)
    )


@pytest.fixture
def kept(monkeypatch):
    """The figures as they are at the moment they are saved."""
    figures = []
    save = Figure.savefig

    def keep(self, *args, **kwargs):
        figures.append(self)
        save(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


@pytest.mark.usefixtures("_quick")
def test_draw_all(tmp_path, kept):
    paths = toy_figures.draw_all(tmp_path / "new" / "folder")
    assert [p.stem for p in paths] == list(FIGURES)
    for path, fig in zip(paths, kept, strict=True):
        pixels = imread(path)
        assert pixels.shape[1] >= 150 * fig.get_figwidth()  # at least 150 dots an inch
        assert pixels[..., :3].std() > 0.05
        assert fig.get_supxlabel()
        for ax in fig.axes:
            assert ax.lines
            legend = ax.get_legend()
            if legend is not None:  # beside or below the axes, never over the data
                assert not ax.get_window_extent().overlaps(legend.get_window_extent())
    trajectories = kept[0]
    assert "Gaussian noise: the end moves to flatter" in " ".join(trajectories.get_supxlabel().split())
    ends = [ax.texts[0].get_text() for ax in trajectories.axes]
    assert ends == [f"θ = {x}" for x in ("0.358", "0.913", "1.445", "2.466", "0.500", "0.421", "0.421", "0.421")]
    for ax in trajectories.axes:
        assert [line.get_marker() for line in ax.lines].count("*") == 1


def test_every_estimator_has_a_colour_and_looks_different():
    assert set(ESTIMATORS) <= set(COLORS)
    looks = [(COLORS[name], name in toy_figures._DASHED) for name in ESTIMATORS]
    assert len(set(looks)) == len(looks)


def test_without_matplotlib_the_extra_is_named(monkeypatch, tmp_path):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install tiltsam\[plots\]"):
        toy_figures.draw_all(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
