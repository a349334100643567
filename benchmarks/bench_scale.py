"""What a step costs from a million to billions of parameters: time, tokens per second and memory.

    python benchmarks/bench_scale.py                                        # 1 to 50 million parameters on the CPU
    python benchmarks/bench_scale.py --device cuda --out OUT --time-limit 240
    python benchmarks/bench_scale.py --figure OUT/scale.json                # where matplotlib is installed

Models are Llama decoders and ViTs of ``transformers`` with random weights. A row is one way to take a step. Its time is
the fastest of a few turns, next to the passes alone, in the same mode, and to a plain eager AdamW step of the same
process. Its memory is the peak that torch's allocator reports, less that of a plain step with the same base. Rows are
in order of importance; those that the time limit leaves no time for are left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import tiltsam
from timing import allocated_peak, best_of, environment, print_table
from workloads import LR, Workload

Step = Callable[[], object]


@dataclass(frozen=True)
class Size:
    """A model and its batch. ``length`` is in tokens; a ViT's is (224 / 16)² patches and a class token."""

    kind: str
    width: int
    layers: int
    heads: int
    hidden: int
    classes: int
    batch: int
    length: int
    inner: int  # steps of a turn, so that a turn takes 20 ms or more


# Shapes: 1m and 10m are small vocabularies, so that layers hold most weights as in large models; 125m is GPT-2 small
# with Llama's layers, 350m GPT-2 medium, 1b TinyLlama-1.1B, 3b OpenLLaMA-3B. Sequences have 2,048 tokens from 1b on, as
# those two were trained with, and 1,024 below. 4,096 tokens fill an H200; 8,192 are a micro-batch that people use. Work
# on vectors does not grow with the batch, so larger batches have smaller ratios.
SIZES = {
    "gpt-1m": Size("gpt", 128, 4, 4, 384, 2_048, 16, 1024, 10),
    "gpt-10m": Size("gpt", 256, 9, 4, 768, 8_192, 16, 1024, 5),
    "gpt-125m": Size("gpt", 768, 12, 12, 2048, 32_000, 8, 1024, 2),
    "gpt-350m": Size("gpt", 1024, 24, 16, 2816, 32_000, 4, 1024, 1),
    "gpt-1b": Size("gpt", 2048, 22, 32, 5632, 32_000, 4, 2048, 1),
    "gpt-3b": Size("gpt", 3200, 26, 32, 8640, 32_000, 2, 2048, 1),
    # Ti/16 narrowed, B/16, H/16 and G/16 at 224 pixels. Batches of a GPU's share in common recipes.
    "vit-1m": Size("vit", 128, 5, 4, 512, 100, 64, 197, 10),
    "vit-86m": Size("vit", 768, 12, 12, 3072, 1000, 64, 197, 2),
    "vit-632m": Size("vit", 1280, 32, 16, 5120, 1000, 32, 197, 1),
    "vit-1.8b": Size("vit", 1664, 48, 16, 8192, 1000, 16, 197, 1),
    # For a CPU: one short sequence.
    "cpu-1m": Size("gpt", 128, 4, 4, 384, 2_048, 1, 256, 2),
    "cpu-10m": Size("gpt", 256, 9, 4, 768, 8_192, 1, 256, 1),
    "cpu-50m": Size("gpt", 640, 8, 10, 1728, 16_384, 1, 128, 1),
    "cpu-vit-1m": Size("vit", 128, 5, 4, 512, 100, 1, 197, 2),
}

RHO, RADIUS, TILT = 0.05, 1.0, 20.0
TSAM = {"t": TILT, "rho": RHO, "radius": RADIUS}
METHODS: dict[str, tuple[str, dict[str, Any], int]] = {  # key, options, steps after which its costs repeat
    "erm": ("erm", {}, 1),
    "sam": ("sam", {"rho": RHO}, 1),
    "tsam s=1": ("tsam", {**TSAM, "num_samples": 1}, 1),
    "tsam s=3": ("tsam", {**TSAM, "num_samples": 3}, 1),
    "looksam": ("looksam", {"rho": RHO}, 5),
}
ALL, FEW = tuple(METHODS), ("sam", "tsam s=3")


@dataclass(frozen=True)
class Setting:
    """What is measured at a size.

    ``weights``: ``"fp32"`` computes in bf16 by autocast on a GPU; ``"bf16"`` holds weights, gradients and states in
    bf16; ``"lora"`` freezes bf16 weights and trains float32 adapters of rank 16.
    """

    size: str
    weights: str = "fp32"
    checkpointing: bool = False
    base: str = "adamw"
    methods: tuple[str, ...] = ALL
    modes: tuple[str, ...] = ("eager", "captured")

    @property
    def name(self) -> str:
        """For example ``gpt-1b-bf16-adamw`` or ``gpt-3b-fp32-adamw-checkpointing``."""
        return "-".join((self.size, self.weights, self.base, *(("checkpointing",) if self.checkpointing else ())))


# The curve over sizes first, then what else matters at 1 billion, then the rest.
ON_GPU = (
    Setting("gpt-1b"),
    Setting("gpt-125m"),
    Setting("gpt-3b", checkpointing=True, methods=("erm", "sam", "tsam s=1", "tsam s=3")),
    Setting("gpt-10m"),
    Setting("gpt-1m"),
    Setting("gpt-1b", "lora", methods=("sam", "tsam s=1", "tsam s=3")),
    Setting("gpt-1b", "bf16"),
    Setting("vit-86m"),
    Setting("vit-632m"),
    Setting("gpt-1b", checkpointing=True, methods=FEW),
    Setting("gpt-1b", base="sgd", methods=FEW),
    Setting("vit-1m"),
    Setting("gpt-350m"),
    Setting("gpt-3b", "bf16", methods=FEW),
    Setting("gpt-3b", methods=FEW, modes=("eager",)),
    Setting("gpt-10m", base="sgd", methods=FEW),
    Setting("vit-1.8b", checkpointing=True, methods=FEW),
)
ON_CPU = (
    Setting("cpu-1m", modes=("eager",)),
    Setting("cpu-10m", modes=("eager",)),
    Setting("cpu-50m", modes=("eager",)),
    Setting("cpu-vit-1m", modes=("eager",)),
    Setting("cpu-10m", "bf16", methods=FEW, modes=("eager",)),
    Setting("cpu-10m", "lora", methods=FEW, modes=("eager",)),
    Setting("cpu-10m", checkpointing=True, methods=FEW, modes=("eager",)),
    Setting("cpu-10m", base="sgd", methods=FEW, modes=("eager",)),
)


class LoRA(nn.Module):
    """A frozen linear layer plus a trainable product of two thin matrices."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear
        device = linear.weight.device
        self.down = nn.Parameter(torch.randn(rank, linear.in_features, device=device) / linear.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank, device=device))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x) + nn.functional.linear(nn.functional.linear(x, self.down), self.up)
        return found


class Transformer(Workload):
    """A model of :data:`SIZES` and a random batch."""

    def __init__(self, setting: Setting, device: torch.device) -> None:
        torch.manual_seed(0)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        self.size, self.device = SIZES[setting.size], device
        with device:
            self.model = _build(self.size)
        if setting.weights != "fp32":
            self.model.to(torch.bfloat16)
        self.bf16 = setting.weights == "lora" or (setting.weights == "fp32" and device.type == "cuda")  # by autocast
        if setting.weights == "lora":
            self.model.requires_grad_(False)
            for module in list(self.model.modules()):
                for name in ("q_proj", "v_proj"):
                    if isinstance(linear := getattr(module, name, None), nn.Linear):
                        setattr(module, name, LoRA(linear, 16))
        if setting.checkpointing:
            # Without dropout there is no random state to keep, and a graph could not read it.
            options = {"use_reentrant": False, "preserve_rng_state": False}
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)  # type: ignore[operator]
        self.model.train()
        shape = (self.size.batch, self.size.length)
        if self.size.kind == "gpt":
            self.x = torch.randint(self.size.classes, shape, device=device)
            self.y = torch.randint(self.size.classes, shape, device=device)
        else:
            dtype = torch.bfloat16 if setting.weights == "bf16" else torch.float32
            self.x = torch.randn(self.size.batch, 3, 224, 224, device=device, dtype=dtype)
            self.y = torch.randint(self.size.classes, shape[:1], device=device)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.nbytes = sum(p.nbytes for p in self.model.parameters())

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        options = {"use_cache": False} if self.size.kind == "gpt" else {}
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            logits = self.model(x, **options).logits
        return nn.functional.cross_entropy(logits.float().flatten(0, -2), y.flatten())

    def base(self, name: str) -> torch.optim.Optimizer:
        """Fused optimizers need no temporary vectors: memory above theirs is the method's alone."""
        if name == "sgd":
            return torch.optim.SGD(self.trained, lr=LR, momentum=0.9, fused=True)
        return torch.optim.AdamW(self.trained, lr=LR, fused=True)


def _build(size: Size) -> nn.Module:
    shape = {
        "hidden_size": size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "intermediate_size": size.hidden,
    }
    # An attention that is registered without masks builds none: Llama is causal by default. transformers would look for
    # packed sequences in Llama's positions, which it reads back to the host, and it builds masks in a captured pass but
    # none in an eager one, so that captured passes could not use flash attention.
    transformers.AttentionInterface.register("unmasked", sdpa_attention_forward)
    if size.kind == "vit":
        config = transformers.ViTConfig(**shape, num_labels=size.classes, attn_implementation="unmasked")
        found: nn.Module = transformers.ViTForImageClassification(config)
        return found
    config = transformers.LlamaConfig(
        **shape,
        num_key_value_heads=4 if size.heads == 32 and size.width == 2048 else size.heads,
        vocab_size=size.classes,
        max_position_embeddings=size.length,
        tie_word_embeddings=size.width < 2048,
        attn_implementation="unmasked",
    )
    found = transformers.LlamaForCausalLM(config)
    return found


def plain_step(work: Transformer, name: str) -> Step:
    base = work.base(name)

    def step() -> None:
        base.zero_grad()
        work.closure()
        base.step()

    step()  # states are made: memory is that of any later step
    return step


class Clock:
    """The seconds that are left."""

    def __init__(self, limit: float) -> None:
        self._end = time.perf_counter() + limit

    def allows(self, seconds: float) -> bool:
        return time.perf_counter() + seconds < self._end


def measure(setting: Setting, work: Transformer, args: argparse.Namespace, clock: Clock) -> Iterator[dict[str, Any]]:
    """Yield the rows of a setting; if one runs out of memory or cannot be captured, it has ``failed`` and no times."""
    inner = work.size.inner
    alone = {"eager": _measure(work, lambda: work.one_pass, inner, args.repeats, memory=False)["ms"]}
    yield {"step": "passes alone", "mode": "eager", "ms": alone["eager"], "passes": 1.0}
    plain: dict[str, dict[str, Any]] = {}
    for base in dict.fromkeys(("adamw", setting.base)):
        plain[base] = _measure(work, partial(plain_step, work, base), inner, args.repeats)
        yield {"step": base, "mode": "eager", "passes": 1.0, **plain[base]}
    for mode in setting.modes:
        if mode == "captured":
            try:
                three = _measure(work, lambda: work.captured_passes(3), inner, args.repeats, memory=False)
            except torch.cuda.OutOfMemoryError:
                yield {"step": "passes alone", "mode": mode, "failed": "out of memory"}
                return
            alone[mode] = three["ms"] / 3
            yield {"step": "passes alone", "mode": mode, "ms": alone[mode], "passes": 1.0}
        for name in setting.methods:
            key, _, period = METHODS[name]
            if key not in tiltsam.METHODS:
                continue
            steps = (4 * period if period > 1 else 4) + args.repeats * period * max(1, inner // period)
            if not clock.allows(steps * 1e-3 * plain["adamw"]["ms"] * (6 if name == "tsam s=3" else 2)):
                return
            try:
                row = _measure_method(work, setting, name, mode, args.repeats)
            except torch.cuda.OutOfMemoryError:
                row = {"failed": "out of memory"}
            if "failed" not in row:
                row["over_passes"] = row["ms"] / row["passes"] / alone[mode]
                row["over_adamw"] = row["ms"] / plain["adamw"]["ms"]
                row["above"] = row["peak"] - plain[setting.base]["peak"]
            yield {"step": name, "mode": mode, **row}


def _measure_method(work: Transformer, setting: Setting, name: str, mode: str, repeats: int) -> dict[str, Any]:
    key, options, period = METHODS[name]
    reasons: list[str | None] = []
    passes: list[float] = []

    def make() -> Step:
        optimizer = tiltsam.METHODS[key](work.base(setting.base), model=work.model, **options)
        step: Step = partial(optimizer.step, work.closure)
        if mode == "captured":
            captured = tiltsam.capture(optimizer, work.loss, warm_up=2)
            step = partial(captured, work.x, work.y)
        for _ in range(3 * period if period > 1 else 1):  # warm up every kind of step
            step()
            info = optimizer.info
            passes.append(info.num_backwards + (info.num_forwards - info.num_backwards) / 3)  # forward alone: a third
        if mode == "captured":
            for _ in range(2 * period):
                step()
            reasons.append(captured.reason)
        return step

    row = _measure(work, make, period * max(1, work.size.inner // period), repeats)
    if reasons and reasons[0] is not None:
        return {"failed": reasons[0]}
    return {"passes": sum(passes[:period]) / period, **row}


def _measure(
    work: Transformer, make: Callable[[], Step], inner: int, repeats: int, *, memory: bool = True
) -> dict[str, Any]:
    """Return the milliseconds of a step and its peak bytes; on a CPU other steps count memory, because that is slow."""
    _clean(work)
    row: dict[str, Any] = {}
    if work.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(work.device)
        row["ms"] = best_of({"": make()}, repeats, work.device, inner)[""]
        if memory:
            row["peak"] = torch.cuda.max_memory_allocated(work.device)
            row["reserved"] = torch.cuda.max_memory_reserved(work.device)
    else:
        row["ms"] = best_of({"": make()}, repeats, work.device, inner)[""]
        _clean(work)
        if memory:
            row["peak"] = work.nbytes + allocated_peak(lambda: make()(), work.device)
    _clean(work)
    return row


def _clean(work: Transformer) -> None:
    for p in work.trained:
        p.grad = None
    gc.collect()
    if work.device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # one for each stream, and each captured step has its own
        torch.cuda.empty_cache()


def show(rows: list[dict[str, Any]]) -> None:
    """Print the rows of a setting as a table."""
    first = rows[0]
    print(
        f"\n### {first['size']}, {first['parameters'] / 1e6:.4g} M parameters, {first['weights']} weights, "
        f"{first['base']}, checkpointing {'on' if first['checkpointing'] else 'off'}, {first['tokens']} tokens\n"
    )
    table = []
    for row in rows:
        cells = [f"{row['step']}, {row['mode']}"]
        if "failed" in row:
            table.append([*cells, row["failed"], *[""] * 6])
            continue
        cells += [f"{row['ms']:.2f}", f"{row['passes']:.3g}"]
        cells += [f"{row[name]:.3f}" if name in row else "" for name in ("over_passes", "over_adamw")]
        cells.append(f"{row['tokens'] / row['ms'] * 1e3:,.0f}")
        cells.append(f"{row['peak'] / 2**30:.3f}" if "peak" in row else "")
        cells.append(f"{row['above'] / row['trained']:.2f}" if "above" in row else "")
        table.append(cells)
    headings = ["step", "ms", "passes", "× its passes alone", "× plain AdamW", "tokens/s", "peak GiB"]
    print_table([*headings, "bytes per trained parameter above the base"], table)


def draw(paths: list[Path]) -> None:
    """Draw time over the passes and memory above the base against the number of parameters, next to the first JSON."""
    from matplotlib.figure import Figure

    from tiltsam.lab.palette import OKABE_ITO

    rows = [row for path in paths for row in json.loads(path.read_text())["rows"] if "over_passes" in row]
    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    time_axis, memory_axis = figure.subplots(1, 2)
    names = [name for name in METHODS if any(row["step"] == name for row in rows)]
    for name, color in zip(names, OKABE_ITO, strict=False):
        for mode, style in (("eager", "--o"), ("captured", "-o")):
            curve = {"step": name, "mode": mode, "kind": "gpt", "base": "adamw", "weights": "fp32"}
            mine: dict[str, dict[str, Any]] = {}
            for row in rows:
                if all(row[key] == value for key, value in curve.items()):
                    mine.setdefault(row["size"], row)  # the first setting of a size
            points = sorted(mine.values(), key=lambda row: row["parameters"])
            if not points:
                continue
            x = [row["parameters"] for row in points]
            time_axis.plot(x, [row["over_passes"] for row in points], style, color=color, label=f"{name}, {mode}", ms=4)
            if mode == "eager":
                memory_axis.plot(x, [row["above"] / row["trained"] for row in points], style, color=color, ms=4)
    time_axis.axhline(1.05, color="0.7", lw=0.8)
    time_axis.set_ylabel("time / time of the passes alone")
    memory_axis.set_ylabel("bytes per parameter above a plain step")
    memory_axis.set_ylim(bottom=0)
    for axis in (time_axis, memory_axis):
        axis.set_xscale("log")
        axis.set_xlabel("parameters")
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *time_axis.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False, fontsize=8
    )
    figure.savefig(paths[0].with_suffix(".png"), dpi=150)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--only", nargs="+", default=["*"], metavar="PATTERN", help="only these settings: 'gpt-1b-bf16-*'"
    )
    parser.add_argument("--repeats", type=int, default=3, help="turns, of which the fastest counts")
    parser.add_argument("--time-limit", type=float, default=3600.0, help="seconds after which no row is added")
    parser.add_argument("--out", type=Path, help="folder for the numbers: scale.json")
    parser.add_argument("--figure", nargs="+", type=Path, metavar="JSON", help="draw these numbers, measure nothing")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, write after each setting."""
    args = parse(arguments)
    if args.figure:
        draw(args.figure)
        return
    device, clock = torch.device(args.device), Clock(args.time_limit)
    about = environment(device) | {"transformers": transformers.__version__}
    print(json.dumps(about))
    rows: list[dict[str, Any]] = []
    for setting in ON_GPU if device.type == "cuda" else ON_CPU:
        if not any(fnmatch(setting.name, pattern) for pattern in args.only):
            continue
        if not clock.allows(5):
            break
        work = Transformer(setting, device)
        common = asdict(setting) | {
            "kind": work.size.kind,
            "parameters": sum(p.numel() for p in work.model.parameters()),
            "trained": sum(p.numel() for p in work.trained),
            "tokens": work.size.batch * work.size.length,
        }
        del common["methods"], common["modes"]
        found = [common | row for row in measure(setting, work, args, clock)]
        show(found)
        rows += found
        del work
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            record = {"environment": about, "rows": rows}
            (args.out / "scale.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
