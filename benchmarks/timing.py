"""How the benchmarks measure: candidates take turns in one process, and the fastest turn of each counts."""

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

import tiltsam


def best_of(candidates: Mapping[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, float]:
    """Milliseconds of the fastest of ``repeats`` turns, the candidates taking turns so that drift hits all alike."""
    best = dict.fromkeys(candidates, float("inf"))
    for candidate in candidates.values():
        candidate()  # warm up: kernels, caches, buffers
    for _ in range(repeats):
        for name, candidate in candidates.items():
            best[name] = min(best[name], _milliseconds(candidate, device))
    return best


def _milliseconds(candidate: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    candidate()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * (time.perf_counter() - start)


def peak_memory(device: torch.device) -> float:
    """Peak MiB so far: of the GPU's allocator, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def in_fresh_process(script: str, *arguments: str) -> Any:
    """Run a script of this folder in a new interpreter and read the JSON that is the last line of its output."""
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(output.strip().splitlines()[-1])


def environment(device: torch.device) -> dict[str, object]:
    """What stands beside every figure."""
    found: dict[str, object] = {
        "tiltsam": tiltsam.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "processor": _processor(),
    }
    if device.type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
        found |= {"cudnn": torch.backends.cudnn.version()}
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def print_table(headings: list[str], rows: list[list[str]]) -> None:
    """A Markdown table."""
    widths = [max(len(row[i]) for row in [headings, *rows]) for i in range(len(headings))]

    def line(cells: list[str]) -> str:
        padded = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "| " + " | ".join(padded) + " |"

    print(line(headings))
    print("|" + "|".join("-" * (w + 2) for w in widths) + "|")
    for row in rows:
        print(line(row), flush=True)
