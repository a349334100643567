"""What a step of SAM or TSAM costs: passes, memory, bytes moved and bytes sent, from sizes alone.

:func:`step_cost` counts. Its counts of passes, memory and sent bytes are tested against real steps;
:meth:`StepCost.seconds` turns them into a time under assumptions that a :class:`Machine` states, which is a prediction.
``python -m tiltsam.lab.scaling`` prints the table of ``docs/large-models.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

from tiltsam.lab.console import format_markdown

__all__ = ["Layout", "Machine", "StepCost", "compare_layouts", "step_cost"]


@dataclass(frozen=True)
class Layout:
    """How many ranks do what; their product is the number of GPUs.

    Args:
        data: Whole copies of the model that see different batches (DDP); with ``shards``, hybrid sharding.
        shards: Ranks that hold a part of the model each and see different batches (FSDP2).
        samples: Ranks that see the same batch and divide the samples of a step (``Parallel(samples=...)``).
    """

    data: int = 1
    shards: int = 1
    samples: int = 1

    @property
    def ranks(self) -> int:
        """The number of GPUs."""
        return self.data * self.shards * self.samples


@dataclass(frozen=True)
class Machine:
    """What a GPU and its links achieve. Defaults: H200s in nodes of eight, 400 Gbit/s a GPU between nodes.

    Args:
        flops: Operations a second in the passes, as Llama decoders of 1 and 3 billion parameters reach in bf16.
        memory_bandwidth: Bytes a second, read and written.
        node_bandwidth: Bytes a second that a GPU sends within a node.
        network_bandwidth: Bytes a second that a GPU sends to another node.
        node_size: GPUs of a node.
        memory: Bytes of a GPU.
    """

    flops: float = 3.3e14
    memory_bandwidth: float = 4.3e12
    node_bandwidth: float = 4.5e11
    network_bandwidth: float = 5e10
    node_size: int = 8
    memory: float = 139 * 2**30


@dataclass(frozen=True)
class StepCost:
    """The cost of a step on the busiest rank. Bytes sent are those handed to collectives."""

    layout: Layout
    passes: int
    """Forward and backward passes."""
    flops: float
    """Operations of all passes."""
    memory_bytes: float
    """Weights, gradient, states of the base, copy of the weights and mean of gradients; not activations."""
    bytes_above_base: float
    """The part of ``memory_bytes`` that a plain step does not need."""
    vector_bytes: float
    """Read and written outside the passes, by the method and the base."""
    gathered_bytes: float
    """All-gathers of weights (FSDP2)."""
    reduced_bytes: float
    """All-reduces (DDP) or reduce-scatters (FSDP2) of gradients."""
    replica_bytes: float
    """All-reduces of sharded gradients over ``data`` (hybrid sharding)."""
    exchanged_bytes: float
    """The sum of gradients over ranks that divide samples: once a step."""

    @property
    def sent_bytes(self) -> float:
        """All bytes handed to collectives, except a few numbers."""
        return self.gathered_bytes + self.reduced_bytes + self.replica_bytes + self.exchanged_bytes

    def seconds(self, machine: Machine = Machine()) -> float:  # noqa: B008 (frozen)
        """Predict the time of a step.

        Assumes that inside a pass sending overlaps with computing completely, that the exchange of samples and the
        work on vectors overlap with nothing, that collectives are rings, and that neighbouring ranks are shards, then
        samples, then data.
        """
        shards, samples, data = self.layout.shards, self.layout.samples, self.layout.data
        sending = _ring(self.gathered_bytes, shards, shards, machine)
        if shards > 1:
            sending += _ring(self.reduced_bytes, shards, shards, machine)
            sending += 2 * _ring(self.replica_bytes, data, self.layout.ranks, machine)
        else:
            sending += 2 * _ring(self.reduced_bytes, data, self.layout.ranks, machine)
        exchange = 2 * _ring(self.exchanged_bytes, samples, shards * samples, machine)
        return max(self.flops / machine.flops, sending) + exchange + self.vector_bytes / machine.memory_bandwidth


def step_cost(
    parameters: float,
    tokens: float,
    *,
    num_samples: int = 3,
    noise: bool = True,
    ascent: bool = True,
    share_ascent: bool = False,
    layout: Layout = Layout(),  # noqa: B008 (frozen)
    weight_bytes: int = 4,
    sent_weight_bytes: int | None = None,
    state_vectors: int = 2,
    checkpointing: bool = False,
) -> StepCost:
    """Count what a step costs on the busiest rank.

    Args:
        parameters: Parameters, all of them trained.
        tokens: Tokens of the batch of a rank.
        num_samples: s.
        noise: Whether samples start at random (TSAM); without, one sample is SAM.
        ascent: Whether samples ascend; with one sample, without noise and ascent, a step is the base's.
        share_ascent: Whether samples share an ascent gradient.
        layout: The ranks.
        weight_bytes: Bytes of a weight, and so of its gradient, its states and its copies.
        sent_weight_bytes: Bytes of a weight that FSDP2 gathers, 2 with ``MixedPrecisionPolicy(torch.bfloat16)``;
            ``weight_bytes`` by default. Gradients are reduced in ``weight_bytes``.
        state_vectors: Vectors of the base's state: AdamW 2, SGD with momentum 1.
        checkpointing: Whether activations are computed again in the backward pass.

    Raises:
        ValueError: If several samples have neither noise nor an ascent: they would be the same.

    Note:
        FSDP2 gathers each block twice a pass, but the parameters of the root module once; this counts twice for all.

    Example:
        >>> cost = step_cost(7e9, 4096, num_samples=3)
        >>> cost.passes, cost.bytes_above_base / 7e9
        (6, 8.0)
    """
    if num_samples > 1 and not (noise or ascent):
        raise ValueError(f"num_samples must be 1 without noise and ascent, got {num_samples}")
    samples = math.ceil(num_samples / layout.samples)
    moves = noise or ascent
    passes = samples if not ascent else samples + 1 if share_ascent else 2 * samples
    here = parameters / layout.shards  # held by this rank
    mean = num_samples > 1 or layout.samples > 1
    above = moves + mean + (share_ascent and ascent)
    vector = here * weight_bytes
    gathers = layout.shards > 1
    received = sent_weight_bytes if sent_weight_bytes is not None else weight_bytes
    reduces = layout.shards > 1 or layout.data > 1
    return StepCost(
        layout,
        passes,
        flops=(8 if checkpointing else 6) * parameters * tokens * passes,
        memory_bytes=(2 + state_vectors + above) * vector,
        bytes_above_base=above * vector,
        vector_bytes=_num_vectors(samples, noise, ascent, mean, fused=not gathers and weight_bytes == 4) * vector
        + (samples * parameters * weight_bytes if gathers and noise else 0)  # each rank draws the noise of all
        + (3 + 2 * state_vectors) * vector,
        gathered_bytes=2 * passes * parameters * received if gathers else 0.0,
        reduced_bytes=passes * parameters * weight_bytes if reduces else 0.0,
        replica_bytes=passes * vector if gathers and layout.data > 1 else 0.0,
        exchanged_bytes=vector if layout.samples > 1 else 0.0,
    )


def _num_vectors(samples: int, noise: bool, ascent: bool, mean: bool, *, fused: bool) -> int:
    """Return the vectors read and written outside the passes; ``tiltsam.fused.fused_space`` has the table."""
    if not (noise or ascent):
        return 0
    move = (2 if fused else 7) if noise else 0
    norms = 2 if ascent else 1
    ascend = (4 if fused else 7) if ascent else 0
    distance = 4 if noise and not fused else 0
    each = move + norms + ascend + distance
    mix = (3 if fused else 9) * samples if mean else 0
    return 4 + samples * each + mix  # save and restore


def _ring(payload: float, ranks: int, extent: int, machine: Machine) -> float:
    """Return the seconds of an all-gather or reduce-scatter over ranks within a range of ``extent`` neighbours."""
    bandwidth = machine.node_bandwidth if extent <= machine.node_size else machine.network_bandwidth
    return payload * (ranks - 1) / ranks / bandwidth


def compare_layouts(
    parameters: float,
    batch_tokens: float,
    gpus: int,
    *,
    machine: Machine = Machine(),  # noqa: B008 (frozen)
) -> list[StepCost]:
    """Return layouts of so many GPUs whose vectors fit into 80% of a GPU's memory, the fastest first.

    Tried are 1, 2 and 4 sample ranks with 1 and 8 shards, and with a quarter, half and all of the GPUs. Every layout
    sees the same batch a step, with 4 samples. Weights are float32 and gathered in bf16, the base is AdamW, activations
    are computed again.

    Args:
        parameters: Parameters of the model.
        batch_tokens: Tokens of the batch, over all ranks.
        gpus: Number of GPUs.
        machine: The GPUs.
    """
    found = []
    shards_tried = {shards for shards in (1, min(8, gpus), gpus // 4, gpus // 2, gpus) if shards}
    for samples, shards in product((1, 2, 4), sorted(shards_tried)):
        if gpus % (samples * shards):
            continue
        layout = Layout(gpus // (samples * shards), shards, samples)
        tokens = batch_tokens / (layout.data * layout.shards)
        cost = step_cost(parameters, tokens, num_samples=4, layout=layout, sent_weight_bytes=2, checkpointing=True)
        if cost.memory_bytes < 0.8 * machine.memory:
            found.append(cost)
    return sorted(found, key=lambda cost: cost.seconds(machine))


def main() -> None:
    """Print predictions for 7 and 70 billion parameters on 8, 64 and 512 GPUs."""
    heading = ["parameters", "GPUs", "tokens a step", "samples in turn", "seconds", "GB a GPU"]
    rows = [[*heading, "samples divided", "seconds", "GB a GPU"]]
    for parameters, gpus, tokens in product((7e9, 70e9), (8, 64, 512), (2**18, 2**21)):
        costs = compare_layouts(parameters, tokens, gpus)
        row = [f"{parameters / 1e9:.0f} B", str(gpus), f"{tokens:,}"]
        for divided in (False, True):
            cost = next((c for c in costs if (c.layout.samples > 1) == divided), None)
            if cost is None:
                row += ["does not fit", "", ""]
            else:
                shape = f"{cost.layout.data} × {cost.layout.shards} × {cost.layout.samples}"
                row += [shape, f"{cost.seconds():.3g}", f"{cost.memory_bytes / 1e9:.0f}"]
        rows.append(row)
    print(format_markdown(rows))


if __name__ == "__main__":
    main()
