"""Lightning equals the loop written by hand, with accumulation, clipping, logging, precision and resume."""

import pytest
import torch
from torch import nn

import tiltsam
from helpers.lazy import Lazy
from helpers.trainers import (
    BATCH,
    CLIP,
    STEPS,
    Rows,
    accuracy,
    assert_close,
    averages,
    example,
    flat,
    loader,
    loss_of,
    net,
    optimizer_for,
    plain,
)

lit = Lazy("helpers.lightning_modules")

pytestmark = [
    # Lightning asks torch's pytree in a way that torch 2.13 calls outdated.
    pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated:FutureWarning"),
    # The problem is so small that workers to load it would only cost.
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
]


@pytest.fixture(autouse=True, scope="module")
def _needs_lightning():
    pytest.importorskip("lightning")


@pytest.mark.parametrize("method", ["sam", "esam2", "pgn", "tsam"])
def test_lightning_equals_loop(method, tmp_path):
    """Weights after 20 steps with clipping and a schedule, and the passes they took."""
    model = lit.Model(method)
    lit.trainer(tmp_path, gradient_clip_val=CLIP).fit(model, loader())
    assert torch.equal(flat(model.net), plain(method, clip=CLIP)[0])
    assert model.passes == STEPS * model.optimizers().info.num_forwards


@pytest.mark.parametrize("parts", [2, 3])
def test_lightning_accumulation_equals_the_full_batch(parts, tmp_path):
    """Three parts of five batches end epochs inside no window; a window's gradient is clipped as a whole."""
    model = lit.Model()
    lit.trainer(tmp_path, accumulate_grad_batches=parts, gradient_clip_val=CLIP).fit(model, loader(parts))
    assert_close(flat(model.net), plain(clip=CLIP)[0])
    assert model.passes == STEPS * parts * model.optimizers().info.num_forwards


def test_epoch_ends_inside_a_window(tmp_path):
    """Lightning steps on what is there, divided by the whole window; so do the passes, and nothing is carried over."""
    model = lit.Model("sam")
    lit.trainer(tmp_path, accumulate_grad_batches=3, max_steps=-1, max_epochs=1).fit(model, loader())
    twin, data = net(), Rows()
    optimizer = optimizer_for(twin, "sam")
    for window in (range(3), range(3, 5)):

        def closure(window=window):
            total = 0
            for i in window:
                rows = slice(i * BATCH, (i + 1) * BATCH)
                loss = loss_of(twin, data.x[rows], data.y[rows]) / 3
                loss.backward()
                total += loss.detach()
            return total

        optimizer.step(closure)
    assert_close(flat(model.net), flat(twin))
    assert model._waiting == ()


@pytest.mark.parametrize("parts", [1, 2])
def test_only_the_first_pass_is_logged(parts, tmp_path):
    notes, model = lit.Notes(), lit.Model("sam")
    lit.trainer(tmp_path, callbacks=[notes], accumulate_grad_batches=parts).fit(model, loader(parts))
    firsts = torch.tensor(plain("sam")[1]).view(4, 5)
    if parts == 1:
        torch.testing.assert_close(torch.tensor(notes.logged), firsts.flatten(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.tensor(notes.epochs), firsts.mean(1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.tensor(notes.metrics), firsts.mean(1), rtol=1e-5, atol=1e-6)
    assert len(notes.norms) == STEPS


def test_counters_of_metrics_are_restored(tmp_path):
    """A running mean turns to its next place at each update: two passes a step would use the same one of two."""

    class Running(lit.Model):
        def __init__(self):
            super().__init__("sam")
            self.seen, self.means = lit.RunningMean(window=2), []

        def on_train_batch_end(self, *_):
            self.means.append(self.seen.compute().item())

    model = Running()
    lit.trainer(tmp_path, max_steps=3).fit(model, loader())
    a, b, c = plain("sam", steps=3)[1]
    assert model.means == pytest.approx([a, (a + b) / 2, (b + c) / 2], rel=1e-6)


def test_metric_collection_counts_only_the_first_pass(tmp_path):
    """Two of its metrics are alike, and share their states."""

    class Collecting(lit.Model):
        def __init__(self):
            super().__init__("sam")
            self.seen = lit.MetricCollection(
                {"mean": lit.MeanMetric(), "again": lit.MeanMetric(), "largest": lit.MaxMetric()}
            )

        def training_step(self, batch, batch_idx):
            loss = loss_of(self.net, *batch)
            self.seen.update(loss.detach())
            self.log_dict(self.seen, on_step=False, on_epoch=True)
            return loss

    model, fit = Collecting(), lit.trainer(tmp_path, max_steps=10)
    fit.fit(model, loader())
    firsts = plain("sam", steps=10)[1][5:]  # of the second epoch
    wanted = {"mean": sum(firsts) / 5, "again": sum(firsts) / 5, "largest": max(firsts)}
    assert {name: value.item() for name, value in fit.callback_metrics.items()} == pytest.approx(wanted, rel=1e-6)


def test_batches_of_a_window_are_logged_by_their_own_sizes(tmp_path):
    notes, model, data = lit.Notes(), lit.Model("sam"), Rows()
    batches = torch.utils.data.DataLoader(data, batch_size=50)  # 50 and 10
    lit.trainer(tmp_path, callbacks=[notes], accumulate_grad_batches=2, max_epochs=1, max_steps=-1).fit(model, batches)
    assert notes.epochs == [pytest.approx(loss_of(net(), data.x, data.y).item(), rel=1e-6)]


class Stateful(torch.utils.data.DataLoader):
    """As Lightning wants it of a loader that can go on inside an epoch."""

    at = start = 0

    def __iter__(self):
        start, self.start = self.start, 0
        for i, batch in enumerate(super().__iter__()):
            if i >= start:
                self.at = i + 1
                yield batch

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.start = state["at"]


def test_lightning_resumed_inside_an_epoch_is_bitwise_equal(tmp_path):
    def run(path=None, **options):
        model = lit.Model()
        t = lit.trainer(tmp_path, **options)
        t.fit(model, Stateful(Rows(), batch_size=BATCH), ckpt_path=path, weights_only=False if path else None)
        return model, t

    whole, _ = run()
    half, t = run(max_steps=8)  # three batches into the second epoch
    t.save_checkpoint(tmp_path / "half.ckpt")
    resumed, _ = run(tmp_path / "half.ckpt")
    assert not torch.equal(flat(half.net), flat(whole.net))
    assert torch.equal(flat(resumed.net), flat(whole.net))
    assert resumed.optimizers().param_groups[0]["steps_taken"] == STEPS


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("averaging", ["Polynomial", "Averaging"])
def test_weights_are_averaged_after_each_step(averaging, parts, tmp_path):
    """Validated at the average, left with it, and resumed at step 8."""
    expected, notes = averages(), lit.Notes()

    def fit(*callbacks, path=None):
        model, data = lit.Validated(), Stateful(Rows(), batch_size=BATCH // parts)
        t = lit.trainer(tmp_path, accumulate_grad_batches=parts, callbacks=[getattr(lit, averaging)(), *callbacks])
        t.fit(model, data, loader(), ckpt_path=path, weights_only=False if path else None)
        return model

    for model, steps in (
        (fit(notes, lit.SaveAt8()), (0, 5, 10, 15, 20)),
        (fit(path=tmp_path / "half.ckpt"), (10, 15, 20)),
    ):
        for found, step in zip(model.tested[-len(steps) :], steps, strict=True):
            assert_close(found, expected[step])
        assert_close(flat(model.net), expected[-1])
    assert len(notes.norms) == STEPS


def test_bfloat16(tmp_path):
    model = lit.Model(dtype=torch.float32)
    lit.trainer(tmp_path, precision="bf16-mixed").fit(model, loader(dtype=torch.float32))
    expected, _ = plain(autocast=True, dtype=torch.float32)
    torch.testing.assert_close(flat(model.net), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["sam", "pgn", "tsam-hmc"])
def test_float16_logic_on_a_cpu(method, tmp_path):
    """The Trainer's own unscaling and clipping find the aggregate as the loop by hand leaves it without a scaler.

    In float64, in which autocast leaves the layers alone.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=6)
    model = lit.Model(method)
    plugin = lit.MixedPrecision("16-mixed", "cpu", scaler=scaler)
    plugin.forward_context = plugin.val_step_context = torch.enable_grad
    lit.trainer(tmp_path, plugins=[plugin], gradient_clip_val=CLIP).fit(model, loader())
    torch.testing.assert_close(flat(model.net), plain(method, clip=CLIP)[0], rtol=1e-7, atol=1e-8)
    assert scaler.get_scale() == 1024.0 * 2**3


def test_overflow_skips_step_and_lowers_scale(tmp_path):
    class Overflowing(lit.Model):
        def on_after_backward(self):
            if self.passes == 4:  # the second pass of the second sample of the first step
                self.net[0].weight.grad[0, 0] = torch.inf

    model = Overflowing()
    before = flat(model.net)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plugin = lit.MixedPrecision("16-mixed", "cpu", scaler=scaler)
    plugin.forward_context = torch.enable_grad
    lit.trainer(tmp_path, plugins=[plugin], max_steps=1).fit(model, loader())
    assert torch.equal(flat(model.net), before)
    assert scaler.get_scale() == 512.0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_float16_on_a_gpu(tmp_path):
    model = lit.Model(dtype=torch.float32)
    t = lit.trainer(tmp_path, accelerator="gpu", devices=1, precision="16-mixed", gradient_clip_val=CLIP)
    t.fit(model, loader(dtype=torch.float32))
    expected, _ = plain(clip=CLIP, dtype=torch.float32)
    assert t.precision_plugin.scaler.get_scale() > 0
    torch.testing.assert_close(flat(model.net).cpu(), expected, rtol=0.1, atol=0.1)


def test_training_step_returning_none_skips_the_step(tmp_path):
    model = lit.Model()
    model.skip_at = {0}
    before = flat(model.net)
    with pytest.warns(UserWarning, match="returned `None`"):
        lit.trainer(tmp_path, max_steps=1).fit(model, loader())
    assert torch.equal(flat(model.net), before)


def test_batch_of_a_window_returning_none_is_skipped(tmp_path):
    class Half(lit.Model):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 0 else loss

    model = Half("sam")
    lit.trainer(tmp_path, max_steps=1, accumulate_grad_batches=2).fit(model, loader(2))
    twin, (_, batch) = net(), list(loader(2))[:2]
    optimizer = optimizer_for(twin, "sam")

    def closure():
        loss = loss_of(twin, *batch) / 2
        loss.backward()
        return loss

    optimizer.step(closure)
    assert_close(flat(model.net), flat(twin))


def test_epoch_without_backward_updates_statistics_only(tmp_path):
    """StochasticWeightAveraging runs one for BatchNorm, at the averaged weights."""

    class Normalised(lit.Model):
        def __init__(self):
            super().__init__()
            self.net.insert(1, nn.BatchNorm1d(11, dtype=torch.float64))

        def configure_optimizers(self):
            return optimizer_for(self.net, self.method)

    averaging = lit.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)
    model = Normalised()
    lit.trainer(tmp_path, max_steps=-1, max_epochs=2, callbacks=[averaging]).fit(model, loader())
    assert torch.equal(flat(model.net), flat(averaging._average_model.net))
    means = torch.stack([model.net[0](x).mean(0) for x, _ in loader()])
    assert_close(model.net[1].running_mean, means.mean(0).detach())
    assert model.passes == 5 * (2 * model.optimizers().info.num_forwards + 1)


def test_other_optimizers_step_as_usual(tmp_path):
    class Ordinary(lit.Model):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    model = Ordinary()
    lit.trainer(tmp_path, accumulate_grad_batches=2).fit(model, loader(2))
    assert model.passes == 2 * STEPS


def test_training_step_can_be_called_by_hand():
    model = lit.Model()
    with pytest.warns(UserWarning, match=r"trying to `self\.log\(\)`"):
        loss = model.training_step(next(iter(loader())), 0)
    assert loss.requires_grad


def test_dataloader_iter_is_refused():
    with pytest.raises(TypeError, match=r"training_step\(batch, batch_idx\)"):

        class Wrong(lit.SharpnessAwareMixin, lit.lightning.LightningModule):
            def training_step(self, dataloader_iter):
                return None


def test_inherited_and_extended_training_steps(tmp_path):
    """A module of others gets the mixin in front; a subclass may call its parent's step."""

    class Theirs(lit.lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.calls = net(), 0

        def training_step(self, batch, batch_idx):
            self.calls += 1
            return loss_of(self.net, *batch)

    class Ours(lit.SharpnessAwareMixin, Theirs):
        def configure_optimizers(self):
            return tiltsam.SAM(torch.optim.SGD(self.parameters(), lr=0.1), model=self)

    class More(Ours):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx)

    weights = []
    for kind in (Ours, More):
        model = kind()
        lit.trainer(tmp_path, max_steps=3, accumulate_grad_batches=2).fit(model, loader(2))
        assert model.calls == 3 * 2 * 2
        weights.append(flat(model))
    assert torch.equal(*weights)


def test_unsupported_strategies_are_refused(tmp_path):
    class FSDPStrategy(lit.lightning.pytorch.strategies.SingleDeviceStrategy):
        pass

    with pytest.raises(ValueError, match="FSDPStrategy"):
        lit.trainer(tmp_path, strategy=FSDPStrategy()).fit(lit.Model(), loader())


def test_bypassing_the_mixin_is_refused(tmp_path):
    """It would see the last batch of each window alone."""

    class Own(lit.Model):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            optimizer.step(closure=optimizer_closure)

    class Behind(lit.lightning.LightningModule, lit.SharpnessAwareMixin):
        def __init__(self):
            super().__init__()
            self.net = net()

        def training_step(self, batch, batch_idx):
            return loss_of(self.net, *batch)

        def configure_optimizers(self):
            return optimizer_for(self.net)

    class Through(lit.Model):
        def optimizer_step(self, *args):
            super().optimizer_step(*args)

    for kind in (Own, Behind):
        for parts in (1, 2):
            with pytest.raises(RuntimeError, match=r"super\(\)\.optimizer_step"):
                lit.trainer(tmp_path, accumulate_grad_batches=parts).fit(kind(), loader(parts))
    lit.trainer(tmp_path, max_steps=2).fit(Through(), loader())


def test_module_pickles():
    import pickle

    assert isinstance(pickle.loads(pickle.dumps(lit.Model())).net, nn.Module)


def test_example_learns_digits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert accuracy(example("lightning_digits.py")["trainer"].lightning_module.net) > 0.9


def test_module_without_mixin_is_refused(tmp_path):
    model = lit.WithoutMixin("sam")
    before = flat(model.net)
    with pytest.raises(RuntimeError, match="WithoutMixin"):
        lit.trainer(tmp_path).fit(model, loader())
    assert torch.equal(flat(model.net), before)


@pytest.mark.parametrize(("method", "automatic"), [("erm", True), ("sam", False)])
def test_module_without_mixin_may_take_plain_or_manual_steps(method, automatic, tmp_path):
    model = lit.WithoutMixin(method, automatic)
    lit.trainer(tmp_path, max_steps=2).fit(model, loader())
    assert model.optimizers(use_pl_optimizer=False).setting("steps_taken") == 2
