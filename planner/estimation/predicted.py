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


def _field(part: str, name: str, field: str) -> Any:
    """`field` of a way, which an estimate has as `name` in its `part`."""
    default: Any = None if part == "throughput" else ...
    return Field(default, validation_alias=AliasChoices(field, AliasPath(part, name)))


class _Figures(BaseModel):
    """The fields that are read of an estimate or a way; their others are for people."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)

    model: Model
    setting: TrainSetting
    gpu: str | None = None
    rates_of: str | None = None
    unit: str = Field("images", pattern=UNIT)
    is_task: bool = False
    allocator: str | None = None
    budget_bytes: int | None
    fits: bool | None
    device_total_bytes: int
    as_eager: bool = False
    low_bytes: int = _field("uncertainty", "low_bytes", "low_bytes")
    high_bytes: int = _field("uncertainty", "high_bytes", "high_bytes")
    images_per_second: float | None = _field("throughput", "images_per_second", "images_per_second")
    rate_uncertainty: float | None = _field("throughput", "uncertainty", "rate_uncertainty")


@dataclass(frozen=True)
class Predicted:
    """A setting and what was predicted of it, nothing measured. Sizes in bytes, the rate in images
    per second of one device. `source` names what was read. A step on one device must see the
    images of `images_per_device_step`; None where that is free."""

    source: str
    figures: _Figures
    gpu: Gpu | None
    images_per_device_step: int | None

    @property
    def model(self) -> Model:
        return self.figures.model

    @property
    def setting(self) -> TrainSetting:
        """The setting as the model's library runs it."""
        return self.figures.setting

    @property
    def allocator(self) -> str | None:
        return self.figures.allocator

    @property
    def memory_bytes(self) -> int | None:
        """The budget, where that is not the GPU's own memory."""
        budget = self.figures.budget_bytes
        return None if self.gpu and budget == self.gpu.memory_bytes else budget

    @property
    def where(self) -> str:
        """The device, in words."""
        budget = self.figures.budget_bytes
        if self.gpu is None:
            rates = f", at the rates of {self.figures.rates_of}" if self.figures.rates_of else ""
            return f"a GPU{'' if budget is None else f' of {format_bytes(budget)}'}{rates}"
        within = self.memory_bytes
        return f"{self.gpu.name}{'' if within is None else f' within {format_bytes(within)}'}"

    @property
    def summary(self) -> str:
        """What was predicted, with its range."""
        figures = self.figures
        memory = f"{format_bytes(figures.low_bytes)} to {format_bytes(figures.high_bytes)}"
        if figures.as_eager:
            memory = f"{memory} (its compiled step was not recorded)"
        else:
            memory = f"{format_bytes(figures.device_total_bytes)} ({memory})"
        if figures.images_per_second is None:
            return memory
        each = " on each" if self.setting.world_size > 1 else ""
        rate = f"{figures.images_per_second:,.0f} {figures.unit}/s{each}"
        return f"{rate} ±{figures.rate_uncertainty or 0:.0%}, {memory}"

    @property
    def may_exceed(self) -> bool:
        """Whether the upper end of the range does not fit."""
        budget = self.figures.budget_bytes
        return budget is not None and self.figures.high_bytes > budget

    @property
    def shortfall(self) -> str:
        """Why the setting does not fit, a clause; "" where it does, or there is no budget."""
        figures = self.figures
        if figures.fits is not False or figures.budget_bytes is None:
            return ""
        need, budget = format_bytes(figures.device_total_bytes), format_bytes(figures.budget_bytes)
        return f"is predicted to take {need}, which does not fit in {budget}"


def is_predicted(data: object) -> bool:
    """Whether a JSON value is what `planner estimate` or `planner advise` prints."""
    if isinstance(data, Sequence) and not isinstance(data, str):
        return bool(data) and all(isinstance(row, Mapping) for row in data)
    return isinstance(data, Mapping) and bool({"ways", "breakdown"} & data.keys())


def read_predicted(data: Any, source: str, way: int | None = None) -> Predicted:
    """The setting in an answer's JSON; of several, number `way`, counted from 1. Without a number
    it is the recommended way of advice, and the only row of estimates.

    Raises UsageError where fields do not fit or there is no such way, UnsupportedError where the
    answer holds no setting that fits.
    """
    if isinstance(data, Mapping) and "ways" in data:
        return _read_way(data, source, way)
    rows = data if isinstance(data, Sequence) else [data]
    rows = [row.get("estimate", row) for row in rows]  # of --max-batch
    rows = [row for row in rows if row is not None]
    if not rows:
        law = f"{source} holds no setting that fits."
        raise UnsupportedError(law, "Ask 'planner advise --json' for some, and name its answer.")
    settings = [_read_figures(row, source) for row in rows]
    if way is None and len(settings) > 1:
        raise UsageError(
            f"{source} holds {len(settings)} settings: {'; '.join(_differences(settings))}.",
            "Choose one with --way N.",
        )
    return _number(settings, way or 1, source)


def _read_way(advice: Mapping[str, Any], source: str, way: int | None) -> Predicted:
    shared = {key: advice.get(key) for key in ("model", "gpu", "rates_of", "budget_bytes")}
    ways, best = advice["ways"], advice.get("recommended")
    if not ways or not isinstance(ways, Sequence) or best is None:
        nearest = advice.get("nearest")
        command = nearest.get("command") if isinstance(nearest, Mapping) else None
        way_out = f"The nearest is that of: {command}" if command else "Ask 'planner advise' again."
        raise UnsupportedError(f"{source} holds no way that fits.", way_out)
    chosen = best if way is None else _number(ways, way, source)
    if not isinstance(chosen, Mapping):
        law = f"{source} is no answer of `planner advise`: a way is no JSON object."
        raise UsageError(law, "Write it again with 'planner advise --json'.")
    images = advice.get("images_per_device_step")
    return _read_figures({**shared, **chosen}, source, images if isinstance(images, int) else None)


def _number(rows: Sequence[T], way: int, source: str) -> T:
    if not 1 <= way <= len(rows):
        raise UsageError(
            f"{source} holds {len(rows)} settings, and --way {way} is not one of them.",
            f"Choose from 1 to {len(rows)}." if len(rows) > 1 else "Omit --way.",
        )
    return rows[way - 1]


def _read_figures(fields: Mapping[str, Any], source: str, images: int | None = None) -> Predicted:
    figures = parse(_Figures, fields, source)
    read_allocator(figures.allocator)
    model, setting = resolve(figures.model, figures.setting)
    figures = figures.model_copy(update={"model": model, "setting": setting})
    return Predicted(source, figures, find_gpu(figures.gpu) if figures.gpu else None, images)


def _differences(settings: Sequence[Predicted]) -> list[str]:
    """For each setting `1 is batch_size=32`: the fields in which not all are alike."""
    rows = [
        {"model": one.model.title, "gpu": one.figures.gpu, **one.setting.model_dump()}
        for one in settings
    ]
    fields = [f for f in rows[0] if any(row[f] != rows[0][f] for row in rows)] or ["model"]
    return [f"{n} is {', '.join(f'{f}={row[f]}' for f in fields)}" for n, row in enumerate(rows, 1)]
