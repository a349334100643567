"""The database of a sweep: opened with clear words where it cannot be, and waited for where it is away for a moment."""

from __future__ import annotations

import importlib.util
import logging
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tiltsam.lab.errors import SweepError
from tiltsam.lab.shutdown import defer_interrupt

if TYPE_CHECKING:
    import optuna

__all__ = ["Store", "open_store", "sqlite_url"]

T = TypeVar("T")

PATIENCE_SECONDS = 60.0  # a database server that restarts is back by then
CONNECT_SECONDS = 10
LOCK_SECONDS = 60.0  # how long SQLite waits for another process to finish writing
CREATE_ATTEMPTS = 8


def sqlite_url(out: Path) -> str:
    """The default: a file beside the runs."""
    import sqlalchemy

    return sqlalchemy.URL.create("sqlite", database=str((out / "sweeps.db").resolve())).render_as_string()


class Store:
    """An Optuna storage that survives short absences of its server.

    Args:
        storage: The storage.
        shown: Its URL, without the password.
    """

    def __init__(self, storage: optuna.storages.RDBStorage, shown: str) -> None:
        self.storage = storage
        self.shown = shown
        self.absences = 0
        """How often the server was away; who judges by the time of the last sign of life starts anew after one."""

    def study(self, name: str) -> optuna.Study:
        """The study of that name, made if there is none."""
        import optuna

        return self.insist(
            lambda: optuna.create_study(
                storage=self.storage, study_name=name, direction="maximize", load_if_exists=True
            )
        )

    def insist(self, action: Callable[[], T]) -> T:
        """Do something with the database, to its end; while it is away, try again for a minute."""
        import optuna
        import sqlalchemy

        start = time.monotonic()
        while True:
            try:
                with defer_interrupt():
                    return action()
            except (optuna.exceptions.StorageInternalError, sqlalchemy.exc.SQLAlchemyError) as error:
                self.absences += 1
                if time.monotonic() - start > PATIENCE_SECONDS:
                    reason = _reason(error.__cause__ or error)
                    raise SweepError(f"lost {self.shown}: {reason}; the same command goes on") from None
                time.sleep(1 + random.random())

    def close(self) -> None:
        """Give the connections back."""
        with defer_interrupt():
            self.storage.remove_session()
            self.storage.engine.dispose()


def open_store(url: str) -> Store:
    """Open a database by its SQLAlchemy URL, with Optuna's tables in it.

    Any number of processes may do so at once, also for a database that is still empty.

    Raises:
        SweepError: The URL cannot be read, its driver is missing, or nobody answers there.
        ImportError: Optuna is missing.
    """
    try:
        import optuna
        import sqlalchemy
    except ImportError:
        raise ImportError("tiltsam sweep needs Optuna: pip install '.[sweep]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    logging.getLogger("sqlalchemy").setLevel(logging.CRITICAL)  # a Ctrl-C inside it would be told with a traceback
    try:
        parsed = sqlalchemy.engine.make_url(url)
    except sqlalchemy.exc.ArgumentError:  # the URL is not shown: there may be a password in it
        raise SweepError(
            "--storage is no database URL: write sqlite:///FILE or postgresql://USER:PASSWORD@HOST/DATABASE"
        ) from None
    shown = parsed.render_as_string(hide_password=True)
    if parsed.drivername == "postgresql":
        parsed = parsed.set(drivername=f"postgresql+{_postgresql_driver()}")
    if parsed.get_backend_name() == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise SweepError(f"--storage {shown} forgets everything when it is closed: give a file, sqlite:///FILE")
    options = _options(parsed.get_backend_name())
    full = parsed.render_as_string(hide_password=False)
    try:
        engine = sqlalchemy.create_engine(full, **options)
        with engine.connect():
            pass
        engine.dispose()
    except (sqlalchemy.exc.NoSuchModuleError, ImportError) as error:
        raise SweepError(f"--storage {shown}: {_reason(error)}") from None
    except sqlalchemy.exc.SQLAlchemyError as error:
        raise SweepError(f"cannot reach {shown}: {_reason(error)}") from None
    return Store(_with_tables(full, shown, options), shown)


def _with_tables(url: str, shown: str, options: dict[str, Any]) -> optuna.storages.RDBStorage:
    """Optuna's storage; of several processes that make its tables at once, all but one fail and find them made."""
    import optuna
    import sqlalchemy

    for attempt in range(CREATE_ATTEMPTS):
        try:
            return optuna.storages.RDBStorage(url, engine_kwargs=dict(options))
        except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError, AssertionError) as error:
            last: Exception = error
            time.sleep((attempt + random.random()) / 4)
        except RuntimeError as error:  # the tables of another version of Optuna
            raise SweepError(f"{shown}: {error}") from None
    raise SweepError(f"cannot use {shown}: {_reason(last.__cause__ or last)}")


def _options(backend: str) -> dict[str, Any]:
    if backend == "sqlite":
        return {"connect_args": {"timeout": LOCK_SECONDS}}
    options: dict[str, Any] = {"pool_pre_ping": True}
    if backend == "postgresql":
        options["connect_args"] = {"connect_timeout": CONNECT_SECONDS}
    return options


def _postgresql_driver() -> str:
    """Whichever is there: which one a bare ``postgresql://`` means depends on SQLAlchemy's version."""
    for driver in ("psycopg", "psycopg2"):
        if importlib.util.find_spec(driver) is not None:
            return driver
    raise SweepError('--storage postgresql://… needs a driver: pip install "psycopg[binary]"')


def _reason(error: BaseException) -> str:
    """The first line of what the driver says."""
    text = str(getattr(error, "orig", None) or error).strip() or type(error).__name__
    return text.splitlines()[0]
