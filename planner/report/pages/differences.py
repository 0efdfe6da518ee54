"""What tells steps apart: the fields in which they differ, and a short name for each by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from planner.report.settings import in_words, value_text
from planner.units import format_bytes

if TYPE_CHECKING:
    from planner.report.pages.step import Step

Fields = Mapping[str, object]
MODEL, CARD = "model", "card"  # fields that are named by their values


def differing(subjects: Sequence[Fields]) -> list[Fields]:
    """Of each subject the fields in which not all agree; a field that one lacks is None there."""
    names = list(dict.fromkeys(name for fields in subjects for name in fields))
    apart = [name for name in names if len({repr(f.get(name)) for f in subjects}) > 1]
    return [{name: fields.get(name) for name in apart} for fields in subjects]


def step_fields(step: Step) -> Fields:
    """All that a step was estimated of."""
    budget = step.estimate.budget_bytes
    return {
        MODEL: step.estimate.model.title,
        **step.estimate.model.model_dump(exclude={"name"}),
        CARD: step.gpu.name if step.gpu is not None else None,
        "memory": format_bytes(budget) if budget is not None else None,
        "allocator": step.allocator.source if step.allocator is not None else None,
        "link": step.link,
        **step.estimate.setting.model_dump(),
    }


def telling(subjects: Sequence[Fields]) -> list[Fields]:
    """`differing` without what follows from another field: the fields of models where their titles
    differ, the memory where the cards do."""
    found = differing(subjects)
    if not found:
        return []
    dropped: set[str] = set()
    if MODEL in found[0]:
        dropped |= {name for name in found[0] if name not in _KEPT and _is_of_model(name)}
    if CARD in found[0]:
        cards = [(fields[CARD], fields.get("memory")) for fields in found]
        if len(set(cards)) == len({card for card, _ in cards}):
            dropped.add("memory")
    return [{n: v for n, v in fields.items() if n not in dropped} for fields in found]


_KEPT = (MODEL, CARD, "memory", "allocator", "link")


def _is_of_model(name: str) -> bool:
    from planner.arguments import MODEL_FIELDS
    from planner.schema import TrainSetting

    return name in MODEL_FIELDS and name not in TrainSetting.model_fields


def short_names(subjects: Sequence[Fields]) -> list[str]:
    """Each by what tells it apart: `rtx-4090, batch 32`; by its number where nothing does."""
    found = telling(subjects)
    cards = {fields.get(CARD) for fields in found}
    if len(cards) == len(found) > 1 and MODEL not in found[0]:
        found = [{CARD: fields[CARD]} for fields in found]  # the rest follows from the card
    names = [_in_words(fields) for fields in found]
    return [
        name if name and names.count(name) == 1 else f"{name} #{number}".strip()
        for number, name in enumerate(names, start=1)
    ]


def _in_words(fields: Fields) -> str:
    plain = [str(fields[name]) for name in (MODEL, CARD) if fields.get(name) is not None]
    if CARD in fields and fields[CARD] is None:
        plain.append("no card")
    rest = {n: v for n, v in fields.items() if n not in (MODEL, CARD) and v is not None}
    return ", ".join([*plain, *([in_words(rest)] if rest else [])])


def field_title(name: str) -> str:
    """A field as the head of a column."""
    return name.replace("_", " ")


def field_text(value: object) -> str:
    return "-" if value is None else value_text(value)
