"""Methods and samplers of one's own: what docs/add-a-method.md says of them."""

import copy
import pickle
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn

import tiltsam
from helpers.cases import Problem, assert_same, sgd
from helpers.friendly import FriendlySAM
from tiltsam import samplers
from tiltsam.checks import check_kept
from tiltsam.toys.chain_space import ChainSpace, sample_chains
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
            space.map_(space.point, lambda w, g, scale: w + scale * g, at.gradient, space.rho)
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
    with pytest.raises(LookupError, match=r"the method has no setting 'stretch' that is a number; it has .*radius"):
        optimizer.step(problem.closure)


def test_a_sampler_that_returns_the_draw_alone_is_told_what_to_return():
    class Alone(Mine):
        def sample(self, space, index, state):
            return samplers.evaluated(space.evaluate())

    problem = Problem()
    optimizer = tiltsam.TSAM(sgd(problem.model.parameters()), sampler=Alone())
    with pytest.raises(TypeError, match=r"Alone.sample must return \(draw, state\), got Draw"):
        optimizer.step(problem.closure)


# ---------------------------------------------------------------- what is kept from step to step


@dataclass(frozen=True)
class Counts(samplers.Stateless):
    """Adds one to every coordinate of what it keeps."""

    name: str = "count"
    keeps: ClassVar[tuple[str, ...]] = ("count",)
    tilted: ClassVar[bool] = False
    independent: ClassVar[bool] = False
    scale_free: ClassVar[bool] = True

    def sample(self, space, index, state):
        space.map_(space.kept(self.name), lambda x: x + 1)
        return samplers.evaluated(space.evaluate()), None


def kept(optimizer, name):
    """As a checkpoint has it, by the number of the parameter."""
    state = optimizer.state_dict()["state"]
    return {i: entries[f"tilt_{name}"].clone() for i, entries in state.items() if f"tilt_{name}" in entries}


def counted(optimizer):
    found = {x.item() for vector in kept(optimizer, "count").values() for x in vector.unique()}
    assert len(found) == 1
    return found.pop()


BASES = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),  # which has no state at all
    "momentum": sgd,
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),  # which takes an empty state for a new parameter
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.1),
}


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
def test_what_a_sampler_keeps_is_in_the_state_of_any_base_and_hidden_from_it(base):
    ours, plain = Problem(), Problem()
    optimizer, bare = tiltsam.TSAM(base(ours.model.parameters()), sampler=Counts()), base(plain.model.parameters())
    for k in range(3):
        torch.manual_seed(k)
        optimizer.step(ours.closure)
        torch.manual_seed(k)
        bare.zero_grad()
        plain.closure()
        bare.step()
        assert counted(optimizer) == k + 1
    assert_same(ours.weights(), plain.weights())
    fresh = tiltsam.TSAM(base(ours.model.parameters()), sampler=Counts())
    fresh.load_state_dict(optimizer.state_dict())
    for other in (fresh, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert counted(other) == 3
    fresh.step(ours.closure)
    assert (counted(fresh), counted(optimizer)) == (4, 3)
    assert all("tilt_count" not in state for state in optimizer.base.state.values())
    fresh.load_state_dict(base(plain.model.parameters()).state_dict())  # a checkpoint of the bare base
    fresh.step(ours.closure)
    assert counted(fresh) == 1


def test_a_first_step_that_the_base_does_not_take_can_be_resumed():
    problem = Problem()
    optimizer, fresh = (
        tiltsam.TSAM(BASES["adamw"](problem.model.parameters()), sampler=Counts(), skip_nonfinite=True)
        for _ in range(2)
    )
    optimizer.step(lambda: problem.closure() * torch.nan)
    fresh.load_state_dict(optimizer.state_dict())
    fresh.step(problem.closure)
    assert counted(fresh) == 2
    with pytest.warns(RuntimeWarning, match="not finite"):
        _ = optimizer.info


def test_a_checkpoint_of_another_method_brings_none_of_its_vectors():
    problem = Problem()
    optimizer = FriendlySAM(BASES["adamw"](problem.model.parameters()))
    optimizer.step(problem.closure)
    sam = tiltsam.SAM(BASES["adamw"](problem.model.parameters()))
    sam.load_state_dict(optimizer.state_dict())
    assert not kept(sam, "mean")
    sam.step(problem.closure)
    with pytest.warns(RuntimeWarning, match=r"holds no mean, which the sampler keeps .* begins at zero") as caught:
        optimizer.load_state_dict(sam.state_dict())
    assert caught[0].filename == __file__
    assert not any(mean.any() for mean in kept(optimizer, "mean").values())


def test_loading_is_in_place_so_that_a_captured_step_finds_what_was_loaded():
    problem = Problem()
    optimizer = FriendlySAM(sgd(problem.model.parameters()))
    optimizer.step(problem.closure)
    saved = optimizer.state_dict()
    places = [state["tilt_mean"].data_ptr() for state in saved["state"].values() if "tilt_mean" in state]
    optimizer.load_state_dict(copy.deepcopy(saved))
    again = optimizer.state_dict()["state"].values()
    assert [state["tilt_mean"].data_ptr() for state in again if "tilt_mean" in state] == places


@pytest.mark.parametrize("fail_at", [0, 1])
def test_a_step_that_raises_keeps_nothing(fail_at):
    """Also if it is the second pass that does, before which Friendly-SAM has moved its mean."""
    problem, passes = Problem(dropout=0.0), [0]
    optimizer = FriendlySAM(sgd(problem.model.parameters()), model=problem.model)

    def failing():
        passes[0] += 1
        if passes[0] > fail_at:
            raise RuntimeError("planted")
        return problem.closure()

    for first in (True, False):
        before = kept(optimizer, "mean")
        passes[0] = 0
        with pytest.raises(RuntimeError, match="planted"):
            optimizer.step(failing)
        for i, mean in kept(optimizer, "mean").items():
            assert torch.equal(mean, torch.zeros_like(mean) if first else before[i])
        optimizer.step(problem.closure)


def test_a_frozen_layer_keeps_what_it_kept():
    problem = Problem()
    number = [name for name, _ in problem.model.named_parameters()].index("first.weight")
    optimizer = FriendlySAM(sgd(problem.model.parameters()), model=problem.model)
    means = []
    for thawed in (True, False, True):
        problem.model.first.requires_grad_(thawed)
        optimizer.step(problem.closure)
        means.append(kept(optimizer, "mean")[number])
    assert torch.equal(means[0], means[1])
    assert not torch.equal(means[1], means[2])


def test_a_gradient_that_is_not_finite_leaves_the_mean_as_it_is():
    problem = Problem()
    optimizer = FriendlySAM(sgd(problem.model.parameters()), model=problem.model)
    optimizer.step(problem.closure)
    before = kept(optimizer, "mean")

    def overflowing():
        loss = problem.closure()
        problem.model.last.weight.grad.fill_(torch.inf)
        return loss

    optimizer.step(overflowing)
    assert_same(before, kept(optimizer, "mean"))
    with pytest.warns(RuntimeWarning, match="not finite"):
        _ = optimizer.info


def test_vectors_that_are_kept_want_to_be_named_and_samples_that_wait_for_each_other():
    @dataclass(frozen=True)
    class Apart(Counts):
        independent: ClassVar[bool] = True

    problem = Problem()
    with pytest.raises(ValueError, match=r"Apart keeps vectors.*say independent = False"):
        tiltsam.TSAM(sgd(problem.model.parameters()), sampler=Apart())
    with pytest.raises(TypeError, match=r"keeps must be a tuple of names, got 'count': write \('count',\)"):
        tiltsam.TSAM(sgd(problem.model.parameters()), sampler=type("Text", (Counts,), {"keeps": "count"})())
    optimizer = tiltsam.TSAM(sgd(problem.model.parameters()), sampler=Counts("other"))
    with pytest.raises(LookupError, match=r"keeps no 'other': name it in keeps, as in keeps = \('other',\)"):
        optimizer.step(problem.closure)


def test_each_rank_a_mean_of_its_own_is_refused():
    check_kept((), SimpleNamespace(local_ascent=True))
    with pytest.raises(ValueError, match="ascent='local' would make each rank keep another mean"):
        check_kept(("mean",), SimpleNamespace(local_ascent=True))


def test_a_sampler_that_keeps_runs_on_chains():
    space = ChainSpace(lambda x: x.square().sum(1), torch.ones(3), 4, rho=0.1, settings={"sigma": 1.0, "lam": 0.9})
    for _ in range(2):
        sample_chains(FriendlySAM(sgd(nn.Linear(2, 2).parameters())).sampler, space)
    torch.testing.assert_close(space.kept("mean"), torch.full((4, 3), 2 * (1 - 0.9**2)))
