"""Slices against the closed form of a bowl, directions against their definition."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from helpers.measuring import Bowl, call, convnet, cross_entropy, mse, unequal_batches
from tiltsam.curvature import top_eigenvalues
from tiltsam.landscape import between, random_direction, slice_1d, slice_2d

ONE = [torch.ones(1)]


def test_slices_of_quadratic_are_parabolas() -> None:
    bowl = Bowl([2.0, 1.0], [0.0, 0.0])
    x = {"theta": torch.tensor([1.0, 0.0], dtype=torch.float64)}
    y = {"theta": torch.tensor([0.0, 1.0], dtype=torch.float64)}
    line = slice_1d(bowl, call, ONE, x, span=(-2, 2), num_points=9)
    torch.testing.assert_close(line.losses, line.positions.square())
    plane = slice_2d(bowl, call, ONE, x, y, span_x=(-1, 1), span_y=(-2, 2), num_points=5)
    torch.testing.assert_close(plane.losses, plane.x.square() + 0.5 * plane.y[:, None].square())


def test_slice_2d_warns_of_parallel_directions() -> None:
    model = convnet()
    x, y = random_direction(model), random_direction(model, index=1)
    slice_2d(model, cross_entropy, unequal_batches(), x, y, num_points=2)
    for parallel in (x, {name: -2 * part for name, part in x.items()}):
        with pytest.warns(UserWarning, match=r"random_direction\(model, index=1\)"):
            slice_2d(model, cross_entropy, unequal_batches(), x, parallel, num_points=2)


def test_slice_along_eigenvector_curves_by_eigenvalue() -> None:
    model, data = convnet(), unequal_batches()
    found = top_eigenvalues(model, cross_entropy, data, k=1, tol=1e-6)
    line = slice_1d(model, cross_entropy, data, found.direction(0), span=(-1e-3, 1e-3), num_points=3)
    assert line.positions[1] == 0.0
    bend = (line.losses[0] - 2 * line.losses[1] + line.losses[2]) / 1e-6
    assert float(bend) == pytest.approx(float(found.values[0]), rel=1e-4)


def test_random_direction_has_filter_norms() -> None:
    model = convnet()
    direction = random_direction(model, seed=1)
    for name, param in model.named_parameters():
        if param.dim() < 2:
            assert not direction[name].any()
        else:
            torch.testing.assert_close(direction[name].flatten(1).norm(dim=1), param.detach().flatten(1).norm(dim=1))
    again, other = random_direction(model, seed=1), random_direction(model, seed=1, index=1)
    assert torch.equal(direction["0.weight"], again["0.weight"])
    assert not torch.equal(direction["0.weight"], other["0.weight"])
    whole = random_direction(model, normalize="layer")["0.weight"]
    torch.testing.assert_close(whole.norm(), model[0].weight.detach().norm())
    assert random_direction(model, normalize="none")["1.bias"].any()
    with pytest.raises(ValueError, match="normalize"):
        random_direction(model, normalize="row")  # type: ignore[arg-type]


def test_random_direction_warns_if_zero() -> None:
    """Where biases alone are trained, none of the parameters has filters, and every slice would be flat."""
    model = nn.Linear(3, 2)
    model.weight.requires_grad_(False)
    for normalize in ("filter", "layer"):
        with pytest.warns(UserWarning, match=r"zero.* normalize='none'"):
            assert not random_direction(model, normalize=normalize)["bias"].any()
    assert random_direction(model, normalize="none")["bias"].all()


def test_filter_normalisation_is_scale_invariant() -> None:
    """A ReLU network scaled up in one layer and down in the next is the same function, and has the same slice."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 1, bias=False)).double()
    data = [(torch.randn(8, 3).double(), torch.randn(8, 1).double())]
    losses = []
    for factor in (1.0, 10.0):
        with torch.no_grad():
            model[0].weight.mul_(factor)
            model[2].weight.div_(factor)
        losses.append(slice_1d(model, mse, data, random_direction(model), num_points=5).losses)
    torch.testing.assert_close(*losses)


def test_between_is_exact_at_both_ends() -> None:
    start, end, data = convnet().eval(), convnet().eval(), unequal_batches()
    with torch.no_grad():
        for p in end.parameters():
            p.add_(torch.randn_like(p), alpha=0.3)
        end[1].running_mean.add_(1.0)
    for model, ends in [(start, (start, end)), (convnet(), (start.state_dict(), end.state_dict()))]:
        line = between(model, cross_entropy, data, *ends, num_points=5)
        at_start = between(start, cross_entropy, data, start, start, num_points=2).losses[0]
        at_end = between(end, cross_entropy, data, end, end, num_points=2).losses[1]
        assert line.losses[0] == at_start
        assert line.losses[-1] == at_end
        assert line.losses[0] != line.losses[-1]
    with pytest.raises(ValueError, match="state dict"):
        between(start, cross_entropy, data, start, nn.Linear(2, 2))


class Noted(nn.Linear):
    """A layer that keeps more than tensors in its state dict."""

    def __init__(self, note: object) -> None:
        super().__init__(2, 1)
        self.note = note

    def get_extra_state(self) -> object:
        return self.note

    def set_extra_state(self, state: object) -> None:
        self.note = state


@pytest.mark.parametrize("note", ["a note", torch.ones(2)], ids=["text", "tensor"])
def test_between_keeps_extra_state(note: object) -> None:
    ends, data = (Noted(note), Noted(torch.zeros(3))), [(torch.randn(4, 2), torch.randn(4, 1))]
    line = between(ends[0], mse, data, *ends, num_points=3)
    with torch.no_grad():
        expected = [float(mse(end, data[0])) for end in ends]
    assert line.losses[[0, -1]].tolist() == pytest.approx(expected, rel=1e-6)
    assert ends[0].note is note


@pytest.mark.parametrize(
    "end",
    [{"model": nn.Linear(2, 1).state_dict()}, {**nn.Linear(2, 1).state_dict(), "epoch": 3}, nn.Linear(3, 1), {}],
    ids=["checkpoint", "more", "shape", "empty"],
)
def test_between_rejects_other_state_dicts(end: Any) -> None:
    model, data = nn.Linear(2, 1), [(torch.randn(4, 2), torch.randn(4, 1))]
    for ends in ((model, end), (end, model)):
        with pytest.raises(ValueError, match="state dict"):
            between(model, mse, data, *ends)


def test_between_moves_and_restores_frozen_parameters() -> None:
    model = convnet()
    model[0].weight.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    other = {name: tensor * 0 if tensor.is_floating_point() else tensor for name, tensor in before.items()}
    other["1.running_var"] = torch.ones(3, dtype=torch.float64)
    line = between(model, cross_entropy, unequal_batches(), model, other, num_points=2)
    assert float(line.losses[-1]) == pytest.approx(math.log(3), rel=1e-9)  # all weights zero: a fair guess
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("options", [{"span": (1.0, -1.0)}, {"num_points": 1}, {"span": (0.0, math.inf)}], ids=str)
def test_slice_rejects_bad_span(options: dict[str, Any]) -> None:
    model = convnet()
    with pytest.raises(ValueError, match=next(iter(options))):
        slice_1d(model, cross_entropy, unequal_batches(), random_direction(model), **options)


def test_slice_rejects_direction_without_parameters() -> None:
    with pytest.raises(ValueError, match="parameter, got none"):
        slice_1d(convnet(), cross_entropy, unequal_batches(), {})


def test_slice_rejects_direction_of_other_shape() -> None:
    for direction in ({"nothing": torch.ones(1)}, {"0.weight": torch.ones(2)}):
        with pytest.raises(ValueError, match="direction"):
            slice_1d(convnet(), cross_entropy, unequal_batches(), direction)
