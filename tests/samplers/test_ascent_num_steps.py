import pytest
import torch

import tiltsam


@pytest.mark.parametrize("options", [{"sampler": tiltsam.samplers.Ascent(num_steps=3)}, {"ascent_steps": 3}])
def test_ascent_num_steps(options):
    """N ascents of ρ/N, each along the gradient at its start, computed by hand on a quadratic."""
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
    scale = torch.tensor([1.0, 3.0], dtype=torch.float64)

    def closure():
        loss = (scale * weight.square()).sum() / 2
        loss.backward()
        return loss

    base = torch.optim.SGD([weight], lr=1.0)
    point = weight.detach().clone()
    for _ in range(3):
        gradient = scale * point
        point = point + 0.2 / 3 * gradient / gradient.norm()
    expected = weight.detach() - scale * point
    optimizer = tiltsam.TSAM(base, rho=0.2, radius=0.0, num_samples=1, **options)
    optimizer.step(closure)
    torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=1e-12)
    assert optimizer.info.num_backwards == 4
    assert 0.19 < float(optimizer.info.perturbation_norms[0]) <= 0.2
    with pytest.raises(ValueError, match="share"):
        tiltsam.TSAM(base, **options, share_ascent=True)


def test_ascent_steps_are_checked():
    base = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    with pytest.raises(ValueError, match=r"ascent_steps must be an integer >= 1, got 0"):
        tiltsam.TSAM(base, ascent_steps=0)
    with pytest.raises(ValueError, match=r"ascent_steps needs sampler=\"ascent\", got 'uniform'"):
        tiltsam.TSAM(base, ascent_steps=2, sampler="uniform")
    with pytest.raises(ValueError, match="num_steps"):
        tiltsam.samplers.Ascent(num_steps=0)
