"""What of compilation each trainer's file says: scope, sizes, graph breaks, what is kept."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config
import yaml

from planner.core.schema import SwinConfig, TrainSetting
from planner.libraries.missing_operators import declare_missing_operators
from planner.trainers.emission import Emitted, emit_setting
from planner.training.tasks import task_for
from planner.training.tasks.compiling import blocks_to_compile
from tests.building import build_real
from tests.libraries.steps import needs
from tests.trainers.cases import FakeEstimator, executed, tiny

declare_missing_operators()
BUILDING = ("pytorch", "lightning", "accelerate", "deepspeed", "transformers")


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """What a file sets in its process."""
    with torch._functorch.config.patch(activation_memory_budget=1.0):
        limit = torch._dynamo.config.recompile_limit
        yield
        torch._dynamo.config.recompile_limit = limit


def emitted(target: str, model: SwinConfig | None = None, **fields: Any) -> Emitted:
    library = target if target in ("timm", "transformers") else "native"
    setting = TrainSetting(
        **{
            "batch_size": 4,
            "precision": "fp32",
            "compile": "default",
            "attention": "eager",
            **fields,
        }
    )
    model = model or tiny(library, num_classes=1000)
    return emit_setting(model, setting, target, estimator=FakeEstimator())


def compiled_in(module: torch.nn.Module) -> list[str]:
    return [n for n, inner in module.named_modules() if inner._compiled_call_impl is not None]


@needs("transformers")
@pytest.mark.parametrize(
    ("target", "checkpointing"),
    [("pytorch", "blocks"), *((target, "none") for target in BUILDING)],
)
def test_a_files_blocks_are_those_of_the_probe(target: str, checkpointing: str) -> None:
    library = "transformers" if target == "transformers" else "native"
    model = tiny(library, num_classes=1000)
    fields: dict[str, Any] = {"compile_scope": "blocks", "checkpointing": checkpointing}
    result = emitted(target, model, **fields)
    built = executed(result)["build_model"]()
    setting = TrainSetting(compile="default", attention="eager", **fields)
    module = build_real(model, setting)
    blocks = blocks_to_compile(module, task_for(model, setting), model)
    names = [name for name, inner in module.named_modules() if any(inner is b for b in blocks)]
    assert compiled_in(built) == names
    assert len(names) == 4
    assert "torch.compile(" not in (
        result.code or result.text
    )  # nothing around the blocks is compiled
    assert "dynamo_config" not in result.text


@needs("timm", "torchvision", "transformers")
@pytest.mark.parametrize("library", ["timm", "torchvision", "transformers"])
def test_the_script_finds_the_blocks_of_each_library(library: str) -> None:
    built = executed(emitted("pytorch", tiny(library), compile_scope="blocks"))["build_model"]()
    kinds = {type(built.get_submodule(name)).__name__ for name in compiled_in(built)}
    blocks = {"SwinTransformerBlock", "SwinLayer"} & kinds
    assert blocks
    assert kinds <= {*blocks, "PatchMerging"}


def test_graphs_without_breaks() -> None:
    fields: dict[str, Any] = {"compile_fullgraph": True}
    for target in ("pytorch", "lightning"):
        assert 'mode="default", dynamic=False, fullgraph=True)' in emitted(target, **fields).text
    assert '"dynamic": False, "fullgraph": True' in emitted("deepspeed", **fields).code
    config = yaml.safe_load(emitted("accelerate", **fields).text)["dynamo_config"]
    assert (config["dynamo_use_dynamic"], config["dynamo_use_fullgraph"]) == (False, True)
    names = executed(emitted("mmengine", **fields).text)
    assert names["compile"] == {
        "backend": "inductor", "mode": "default", "dynamic": False, "fullgraph": True,
    }  # fmt: skip


@needs("transformers")
@pytest.mark.parametrize("target", BUILDING)
def test_a_file_sets_what_the_compiler_keeps(target: str) -> None:
    result = emitted(target, activation_memory_budget=0.5)
    executed(result)
    assert "import torch._functorch.config\n" in (
        result.code or result.text
    )  # torch does not by itself
    assert torch._functorch.config.activation_memory_budget == 0.5


@pytest.mark.compiler
def test_the_script_runs(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"compile_scope": "blocks", "activation_memory_budget": 0.5}
    found, script = (
        emitted("pytorch", tiny(depths=(2,), num_heads=(1,)), **fields),
        tmp_path / "train.py",
    )
    for name, text in {script.name: found.text, **found.beside}.items():
        (tmp_path / name).write_text(text)
    command = [sys.executable, str(script), "--synthetic", "--steps", "2", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert "loss" in done.stdout
