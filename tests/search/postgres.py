"""A PostgreSQL server for a test, where its programs are installed: on a socket, without a port."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def why_no_server() -> str:
    """What is missing to start one; "" where nothing is."""
    if importlib.util.find_spec("psycopg") is None:
        return "psycopg is not installed"
    missing = [name for name in ("initdb", "pg_ctl") if shutil.which(name) is None]
    if os.geteuid() == 0 and shutil.which("runuser") is None:
        missing.append("runuser")
    return f"there is no {missing[0]}" if missing else ""


@contextmanager
def server() -> Iterator[str]:
    """The URL of an empty database, on a server that ends with the context."""
    folder = Path(tempfile.mkdtemp(prefix="pg-"))  # a socket's path must be short
    # The server refuses to run as root: then it runs as the user that its package has made.
    user = "postgres" if os.geteuid() == 0 else None
    before = ["runuser", "-u", user, "--"] if user else []
    if user:
        shutil.chown(folder, user)

    def run(*command: str) -> None:
        subprocess.run([*before, *command], check=True, stdout=subprocess.DEVNULL, cwd=folder)

    data = str(folder / "data")
    options = f"-k {folder} -c listen_addresses='' -c fsync=off"
    try:
        run("initdb", "-D", data, "-U", "tuner", "-A", "trust", "-N")
        run("pg_ctl", "-D", data, "-o", options, "-l", str(folder / "log"), "-w", "start")
        try:
            yield f"postgresql+psycopg://tuner@/postgres?host={folder}"
        finally:
            run("pg_ctl", "-D", data, "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(folder)
