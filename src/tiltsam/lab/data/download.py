"""Download public data sets and verify them.

A download is streamed to a temporary file, checked against the published checksum, and then renamed: a file is complete
or does not exist. An archive is first unpacked into a temporary folder; if it is damaged, nothing of it is kept.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import lzma
import os
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tiltsam.lab.data.dataset import LoadingCallback, Request
from tiltsam.lab.errors import DataError
from tiltsam.lab.files import drafted

__all__ = ["SOURCES", "Remote", "download", "extract", "fetch", "require"]

_CHUNK = 1 << 20
_TIMEOUT = 60.0  # seconds without a byte
# What the standard library raises for a damaged archive. An OSError with an errno comes from the disk instead, and a
# RuntimeError from an encrypted zip.
_DAMAGED = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, RuntimeError)


@dataclass(frozen=True)
class Remote:
    """A file to download."""

    url: str
    checksum: str
    """``md5:…`` or ``sha256:…``, whichever is published."""

    @property
    def filename(self) -> str:
        """Name of the downloaded file."""
        return self.url.rsplit("/", 1)[-1]

    @property
    def is_archive(self) -> bool:
        """Whether the file is to be unpacked."""
        return self.filename.endswith((".tar.gz", ".tgz", ".tar", ".zip"))


_TORONTO = "https://www.cs.toronto.edu/~kriz"
_ZALANDO = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"
_GLUE = "https://dl.fbaipublicfiles.com/glue/data"

SOURCES: dict[str, tuple[Remote, ...]] = {
    "cifar10": (Remote(f"{_TORONTO}/cifar-10-binary.tar.gz", "md5:c32a1d4ab5d03f1284b67883e8d87530"),),
    "cifar100": (Remote(f"{_TORONTO}/cifar-100-binary.tar.gz", "md5:03b5dce01913d631647c71ecec9e9cb8"),),
    "fashion-mnist": (
        Remote(f"{_ZALANDO}/train-images-idx3-ubyte.gz", "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        Remote(f"{_ZALANDO}/train-labels-idx1-ubyte.gz", "md5:25c81989df183df01b3e8a0aad5dffbe"),
        Remote(f"{_ZALANDO}/t10k-images-idx3-ubyte.gz", "md5:bef4ecab320f06d8554ea6380940ec79"),
        Remote(f"{_ZALANDO}/t10k-labels-idx1-ubyte.gz", "md5:bb300cfdad3c16e7a12a480ee83cd310"),
    ),
    "tiny-imagenet": (
        Remote("https://cs231n.stanford.edu/tiny-imagenet-200.zip", "md5:90528d7ca1a48142e341f4ef8d21d0de"),
    ),
    "dtd": (
        Remote(
            "https://www.robots.ox.ac.uk/~vgg/data/dtd/download/dtd-r1.0.1.tar.gz",
            "md5:fff73e5086ae6bdbea199a49dfb8a4c1",
        ),
    ),
    # GLUE may not distribute MRPC: it comes from SentEval, with GLUE's list of the pairs in the dev set.
    "glue/mrpc": (
        Remote(
            "https://dl.fbaipublicfiles.com/senteval/senteval_data/msr_paraphrase_train.txt",
            "sha256:60a9b09084528f0673eedee2b69cb941920f0b8cd0eeccefc464a98768457f89",
        ),
        Remote(f"{_GLUE}/mrpc_dev_ids.tsv", "sha256:971d7767d81b997fd9060ade0ec23c4fc31cbb226a55d1bd4a1bac474eb81dc7"),
    ),
    **{
        f"glue/{name}": (Remote(f"{_GLUE}/{file}", f"sha256:{digest}"),)
        for name, file, digest in (
            ("cola", "CoLA.zip", "f212fcd832b8f7b435fb991f101abf89f96b933ab400603bf198960dfc32cbff"),
            ("sst2", "SST-2.zip", "d67e16fb55739c1b32cdce9877596db1c127dc322d93c082281f64057c16deaa"),
            ("stsb", "STS-B.zip", "e60a6393de5a8b5b9bac5020a1554b54e3691f9d600b775bd131e613ac179c85"),
            ("qqp", "QQP-clean.zip", "40e7c862c04eb26ee04b67fd900e76c45c6ba8e6d8fab4f8f1f8072a1a3fbae0"),
            ("mnli", "MNLI.zip", "e7c1d896d26ed6caf700110645df426cc2d8ebf02a5ab743d5a5c68ac1c83633"),
            ("qnli", "QNLIv2.zip", "e634e78627a29adaecd4f955359b22bf5e70f2cbd93b493f2d624138a0c0e5f5"),
            ("rte", "RTE.zip", "6bf86de103ecd335f3441bd43574d23fef87ecc695977a63b82d5efb206556ee"),
            ("wnli", "WNLI.zip", "ae0e8e4d16f4d46d4a0a566ec7ecceccfd3fbfaa4a7a4b4e02848c0f2561ac46"),
        )
    },
}
"""Files of each data set, with their published checksums."""


def require(
    request: Request,
    source: str,
    paths: Sequence[Path],
    folder: Path,
    *,
    prepare: Callable[[Path], None] | None = None,
) -> None:
    """Check that a data set's files exist; download them if that was requested.

    Args:
        request: What to load.
        source: Key of :data:`SOURCES`.
        paths: The files.
        folder: Folder to download into.
        prepare: Called with the folder after the download.

    Raises:
        DataError: If files are missing; the message says what to put where.
    """
    missing = [path for path in paths if not path.exists()]
    if missing and request.download:
        fetch(SOURCES[source], folder, request.progress)
        if prepare is not None:
            prepare(folder)
        missing = [path for path in paths if not path.exists()]
    if missing:
        raise DataError(
            f"{missing[0]} is missing: pass --download, or put the files of {SOURCES[source][0].url} into {folder}; "
            f"{request.config.task} needs {request.files}"
        )


def fetch(remotes: Sequence[Remote], folder: Path, progress: LoadingCallback | None = None) -> None:
    """Download files into a folder, created if it does not exist, and unpack the archives among them.

    Raises:
        DataError: As :func:`download` and :func:`extract`.
    """
    for remote in remotes:
        path = download(remote, folder, progress)
        if remote.is_archive:
            extract(path, folder, progress)
            path.unlink()


def download(remote: Remote, folder: Path, progress: LoadingCallback | None = None) -> Path:
    """Download one file, verify it, and return its path.

    Raises:
        DataError: If there is no network, the checksum differs, or the folder cannot be written.
    """
    algorithm, _, expected = remote.checksum.partition(":")
    target = folder / remote.filename
    with _writing(folder), drafted(target) as draft:
        digest = hashlib.new(algorithm, usedforsecurity=False)
        try:
            _stream(remote.url, draft, digest.update, remote.filename, progress)
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()  # it is an open response, too
            raise DataError(f"{remote.url} cannot be downloaded ({error}): put it into {folder} by hand") from error
        if digest.hexdigest() != expected.lower():
            raise DataError(f"{remote.url}: {algorithm} must be {expected}, got {digest.hexdigest()}; nothing was kept")
    return target


def extract(archive: Path, folder: Path, progress: LoadingCallback | None = None) -> None:
    """Unpack a zip or tar archive into a folder; existing files of the same name are replaced.

    Raises:
        DataError: If the archive is damaged. Then nothing of it is kept.
    """
    with _writing(folder), tempfile.TemporaryDirectory(prefix=f".{archive.name}.", dir=folder) as staging:
        if progress is not None:
            progress(f"unpacking {archive.name}", 0, None)
        try:
            if archive.suffix != ".zip" and hasattr(tarfile, "data_filter"):  # Python 3.11.3 and older have no filters
                shutil.unpack_archive(archive, staging, filter="data")
            else:
                shutil.unpack_archive(archive, staging)
        except _DAMAGED as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise DataError(f"{archive} is damaged and was not unpacked ({error}): remove it and try again") from error
        for path in sorted(p for p in Path(staging).rglob("*") if p.is_file()):
            final = folder / path.relative_to(staging)
            final.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, final)


def _stream(
    url: str, path: Path, update: Callable[[bytes], object], what: str, progress: LoadingCallback | None
) -> None:
    """Copy a URL to a file in chunks."""
    request = urllib.request.Request(url, headers={"User-Agent": "tiltsam"})
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as response, path.open("wb") as out:
        length = response.headers.get("Content-Length")
        total = int(length) if length is not None and length.isdigit() else None
        done = 0
        while chunk := _read_chunk(response):
            out.write(chunk)
            update(chunk)
            done += len(chunk)
            if progress is not None:
                progress(f"downloading {what}", done, total)
        if total is not None and done != total:
            raise ConnectionError(f"the connection ended after {done} of {total} bytes")
        out.flush()
        os.fsync(out.fileno())


def _read_chunk(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read(_CHUNK)
    except OSError as error:  # from the network, not from the disk
        raise ConnectionError(f"the connection broke: {error}") from error


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Create the folder; raise a DataError that names it if the file system refuses to write."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        if isinstance(error, (ConnectionError, TimeoutError)) or error.errno is None:
            raise
        why = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
        raise DataError(f"{folder} cannot be written: {why}") from error
