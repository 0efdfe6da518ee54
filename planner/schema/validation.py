"""From what a person wrote to a validated model, or to one error that names every fault."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from planner.errors import UsageError, nearest

ModelT = TypeVar("ModelT", bound=BaseModel)


def parse(schema: type[ModelT], data: Mapping[str, Any], source: str) -> ModelT:
    """`data` as a `schema`. Raises UsageError listing all faults, in the user's field names.

    `source` says where the data came from ("swin.yaml", "--set"), for the message.
    """
    try:
        return schema.model_validate(dict(data))
    except ValidationError as error:
        faults = [_fault(schema, entry) for entry in error.errors()]
    count = "one fault" if len(faults) == 1 else f"{len(faults)} faults"
    raise UsageError(f"{source} has {count}:\n" + "\n".join(f"  {fault}" for fault in faults))


def _fault(schema: type[BaseModel], entry: Any) -> str:
    field = ".".join(str(part) for part in entry["loc"] if not _is_union_arm(part))
    if entry["type"] == "extra_forbidden":
        near = nearest(field, schema.model_fields)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        return f"{field}: no such field.{hint}"
    message = entry["msg"].removeprefix("Value error, ")
    shown = "" if entry["type"] == "missing" else f" (got {entry['input']!r})"
    return f"{field}: {message}{shown}" if field else message


def _is_union_arm(part: object) -> bool:
    """pydantic puts the arm of a union ("int", "tuple[int, ...]") into the path."""
    return isinstance(part, str) and (part in {"int", "str", "float", "bool"} or "[" in part)
