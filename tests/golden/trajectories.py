"""Compare two versions of tiltsam by the weights they train: 20 steps of every method, in float32 and float64.

    python tests/golden/trajectories.py write FILE               # trajectories of the installed version
    python tests/golden/trajectories.py write FILE --device cuda # the same, and captured steps
    python tests/golden/trajectories.py compare OLD NEW          # bitwise, then the largest relative difference
    python tests/golden/trajectories.py against REVISION         # this tree against a git revision, in one go

Each trajectory is the list of its losses and a SHA-256 of the final weights and buffers. On one machine two versions
must agree in every digest. Other processors round differently: ``golden.json`` is compared by losses, to 1e-5 in
float32 and 1e-12 in float64 (``test_golden.py``).
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tiltsam
from tiltsam import samplers

NUM_STEPS = 20
TOLERANCE = {"float32": 1e-5, "float64": 1e-12}
DTYPES = {"float32": torch.float32, "float64": torch.float64}

TSAM = {"t": 5.0, "rho": 0.05, "radius": 0.1, "num_samples": 3}
METHODS: dict[str, Callable[..., tiltsam.SharpnessAware]] = {
    "erm": lambda base, **kw: tiltsam.ERM(base, **kw),
    "sam": lambda base, **kw: tiltsam.SAM(base, rho=0.05, **kw),
    "asam": lambda base, **kw: tiltsam.ASAM(base, rho=0.5, **kw),
    "esam2": lambda base, **kw: tiltsam.LineSearchSAM(base, rho=0.05, num_points=4, **kw),
    "pgn": lambda base, **kw: tiltsam.PGN(base, rho=0.05, alpha=0.7, **kw),
    "rsam": lambda base, **kw: tiltsam.RSAM(base, rho=0.05, gamma=0.05, **kw),
    "tsam": lambda base, **kw: tiltsam.TSAM(base, **TSAM, **kw),
    "tsam-s1": lambda base, **kw: tiltsam.TSAM(base, rho=0.05, radius=0.1, num_samples=1, **kw),
    "tsam-s5-t100": lambda base, **kw: tiltsam.TSAM(base, **{**TSAM, "t": 100.0, "num_samples": 5}, **kw),
    "tsam-shared": lambda base, **kw: tiltsam.TSAM(base, **TSAM, share_ascent=True, **kw),
    "tsam-uniform": lambda base, **kw: tiltsam.TSAM(base, **TSAM, sampler="uniform", **kw),
    "tsam-gaussian": lambda base, **kw: tiltsam.TSAM(base, **TSAM, sampler="gaussian", **kw),
    "tsam-clipped": lambda base, **kw: tiltsam.TSAM(
        base, **TSAM, sampler=samplers.Ascent(samplers.Gaussian(clip=True)), **kw
    ),
    "tsam-two-ascents": lambda base, **kw: tiltsam.TSAM(base, **TSAM, sampler=samplers.Ascent(num_steps=2), **kw),
    "tsam-hmc": lambda base, **kw: tiltsam.TSAM(
        base, **{**TSAM, "num_samples": 2}, sampler=samplers.HMC(num_steps=2, step_size=0.02), **kw
    ),
}


class Net(nn.Module):
    """BatchNorm, dropout, a layer used twice, a frozen and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.twice = nn.Linear(8, 8, bias=False)
        self.dropout = nn.Dropout(0.2)
        self.last = nn.Linear(8, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.first(x)))
        h = self.twice(self.dropout(torch.tanh(self.twice(h))))
        logits: Tensor = self.last(h) * self.frozen
        return logits


def mlp() -> nn.Module:
    """Every parameter trained and used: the case that fast paths are made for."""
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {"net": Net, "mlp": mlp}


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups for ``Net``, one for the others."""
    if not isinstance(model, Net):
        return [{"params": list(model.parameters())}]
    return [
        {"params": [*model.first.parameters(), *model.norm.parameters()]},
        {"params": [*model.twice.parameters(), *model.last.parameters(), model.frozen, model.unused]},
    ]


def trajectory(
    name: str, network: str, dtype: torch.dtype, device: str = "cpu", *, captured: bool = False
) -> dict[str, Any]:
    """Train one method; return its losses and the digest of the final weights and buffers.

    Args:
        name: A key of :data:`METHODS`.
        network: A key of :data:`MODELS`.
        dtype: Of the weights.
        device: Where to train.
        captured: Take the steps through :func:`tiltsam.capture`.
    """
    torch.manual_seed(1)
    model = MODELS[network]().to(dtype)
    batches = [(torch.randn(16, 6, dtype=dtype), torch.randint(3, (16,))) for _ in range(4)]
    model.to(device)
    batches = [(x.to(device), y.to(device)) for x, y in batches]
    base = torch.optim.SGD(parameter_groups(model), lr=0.05, momentum=0.9, weight_decay=5e-4)
    optimizer = METHODS[name](base, model=model, seed=3)

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x), y)

    step: Callable[[Tensor, Tensor], Tensor]
    if captured:
        step = tiltsam.capture(optimizer, loss_fn)
    else:

        def step(x: Tensor, y: Tensor) -> Tensor:
            def closure() -> Tensor:
                loss = loss_fn(x, y)
                loss.backward()
                return loss

            return optimizer.step(closure)

    losses = [step(*batches[i % len(batches)]).item() for i in range(NUM_STEPS)]
    if captured and step.reason is not None:  # type: ignore[attr-defined]
        raise RuntimeError(f"{name} was not captured: {step.reason}")  # type: ignore[attr-defined]
    digest = hashlib.sha256()
    for key, value in model.state_dict().items():
        digest.update(key.encode())
        digest.update(value.cpu().contiguous().numpy().tobytes())
    return {"losses": losses, "digest": digest.hexdigest()}


def trajectories(device: str = "cpu") -> dict[str, dict[str, Any]]:
    """All trajectories, by ``method/network/dtype`` and, on a GPU, ``method/network/dtype/captured``."""
    torch.set_num_threads(1)
    found = {}
    for name, network, kind in itertools.product(METHODS, MODELS, DTYPES):
        found[f"{name}/{network}/{kind}"] = trajectory(name, network, DTYPES[kind], device)
        if device != "cpu":
            run = trajectory(name, network, DTYPES[kind], device, captured=True)
            found[f"{name}/{network}/{kind}/captured"] = run
    return found


def largest_difference(a: list[float], b: list[float]) -> float:
    """Return the largest relative difference of two lists of losses."""
    return max(abs(x - y) / max(abs(x), abs(y), 1e-30) for x, y in zip(a, b, strict=True))


def compare(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Print where two sets of trajectories differ; return whether all are bitwise equal."""
    same = True
    for name in sorted(old.keys() | new.keys()):
        if name not in old or name not in new:
            print(f"{name}: only in the {'new' if name in new else 'old'} version")
            same = False
        elif old[name]["digest"] != new[name]["digest"]:
            difference = largest_difference(old[name]["losses"], new[name]["losses"])
            print(f"{name}: not bitwise equal; largest relative difference of a loss {difference:.1e}")
            same = False
    print(f"{len(new)} trajectories, {'all bitwise equal' if same else 'see above'}")
    return same


def against(revision: str) -> dict[str, Any]:
    """Run this script on the sources of a git revision."""
    root = Path(__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "-C", root, "worktree", "add", "-q", "--detach", folder, revision], check=True)
        try:
            out = Path(folder) / "golden.json"
            environment = {**os.environ, "PYTHONPATH": str(Path(folder) / "src")}
            subprocess.run([sys.executable, __file__, "write", str(out)], check=True, env=environment)
            found: dict[str, Any] = json.loads(out.read_text())
            return found
        finally:
            subprocess.run(["git", "-C", root, "worktree", "remove", "--force", folder], check=True)


def main() -> None:
    """Run a command of the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write")
    write.add_argument("file", type=Path)
    write.add_argument("--device", default="cpu")
    pair = commands.add_parser("compare")
    pair.add_argument("old", type=Path)
    pair.add_argument("new", type=Path)
    commands.add_parser("against").add_argument("revision")
    args = parser.parse_args()
    if args.command == "write":
        args.file.write_text(json.dumps(trajectories(args.device), indent=1) + "\n")
    elif args.command == "compare":
        sys.exit(not compare(json.loads(args.old.read_text()), json.loads(args.new.read_text())))
    else:
        sys.exit(not compare(against(args.revision), trajectories()))


if __name__ == "__main__":
    main()
