"""A result that somebody else wrote: no name in it becomes code, a key or a second command."""

from __future__ import annotations

import ast
import json
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from planner.core.errors import UsageError
from planner.core.schema import FactoryModel, TrainSetting
from planner.core.schema.result import Recommendation
from planner.libraries.missing_operators import declare_missing_operators
from planner.libraries.registry import find_library
from planner.trainers.emission import TARGETS, Emitted, emit
from tests.trainers.cases import FakeEstimator, executed, recommendation, tiny

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
    library = target if target in ("timm", "transformers") else "native"
    model = tiny(library, num_classes=1000).model_copy(update={"name": name})
    setting = TrainSetting(batch_size=2, precision="fp16")
    found = recommendation(model, setting)
    assert found.evidence is not None
    versions = {"torch": name, "allocator_config": name or "x"}
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
    return emit(named("swin", target), target, estimator=FakeEstimator())


@pytest.mark.parametrize("target", TARGETS)
@settings(max_examples=5, deadline=None)
@with_injections
@given(NAMES)
def test_no_name_becomes_code_or_a_key_or_another_word_of_the_command(
    target: str, name: str
) -> None:
    assume(name not in find_library("timm").published)  # a published name is a key, and may be one
    harmless = plain(target)
    hostile = emit(named(name, target), target, estimator=FakeEstimator())
    assert meaning(hostile.text, hostile.filename) == meaning(harmless.text, harmless.filename)
    if hostile.code:
        assert meaning(hostile.code, "x.py") == meaning(harmless.code, "x.py")
        assert "comment" not in hostile.code[:80]
    for text in (hostile.text, hostile.code):
        first = text.splitlines()[:2]
        assert all("swin" not in line and "coding" not in line for line in first)
    words = shlex.split(hostile.launch)
    assert words[0] == f"PYTORCH_CUDA_ALLOC_CONF={name or 'x'}"
    assert words[1:] == shlex.split(harmless.launch)[1:]


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


@pytest.mark.parametrize("target", ["pytorch", "accelerate"])
def test_a_factory_in_a_class_is_imported(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`package.module:Net.build` is what `planner tune` takes, and no import statement."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "nets.py").write_text(
        "from torch import nn\n\n\nclass Net:\n    @staticmethod\n    def build():\n"
        "        return nn.Linear(2, 3)\n"
    )
    monkeypatch.chdir(tmp_path)
    found = recommendation(setting=TrainSetting(batch_size=2))
    found = found.model_copy(update={"model": FactoryModel(factory="own.nets:Net.build")})
    emitted = emit(found, target)
    names = executed(emitted)
    assert names["build_model"]().out_features == 3
