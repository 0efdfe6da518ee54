"""A task and a library's model are tuned on the CPU, and the script that is written trains them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("torch")

import search
from planner.core.errors import ContractError, PlannerError, UnsupportedError
from planner.core.schema import FactoryModel, Model, TrainSetting
from planner.core.schema.result import Recommendation
from planner.libraries.resolve import resolve_model
from planner.trainers.emission import TARGETS, emit, emit_setting
from planner.trainers.plan import Plan
from planner.trainers.task_script import write_task_script
from search.loop.progress_text import progress_line
from search.report.recommendation import recommendation_text
from search.report.report import write_report

OWN = """
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Volumes:
        unit = "volumes"

        def module(self):
            return nn.Conv3d(1, 2, 3, padding=1)

        def batch(self, size, device):
            return torch.randn(size, 1, 8, 8, 8), torch.randint(2, (size, 8, 8, 8))

        def loss(self, module, batch):
            return F.cross_entropy(module(batch[0]), batch[1])

    class OwnOptimizer(Volumes):
        def optimizer(self, parameters):
            return torch.optim.Adagrad(parameters, lr=0.1)

    class Detached(Volumes):
        def loss(self, module, batch):
            return super().loss(module, batch).detach()

    class Unknown(Volumes):
        def loss(self, module, batch):
            return super().loss(module, batch) + log.detach()

    class NoLoss:
        module, batch = Volumes.module, Volumes.batch

    def tokens():
        return nn.Embedding(10, 10)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_volumes.py").write_text(textwrap.dedent(OWN))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def need(library: str) -> None:
    """Skips where `library` is not installed."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")


ONE = {"precision": ["fp32"], "compile": ["off"], "checkpointing": ["none"]}


def tune(
    model: Model, folder: Path, trials: int = 1, restrict: dict[str, list[str]] = ONE,
    lines: list[str] | None = None,
) -> Recommendation:  # fmt: skip
    """`lines` hears what is shown."""
    heard = [] if lines is None else lines
    return search.tune(
        model, device="cpu", batch_size=[2], trials=trials, output=folder, restrict=restrict,
        on_progress=lambda progress: heard.append(progress_line(progress)),
    )  # fmt: skip


def run(script: str, folder: Path, *rate: str) -> str:
    (folder / "train.py").write_text(script)
    ended = subprocess.run(
        [sys.executable, "train.py", "--steps", "2", *rate, "--log-every", "1",
         "--output", "kept"],
        capture_output=True, text=True, timeout=300, check=False, cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert (folder / "kept" / "last.pt").is_file()
    shutil.rmtree(folder / "kept")
    return ended.stdout


def test_a_task_is_tuned_and_its_script_trains(own: Path) -> None:
    said: list[str] = []
    found = tune(FactoryModel(factory="own_volumes:Volumes"), own / "tuned", lines=said)
    assert found.evidence is not None, found.advice
    assert found.evidence.unit == "volumes"
    script = emit(own / "tuned", "pytorch").text
    page = write_report(str(own / "tuned"), own / "page.html").read_text()
    for told in ("\n".join(said), recommendation_text(found), script, page):
        assert " volumes/s" in told
        assert "images/s" not in told
    assert "it yields BATCH_SIZE volumes at a time" in script
    assert "step 2/2  rate" in run(script, own, "--lr", "0.1")
    for target in set(TARGETS) - {"pytorch"}:
        with pytest.raises(UnsupportedError, match="--for pytorch"):
            emit(own / "tuned", target)


@pytest.mark.parametrize(
    "fields",
    [
        {"precision": "bf16", "accumulate": 2, "ema": True, "clip_grad": True},
        *(
            pytest.param(fields, marks=pytest.mark.release)
            for fields in (
                {"checkpointing": "blocks", "precision": "fp32"},
                {"checkpointing": "blocks:every-2", "precision": "fp32"},
                {"checkpointing": "selective", "precision": "bf16"},
                {"precision": "fp16", "memory_format": "channels_last", "optimizer": "sgd"},
            )
        ),
    ],
)
@pytest.mark.trainers
def test_the_script_says_the_whole_setting(own: Path, fields: dict[str, object]) -> None:
    need("timm")
    model = resolve_model("torchvision:resnet18", {"image_size": "32", "num_classes": "4"})
    setting = TrainSetting.model_validate({"batch_size": 2, **fields})
    script = emit_setting(model, setting, "pytorch").text
    assert ("checkpoint_as_set(model" in script) is (setting.checkpointing != "none")
    assert "step 2/2  rate" in run(script, own, "--lr", "0.1")


@pytest.mark.trainers
def test_the_script_checkpoints_the_blocks_that_the_task_names(own: Path) -> None:
    """Its forward runs again in backward."""
    with (own / "own_volumes.py").open("a") as file:
        file.write(
            textwrap.dedent("""
                class Layer(nn.Conv3d):
                    def forward(self, x):
                        print("backward" if torch._C._current_graph_task_id() != -1 else "forward")
                        return super().forward(x)

                class Named(Volumes):
                    def module(self):
                        return nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), Layer(2, 2, 1))

                    def blocks(self, module):
                        return [module[1]]
            """)
        )
    model = FactoryModel(factory="own_volumes:Named")
    setting = TrainSetting(batch_size=2, precision="fp32", checkpointing="blocks")
    plan = Plan(model, setting, ("planner",), device="cpu", unit="volumes")
    printed = run(write_task_script(plan, "train.py").text, own, "--lr", "0.1")
    assert printed.split().count("backward") == printed.split().count("forward") == 2


def test_an_optimizer_of_its_own_is_no_axis(own: Path) -> None:
    """And is called so; the script makes it, and asks for no rate."""
    model, restrict = FactoryModel(factory="own_volumes:OwnOptimizer"), {**ONE}
    found = tune(model, own / "tuned", trials=5, restrict=restrict)
    assert found.setting is not None
    assert (found.num_candidates, found.num_probes) == (1, 1), "one batch, one precision …"
    assert "batch 2, fp32, own optimizer, checkpointing none" in recommendation_text(found)
    script = emit(own / "tuned", "pytorch")
    assert "--lr" not in f"{script.text}{script.warnings}"
    assert "step 2/2  rate" in run(script.text, own)
    with pytest.raises(UnsupportedError, match="makes its own optimizer, and not sgd"):
        tune(model, own / "other", restrict={**ONE, "optimizer": ["adamw", "sgd"]})


@pytest.mark.parametrize(
    ("name", "message", "way_out"),
    [
        ("Detached", "does not depend on any parameter", "Compute it from what the module returns"),
        ("Unknown", r"loss\(\) of .* raised NameError at .*: name 'log'", "It was called as loss("),
    ],
)
def test_a_contract_that_is_not_kept_ends_a_search_at_its_first_probe(
    own: Path, name: str, message: str, way_out: str
) -> None:
    """Nothing is kept of it: once the task is mended, the same command begins where it did."""
    model = FactoryModel(factory=f"own_volumes:{name}")
    said: list[str] = []
    with pytest.raises(ContractError, match=message) as caught:
        tune(model, own / "tuned", trials=5, restrict={}, lines=said)
    assert caught.value.way_out.startswith(way_out)
    assert sum("] probe" in line for line in said) == 1
    assert (own / "tuned" / "probes.jsonl").read_text() == ""
    mended = (own / "own_volumes.py").read_text().replace(".detach()", "").replace(" + log", "")
    (own / "own_volumes.py").write_text(mended)
    assert tune(model, own / "tuned").status == "recommended"


def test_a_task_that_lacks_a_method_is_told_before_any_probe(own: Path) -> None:
    with pytest.raises(PlannerError, match=r"a task without loss\(module, batch\)"):
        tune(FactoryModel(factory="own_volumes:NoLoss"), own / "tuned")
    assert not (own / "tuned").exists()


def test_a_step_that_breaks_in_a_probe_is_told_of_tasks(own: Path) -> None:
    found = tune(FactoryModel(factory="own_volumes:tokens", image_size=(8, 8)), own / "tuned")
    assert found.status == "nothing_fits"
    assert "return a task from the factory" in found.advice
