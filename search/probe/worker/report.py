"""The worker's side of the result channel."""

from __future__ import annotations

from search.probe.protocol import AnswerMessage, PhaseMessage, ProgressMessage, encode, send


class Report:
    """Tells the parent where the worker is, and what it has found."""

    def __init__(self, result_fd: int, probe_id: str) -> None:
        self.result_fd = result_fd
        self.probe_id = probe_id
        self.phase = ""

    def say(self, message: AnswerMessage) -> None:
        send(self.result_fd, encode(message))

    def enter(self, phase: str) -> None:
        """Report that `phase` begins, if it is another than before."""
        if phase != self.phase:
            self.phase = phase
            self.say(PhaseMessage(probe_id=self.probe_id, phase=phase))

    def progress(self, num_steps: int, step_seconds: float) -> None:
        self.say(
            ProgressMessage(probe_id=self.probe_id, num_steps=num_steps, step_seconds=step_seconds)
        )
