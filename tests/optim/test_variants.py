"""The variants of SAM: late-phase schedules, SAM on a part of the weights, and what each keeps between steps."""

import pytest
import torch
from torch import nn

import tiltsam
from helpers import reference
from helpers.cases import METHODS, Problem, assert_same, sgd
from tiltsam.optim import norm_groups
from tiltsam.schedules import late_phase

ASCENDING = [m for m in METHODS if "rho" in m.kwargs and not m.name.startswith("tsam")]  # TSAM's start is noise
every_ascending_method = pytest.mark.parametrize("method", ASCENDING, ids=repr)


def plain_step(problem, base):
    base.zero_grad()
    problem.closure()
    base.step()


# ---------------------------------------------------------------- late phase


@every_ascending_method
def test_late_phase_is_the_base_until_it_begins(method):
    """Bitwise, at one pass a step; then the method's own passes."""
    ours, plain = Problem(), Problem()
    rho = late_phase(method.kwargs["rho"], num_steps=8)
    optimizer = method(sgd(ours.model.parameters()), model=ours.model, rho=rho)
    base = sgd(plain.model.parameters())
    for step in range(8):
        torch.manual_seed(step)
        optimizer.step(ours.closure)
        assert optimizer.info.num_forwards == (1 if step < 6 else method.forwards_at(step))
        if step < 6:
            torch.manual_seed(step)
            plain_step(plain, base)
            assert_same(ours.weights(), plain.weights())
            assert optimizer.info.perturbation_norms.tolist() == [0.0]


# ---------------------------------------------------------------- SAM on a part of the weights


class Normed(nn.Module):
    """A layer of another package."""

    class OtherNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

    def __init__(self):
        torch.manual_seed(5)
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.LayerNorm(8), nn.Linear(8, 3))
        self.other = self.OtherNorm()

    def forward(self, x):
        hidden = self.layers[:-1](x) * self.other.scale
        return self.layers[-1](torch.tanh(hidden))


def test_norm_groups_divide_the_parameters():
    model = Normed()
    norms, others = norm_groups(model)
    names = {id(p): name for name, p in model.named_parameters()}
    assert [names[id(p)] for p in norms["params"]] == [
        "layers.1.weight", "layers.1.bias", "layers.2.weight", "layers.2.bias", "other.scale",
    ]  # fmt: skip
    assert len(norms["params"]) + len(others["params"]) == len(names)
    assert "rho" not in norms
    assert others["rho"] == 0
    with pytest.raises(ValueError, match="Linear"):
        norm_groups(nn.Linear(2, 2))


@every_ascending_method
def test_unperturbed_groups_do_not_count_in_the_norm(method):
    """The perturbation has the length that it would have if the other weights did not exist."""
    problem, moved = Problem(Normed()), []
    groups = norm_groups(problem.model)
    optimizer = method(sgd(groups), model=problem.model)
    rho = optimizer.param_groups[0]["rho"]
    theta = [p.detach().clone() for p in groups[1]["params"]]

    def closure():
        moved.append(any(not torch.equal(p, q) for p, q in zip(groups[1]["params"], theta, strict=True)))
        return problem.closure()

    for _ in range(2):
        moved.clear()
        theta[:] = [p.detach().clone() for p in groups[1]["params"]]
        optimizer.step(closure)
        if method.name != "rsam":  # whose noise reaches all groups
            assert not any(moved)
        length = optimizer.info.perturbation_norms[-1].item()
        if method.name not in ("asam", "usam", "esam2", "looksam", "momentumsam"):
            assert length == pytest.approx(rho)
        if method.name == "esam2":  # ρ k/K
            assert length * 4 / rho == pytest.approx(round(length * 4 / rho))
    assert length > 0 or method.name == "looksam"


def test_unperturbed_groups_do_not_count_after_plain_steps():
    """Plain steps add the gradients of all groups to Friendly-SAM's mean."""
    problem = Problem(Normed())
    rho = late_phase(0.05, num_steps=4, fraction=0.5)
    optimizer = tiltsam.FriendlySAM(sgd(norm_groups(problem.model)), rho=rho, model=problem.model)
    for _ in range(4):
        optimizer.step(problem.closure)
    assert optimizer.info.perturbation_norms[-1].item() == pytest.approx(0.05)


def test_sam_on_equals_naive_twin():
    ours, theirs = Problem(Normed()), Problem(Normed())
    groups, other_groups = norm_groups(ours.model), norm_groups(theirs.model)
    optimizer = tiltsam.SAM(sgd(groups), rho=0.3, model=ours.model)
    base = sgd(other_groups)
    for _ in range(50):
        optimizer.step(ours.closure)
        base.zero_grad()
        theirs.closure()
        norms = other_groups[0]["params"]
        ascent = reference.unit([p.grad for p in norms])
        with torch.no_grad():
            for p, direction in zip(norms, ascent, strict=True):
                p.add_(direction, alpha=0.3)
        base.zero_grad()
        theirs.closure()
        with torch.no_grad():
            for p, direction in zip(norms, ascent, strict=True):
                p.sub_(direction, alpha=0.3)
        base.step()
    for p, q in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["sam", "asam", "esam2", "pgn", "tsam-shared"])
def test_nonfinite_gradient_of_an_unperturbed_group_counts(name):
    """The gradient of an ascent is checked as a whole, also where it is not used."""
    method = next(m for m in METHODS if m.name == name)
    problem, passes = Problem(Normed()), []
    optimizer = method(sgd(norm_groups(problem.model)), model=problem.model)

    def closure():
        loss = problem.closure()
        if not passes:
            problem.model.layers[0].weight.grad[0, 0] = torch.inf
        passes.append(loss)
        return loss

    optimizer.step(closure)
    assert optimizer.info.num_nonfinite > 0
    with pytest.warns(RuntimeWarning, match="not finite"):
        optimizer.check_nonfinite()


# ---------------------------------------------------------------- state between steps


def test_looksam_costs_one_pass_between_ascents():
    problem = Problem()
    optimizer = tiltsam.LookSAM(sgd(problem.model.parameters()), k=3, model=problem.model)
    passes = []
    for _ in range(7):
        optimizer.step(problem.closure)
        passes.append(optimizer.info.num_backwards)
    assert passes == [2, 1, 1, 2, 1, 1, 2]


def test_looksam_without_weight_takes_plain_steps_between():
    ours, plain = Problem(dropout=0.0), Problem(dropout=0.0)
    optimizer = tiltsam.LookSAM(sgd(ours.model.parameters()), k=2, alpha=0.0, model=ours.model)
    sam = tiltsam.SAM(sgd(plain.model.parameters()), model=plain.model)
    for step in range(6):
        optimizer.step(ours.closure)
        if step % 2 == 0:
            sam.step(plain.closure)
        else:
            plain_step(plain, sam.base)
    assert_same(ours.weights(), plain.weights())


@pytest.mark.parametrize("name", ["looksam", "friendlysam", "momentumsam"])
def test_nonfinite_gradients_do_not_change_the_state(name):
    problem = Problem()
    optimizer = tiltsam.METHODS[name](sgd(problem.model.parameters()), model=problem.model)
    optimizer.step(problem.closure)
    for group in optimizer.param_groups:
        group["steps_taken"] = 0  # LookSAM ascends again
    before = [x.clone() for x in optimizer._sampler_state.tensors(optimizer.current_space().params)]
    assert any(x.any() for x in before)

    def overflowing():
        loss = problem.closure()
        problem.model.last.weight.grad.fill_(torch.inf)
        return loss

    optimizer.step(overflowing)
    assert all(
        torch.equal(a, b)
        for a, b in zip(optimizer._sampler_state.tensors(optimizer.current_space().params), before, strict=True)
    )
    with pytest.warns(RuntimeWarning, match="not finite"):
        optimizer.check_nonfinite()


@pytest.mark.filterwarnings("ignore:weights are")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["gsam", "looksam", "friendlysam", "wsam", "usam", "momentumsam"])
def test_low_precision_weights_stay_finite(name, dtype):
    """Also at the first step of Momentum-SAM, whose direction is zero."""
    theta = nn.Parameter(torch.linspace(-1, 1, 8, dtype=dtype))
    optimizer = tiltsam.METHODS[name](sgd([theta]))

    def closure():
        loss = theta.float().square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        assert optimizer.step(closure).isfinite()
    assert theta.isfinite().all()


def test_momentum_sam_of_sgd_uses_the_momentum_of_the_base():
    """Without weight decay: v is (1−β) times the buffer of the base."""
    problem = Problem()
    base = sgd(problem.model.parameters(), momentum=0.8, weight_decay=0.0)
    optimizer = tiltsam.MomentumSAM(base, beta=0.8, model=problem.model)
    for _ in range(5):
        optimizer.step(problem.closure)
    for entries in optimizer.state_dict()["state"].values():
        if entries.get("momentum_buffer") is not None:
            torch.testing.assert_close(entries["tilt_velocity"], 0.2 * entries["momentum_buffer"], rtol=0, atol=1e-12)


def test_gsam_subtracts_the_gap_of_a_parameter_that_only_the_first_pass_uses():
    """As an expert that is not chosen at the perturbed weights: its ``g_p`` is zero, its ``g`` is not."""
    used, unused = (nn.Parameter(torch.tensor([value], dtype=torch.float64)) for value in (3.0, 2.0))
    optimizer = tiltsam.GSAM(torch.optim.SGD([used, unused], lr=0.1), rho=0.5, alpha=0.4)
    passes = []

    def closure():
        passes.append(None)
        loss = (used.square() / 2 + unused.square() / 2).sum() if len(passes) == 1 else (used.square() / 2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    torch.testing.assert_close(unused.data, torch.tensor([2.0 + 0.1 * 0.4 * 2.0], dtype=torch.float64))
