"""Jobs that train with each trainer on two ranks."""

import os
import warnings
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from helpers.jobs import dcp
from helpers.trainers import (
    BATCH,
    CLIP,
    STEPS,
    Rows,
    as_rank,
    flat,
    halving,
    loader,
    loss_of,
    net,
    optimizer_for,
)


def count_synchronizations(rank, job, *args):
    """Return the result of a job, and after how many forward passes the ranks averaged gradients."""
    forward, synced = DistributedDataParallel.forward, []

    def recorded(self, *inputs, **named):
        synced.append(self.require_backward_grad_sync)
        return forward(self, *inputs, **named)

    with mock.patch.object(DistributedDataParallel, "forward", recorded):
        return job(rank, *args), sum(synced)


def in_lightning(rank, folder, parts, sharded=False):
    as_rank(rank, 2)
    warnings.simplefilter("ignore")  # Lightning's advice about workers and samplers
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import DataLoader, DistributedSampler

    from tiltsam.integrations.lightning import SharpnessAwareMixin

    class Model(SharpnessAwareMixin, lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()

        def configure_model(self):
            if sharded:
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch, batch_idx):
            loss = loss_of(self.net, *batch)
            self.log("loss", loss, on_epoch=True, sync_dist=True)
            return loss

        def configure_optimizers(self):
            optimizer = optimizer_for(self.net)
            return [optimizer], [{"scheduler": halving(optimizer), "interval": "step"}]

    sampler = DistributedSampler(Rows(), 2, rank, shuffle=False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1) if sharded else "ddp",
        default_root_dir=folder,
        max_steps=STEPS,
        accumulate_grad_batches=parts,
        gradient_clip_val=CLIP,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    trainer.fit(model, DataLoader(Rows(), batch_size=BATCH // 2 // parts, sampler=sampler))
    assert trainer.world_size == 2
    return flat(model.net)


def in_accelerate(rank, folder, parts, together=False):
    as_rank(rank, 2)
    from helpers.accelerate_training import accelerate, reset_state, step

    reset_state()
    accelerator = accelerate.Accelerator(
        cpu=True, gradient_accumulation_steps=parts, step_scheduler_with_optimizer=False
    )
    assert accelerator.num_processes == 2
    model = net() if together else accelerator.prepare(net())
    optimizer = optimizer_for(model)
    scheduler = halving(optimizer)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(2 * parts))
    for _ in range(4):
        for x, y in batches:
            with accelerator.accumulate(model):
                loss = step(accelerator, optimizer, lambda x, y: loss_of(model, x, y), x, y, max_grad_norm=CLIP)
            if loss is not None:
                scheduler.step()
    if together:
        return flat(model)
    with model.join(), pytest.raises(ValueError, match="drop_last=True"):
        step(accelerator, optimizer, lambda x, y: loss_of(model, x, y), x, y)
    return flat(model)


def in_transformers(rank, folder, parts):
    as_rank(rank, 2)
    from helpers.transformers_trainer import reset_state, trainer

    reset_state()
    batch = BATCH // 2 // parts
    options = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": parts, "ddp_backend": "gloo"}
    t = trainer(folder, max_grad_norm=CLIP, **options)
    t.train()
    assert t.args.world_size == 2
    return flat(t.model)


# ---------------------------------------------------------------- FSDP2


@contextmanager
def sharding(rank):
    """Let Accelerate use FSDP2 on a CPU: it asks for several accelerators."""
    as_rank(rank, 2)
    os.environ |= {"ACCELERATE_TORCH_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    from helpers.accelerate_training import reset_state

    reset_state()
    found = ("gloo", DistributedType.MULTI_GPU)
    with mock.patch.object(PartialState, "_prepare_backend", return_value=found):
        yield
    reset_state()


def in_accelerate_fsdp2(rank, folder, method, scaled, options):
    """Train with an evaluation before each step, which leaves the root's weights gathered; resume at step 8.

    Returns:
        Weights and averaged weights of the whole run, and of the resumed one.
    """
    with sharding(rank):
        from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin

        from helpers.accelerate_training import Training

        def start():
            training = Training(
                method,
                scaler=torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None,
                fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
                dataloader_config=DataLoaderConfiguration(split_batches=True),
                **options,
            )
            training.accelerator._custom_objects.clear()  # the average is saved by itself, as docs/trainers.md says
            return training

        def run(training):
            while training.done < STEPS:
                with torch.no_grad():
                    training.model(Rows(dtype=options.get("dtype", torch.float64)).x)
                training.run(training.done + 1, CLIP)
                if training.done == 8:
                    training.accelerator.save_state(folder)
                    dcp.save({"average": training.average.state_dict()}, checkpoint_id=f"{folder}/average")
            trained = flat(training.model)
            with training.average.applied():
                return trained, flat(training.model)

        whole = run(start())
        resumed = start()
        assert resumed.accelerator.is_fsdp2
        resumed.accelerator.load_state(folder)
        average = resumed.average.state_dict()
        dcp.load({"average": average}, checkpoint_id=f"{folder}/average")
        resumed.average.load_state_dict(average)
        resumed.done = 8
        return whole, run(resumed)


def in_transformers_fsdp2(rank, folder, options):
    """Train with an evaluation after each step; resume at step 8; return the weights of both runs."""
    with sharding(rank):
        from helpers.transformers_trainer import trainer

        def start():
            fsdp = {"fsdp": True, "fsdp_config": {"version": 2}, "ddp_backend": "gloo"}
            batch = options["per_device_train_batch_size"] // 2
            return trainer(folder, **options | fsdp | {"per_device_train_batch_size": batch})

        whole = start()
        whole.train()
        assert whole.accelerator.is_fsdp2
        resumed = start()
        resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-8")
        return flat(whole.model), flat(resumed.model)
