"""A whole step as one CUDA graph: all passes, the noise, the norms, the tilt and the base's update in one launch.

A step of TSAM with three samples on a ResNet-18 is about 2,500 kernels, and the host takes longer to launch them than
the GPU to run them. Captured once and replayed, a step is one launch.

    step = tiltsam.capture(optimizer, loss_fn)
    for inputs, targets in loader:
        loss = step(inputs, targets)

The learning rate, ``rho``, ``t``, ``delta``, ``radius`` and the seed may change between replays, through
``param_groups`` or schedules as usual; the noise is new at every step, and the same that an eager step draws. What
cannot change in a graph (the shape of the batch, ``num_samples``, a frozen layer, weight decay) leads to a new graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from tiltsam.graphs.captured_step import WARM_UP, CapturedStep
from tiltsam.optim.sharpness_aware import SharpnessAware

__all__ = ["capture"]


def capture(
    optimizer: SharpnessAware,
    loss_fn: Callable[..., Tensor] | Sequence[Callable[..., Tensor]],
    *,
    ascent_loss_fn: Callable[..., Tensor] | None = None,
    concurrent: bool = False,
    warm_up: int = WARM_UP,
) -> CapturedStep:
    """Return a step that runs as one CUDA graph, called with the parts of a batch.

    The first calls are eager steps (real ones: nothing is trained twice or thrown away), then the step is captured. On
    a CPU steps stay eager. If a GPU step cannot be captured, a warning and ``step.reason`` say why; results are the
    same.

    Args:
        optimizer: Any method of :data:`tiltsam.METHODS`.
        loss_fn: Maps the parts of a batch, tensors and constants (numbers, strings, ``None``), to the loss; open
            ``torch.autocast`` inside it and use a compiled model as you like. It must not read values back to the host,
            must read weights through the model's parameters, and must not write to memory that outlives it, except the
            model's buffers. Or a list with one function per sample, each on its own part of the batch (m-SAM).
        ascent_loss_fn: Runs instead of ``loss_fn`` where only the direction of an ascent is needed, for example on
            part of the batch.
        concurrent: Run the samples of a captured step concurrently, each on its own copy of the weights: s more copies
            of weights, gradients and activations in memory. Worthwhile if a pass does not fill the GPU. Needs
            ``model=`` and samples that share no ascent; if a pass changes buffers other than BatchNorm's, samples run
            one by one, with a warning.
        warm_up: Eager steps before the capture.

    Example:
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = tiltsam.SAM(torch.optim.SGD(model.parameters(), lr=0.1))
        >>> batch = torch.randn(8, 4), torch.randn(8, 1)
        >>> step = capture(optimizer, lambda x, y: torch.nn.functional.mse_loss(model(x), y))
        >>> loss = step(*batch)
        >>> step.reason
        'the parameters are on the cpu'
    """
    return CapturedStep(optimizer, loss_fn, ascent_loss_fn=ascent_loss_fn, concurrent=concurrent, warm_up=warm_up)
