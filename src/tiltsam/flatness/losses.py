"""What a loss function returned, looked at before it is taken for a loss."""

from __future__ import annotations

from torch import Tensor

__all__ = ["check_finite", "scalar"]


def scalar(loss: Tensor) -> Tensor:
    """The loss as a 0-dim tensor; a clear error for one that is not a single number."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"loss_fn must return the mean loss of the batch as a scalar tensor, got {shape}")
    return loss.reshape(())


def check_finite(losses: Tensor, where: str = "") -> None:
    """Raise a ValueError that names the first batch whose loss is not finite."""
    bad = (~losses.isfinite()).nonzero()
    if len(bad):
        number = int(bad[0, 0])
        raise ValueError(f"the loss is not finite{where}: {losses[number].item()} on batch {number}")
