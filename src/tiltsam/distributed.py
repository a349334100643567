"""Steps that several processes take together: data-parallel (DDP), sharded (FSDP2), and sample-parallel.

Three things must agree on all ranks, or their weights drift apart:

- **losses** are averaged over the ranks that see different batches *before* weights are computed from them;
- **noise** derives from (seed, step, sample) alone, so every rank draws the same; of a sharded tensor each rank keeps
  its part of the noise that one process would draw;
- **norms** of sharded vectors are those of the whole.

Sample-parallel ranks see the *same* batch and divide the s samples of a step among them, so that s ranks take a step of
TSAM in the time of a step of SAM. They exchange a few scalars and one weighted sum of gradients:

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "samples"))
    model = DistributedDataParallel(model, process_group=mesh["data"].get_group())
    parallel = tiltsam.Parallel(samples=mesh["samples"].get_group())
    optimizer = tiltsam.TSAM(base, num_samples=4, model=model, parallel=parallel)
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Parallel", "Ranks", "Sharding"]

Group: TypeAlias = Any
"""A ``torch.distributed.ProcessGroup``."""


@dataclass(frozen=True)
class Parallel:
    """The processes that take a step together.

    By default they are detected: the group of a DDP module, the mesh of sharded parameters, or else all processes of
    ``torch.distributed``, as ranks that see different batches. Pass ``parallel=None`` if this process trains
    independently of the others.

    Args:
        data: Ranks that see different batches and average their gradients; ``None`` means detected.
        samples: Ranks that see the same batch and divide a step's samples among them.
        ascent: ``"global"`` ascends the gradient of all data ranks; ``"local"`` lets each rank ascend its own (m-SAM),
            which saves an all-reduce a sample and needs a DDP module.
    """

    data: Group | None = None
    samples: Group | None = None
    ascent: Literal["global", "local"] = "global"

    def __post_init__(self) -> None:
        if self.ascent not in ("global", "local"):
            raise ValueError(f"ascent must be 'global' or 'local', got {self.ascent!r}")
        for name in ("data", "samples"):
            group = getattr(self, name)
            if group is not None and not isinstance(group, dist.ProcessGroup):
                raise TypeError(
                    f"{name} must be a process group, got {type(group).__name__}: pass mesh['{name}'].get_group()"
                )


class Ranks:
    """Communication between the processes of a step; does nothing in a single process.

    Args:
        parallel: What the user passed; ``None`` for a single process.
        model: The user's model, if given.
        sharding: How the parameters are split.
    """

    alone: bool = True
    """Whether this process takes its steps without communication."""
    splits_samples: bool = False
    """Whether the samples of a step are divided among ranks."""
    local_ascent: bool = False
    """Whether each rank ascends along its own gradient."""

    def __init__(self, parallel: Parallel | None, model: torch.nn.Module | None, sharding: Sharding) -> None:
        self._data: list[Group] = []
        self._samples: Group | None = None
        self._ddp: DistributedDataParallel | None = None
        self._gradients_checked = False
        if parallel is None or not (dist.is_available() and dist.is_initialized()):
            if sharding.groups:
                raise ValueError("parallel must not be None with sharded parameters: omit it")
            return
        self._ddp = find_ddp(model)
        self._samples = _unless_single(parallel.samples)
        self._data = [g for g in self._data_groups(parallel, sharding) if _unless_single(g) is not None]
        if self._samples is not None:
            self._check_disjoint(self._samples)
            if not self._data and dist.get_world_size(self._samples) < dist.get_world_size():
                raise ValueError(
                    f"{dist.get_world_size(self._samples)} of {dist.get_world_size()} processes share samples: pass "
                    "the groups that see different batches, by model=DistributedDataParallel(...) or Parallel(data=...)"
                )
        self.splits_samples = self._samples is not None
        self.alone = not self._data and self._samples is None
        self.local_ascent = parallel.ascent == "local" and bool(self._data)
        if self.local_ascent and (self._ddp is None or self._ddp.static_graph):
            raise ValueError(
                "ascent='local' needs model=DistributedDataParallel(...) without static_graph, for its no_sync()"
            )

    def _data_groups(self, parallel: Parallel, sharding: Sharding) -> list[Group]:
        if parallel.data is not None:
            return [parallel.data]
        if sharding.mesh is not None:
            return [sharding.mesh.get_group(i) for i in range(sharding.mesh.ndim)]
        if self._ddp is not None:
            return [self._ddp.process_group]
        return [] if parallel.samples is not None else [dist.group.WORLD]

    def _check_disjoint(self, samples: Group) -> None:
        """Raise if gradients would be averaged over ranks that evaluate different samples."""
        sharing = dist.get_process_group_ranks(samples)
        both = [r for r in sharing if any(r in dist.get_process_group_ranks(group) for group in self._data)]
        if len(both) > 1:
            raise ValueError(
                f"ranks {', '.join(map(str, both[:-1]))} and {both[-1]} share samples of one batch and also average "
                "gradients as if they saw different ones: leave out DistributedDataParallel, fully_shard or "
                "Parallel(data=...), or give it the other dimension of a mesh"
            )

    # ---------------------------------------------------------------- ranks with different batches

    def average(self, x: Tensor) -> Tensor:
        """Return the mean over data ranks, bitwise the same on all of them."""
        for group in self._data:
            x = x.clone()
            dist.all_reduce(x, group=group)
            x = x / dist.get_world_size(group)
        return x

    def all(self, flag: Tensor) -> Tensor:
        """Return whether a flag is true on every data rank."""
        return self.average((~flag).to(torch.float32)) == 0

    def check_same_gradients(self, params: Sequence[Tensor]) -> None:
        """Raise ValueError unless all data ranks have the same gradient; checked until one is not zero.

        Compares the norm and a projection onto a fixed vector: clipped gradients may differ although their norms agree.
        """
        if self._gradients_checked or not self._data:
            return
        params = [p for p in params if not is_sharded(p)]  # FSDP averages those itself, and ranks hold parts
        if not params:
            return
        numbers = torch.zeros(2, dtype=torch.float64, device=params[0].device)  # the projection, the squared norm
        for i, p in enumerate(params):
            if p.grad is not None:
                grad = (torch.view_as_real(p.grad) if p.is_complex() else p.grad).double()
                weights = (
                    torch.arange(grad.numel(), dtype=grad.dtype, device=grad.device).add_(i).cos_().view(grad.shape)
                )
                numbers += torch.stack([(grad * weights).sum(), grad.square().sum()]).to(numbers.device)
        numbers[1] = numbers[1].sqrt()
        low, high = _extremes(numbers.nan_to_num(0.0, 0.0, 0.0), self._data)
        if ((high - low) > 1e-6 * high[1]).any():
            raise ValueError(
                "gradients differ among the ranks that see different batches, so their weights would drift apart: let "
                "the closure call the DistributedDataParallel module, not the model inside it, average gradients of "
                "parameters that FSDP ignores, or pass parallel=None if each process trains on its own"
            )
        self._gradients_checked = bool(high[1] > 0)

    def no_sync(self) -> AbstractContextManager[object]:
        """Keep DDP from averaging the gradient of a pass."""
        assert self._ddp is not None
        return self._ddp.no_sync()

    # ---------------------------------------------------------------- ranks with the same batch

    def check_same_weights(self, weights: Sequence[Tensor]) -> None:
        """Raise ValueError if ranks that share samples hold different weights."""
        if self._samples is None:
            return
        device = weights[0].device
        sums = torch.stack([x.sum(dtype=torch.float64).to(device) for x in weights]).nan_to_num()
        if not torch.equal(*_extremes(sums, [self._samples])):
            raise ValueError(
                "weights differ among the ranks that share samples: seed all of them alike before the model is made, "
                "or load one checkpoint on all"
            )

    def my_samples(self, num_samples: int, *, independent: bool) -> range:
        """Return the samples of this rank. Samples that depend on each other stay on the first rank."""
        if self._samples is None:
            return range(num_samples)
        rank, size = dist.get_rank(self._samples), dist.get_world_size(self._samples)
        if not independent:
            return range(num_samples if rank == 0 else 0)
        return range(rank, num_samples, size)

    def sum_over_samples(self, x: Tensor) -> None:
        """Sum over the ranks that share the samples, in place."""
        dist.all_reduce(x, group=self._samples)

    def copy_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Copy tensors from the rank that holds sample 0."""
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for x in tensors:
            kinds.setdefault((x.device, x.dtype), []).append(x)
        for parts in kinds.values():
            flat = torch.cat([x.reshape(-1) for x in parts])
            dist.broadcast(flat, group=self._samples, group_src=0)
            for x, part in zip(parts, flat.split([x.numel() for x in parts]), strict=True):
                x.copy_(part.view(x.shape))

    def check_not_joined(self) -> None:
        """Raise ValueError inside ``join()``: a joined rank shadows DDP's all-reduces and would mismatch ours."""
        if self._ddp is not None and self._ddp._join_config.enable:
            raise ValueError(
                "a step inside join() would wait for ranks that have run out of batches: give every rank the same "
                "number of batches (drop_last=True)"
            )

    def annotate(self, error: BaseException) -> None:
        """Add the rank to an error of a step; the cause may be a failure on another rank."""
        if isinstance(error, RuntimeError):
            error.add_note(
                f"tiltsam: the step failed on rank {dist.get_rank()} of {dist.get_world_size()}. If the error "
                "mentions connections, peers or a timeout, another rank failed or hangs: look at its output first. "
                "Unless the base optimizer had begun its update, the weights on this rank are those from before the "
                "step. Restart all ranks from the last checkpoint."
            )


class Sharding:
    """How parameters are split over processes: not at all, or as DTensors over one device mesh (FSDP2).

    Args:
        params: The parameters.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        sharded: list[Any] = [p for p in params if is_sharded(p)]
        meshes = {p.device_mesh for p in sharded}
        if len(meshes) > 1:
            raise ValueError(f"all parameters must be on one device mesh, got {len(meshes)}")
        self.mesh: Any = next(iter(meshes), None)
        self._specs: list[Any] = [p if is_sharded(p) else None for p in params]
        dims = sorted({i for p in sharded for i in _sharded_dims(p)})
        self.groups: list[Group] = [self.mesh.get_group(i) for i in dims] if self.mesh is not None else []
        """The groups whose ranks hold different parts."""
        self.needs_views = self.mesh is not None or any(p.is_complex() for p in params)
        """Whether this process computes with local, real views instead of the parameters themselves."""
        for p in sharded:
            if p.is_complex():
                raise ValueError("sharded parameters must be real, got a complex one")
            if _sharded_dims(p) not in ([], dims):
                raise ValueError("parameters sharded over different dimensions of their mesh are not supported")

    def is_split(self, i: int) -> bool:
        """Return whether parameter ``i`` is held in parts."""
        return self._specs[i] is not None and bool(_sharded_dims(self._specs[i]))

    def sum(self, x: Tensor) -> Tensor:
        """Sum over the ranks that hold different parts."""
        for group in self.groups:
            x = x.clone()
            dist.all_reduce(x, group=group)
        return x

    def wrap(self, i: int, local: Tensor) -> Tensor:
        """Return a tensor like parameter ``i`` from its local part."""
        spec = self._specs[i]
        if spec is None:
            return local
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            local, spec.device_mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride()
        )

    def normal_(self, i: int, x: Tensor, generator: torch.Generator) -> None:
        """Fill the local part of parameter ``i`` with its part of the noise that one process would draw."""
        if not self.is_split(i):
            x.normal_(generator=generator)
            return
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        spec = self._specs[i]
        whole = torch.empty(spec.shape, dtype=x.dtype, device=x.device).normal_(generator=generator)
        shape, offset = compute_local_shape_and_global_offset(spec.shape, spec.device_mesh, spec.placements)
        x.copy_(whole[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))])

    def rows_are_whole(self, i: int) -> bool:
        """Return whether each slice of parameter ``i`` along its first dimension lies on one rank."""
        spec = self._specs[i]
        return not self.is_split(i) or (spec.dim() > 1 and all(p.dim == 0 for p in spec.placements if p.is_shard()))


def find_ddp(model: torch.nn.Module | None) -> DistributedDataParallel | None:
    """Return the DDP module: the model itself or inside it, because it may be compiled or part of another."""
    modules = model.modules() if model is not None else ()
    return next((m for m in modules if isinstance(m, DistributedDataParallel)), None)


def is_sharded(p: Tensor) -> bool:
    """Return whether a tensor is a DTensor, without importing them."""
    return hasattr(p, "device_mesh") and hasattr(p, "placements")


def local_part(p: Tensor) -> Tensor:
    """Return what this process holds of a tensor, sharing memory."""
    return p.detach().to_local() if is_sharded(p) else p.detach()  # type: ignore[attr-defined]


def local_gradient(p: Tensor) -> Tensor:
    """Return what this process holds of a parameter's gradient, laid out as the parameter is."""
    grad: Any = p.grad
    if is_sharded(p) and grad.placements != p.placements:  # type: ignore[attr-defined]
        grad = grad.redistribute(placements=p.placements)  # type: ignore[attr-defined]
    return local_part(grad)


def reshard(model: torch.nn.Module | None, *, after_error: bool = False) -> None:
    """Let FSDP drop gathered copies of its weights, which a forward pass without backward leaves behind.

    Args:
        model: The model.
        after_error: Whether a forward pass may have raised: inside one ``module.reshard()`` keeps the copies of the
            root. A state dict has sharded weights only, so FSDP drops all copies before it makes one.
    """
    for module in model.modules() if model is not None else ():
        if callable(drop := getattr(module, "reshard", None)):
            drop()
            if after_error:
                module.state_dict()


def _extremes(x: Tensor, groups: Sequence[Group]) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest value of any rank of the groups, element by element."""
    both = torch.stack([-x, x])
    for group in groups:
        dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    return -both[0], both[1]


def _sharded_dims(p: Any) -> list[int]:
    return [i for i, placement in enumerate(p.placements) if placement.is_shard()]


def _unless_single(group: Group | None) -> Group | None:
    return None if group is None or dist.get_world_size(group) == 1 else group
