"""A predicted setting to go on from, in the JSON of `planner estimate` and `planner advise`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import AliasChoices, AliasPath, BaseModel, ConfigDict, Field

from planner.core.errors import UnsupportedError, UsageError
from planner.core.schema import Model, TrainSetting, parse
from planner.core.schema.validation import UNIT
from planner.core.units import format_bytes
from planner.estimation.arguments import read_allocator
from planner.estimation.estimate import resolve
from planner.machine.hardware import find_gpu
from planner.machine.hardware.gpu import Gpu

T = TypeVar("T")


def _in(part: str, name: str, field: str) -> Any:
    """`field` of a way, which an estimate has as `name` in its `part`."""
    default: Any = None if part == "throughput" else ...
    return Field(default, validation_alias=AliasChoices(field, AliasPath(part, name)))


class _Figures(BaseModel):
    """What is read of an estimate or a way, whose other fields are for people."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)

    model: Model
    setting: TrainSetting
    gpu: str | None = None
    rated: str | None = None
    unit: str = Field("images", pattern=UNIT)
    is_task: bool = False
    allocator: str | None = None
    budget_bytes: int | None
    fits: bool | None
    device_total_bytes: int
    as_eager: bool = False
    low_bytes: int = _in("uncertainty", "low_bytes", "low_bytes")
    high_bytes: int = _in("uncertainty", "high_bytes", "high_bytes")
    images_per_second: float | None = _in("throughput", "images_per_second", "images_per_second")
    rate_uncertainty: float | None = _in("throughput", "uncertainty", "rate_uncertainty")


@dataclass(frozen=True)
class Predicted:
    """A setting and what was predicted of it, nothing measured. Sizes in bytes, the rate in images
    per second of one device. `share` are the images that a step on one device must see, None where
    that is free; `source` is what was read, in words."""

    source: str
    figures: _Figures
    gpu: Gpu | None
    share: int | None

    @property
    def model(self) -> Model:
        return self.figures.model

    @property
    def setting(self) -> TrainSetting:
        """As the model's library runs it."""
        return self.figures.setting

    @property
    def allocator(self) -> str | None:
        return self.figures.allocator

    @property
    def memory_bytes(self) -> int | None:
        """What was to be fitted into, where that is not the GPU's own memory."""
        budget = self.figures.budget_bytes
        return None if self.gpu and budget == self.gpu.memory_bytes else budget

    @property
    def where(self) -> str:
        """The device, in words."""
        budget = self.figures.budget_bytes
        if self.gpu is None:
            rates = f", at the rates of {self.figures.rated}" if self.figures.rated else ""
            return f"a GPU{'' if budget is None else f' of {format_bytes(budget)}'}{rates}"
        within = self.memory_bytes
        return f"{self.gpu.name}{'' if within is None else f' within {format_bytes(within)}'}"

    @property
    def said(self) -> str:
        """What was predicted, with its range."""
        told = self.figures
        memory = f"{format_bytes(told.low_bytes)} to {format_bytes(told.high_bytes)}"
        memory = (
            f"{memory} (its compiled step was not recorded)"
            if told.as_eager
            else f"{format_bytes(told.device_total_bytes)} ({memory})"
        )
        if told.images_per_second is None:
            return memory
        each = " on each" if self.setting.world_size > 1 else ""
        return (
            f"{told.images_per_second:,.0f} {told.unit}/s{each} ±{told.rate_uncertainty or 0:.0%}, "
            f"{memory}"
        )

    @property
    def may_exceed(self) -> bool:
        """Whether the upper end of what is expected does not fit."""
        budget = self.figures.budget_bytes
        return budget is not None and self.figures.high_bytes > budget

    @property
    def lacks(self) -> str:
        """Why it does not fit, a clause; "" where it does or nobody asked."""
        told = self.figures
        if told.fits is not False or told.budget_bytes is None:
            return ""
        need, has = format_bytes(told.device_total_bytes), format_bytes(told.budget_bytes)
        return f"is predicted to take {need}, which does not fit in {has}"


def is_predicted(data: object) -> bool:
    """Whether a JSON value is what `planner estimate` or `planner advise` prints."""
    if isinstance(data, Sequence) and not isinstance(data, str):
        return bool(data) and all(isinstance(row, Mapping) for row in data)
    return isinstance(data, Mapping) and bool({"ways", "breakdown"} & data.keys())


def read_predicted(data: Any, source: str, way: int | None = None) -> Predicted:
    """The setting that an answer holds; of several, number `way`, counted from 1; of advice that is
    not told which, the recommended one.

    Raises UsageError: fields that do not fit, or no such way; UnsupportedError where nothing fits.
    """
    if isinstance(data, Mapping) and "ways" in data:
        return _way_of_advice(data, source, way)
    rows = data if isinstance(data, Sequence) else [data]
    rows = [row.get("estimate", row) for row in rows]  # of --max-batch
    rows = [row for row in rows if row is not None]
    if not rows:
        raise UnsupportedError(f"{source} holds no setting that fits.")
    found = [_predicted(row, source) for row in rows]
    if way is None and len(found) > 1:
        raise UsageError(
            f"{source} holds {len(found)} settings: {'; '.join(_differing(found))}.",
            "Choose one with --way N.",
        )
    return _numbered(found, way or 1, source)


def _way_of_advice(advice: Mapping[str, Any], source: str, way: int | None) -> Predicted:
    shared = {key: advice.get(key) for key in ("model", "gpu", "rated", "budget_bytes")}
    ways, best = advice["ways"], advice.get("recommended")
    if not ways or not isinstance(ways, Sequence) or best is None:
        nearest = advice.get("nearest")
        near = nearest.get("command") if isinstance(nearest, Mapping) else None
        raise UnsupportedError(
            f"{source} holds no way that fits.", f"The nearest is that of: {near}" if near else ""
        )
    chosen = best if way is None else _numbered(ways, way, source)
    if not isinstance(chosen, Mapping):
        raise UsageError(f"{source} is no answer of `planner advise`: a way is no JSON object.")
    share = advice.get("share")
    return _predicted({**shared, **chosen}, source, share if isinstance(share, int) else None)


def _numbered(rows: Sequence[T], way: int, source: str) -> T:
    if not 1 <= way <= len(rows):
        raise UsageError(
            f"{source} holds {len(rows)} settings, and --way {way} is not one of them.",
            f"Choose from 1 to {len(rows)}." if len(rows) > 1 else "Omit --way.",
        )
    return rows[way - 1]


def _predicted(fields: Mapping[str, Any], source: str, share: int | None = None) -> Predicted:
    told = parse(_Figures, fields, source)
    read_allocator(told.allocator)
    model, setting = resolve(told.model, told.setting)
    figures = told.model_copy(update={"model": model, "setting": setting})
    return Predicted(source, figures, find_gpu(told.gpu) if told.gpu else None, share)


def _differing(found: Sequence[Predicted]) -> list[str]:
    """`1 is batch_size=32`: of each what not all have."""
    rows = [
        {"model": row.model.title, "gpu": row.figures.gpu, **row.setting.model_dump()}
        for row in found
    ]
    fields = [f for f in rows[0] if any(row[f] != rows[0][f] for row in rows)] or ["model"]
    return [f"{n} is {', '.join(f'{f}={row[f]}' for f in fields)}" for n, row in enumerate(rows, 1)]
