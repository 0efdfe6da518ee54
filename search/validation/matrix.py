"""The rows that are to be measured: a YAML file of groups, each a small grid, in order."""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from planner.errors import UnsupportedError
from planner.libraries.registry import find_library
from planner.libraries.resolve import resolve_model
from planner.schema import MeasurementRecord, Model, SwinConfig, TrainSetting, parse
from planner.schema.observation import Observation

HELD_OUT_ONE_IN = 4
# The fields of models and settings when the held-out quarter was drawn, 2026-11-20.
DRAWN_FIELDS = (
    "library", "name", "version", "image_size", "patch_size", "in_channels", "num_classes",
    "embed_dim", "depths", "num_heads", "window_size", "mlp_ratio", "qkv_bias", "drop_rate",
    "attn_drop_rate", "drop_path_rate", "patch_norm", "absolute_position_embedding",
    "pretrained_window_size", "batch_size", "accumulate", "world_size", "precision",
    "checkpointing", "compile", "attention", "optimizer", "memory_format", "parallelism",
    "loss", "amsgrad", "clip_grad", "ema", "zero_grad_to_none", "frozen_stages", "lora_rank",
    "validation_batch_size", "factory",
)  # fmt: skip


class Group(BaseModel):
    """Every combination of `models` and the values of `grid`, over the fields in `setting`.

    `repeats` measures each row so many times; `steps_seconds` is how long each is timed.
    """

    model_config = ConfigDict(extra="forbid")

    name: str
    models: list[str]
    setting: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, list[Any]] = Field(default_factory=dict)
    overrides: dict[str, Any] = Field(default_factory=dict)
    repeats: Annotated[int, Field(ge=1)] = 1
    measure_seconds: Annotated[float, Field(gt=0)] = 2.0


class MatrixFile(BaseModel):
    """A matrix as it is written: what to see first, then the rows; `budget` holds where the command
    names none."""

    model_config = ConfigDict(extra="forbid")

    groups: list[Group] = Field(default_factory=list)
    observations: list[Observation] = Field(default_factory=list)
    budget: str | None = None


@dataclass(frozen=True)
class Row:
    """One measurement to make. `repeat` counts from 0."""

    group: str
    model: Model
    setting: TrainSetting
    repeat: int
    measure_seconds: float

    @property
    def key(self) -> str:
        """What makes two measurements the same one: model, setting and repeat."""
        return f"{row_key(self.model, self.setting)}#{self.repeat}"


@dataclass(frozen=True)
class Matrix:
    """A matrix file, read. `budget_seconds` is None where it sets no limit."""

    rows: tuple[Row, ...]
    observations: tuple[Observation, ...] = ()
    budget_seconds: float | None = None


def row_key(model: Model, setting: TrainSetting) -> str:
    """Model and setting as one line, the same for a row and for its record."""
    return json.dumps([model.model_dump(mode="json"), setting.model_dump(mode="json")])


def is_held_out(record: MeasurementRecord) -> bool:
    """Whether a record judges the fit instead of entering it: a fixed quarter of all settings,
    chosen by a hash of model and setting, before anything is measured."""
    key = drawn_key(record.model, record.setting)
    return hashlib.sha256(key.encode()).digest()[0] % HELD_OUT_ONE_IN == 0


def drawn_key(model: Model, setting: TrainSetting) -> str:
    """Model and setting as they were written when the quarter was drawn: a field that came later
    moves no row across, as long as it has its default, nor does one that moved in its class."""
    return json.dumps([_as_drawn(model), _as_drawn(setting)])


def _as_drawn(value: BaseModel) -> dict[str, Any]:
    fields = type(value).model_fields
    written = value.model_dump(mode="json")
    later = [
        name
        for name in written
        if name not in DRAWN_FIELDS and getattr(value, name) != fields[name].get_default()
    ]
    return {name: written[name] for name in (*DRAWN_FIELDS, *later) if name in written}


def expand(groups: list[Group]) -> list[Row]:
    """All rows of `groups`, each once, in order."""
    rows: dict[str, Row] = {}
    for group in groups:
        for row in _rows(group):
            rows.setdefault(row.key, row)
    return list(rows.values())


def _rows(group: Group) -> list[Row]:
    rows = []
    for repeat, name in itertools.product(range(group.repeats), group.models):
        model = resolve_model(name, {k: str(v) for k, v in group.overrides.items()})
        for values in itertools.product(*group.grid.values()):
            fields = {**group.setting, **dict(zip(group.grid, values, strict=True))}
            setting = parse(TrainSetting, fields, f"group {group.name!r}")
            if isinstance(model, SwinConfig):
                try:
                    setting = find_library(model.library).resolve(model, setting)
                except UnsupportedError:
                    continue
            rows.append(Row(group.name, model, setting, repeat, group.measure_seconds))
    return rows
