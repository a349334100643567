"""Branches of a CUDA graph: work of a step that may run beside what follows it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["Branch"]


class Branch:
    """A second line of work while a step is captured. Outside a capture there is one line, and this does nothing.

    Args:
        device: The GPU that the graph runs on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._held: list[object] = []  # what the branch still reads: its memory must not be lent out again

    @property
    def capturing(self) -> bool:
        """Whether a step is being captured: what is launched has not happened yet, and happens whole or not at all."""
        return self._stream is not None

    @contextmanager
    def of_a_graph(self) -> Iterator[None]:
        """Around the capture of a step."""
        self._stream = torch.cuda.Stream(self._device)
        try:
            yield
        finally:
            self._stream = None
            self._held.clear()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What stands in it may run beside what follows, until :meth:`rejoin`.

        What it reads must stay alive and unchanged until then.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def hold(self, *things: object) -> None:
        """Keep alive, until :meth:`rejoin`, what the branch reads."""
        if self._stream is not None:
            self._held += things

    def rejoin(self) -> None:
        """Wait for all that was put :meth:`aside`."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._held.clear()
