import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiltsam.tilting import (
    StreamingTilt,
    effective_sample_size,
    tilted_loss,
    tilted_mean,
    tilted_var,
    tilted_weights,
)

LOSSES = st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=12).map(lambda x: torch.tensor(x, dtype=torch.float64))
TILTS = st.one_of(st.just(0.0), st.floats(1e-9, 1e6))
# The same examples everywhere and always, however long a busy machine takes to make them.
EXAMPLES = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def close(a, b, scale=1.0):
    return torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9 * max(1.0, scale))


@EXAMPLES
@given(LOSSES, TILTS)
def test_between_mean_and_max(x, t):
    value = tilted_loss(x, t)
    slack = 1e-9 * (1 + x.abs().max())
    assert value.isfinite()
    assert x.mean() - slack <= value <= x.max() + slack
    if t > 0:
        assert value >= x.max() - math.log(len(x)) / t - slack  # the mean of exp is at least its largest term over s


@EXAMPLES
@given(LOSSES, TILTS, st.floats(-1e3, 1e3))
def test_shift_adds_and_leaves_weights_alone(x, t, c):
    close(tilted_loss(x + c, t), tilted_loss(x, t) + c, 1e4)
    # Rounding of x + c moves t·(difference) by up to t·1e-12.
    torch.testing.assert_close(tilted_weights(x + c, t), tilted_weights(x, t), rtol=1e-9, atol=1e-9 + t * 1e-11)


@EXAMPLES
@given(LOSSES, TILTS, st.randoms(use_true_random=False))
def test_order_and_chunks_do_not_matter(x, t, random):
    order = list(range(len(x)))
    random.shuffle(order)
    cut = random.randint(0, len(x))
    tilt = StreamingTilt(t)
    for part in (x[order[:cut]], x[order[cut:]]):
        if len(part):
            tilt.add(part)
    close(tilt.loss(), tilted_loss(x, t), 1e4)
    close(tilt.mean(), tilted_mean(x, t), 1e4)


@EXAMPLES
@given(LOSSES, TILTS)
def test_shares_rebuild_the_weighted_mean(x, t):
    tilt, running = StreamingTilt(t), torch.zeros((), dtype=torch.float64)
    payload = torch.arange(len(x), dtype=torch.float64)
    for loss, value in zip(x, payload, strict=True):
        running += tilt.add(loss) * (value - running)
    close(running, (tilted_weights(x, t) * payload).sum(), 10.0)


def test_against_torch_logsumexp_and_softmax():
    x = torch.randn(20, dtype=torch.float64)
    for t in (0.1, 1.0, 30.0):
        close(tilted_loss(x, t), (torch.logsumexp(t * x, 0) - math.log(20)) / t)
        close(tilted_weights(x, t), torch.softmax(t * x, 0))
        w = torch.softmax(t * x, 0)
        close(tilted_mean(x, t), (w * x).sum())
        close(tilted_var(x, t), (w * x**2).sum() - (w * x).sum() ** 2)


def test_limits():
    x = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)
    assert tilted_loss(x, 0.0) == x.mean()
    close(tilted_loss(x, 1e-9), x.mean() + 0.5e-9 * x.var(correction=0))  # the small-t expansion, to its last digit
    close(tilted_loss(x, 1e9), x.max(), 10)
    assert torch.equal(tilted_weights(x, 0.0), torch.full((3,), 1 / 3, dtype=torch.float64))
    close(tilted_var(x, 0.0), x.var(correction=0))


def test_extremes_in_float32():
    x = torch.tensor([1e4, 1e4 + 1e-2, 9e3])
    for t in (0.0, 1.0, 1e6):
        assert tilted_loss(x, t).isfinite()
        assert torch.testing.assert_close(tilted_weights(x, t).sum(), torch.tensor(1.0)) is None
    assert tilted_weights(x, 1e6).tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_tilts_beyond_the_range_of_float32_are_the_limits(dtype):
    x = torch.tensor([1.0, 2.0, 6.0], dtype=dtype)
    for t in (1e-300, 1e-46, 1e-39):
        torch.testing.assert_close(tilted_loss(x, t), x.mean())
        torch.testing.assert_close(tilted_weights(x, t), torch.full((3,), 1 / 3, dtype=dtype))
        torch.testing.assert_close(tilted_var(x, t), x.var(correction=0))
    for t in (1e38, 1e39, 1e300):
        assert tilted_loss(x, t) == x.max()
        assert tilted_mean(x, t) == x.max()
        assert tilted_weights(x, t).tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_infinite_losses_share_all_the_weight(dtype):
    x = torch.tensor([1.0, math.inf, -2.0, math.inf], dtype=dtype)
    for t in (0.5, 1e6):
        assert tilted_weights(x, t).tolist() == [0.0, 0.5, 0.0, 0.5]
        for order in (x, x.flip(0)):
            tilt = StreamingTilt(t)
            shares = [float(tilt.add(loss)) for loss in order]
            assert tilt.loss() == tilt.mean() == math.inf
        assert shares == [1.0, 0.0, 0.5, 0.0]  # of the last order: inf, -2, inf, 1
    assert tilted_weights(x, 0.0).tolist() == [0.25] * 4


def test_variance_of_losses_far_apart():
    """What has no weight adds nothing, however far away it is."""
    for low in (-1e30, -math.inf):
        assert tilted_var(torch.tensor([1.0, low, 1.0]), 2.0) == 0
    torch.testing.assert_close(
        tilted_var(torch.tensor([1.0, -1e30, 2.0]), 1.0), tilted_var(torch.tensor([1.0, 2.0]), 1.0)
    )


@pytest.mark.parametrize("t", [0.0, 1.0])
def test_variance_of_half_precision_losses_is_that_of_their_values(t):
    x = torch.tensor([1.0, 2.0, 2.5, 4.0], dtype=torch.bfloat16)
    torch.testing.assert_close(tilted_var(x, t), tilted_var(x.float(), t))


def test_gradient_is_the_weights():
    x = torch.randn(6, dtype=torch.float64, requires_grad=True)
    for t in (0.0, 1e-6, 2.0, 500.0):
        (g,) = torch.autograd.grad(tilted_loss(x, t), x)
        close(g, tilted_weights(x.detach(), t))


def test_tensor_tilt_equals_number():
    x = torch.randn(5)
    for t in (0.0, 0.5, 40.0):
        assert torch.equal(tilted_loss(x, torch.tensor(t)), tilted_loss(x, t))
        assert torch.equal(tilted_weights(x, torch.tensor(t)), tilted_weights(x, t))


@pytest.mark.parametrize("t", [0.0, 3.0])
def test_invalid_losses_get_no_weight(t):
    x = torch.tensor([1.0, math.nan, 2.0, math.inf])
    ok = x.isfinite()
    weights = tilted_weights(x, t, ok)
    assert weights[~ok].tolist() == [0.0, 0.0]
    torch.testing.assert_close(weights[ok], tilted_weights(x[ok], t))
    tilt = StreamingTilt(t)
    shares = [tilt.add(loss, valid) for loss, valid in zip(x.flip(0), ok.flip(0), strict=True)]
    assert shares[0] == 0
    assert shares[1] == 1
    torch.testing.assert_close(tilt.loss(), tilted_loss(x[ok], t))
    assert tilted_weights(x, t, torch.zeros(4, dtype=torch.bool)).tolist() == [0.0] * 4


def test_effective_sample_size():
    assert effective_sample_size(torch.tensor([0.25] * 4)) == 4
    assert effective_sample_size(torch.tensor([0.0, 1.0, 0.0])) == 1


def test_bad_arguments():
    with pytest.raises(ValueError, match="finite, got nan"):
        tilted_loss(torch.ones(2), math.nan)
    with pytest.raises(ValueError, match="empty"):
        tilted_loss(torch.ones(0), 1.0)
    with pytest.raises(ValueError, match="no loss was added"):
        StreamingTilt(1.0).loss()


@EXAMPLES
@given(LOSSES, st.floats(1e-9, 1e6))
def test_negative_tilt_is_that_of_negative_losses(x, t):
    for found, mirrored in (
        (tilted_loss(x, -t), -tilted_loss(-x, t)),
        (tilted_mean(x, -t), -tilted_mean(-x, t)),
        (tilted_var(x, -t), tilted_var(-x, t)),
        (tilted_weights(x, -t), tilted_weights(-x, t)),
        (tilted_loss(x, torch.tensor(-t)), -tilted_loss(-x, torch.tensor(t))),
    ):
        assert torch.equal(found, mirrored)
    assert x.min() - 1e-9 * (1 + x.abs().max()) <= tilted_loss(x, -t) <= x.mean() + 1e-9 * (1 + x.abs().max())
    tilt = StreamingTilt(-t)
    for loss in x:
        tilt.add(loss)
    close(tilt.loss(), tilted_loss(x, -t), 1e4)
    close(tilt.mean(), tilted_mean(x, -t), 1e4)
    close(tilt.weights(x), tilted_weights(x, -t))
