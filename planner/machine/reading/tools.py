"""Runs a tool that may be missing, fail or hang, and keeps what it said."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from planner.machine.machine import Answer

# A cold driver without persistence mode takes several seconds, a sick one for ever.
DEADLINE_SECONDS = 30


def ask_tool(command: Sequence[str], deadline_seconds: float = DEADLINE_SECONDS) -> Answer:
    """What `command` answers. Never raises for what the tool does."""
    line = " ".join(command)
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            timeout=deadline_seconds, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        return Answer(line, error="missing")
    except subprocess.TimeoutExpired as late:
        text = (late.output or b"").decode(errors="replace")
        return Answer(line, text, error=f"it did not answer within {deadline_seconds:g} s")
    except OSError as error:
        return Answer(line, error=f"it cannot be run: {error.strerror}")
    return Answer(line, done.stdout.decode(errors="replace"), done.returncode)
