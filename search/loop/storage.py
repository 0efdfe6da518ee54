"""Where a study is kept: any Optuna storage, opened and asked with errors that say what to do."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend

from planner.core.errors import PlannerError, refuse_if, shorten

CREATION_SECONDS = 2.0  # that another tuner may need to make its tables
HEARTBEAT_SECONDS, GRACE_SECONDS = 10, 60  # of a tuner; without any for so long it is dead


class StudyError(PlannerError):
    """The study cannot be opened, read or written, or it is another's."""


@contextmanager
def storage_faults(source: str, *more: type[Exception]) -> Iterator[None]:
    """Turns what Optuna and its databases raise, and `more`, into a StudyError."""
    from sqlalchemy.exc import SQLAlchemyError

    known: tuple[type[Exception], ...] = (
        optuna.exceptions.OptunaError, SQLAlchemyError, OSError, json.JSONDecodeError, *more,
    )  # fmt: skip
    try:
        yield
    except known as error:
        raise StudyError(
            f"{source} cannot be used: {_root_text(error)}.",
            "Mend that, or move the study away: the same command makes it again from the probes in "
            "--output.",
        ) from error


def _root_text(error: BaseException) -> str:
    """The database driver's own words, without SQL and its parameters (and so no passwords)."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(getattr(error, "orig", None) or error).splitlines()
    return (lines or [type(error).__name__])[0].removesuffix(".")


def open_storage(storage: str, source: str) -> BaseStorage:
    """Any Optuna storage: a database URL, or the path of a journal file (`.journal`, `.log`).

    Raises StudyError where it cannot be reached or is not an Optuna study.
    """
    from sqlalchemy.exc import IntegrityError, OperationalError

    is_journal = storage.endswith((".journal", ".log"))
    refuse_if(
        not is_journal and "://" not in storage,
        f"--storage is a database URL or a journal file, and {shorten(storage)} is neither.",
        "Write sqlite:///study.db, postgresql://…, or a path that ends in .journal.",
    )
    with storage_faults(source, ImportError, ValueError, RuntimeError):
        if is_journal:
            return JournalStorage(JournalFileBackend(storage))
        try:
            return _database(storage)
        except (IntegrityError, OperationalError):
            # Two tuners make the tables at the same instant, which Optuna does not guard against.
            time.sleep(CREATION_SECONDS)
            return _database(storage)


def _database(storage: str) -> RDBStorage:
    """Tuners that share an SQLite file wait for each other instead of failing at once. A server, or
    a firewall on the way to it, may close a connection that no probe has used for long."""
    options: dict[str, Any] = {"pool_pre_ping": True}
    if storage.startswith("sqlite"):
        options = {"connect_args": {"timeout": 60}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)  # of heartbeats
        return RDBStorage(
            storage, options, heartbeat_interval=HEARTBEAT_SECONDS, grace_period=GRACE_SECONDS
        )
