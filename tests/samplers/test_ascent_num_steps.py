import pytest
import torch

import tiltsam


def test_ascent_num_steps():
    """N ascents of ρ/N, each along the gradient at its start, computed by hand on a quadratic."""
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
    scale = torch.tensor([1.0, 3.0], dtype=torch.float64)

    def closure():
        loss = (scale * weight.square()).sum() / 2
        loss.backward()
        return loss

    sampler = tiltsam.samplers.Ascent(num_steps=3)
    base = torch.optim.SGD([weight], lr=1.0)
    point = weight.detach().clone()
    for _ in range(3):
        gradient = scale * point
        point = point + 0.2 / 3 * gradient / gradient.norm()
    expected = weight.detach() - scale * point
    optimizer = tiltsam.TSAM(base, rho=0.2, radius=0.0, num_samples=1, sampler=sampler)
    optimizer.step(closure)
    torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=1e-12)
    assert optimizer.info.num_backwards == 4
    assert 0.19 < float(optimizer.info.perturbation_norms[0]) <= 0.2
    with pytest.raises(ValueError, match="share_ascent"):
        tiltsam.TSAM(base, sampler=sampler, share_ascent=True)
    with pytest.raises(ValueError, match="num_steps"):
        tiltsam.samplers.Ascent(num_steps=0)
