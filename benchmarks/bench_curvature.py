"""Compare tools that compute the top-5 Hessian eigenvalues of a ResNet-18 with 11 M parameters.

Each case runs in a fresh process on one thread, with the same weights, batch and seed. tiltsam runs to the tolerance;
the others may use as many Hessian-vector products if they have such an option, and eigsh has the same tolerance.
Seconds are those of the fastest repeat; peak memory is that of the first repeat, less what the process used before it.
The reference for errors is tiltsam in float64 with a tolerance of 1e-8.

    python benchmarks/bench_curvature.py                      # all cases, a table
    python benchmarks/bench_curvature.py --out FOLDER         # also FOLDER/results.json and FOLDER/log.txt
    python benchmarks/bench_curvature.py --device cuda

Peers (optional; missing ones are reported): curvlinops-for-pytorch, scipy,
hessian-eigenthings, pyhessian.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

K = 5
TOL = 1e-3  # relative residual ||Hv - lambda v|| / |lambda|: the relative error of the eigenvalue is then about TOL^2
SEED = 0
Case = Callable[[Any, Any, int], tuple[list[float], int, bool | None]]


def resnet18(num_classes: int) -> Any:
    """A ResNet-18 for 32x32 images (3x3 stem, no max-pool): 11.17 M parameters with 10 classes."""
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self, wide_in: int, wide: int, stride: int) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(wide_in, wide, 3, stride, 1, bias=False)
            self.norm1 = nn.BatchNorm2d(wide)
            self.conv2 = nn.Conv2d(wide, wide, 3, 1, 1, bias=False)
            self.norm2 = nn.BatchNorm2d(wide)
            plain = stride == 1 and wide_in == wide
            self.skip: nn.Module = (
                nn.Identity()
                if plain
                else nn.Sequential(nn.Conv2d(wide_in, wide, 1, stride, bias=False), nn.BatchNorm2d(wide))
            )

        def forward(self, x: Any) -> Any:
            y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
            return F.relu(y + self.skip(x))

    body: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    wide_in = 64
    for wide, stride in [(64, 1), (128, 2), (256, 2), (512, 2)]:
        body += [Block(wide_in, wide, stride), Block(wide, wide, 1)]
        wide_in = wide
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, num_classes))


def problem(device: str, batch: int, steps: int) -> tuple[Any, Any]:
    """Return a model after a short training, whose spectrum has outliers, and one batch of images."""
    import torch
    from torch.nn import functional as F

    torch.manual_seed(SEED)
    labels = torch.arange(batch) % 10
    images = torch.randn(10, 3, 32, 32)[labels] + torch.randn(batch, 3, 32, 32)
    model = resnet18(10)
    model.to(device)
    data = images.to(device), labels.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(data[0]), data[1]).backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    model.eval()
    return model, data


def ours(model: Any, data: Any, budget: int, **options: Any) -> tuple[list[float], int, bool | None]:
    from torch.nn import functional as F

    from tiltsam.curvature import top_eigenvalues
    from tiltsam.flatness.loss_surface import supervised

    found = top_eigenvalues(
        model, supervised(F.cross_entropy), [data], K, tol=TOL, max_products=budget, seed=SEED, **options
    )
    return found.values.tolist(), found.num_products, bool(found.converged.all())


def ours_kept_graph(model: Any, data: Any, budget: int) -> tuple[list[float], int, bool | None]:
    return ours(model, data, budget, keep_graph=True)


def ours_lean(model: Any, data: Any, budget: int) -> tuple[list[float], int, bool | None]:
    return ours(model, data, 400, basis_size=K + 2)


def ours_eigsh(model: Any, data: Any, budget: int) -> tuple[list[float], int, bool | None]:
    import numpy as np
    import torch
    from scipy.sparse.linalg import LinearOperator, eigsh
    from torch.nn import functional as F

    from tiltsam.flatness.hessian import HessianOperator
    from tiltsam.flatness.loss_surface import LossSurface, supervised

    with LossSurface(model, supervised(F.cross_entropy), [data]) as surface:
        hessian = HessianOperator(surface)
        out = torch.empty(hessian.size, device=hessian.device)

        def matvec(v: Any) -> Any:
            hessian(torch.from_numpy(np.asarray(v, dtype=np.float32).ravel()).to(hessian.device), out)
            return out.cpu().numpy().copy()

        operator = LinearOperator((hessian.size, hessian.size), matvec=matvec, dtype=np.float32)
        values = eigsh(operator, k=K, which="LA", tol=TOL, return_eigenvectors=True)[0]
        return sorted(map(float, values), reverse=True), hessian.num_products, True


def curvlinops_eigsh(model: Any, data: Any, budget: int) -> tuple[list[float], int, bool | None]:
    import numpy as np
    from curvlinops import HessianLinearOperator
    from scipy.sparse.linalg import LinearOperator, eigsh
    from torch import nn

    params = [p for p in model.parameters() if p.requires_grad]
    hessian = HessianLinearOperator(model, nn.CrossEntropyLoss(), params, [data], check_deterministic=False).to_scipy()
    count = 0

    def matvec(v: Any) -> Any:
        nonlocal count
        count += 1
        return hessian @ np.asarray(v, dtype=np.float32).ravel()

    operator = LinearOperator(hessian.shape, matvec=matvec, dtype=np.float32)
    values = eigsh(operator, k=K, which="LA", tol=TOL, return_eigenvectors=True)[0]
    return sorted(map(float, values), reverse=True), count, True


def eigenthings(model: Any, data: Any, budget: int) -> tuple[list[float], int, bool | None]:
    from hessian_eigenthings import HessianOperator, lanczos, supervised_loss
    from torch.nn import functional as F

    operator = HessianOperator(model, [data], supervised_loss(F.cross_entropy))
    found = lanczos(operator, k=K, max_iter=budget, tol=TOL, which="LA", seed=SEED)
    return found.eigenvalues.tolist(), found.iterations, bool(found.converged.all())


def eigenthings_100(model: Any, data: Any, budget: int) -> tuple[list[float], int, bool | None]:
    return eigenthings(model, data, 100)


def pyhessian(model: Any, data: Any, budget: int) -> tuple[list[float], int, bool | None]:
    # tol=0: use the whole budget, for K power iterations in sequence
    return _pyhessian(model, data, math.ceil(budget / K), 0.0)


def pyhessian_alone(model: Any, data: Any, budget: int) -> tuple[list[float], int, bool | None]:
    # its own criterion: the change of an eigenvalue between two products
    return _pyhessian(model, data, 100, TOL)


def _pyhessian(model: Any, data: Any, max_iter: int, tol: float) -> tuple[list[float], int, bool | None]:
    import importlib
    import warnings

    import torch
    from torch import nn

    # by name: the package hides the module behind a class of the same name
    module: Any = importlib.import_module("pyhessian.hessian")
    count = 0
    product = module.hessian_vector_product

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return product(*args)

    module.hessian_vector_product = counted
    torch.manual_seed(SEED)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            solver = module.hessian(model, nn.CrossEntropyLoss(), data=data, cuda=data[0].is_cuda)
            values, _ = solver.eigenvalues(maxIter=max_iter, tol=tol, top_n=K)
    finally:
        module.hessian_vector_product = product
    return [float(v) for v in values], count, None


CASES: dict[str, tuple[str, Case]] = {
    "ours": ("tiltsam: thick-restart Lanczos on the device", ours),
    "ours_kept_graph": ("tiltsam, graph kept between products", ours_kept_graph),
    "ours_lean": ("tiltsam, smallest basis", ours_lean),
    "ours_eigsh": ("tiltsam products + scipy eigsh", ours_eigsh),
    "curvlinops_eigsh": ("curvlinops + scipy eigsh", curvlinops_eigsh),
    "eigenthings": ("hessian-eigenthings, as many products as ours", eigenthings),
    "eigenthings_100": ("hessian-eigenthings, max_iter=100", eigenthings_100),
    "pyhessian": ("PyHessian, as many products as ours", pyhessian),
    "pyhessian_alone": ("PyHessian, until its own rule stops it", pyhessian_alone),
}


def memory(device: str, *, peak: bool) -> float:
    """Return the MB that the process uses now, or the maximum since the last reset."""
    if device == "cuda":
        import torch

        return (torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()) / 2**20
    key = "VmHWM:" if peak else "VmRSS:"
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 1024
    return math.nan


def run_case(name: str, device: str, batch: int, budget: int, repeats: int) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # ten bits of mantissa would hide the errors of the methods
    model, data = problem(device, batch, steps=10)
    if name == "reference":
        globals()["TOL"] = 1e-8
        values, products, converged = ours(model.double(), (data[0].double(), data[1]), 400)
        return {"case": name, "values": values, "products": products, "converged": converged}
    _warm_up(model, data)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = memory(device, peak=False)
    seconds, peak = math.inf, math.nan
    for repeat in range(repeats):
        begin = time.perf_counter()
        try:
            values, products, converged = CASES[name][1](model, data, budget)
        except ImportError as error:
            return {"case": name, "error": f"not installed: {error.name}"}
        except Exception as error:
            return {"case": name, "error": f"{type(error).__name__}: {str(error)[:200]}"}
        seconds = min(seconds, time.perf_counter() - begin)
        if repeat == 0:
            peak = memory(device, peak=True) - before
        model.zero_grad(set_to_none=True)
    return {
        "case": name,
        "values": values,
        "products": products,
        "converged": converged,
        "seconds": seconds,
        "seconds_per_product": seconds / products,
        "peak_mb": peak,
        "num_parameters": sum(p.numel() for p in model.parameters()),
    }


def _warm_up(model: Any, data: Any) -> None:
    """Run one double backward, so that choosing kernels is not timed."""
    import torch
    from torch.nn import functional as F

    params = list(model.parameters())
    grads = torch.autograd.grad(F.cross_entropy(model(data[0]), data[1]), params, create_graph=True)
    torch.autograd.grad(grads, params, params)


def peer_versions() -> dict[str, str]:
    """Return the versions of the tools."""
    versions = {}
    for name in ["scipy", "numpy", "curvlinops-for-pytorch", "hessian-eigenthings", "pyhessian"]:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def table(results: list[dict[str, Any]]) -> list[list[str]]:
    """Return the cells of a table, headings first."""
    best = next((r.get("values") for r in results if r["case"] == "reference"), None)
    rows = [["case", "products", "seconds", "ms/product", "peak MB", "converged", "worst error"]]
    for result in results:
        if result["case"] == "reference":
            continue
        label = CASES[result["case"]][0]
        if "error" in result:
            rows.append([f"{label}: {result['error']}", *["–"] * 6])
            continue
        error = max(abs(a - b) / abs(b) for a, b in zip(result["values"], best, strict=True)) if best else math.nan
        rows.append(
            [
                label,
                f"{result['products']}",
                f"{result['seconds']:.1f}",
                f"{1e3 * result['seconds_per_product']:.0f}",
                f"{result['peak_mb']:.0f}",
                {True: "yes", False: "no", None: "unknown"}[result["converged"]],
                f"{error:.1e}",
            ]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--batch", type=int, default=16, help="images in the one batch")
    parser.add_argument("--out", type=Path, help="folder for results.json and log.txt")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--case", help=argparse.SUPPRESS)  # run one case in this process, for the parent
    parser.add_argument("--budget", type=int, default=200, help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(run_case(args.case, args.device, args.batch, args.budget, args.repeats)))
        return

    # Not at the top: the process of a case loads only what the case needs.
    import torch

    from tiltsam.lab.console import format_markdown
    from timing import environment, in_fresh_process

    def fresh(case: str, budget: int) -> dict[str, Any]:
        options = {"device": args.device, "batch": args.batch, "budget": budget, "repeats": args.repeats}
        flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        try:
            result: dict[str, Any] = in_fresh_process(Path(__file__).name, "--case", case, *flags)
        except subprocess.CalledProcessError as error:
            return {"case": case, "error": error.stderr.strip().splitlines()[-1][:200]}
        return result

    head = f"top {K} eigenvalues, relative residual {TOL:g}, ResNet-18, one batch of {args.batch} images, {args.device}"
    about = environment(torch.device(args.device)) | {"threads": 1, "packages": peer_versions()}
    results = [fresh("reference", 400)]
    budget = 400
    for case in args.cases:
        results.append(fresh(case, budget))
        if case == "ours":
            budget = results[-1].get("products", budget)
        print(" ".join(table([results[0], results[-1]])[-1]), flush=True)
        if args.out:  # after every case, in case the run is interrupted
            args.out.mkdir(parents=True, exist_ok=True)
            record = {"environment": about, "batch": args.batch, "tol": TOL, "results": results}
            (args.out / "results.json").write_text(json.dumps(record, indent=1) + "\n")
            (args.out / "log.txt").write_text(f"{head}\n\n{format_markdown(table(results))}\n")
    print(f"\n{head}\n\n{format_markdown(table(results))}")


if __name__ == "__main__":
    main()
