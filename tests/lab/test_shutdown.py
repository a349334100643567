"""Ctrl-C: it gets through where Python drops it, and waits where it would leave something half done."""

import signal
import threading
import time

import optuna
import pytest
import sqlalchemy

from tiltsam.lab.shutdown import defer_interrupt, reraise_dropped_interrupts
from tiltsam.lab.sweeping.store import open_store, sqlite_url


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


def test_interrupted_read_does_not_lock_the_database(tmp_path, monkeypatch):
    """Broken off in its middle, a read would keep its lock as long as the traceback keeps its frames."""
    monkeypatch.setattr("tiltsam.lab.sweeping.store.LOCK_SECONDS", 1.0)
    monkeypatch.setattr("tiltsam.lab.sweeping.store.PATIENCE_SECONDS", 1.0)
    store = open_store(sqlite_url(tmp_path))
    study = store.study("study")
    for _ in range(3):
        study.add_trial(optuna.trial.create_trial(value=1.0))
    trials = sqlalchemy.text("SELECT trial_id FROM trials")

    def read():
        connection = store.storage.engine.connect()
        rows = connection.execute(trials)
        rows.fetchone()
        ctrl_c()
        rows.close()
        connection.close()

    try:
        store.insist(read)
    except KeyboardInterrupt:  # whose traceback lives as long as this block
        store.insist(lambda: study.set_user_attr("written", "after it"))
    assert store.insist(lambda: study.user_attrs) == {"written": "after it"}
    store.close()
