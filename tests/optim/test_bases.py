"""Which optimizers can be the base of a method. ``docs/bases.md`` shows the table below."""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tiltsam
from helpers.cases import Problem, assert_same, train

PAGE = Path(tiltsam.__file__).parents[2] / "docs" / "bases.md"
STEPS = 4


@dataclass(frozen=True)
class Base:
    """An optimizer, and what becomes of it as a base.

    Args:
        name: As in the documentation.
        make: Make it over the parameters of a model; by default with its own defaults.
        remark: What a user must know.
        refused: The error, if it cannot be a base. Then ``remark`` is the reason.
        match: A part of the error's message.
        reproducible: Whether it rounds alike in every run, wherever its tensors are in memory.
    """

    name: str
    make: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    remark: str = ""
    refused: type[Exception] | None = None
    match: str = ""
    reproducible: bool = True

    def __call__(self, model):
        if self.make is not None:
            return self.make(model)
        module, _, cls = self.name.rpartition(".")
        return getattr(pytest.importorskip(module), cls)(model.parameters(), lr=0.01)

    def __repr__(self):
        return self.name

    def assert_equal(self, a, b):
        """Bit for bit, if the optimizer itself is."""
        if self.reproducible:
            assert_same(a, b)
        else:
            torch.testing.assert_close(a, b)


def third_party(cls, *args, **kwargs):
    return getattr(pytest.importorskip("pytorch_optimizer"), cls)(*args, **kwargs)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def matrices(model):
    return [p for p in model.parameters() if p.dim() == 2]


def vectors(model):
    return [p for p in model.parameters() if p.dim() != 2]


def muon_with_adamw(model):
    return third_party(
        "Muon", [{"params": matrices(model), "use_muon": True}, {"params": vectors(model), "use_muon": False}]
    )


def schedule_free(cls, *args, **kwargs):
    optimizer = third_party(cls, *args, **kwargs)
    optimizer.train()
    return optimizer


def zero(model, **options):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01, **options)


EVALUATE = "call `optimizer.base.train()` before training and `optimizer.base.eval()` before evaluation"
BASES = [
    Base("torch.optim.ASGD"),
    Base(
        "torch.optim.Adadelta",
        remark="its own `rho` keeps the name; ours is `tilt_rho`: rename the entry of `norm_groups`",
    ),
    Base("torch.optim.Adafactor"),
    Base("torch.optim.Adagrad"),
    Base("torch.optim.Adam"),
    Base("torch.optim.AdamW"),
    Base("torch.optim.Adamax"),
    Base("torch.optim.Muon", lambda model: torch.optim.Muon(matrices(model)), "takes matrices only"),
    Base("torch.optim.NAdam"),
    Base("torch.optim.RAdam"),
    Base("torch.optim.RMSprop"),
    Base("torch.optim.Rprop"),
    Base("torch.optim.SGD", sgd),
    Base(
        "torch.distributed.optim.ZeroRedundancyOptimizer",
        zero,
        "call `optimizer.base.consolidate_state_dict()` before `state_dict()`",
    ),
    Base("pytorch_optimizer.AdaBelief"),
    Base(
        "pytorch_optimizer.Kron",
        remark="draws from torch's global random state, save that too; repeats a run up to rounding only",
        reproducible=False,
    ),
    Base("pytorch_optimizer.Lion"),
    Base(
        "pytorch_optimizer.Lookahead",
        lambda model: third_party("Lookahead", sgd(model), k=3),
        "not for methods that keep a vector between steps: its `state_dict()` has no place for it",
    ),
    Base("pytorch_optimizer.Muon", muon_with_adamw),
    Base("pytorch_optimizer.Prodigy", lambda model: third_party("Prodigy", model.parameters())),
    Base("pytorch_optimizer.SOAP"),
    Base(
        "pytorch_optimizer.ScheduleFreeAdamW",
        lambda model: schedule_free("ScheduleFreeAdamW", model.parameters()),
        EVALUATE,
    ),
    Base(
        "pytorch_optimizer.ScheduleFreeSGD",
        lambda model: schedule_free("ScheduleFreeSGD", model.parameters()),
        EVALUATE,
    ),
    Base(
        "pytorch_optimizer.ScheduleFreeWrapper",
        lambda model: schedule_free("ScheduleFreeWrapper", sgd(model)),
        EVALUATE,
    ),
    Base("pytorch_optimizer.Shampoo"),
    Base(
        "torch.optim.LBFGS",
        remark="evaluates the closure itself, several times a step",
        refused=TypeError,
        match="LBFGS",
    ),
    Base(
        "torch.optim.SparseAdam",
        remark="takes sparse gradients; the mean of several is dense",
        refused=TypeError,
        match="SparseAdam",
    ),
    Base(
        "torch.distributed.optim.ZeroRedundancyOptimizer(overlap_with_ddp=True)",
        lambda model: zero(model, overlap_with_ddp=True),
        "steps during backward",
        TypeError,
        "overlap_with_ddp",
    ),
    Base(
        "pytorch_optimizer.AdaHessian",
        remark="differentiates the gradient, whose graph is gone",
        refused=RuntimeError,
        match="does not require grad",
    ),
]
working = pytest.mark.parametrize("base", [b for b in BASES if b.refused is None], ids=repr)


@pytest.fixture(autouse=True)
def _process_group(request):
    """A group of this process alone, for the base that needs one."""
    if "Zero" not in request.node.name:
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def small_problem():
    torch.manual_seed(1)
    return Problem(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), dtype=torch.float32)


def save(problem, optimizer, scheduler):
    if hasattr(optimizer.base, "consolidate_state_dict"):
        optimizer.base.consolidate_state_dict()
    file = io.BytesIO()
    parts = (problem.model, optimizer, scheduler)
    torch.save([*(part.state_dict() for part in parts), torch.get_rng_state()], file)
    file.seek(0)
    return file


@working
def test_base_steps_as_without_us(base):
    """Without a perturbation the weights are bitwise those of the bare base."""
    ours, plain = small_problem(), small_problem()
    before = ours.weights()
    torch.manual_seed(2)
    train(ours, tiltsam.SAM(base(ours.model), rho=0.0), STEPS)
    torch.manual_seed(2)
    bare = base(plain.model)
    for _ in range(STEPS):
        plain.model.zero_grad()
        plain.closure()
        bare.step()
    base.assert_equal(ours.weights(), plain.weights())
    assert any(not torch.equal(before[name], value) for name, value in ours.weights().items())


@working
def test_base_resumes_bitwise_with_a_scheduler(base):
    def fresh():
        problem = small_problem()
        optimizer = tiltsam.TSAM(base(problem.model), t=5.0, rho=0.05, model=problem.model)
        return problem, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, STEPS // 2, gamma=0.5)

    unbroken, optimizer, scheduler = fresh()
    rate = optimizer.param_groups[0]["lr"]
    train(unbroken, optimizer, STEPS, scheduler)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(rate / 4)
    file = save(unbroken, optimizer, scheduler)
    train(unbroken, optimizer, STEPS, scheduler)

    resumed, optimizer, scheduler = fresh()
    *states, random_state = torch.load(file, weights_only=True)
    for part, state in zip((resumed.model, optimizer, scheduler), states, strict=True):
        part.load_state_dict(state)
    torch.set_rng_state(random_state)
    train(resumed, optimizer, STEPS, scheduler)
    base.assert_equal(unbroken.weights(), resumed.weights())
    assert optimizer.param_groups[0]["lr"] == pytest.approx(rate / 16)


@pytest.mark.parametrize("base", [b for b in BASES if b.refused is not None], ids=repr)
def test_base_is_refused(base):
    """When it is wrapped, or by the first step, which restores the weights."""
    problem = small_problem()
    before = problem.weights()
    with pytest.raises(base.refused, match=base.match):
        tiltsam.SAM(base(problem.model), rho=0.05).step(problem.closure)
    assert_same(before, problem.weights())


def test_schedule_free_evaluates_the_average():
    """The weights of ``eval()`` are others, and ``train()`` brings the former back."""
    problem = small_problem()
    optimizer = tiltsam.SAM(schedule_free("ScheduleFreeSGD", problem.model.parameters(), lr=0.5), rho=0.05)
    train(problem, optimizer, 2 * STEPS)
    trained = problem.weights()
    optimizer.base.eval()
    assert any(not torch.equal(trained[name], value) for name, value in problem.weights().items())
    optimizer.base.train()
    for name, value in problem.weights().items():
        torch.testing.assert_close(value, trained[name])


def test_all_optimizers_of_torch_are_in_the_table():
    found = {f"torch.optim.{name}" for name in torch.optim.__all__ if name[0].isupper() and name != "Optimizer"}
    assert found == {base.name for base in BASES if re.fullmatch(r"torch\.optim\.\w+", base.name)}


def test_page_shows_the_table():
    rows = [
        f"| `{base.name}` | {'works' if base.refused is None else 'refused'} | {base.remark} |".replace("|  |", "| |")
        for base in BASES
    ]
    shown = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert shown == rows, "docs/bases.md must show:\n" + "\n".join(rows)
