"""A factory of the user's own: found where `python -m` would find it, and every fault in words."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

from planner.core.errors import PlannerError, UsageError
from planner.core.schema import FactoryModel, TrainSetting
from planner.libraries.building import check_factory, load_factory

FACTORIES = """
    from torch import nn

    number = 3

    class Head(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)

    def build():
        print("building")
        return nn.Linear(2, 2)

    def nothing():
        pass

    def the_class():
        return nn.Linear

    def raises():
        raise ValueError("depths and heads\\ndiffer")

    def leaves():
        raise SystemExit(3)

    class Zoo:
        @staticmethod
        def small():
            return nn.Linear(1, 1)
"""


@pytest.fixture
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's in the current directory, which is not on sys.path."""
    pytest.importorskip("torch")
    name = f"own_models_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(FACTORIES))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def test_builds_a_module_and_keeps_what_it_prints_off_standard_output(
    own_models: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch import nn

    for attribute in ("build", "Head", "Zoo.small"):
        assert isinstance(load_factory(f"{own_models}:{attribute}")(), nn.Module)
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err == "building\n"


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("nothing", r"returned None"),
        ("the_class", r"returned the class Linear"),
        ("raises", r"raised ValueError: depths and heads differ at .*\.py:21"),
        ("leaves", r"raised SystemExit: 3"),
    ],
)
def test_a_factory_at_fault(own_models: str, attribute: str, message: str) -> None:
    from planner.training.tasks import task_for

    with pytest.raises(PlannerError, match=message) as caught:
        task_for(FactoryModel(factory=f"{own_models}:{attribute}"), TrainSetting())
    assert caught.value.way_out
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("swin", r"written package\.module:name"),
        ("a.b:", r"written package\.module:name"),
        ("no_such_package_here:build", r"no module 'no_such_package_here'"),
    ],
)
def test_a_name_that_leads_nowhere(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_factory(spec)


def test_a_file_in_place_of_a_module_is_told_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("def build(): ...")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="is a file") as caught:
        check_factory("mine.py:build")
    assert caught.value.way_out == "Write mine:build."
    check_factory("mine:build")


def test_a_module_that_is_loaded_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a program made itself has no spec by which importlib would find it."""
    monkeypatch.setitem(sys.modules, "made_here", ModuleType("made_here"))
    check_factory("made_here:build")


def test_a_misspelt_name_gets_the_nearest_and_a_value_is_no_factory(own_models: str) -> None:
    with pytest.raises(UsageError, match=r"Did you mean 'build'"):
        load_factory(f"{own_models}:buidl")
    with pytest.raises(UsageError, match="is a value of type int, and a factory is a function"):
        load_factory(f"{own_models}:number")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_library_here", "raised ModuleNotFoundError"),
        ("1 / 0", r"raised ZeroDivisionError: division by zero at .*\.py:1"),
        ("def build(:", r"raised SyntaxError: .* \(.*\.py, line 1\)\.\n"),
    ],
)
def test_a_module_that_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    name = f"broken_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(PlannerError, match=message) as caught:
        load_factory(f"{name}:build")
    assert not isinstance(caught.value, UsageError)


def test_a_factory_of_the_running_program_is_for_no_other_process() -> None:
    with pytest.raises(UsageError, match="Write it into a file of the current folder: my_model:b"):
        check_factory("__main__:build")
