"""The one clock of tuners on several machines: that of whoever keeps their study."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from optuna.storages import BaseStorage, RDBStorage

# What a server says its time is, in seconds since 1970. An SQLite file is of one machine.
_NOW = {
    "postgresql": "select extract(epoch from clock_timestamp())",
    "mysql": "select unix_timestamp(now(6))",
    "mariadb": "select unix_timestamp(now(6))",
}


def shared_clock(storage: BaseStorage, journal: Path | None = None) -> Callable[[], float]:
    """Seconds since 1970 as the database server, or the server of the `journal`'s disk, counts
    them: leases of machines whose own clocks differ end for all at the same instant."""
    if isinstance(storage, RDBStorage):
        ahead = _server_ahead(storage)
    else:
        ahead = _disk_ahead(journal.parent) if journal else 0.0
    return lambda: time.time() + ahead


def _server_ahead(storage: RDBStorage) -> float:
    """Seconds by which a database server's clock is ahead of this machine's."""
    from sqlalchemy import text

    asked = _NOW.get(storage.engine.dialect.name)
    if asked is None:
        return 0.0
    with storage.engine.connect() as connection:
        return float(connection.execute(text(asked)).scalar_one()) - time.time()


def _disk_ahead(folder: Path) -> float:
    """The same of a disk's: its server dates what is written there."""
    try:
        with tempfile.NamedTemporaryFile(prefix=".planner-clock-", dir=folder) as file:
            file.write(b"now")
            file.flush()
            os.fsync(file.fileno())
            return os.fstat(file.fileno()).st_mtime - time.time()
    except OSError:
        return 0.0
