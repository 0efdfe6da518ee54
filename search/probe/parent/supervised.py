"""A command under a supervisor, heard on one channel and held to a deadline that may move."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from search.probe.failure import last_words
from search.probe.parent.attendance import Listener, WorkerGroup, supervise
from search.probe.protocol import AnswerReader


@dataclass(frozen=True)
class Ended:
    """How a command ended: its last words on standard output and error, whether it was late, and
    its wait status, in the kernel's encoding (None where the supervisor did not tell)."""

    words: str
    late: bool
    wait_status: int | None


class _Unread(Listener[Any]):
    """Passes on the bytes of the channel as they come."""

    def __init__(self, hear: Callable[[bytes], object]) -> None:
        super().__init__(AnswerReader(""), lambda answer: None)
        self.hear = hear

    def hear_answers(self, data: bytes) -> None:
        self.hear(data)


def run_supervised(
    command: Sequence[str],
    hear: Callable[[bytes], object],
    deadline: Callable[[], float],
    environment: Mapping[str, str],
    arguments: Sequence[str] = (),
) -> Ended:
    """Run `command RESULT_FD ARGUMENTS…` until it ends; `hear` is given what it writes there.

    It and all that it started are ended at `deadline()` (an instant of `time.monotonic`, asked
    again after whatever was heard), when this is left by an exception, and when this process dies.
    """

    def spawn(fds: Sequence[int]) -> Callable[[], object]:
        *channels, result, _, error = fds
        whole = [*command, str(result), *arguments]
        return supervise(whole, (*channels, result, error, error), environment)

    listener = _Unread(hear)
    with WorkerGroup.start(spawn, listener) as group:
        while (left := deadline() - time.monotonic()) > 0 and group.is_running():
            group.listen(left)
        late = group.is_running()
    return Ended(last_words(listener.stderr.text()), late, listener.wait_status)
