"""What a search was asked comes back: from what its result keeps, and from the command it shows."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from planner.cli.measure import TuneRequest, keywords
from planner.cli.measure import tune as command
from planner.core.errors import UsageError
from planner.core.schema import FactoryModel, NamedModel, TrainSetting
from planner.core.schema.validation import declared_options
from planner.libraries.named import override_named
from planner.libraries.resolve import resolve_model
from search.loop.options import SearchOptions
from search.loop.request import kept_options, model_flags, read_options, tune_command

# Each way to say every option, with values that a shell or a parser could spoil.
SAID: list[dict[str, Any]] = [
    {},
    {"batch_size": 32, "trials": 20, "budget_seconds": 90, "output": Path("my runs/it's $HOME")},
    {"batch_size": [8, 16], "budget_seconds": None, "tolerance": 0.003, "headroom": 0.07},
    {"budget_seconds": 5400.0, "memory_bytes": 24 * 1024**3, "device": "cuda:1"},
    {"budget_seconds": 0.1 + 0.2, "memory_bytes": "24GB", "epochs": 0.1},
    {"epochs": 300, "accept_different": True},
    {"restrict": {"checkpointing": ("none", "blocks", "stages:0,1"), "precision": "bf16"}},
    {"restrict": {"ema": (False, True), "frozen_stages": (0, 2), "optimizer": "adamw-fused"}},
    {"base": {"accumulate": 4}, "steps": 1000, "storage": "a.journal"},
    {"gpus": 2, "allocator": "expandable_segments:True,max_split_size_mb:64"},
    {"gpus": 4, "restrict": {"parallelism": ("fsdp", "ddp")}, "global_batch": 512},
    {"data": "my pictures", "headroom": 0.0},
    {"trials": 0},
    {"start": {"batch_size": 24, "checkpointing": "stages:0,1", "optimizer": "adamw-fused"}},
]


def typed(line: str) -> SearchOptions:
    """What the command itself makes of a line for a shell."""
    program, name, *words = shlex.split(line)
    assert (program, name) == ("planner", "tune")
    asked = keywords(TuneRequest.read(command.make_context("tune", words).params))
    del asked["model"]
    return SearchOptions.of(asked)  # type: ignore[typeddict-item]


@pytest.mark.parametrize("said", SAID)
def test_the_command_means_what_was_asked(said: Any) -> None:
    asked = SearchOptions.of(said)
    assert typed(tune_command("native:swin_tiny", asked)) == asked
    assert read_options(json.loads(json.dumps(kept_options(asked)))) == asked


def test_every_option_is_said_once_at_least() -> None:
    """Break: an option that is declared and whose way back nobody tries."""
    missing = {*declared_options(SearchOptions)} - {name for said in SAID for name in said}
    assert not missing


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (
            FactoryModel(factory="mine:build", image_size=(256, 192), in_channels=1),
            "mine:build --image-size 256,192 --set in_channels=1",
        ),
        (
            NamedModel(library="timm", name="vit", task="classification", image_size=(96, 96)),
            "timm:vit --image-size 96",
        ),
    ],
)
def test_what_a_model_s_title_leaves_open_is_said(
    model: FactoryModel | NamedModel, line: str
) -> None:
    """Break: the command of another model of that name."""
    assert tune_command(model.title, SearchOptions(), model_flags(model)) == f"planner tune {line}"
    params = command.make_context("tune", shlex.split(line)).params
    of_model = TuneRequest.read(params).fields.model
    if isinstance(model, FactoryModel):
        assert resolve_model(model.factory, of_model) == model
    else:
        assert override_named(model.model_copy(update={"image_size": (1, 1)}), of_model) == model


def test_a_base_from_python_is_said_by_options_of_the_command() -> None:
    """`base` may hold any field; the command says the same search in other words."""
    base = {"ema": True, "optimizer": "sgd", "world_size": 2, "parallelism": "ddp"}
    line = tune_command("native:swin_tiny", SearchOptions.of({"base": base}))
    again = typed(line)
    assert "--optimizer sgd,sgd-fused" in line, "as a search tries them where base names a family"
    assert (again.base.world_size, again.base.parallelism) == (2, "ddp")
    assert again.restrict["ema"] == (True,)


def test_what_a_base_says_of_axes_is_not_kept() -> None:
    """A whole setting is taken as base, whose axes are what is searched."""
    asked = SearchOptions.of({"base": TrainSetting(precision="fp32", batch_size=32)})
    kept = kept_options(asked)
    assert kept == {"base": {"batch_size": 32}}
    assert read_options(kept).asked.batch_size == 32


def test_no_password_is_kept() -> None:
    kept = kept_options(SearchOptions.of({"storage": "postgresql://me:secret@host/db"}))
    assert kept == {"storage": "postgresql://me:***@host/db", "base": {}}


@pytest.mark.parametrize("kept", [{"colour": 1}, {"headroom": "much"}, {"restrict": {"x": [1]}}])
def test_options_of_another_planner_are_refused(kept: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        read_options(kept)
