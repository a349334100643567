"""Methods and samplers written by users, as in docs/add-a-method.md."""

import copy
import pickle
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

import tiltsam
from helpers.cases import METHODS, Problem, assert_same, lookahead, sgd
from helpers.vasso import VaSSO
from tiltsam import samplers
from tiltsam.distributed import Ranks
from tiltsam.optim import FixedWeights
from tiltsam.space.parameter_space import ParameterSpace
from tiltsam.toys.chain_space import ChainSpace, sample_chains

BY_NAME = {method.name: method for method in METHODS}


@dataclass(frozen=True)
class Stretch(samplers.Sampler):
    """Evaluates at stretched weights."""

    tilted: ClassVar[bool] = False
    independent: ClassVar[bool] = True

    def sample(self, space, index, common):
        space.reset_to_center()
        space.scale_(space.point, 1 + space.setting("stretch"))
        return samplers.draw_at(space.evaluate())


class Stretched(tiltsam.SharpnessAware):
    num_samples = 2

    def __init__(self, base, *, stretch=0.1, **options):
        super().__init__(base, Stretch(), {"stretch": stretch, "note": "text", "flag": True}, **options)


def test_sampler_reads_settings_that_are_numbers():
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


def test_samples_are_weighted_equally_by_default():
    problem = Problem()
    optimizer = Stretched(sgd(problem.model.parameters()), model=problem.model)
    loss = optimizer.step(problem.closure)
    assert optimizer.info.weights.tolist() == [0.5, 0.5]
    torch.testing.assert_close(loss, optimizer.info.losses.mean())


def test_fixed_weights_may_be_negative():
    """WSAM has −8 and 9."""
    weighting, values = FixedWeights(torch.tensor([-8.0, 9.0])), torch.tensor([1.0, 3.0])
    mean = torch.zeros(())
    for value in values:
        mean = mean + weighting.add(value, torch.tensor(True)) * (value - mean)
    assert mean == weighting.loss() == -8.0 + 27.0
    weighting = FixedWeights(torch.tensor([-8.0, 9.0]))
    shares = [weighting.add(torch.tensor(1.0), torch.tensor(ok)) for ok in (True, False)]
    assert [*shares, weighting.loss()] == [1.0, 0.0, 1.0]


def test_every_write_to_the_point_is_restored():
    @dataclass(frozen=True)
    class Writes(Stretch):
        how: str = "zero_unless_"

        def sample(self, space, index, common):
            away = torch.zeros((), dtype=torch.bool)
            if self.how == "zero_unless_":
                space.zero_unless_(space.point, away)
            else:
                space.select_(space.point, space.vector("zero"), ~away)
            return samplers.draw_at(space.evaluate())

    for how in ("zero_unless_", "select_"):
        problem = Problem()
        before = problem.weights()
        optimizer = tiltsam.TSAM(
            sgd(problem.model.parameters(), lr=0.0), sampler=Writes(how), num_samples=1, model=problem.model
        )
        optimizer.step(problem.closure)
        assert optimizer.info.perturbation_norms.item() > 1
        weights = [name for name, _ in problem.model.named_parameters()]
        assert_same({k: before[k] for k in weights}, {k: v for k, v in problem.weights().items() if k in weights})


def test_missing_gradient_counts_as_zero_in_map():
    @dataclass(frozen=True)
    class Maps(Stretch):
        def sample(self, space, index, common):
            at = space.evaluate(ascent=True)
            space.map_(space.point, lambda w, g, scale: w + scale * g, at.gradient, space.rho)
            return samplers.draw_after_ascent(at, space.evaluate(after=at))

    problem = Problem()  # which has a parameter that is not used
    optimizer = tiltsam.TSAM(sgd(problem.model.parameters()), sampler=Maps(), num_samples=1, model=problem.model)
    assert optimizer.step(problem.closure).isfinite()
    assert problem.model.unused.tolist() == [1.0] * 5


def test_map_takes_one_scalar_per_group():
    class SignAscent(samplers.Sampler):
        def sample(self, space, index, common):
            space.reset_to_center()
            at = space.evaluate(ascent=True)
            space.map_(space.point, lambda w, g, rho: w + rho * g.sign(), at.gradient, space.rho)
            points.append([x.tolist() for x in space.point])
            return samplers.draw_after_ascent(at, space.evaluate(after=at))

    points = []
    params = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    base = torch.optim.SGD([{"params": params[:1], "rho": 0.25}, {"params": params[1:], "rho": 0.5}], lr=0.1)
    optimizer = tiltsam.TSAM(base, sampler=SignAscent(), num_samples=1)

    def closure():
        loss = sum(p.sum() for p in params)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert points == [[[0.25, 0.25], [0.5, 0.5]]]


def test_gradient_of_the_first_sample_is_not_overwritten():
    """PGN and WSAM use it again in the second."""
    space = ParameterSpace([[nn.Parameter(torch.zeros(3))]])
    one, yes = torch.ones(()), torch.tensor(True)
    space.gradient_mean.begin_step()
    first = torch.ones(3)
    for gradient, share in ((first, one), (torch.full((3,), 5.0), 0.5 * one)):
        space.add_to_mean(samplers.Draw(one, [gradient], one, yes, one), share, single=False)
    assert first.tolist() == [1.0] * 3
    space.assign_gradients()
    assert space.params[0].grad.tolist() == [3.0] * 3


def test_constructor_may_have_another_signature():
    class Mine(tiltsam.SAM):
        def __init__(self, params, base, **kwargs):
            super().__init__(base(params, **kwargs))

    optimizer = Mine(nn.Linear(2, 2).parameters(), torch.optim.SGD, lr=0.5)
    assert optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(TypeError, match=r"list.*Mine"):
        Mine([], list)


# ---------------------------------------------------------------- plan


def every_third(method):
    """Return a subclass of a method that takes plain steps, except every third."""

    class EveryThird(method.cls):
        def plan(self):
            plain = self.setting("steps_taken") % 3 != 0
            return (samplers.Center(), 1) if plain else super().plan()

    return EveryThird


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_plan_every_third_step(method):
    ours, twin = Problem(dropout=0.0), Problem(dropout=0.0)
    optimizer = every_third(method)(sgd(ours.model.parameters()), **method.kwargs, model=ours.model)
    always = method(sgd(twin.model.parameters()), model=twin.model)
    for step in range(7):
        optimizer.step(ours.closure)
        passes = optimizer.info.num_forwards, optimizer.info.num_backwards
        if step % 3 == 0:
            assert passes == (method.forwards, method.backwards)
            always.step(twin.closure)
        else:
            assert passes == (1, 1)
            assert optimizer.info.perturbation_norms.tolist() == [0.0]
            assert optimizer.info.weights.tolist() == [1.0]
            always.base.zero_grad()
            twin.closure()
            always.base.step()
            for group in always.param_groups:
                group["steps_taken"] += 1
    assert_same(ours.weights(), twin.weights())


def test_plan_resumes():
    """The plan depends on the step count alone, which is in the checkpoint."""
    cls, problem = every_third(BY_NAME["sam"]), Problem()
    optimizer = cls(sgd(problem.model.parameters()), model=problem.model)
    for _ in range(2):
        optimizer.step(problem.closure)
    resumed = cls(sgd(problem.model.parameters()), model=problem.model)
    resumed.load_state_dict(optimizer.state_dict())
    passes = []
    for _ in range(3):
        resumed.step(problem.closure)
        passes.append(resumed.info.num_backwards)
    assert passes == [1, 2, 1]


@pytest.mark.parametrize("cls", [Stretched, tiltsam.TSAM])
def test_plan_may_change_the_number_of_samples(cls):
    class Growing(cls):
        def plan(self):
            return self.sampler, 1 + self.setting("steps_taken")

    problem = Problem()
    optimizer = Growing(sgd(problem.model.parameters()), model=problem.model)
    for number in (1, 2, 3):
        optimizer.step(problem.closure)
        assert len(optimizer.info.losses) == number
        assert optimizer.info.weights.sum().item() == pytest.approx(1)


# ---------------------------------------------------------------- errors about samplers


class Resembling:
    """Has the attributes of a sampler."""

    tilted, independent = False, True
    begin, sample = samplers.Sampler.begin, Stretch.sample


@pytest.mark.parametrize("make", [tiltsam.TSAM, lambda base, sampler: tiltsam.SharpnessAware(base, sampler, {})])
@pytest.mark.parametrize(("wrong", "name"), [(Stretch, "Stretch"), (Resembling(), "Resembling"), (None, "None")])
def test_sampler_must_be_an_instance_of_sampler(make, wrong, name):
    with pytest.raises(TypeError, match=name):
        make(sgd(nn.Linear(2, 2).parameters()), sampler=wrong)


def test_sampler_without_sample_cannot_be_created():
    class Incomplete(samplers.Sampler):
        pass

    with pytest.raises(TypeError, match=r"Incomplete .*sample"):
        Incomplete()


def test_sampler_must_be_hashable():
    @dataclass
    class Changing(samplers.Sampler):
        length: float = 1.0
        sample = Stretch.sample

    with pytest.raises(TypeError, match=r"Changing .*frozen=True"):
        tiltsam.TSAM(sgd(nn.Linear(2, 2).parameters()), sampler=Changing())


def test_unknown_setting_raises_lookup_error():
    problem = Problem()
    optimizer = tiltsam.TSAM(sgd(problem.model.parameters()), sampler=Stretch())
    with pytest.raises(LookupError, match=r"'stretch'.*radius"):
        optimizer.step(problem.closure)


# ---------------------------------------------------------------- vectors kept between steps


@dataclass(frozen=True)
class Counts(samplers.Sampler):
    """Adds one to every coordinate of its state vector."""

    name: str = "count"
    state_names: ClassVar[tuple[str, ...]] = ("count",)
    tilted: ClassVar[bool] = False
    independent: ClassVar[bool] = False

    def sample(self, space, index, common):
        space.map_(space.state_vector(self.name), lambda x: x + 1)
        return samplers.draw_at(space.evaluate())


def state_vectors(optimizer, name):
    """Return a state vector from the state dict, by the index of the parameter."""
    state = optimizer.state_dict()["state"]
    return {i: entries[f"tilt_{name}"].clone() for i, entries in state.items() if f"tilt_{name}" in entries}


def counted(optimizer):
    found = {x.item() for vector in state_vectors(optimizer, "count").values() for x in vector.unique()}
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
def test_state_vectors_are_saved_and_hidden_from_the_base(base):
    ours, plain = Problem(), Problem()
    optimizer, bare = (
        tiltsam.TSAM(base(ours.model.parameters()), sampler=Counts(), num_samples=1),
        base(plain.model.parameters()),
    )
    for k in range(3):
        torch.manual_seed(k)
        optimizer.step(ours.closure)
        torch.manual_seed(k)
        bare.zero_grad()
        plain.closure()
        bare.step()
        assert counted(optimizer) == k + 1
    assert_same(ours.weights(), plain.weights())
    fresh = tiltsam.TSAM(base(ours.model.parameters()), sampler=Counts(), num_samples=1)
    fresh.load_state_dict(optimizer.state_dict())
    for other in (fresh, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert counted(other) == 3
    fresh.step(ours.closure)
    assert (counted(fresh), counted(optimizer)) == (4, 3)
    assert all("tilt_count" not in state for state in optimizer.base.state.values())
    fresh.load_state_dict(base(plain.model.parameters()).state_dict())  # a checkpoint of the bare base
    fresh.step(ours.closure)
    assert counted(fresh) == 1


def test_state_vectors_resume_after_a_skipped_first_step():
    problem = Problem()
    optimizer, fresh = (
        tiltsam.TSAM(BASES["adamw"](problem.model.parameters()), sampler=Counts(), num_samples=1, skip_nonfinite=True)
        for _ in range(2)
    )
    optimizer.step(lambda: problem.closure() * torch.nan)
    fresh.load_state_dict(optimizer.state_dict())
    fresh.step(problem.closure)
    assert counted(fresh) == 2
    with pytest.warns(RuntimeWarning, match="not finite"):
        optimizer.check_nonfinite()


def test_checkpoint_of_another_method_has_no_state_vectors():
    problem = Problem()
    optimizer = VaSSO(BASES["adamw"](problem.model.parameters()))
    optimizer.step(problem.closure)
    sam = tiltsam.SAM(BASES["adamw"](problem.model.parameters()))
    with pytest.warns(RuntimeWarning, match="of VaSSO"):
        sam.load_state_dict(optimizer.state_dict())
    assert not state_vectors(sam, "mean")
    sam.step(problem.closure)
    with pytest.warns(RuntimeWarning, match="of SAM|no mean") as caught:
        optimizer.load_state_dict(sam.state_dict())
    assert [warning.filename for warning in caught] == [__file__, __file__]
    assert not any(mean.any() for mean in state_vectors(optimizer, "mean").values())


def test_state_vectors_are_loaded_in_place():
    problem = Problem()
    optimizer = VaSSO(sgd(problem.model.parameters()))
    optimizer.step(problem.closure)
    saved = optimizer.state_dict()
    places = [state["tilt_mean"].data_ptr() for state in saved["state"].values() if "tilt_mean" in state]
    optimizer.load_state_dict(copy.deepcopy(saved))
    again = optimizer.state_dict()["state"].values()
    assert [state["tilt_mean"].data_ptr() for state in again if "tilt_mean" in state] == places


@pytest.mark.parametrize("fail_at", [0, 1])
def test_failed_step_restores_state_vectors(fail_at):
    """Also in the second pass: VaSSO updates its mean before it."""
    problem, passes = Problem(dropout=0.0), [0]
    optimizer = VaSSO(sgd(problem.model.parameters()), model=problem.model)

    def failing():
        passes[0] += 1
        if passes[0] > fail_at:
            raise RuntimeError("planted")
        return problem.closure()

    for first in (True, False):
        before = state_vectors(optimizer, "mean")
        passes[0] = 0
        with pytest.raises(RuntimeError, match="planted"):
            optimizer.step(failing)
        for i, mean in state_vectors(optimizer, "mean").items():
            assert torch.equal(mean, torch.zeros_like(mean) if first else before[i])
        optimizer.step(problem.closure)


def test_frozen_layer_keeps_its_state_vector():
    problem = Problem()
    number = [name for name, _ in problem.model.named_parameters()].index("first.weight")
    optimizer = VaSSO(sgd(problem.model.parameters()), model=problem.model)
    means = []
    for thawed in (True, False, True):
        problem.model.first.requires_grad_(thawed)
        optimizer.step(problem.closure)
        means.append(state_vectors(optimizer, "mean")[number])
    assert torch.equal(means[0], means[1])
    assert not torch.equal(means[1], means[2])


def test_vasso_ignores_nonfinite_gradients():
    problem = Problem()
    optimizer = VaSSO(sgd(problem.model.parameters()), model=problem.model)
    optimizer.step(problem.closure)
    before = state_vectors(optimizer, "mean")

    def overflowing():
        loss = problem.closure()
        problem.model.last.weight.grad.fill_(torch.inf)
        return loss

    optimizer.step(overflowing)
    assert_same(before, state_vectors(optimizer, "mean"))
    with pytest.warns(RuntimeWarning, match="not finite"):
        optimizer.check_nonfinite()


def test_bad_state_names():
    @dataclass(frozen=True)
    class Apart(Counts):
        independent: ClassVar[bool] = True

    problem = Problem()
    with pytest.raises(ValueError, match=r"Apart .*independent = False"):
        tiltsam.TSAM(sgd(problem.model.parameters()), sampler=Apart())
    with pytest.raises(TypeError, match=r"state_names .*'count'"):
        tiltsam.TSAM(sgd(problem.model.parameters()), sampler=type("Text", (Counts,), {"state_names": "count"})())
    optimizer = tiltsam.TSAM(sgd(problem.model.parameters()), sampler=Counts("other"), num_samples=1)
    with pytest.raises(LookupError, match="'other'"):
        optimizer.step(problem.closure)


def test_state_vectors_need_a_base_with_state():
    problem = Problem(nn.Linear(6, 3))
    with pytest.raises(TypeError, match=r"Lookahead .*mean"):
        VaSSO(lookahead(problem.model.parameters()))


def test_state_vectors_refuse_local_ascent(monkeypatch):
    """Each rank would keep another vector."""
    problem = Problem()
    optimizer = VaSSO(sgd(problem.model.parameters()), model=problem.model)
    init = Ranks.__init__

    def local(self, *args):
        init(self, *args)
        self.local_ascent = True

    monkeypatch.setattr(Ranks, "__init__", local)
    for _ in range(2):  # also if it is tried again
        with pytest.raises(ValueError, match=r"ascent='local'.*mean"):
            optimizer.step(problem.closure)
    monkeypatch.undo()
    optimizer.step(problem.closure)


def test_state_vectors_of_chains():
    space = ChainSpace(lambda x: x.square().sum(1), torch.ones(3), 4, rho=0.1, settings={"rate": 0.1})
    for _ in range(2):
        sample_chains(VaSSO(sgd(nn.Linear(2, 2).parameters())).sampler, space)
    torch.testing.assert_close(space.state_vector("mean"), torch.full((4, 3), 2 * (1 - 0.9**2)))


def test_weights_are_restored_if_the_sampler_keeps_the_point():
    """The point may be written to after it was reset."""

    @dataclass(frozen=True)
    class Keeps(Stretch):
        def sample(self, space, index, common):
            point = space.point
            space.reset_to_center()
            space.scale_(point, torch.tensor(2.0, dtype=torch.float64))
            return samplers.draw_at(space.evaluate())

    problem = Problem(dropout=0.0)
    before = [p.detach().clone() for p in problem.model.parameters()]
    optimizer = tiltsam.SharpnessAware(sgd(problem.model.parameters(), lr=0.0), Keeps(), {}, model=problem.model)
    optimizer.step(problem.closure)
    assert all(torch.equal(p, q) for p, q in zip(problem.model.parameters(), before, strict=True))


def test_parameters_that_share_memory_later_are_refused():
    first, second = (nn.Parameter(torch.ones(4)) for _ in range(2))

    def closure():
        loss = (first * second).sum()
        loss.backward()
        return loss

    optimizer = tiltsam.SAM(sgd([first, second]))
    optimizer.step(closure)
    second.data = first.data
    with pytest.raises(ValueError, match="share memory"):
        optimizer.step(closure)
