"""What a run was computed with: versions, the digest of the code, and the device."""

from __future__ import annotations

import functools
import hashlib
import platform
from pathlib import Path
from typing import Any

import torch

import tiltsam

__all__ = ["code_digest", "describe_environment", "digest_of"]


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Return the versions, the digest of the code, the device and the number of threads."""
    environment: dict[str, Any] = {
        "tiltsam": tiltsam.__version__,
        "code": code_digest(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": str(device),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        environment["gpu"] = torch.cuda.get_device_name(device)
    return environment


@functools.cache
def code_digest() -> str:
    """Return twelve hexadecimal digits that identify the source files of ``tiltsam``, lab included.

    Runs record it, because one version number covers many commits. The same sources have the same digest wherever they
    are installed. ``tiltsam --version`` prints it.
    """
    return digest_of(Path(__file__).parents[1])


def digest_of(package: Path) -> str:
    """Return the digest of the names and contents of the Python files in a folder."""
    digest = hashlib.sha256()
    sources = (path for path in package.rglob("*.py") if path.is_file())  # an editor's lock is a broken link
    for name, path in sorted((path.relative_to(package).as_posix(), path) for path in sources):
        content = path.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]
