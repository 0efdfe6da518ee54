"""The rows that are to be measured: a YAML file of groups, each a small grid, in order."""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field

from planner.errors import PlannerError, UnsupportedError, UsageError
from planner.libraries.registry import find_library
from planner.libraries.resolve import resolve_model
from planner.schema import FactoryModel, MeasurementRecord, SwinConfig, TrainSetting, parse

HELD_OUT_ONE_IN = 4
EXAMPLE = "See tests/truth/memory.yaml."


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
    """A matrix as it is written."""

    model_config = ConfigDict(extra="forbid")

    groups: list[Group]


@dataclass(frozen=True)
class Row:
    """One measurement to make. `repeat` counts from 0."""

    group: str
    model: SwinConfig | FactoryModel
    setting: TrainSetting
    repeat: int
    measure_seconds: float

    @property
    def key(self) -> str:
        """What makes two measurements the same one: model, setting and repeat."""
        return f"{row_key(self.model, self.setting)}#{self.repeat}"


def row_key(model: SwinConfig | FactoryModel, setting: TrainSetting) -> str:
    """Model and setting as one line, the same for a row and for its record."""
    return json.dumps([model.model_dump(mode="json"), setting.model_dump(mode="json")])


def is_held_out(record: MeasurementRecord) -> bool:
    """Whether a record judges the fit instead of entering it: a fixed quarter of all settings,
    chosen by a hash of model and setting, before anything is measured."""
    digest = hashlib.sha256(row_key(record.model, record.setting).encode()).digest()
    return digest[0] % HELD_OUT_ONE_IN == 0


def read_matrix(path: Path) -> list[Row]:
    """The rows of a matrix file, in its order; a row named twice is kept once.

    Combinations that a library cannot do are left out. Raises UsageError for a file that cannot be
    read as a matrix.
    """
    return expand(parse(MatrixFile, read_yaml(path), str(path)).groups)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping that a matrix file holds, read as UTF-8 whatever the locale. Raises PlannerError
    where it cannot be read, UsageError where it is no mapping."""
    try:
        data = yaml.safe_load(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise PlannerError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not text in UTF-8: byte {error.start} is {error.object[error.start]:#04x}."
        ) from None
    except yaml.YAMLError as error:
        words = " ".join(str(error).split())
        raise UsageError(f"{path} is not YAML: {words}") from None
    except RecursionError:
        raise UsageError(f"{path} is nested too deep for a matrix.", EXAMPLE) from None
    except ValueError as error:  # a number of thousands of digits
        raise UsageError(f"{path} cannot be read as a matrix: {error}.", EXAMPLE) from None
    if not isinstance(data, dict):
        raise UsageError(f"{path} is not a matrix: it has no groups.", EXAMPLE)
    return data


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
                    setting = find_library(model.library).resolve_setting(model, setting)
                except UnsupportedError:
                    continue
            rows.append(Row(group.name, model, setting, repeat, group.measure_seconds))
    return rows
