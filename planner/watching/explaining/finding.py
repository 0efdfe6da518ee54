"""What an explanation is made of."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

MAX_EVIDENCE = 3  # lines shown of one finding
MAX_SHOWN = 300  # characters of one


@dataclass
class Finding:
    """Something that was recognised: its `kind`, what it means in a sentence, the lines that say so
    (number from 1 and text; the first ones), how often it was there, in which ranks, the figures
    read from it, and what to do. `apart` is empty where the lines cannot mean anything else;
    otherwise it is only possible, and this is what would tell."""

    kind: str
    means: str
    evidence: list[tuple[int, str]] = field(default_factory=list)
    count: int = 0
    ranks: tuple[int, ...] = ()
    figures: dict[str, Any] = field(default_factory=dict)
    todo: tuple[str, ...] = ()
    apart: str = ""

    def see(self, number: int, text: str, rank: int | None) -> None:
        self.count += 1
        if len(self.evidence) < MAX_EVIDENCE:
            shown = text.strip()
            cut = f"{shown[:MAX_SHOWN]}…" if len(shown) > MAX_SHOWN else shown
            self.evidence.append((number, cut))
        if rank is not None and rank not in self.ranks:
            self.ranks = tuple(sorted((*self.ranks, rank)))[:64]

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "certain": not self.apart,
            "evidence": [{"line": number, "text": text} for number, text in self.evidence],
        }
