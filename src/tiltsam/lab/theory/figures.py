"""The paper's toy figures, drawn from exact objectives. Needs matplotlib (``pip install '.[plots]'``).

    >>> from tiltsam.lab.theory.figures import draw_all
    >>> draw_all("figures")  # doctest: +SKIP

Each method has one colour in all figures, together with a second cue: line style, shade or marker.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tiltsam import toys
from tiltsam.lab.errors import UserError
from tiltsam.lab.palette import OKABE_ITO
from tiltsam.lab.theory import estimators
from tiltsam.samplers import HMC
from tiltsam.toys import HMC_TEST, TOY1, TOY2, Ball, Noise, Normal

__all__ = ["FIGURES", "draw_all"]

_BLUE, _VERMILION, _GREEN, _PURPLE, _ORANGE, _SKY, _BLACK, _ = OKABE_ITO
_GREY = "#888888"
_PALE = "#EBEBEB"
COLORS = {
    "ERM": _BLUE,
    "SAM": _VERMILION,
    "TSAM": _GREEN,
    "uniform": _BLUE,
    "Gaussian": _SKY,
    "Algorithm 2, δ = t/2": _VERMILION,
    "Algorithm 2, δ = 0": _VERMILION,
    "HMC leapfrog": _GREEN,
    "HMC leapfrog, 1 proposal": _GREEN,
    "HMC Euler, corrected": _ORANGE,
    "HMC Euler, as printed": _PURPLE,
}
CONSISTENT = ("uniform", "Gaussian", "HMC leapfrog", "HMC Euler, corrected")
INCONSISTENT = ("Algorithm 2, δ = t/2", "Algorithm 2, δ = 0", "HMC Euler, as printed", "HMC leapfrog, 1 proposal")
_DASHED = ("Algorithm 2, δ = 0", "HMC leapfrog, 1 proposal")
_DPI = 160


def draw_all(out_dir: str | Path, qualities: Sequence[estimators.Quality] | None = None) -> list[Path]:
    """Write every figure of :data:`FIGURES` as a PNG into a folder. Takes about half a minute on one core.

    Args:
        out_dir: The folder, created if it does not exist.
        qualities: The result of :func:`tiltsam.lab.theory.estimators.study`; measured if not given.

    Raises:
        UserError: If matplotlib is missing.
    """
    _matplotlib()
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    draws = FIGURES | {"estimators": partial(estimator_errors, qualities=qualities)}
    return [draw(folder / f"{name}.png") for name, draw in draws.items()]


def toy1_trajectories(path: Path) -> Path:
    """Draw figure 1: gradient flow on toy 1 from .5, for ERM, SAM, and TSAM with Gaussian and with uniform noise."""
    fig = _figure(12.5, 6.2)
    axes = fig.subplots(2, 4, sharex=True, sharey=True)
    theta = torch.linspace(TOY1.lo, TOY1.hi, 800, dtype=torch.float64)
    noises: tuple[Noise, Noise] = (Normal(0.2), Ball(0.2))
    baselines: tuple[tuple[str, str, Callable[[Tensor], Tensor]], ...] = (
        ("ERM: no noise", "ERM", lambda x: toys.erm(TOY1, x).grad),
        ("SAM: maximum within .2, no noise", "SAM", lambda x: toys.sam(TOY1, x, 0.2).grad),
    )
    for row, (noise, (title, method, grad)) in enumerate(zip(noises, baselines, strict=True)):
        name = "Gaussian" if isinstance(noise, Normal) else "uniform"
        panels = [(title, grad, method)]
        panels += [(f"TSAM, {name} noise, t = {t}", _tsam_grad(t, noise), "TSAM") for t in (0, 1, 5)]
        for ax, (title, grad, method) in zip(axes[row], panels, strict=True):
            flow = toys.flow(grad, 0.5, TOY1.lo, TOY1.hi, 101)
            ax.plot(theta, TOY1.loss(theta), color=_GREY, lw=1.2)
            ax.plot(flow.theta, TOY1.loss(flow.theta), color=COLORS[method], lw=2.6, solid_capstyle="round")
            ax.plot(0.5, TOY1.loss(torch.tensor(0.5)), "o", color=COLORS[method], ms=6)
            end = torch.tensor(flow.end)
            ax.plot(end, TOY1.loss(end), "*", color=COLORS[method], ms=17, mec="white", mew=0.8)
            ax.set_title(title, fontsize=10.5, color=COLORS[method])
            ax.annotate(f"θ = {flow.end:.3f}", (0.96, 0.95), xycoords="axes fraction", ha="right", va="top")
    for ax in axes[:, 0]:
        ax.set_ylabel("loss L(θ)")
    for ax in axes[1]:
        ax.set_xlabel("θ")
    return _save(
        fig,
        path,
        "Gradient flow from θ = .5 (dot) to its end (star), drawn on the loss. Gaussian noise has a standard deviation "
        "of .2: the end moves to flatter minima as t grows, as in the paper's figure 1. Uniform noise is on [−.2, .2]: "
        "the stationary points solve L(θ+ρ) = L(θ−ρ) for every t, and TSAM ends at .421. SAM does not move: the "
        "maximum around .5 is the peak at .615, also for all θ nearby, so the objective is flat there.",
    )


def toy2_losses(path: Path) -> Path:
    """Draw the figures of appendix A: SAM and TSAM objectives of toy 2 as rho grows, with their global minima."""
    fig = _figure(11.5, 4.9)
    axes = fig.subplots(1, 2, sharey=True)
    theta = torch.linspace(-0.2, 4.2, 1101, dtype=torch.float64)
    rhos = (0.05, 0.1, 0.2, 0.4, 0.8)
    objectives: dict[str, Callable[[Tensor, float], Tensor]] = {
        "SAM": lambda x, rho: toys.sam(TOY2, x, rho).value,
        "TSAM": lambda x, rho: toys.tsam(TOY2, x, 0.01, Ball(rho)).value,
    }
    for ax, (method, objective) in zip(axes, objectives.items(), strict=True):
        ax.plot(theta, TOY2.loss(theta), color=_BLACK, lw=1.4, ls="--", label="ρ = 0 (the loss)")
        for k, rho in enumerate(rhos):
            shade = COLORS[method], 0.35 + 0.65 * k / (len(rhos) - 1)  # with its opacity
            value = objective(theta, rho)
            best = value.argmin()
            ax.plot(theta, value, color=shade, lw=1.8, label=f"ρ = {rho:g}")
            ax.plot(theta[best], value[best], "*", color=shade, ms=14, mec=_BLACK, mew=0.6, zorder=5)
        ax.plot(1.0, -0.01, "*", color="white", ms=14, mec=_BLACK, mew=0.8, zorder=5)
        ax.set_title(method if method == "SAM" else "TSAM, t = .01, uniform noise", fontsize=11)
        ax.set_xlabel("θ")
        ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
    axes[0].set_ylim(-0.15, 2.2)
    axes[0].set_ylabel("objective")
    return _save(
        fig,
        path,
        "Toy 2: a sharp minimum at 1 (loss −.01) and a flat one at 3 (loss 0); stars mark global minima, the white "
        "star that of the loss. The minimum of SAM moves to 3 at ρ = .0101, that of TSAM at ρ = .0203. SAM has kinks "
        "at its minima, TSAM has none.",
    )


def tilt_curves(path: Path) -> Path:
    """Draw the TSAM objective against t at the minima of toy 1, from the mean to the maximum, and where they cross."""
    fig = _figure(8.6, 4.8)
    ax = fig.subplots()
    tilts = torch.logspace(-2, 3.5, 45).tolist()
    points = toys.stationary_points(_tsam_grad(1.0, Ball(0.2)), 0.4, 2.3)[::2]
    values = torch.stack([toys.tsam(TOY1, points, t, Ball(0.2)).value for t in tilts])
    mean, top = toys.tsam(TOY1, points, 0.0, Ball(0.2)).value, toys.sam(TOY1, points, 0.2).value
    for k, point in enumerate(points.tolist()):
        style = {"color": (_BLUE, _VERMILION, _GREEN, _PURPLE)[k], "ls": ("-", "--", "-.", (0, (1, 1)))[k]}
        ax.plot(tilts, values[:, k], lw=2, label=f"θ = {point:.4f}", **style)
        ax.plot(tilts[0] * 0.8, mean[k], "o", color=style["color"], ms=5, clip_on=False)
        ax.plot(tilts[-1] * 1.25, top[k], "^", color=style["color"], ms=6, clip_on=False)
    for t in (0.469, 0.776, 1.167):
        ax.axvline(t, color=_GREY, lw=0.8, zorder=0)
    ax.set_xscale("log")
    ax.set_xlabel("t")
    ax.set_ylabel("Lᵗ(θ)")
    ax.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, title="minimum")
    return _save(
        fig,
        path,
        "Toy 1, uniform noise, ρ = .2: at each of the four minima Lᵗ grows with t, from the mean loss over the ball "
        "(dots) to SAM's maximum (triangles). The lowest minimum changes at t = .469, .776 and 1.167 (grey lines): the "
        "global minimiser jumps to flatter minima.",
    )


def minimiser_jumps(path: Path) -> Path:
    """Draw the minimiser of toy 1 as a function of t."""
    fig = _figure(7.6, 4.6)
    ax = fig.subplots()
    tilts = torch.linspace(0, 2, 401).tolist()
    points = toys.stationary_points(_tsam_grad(1.0, Ball(0.2)), 0.4, 2.3)[::2]
    lowest = [float(points[toys.tsam(TOY1, points, t, Ball(0.2)).value.argmin()]) for t in tilts]
    ax.step(tilts, lowest, where="mid", color=COLORS["uniform"], lw=2.2, label="uniform: global minimiser on [.4, 2.3]")
    some = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 1.75, 2.0]
    ends = [toys.flow(_tsam_grad(t, Normal(0.2)), 0.5, TOY1.lo, TOY1.hi, 51).end for t in some]
    ax.plot(some, ends, "D", color=COLORS["Gaussian"], ms=6, label="Gaussian: end of the flow from .5")
    ax.set_yticks(TOY1.minima[:4])
    ax.set_yticklabels([f"{x:.4f}" for x in TOY1.minima[:4]])
    ax.grid(axis="y", color=_PALE)
    ax.set_axisbelow(True)
    ax.set_xlabel("t")
    ax.set_ylabel("θ (ticks: minima of the loss)")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False, ncols=2, fontsize=9)
    return _save(
        fig,
        path,
        "Toy 1. Line: the global minimiser under uniform noise on [−.2, .2]; it jumps to flatter minima at t = .469, "
        ".776 and 1.167. Diamonds: where gradient flow from .5 ends under Gaussian noise of standard deviation .2.",
    )


def hmc_density(path: Path) -> Path:
    """Draw histograms of the HMC samplers and the exact density; the bias of the printed scheme is visible."""
    fig = _figure(12, 4.6)
    axes = fig.subplots(1, 3, sharey=True)
    names = {"leapfrog": "HMC leapfrog", "euler-corrected": "HMC Euler, corrected", "euler": "HMC Euler, as printed"}
    eps, exact, _ = estimators.exact_density(HMC_TEST, 1.0)
    twice = estimators.exact_density(HMC_TEST, 2.0)[1]
    for ax, (integrator, name) in zip(axes, names.items(), strict=True):
        sampler = HMC(1, 0.5, 1.0, integrator, "reflect", 30)  # type: ignore[arg-type]
        draws = estimators.draw_perturbations(sampler, delta=1.0, num_draws=60_000)
        color = COLORS[name]
        ax.hist(draws.numpy(), bins=40, range=(-1, 1), density=True, color=(color, 0.55), label="draws")
        ax.plot(eps, exact, color=_BLACK, lw=2, label="exact, exp(δL)")
        ax.plot(eps, twice, color=_BLACK, lw=1.2, ls="--", label="exp(2δL)")
        distance = estimators.ks_distance(draws, HMC_TEST, 1.0)
        ax.set_title(f"{name}\nKolmogorov–Smirnov distance {distance:.4f}", fontsize=10)
        ax.set_xlabel("ε")
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), frameon=False, ncols=3, fontsize=8.5)
    axes[0].set_ylabel("density")
    return _save(
        fig,
        path,
        "L(ε) = cos 2ε + .8ε on [−1, 1], δ = σ = 1, N = 1, β = .5, 60 000 chains of 30 proposals. Leapfrog and the "
        "corrected Euler scheme follow exp(δL); the scheme as printed does not, and tends to exp(2δL) as β → 0.",
    )


def estimator_errors(path: Path, qualities: Sequence[estimators.Quality] | None = None) -> Path:
    """Draw the bias of every estimator against the number of samples, for each tilt; consistent ones on top."""
    if qualities is None:
        qualities = estimators.study()
    tilts = sorted({q.t for q in qualities})
    fig = _figure(12.5, 7.2)
    axes = fig.subplots(2, len(tilts), sharex=True, sharey=True, squeeze=False)
    for column, t in enumerate(tilts):
        at_tilt = [q for q in qualities if q.t == t]
        two_errors = sorted(2 * q.bias_error for q in at_tilt)[len(at_tilt) // 2]
        for row, names in enumerate((CONSISTENT, INCONSISTENT)):
            ax = axes[row, column]
            ax.axhspan(-two_errors, two_errors, color=_PALE, zorder=0)
            ax.axhline(0, color=_GREY, lw=0.8, zorder=0)
            for name in names:
                points = [q for q in at_tilt if q.name == name]
                s, bias = [q.num_samples for q in points], [q.bias for q in points]
                style: dict[str, Any] = {"color": COLORS[name], "ls": "--" if name in _DASHED else "-"}
                ax.plot(s, bias, marker="o", lw=1.8, ms=4, label=name, **style)
            ax.set_xscale("log")
            # Linear up to .03 and logarithmic beyond, so that a bias which stays at .03 is as visible as one of 1.
            ax.set_yscale("symlog", linthresh=0.03, linscale=0.6)
            ax.set_yticks([-1, -0.1, 0, 0.1, 1], ["−1", "−.1", "0", ".1", "1"])
            ax.set_yticks([], minor=True)
            ax.set_ylim(-2, 2)
        axes[0, column].set_title(f"t = {t:g} (exact gradient {at_tilt[0].exact:.3f})", fontsize=11)
        axes[1, column].set_xlabel("number of samples s")
    for row, label in enumerate(("consistent", "not consistent")):
        axes[row, 0].set_ylabel("bias")
        axes[row, -1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, fontsize=9, title=label)
    return _save(
        fig,
        path,
        "Estimates of the gradient of Lᵗ by Algorithm 1 with the library's samplers; L = cos 2θ + .8θ at θ = −1, noise "
        "on [−1, 1] (Gaussian: std .5). A bias in the grey band is within about two standard errors of 0; the axis is "
        "logarithmic beyond ±.03. Top: the bias tends to 0 once s is large enough to include the rare draws that carry "
        "the weight; at t = 20 no Gaussian draw is among these, and the bias only changes its sign between s = 30 and "
        "100. Bottom: a bias that no s removes; that of Algorithm 2 with δ = 0 is visible at t = 1.",
    )


FIGURES: dict[str, Callable[[Path], Path]] = {
    "toy1_trajectories": toy1_trajectories,
    "toy2_losses": toy2_losses,
    "tilt_curves": tilt_curves,
    "minimiser_jumps": minimiser_jumps,
    "hmc_density": hmc_density,
    "estimators": estimator_errors,
}
"""All figures by file name; each function writes to a path and returns it."""


def _tsam_grad(t: float, noise: Noise) -> Callable[[Tensor], Tensor]:
    return lambda x: toys.tsam(TOY1, x, t, noise).grad


def _matplotlib() -> Any:
    try:
        import matplotlib.figure
    except ModuleNotFoundError as error:
        raise UserError("figures need matplotlib: pip install '.[plots]'") from error
    return matplotlib


def _figure(width: float, height: float) -> Any:
    """Create a figure without pyplot's global state, so that it works with any backend and thread."""
    return _matplotlib().figure.Figure(figsize=(width, height), layout="constrained")


def _save(fig: Any, path: Path, caption: str) -> Path:
    for ax in fig.axes:
        ax.spines[["top", "right"]].set_visible(False)
    columns = int(fig.get_figwidth() * 12.5)
    fig.supxlabel(textwrap.fill(caption, columns), fontsize=9.5, x=0.02, ha="left")
    fig.savefig(path, dpi=_DPI)
    return path
