"""The paper's statements about the toy problems and the theory, each next to what was found.

>>> from tiltsam.lab.theory import findings
>>> print(findings.render(findings.table()))  # doctest: +SKIP
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from tiltsam.lab.theory import statements
from tiltsam.toys import (
    COUNTEREXAMPLE,
    HMC_TEST,
    TOY1,
    TOY2,
    WAVE,
    Ball,
    Noise,
    Normal,
    Path,
    descend,
    erm,
    flow,
    jumps,
    lemma_derivatives,
    linear,
    minimise,
    quadratic,
    sam,
    stationary_points,
    tsam,
)

__all__ = ["Finding", "render", "table"]


class Finding(NamedTuple):
    """A statement of the paper, what was found, and whether the two agree."""

    topic: str
    paper: str
    found: str
    agrees: bool


def table() -> list[Finding]:
    """Check every statement, in the order of the paper. Takes about ten seconds on one core."""
    return [*_toy1(), *_toy2(), *_objective(), *_theorems()]


def render(findings: Sequence[Finding]) -> str:
    """Return the findings as text: topic, whether paper and numbers agree, what the paper states, what was found."""
    lines = []
    for finding in findings:
        lines.append(f"[{'agrees' if finding.agrees else 'DIFFERS'}] {finding.topic}")
        for label, text in (("paper", finding.paper), ("found", finding.found)):
            indent = f"    {label}:  "
            lines += textwrap.wrap(text, 110, initial_indent=indent, subsequent_indent=" " * len(indent))
    return "\n".join(lines)


def _toy1() -> Iterator[Finding]:
    loss = erm(TOY1, torch.tensor(TOY1.minima))
    flatter = bool((loss.hess.diff() < 0).all() and (loss.value.diff() > 0).all())
    yield Finding(
        "toy 1: minima",
        "minima get flatter from left to right, at a higher loss",
        f"theta {_list(TOY1.minima)}, L {_list(loss.value, 3)}, L'' {_list(loss.hess, 0)}",
        flatter,
    )

    def slope(x: torch.Tensor) -> torch.Tensor:
        return erm(TOY1, x).grad

    fixed, small = descend(slope, 0.5, 0.005, 300), descend(slope, 0.5, 0.002, 300)
    low, high = sorted(fixed.theta[-2:].tolist())
    yield Finding(
        "toy 1: ERM by gradient descent",
        "learning rate .005 converges to a sharp minimum",
        f"at .005 it cycles between {low:.4f} and {high:.4f} (.005 L'' > 2); at .002 it converges to {small.end:.4f}",
        fixed.converged,
    )
    ends = [_flow_from_start(t, Ball(0.2)).end for t in (0.0, 1.0, 5.0)]
    minima = stationary_points(lambda x: tsam(TOY1, x, 1.0, Ball(0.2)).grad, 0.4, 2.3)[::2]
    yield Finding(
        "toy 1: TSAM, uniform noise on [-.2, .2]",
        "descent from .5 reaches flatter minima as t grows (figure 1)",
        f"stationary points solve L(theta + rho) = L(theta - rho) for every t (minima {_list(minima)}); "
        f"from .5 the flow ends at {_list(ends)} for t = 0, 1, 5",
        len({round(end, 3) for end in ends}) > 1,
    )
    paths = [_flow_from_start(t, Normal(0.2)) for t in (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)]
    ends = [path.end for path in paths if path.converged]
    yield Finding(
        "toy 1: TSAM, Gaussian noise of std .2",
        "descent from .5 reaches flatter minima as t grows (figure 1)",
        f"the flow ends at {_list(ends)} for t = 0, .5, 1, 2, 5 and leaves (.2, 2.5) at t = 10: "
        "this reading matches the figure",
        ends == sorted(ends) and len(ends) == 5,
    )
    moves = jumps(
        lambda t: minimise(lambda x: tsam(TOY1, x, t, Ball(0.2)).value, 0.4, 2.3, 41, 3).theta, 0.3, 1.3, 6, tol=2e-4
    )
    yield Finding(
        "toy 1: global minimiser, uniform noise",
        "TSAM favours flat minima as t increases",
        f"on [.4, 2.3]: {moves[0][1]:.4f}, " + ", ".join(f"{after:.4f} from t = {t:.3f}" for t, _, after in moves),
        all(after > before for _, before, after in moves),
    )


def _toy2() -> Iterator[Finding]:
    ((worst, _, _),) = jumps(lambda rho: minimise(lambda x: sam(TOY2, x, rho).value, 0, 4).theta, 0.001, 0.8)
    yield Finding(
        "toy 2: SAM",
        "for rho > 0 the global minimum is at the flat region",
        f"it moves from 1 to 3 at rho = {worst:.4f} = (1 - sqrt(.96))/2; below that rho it is at the sharp minimum",
        False,
    )

    def minimiser(rho: float) -> float:
        return minimise(lambda x: tsam(TOY2, x, 0.01, Ball(rho)).value, 0, 4, 41).theta

    ((soft, _, _),) = jumps(minimiser, 0.005, 0.1, 4, tol=1e-5)
    values = [float(tsam(TOY2, 3.0, 0.01, Ball(rho)).value) for rho in (0.1, 0.8)]
    yield Finding(
        "toy 2: TSAM, t = .01",
        "with a small t it finds flat solutions",
        f"the minimiser moves to 3 at rho = {soft:.5f}; value {values[0]:.5f} at rho = .1, {values[1]:.4f} at .8",
        minimiser(0.1) == 3.0,
    )


def _objective() -> Iterator[Finding]:
    slope = statements.slope_in_t(TOY1, 0.9, 2.0, Ball(0.2))
    yield Finding(
        "L^t as t grows",
        "title: monotonically non-increasing; proof: non-decreasing",
        f"non-decreasing: dL^t/dt = KL(w mu, mu)/t^2 = {slope.expected:.6f} (by differences {slope.found:.6f})",
        False,
    )
    ends = statements.limits(HMC_TEST, 0.0, Ball(1.0))
    yield Finding(
        "limits in t",
        "t -> 0: the mean; t -> inf: SAM's maximum",
        f"mean {ends.mean:.6f}, t = 1e-8 {ends.small:.6f}; t = 1e6 {ends.large:.6f}, maximum {ends.maximum:.6f}",
        abs(ends.small - ends.mean) < 1e-7 and abs(ends.large - ends.maximum) < 1e-4,
    )
    third = statements.small_t(TOY1, 0.9, Ball(0.2))
    yield Finding(
        "small t",
        "L^t = mean + t/2 var + o(t^2)",
        f"the remainder is O(t^2): divided by t^2 it tends to kappa_3/6 = {third.expected:.6f} ({third.found:.6f})",
        False,
    )
    grad, hess = (float(x) for x in lemma_derivatives(TOY1, 0.9, 2.0, Ball(0.2)))
    exact = tsam(TOY1, 0.9, 2.0, Ball(0.2))
    yield Finding(
        "Lemma 3.2: gradient and Hessian",
        "E_w[grad L] and t Cov_w(grad L) + E_w[Hess L]",
        f"gradient {grad:.8f} against {exact.grad:.8f}, Hessian {hess:.6f} against {exact.hess:.6f}",
        abs(grad - float(exact.grad)) < 1e-8 and abs(hess / float(exact.hess) - 1) < 1e-8,
    )
    curvature, theta = torch.tensor([[3.0], [0.7]], dtype=torch.float64)
    closed = statements.quadratic_under_normal(curvature, theta, 2.0, 0.2)
    value = float(tsam(quadratic(3.0), 0.7, 2.0, Normal(0.2)).value)
    yield Finding(
        "a quadratic under Gaussian noise",
        "(closed form; not in the paper)",
        f"L^t = {value:.10f}, closed form {closed:.10f}; infinite from t = 1/(sigma^2 lambda) on",
        abs(value - closed) < 1e-8,
    )
    gap = statements.linear_under_ball(2.0, 0.5, 1.0)
    above = float(tsam(linear(2.0), 0.3, 1.0, Ball(0.5)).value) - 0.6
    yield Finding(
        "a linear loss under uniform noise",
        "(closed form; not in the paper)",
        f"L^t - L = {above:.10f}, log(sinh z / z)/t = {gap:.10f}",
        abs(above - gap) < 1e-8,
    )


def _theorems() -> Iterator[Finding]:
    steep = statements.lipschitz(TOY1, 5.0, Ball(0.2))
    yield Finding(
        "Lipschitz",
        "L^t is p-Lipschitz if L is",
        f"toy 1, t = 5: slope at most {steep.found:.3f}, p = {steep.expected:.3f}",
        steep.found <= steep.expected,
    )
    convex = statements.strong_convexity(quadratic(3.0), 5.0, Ball(0.5))
    yield Finding(
        "strong convexity",
        "L^t is mu-strongly convex if L is",
        f"quadratic, t = 5: curvature at least {convex.found:.4f}, mu = {convex.expected:.4f}",
        convex.found >= convex.expected - 1e-9,
    )
    curved = statements.smoothness(quadratic(3.0), 0.0, 1000.0, Ball(0.5), 3.0)
    flat = float(tsam(linear(2.0), 0.0, 1000.0, Ball(0.5)).hess)
    yield Finding(
        "Lemma 3.3: smoothness",
        "beta(t)/t has a limit that is positive and finite, for any mu",
        f"quadratic: Hessian/t = {curved.found / 1000:.3f} at t = 1000, limit lambda^2 rho^2 = 2.25, bound "
        f"{curved.expected / 1000:.3f}; but 0 for a linear loss ({abs(flat):.0e}), infinite under Gaussian noise",
        False,
    )
    pair = statements.prefers_flatter(COUNTEREXAMPLE, 0.0, -10.0, 0.3, Ball(1.0))
    yield Finding(
        "Theorem 3.6: prefers flatter",
        "if theta1 is t-sharper than theta2 at t, then L^t(theta1) - L^t(theta2) grows at t",
        f"a convex counterexample: variances {pair.var1:.3f} > {pair.var2:.3f}, but the difference decreases, "
        f"{pair.slope:+.4f} (by the integral identity {pair.integral:+.4f}); sharper at all tilts u <= t suffices",
        False,
    )
    best = statements.best_tilt(WAVE, 0.0, Ball(1.0), 1.0)
    near, far = (statements.generalisation_bound(WAVE, 0.0, t, Ball(1.0), 1.0, 1000, 0.05) for t in (1e-3, best.theta))
    yield Finding(
        "Theorem 3.7: a best t",
        "some t in (0, inf) gives the tightest bound",
        f".5 + .4 sin 3x: the bound on the gap to L^t is tightest at t = {best.theta:.3f} (term {best.value:.5f}). "
        f"The bound on the population risk is {far.risk:.4f} there and smallest at t -> 0: {near.risk:.4f}",
        False,
    )


def _flow_from_start(t: float, noise: Noise) -> Path:
    return flow(lambda x: tsam(TOY1, x, t, noise).grad, 0.5, TOY1.lo, TOY1.hi, 101)


def _list(values: torch.Tensor | Sequence[float], digits: int = 4) -> str:
    numbers = values.tolist() if isinstance(values, torch.Tensor) else values
    return " ".join(f"{x:.{digits}f}" for x in numbers)
