"""Triton's interpreter, which runs the kernels of :mod:`tiltsam.fused` on a CPU.

It uses the addresses of tensors as a GPU does, so tables of addresses work. It has neither PTX nor libdevice: what the
kernels take from them is replaced here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy
import pytest
import torch
import triton
import triton.language as tl

from tiltsam.fused import kernels

__all__ = ["interpreted"]


@contextmanager
def interpreted() -> Iterator[None]:
    """Let the interpreter run the kernels; it is chosen by TRITON_INTERPRET=1 before they are imported."""
    with pytest.MonkeyPatch.context() as patch, numpy.errstate(all="ignore"):  # a kernel may compute inf - inf
        patch.setattr(kernels, "_polar", _polar)
        patch.setattr(kernels, "libdevice", SimpleNamespace(expm1=_expm1, log1p=_log1p))
        patch.setattr(torch.Tensor, "pin_memory", lambda x: x)
        yield


@triton.jit
def _polar(i, j):
    angle = 6.283185307179586 * (tl.uint_to_uniform_float(j) - 0.5)
    return tl.sqrt(-2.0 * tl.log(kernels._uniform(i))), tl.cos(angle), tl.sin(angle)


@triton.jit
def _expm1(x):
    return (tl.exp(x.to(tl.float64)) - 1).to(tl.float32)


@triton.jit
def _log1p(x):
    return tl.log(1 + x.to(tl.float64)).to(tl.float32)
