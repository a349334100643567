"""Start a PostgreSQL server for the tests, with a temporary folder and socket."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["missing", "serve"]


def programs() -> Path | None:
    """The folder of ``initdb`` and ``pg_ctl``; Debian keeps them off the path."""
    found = shutil.which("initdb")
    if found:
        return Path(found).parent
    return max(Path("/usr/lib/postgresql").glob("*/bin"), default=None, key=lambda p: int(p.parent.name))


def missing() -> str:
    """Why there can be no server; empty if there can."""
    if programs() is None:
        return "PostgreSQL is not installed (Debian: apt-get install postgresql)"
    if os.getuid() == 0 and user() is None:
        return "PostgreSQL does not run as root, and there is no user postgres"
    return ""


def user() -> str | None:
    """Whom to run it as: PostgreSQL refuses root."""
    if os.getuid() != 0:
        return None
    try:
        return pwd.getpwnam("postgres").pw_name
    except KeyError:
        return None


@contextmanager
def serve() -> Iterator[str]:
    """Start a server; yields the URL of an empty database."""
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))  # a socket's path must be short
    as_user = {"user": user()} if user() else {}
    if as_user:
        shutil.chown(folder, user())

    def call(program: str, *arguments: str) -> None:
        command = [str(programs() / program), "-D", str(folder / "data"), *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/", **as_user)

    try:
        call("initdb", "-U", "postgres", "-A", "trust", "--locale=C", "-E", "UTF8", "--no-sync")
        options = f"-k {folder} -c listen_addresses='' -c fsync=off -c max_connections=60"
        call("pg_ctl", "-w", "-l", str(folder / "log"), "-o", options, "start")
        try:
            yield f"postgresql://postgres@/postgres?host={folder}"
        finally:
            call("pg_ctl", "-w", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
