"""What crosses between the process that asks for an observation and the one that looks.

The order goes as one JSON argument; answers come back as JSON lines, each as soon as it is known,
so that a process that is ended has told what it saw.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pydantic import BaseModel, ConfigDict

from planner.schema.observation import Observation
from search.probe.protocol import send

# Its arguments are the file descriptor to answer on and the order.
WORKER_COMMAND = (sys.executable, "-P", "-m", "search.probe.observation.worker")


class Order(BaseModel):
    """Look at `observation` on `device` ("cpu", "cuda:N"). Files that are kept go to `folder`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    observation: Observation
    device: str
    folder: str = ""


class Teller:
    """The worker's voice."""

    def __init__(self, result_fd: int) -> None:
        self._fd = result_fd
        self.num_figures = 0

    def see(self, **figures: Any) -> None:
        """Figures as they are seen: bytes are integers, times are seconds."""
        self.num_figures += len(figures)
        self._say({"figures": figures})

    def miss(self, figure: str, why: str) -> None:
        """A figure that this device cannot show."""
        self._say({"not_here": {figure: why}})

    def end(self, status: str, message: str = "") -> None:
        self._say({"status": status, "message": message})

    def _say(self, data: dict[str, Any]) -> None:
        send(self._fd, json.dumps(data).encode() + b"\n")


class Hearer:
    """The parent's ear: gathers lines into figures, a status and a message. What is no answer is
    passed over."""

    def __init__(self) -> None:
        self.figures: dict[str, Any] = {}
        self.not_here: dict[str, str] = {}
        self.status = ""
        self.message = ""
        self._rest = b""

    def hear(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            try:
                said = json.loads(line)
            except ValueError:
                continue
            if isinstance(said, dict):
                self.figures |= said.get("figures", {})
                self.not_here |= said.get("not_here", {})
                self.status = said.get("status", self.status)
                self.message = said.get("message", self.message)
