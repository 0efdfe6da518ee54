"""Code in every text field of a result that `planner emit` reads: none of it reaches a program."""

from __future__ import annotations

import ast
import json
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from planner.core.errors import PlannerError
from planner.core.files import to_json
from planner.core.schema import FactoryModel, TrainSetting
from planner.core.schema.loading import LoaderSetting
from planner.estimation.estimate import estimate
from planner.trainers.emission import TARGETS, emit
from planner.trainers.plan import Emitted
from tests.trainers.cases import feeding, recommendation, tiny

MARK = "PWNED"
PAYLOADS = (
    "{__import__('os').system('PWNED')}",
    '"\nPWNED()\n"',
    "x\n    PWNED: 1",
    "${PWNED}; PWNED",
)
Place = tuple[str | int, ...]


def of_a_model() -> dict[str, Any]:
    setting = TrainSetting(batch_size=2, precision="fp16")
    loader = LoaderSetting(workers=2)
    found = recommendation(tiny(num_classes=1000), setting, feeding=feeding(loader))
    return json.loads(found.model_dump_json())


def of_a_task() -> dict[str, Any]:
    found = recommendation(setting=TrainSetting(batch_size=2))
    model = FactoryModel(factory="own.tasks:build")
    assert found.evidence is not None
    evidence = found.evidence.model_copy(update={"model": model, "unit": "sequences"})
    found = found.model_copy(update={"model": model, "evidence": evidence})
    return json.loads(found.model_dump_json())


def of_an_estimate() -> dict[str, Any]:
    return to_json(estimate(tiny(), TrainSetting(batch_size=2), gpu="rtx-3090"))


def places(value: Any, here: Place = ()) -> Iterator[Place]:
    """Where a text stands or could: a string, nothing at all, a new key."""
    if isinstance(value, dict):
        yield (*here, PAYLOADS[0])
        for key, each in value.items():
            yield from places(each, (*here, key))
    elif isinstance(value, list):
        for index, each in enumerate(value[:1]):
            yield from places(each, (*here, index))
    elif value is None or isinstance(value, str):
        yield here


def changed(document: dict[str, Any], place: Place, text: str) -> dict[str, Any]:
    copy: Any = json.loads(json.dumps(document))
    inner = copy
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = text
    return copy


def programs(emitted: Emitted) -> Iterator[tuple[str, str]]:
    yield emitted.filename, emitted.text
    yield from emitted.modules.items()


def runs_it(emitted: Emitted) -> bool:
    """Whether the mark is more than a text or a comment anywhere."""
    for filename, text in programs(emitted):
        if filename.endswith(".py"):
            for node in ast.walk(ast.parse(text)):
                if MARK in (getattr(node, "id", ""), getattr(node, "attr", "")):
                    return True
                if isinstance(node, ast.FormattedValue) and MARK in ast.unparse(node):
                    return True
        elif MARK in "".join(keys_of(yaml.safe_load(text))):  # JSON is YAML
            return True
    return MARK in shlex.split(emitted.launch)


def keys_of(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from map(str, value)
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, dict | list):
            yield from keys_of(each)


@pytest.mark.parametrize("document_of", [of_a_model, of_a_task, of_an_estimate])
def test_no_field_of_a_result_becomes_code(document_of: Callable[[], dict[str, Any]]) -> None:
    """Each field by the script that trains, which holds most of them, and by one other trainer."""
    document = document_of()
    others = [target for target in TARGETS if target != "pytorch"]
    written = 0
    for number, place in enumerate(places(document)):
        tried = [("pytorch", payload) for payload in PAYLOADS[:2]]
        tried.append((others[number % len(others)], PAYLOADS[number % len(PAYLOADS)]))
        for target, payload in tried:
            try:
                emitted = emit(changed(document, place, payload), target)
            except PlannerError:
                continue
            written += 1
            assert not runs_it(emitted), (place, target, payload)
    assert written > 20
