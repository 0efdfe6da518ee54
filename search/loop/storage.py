"""Where a study is kept: any Optuna storage, opened and asked with errors that say what to do."""

from __future__ import annotations

import json
import sqlite3
import time
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend

from planner.core.errors import PlannerError, UsageError, shorten

CREATION_ATTEMPTS = 5
HEARTBEAT_SECONDS, GRACE_SECONDS = 10, 60  # of a tuner; without any for so long it is dead


class StudyError(PlannerError):
    """The study cannot be opened, read or written, or it is another's."""


@contextmanager
def storage_faults(source: str) -> Iterator[None]:
    """Turns what Optuna and its databases raise into a StudyError that says what to do."""
    import sqlalchemy.exc

    try:
        yield
    except (optuna.exceptions.StorageInternalError, sqlalchemy.exc.SQLAlchemyError) as error:
        raise _storage_error(source, _root_text(error)) from error
    except (optuna.exceptions.OptunaError, OSError, json.JSONDecodeError) as error:
        raise _storage_error(source, str(error)) from error


def _root_text(error: BaseException) -> str:
    """The database driver's own words, without SQL and its parameters (and so no passwords)."""
    while error.__cause__ is not None:
        error = error.__cause__
    original = getattr(error, "orig", None)
    return str(original or error).splitlines()[0]


def _storage_error(source: str, text: str) -> StudyError:
    lowered = text.lower()
    if "readonly" in lowered or "read-only" in lowered:
        return StudyError(
            f"{source} is read-only.",
            "Make it writable, or choose another --output or --storage.",
        )
    if "malformed" in lowered or "not a database" in lowered or "disk image" in lowered:
        return _damaged(source)
    if "full" in lowered or "i/o error" in lowered or "no space" in lowered:
        return StudyError(
            f"{source} cannot be written: {text}.",
            "Free space and run the same command: it goes on from the records beside it.",
        )
    return StudyError(f"{source} cannot be used: {text}", "Check --storage.")


def _damaged(source: str) -> StudyError:
    return StudyError(
        f"{source} is damaged or truncated.",
        "Move it away and run the same command: the measurements are in the .jsonl file beside "
        "it, and a new study is made from them.",
    )


def open_storage(storage: str, source: str) -> BaseStorage:
    """Any Optuna storage: a database URL, or the path of a journal file (`.journal`, `.log`).

    Raises StudyError where it cannot be reached or is not an Optuna study.
    """
    if "://" not in storage:
        return _journal(Path(storage))
    if storage.startswith("sqlite:///"):
        _check_sqlite(storage.removeprefix("sqlite:///"), source)
    with storage_faults(source):
        try:
            return _open_database(storage)
        except (ImportError, ValueError, RuntimeError) as error:
            raise StudyError(f"{source} cannot be opened: {_first_line(error)}") from error


def _open_database(storage: str) -> BaseStorage:
    """The database; tried again where two tuners create its tables at the same instant, which
    Optuna does not guard against."""
    import sqlalchemy.exc

    for attempt in range(CREATION_ATTEMPTS):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ExperimentalWarning)  # of heartbeats
                return RDBStorage(
                    storage, engine_kwargs=_engine_options(storage),
                    heartbeat_interval=HEARTBEAT_SECONDS, grace_period=GRACE_SECONDS,
                )  # fmt: skip
        except (sqlalchemy.exc.IntegrityError, sqlalchemy.exc.OperationalError) as error:
            lost_race = "UNIQUE" in str(error).upper() or "already exists" in str(error)
            if not lost_race or attempt == CREATION_ATTEMPTS - 1:
                raise
            time.sleep(0.2 * (attempt + 1))
    raise AssertionError("every attempt returns or raises")


def _engine_options(storage: str) -> dict[str, Any]:
    """Tuners that share an SQLite file wait for each other instead of failing at once. A server,
    or a firewall on the way to it, may close a connection that no probe has used for long."""
    if storage.startswith("sqlite"):
        return {"connect_args": {"timeout": 60}}
    return {"pool_pre_ping": True}


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _journal(path: Path) -> BaseStorage:
    if path.suffix not in (".journal", ".log"):
        raise UsageError(
            f"--storage is a database URL or a journal file, and {shorten(str(path))} is neither.",
            "Write sqlite:///study.db, postgresql://…, or a path that ends in .journal.",
        )
    with storage_faults(str(path)):
        return JournalStorage(JournalFileBackend(str(path)))


def _check_sqlite(name: str, source: str) -> None:
    """A file that is no Optuna study is left alone: Optuna would add its tables to it."""
    path = Path(name.removeprefix("file:").partition("?")[0])
    if not path.name:
        raise UsageError(f"{source} names no file.", "Write sqlite:///study.db.")
    if not path.exists() or path.stat().st_size == 0:
        return
    try:
        with closing(sqlite3.connect(path)) as connection:
            rows = connection.execute("select name from sqlite_master where type='table'")
            tables = {row[0] for row in rows}
    except sqlite3.DatabaseError as error:
        raise _storage_error(source, str(error)) from error
    if tables and "studies" not in tables:
        raise StudyError(
            f"{source} is a database of something else (it has {', '.join(sorted(tables)[:3])}).",
            "Choose another --output or --storage.",
        )
