"""Downloads and archives, complete or absent."""

import errno
import hashlib
import io
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tiltsam.lab.data import download as module
from tiltsam.lab.data.download import SOURCES, Remote, download, extract, fetch
from tiltsam.lab.errors import DataError

CONTENT = bytes(range(256)) * 9000  # more than one chunk


@pytest.fixture
def server():
    """Serve ``files``; those with ``short`` in their name break off in the middle."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = self.server.files.get(self.path)
            if body is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if "short" in self.path else body)

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        made.files = {}
        made.url = f"http://127.0.0.1:{made.server_port}"
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def put(server, name, body, algorithm="sha256"):
    server.files[f"/{name}"] = body
    return Remote(f"{server.url}/{name}", f"{algorithm}:{hashlib.new(algorithm, body).hexdigest()}")


def tar_of(path, members, mode="w:gz"):
    with tarfile.open(path, mode) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def everything_below(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


@pytest.mark.parametrize("algorithm", ["md5", "sha256"])
def test_download_reports_progress(server, tmp_path, algorithm):
    calls = []
    path = download(put(server, "a.bin", CONTENT, algorithm), tmp_path / "new" / "folder", lambda *a: calls.append(a))
    assert path.read_bytes() == CONTENT
    assert everything_below(path.parent) == ["a.bin"]
    assert calls[-1] == ("downloading a.bin", len(CONTENT), len(CONTENT))
    assert [done for _, done, _ in calls] == sorted({done for _, done, _ in calls})
    assert len(calls) > 1


def test_download_wrong_checksum_keeps_the_old_file(server, tmp_path):
    (tmp_path / "a.bin").write_text("old")
    put(server, "a.bin", CONTENT)
    with pytest.raises(DataError, match=r"a\.bin: md5 .*0{32}.* [0-9a-f]{32}"):
        download(Remote(f"{server.url}/a.bin", "md5:" + "0" * 32), tmp_path)
    assert (tmp_path / "a.bin").read_text() == "old"
    assert everything_below(tmp_path) == ["a.bin"]


@pytest.mark.parametrize("name", ["short.bin", "absent.bin"])
def test_download_broken_or_not_found(server, tmp_path, name):
    remote = put(server, name, CONTENT)
    if name == "absent.bin":
        server.files.clear()
    with pytest.raises(DataError, match=name) as caught:
        download(remote, tmp_path)
    assert "\n" not in str(caught.value)
    assert everything_below(tmp_path) == []


def test_download_without_network(tmp_path):
    with pytest.raises(DataError, match=r"127\.0\.0\.1:9"):
        download(Remote("http://127.0.0.1:9/a.bin", "md5:" + "0" * 32), tmp_path)


def test_download_full_disk(server, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(DataError, match="disk is full"):
        download(put(server, "a.bin", CONTENT), tmp_path)
    assert everything_below(tmp_path) == []


def test_download_into_a_file(server, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="file cannot be written"):
        download(put(server, "a.bin", CONTENT), tmp_path / "file")


def test_fetch_unpacks_archives_and_keeps_plain_files(server, tmp_path):
    made = tar_of(tmp_path / "x.tar.gz", [("set/a.txt", b"a"), ("set/deep/b.txt", b"b")])
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as z:
        z.writestr("set/c.txt", "c")
    remotes = (
        put(server, "x.tar.gz", made.read_bytes()),
        put(server, "y.zip", zipped.getvalue()),
        put(server, "plain.gz", b"plain"),
    )
    fetch(remotes, tmp_path / "root")
    assert everything_below(tmp_path / "root") == [
        "plain.gz", "set", "set/a.txt", "set/c.txt", "set/deep", "set/deep/b.txt",
    ]  # fmt: skip


@pytest.mark.parametrize("mode", ["w:gz", "w:xz", "w"])
def test_extract_keeps_existing_files(tmp_path, mode):
    (tmp_path / "root" / "set").mkdir(parents=True)
    (tmp_path / "root" / "set" / "mine.txt").write_text("mine")
    extract(tar_of(tmp_path / "x.tar", [("set/a.txt", b"new")], mode), tmp_path / "root")
    assert everything_below(tmp_path / "root") == ["set", "set/a.txt", "set/mine.txt"]


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_extract_damaged_archive_keeps_nothing(tmp_path, kind):
    path = tmp_path / f"bad.{kind}"
    body = hashlib.shake_256(b"seed").digest(50000)
    if kind == "tar":
        tar_of(path, [("set/a.txt", b"a"), ("set/b.bin", body)])
        path.write_bytes(path.read_bytes()[:30000])
    else:
        with zipfile.ZipFile(path, "w") as z:
            z.writestr("set/a.txt", "a")
            z.writestr("set/b.bin", body)
        raw = bytearray(path.read_bytes())
        raw[30000] ^= 255
        path.write_bytes(raw)
    with pytest.raises(DataError, match=rf"bad\.{kind}"):
        extract(path, tmp_path / "root")
    assert everything_below(tmp_path) == [f"bad.{kind}", "root"]


def test_sources_have_https_urls_and_checksums():
    for name, remotes in SOURCES.items():
        for remote in remotes:
            algorithm, _, digest = remote.checksum.partition(":")
            assert remote.url.startswith("https://"), name
            assert len(digest) == {"md5": 32, "sha256": 64}[algorithm], name
            assert set(digest) <= set("0123456789abcdef"), name
