"""Fetching data sets from their authors, without trusting what arrives.

A file is streamed beside its destination, checked against the published checksum and only then renamed, so that a name
either holds the whole file or does not exist. An archive is unpacked into a folder of its own first, member by member:
absolute paths, ``..``, links and devices are refused, and nothing is moved into place unless all of it was good.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import lzma
import os
import shutil
import stat
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from tiltsam.lab.errors import DataError

__all__ = ["SOURCES", "Progress", "Remote", "download", "extract", "fetch"]

Progress = Callable[[str, int, int | None], None]
"""Called with what is going on, how much is done, and how much there is (None where that is not known)."""

_CHUNK = 1 << 20
_TIMEOUT = 60.0  # seconds without a byte
# What the standard library raises for a damaged archive; an OSError with a number is the disk's instead.
_DAMAGE = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    OSError,
    RuntimeError,  # an encrypted zip; also a compression that is not implemented
)


@dataclass(frozen=True)
class Remote:
    """A file at the home of a data set."""

    url: str
    checksum: str
    """``md5:…`` or ``sha256:…``, whichever is published."""
    name: str = ""
    """File to write; the last part of the address where empty."""

    @property
    def filename(self) -> str:
        """Name of the file once it is here."""
        return self.name or self.url.rsplit("/", 1)[-1]

    @property
    def is_archive(self) -> bool:
        """Whether the file is to be unpacked."""
        return self.filename.endswith((".tar.gz", ".tgz", ".tar", ".zip"))


_TORONTO = "https://www.cs.toronto.edu/~kriz"
_ZALANDO = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"
_GLUE = "https://dl.fbaipublicfiles.com/glue/data"
_SENTEVAL = "https://dl.fbaipublicfiles.com/senteval/senteval_data"

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
    "glue/cola": (
        Remote(f"{_GLUE}/CoLA.zip", "sha256:f212fcd832b8f7b435fb991f101abf89f96b933ab400603bf198960dfc32cbff"),
    ),
    "glue/sst2": (
        Remote(f"{_GLUE}/SST-2.zip", "sha256:d67e16fb55739c1b32cdce9877596db1c127dc322d93c082281f64057c16deaa"),
    ),
    # The authors of GLUE may not host MRPC: it comes from SentEval, with GLUE's list of the pairs of the dev set.
    "glue/mrpc": (
        Remote(
            f"{_SENTEVAL}/msr_paraphrase_train.txt",
            "sha256:60a9b09084528f0673eedee2b69cb941920f0b8cd0eeccefc464a98768457f89",
        ),
        Remote(f"{_GLUE}/mrpc_dev_ids.tsv", "sha256:971d7767d81b997fd9060ade0ec23c4fc31cbb226a55d1bd4a1bac474eb81dc7"),
    ),
    "glue/stsb": (
        Remote(f"{_GLUE}/STS-B.zip", "sha256:e60a6393de5a8b5b9bac5020a1554b54e3691f9d600b775bd131e613ac179c85"),
    ),
    "glue/qqp": (
        Remote(f"{_GLUE}/QQP-clean.zip", "sha256:40e7c862c04eb26ee04b67fd900e76c45c6ba8e6d8fab4f8f1f8072a1a3fbae0"),
    ),
    "glue/mnli": (
        Remote(f"{_GLUE}/MNLI.zip", "sha256:e7c1d896d26ed6caf700110645df426cc2d8ebf02a5ab743d5a5c68ac1c83633"),
    ),
    "glue/qnli": (
        Remote(f"{_GLUE}/QNLIv2.zip", "sha256:e634e78627a29adaecd4f955359b22bf5e70f2cbd93b493f2d624138a0c0e5f5"),
    ),
    "glue/rte": (
        Remote(f"{_GLUE}/RTE.zip", "sha256:6bf86de103ecd335f3441bd43574d23fef87ecc695977a63b82d5efb206556ee"),
    ),
    "glue/wnli": (
        Remote(f"{_GLUE}/WNLI.zip", "sha256:ae0e8e4d16f4d46d4a0a566ec7ecceccfd3fbfaa4a7a4b4e02848c0f2561ac46"),
    ),
}
"""Where the authors of each data set keep it, with the checksum of what they published."""


def fetch(remotes: tuple[Remote, ...], folder: Path, progress: Progress | None = None) -> None:
    """Download files into a folder and unpack the archives among them there.

    Args:
        remotes: What to fetch.
        folder: Made if it does not exist.
        progress: Told how far each file is.

    Raises:
        DataError: No network, a wrong checksum, an archive that reaches outside, a folder that cannot be written.
    """
    for remote in remotes:
        path = download(remote, folder, progress)
        if remote.is_archive:
            extract(path, folder, progress)
            path.unlink()


def download(remote: Remote, folder: Path, progress: Progress | None = None) -> Path:
    """Download one file, check it, and only then give it its name.

    Args:
        remote: What to fetch; http and https only.
        folder: Made if it does not exist.
        progress: Told how far it is.

    Returns:
        The file.

    Raises:
        DataError: No network, a short answer, a wrong checksum, a folder that cannot be written.
    """
    if not remote.url.startswith(("https://", "http://")):
        raise DataError(f"{remote.url}: only http and https addresses are fetched")
    algorithm, _, expected = remote.checksum.partition(":")
    if algorithm not in ("md5", "sha256") or not expected:
        raise DataError(f"{remote.url}: the checksum must be md5:… or sha256:…, got {remote.checksum!r}")
    target = folder / remote.filename
    with _writable(folder), _temporary(folder, remote.filename) as part:
        digest = hashlib.new(algorithm, usedforsecurity=False)
        try:
            _stream(remote.url, part, digest.update, remote.filename, progress)
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()  # it is an open answer as well as an error
            raise DataError(f"{remote.url} could not be fetched ({error}); put it into {folder} yourself") from error
        if digest.hexdigest() != expected.lower():
            raise DataError(
                f"{remote.url}: {algorithm} is {digest.hexdigest()}, published is {expected}; nothing was kept"
            )
        os.replace(part, target)
    return target


def extract(archive: Path, folder: Path, progress: Progress | None = None) -> None:
    """Unpack a tar or zip archive into a folder, and never outside it.

    Args:
        archive: ``.zip``, or a tar with any compression of the standard library.
        folder: Where its files go; files of the same name are replaced.
        progress: Told how many members are done.

    Raises:
        DataError: The archive is damaged, or a member is a link, a device, or has a path that leaves the folder. Then
            nothing of it is put into ``folder``.
    """
    with _writable(folder):
        staging = Path(tempfile.mkdtemp(prefix=f".{archive.name}.", dir=folder))
        try:
            members = _zip_members if zipfile.is_zipfile(archive) else _tar_members
            for done, (name, source) in enumerate(members(archive), 1):
                path = staging / _inside(archive, name)
                if source is None:
                    path.mkdir(parents=True, exist_ok=True)
                else:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with source, path.open("wb") as out:
                        shutil.copyfileobj(source, out, _CHUNK)
                if progress is not None and done % 256 == 0:
                    progress(f"unpacking {archive.name}", done, None)
            for path in sorted(p for p in staging.rglob("*") if p.is_file()):
                final = folder / path.relative_to(staging)
                final.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, final)
        except _DAMAGE as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise DataError(f"{archive} is damaged and was not unpacked ({error}); remove it and try again") from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _stream(url: str, part: Path, update: Callable[[bytes], object], what: str, progress: Progress | None) -> None:
    """Copy an address to a file, a chunk at a time."""
    request = urllib.request.Request(url, headers={"User-Agent": "tiltsam"})
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer, part.open("wb") as out:
        length = answer.headers.get("Content-Length")
        total = int(length) if length is not None and length.isdigit() else None
        done = 0
        while chunk := _read(answer):
            out.write(chunk)
            update(chunk)
            done += len(chunk)
            if progress is not None:
                progress(f"downloading {what}", done, total)
        if total is not None and done != total:
            raise ConnectionError(f"the connection ended after {done} of {total} bytes")
        out.flush()
        os.fsync(out.fileno())


def _read(answer: http.client.HTTPResponse) -> bytes:
    """The next chunk; an error here is the network's, not the disk's."""
    try:
        return answer.read(_CHUNK)
    except OSError as error:
        raise ConnectionError(f"the connection broke: {error}") from error


def _tar_members(archive: Path) -> Iterator[tuple[str, IO[bytes] | None]]:
    """Name and content of each member; None for a folder."""
    with tarfile.open(archive, "r:*") as tar:
        for member in tar:
            if member.isdir():
                yield member.name, None
            elif member.isreg():
                yield member.name, tar.extractfile(member)
            else:
                raise DataError(f"{archive} holds {member.name!r}, a link or device; nothing was unpacked")


def _zip_members(archive: Path) -> Iterator[tuple[str, IO[bytes] | None]]:
    """Name and content of each member; None for a folder."""
    with zipfile.ZipFile(archive) as zipped:
        for member in zipped.infolist():
            kind = stat.S_IFMT(member.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise DataError(f"{archive} holds {member.filename!r}, a link or device; nothing was unpacked")
            yield member.filename, None if member.is_dir() else zipped.open(member)


def _inside(archive: Path, name: str) -> PurePosixPath:
    """The path of a member, if it stays below where the archive is unpacked."""
    path = PurePosixPath(name)
    drive = len(name) > 1 and name[1] == ":"
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or drive:
        raise DataError(f"{archive} holds {name!r}, which would be written outside the folder; nothing was unpacked")
    return path


@contextmanager
def _temporary(folder: Path, name: str) -> Iterator[Path]:
    """A file of our own in the folder, gone afterwards unless it was renamed."""
    handle, path = tempfile.mkstemp(prefix=f".{name}.", suffix=".part", dir=folder)
    os.close(handle)
    os.chmod(path, 0o644)  # mkstemp's file is for its owner alone; a data root is often shared
    try:
        yield Path(path)
    finally:
        Path(path).unlink(missing_ok=True)


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    """Turn what a disk can refuse into one line."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        if isinstance(error, (ConnectionError, TimeoutError)) or error.errno is None:
            raise
        why = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
        raise DataError(f"{folder} cannot be written: {why}") from error
