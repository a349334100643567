"""Errors and warnings about what users pass."""

import copy
import warnings

import pytest
import torch
from torch import nn

import tiltsam
from helpers.cases import BAD_ARGUMENTS, METHODS, Problem, quadratic_problem, sgd

every_method = pytest.mark.parametrize("method", METHODS, ids=repr)


@pytest.mark.parametrize(
    ("cls", "kwargs", "message"), BAD_ARGUMENTS, ids=[f"{cls.__name__} {kwargs}" for cls, kwargs, _ in BAD_ARGUMENTS]
)
def test_bad_arguments(cls, kwargs, message):
    with pytest.raises(ValueError, match=message):
        cls(sgd(Problem().model.parameters()), **kwargs)


def test_bad_base_and_model():
    params = list(Problem().model.parameters())
    with pytest.raises(TypeError, match="class SGD"):
        tiltsam.SAM(torch.optim.SGD)
    with pytest.raises(TypeError, match=r"base .*list"):
        tiltsam.SAM(params)
    with pytest.raises(TypeError, match=r"TSAM .*SAM"):
        tiltsam.TSAM(tiltsam.SAM(sgd(params)))
    with pytest.raises(TypeError, match="LBFGS"):
        tiltsam.SAM(torch.optim.LBFGS(params))
    with pytest.raises(TypeError, match=r"SparseAdam.*Adam"):
        tiltsam.SAM(torch.optim.SparseAdam(params))
    with pytest.raises(TypeError, match=r"model .*list"):
        tiltsam.SAM(sgd(params), model=params)
    with pytest.raises(TypeError, match=r"model .*list: wrap them in a torch\.nn\.ModuleList"):
        tiltsam.SAM(sgd(params), model=[Problem().model, Problem().model])
    with pytest.raises(TypeError, match=r"rho must not be a module; write SAM\(base, model=model\)"):
        tiltsam.SAM(sgd(params), rho=Problem().model)
    with pytest.raises(TypeError, match=r"sampler .*HMC"):
        tiltsam.TSAM(sgd(params), sampler=tiltsam.samplers.HMC)
    with pytest.raises(AttributeError, match="no step"):
        _ = tiltsam.SAM(sgd(params)).info


def test_maximize_is_refused():
    theta, closure = quadratic_problem()
    with pytest.raises(ValueError, match="maximize=True"):
        tiltsam.SAM(sgd([theta], maximize=True))
    optimizer = tiltsam.TSAM(sgd([theta]))
    with pytest.raises(ValueError, match="maximize=True"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "maximize": True})
    optimizer.step(closure)
    before = theta.detach().norm()
    tiltsam.ERM(sgd([theta], maximize=True)).step(closure)  # ERM has no ascent
    assert theta.detach().norm() > before


def lines_to_write(error):
    """Return the indented lines of a message."""
    return [line.strip() for line in str(error.value).splitlines() if line.startswith("    ")]


@every_method
@pytest.mark.parametrize("more", [{}, {"lr": 0.1}, {"lr": 0.1, "momentum": 0.9, "nesterov": True}])
def test_call_with_params_instead_of_base(method, more):
    params, name = nn.Linear(2, 2).parameters(), method.cls.__name__
    for call in (lambda: method.cls(params, torch.optim.AdamW, **more), lambda: method.cls(base=params, **more)):
        with pytest.raises(TypeError, match=r"base .*generator") as error:
            call()
        base, wrapper = lines_to_write(error)
        shown = ", ".join(f"{key}={value}" for key, value in (more or {"lr": 0.1}).items())
        assert base in [f"base = torch.optim.{cls}(model.parameters(), {shown})" for cls in ("AdamW", "SGD")]
        assert wrapper == f"optimizer = {name}(base, model=model)"


def test_calls_of_other_packages_show_runnable_lines():
    """The signatures of davda54/sam and of pytorch_optimizer."""
    model = nn.Linear(2, 2)
    names = {"torch": torch, "tiltsam": tiltsam, "SAM": tiltsam.SAM, "model": model}
    for make in (
        lambda: tiltsam.SAM(model.parameters(), torch.optim.AdamW, rho=2.0, adaptive=True, lr=0.3, betas=(0.9, 0.95)),
        lambda: tiltsam.SAM(
            list(model.parameters()), base_optimizer=torch.optim.AdamW, rho=2.0, model=model, use_gc=False, lr=0.3
        ),
    ):
        with pytest.raises(TypeError, match="Write") as error:
            make()
        exec("\n".join(lines_to_write(error)), names)
        optimizer = names["optimizer"]
        assert type(optimizer) is (tiltsam.ASAM if "ASAM" in str(error.value) else tiltsam.SAM)
        assert isinstance(optimizer.base, torch.optim.AdamW)
        assert (optimizer.param_groups[0]["rho"], optimizer.param_groups[0]["lr"]) == (2.0, 0.3)


def test_adaptive_is_asam():
    base = sgd(nn.Linear(2, 2).parameters())
    with pytest.raises(TypeError, match="adaptive=True") as error:
        tiltsam.SAM(base, rho=2.0, adaptive=True)
    assert lines_to_write(error) == ["optimizer = tiltsam.ASAM(base, rho=2.0, model=model)"]
    with pytest.raises(TypeError, match="'adaptive'"):
        tiltsam.TSAM(base, adaptive=True)


@every_method
@pytest.mark.parametrize("half", ["first_step", "second_step"])
def test_halves_of_a_step_show_what_to_write(method, half):
    optimizer = method(sgd(Problem().model.parameters()))
    with pytest.raises(AttributeError, match=rf"(?s){half}.*def closure\(\):.*optimizer.step\(closure\)"):
        getattr(optimizer, half)(zero_grad=True)
    assert not hasattr(optimizer, half)


@every_method
@pytest.mark.parametrize("retain_graph", [False, True])
def test_graph_built_outside_the_closure_gets_a_hint(method, retain_graph):
    problem = Problem(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)))
    optimizer = method(sgd(problem.model.parameters()))
    loss = problem.loss()

    def closure():
        loss.backward(retain_graph=retain_graph)
        return loss

    with pytest.raises(RuntimeError, match=r"second time|inplace") as error:  # noqa: PT012 (ERM takes one pass a step)
        for _ in range(2):
            optimizer.step(closure)
    assert "inside it" in error.value.__notes__[0]


def test_other_errors_get_no_hint():
    problem = Problem()
    optimizer = tiltsam.SAM(sgd(problem.model.parameters()))

    def closure():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory") as error:
        optimizer.step(closure)
    assert not hasattr(error.value, "__notes__")


@every_method
def test_model_of_other_parameters_warns(method):
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.warns(RuntimeWarning, match="another copy"):
        method(sgd(one.parameters()), model=other)
    with warnings.catch_warnings(action="error"):
        method(sgd(one.parameters()), model=nn.Sequential(one, other))
        method(sgd(one.parameters()), model=other.requires_grad_(False))  # a frozen model


@pytest.mark.parametrize("cls", [tiltsam.SAM, tiltsam.TSAM])
def test_model_warning_points_at_the_caller(cls):
    problem, other = Problem(nn.Linear(6, 3)), nn.Linear(6, 3)
    with pytest.warns(RuntimeWarning, match="another copy") as caught:
        cls(sgd(problem.model.parameters()), model=other)
    assert [w.filename for w in caught] == [__file__]


@every_method
def test_step_without_closure(method):
    optimizer = method(sgd(Problem().model.parameters()))
    with pytest.raises(TypeError, match=r"(?s)def closure\(\):.*optimizer.step\(closure\)"):
        optimizer.step()


def test_bad_closures():
    problem = Problem()
    optimizer = tiltsam.SAM(sgd(problem.model.parameters()))
    for loss in (problem.closure(), [problem.closure()], 0.5):
        with pytest.raises(TypeError, match=r"SAM.step\(\) .*closure"):
            optimizer.step(loss)
    with pytest.raises(RuntimeError, match="no gradient"):
        optimizer.step(problem.loss)
    with pytest.raises(TypeError, match=r"ascent_closure .*GradScaler.*scaler="):
        optimizer.step(problem.closure, torch.amp.GradScaler("cpu"))
    with pytest.raises(TypeError, match=r"ascent_closure .*Tensor"):
        optimizer.step(problem.closure, problem.loss())
    with pytest.raises(RuntimeError, match="no gradient"):
        copy.deepcopy(optimizer).step(problem.closure)
    with pytest.raises(TypeError, match="NoneType"):
        optimizer.step(lambda: problem.closure() and None)
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        optimizer.step(lambda: problem.closure().expand(2))


def test_low_precision_weights_warn_once():
    model = nn.Linear(6, 3)
    problem = Problem(model, dtype=torch.bfloat16)
    optimizer = tiltsam.SAM(sgd(model.parameters()))
    with pytest.warns(RuntimeWarning, match="bfloat16") as found:
        optimizer.step(problem.closure)
    assert found[0].filename == __file__
    optimizer.step(problem.closure)  # a second warning would be an error


@pytest.mark.parametrize("path", ["step", "current_space", "compute_gradient", "hooked"])
def test_low_precision_warning_points_at_the_caller(path):
    problem = Problem(nn.Linear(6, 3), dtype=torch.bfloat16)
    optimizer = tiltsam.SAM(sgd(problem.model.parameters()))
    calls = {
        "step": lambda: optimizer.step(problem.closure),
        "current_space": optimizer.current_space,
        "compute_gradient": lambda: optimizer.compute_gradient(problem.closure),
        "hooked": lambda: torch.no_grad()(optimizer.step)(problem.closure),
    }
    with pytest.warns(RuntimeWarning, match="bfloat16") as caught:
        calls[path]()
    assert [w.filename for w in caught] == [__file__]


def batch_norm_net():
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def warnings_of(network, make, **options):
    problem = Problem(network)
    optimizer = make(sgd(problem.model.parameters()), **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer.step(problem.closure)
    return [(w.category, w.filename == __file__, "model=" in str(w.message)) for w in caught]


@pytest.mark.parametrize("make", [tiltsam.SAM, tiltsam.TSAM])
def test_batch_norm_without_model_warns_once(make):
    assert warnings_of(batch_norm_net(), make) == [(RuntimeWarning, True, True)]


def test_first_step_warns_before_the_update():
    """Where warnings are errors, the step is undone."""
    problem = Problem(batch_norm_net())
    optimizer = tiltsam.SAM(sgd(problem.model.parameters()))
    before = problem.model[0].weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(RuntimeWarning, match="model="):
                optimizer.step(problem.closure)
            assert torch.equal(problem.model[0].weight, before)
            assert optimizer.param_groups[0]["steps_taken"] == 0


@pytest.mark.parametrize("case", ["model", "buffers_once", "one pass", "eval", "no statistics", "none"])
def test_batch_norm_does_not_warn(case):
    model = batch_norm_net()
    other = batch_norm_net()  # of no optimizer
    make, options = tiltsam.SAM, {}
    if case == "model":
        options = {"model": model}
    elif case == "buffers_once":
        options = {"buffers_once": False}
    elif case == "one pass":
        make = tiltsam.ERM
    elif case == "eval":
        model.eval()
    elif case == "no statistics":
        model[1] = nn.BatchNorm1d(4, track_running_stats=False)
    else:
        model[1] = nn.LayerNorm(4)
    assert warnings_of(model, make, **options) == []
    assert other.training


@pytest.mark.parametrize("method", [tiltsam.SAM, tiltsam.ERM])
@pytest.mark.parametrize("returns_scaled", [False, True])
def test_scaled_closure_without_scaler_warns(method, returns_scaled):
    problem = Problem(nn.Linear(6, 3), dtype=torch.float32)
    optimizer = method(sgd(problem.model.parameters(), lr=1e-6))
    scaler = torch.amp.GradScaler("cpu")

    def closure():
        loss = problem.loss()
        scaled = scaler.scale(loss)
        scaled.backward()
        return scaled if returns_scaled else loss

    with pytest.warns(RuntimeWarning, match="scaler=") as caught:
        optimizer.step(closure)
    optimizer.step(closure)  # warns once: another would be an error
    assert [w.filename for w in caught] == [__file__]


@pytest.mark.parametrize("scaled", [False, True])
def test_large_gradients_do_not_warn(scaled):
    problem = Problem(nn.Linear(6, 3), dtype=torch.float32)
    optimizer = tiltsam.SAM(sgd(problem.model.parameters(), lr=1e-6))
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)

    def closure():
        loss = 1e5 * problem.loss()
        scaler.scale(loss).backward()
        return loss

    optimizer.step(closure, scaler=scaler if scaled else None)  # warnings are errors


def test_settings_given_by_position_are_refused():
    base = torch.optim.SGD([nn.Parameter(torch.ones(2))])
    with pytest.raises(TypeError, match=r"by name, as in SAM\(base, rho=0\.05\)"):
        tiltsam.SAM(base, 0.05)
    with pytest.raises(TypeError, match=r"by name, as in TSAM\(base, t=20\.0\)"):
        tiltsam.TSAM(base, 20.0, 0.1)
    with pytest.raises(TypeError, match=r"by name, as in SAM\(base, model=model\)$"):
        tiltsam.SAM(base, nn.Linear(2, 1))
    with pytest.raises(TypeError, match=r"by name, as in TSAM\(base, t=t\)$"):
        tiltsam.TSAM(base, lambda step: 20.0)


class MaxNorm(nn.Linear):
    """Constrains its weights in every forward pass."""

    in_place = True

    def forward(self, x):
        limited = torch.renorm(self.weight.detach(), 2, 0, 0.5)
        if self.in_place:
            self.weight.detach().copy_(limited)
        else:
            self.weight.data = limited
        return super().forward(x)


class MaxNormOfNewMemory(MaxNorm):
    in_place = False


@pytest.mark.parametrize("layer", [MaxNorm, MaxNormOfNewMemory])
def test_constraint_in_forward_warns_once(layer):
    """The passes of a step end with restoring the weights, which undoes the constraint."""
    problem = Problem(layer(6, 3))
    optimizer = tiltsam.SAM(sgd(problem.model.parameters()))
    with pytest.warns(RuntimeWarning, match="register_step_post_hook") as found:
        optimizer.step(problem.closure)
    assert found[0].filename == __file__
    optimizer.step(problem.closure)  # a second warning would be an error


def test_constraint_in_forward_persists_without_perturbation():
    problem = Problem(MaxNorm(6, 3))
    tiltsam.ERM(sgd(problem.model.parameters(), lr=0.0)).step(problem.closure)
    assert problem.model.weight.norm(dim=1).max() <= 0.5 + 1e-6
