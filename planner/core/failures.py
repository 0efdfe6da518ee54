"""What error messages mean: the one place that recognises them, for logs as for probes.

`failures.json` holds the signs, those that explain most first: what a library writes (`pattern`,
read in the `source`, else in torch 2.13), its meaning, the remedies, and the versions of torch
that write it. A pattern that may also mean something else is under `possible`, and `to_tell` says
what would tell. A line without any of a sign's plain `words` is passed over.
docs/troubleshooting.md prints the list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, TypeAdapter

from planner.core.units import format_bytes

TEXTS: Mapping[str, Any] = json.loads(
    Path(__file__).with_name("failures.json").read_text(encoding="utf-8")
)
OUT_OF_MEMORY, GROWTH = "out of memory", "memory grew"
_BEFORE = 60  # characters before a match that may change its meaning
_ADVICE, _ECHO = re.compile(TEXTS["log"]["advice"]), re.compile(TEXTS["log"]["echo"])
Version = Annotated[tuple[int, int], BeforeValidator(lambda text: text.split("."))]
Versions = tuple[Version, Version]  # of torch: the oldest and the newest that are possible
ANY_TORCH: Versions = ((0, 0), (99, 0))
Figures = Mapping[str, Any]  # sizes and counts by name, as `free_bytes`
Pattern = Annotated[re.Pattern[str], BeforeValidator("|".join)]
_NEVER = re.compile("(?!)")


@dataclass(frozen=True)
class Remedy:
    """What to do, as `text`, with a torch from `since` to `until`. It applies where in each pair of
    `where_larger` the first figure is larger than the second, a figure or a number. {0}, {1} … in
    `text` stand for the first of the remedies in each group of `parts` that applies."""

    text: str
    since: Version = ANY_TORCH[0]
    until: Version = ANY_TORCH[1]
    where_larger: tuple[tuple[str, str | int], ...] = ()
    parts: tuple[Remedies, ...] = ()

    def applies(self, torch: Versions, figures: Figures) -> bool:
        pairs = ((figures.get(a), figures.get(str(b), b)) for a, b in self.where_larger)
        is_over = (
            isinstance(a, int | float) and isinstance(b, int | float) and a > b for a, b in pairs
        )
        return torch[1] >= self.since and torch[0] <= self.until and all(is_over)

    def sentence(self, torch: Versions, figures: Figures) -> str:
        parts = ("".join(ways_out([group], torch, figures)) for group in self.parts)
        text = self.text.format(*parts, **_format_sizes(figures))
        if torch[0] >= self.since:
            return text
        return f"{text.removesuffix('.')} (torch {self.since[0]}.{self.since[1]} or later)."


Remedies = tuple[
    Annotated[Remedy, BeforeValidator(lambda it: {"text": it} if isinstance(it, str) else it)], ...
]
Groups = Sequence[Remedies]


def ways_out(groups: Groups, torch: Versions, figures: Figures) -> tuple[str, ...]:
    """What to do: the first remedy of each group that applies, as a sentence."""
    firsts = (next((r for r in group if r.applies(torch, figures)), None) for group in groups)
    return tuple(filter(None, (first.sentence(torch, figures) for first in firsts if first)))


@dataclass(frozen=True)
class Sign:
    """A sign of a failure in a text. `pattern` is sure; `possible` only says that it may be so,
    and `to_tell` is then what would tell. Neither counts where `unless` matches there or shortly
    before, nor in a line without `gate`, which is quick to find where they are not."""

    kind: str
    words: tuple[bytes, ...]
    meaning: str
    remedies: Remedies
    pattern: Pattern = _NEVER
    possible: Pattern = _NEVER
    unless: Pattern = _NEVER
    gate: Pattern = re.compile("")
    to_tell: str = ""

    def is_sure(self, line: str) -> bool | None:
        """True where a line is a sure sign, False where it may be one; None where it is none, as
        code that a log echoes."""
        if _ECHO.match(line) or not self.gate.search(line):
            return None
        for pattern, sure in ((self.pattern, True), (self.possible, False)):
            for match in pattern.finditer(line):
                before = max(match.start() - _BEFORE, 0)
                if not self.unless.search(line, before, match.end()) and not _ADVICE.search(
                    line, before, match.start()
                ):
                    return sure
        return None

    def ways_out(self, torch: Versions = ANY_TORCH) -> tuple[str, ...]:
        return ways_out([(remedy,) for remedy in self.remedies], torch, {})


def _format_sizes(figures: Figures) -> dict[str, Any]:
    """The figures of a sentence: {free} stands for `free_bytes`, with a unit."""
    return {
        key.removesuffix("_bytes"): format_bytes(size)
        if key.endswith("_bytes") and isinstance(size, int)
        else size
        for key, size in figures.items()
    }


def sentence(key: str, figures: Figures | None = None, **words: object) -> str:
    """One of the sentences of `failures.json`."""
    return str(TEXTS["sentences"][key].format(**_format_sizes({**(figures or {}), **words})))


def _any_of(key: str) -> re.Pattern[str]:
    return re.compile("|".join(entry["pattern"] for entry in TEXTS[key]))


SIGNS = TypeAdapter(tuple[Sign, ...]).validate_python(TEXTS["signs"])
BY_KIND = {sign.kind: sign for sign in SIGNS}
REMEDIES = TypeAdapter(dict[str, Groups]).validate_python(TEXTS["remedies"])
# What libraries write when they find no memory, and also when something else is wrong: where the
# device's free memory can be read, it decides.
_AMBIGUOUS, _LOST_PEER = _any_of("ambiguous"), _any_of("lost_peer")
_NO_MEMORY = (_AMBIGUOUS, _any_of("probe_out_of_memory"))
_NO_MEMORY_KINDS = (OUT_OF_MEMORY, "library out of memory", "out of host memory")


def is_allocation_failure(text: str) -> bool:
    """Whether a probe's error says that there was no memory, or may well mean it."""
    if any(pattern.search(text) for pattern in _NO_MEMORY):
        return True
    signs, lines = (BY_KIND[kind] for kind in _NO_MEMORY_KINDS), text.splitlines()
    return any(sign.is_sure(line) is not None for sign in signs for line in lines)


def is_ambiguous(text: str) -> bool:
    """Whether an error's text may mean that there was no memory, and may mean something else."""
    return bool(_AMBIGUOUS.search(text))


def is_lost_peer(text: str) -> bool:
    """Whether an error's text says that another rank is gone."""
    return bool(_LOST_PEER.search(text))
