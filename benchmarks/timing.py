"""Timing for the benchmarks: candidates alternate in one process, and the fastest round of each counts."""

from __future__ import annotations

import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tiltsam.lab.devices import describe_environment


def best_of(
    candidates: Mapping[str, Callable[[], object]],
    repeats: int,
    device: torch.device,
    inner: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Return the milliseconds per step in the fastest of ``repeats`` rounds of ``inner`` steps.

    The candidates alternate, so drift of the machine affects all of them.
    """
    best = dict.fromkeys(candidates, float("inf"))
    for candidate in candidates.values():
        for _ in range(1 if device.type == "cpu" else 3):  # warm up: kernels, caches, buffers
            candidate()
    for _ in range(repeats):
        for name, candidate in candidates.items():
            best[name] = min(best[name], _milliseconds(candidate, device, inner, clock))
    return best


def _milliseconds(
    candidate: Callable[[], object], device: torch.device, inner: int, clock: Callable[[], float]
) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = clock()
    for _ in range(inner):
        candidate()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (clock() - start) / inner


def peak_memory(device: torch.device) -> float:
    """Return the peak memory so far in MiB: of the GPU's allocator, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def allocated_peak(run: Callable[[], object], device: torch.device) -> int:
    """Return the most bytes above the start that torch's allocator holds during ``run()``."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    assert profile.profiler is not None
    events = profile.profiler.kineto_results.events()
    live = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def in_fresh_process(script: str, *arguments: str) -> Any:
    """Run a script of this folder in a new interpreter and parse the last line of its output as JSON."""
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(output.strip().splitlines()[-1])


def environment(device: torch.device) -> dict[str, object]:
    """Return the environment that is recorded with every measurement."""
    found = describe_environment(device) | {"processor": _processor()}
    if device.type == "cuda":
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def print_table(headings: list[str], rows: list[list[str]]) -> None:
    """Print a Markdown table."""
    from tiltsam.lab.console import format_markdown  # not at the top: it loads the lab, and some scripts measure memory

    print(format_markdown([headings, *rows]), flush=True)


def draw_ratios(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the milliseconds per step, eager next to captured, for each network. Needs matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("matplotlib is not installed: no figure")
        return
    from tiltsam.lab.palette import OKABE_ITO

    kinds = list(dict.fromkeys((row["network"], row["precision"]) for row in rows))
    figure = Figure(figsize=(6.4 * len(kinds), 6.2), layout="constrained")
    for axis, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        mine = [row for row in rows if (row["network"], row["precision"]) == kind]
        names = list(dict.fromkeys(row["step"] for row in mine))
        for mode, color, shift in (("eager", OKABE_ITO[1], -0.2), ("captured", OKABE_ITO[0], 0.2)):
            bars = [(names.index(row["step"]) + shift, row["ms"]) for row in mine if row["mode"] == mode]
            if bars:
                axis.barh([y for y, _ in bars], [ms for _, ms in bars], height=0.38, color=color, label=mode)
            for y, ms in bars:
                axis.text(ms, y, f" {ms:.1f}", va="center", fontsize=8)
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
        axis.margins(x=0.12)
        axis.set_xlabel("milliseconds per step")
        axis.set_title(f"{kind[0]}, {kind[1]}")
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=150)
