"""A digest of the package's source code: results record it, because one version number covers many commits."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

__all__ = ["code_digest", "digest_of"]


@functools.cache
def code_digest() -> str:
    """Return twelve hexadecimal digits that identify the source files of ``tiltsam``, lab included.

    The same sources have the same digest wherever they are installed. ``tiltsam --version`` prints it.
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
