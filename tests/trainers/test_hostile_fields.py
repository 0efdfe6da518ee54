"""Code in every text field of a result that `planner emit` reads: none of it reaches a program."""

from __future__ import annotations

import ast
import json
import shlex
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from planner.core.errors import PlannerError, UsageError
from planner.core.files import to_json
from planner.core.schema import FactoryModel, TrainSetting
from planner.core.schema.loading import LoaderSetting
from planner.core.schema.record import Recommendation
from planner.estimation.estimate import estimate
from planner.libraries.building import declare_missing_operators
from planner.libraries.registry import find_library
from planner.trainers.emission import TARGETS, Emitted, emit
from tests.trainers.cases import feeding, loaded, recommendation, tiny

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


# A result that somebody else wrote: no name in it becomes code, a key or a second command.

declare_missing_operators()
NAMES = st.text(st.characters(), max_size=60)  # lone surrogates among them
INJECTIONS = (
    'swin\nopen("/tmp/pwned", "w") #',
    "x\nepochs: 666\nresume: /evil.pth #",
    "x\r\nimport os",
    "\x00",
    "\ud800",
    "a\u2028b\u0085c\x0cd",
    "coding: utf-7 +AAo-import os+AAo-",
    '"""\nimport os\n"""',
    "'; rm -rf ~ #",
    "*/ */ --> {{ }} %s {0} $HOME `id`",
    "x" * 5000,
)


def named(name: str, target: str) -> Recommendation:
    """A result for `target` with `name` wherever a text of its own stands in it.

    Copied, not validated: whatever a schema lets pass today, files hold.
    """
    library = "timm" if target == "timm" else "native"
    model = tiny(library, num_classes=1000).model_copy(update={"name": name})
    setting = TrainSetting(batch_size=2, precision="fp16")
    found = recommendation(model, setting)
    assert found.evidence is not None
    versions = {"torch": name}
    if target != "microsoft":  # which is estimated anew, and an estimate refuses such a one
        versions["allocator_config"] = name or "x"
    evidence = found.evidence.model_copy(update={"date": name, "versions": versions})
    device = found.device.model_copy(update={"name": name})
    return found.model_copy(update={"evidence": evidence, "device": device})


def with_injections(test: Any) -> Any:
    for name in INJECTIONS:
        test = example(name)(test)
    return test


def meaning(text: str, filename: str) -> object:
    """What is left of a file without its comments: the program, the keys."""
    if filename.endswith(".py"):
        return ast.dump(ast.parse(text.encode()))  # from bytes: an encoding's line would count
    if filename.endswith(".json"):
        values = json.loads(text)
        del values["comment"]
        return values
    values = yaml.safe_load(text.encode())
    if "MODEL" in values:
        del values["MODEL"]["NAME"]  # a string, whatever it holds
    return values


@cache
def plain(target: str) -> Emitted:
    return emit(named("swin", target), target)


@pytest.mark.parametrize("target", TARGETS)
@settings(max_examples=5, deadline=None)
@with_injections
@given(NAMES)
def test_no_name_becomes_code_or_a_key_or_another_word_of_the_command(
    target: str, name: str
) -> None:
    assume(name not in find_library("timm").published)  # a published name is a key, and may be one
    harmless = plain(target)
    hostile = emit(named(name, target), target)
    assert meaning(hostile.text, hostile.filename) == meaning(harmless.text, harmless.filename)
    for file, text in hostile.modules.items():
        assert meaning(text, file) == meaning(harmless.modules[file], file)
    texts = {hostile.filename: hostile.text, **hostile.modules}
    for text in (text for file, text in texts.items() if not file.endswith(".json")):
        first = text.splitlines()[:2]
        assert all("swin" not in line and "coding" not in line for line in first)
    words, plainly = shlex.split(hostile.launch), shlex.split(harmless.launch)
    if target != "microsoft":
        assert words.pop(0) == f"PYTORCH_CUDA_ALLOC_CONF={name or 'x'}"
        plainly.pop(0)
    assert words == plainly


@pytest.mark.parametrize(
    "factory",
    [
        'os:getcwd; open("/tmp/pwned","w")', "os:getcwd\n", "a..b:c", "a:b.", "a.class:b",
        "a:lambda", "a b:c", ":c", "a:", "a",
    ],
)  # fmt: skip
def test_a_factory_is_names_wherever_a_result_is_read(factory: str, tmp_path: Path) -> None:
    data = json.loads(recommendation().model_dump_json())
    data["model"] = {"factory": factory, "num_classes": 10}
    file = tmp_path / "recommendation.json"
    file.write_text(json.dumps(data))
    with pytest.raises(UsageError, match=r"package\.module:name"):
        emit(file, "pytorch")


def test_a_factory_in_a_class_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`package.module:Net.build` is what `planner tune` takes, and no import statement."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "nets.py").write_text(
        "from torch import nn\n\n\nclass Net:\n    @staticmethod\n    def build():\n"
        "        return nn.Linear(2, 3)\n"
    )
    monkeypatch.chdir(tmp_path)
    found = recommendation(setting=TrainSetting(batch_size=2))
    found = found.model_copy(update={"model": FactoryModel(factory="own.nets:Net.build")})
    assert loaded(emit(found, "pytorch"), tmp_path).build_model().out_features == 3
