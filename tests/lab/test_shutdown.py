"""Ctrl-C: it gets through where Python drops it, and waits where it would leave something half done."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tiltsam.lab.shutdown import defer_interrupt, reraise_dropped_interrupts


@pytest.fixture(autouse=True)
def handler():
    """Python's own, which is not there where the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def test_reraise_dropped_interrupts():
    """Where a destructor or a weak reference's callback runs, what is raised is dropped."""

    class Interrupted:
        def __del__(self):
            raise KeyboardInterrupt

    def work():  # on a busy machine it may come before the sleep begins
        Interrupted()
        time.sleep(60)

    start = time.monotonic()
    with reraise_dropped_interrupts(), pytest.raises(KeyboardInterrupt):
        work()
    assert time.monotonic() - start < 50  # it wakes a thread that sleeps


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_reraise_interrupts_that_became_import_errors():
    def load():
        try:
            ctrl_c()
        except KeyboardInterrupt:
            raise ImportError from None  # as extension modules do

    with pytest.raises(KeyboardInterrupt), reraise_dropped_interrupts():
        load()
    with pytest.raises(ImportError, match="a defect"), reraise_dropped_interrupts():
        raise ImportError("a defect")


def test_defer_interrupt_raises_at_the_end():
    done = []

    def work():
        with defer_interrupt():
            ctrl_c()
            with defer_interrupt():
                done.append("within")
            done.append("after it")  # the outermost holds it

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["within", "after it"]


def test_defer_interrupt_raises_at_the_second():
    done = []

    def work():
        with defer_interrupt(), defer_interrupt():
            ctrl_c()
            done.append("after one")
            ctrl_c()
            done.append("after two")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["after one"]


def test_defer_interrupt_raises_after_an_error():
    @defer_interrupt()
    def work():
        ctrl_c()
        raise ValueError

    with pytest.raises(KeyboardInterrupt):
        work()


def test_defer_interrupt_defers_sigterm():
    code = (
        "import signal\n"
        "from tiltsam.lab.shutdown import defer_interrupt\n"
        "with defer_interrupt():\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    print('within', flush=True)\n"
        "print('after')\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "within\n")


def test_defer_interrupt_leaves_threads_and_ignored_signals_alone():
    seen = []

    def work():
        with defer_interrupt():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    work()
    ctrl_c()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert seen == [signal.default_int_handler, signal.SIG_IGN]


def test_interrupted_read_does_not_lock_the_database(tmp_path):
    """An interrupted read would keep its lock as long as the traceback keeps its frames."""
    path = tmp_path / "a.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE numbers (n)")
        connection.executemany("INSERT INTO numbers VALUES (?)", [(n,) for n in range(3)])
    connection.close()

    @defer_interrupt()
    def read():
        connection = sqlite3.connect(path)
        rows = connection.execute("SELECT n FROM numbers")
        rows.fetchone()
        ctrl_c()
        rows.close()
        connection.close()

    other = sqlite3.connect(path, timeout=1)
    try:
        read()
    except KeyboardInterrupt:  # its traceback lives as long as this block
        other.execute("INSERT INTO numbers VALUES (3)")
        other.commit()
    assert other.execute("SELECT count(*) FROM numbers").fetchone() == (4,)
    other.close()
