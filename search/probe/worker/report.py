"""The worker's side of the result channel."""

from __future__ import annotations

import os

from search.probe.protocol import AnswerMessage, FedMessage, PhaseMessage, ProgressMessage, encode


class Report:
    """Sends the worker's phase, progress and outcome to the parent."""

    def __init__(self, result_fd: int, probe_id: str) -> None:
        self.result_fd = result_fd
        self.probe_id = probe_id
        self.phase = ""

    def enter(self, phase: str) -> None:
        """Report that `phase` begins, if it is another than before."""
        if phase != self.phase:
            self.phase = phase
            self._send(encode(PhaseMessage(probe_id=self.probe_id, phase=phase)))

    def progress(self, num_steps: int, step_seconds: float) -> None:
        message = ProgressMessage(
            probe_id=self.probe_id, num_steps=num_steps, step_seconds=step_seconds
        )
        self._send(encode(message))

    def fed(self, message: FedMessage) -> None:
        self._send(encode(message))

    def outcome(self, outcome: AnswerMessage) -> None:
        self._send(encode(outcome))

    def _send(self, data: bytes) -> None:
        while data:
            data = data[os.write(self.result_fd, data) :]
