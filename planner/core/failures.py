"""What errors say: the one place that recognises their texts, for logs as for probes.

`failures.json` holds the signs, in the order of how much each explains: what a library writes
(`pattern`, read in the `source`, else in torch 2.13), what it means, the ways out, and the torch
that writes it. What a text may also mean otherwise is `maybe` only, and `apart` what would tell. A
line without any of a sign's plain `words` is passed over. docs/troubleshooting.md prints the list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.core.units import format_bytes

OUT_OF_MEMORY, GROWTH = "out of memory", "memory grew"
_LIBRARY, _HOST = "library out of memory", "out of host memory"
_BEFORE = 60  # characters before a match that may take its meaning away
_ADVICE = re.compile(
    r"(?i)\b(?:avoid\w*|prevents?|in case of|fix(?:es)?|if you (?:see|get|hit|encounter|run into))"
    r"\b[^.:]{0,30}$"
)
# A line of Python or a shell that a log echoes, as tracebacks do: also within rich's frames.
_SOURCE = re.compile(
    r"[\W\d]*(?:rank\d+\]:\W*)?(?:(?:raise|if|elif|except|assert|return|export)\b"
    r"|print\(|[\w.]{1,40}\.(?:error|warn|warning|info|debug)\()|\s*(?:#|//)"
)
Version = tuple[int, int]
Versions = tuple[Version, Version]  # of torch: the oldest and the newest that it may be
_OLDEST, _NEWEST = (0, 0), (99, 0)
ANY_TORCH: Versions = (_OLDEST, _NEWEST)


@dataclass(frozen=True)
class Remedy:
    """A way out, and the first and the last torch that has it."""

    do: str
    since: Version = _OLDEST
    until: Version = _NEWEST

    def told(self, torch: Versions) -> str:
        """As it is told to whoever has one of these; nothing where none of them has it."""
        oldest, newest = torch
        if newest < self.since or oldest > self.until:
            return ""
        if oldest >= self.since:
            return self.do
        return f"{self.do.removesuffix('.')} (torch {self.since[0]}.{self.since[1]} or later)."


@dataclass(frozen=True)
class Sign:
    """`pattern` claims, `maybe` says only that it may be so: `apart` is then what tells. Neither
    counts where `unless` is in what matches or shortly before it, nor in a line without `gate`,
    which is quick where they are not."""

    kind: str
    pattern: re.Pattern[str]
    maybe: re.Pattern[str]
    unless: re.Pattern[str]
    gate: re.Pattern[str]
    words: tuple[bytes, ...]
    means: str
    remedies: tuple[Remedy, ...]
    apart: str
    torch: str

    def is_sure(self, line: str) -> bool | None:
        """Whether a line says it surely, or may mean it; None where it does neither."""
        if not self.gate.search(line):
            return None
        for pattern, sure in ((self.pattern, True), (self.maybe, False)):
            for match in pattern.finditer(line):
                before = max(match.start() - _BEFORE, 0)
                if not self.unless.search(line, before, match.end()) and not _ADVICE.search(
                    line, before, match.start()
                ):
                    return sure
        return None

    def todo(self, torch: Versions = ANY_TORCH) -> tuple[str, ...]:
        return tuple(filter(None, (remedy.told(torch) for remedy in self.remedies)))


def is_source(line: str) -> bool:
    """Whether a line of a log is code that it echoes: what it names did not happen by that."""
    return bool(_SOURCE.match(line))


def remedy_of(said: str | Mapping[str, str]) -> Remedy:
    if isinstance(said, str):
        return Remedy(said)
    return Remedy(said["do"], *versions_of(said))


def versions_of(said: Mapping[str, str]) -> Versions:
    major, _, minor = said["since"].partition(".")
    last, _, least = said.get("until", "99.0").partition(".")
    return (int(major), int(minor)), (int(last), int(least))


def sentence(key: str, sizes: Mapping[str, int | None] | None = None, **words: object) -> str:
    """One of the sentences of `failures.json`, with bytes by name (`free_bytes` is its `free`)."""
    shown = {
        name.removesuffix("_bytes"): format_bytes(size)
        for name, size in (sizes or {}).items()
        if isinstance(size, int)
    }
    return str(SAID["sentences"][key].format(**shown, **words))


def _sign(said: Mapping[str, Any]) -> Sign:
    def pattern(key: str, default: str = "(?!)") -> re.Pattern[str]:
        return re.compile("|".join(said.get(key, ())) or default)

    return Sign(
        said["kind"], pattern("pattern"), pattern("maybe"), pattern("unless"),
        pattern("gate", ""),
        tuple(word.encode() for word in said["words"]), said["means"],
        tuple(map(remedy_of, said["todo"])), said.get("apart", ""), said.get("torch", ""),
    )  # fmt: skip


SAID: Mapping[str, Any] = json.loads(
    Path(__file__).with_name("failures.json").read_text(encoding="utf-8")
)
SIGNS: tuple[Sign, ...] = tuple(map(_sign, SAID["signs"]))
BY_KIND = {sign.kind: sign for sign in SIGNS}
ON_FRAGMENTS = tuple(map(remedy_of, SAID["on_fragments"]))
# What libraries say when they find no memory, and also when something else is wrong: where the
# device's free memory can be read, it decides.
_AMBIGUOUS = re.compile("|".join(said["pattern"] for said in SAID["ambiguous"]))
_ONEDNN = re.compile(SAID["probe_out_of_memory"]["pattern"], re.MULTILINE)
_LOST_PEER = re.compile(SAID["lost_peer"]["pattern"])


def _may_say(kind: str, text: str) -> bool:
    """Of a probe's error what may be so counts too."""
    sign = BY_KIND[kind]
    return bool(sign.pattern.search(text) or sign.maybe.search(text))


def is_allocation_failure(text: str) -> bool:
    """Whether an error's text says that there was no memory, or may well mean it."""
    if any(_may_say(kind, text) for kind in (OUT_OF_MEMORY, _LIBRARY, _HOST)):
        return True
    return bool(_ONEDNN.search(text) or _AMBIGUOUS.search(text))


def is_ambiguous(text: str) -> bool:
    """Whether an error's text may mean that there was no memory, and may mean something else."""
    return bool(_AMBIGUOUS.search(text))


def is_lost_peer(text: str) -> bool:
    """Whether an error's text says that another rank is gone."""
    return bool(_LOST_PEER.search(text))
