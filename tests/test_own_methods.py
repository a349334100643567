"""Methods and samplers of one's own: what docs/add-a-method.md says of them."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

import tiltsam
from cases import Problem, assert_same, sgd
from tiltsam import samplers
from tiltsam.weighing import FixedWeights


@dataclass(frozen=True)
class Mine(samplers.Stateless):
    """Looks along the weights themselves."""

    tilted: ClassVar[bool] = False
    independent: ClassVar[bool] = True
    scale_free: ClassVar[bool] = True

    def sample(self, space, index, state):
        space.go_home()
        space.scale_(space.point, 1 + space.setting("stretch"))
        return samplers.evaluated(space.evaluate()), None


class Stretched(tiltsam.SharpnessAware):
    num_samples = 2

    def __init__(self, base, stretch=0.1, **options):
        super().__init__(base, Mine(), {"stretch": stretch, "note": "text", "flag": True}, **options)


def test_numbers_among_the_settings_reach_the_sampler_by_themselves():
    problem, seen = Problem(), []
    optimizer = Stretched(sgd(problem.model.parameters()), stretch=lambda k: 0.5 * k)
    before = problem.model.last.bias.detach().clone()

    def closure():
        seen.append(problem.model.last.bias.detach().clone())
        return problem.closure()

    optimizer.step(closure)
    assert torch.equal(seen[0], before)
    after = problem.model.last.bias.detach().clone()
    optimizer.step(closure)
    torch.testing.assert_close(seen[2], 1.5 * after)
    assert optimizer.setting("stretch") == 0.5


def test_samples_count_alike_unless_the_method_weighs_them():
    problem = Problem()
    optimizer = Stretched(sgd(problem.model.parameters()), model=problem.model)
    loss = optimizer.step(problem.closure)
    assert optimizer.info.weights.tolist() == [0.5, 0.5]
    torch.testing.assert_close(loss, optimizer.info.losses.mean())


def test_fixed_weights_may_extrapolate():
    """WSAM's −8 and 9, say."""
    weighing, values = FixedWeights(torch.tensor([-8.0, 9.0])), torch.tensor([1.0, 3.0])
    mean = torch.zeros(())
    for value in values:
        mean = mean + weighing.add(value, torch.tensor(True)) * (value - mean)
    assert mean == weighing.loss() == -8.0 + 27.0
    assert weighing.weights(values, torch.tensor([True, True])).tolist() == [-8.0, 9.0]
    weighing = FixedWeights(torch.tensor([-8.0, 9.0]))
    shares = [weighing.add(torch.tensor(1.0), torch.tensor(ok)) for ok in (True, False)]
    assert [*shares, weighing.loss()] == [1.0, 0.0, 1.0]
    assert weighing.weights(values, torch.tensor([True, False])).tolist() == [1.0, 0.0]


def test_every_write_to_the_point_is_taken_back():
    """Also by the operations that samplers here use on other vectors alone."""

    @dataclass(frozen=True)
    class Writes(Mine):
        how: str = "keep_"

        def sample(self, space, index, state):
            away = torch.zeros((), dtype=torch.bool)
            if self.how == "keep_":
                space.keep_(space.point, away)
            else:
                space.select_(space.point, space.vector("zero"), ~away)
            return samplers.evaluated(space.evaluate()), None

    for how in ("keep_", "select_"):
        problem = Problem()
        before = problem.weights()
        optimizer = tiltsam.TSAM(sgd(problem.model.parameters(), lr=0.0), sampler=Writes(how), model=problem.model)
        optimizer.step(problem.closure)
        assert optimizer.info.perturbation_norms.item() > 1
        weights = [name for name, _ in problem.model.named_parameters()]
        assert_same({k: before[k] for k in weights}, {k: v for k, v in problem.weights().items() if k in weights})


def test_a_missing_gradient_counts_as_zero_wherever_it_is_mapped():
    @dataclass(frozen=True)
    class Maps(Mine):
        def sample(self, space, index, state):
            at = space.evaluate(ascent=True)
            space.map_(space.point, lambda w, g: w + g, at.gradient)
            return samplers.after_ascent(at, space.evaluate(after=at)), None

    problem = Problem()  # which has a parameter that is not used
    optimizer = tiltsam.TSAM(sgd(problem.model.parameters()), sampler=Maps(), model=problem.model)
    assert optimizer.step(problem.closure).isfinite()
    assert problem.model.unused.tolist() == [1.0] * 5


# ---------------------------------------------------------------- what is told of samplers that cannot work


def without(*names):
    body = {name: value for name, value in vars(Mine).items() if name in ("tilted", "independent", "scale_free")}
    body |= {"begin": lambda *_: None, "sample": Mine.sample}
    return type("Broken", (), {k: v for k, v in body.items() if k not in names})()


@pytest.mark.parametrize("make", [tiltsam.TSAM, lambda base, sampler: tiltsam.SharpnessAware(base, sampler, {})])
def test_a_sampler_that_lacks_something_is_told_what(make):
    params = list(nn.Linear(2, 2).parameters())
    make(sgd(params), sampler=without())
    with pytest.raises(TypeError, match=r"Broken is no sampler: it lacks begin, scale_free \(see .*Sampler\)"):
        make(sgd(params), sampler=without("begin", "scale_free"))
    with pytest.raises(TypeError, match="an instance"):
        make(sgd(params), sampler=Mine)


def test_a_sampler_that_cannot_be_compared_is_refused():
    @dataclass
    class Changing:
        length: float = 1.0
        tilted, independent, scale_free = False, True, True
        begin, sample = samplers.Stateless.begin, Mine.sample

    with pytest.raises(TypeError, match=r"Changing cannot be hashed.*@dataclass\(frozen=True\)"):
        tiltsam.TSAM(sgd(nn.Linear(2, 2).parameters()), sampler=Changing())


def test_a_sampler_that_asks_for_a_setting_the_method_lacks_is_told_so():
    problem = Problem()
    optimizer = tiltsam.TSAM(sgd(problem.model.parameters()), sampler=Mine())
    with pytest.raises(LookupError, match="the method has no setting 'stretch' that is a number; it has .*radius"):
        optimizer.step(problem.closure)


def test_a_sampler_that_returns_the_draw_alone_is_told_what_to_return():
    class Alone(Mine):
        def sample(self, space, index, state):
            return samplers.evaluated(space.evaluate())

    problem = Problem()
    optimizer = tiltsam.TSAM(sgd(problem.model.parameters()), sampler=Alone())
    with pytest.raises(TypeError, match=r"Alone.sample must return \(draw, state\), got Draw"):
        optimizer.step(problem.closure)
