"""StepInfo and the counter of samples that were not finite."""

import pytest
import torch

import tiltsam
from helpers.cases import Problem, sgd, train
from tiltsam.optim.sharpness_aware import _MAX_PENDING
from tiltsam.optim.step_info import StepInfo

TABLE = torch.tensor([[1.0, 3.0], [0.25, 0.75], [0.5, 2.5], [0.1, 0.2], [4.0, 5.0], [1.0, 1.0]])


def info_of(table=TABLE, valid=(True, True)):
    made = []

    def make():
        made.append(1)
        return table

    valid = [torch.tensor(v) for v in valid]
    return StepInfo(torch.tensor(2.5), make, dict, valid, num_forwards=4, num_backwards=4), made


def test_table_is_made_once_and_only_when_read():
    info, made = info_of()
    assert (info.loss, info.num_forwards, info.num_parts) == (2.5, 4, 1)
    assert "num_forwards=4" in repr(info)
    assert not made
    assert info.losses.tolist() == [1.0, 3.0]
    assert info.weights.tolist() == [0.25, 0.75]
    assert info.start_losses.tolist() == [0.5, 2.5]
    assert info.perturbation_norms.tolist() == pytest.approx([0.1, 0.2])
    assert info.gradient_norms.tolist() == [4.0, 5.0]
    assert info.effective_sample_size.item() == pytest.approx(1 / (0.25**2 + 0.75**2))
    assert info.sampler == {}
    assert made == [1]


@pytest.mark.parametrize("valid", [(True, False), (1.0, 0.0)], ids=["bool", "float"])
def test_num_nonfinite_is_an_integer(valid):
    info, made = info_of(valid=valid)
    assert info.num_nonfinite == 1
    assert info.num_nonfinite.dtype == torch.int64
    assert not made


def test_info_of_a_step_does_not_change_with_the_next():
    problem = Problem()
    optimizer = tiltsam.TSAM(sgd(problem.model.parameters()), num_samples=2, model=problem.model)
    train(problem, optimizer, 1)
    info = optimizer.info
    losses, unread = info.losses.clone(), info
    train(problem, optimizer, 1)
    assert optimizer.info is not info
    assert torch.equal(info.losses, losses)
    assert not torch.equal(optimizer.info.losses, losses)
    assert unread.perturbation_norms.isfinite().all()


def test_sampler_numbers():
    problem = Problem()
    optimizer = tiltsam.TSAM(sgd(problem.model.parameters()), num_samples=2, sampler="hmc", model=problem.model)
    train(problem, optimizer, 1)
    assert {name: value.shape for name, value in optimizer.info.sampler.items()} == {
        name: (2,) for name in ("acceptance", "energy_error", "divergence")
    }


def test_info_before_the_first_step():
    optimizer = tiltsam.SAM(sgd(Problem().model.parameters()))
    assert not hasattr(optimizer, "info")
    with pytest.raises(AttributeError, match="no step"):
        _ = optimizer.info


def test_nonfinite_samples_are_counted_without_keeping_them_all():
    problem = Problem()
    optimizer = tiltsam.SAM(sgd(problem.model.parameters()), model=problem.model)

    def diverging():
        return problem.closure() * torch.nan

    for _ in range(_MAX_PENDING + 44):
        optimizer.step(diverging)
        assert len(optimizer._valid) <= _MAX_PENDING
    with pytest.warns(RuntimeWarning, match=r"^300 samples"):
        optimizer.check_nonfinite()
    optimizer.check_nonfinite()  # nothing new: a warning would be an error
    optimizer.step(diverging)
    with pytest.warns(RuntimeWarning, match=r"^1 sample had"):
        optimizer.check_nonfinite()
