"""Copies of a model's buffers, and restoring without interruption."""

import pytest
import torch
from torch import nn

from tiltsam.space.model_state import BufferSnapshot, ModelState, restored_buffers, uninterrupted


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("floats", torch.arange(3.0))
        self.register_buffer("integers", torch.arange(3))
        self.register_buffer("expanded", torch.zeros(1).expand(4))
        self.register_buffer("absent", None)
        self.register_buffer("empty", torch.zeros(0))

    def change(self):
        self.floats += 1
        self.integers = self.integers + 1
        self.absent = torch.ones(2)


def assert_original(model, tensors):
    assert model.floats is tensors["floats"]
    assert model.floats.tolist() == [0.0, 1.0, 2.0]
    assert model.integers is tensors["integers"]
    assert model.integers.tolist() == [0, 1, 2]
    assert model.absent is None


def test_copy_that_raises_leaves_the_earlier_snapshot(monkeypatch):
    model, snapshot = Buffers(), BufferSnapshot()
    tensors = dict(model._buffers)
    snapshot.save(model.modules())
    model.register_buffer("another", torch.ones(2))

    def clone(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", clone)
        with pytest.raises(KeyboardInterrupt):
            snapshot.save(model.modules())
    model.change()
    snapshot.restore()
    assert_original(model, tensors)
    snapshot.save(model.modules())
    model.another += 1
    snapshot.restore()
    assert model.another.tolist() == [1.0, 1.0]


def test_snapshot_restores_values_and_tensors():
    model, snapshot = Buffers(), BufferSnapshot()
    tensors = dict(model._buffers)
    for _ in range(2):  # the second save reuses the memory of the first
        snapshot.save(model.modules())
        model.change()
        for _ in range(2):
            snapshot.restore()
            assert_original(model, tensors)


def test_snapshot_restores_a_deleted_buffer():
    model, snapshot = Buffers(), BufferSnapshot()
    snapshot.save(model.modules())
    del model.floats
    snapshot.restore()
    assert model.floats.tolist() == [0.0, 1.0, 2.0]


def test_snapshot_after_buffers_have_other_shapes():
    model, snapshot = Buffers(), BufferSnapshot()
    snapshot.save(model.modules())
    model.floats = torch.ones(5)
    snapshot.save(model.modules())
    model.floats.zero_()
    snapshot.restore()
    assert model.floats.tolist() == [1.0] * 5


def test_snapshot_restores_the_shapes_of_resized_buffers():
    """The observers of quantization-aware training resize their buffers in their first pass."""
    model, snapshot = Buffers(), BufferSnapshot()
    snapshot.save(model.modules())
    model.floats.resize_(5).fill_(7)
    model.empty.resize_(2).fill_(7)
    for _ in range(2):
        snapshot.restore()
        assert model.floats.tolist() == [0.0, 1.0, 2.0]
        assert model.empty.shape == (0,)
    model.floats.resize_(5).fill_(7)
    snapshot.save(model.modules())
    model.floats.zero_()
    snapshot.restore()
    assert model.floats.tolist() == [7.0] * 5


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        (lambda model: None, False),
        (lambda model: model.floats.add_(1), True),
        (lambda model: setattr(model, "floats", model.floats.clone()), True),
    ],
)
def test_differs_from(change, differs):
    model = Buffers()
    before, after = BufferSnapshot(), BufferSnapshot()
    before.save(model.modules())
    change(model)
    after.save(model.modules())
    assert after.differs_from(before) is differs


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_restored_buffers(error):
    model = Buffers()
    tensors = dict(model._buffers)

    def run():
        with restored_buffers(model):
            model.change()
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(error):
            run()
    assert_original(model, tensors)


def test_writable_buffers():
    model = Buffers()
    assert [b.data_ptr() for b in ModelState(model).buffers()] == [model.floats.data_ptr(), model.integers.data_ptr()]
    assert ModelState().buffers() == []


@pytest.mark.parametrize("signal", [KeyboardInterrupt, SystemExit])
def test_uninterrupted_completes_and_then_raises(signal):
    left, done = [signal(), signal()], []

    def action():
        if left:
            raise left.pop()
        done.append(True)

    with pytest.raises(signal):
        uninterrupted(action)
    assert done == [True]
    uninterrupted(action)
    assert done == [True, True]


def test_uninterrupted_raises_other_errors_at_once():
    calls = []

    def action():
        calls.append(1)
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        uninterrupted(action)
    assert calls == [1]
