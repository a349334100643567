"""Samples of a step and their weights."""

import pytest
import torch

from tiltsam.samplers import Draw
from tiltsam.space.step_record import FixedWeights, StepRecord, unpack
from tiltsam.tilting import StreamingTilt


def draw(loss, *, valid=True, info=None):
    number = torch.tensor(loss, dtype=torch.float64)
    return Draw(number, [torch.ones(2)], number + 1, torch.tensor(valid), number - 1, info or {})


def test_record_of_one_sample():
    record = StepRecord(None)
    assert record.add(draw(2.0), torch.tensor(0.5, dtype=torch.float64))
    assert record.loss() == 2.0
    assert record.table()[:, 0].tolist() == [2.0, 1.0, 1.0, 0.5, 3.0, 1.0]


def test_record_of_one_invalid_sample():
    record = StepRecord(None)
    record.add(draw(2.0, valid=False), torch.tensor(0.5, dtype=torch.float64))
    assert record.loss().isnan()
    assert record.table()[1].tolist() == [0.0]


@pytest.mark.parametrize("make", [lambda: StreamingTilt(2.0), lambda: FixedWeights(torch.tensor([0.2, 0.5, 0.3]))])
def test_running_shares_give_the_weighted_mean(make):
    losses, valid = (1.0, 1.5, torch.nan), (True, True, False)
    record, mean = StepRecord(make()), 0.0
    for loss, ok in zip(losses, valid, strict=True):
        share = record.add(draw(loss, valid=ok), torch.zeros((), dtype=torch.float64))
        mean += share.item() * ((loss if ok else 0.0) - mean)
    weights = record.table()[1]
    assert weights[2] == 0
    assert weights.sum() == pytest.approx(1.0)
    assert mean == pytest.approx((weights[:2] * torch.tensor([1.0, 1.5])).sum().item())


def test_fixed_weights_of_invalid_samples_are_redistributed():
    record = StepRecord(FixedWeights(torch.tensor([0.25, 0.25, 0.5])))
    samples = [draw(1.0), draw(torch.nan, valid=False), draw(4.0)]
    shares = [record.add(sample, torch.zeros((), dtype=torch.float64)).item() for sample in samples]
    assert shares == pytest.approx([1.0, 0.0, 2 / 3])
    assert record.loss() == pytest.approx(3.0)
    assert record.table()[1].tolist() == pytest.approx([1 / 3, 0.0, 2 / 3])


def test_weights_are_those_of_the_step_after_the_tilt_has_changed():
    """A schedule writes the next tilt into the same tensor."""
    tilt = torch.tensor(2.0, dtype=torch.float64)
    record = StepRecord(StreamingTilt(tilt))
    for loss in (1.0, 1.5):
        record.add(draw(loss), torch.zeros((), dtype=torch.float64))
    tilt.fill_(0.0)
    torch.testing.assert_close(record.table()[1], torch.tensor([2.0, 3.0], dtype=torch.float64).softmax(0))


def test_fixed_weights_may_extrapolate():
    weighting = FixedWeights(torch.tensor([-1.0, 2.0]))
    for loss in torch.tensor([1.0, 4.0]):
        weighting.add(loss, torch.tensor(True))
    assert weighting.loss() == 7.0


def test_fixed_weights_without_a_valid_sample():
    weighting = FixedWeights(torch.tensor([0.5, 0.5]))
    for _ in range(2):
        assert weighting.add(torch.tensor(torch.nan), torch.tensor(False)) == 0
    assert weighting.loss().isnan()


def test_pack_and_unpack():
    record = StepRecord(FixedWeights(torch.tensor([0.25, 0.75], dtype=torch.float64)))
    for loss in (1.0, 2.0):
        record.add(draw(loss), torch.tensor(0.5, dtype=torch.float64))
    loss, table = unpack(record.pack())
    assert loss == 1.75
    assert torch.equal(table, record.table())


def test_sampler_info_is_stacked():
    record = StepRecord(FixedWeights(torch.ones(2)))
    for loss, value in ((1.0, 0.3), (2.0, 0.7)):
        record.add(draw(loss, info={"acceptance": torch.tensor(value)}), torch.zeros(()))
    other = StepRecord(FixedWeights(torch.ones(2)), reported=record)
    for one in (record, other):
        torch.testing.assert_close(one.sampler_info(), {"acceptance": torch.tensor([0.3, 0.7])})


def test_record_does_not_keep_gradients():
    record = StepRecord(None)
    record.add(draw(1.0), torch.zeros(()))
    assert record._draws[0].gradient is None


def test_fixed_weights_of_a_subset():
    """A rank that draws samples 1 and 3 uses their weights, not the first two."""
    weights = FixedWeights(torch.tensor([0.4, 0.3, 0.2, 0.1])).subset([1, 3])
    shares = [weights.add(torch.tensor(1.0), torch.tensor(True)) for _ in range(2)]
    torch.testing.assert_close(torch.stack(shares), torch.tensor([1.0, 0.25]))
