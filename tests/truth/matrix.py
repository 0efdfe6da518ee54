"""The rows that are to be measured: a YAML file of groups, each a small grid, in order."""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from planner.core.errors import UnsupportedError
from planner.core.files import parse_yaml, read_text
from planner.core.schema import Model, TrainSetting, parse
from planner.core.units import MIB
from planner.estimation.estimate import resolve
from planner.libraries.names import resolve_model


class Group(BaseModel):
    """Every combination of `models` and the values of `grid`, over the fields in `setting`.

    `repeats` measures each row so many times; `steps_seconds` is how long each is timed.
    """

    model_config = ConfigDict(extra="forbid")

    name: str
    models: list[str]
    setting: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, list[Any]] = Field(default_factory=dict)
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
    model: Model
    setting: TrainSetting
    repeat: int
    measure_seconds: float

    @property
    def key(self) -> str:
        """What makes two measurements the same one: model, setting and repeat."""
        return f"{row_key(self.model, self.setting)}#{self.repeat}"


def row_key(model: Model, setting: TrainSetting) -> str:
    """Model and setting as one line, the same for a row and for its record."""
    return json.dumps([model.model_dump(mode="json"), setting.model_dump(mode="json")])


def read_matrix(path: Path) -> list[Row]:
    """The rows of a matrix file, most telling first; one that is named twice once, and none that a
    library cannot do.

    Raises UsageError for a file that cannot be read as a matrix.
    """
    data = parse_yaml(read_text(path, MIB), str(path))
    return order_rows(expand(parse(MatrixFile, data, str(path)).groups))


def order_rows(rows: list[Row]) -> list[Row]:
    """The same rows, always the one next with most values that no row before had; of equals, the
    one that was written first. A device is often lent for less time than a matrix takes."""
    left = [(row, set(map(str, [*row.model, *row.setting]))) for row in rows]
    known: set[str] = set()
    ordered = []
    while left:
        row, values = left.pop(max(range(len(left)), key=lambda i: len(left[i][1] - known)))
        ordered.append(row)
        known |= values
    return ordered


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
        model = resolve_model(name, {})
        for values in itertools.product(*group.grid.values()):
            fields = {**group.setting, **dict(zip(group.grid, values, strict=True))}
            setting = parse(TrainSetting, fields, f"group {group.name!r}")
            try:
                _, setting = resolve(model, setting)
            except UnsupportedError:
                continue
            rows.append(Row(group.name, model, setting, repeat, group.measure_seconds))
    return rows
