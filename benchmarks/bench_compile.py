"""Would ``torch.compile`` pay for the tensor work of an eager step? The stages of a sample, as they are and compiled.

    python benchmarks/bench_compile.py [--device cuda] [--dtype float32]

The stages are those that :class:`tiltsam.parameters.ParameterSpace` runs through :mod:`tiltsam.vectors` for a sample of
TSAM on a ResNet-18: bring the noise to its length and add θ, the norm of a gradient, ascend, mix into the mean,
restore. The model's passes are not in it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tiltsam import vectors
from tiltsam.lab.models import MODELS
from timing import best_of, environment, print_table

Vector = list[Tensor]


def scatter(point: Vector, center: Vector, scale: Tensor) -> None:
    vectors.scale_(point, scale)
    vectors.add_(point, center)


def norm(gradient: Vector) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(vectors.norm(gradient, torch.float32))
    return length


def ascend(point: Vector, gradient: Vector, scale: Tensor, finite: Tensor) -> None:
    vectors.keep_(gradient, finite)
    vectors.add_scaled_(point, gradient, scale)


def mix(mean: Vector, gradient: Vector, share: Tensor, valid: Tensor) -> None:
    vectors.keep_(gradient, valid)
    vectors.lerp_(mean, gradient, share)


def restore(point: Vector, center: Vector) -> None:
    vectors.copy_(point, center)


STAGES: dict[str, Callable[..., object]] = {
    "scatter": scatter,
    "norm": norm,
    "ascend": ascend,
    "mix": mix,
    "restore": restore,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float64"))
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    print(json.dumps(environment(device)))
    shapes = [p.shape for p in MODELS["resnet18"](100).parameters()]
    point, center, gradient, mean = ([torch.randn(s, device=device, dtype=dtype) for s in shapes] for _ in range(4))
    one, yes = torch.ones((), device=device, dtype=dtype), torch.ones((), device=device, dtype=torch.bool)
    arguments: dict[str, tuple[Any, ...]] = {
        "scatter": (point, center, one),
        "norm": (gradient,),
        "ascend": (point, gradient, one, yes),
        "mix": (mean, gradient, one / 2, yes),
        "restore": (point, center),
    }
    rows = []
    totals = [0.0, 0.0, 0.0]
    for name, stage in STAGES.items():
        compiled = torch.compile(stage, fullgraph=True, dynamic=False)
        began = time.perf_counter()
        compiled(*arguments[name])
        seconds = time.perf_counter() - began
        steps = {"eager": partial(stage, *arguments[name]), "compiled": partial(compiled, *arguments[name])}
        times = best_of(steps, args.repeats, device, 20 if device.type == "cuda" else 1)
        for i, value in enumerate((times["eager"], times["compiled"], seconds)):
            totals[i] += value
        rows.append([name, f"{times['eager']:.3f}", f"{times['compiled']:.3f}", f"{seconds:.1f}"])
    rows.append(["all", *(f"{x:.3f}" for x in totals[:2]), f"{totals[2]:.1f}"])
    print_table(["stage", "eager, ms", "compiled, ms", "compiling, s"], rows)


if __name__ == "__main__":
    main()
