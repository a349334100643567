"""Jobs that the ranks of the distributed tests run. The first argument is the rank; tests compare the results."""

import math
import os
import time
import warnings
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import tiltsam
from helpers.cases import METHODS, Net, sgd
from helpers.lazy import Lazy

dcp = Lazy("torch.distributed.checkpoint")
state_dicts = Lazy("torch.distributed.checkpoint.state_dict")
fsdp = Lazy("torch.distributed.fsdp")

BY_NAME = {m.name: m for m in METHODS}
EXAMPLES = 12  # of a whole batch: two or three ranks have equal parts of it


def adamw(params):
    return torch.optim.AdamW(params, lr=0.01)


def zero_adamw(params):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns that torch.jit is deprecated

    return ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=0.01)


BASES = {"sgd": sgd, "adamw": adamw, "zero": zero_adamw}


def mlp():
    """Return a model whose sizes neither two nor three ranks divide evenly."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def batch(step, part=0, parts=1):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(EXAMPLES, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (EXAMPLES,), generator=generator)
    return x[part::parts], y[part::parts]


def train(model, optimizer, steps, part=0, parts=1, before_step=lambda step: None):
    """Train on this rank's part of each batch."""
    for step in steps:
        x, y = batch(step, part, parts)
        before_step(step)

        def closure(x=x, y=y):
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


def error_of(action):
    """Return the message of the ValueError that an action raises, or None."""
    try:
        action()
    except ValueError as error:
        return str(error)
    return None


def flat(model):
    """Return all parameters, gathered if they are sharded."""
    parts = [p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]
    return torch.cat([p.flatten() for p in parts])


def alone(method, base, steps, **options):
    """Train in one process on whole batches."""
    model = mlp()
    optimizer = BY_NAME[method](BASES[base](model.parameters()), model=model, parallel=None, **options)
    train(model, optimizer, range(steps))
    return flat(model)


def data_parallel(rank, method, base, steps, options):
    model = DistributedDataParallel(mlp())
    optimizer = BY_NAME[method](BASES[base](model.parameters()), model=model, **options)
    train(model, optimizer, range(steps), rank, dist.get_world_size())
    return flat(model), optimizer.info.losses


def zero_redundancy_resumed(rank, steps):
    """Train with a base whose state is divided among ranks, through a checkpoint halfway."""
    model, size = DistributedDataParallel(mlp()), dist.get_world_size()
    optimizer = BY_NAME["tsam"](zero_adamw(model.parameters()), model=model)
    train(model, optimizer, range(steps // 2), rank, size)
    optimizer.base.consolidate_state_dict()
    saved = [[model.state_dict(), optimizer.state_dict()] if rank == 0 else None]
    dist.broadcast_object_list(saved)
    model = DistributedDataParallel(mlp())
    optimizer = BY_NAME["tsam"](zero_adamw(model.parameters()), model=model)
    model.load_state_dict(saved[0][0])
    optimizer.load_state_dict(saved[0][1])
    train(model, optimizer, range(steps // 2, steps), rank, size)
    return flat(model)


def data_parallel_net(rank, method, steps):
    """Train a model with BatchNorm, dropout, tied, frozen and unused parameters."""
    torch.manual_seed(1)
    net = Net().double()
    del net.empty  # DDP cannot take an empty parameter
    net.register_buffer("empty", torch.zeros(1, dtype=torch.float64))
    model = DistributedDataParallel(net, find_unused_parameters=True)
    torch.manual_seed(rank)  # dropout masks differ
    optimizer = BY_NAME[method](sgd(model.parameters()), model=model)
    train(model, optimizer, range(steps), rank, dist.get_world_size())
    return flat(net)


def data_parallel_without_model(rank, method, steps):
    """Train without model=: all processes count as data ranks."""
    model = DistributedDataParallel(mlp())
    optimizer = BY_NAME[method](sgd(model.parameters()))
    train(model, optimizer, range(steps), rank, dist.get_world_size())
    return flat(model)


def gradients_not_averaged(rank, kind, clip):
    """Return the error of a first step whose gradients DDP does not average, and whether nothing was changed."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    wrapped = DistributedDataParallel(model) if kind == "inside" else model
    base = sgd(model.parameters())
    if kind == "by hand":
        base.register_step_pre_hook(lambda *_: average_gradients(model))
    if clip:
        base.register_step_pre_hook(lambda *_: clip_gradients(model))
    optimizer = tiltsam.SAM(base, model=wrapped, parallel=None if kind == "alone" else tiltsam.Parallel())
    before = {k: v.clone() for k, v in model.state_dict().items()}
    error = error_of(lambda: train(model, optimizer, range(2), rank, dist.get_world_size()))
    same = all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    return error, same and optimizer.param_groups[0]["steps_taken"] == 0


def sharded_without_model(rank, method):
    """Return the warnings of a step."""
    model = sharded_model(init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = BY_NAME[method](sgd(model.parameters()))
    with warnings.catch_warnings(record=True) as found:
        train(model, optimizer, range(1), rank, dist.get_world_size())
    return [str(warning.message) for warning in found]


def partly_sharded(averaged):
    """Return a model with a bias that FSDP leaves whole; its gradient is averaged by a hook, or not at all."""
    model, size = mlp(), dist.get_world_size()
    bias = model[0].bias
    if averaged:
        bias.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad.div_(size)))
    return fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (size,)), ignored_params={bias})


def ignored_by_fsdp(rank, averaged, steps):
    """Train a partly sharded model; return weights and error."""
    model = partly_sharded(averaged)
    optimizer = BY_NAME["tsam"](sgd(model.parameters()), model=model)
    error = error_of(lambda: train(model, optimizer, range(steps), rank, dist.get_world_size()))
    return flat(model), error


def clip_gradients(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)  # a hook must not return its result


def average_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def local_ascent(rank, steps):
    model = DistributedDataParallel(mlp())
    optimizer = tiltsam.SAM(
        torch.optim.SGD(model.parameters(), lr=0.05), rho=0.1, model=model, parallel=tiltsam.Parallel(ascent="local")
    )
    train(model, optimizer, range(steps), rank, dist.get_world_size())
    return flat(model)


def unsupported_ddp(rank, options, joined, parallel):
    """Return the error of a step with these options of DDP, or inside ``join``."""
    model = DistributedDataParallel(mlp(), **options)
    optimizer = tiltsam.SAM(sgd(model.parameters()), model=model, parallel=parallel)

    def steps():
        with model.join(enable=joined):
            train(model, optimizer, range(2), rank, dist.get_world_size())

    return error_of(steps)


def local_ascent_by_hand(steps, parts):
    """Train with m-SAM: the mean of the gradients, each after the ascent of its own part."""
    model = mlp()
    params = list(model.parameters())
    for step in range(steps):
        total = [torch.zeros_like(p) for p in params]
        for part in range(parts):
            x, y = batch(step, part, parts)
            g = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), params)
            length = torch.cat([a.flatten() for a in g]).norm()
            home = [p.detach().clone() for p in params]
            with torch.no_grad():
                for p, a in zip(params, g, strict=True):
                    p.add_(0.1 * a / length)
            g = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), params)
            with torch.no_grad():
                for p, h, a, t in zip(params, home, g, total, strict=True):
                    p.copy_(h)
                    t.add_(a / parts)
        with torch.no_grad():
            for p, t in zip(params, total, strict=True):
                p.sub_(0.05 * t)
    return flat(model)


def sharded_model(mesh=None):
    model = mlp()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fsdp.fully_shard(layer, mesh=mesh)
    return fsdp.fully_shard(model, mesh=mesh)


def sharded(rank, method, base, steps, options):
    model = sharded_model(init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = BY_NAME[method](BASES[base](model.parameters()), model=model, **options)
    train(model, optimizer, range(steps), rank, dist.get_world_size())
    return flat(model)


class ByIndex(tiltsam.TSAM):
    """TSAM whose sample j has the weight j + 1, by a weighting of its own."""

    def weighting(self, space):
        return IndexWeights(range(self.num_samples))


class IndexWeights:
    def __init__(self, samples):
        self.weights = [j + 1.0 for j in samples]
        self.losses = []

    def add(self, loss, valid):
        self.losses.append(loss)
        number = len(self.losses)
        return torch.full_like(loss, self.weights[number - 1] / sum(self.weights[:number]))

    def loss(self):
        return sum(w * x for w, x in zip(self.weights, self.losses, strict=True)) / sum(self.weights)

    def subset(self, samples):
        return IndexWeights(samples)


def split_samples(rank, method, steps, options):
    """Train with the samples divided among ranks: the same batch and dropout masks on every rank."""
    torch.manual_seed(1)
    model = Net().double()
    torch.manual_seed(2)
    parallel = tiltsam.Parallel(samples=dist.group.WORLD)
    make = method if callable(method) else BY_NAME[method]
    optimizer = make(sgd(model.parameters()), model=model, parallel=parallel, **options)
    train(model, optimizer, range(steps))
    info = optimizer.info
    return model.state_dict(), {"losses": info.losses, "weights": info.weights, "size": info.effective_sample_size}


def unsplit_samples(method, steps, options):
    torch.manual_seed(1)
    model = Net().double()
    torch.manual_seed(2)
    make = method if callable(method) else BY_NAME[method]
    optimizer = make(sgd(model.parameters()), model=model, **options)
    train(model, optimizer, range(steps))
    info = optimizer.info
    return model.state_dict(), {"losses": info.losses, "weights": info.weights, "size": info.effective_sample_size}


def train_on_mesh(rank, kind, steps):
    """Train on two by two ranks: data × samples with DDP or FSDP2, or hybrid sharding."""
    names = ("data", "samples") if kind != "hybrid" else ("replicate", "shard")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    options = {} if kind == "hybrid" else {"parallel": tiltsam.Parallel(samples=mesh["samples"].get_group())}
    if kind == "ddp":
        model = DistributedDataParallel(mlp(), process_group=mesh["data"].get_group())
    else:
        model = sharded_model(mesh if kind == "hybrid" else mesh["data"])
    optimizer = BY_NAME["tsam"](sgd(model.parameters()), model=model, **options)
    part, parts = (rank, 4) if kind == "hybrid" else (mesh["data"].get_local_rank(), 2)
    train(model, optimizer, range(steps), part, parts)
    return flat(model)


def save_sharded(rank, method, folder, steps):
    model = sharded_model(init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = BY_NAME[method](adamw(model.parameters()), model=model)
    train(model, optimizer, range(steps), rank, dist.get_world_size())
    whole = optimizer.base if method == "tsam" else optimizer  # the other has a state vector
    state = {
        "model": state_dicts.get_model_state_dict(model),
        "optimizer": state_dicts.get_optimizer_state_dict(model, whole),
    }
    dcp.save(state, checkpoint_id=folder)


def resume_sharded(rank, method, folder, start, steps, by_base):
    model = sharded_model(init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = BY_NAME[method](adamw(model.parameters()), model=model)
    load(model, optimizer.base if by_base else optimizer, folder)
    train(model, optimizer, range(start, start + steps), rank, dist.get_world_size())
    return flat(model), optimizer.param_groups[0]["steps_taken"]


def load(model, optimizer, folder):
    state = {
        "model": state_dicts.get_model_state_dict(model),
        "optimizer": state_dicts.get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    state_dicts.set_model_state_dict(model, state["model"])
    state_dicts.set_optimizer_state_dict(model, optimizer, state["optimizer"])


def exit_in_step(rank, kind):
    """Let rank 1 exit in a pass of the third step; return what the others see."""
    model = mlp()
    options = {}
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        options = {"parallel": tiltsam.Parallel(samples=dist.group.WORLD)}
    optimizer = BY_NAME["tsam"](sgd(model.parameters()), model=model, **options)
    train(model, optimizer, range(2), rank if kind == "ddp" else 0, 2 if kind == "ddp" else 1)
    before = flat(model).clone()
    passes = [0]

    def closure():
        passes[0] += 1
        if rank == 1 and passes[0] == 2:
            os._exit(1)
        x, y = batch(2)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    start = time.monotonic()
    try:
        optimizer.step(closure)
    except RuntimeError as error:
        return time.monotonic() - start, torch.equal(flat(model), before), "\n".join(error.__notes__)
    return None


def fail(model, x, place):
    """Run out of memory inside a forward pass of a model, or after it."""

    def raise_error(*_):
        raise MemoryError

    hook = model[-1].register_forward_hook(raise_error) if place == "forward" else None
    try:
        model(x)
        raise_error()
    finally:
        if hook is not None:
            hook.remove()


def raise_in_a_pass(rank, place):
    """Fail at perturbed weights that FSDP has just gathered; return the losses."""
    model = fsdp.fully_shard(mlp(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = tiltsam.SAM(sgd(model.parameters()), rho=5.0, model=model)
    x, y = batch(0)
    passes = []

    def loss():
        return nn.functional.cross_entropy(model(x), y)

    def closure():
        if len(passes) == 1:
            with torch.no_grad():
                passes.append(loss().item())
            fail(model, x, place)
        value = loss()
        passes.append(value.item())
        value.backward()
        return value

    with suppress(MemoryError):
        optimizer.step(closure)
    with torch.no_grad():
        return passes, loss().item()


def raise_with_averaged_weights(rank, place):
    """Fail at averaged weights; return the outputs before and after."""
    model = fsdp.fully_shard(mlp(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    average, x = tiltsam.WeightAverage(model), batch(0)[0]
    average.update()
    train(model, tiltsam.SAM(sgd(model.parameters()), model=model), range(2))
    with torch.no_grad():
        before = model(x)
        with suppress(MemoryError), average.applied():
            averaged = model(x)
            fail(model, x, place)
        return before, averaged, model(x)


def average_of_first_rank(rank, path):
    """Load what the first rank saved of a sharded average; return the error. The parts of both ranks have one shape."""
    model = fsdp.fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    average = tiltsam.WeightAverage(model)
    if rank == 0:
        torch.save(average.state_dict(), path)
    dist.barrier()
    return error_of(lambda: average.load_state_dict(torch.load(path)))


def evaluated_between(rank, method, steps, inside, sharded=True):
    """Train a model whose root FSDP leaves gathered by an evaluation: after each step, or in the closure."""
    model, parts = mlp(), dist.get_world_size() if sharded else 1
    if sharded:
        fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (parts,)))
    optimizer, found = BY_NAME[method](sgd(model.parameters()), model=model), []
    for step in range(steps):
        x, y = batch(step, rank, parts)

        def closure(x=x, y=y):
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            if inside:
                with torch.no_grad():
                    model(x)
            return loss

        optimizer.step(closure)
        with torch.no_grad():
            found.append(model(batch(0)[0]))
    return torch.stack(found)


def averaged_outputs(rank, steps, whole):
    """Return outputs with averaged weights, of a model whose root FSDP leaves gathered after a forward pass."""
    if whole:
        model = partly_sharded(averaged=True)
    else:
        model = fsdp.fully_shard(mlp(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return outputs_by_step(model, tiltsam.SAM(sgd(model.parameters()), model=model), steps)


def outputs_by_step(model, optimizer, steps):
    """Return the outputs at each step with the weights, the averaged weights, and the weights again."""
    x, _ = batch(0)
    with torch.no_grad():
        model(x)
    average, found = tiltsam.WeightAverage(model, power=1), []
    for step in range(steps):
        train(model, optimizer, [step])
        average.update()
        again = tiltsam.WeightAverage(model, power=1)
        again.load_state_dict(average.state_dict())
        with torch.no_grad():
            found.append(model(x))
            with again.applied():
                found.append(model(x))
            found.append(model(x))
    return torch.stack(found)


def experts_by_rank(rank, steps):
    """Train samples that use different parameters, as in a mixture of experts."""
    torch.manual_seed(1)
    experts = nn.ModuleList(nn.Linear(6, 3) for _ in range(2)).double()
    parallel = tiltsam.Parallel(samples=dist.group.WORLD)
    optimizer = tiltsam.TSAM(sgd(experts.parameters()), num_samples=2, model=experts, parallel=parallel)
    start = flat(experts).clone()
    for step in range(steps):
        x, y = batch(step)

        def closure(x=x, y=y):
            loss = nn.functional.cross_entropy(experts[min(rank, 1)](x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    return flat(experts), (flat(experts) != start).all().item()


def split_samples_without_model(rank):
    """Return the warnings, and whether each points at this file."""
    model = mlp()
    optimizer = tiltsam.TSAM(sgd(model.parameters()), parallel=tiltsam.Parallel(samples=dist.group.WORLD))
    with warnings.catch_warnings(record=True) as found:
        train(model, optimizer, range(1))
    return [(str(warning.message), warning.filename == __file__) for warning in found]


def split_samples_of_different_models(rank):
    """Return the error of ranks whose weights differ."""
    model = mlp()
    with torch.no_grad():
        model[0].bias[-1] += rank
    optimizer = tiltsam.TSAM(
        sgd(model.parameters()), num_samples=2, model=model, parallel=tiltsam.Parallel(samples=dist.group.WORLD)
    )
    return error_of(lambda: train(model, optimizer, range(1)))


def split_samples_among_data_ranks(rank, kind):
    """Return the error of ranks that share samples and also average gradients over different batches."""
    parallel = tiltsam.Parallel(samples=dist.group.WORLD, data=dist.group.WORLD if kind == "data" else None)
    model = {"ddp": DistributedDataParallel, "fsdp": fsdp.fully_shard, "data": lambda model: model}[kind](mlp())
    optimizer = tiltsam.TSAM(sgd(model.parameters()), num_samples=4, model=model, parallel=parallel)
    return error_of(lambda: train(model, optimizer, range(1)))


def split_samples_without_data_group(rank):
    """Return the error of four ranks of which two share samples, without a group that sees other batches."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "samples"))
    model = mlp()
    parallel = tiltsam.Parallel(samples=mesh["samples"].get_group())
    optimizer = tiltsam.TSAM(sgd(model.parameters()), num_samples=3, model=model, parallel=parallel)
    return error_of(lambda: train(model, optimizer, range(1)))


# ---------------------------------------------------------------- the tilt over examples


def example_tilt(rank, steps, sharded, options):
    """Train TSAM on this rank's part of each batch, with weights over the whole batch."""
    model = mlp()
    if sharded:
        model = fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    else:
        model = DistributedDataParallel(model)
    return _train_with_tilt(model, steps, options, rank, dist.get_world_size())


def example_tilt_alone(steps, options):
    """Train TSAM in one process on whole batches."""
    return _train_with_tilt(mlp(), steps, options, 0, 1)


def _train_with_tilt(model, steps, options, part, parts):
    optimizer = tiltsam.TSAM(sgd(model.parameters()), model=model, num_samples=2)
    tilt = tiltsam.ExampleTilt(-2.0, **options)
    for step in range(steps):
        x, y = batch(step, part, parts)

        def closure(x=x, y=y):
            losses = nn.functional.cross_entropy(model(x), y, reduction="none")
            loss = tilt(losses, y) if "num_groups" in options else tilt(losses)
            loss.backward()
            return loss

        optimizer.step(closure)
    return flat(model)


def sent_bytes(rank, shape, options):
    """Return the passes and the bytes handed to collectives in a step, on a mesh of data × samples × shards ranks.

    Counted by the profiler, in float32: gloo reduces-scatters by an all-reduce, which is counted as the former.
    """
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "samples", "shards"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Tanh(), nn.Linear(64, 32, bias=False))
    if shape[2] > 1:
        for layer in (*(layer for layer in model if isinstance(layer, nn.Linear)), model):
            fsdp.fully_shard(layer, mesh=mesh["data", "shards"] if shape[0] > 1 else mesh["shards"])
    elif shape[0] > 1:
        model = DistributedDataParallel(model, process_group=mesh["data"].get_group())
    parallel = tiltsam.Parallel(samples=mesh["samples"].get_group() if shape[1] > 1 else None)
    optimizer = tiltsam.TSAM(adamw(model.parameters()), model=model, parallel=parallel, **options)

    def closure():
        loss = model(torch.ones(2, 32)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)  # checks that ranks agree
    with torch.profiler.profile(record_shapes=True) as profile:
        optimizer.step(closure)
    found = {"gathered": 0, "scattered": 0, "reduced": 0, "numbers": 0}
    for event in profile.events():
        numels = [math.prod(dims) for dims in event.input_shapes]
        if event.name == "c10d::_allgather_base_":
            found["gathered"] += 4 * numels[0]
        elif event.name == "c10d::_reduce_scatter_base_":
            found["scattered"] += 4 * numels[1]
        elif event.name == "gloo:all_reduce":
            found["reduced" if numels[0] >= 512 else "numbers"] += 4 * numels[0]
    found["reduced"] -= found["scattered"]
    return optimizer.info.num_backwards, found
