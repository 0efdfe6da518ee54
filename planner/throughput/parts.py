"""Where the seconds of a step go: by phase, by kind of operation, and by what bounds them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Part(NamedTuple):
    """Seconds of a step that one kind of operation takes in one phase, and what bounds it."""

    phase: str
    kind: str
    bound: str
    seconds: float

    def as_json(self) -> dict[str, object]:
        return self._asdict()


class Cost(NamedTuple):
    """Seconds of a step that one operation takes in one module and phase, all its calls together;
    what it waits for has neither `name` nor `path`."""

    phase: str
    kind: str
    bound: str
    seconds: float
    name: str = ""
    path: str = ""


class Accounts:
    """The same seconds, summed three ways. A mixin of what has `parts`."""

    computed: tuple[str, ...] = ("phase_seconds", "kind_seconds", "bound_seconds")
    parts: tuple[Part, ...]

    @property
    def phase_seconds(self) -> Mapping[str, float]:
        return _sums((part.phase, part.seconds) for part in self.parts)

    @property
    def kind_seconds(self) -> Mapping[str, float]:
        return _sums((part.kind, part.seconds) for part in self.parts)

    @property
    def bound_seconds(self) -> Mapping[str, float]:
        return _sums((part.bound, part.seconds) for part in self.parts)

    def bounds_of(self, kind: str) -> Mapping[str, float]:
        """What bounds the operations of one kind."""
        return _sums((part.bound, part.seconds) for part in self.parts if part.kind == kind)


def _sums(entries: Iterable[tuple[str, float]]) -> Mapping[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for name, seconds in entries:
        sums[name] += seconds
    return dict(sums)
