"""Files that do not wait for the disk: no test can cut the power, and thousands of writes waited.

A process that is killed loses nothing by it. 100 commits of SQLite took 2.5 s on a disk that others
wrote to, and 4 ms so (2026-11-22).
"""

import os
import sqlite3
import sqlite3.dbapi2
from contextlib import suppress
from typing import Any

_connect = sqlite3.dbapi2.connect


def write_without_waiting() -> None:
    """From now on, in this process; `os.fdatasync` still waits."""
    os.fsync = lambda fd: None
    sqlite3.dbapi2.connect = _connect_without_waiting  # what SQLAlchemy calls


def _connect_without_waiting(*arguments: Any, **options: Any) -> sqlite3.Connection:
    connection = _connect(*arguments, **options)
    with suppress(sqlite3.Error):  # no database: whoever reads it finds that out
        connection.execute("PRAGMA synchronous=OFF")
    return connection
