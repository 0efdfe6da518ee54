"""What a search for a loader may be asked, beyond the data and the model: each option declared
once, for `find_loader` and the command alike."""

# `option` makes a field: what it is called with is the default, and no call is made later.
# ruff: noqa: RUF009

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.core.errors import UsageError, shorten, unknown_name
from planner.core.schema import SwinConfig, parse
from planner.core.schema.loading import MAX_WORKERS, PIPELINES, Pipeline
from planner.core.schema.model import MAX_SIZE
from planner.core.units import parse_percent
from search.loop.options import (
    MANY,
    AnySearchKeywords,
    bound_faults,
    check_strategy,
    option,
    path_reader,
    read_budget,
    read_keywords,
    refuse,
)
from search.loop.strategies.strategy import TOLERANCE
from search.loop.study.study import STUDY_NAME

STRATEGIES = ("planner", "grid", "tpe")
BATCH_SIZE = 64  # as an estimate's, unless another is asked for
_MOST_PREFETCH = 1 << 16


def read_numbers(name: str, least: int, most: int) -> Callable[[Any], tuple[int, ...] | None]:
    """Reads one whole number or several, also as they are typed: `1,2,4`. It raises UsageError."""

    def read(value: Any) -> tuple[int, ...] | None:
        if value is None:
            return None
        if isinstance(value, str):
            value = value.split(",")
        several = value if isinstance(value, Sequence) else (value,)
        found = []
        for number in several:
            text = str(number).strip()
            if not text.isdecimal() or not least <= int(text) <= most:
                raise UsageError(
                    f"{name} are whole numbers from {least} to {most}, and {shorten(number)} is "
                    "not one."
                )
            found.append(int(text))
        return tuple(sorted(set(found))) or None

    return read


def read_pipelines(value: str | Sequence[str] | None) -> tuple[Pipeline, ...] | None:
    """The pipelines that are named, also as they are typed. Raises UsageError."""
    if value is None:
        return None
    names = [n.strip() for n in value.split(",")] if isinstance(value, str) else list(value)
    for name in names:
        if name not in PIPELINES:
            raise unknown_name("pipeline", name, PIPELINES, f"One of {', '.join(PIPELINES)}.")
    return tuple(dict.fromkeys(names)) or None  # type: ignore[arg-type]  # each is one of them


def read_image_size(value: Any) -> tuple[int, int] | None:
    """(height, width) in pixels, from one number or two. Raises UsageError."""
    if value is None:
        return None
    size = parse(SwinConfig, {"image_size": value}, "image_size").image_size
    return (size[0], size[1])


class LoaderKeywords(AnySearchKeywords, total=False):
    """The keywords of `find_loader`."""

    batch_size: int
    image_size: int | str | Sequence[int] | None
    pipelines: str | Sequence[str] | None
    workers: int | str | Sequence[int] | None
    prefetch: int | str | Sequence[int] | None


@dataclass(frozen=True)
class LoaderOptions:
    """What `find_loader` was asked. Raises UsageError, with every fault."""

    batch_size: int = option(
        BATCH_SIZE, "Images per batch.", metavar="N", shown=str(BATCH_SIZE), bounds=(1, MAX_SIZE)
    )
    image_size: tuple[int, int] | None = option(
        None, "As 384 or 256,192 (height, width; default: the model's, or 224).",
        metavar="PX", read=read_image_size,
    )  # fmt: skip
    pipelines: tuple[Pipeline, ...] | None = option(
        None, f"Try only these: {', '.join(PIPELINES[:-1])}.",
        flag="--pipelines", metavar="P[,P…]", read=read_pipelines,
    )  # fmt: skip
    workers: tuple[int, ...] | None = option(
        None, "Try only these numbers of workers.",
        metavar="N[,N…]", read=read_numbers("workers", 0, MAX_WORKERS),
    )  # fmt: skip
    prefetch: tuple[int, ...] | None = option(
        None, "Try only these prefetch factors (2, 4, 8).",
        metavar="N[,N…]", read=read_numbers("prefetch factors", 1, _MOST_PREFETCH),
    )  # fmt: skip
    device: str = option(
        "auto", "auto, cpu, cuda:0 …: where batches go.", shown="auto", metavar="DEVICE"
    )
    trials: int | None = option(
        None, "At most N probes in the study.", metavar="N", bounds=(0, MANY)
    )
    budget_seconds: float | None = option(
        "3m", "Time for probes (90s, 3m), or none.",
        flag="--budget", metavar="TIME", typed=read_budget,
    )  # fmt: skip
    tolerance: float = option(
        f"{TOLERANCE:.1%}", "Double the workers while that gains more.",
        typed=parse_percent, metavar="SHARE",
    )  # fmt: skip
    strategy: str = option(
        "planner", f"One of {', '.join(STRATEGIES)}.", shown="planner", metavar="NAME"
    )
    storage: str | None = option(None, "Any Optuna storage, or a .journal file.", metavar="URL")
    study_name: str = option(
        STUDY_NAME, "The study's name in the storage.", shown=STUDY_NAME, metavar="NAME"
    )
    output: Path | None = option(
        None, "Folder for the results (data-NAME).", metavar="DIR", read=path_reader("output")
    )
    accept_different: bool = option(
        False, "Go on with a study of other data, another machine or software.", is_switch=True
    )
    seed: int = option(
        0, "For strategies that draw at random.", shown="0", metavar="N", bounds=(0, (1 << 32) - 1)
    )

    @classmethod
    def of(cls, given: LoaderKeywords) -> LoaderOptions:
        """The options that keywords mean. Raises UsageError."""
        return cls(**read_keywords(cls, dict(given)))

    def __post_init__(self) -> None:
        check_strategy(self.strategy, STRATEGIES)
        refuse(list(bound_faults(self)))
