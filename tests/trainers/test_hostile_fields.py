"""Code in every text field of a result that `planner emit` reads: none of it reaches a program."""

import ast
import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.core.errors import PlannerError, UsageError
from planner.core.files import to_json
from planner.core.schema import FactoryModel, TrainSetting
from planner.core.schema.record import LoaderSetting
from planner.estimation.estimate import estimate
from planner.trainers.emission import emit
from planner.trainers.plan import Emitted
from planner.trainers.registry import TARGETS
from tests.cli.test_hostile import changed, texts
from tests.trainers.cases import feeding, loaded, recommendation, tiny

MARK = "PWNED"
# Each would be code, a key, another word of the command, or no text that a file can hold.
PAYLOADS = (
    "{__import__('os').system('PWNED')}",
    '"\nPWNED()\n"',
    "x\n    PWNED: 1",
    "${PWNED}; PWNED",
    '"""\nPWNED()\n"""',
    "x\nepochs: 666\nPWNED: /evil.pth #",
    "x\r\nimport PWNED",
    "coding: utf-7 +AAo-import PWNED+AAo-",
    "'; PWNED ~ #",
    "*/ */ --> {{ PWNED }} %s {0} $HOME `PWNED`",
    "a\u2028PWNED()\u0085PWNED()\x0cPWNED()",
    "\x00",
    "\ud800",
    "x" * 5000,
)


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


def programs(emitted: Emitted) -> Iterator[tuple[str, str]]:
    yield emitted.filename, emitted.text
    yield from emitted.modules.items()


def runs_it(emitted: Emitted) -> bool:
    """Whether the mark is more than a text or a comment anywhere."""
    for filename, text in programs(emitted):
        if filename.endswith(".py"):
            for node in ast.walk(ast.parse(text.encode())):  # as Python reads its encoding
                names = {getattr(node, name, "") for name in ("id", "attr", "name", "module")}
                if MARK in names:
                    return True
                if isinstance(node, ast.FormattedValue) and MARK in ast.unparse(node):
                    return True
        elif MARK in "".join(keys_of(yaml.safe_load(text.encode()))):  # JSON is YAML
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
    text = json.dumps(document_of())
    others = [target for target in TARGETS if target != "pytorch"]
    written = 0
    # Of a list, its first.
    found = [p for p in texts(json.loads(text)) if not any(isinstance(k, int) and k for k in p)]
    for number, place in enumerate(found):
        payloads = [PAYLOADS[(number + step) % len(PAYLOADS)] for step in range(2)]
        tried = [("pytorch", payload) for payload in {*PAYLOADS[:2], *payloads}]
        tried += [(others[number % len(others)], payload) for payload in payloads]
        for target, payload in tried:
            try:
                emitted = emit(json.loads(changed(text, place, json.dumps(payload))), target)
            except PlannerError:
                continue
            written += 1
            assert not runs_it(emitted), (place, target, payload)
    assert written > 20


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
