"""Which code made a result: a fingerprint of the package's sources, for one version number covers many commits."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

__all__ = ["code_digest", "digest_of"]


@functools.cache
def code_digest() -> str:
    """Twelve hexadecimal digits that stand for the sources of the package as they lie on the disk.

    The same sources have the same digits wherever they are installed; ``tiltsam --version`` prints them.
    """
    return digest_of(Path(__file__).parents[1])


def digest_of(package: Path) -> str:
    """The same for a package that lies elsewhere: of the names and contents of its Python files."""
    found = hashlib.sha256()
    sources = (path for path in package.rglob("*.py") if path.is_file())  # an editor's lock is a link to nothing
    for name, path in sorted((path.relative_to(package).as_posix(), path) for path in sources):
        content = path.read_bytes()
        found.update(f"{name} {len(content)}\n".encode() + content)
    return found.hexdigest()[:12]
