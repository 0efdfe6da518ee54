"""A task and a library's model are tuned on the CPU, and the script that is written trains them.

Probes run in this process; tests/cli/test_tune.py has one in a process of its own.
"""

from __future__ import annotations

import math
import os
import sys
import textwrap
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

import search
from planner.core.errors import ContractError, UnsupportedError
from planner.core.schema import FactoryModel, MeasurementRecord, TrainSetting
from planner.core.schema.record import Recommendation
from planner.libraries.resolve import resolve_model
from planner.trainers.emission import TARGETS, emit, emit_setting
from planner.trainers.plan import Emitted
from search.loop.progress import progress_line
from search.loop.space import Choice
from search.probe.device import describe_device
from search.probe.parent.runner import _record
from search.probe.protocol import ProbeRequest, Report
from search.probe.worker.measure import measure
from search.runs.writing import write_report
from search.tuning.own_model import with_own_optimizer
from tests.answers import recommendation_text
from tests.libraries.steps import needs
from tests.trainers.cases import recommendation, run_here

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


    def tokens():
        return nn.Embedding(10, 10)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(textwrap.dedent(OWN))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return tmp_path


class InThisProcess:
    """A prober: some steps of `mine:name`, as a worker would take them."""

    def __init__(self, name: str) -> None:
        self.model = FactoryModel(factory=f"mine:{name}", image_size=(8, 8))
        self.num_probes = 0

    def __call__(self, choice: Choice, probe_id: str, deadline_seconds: float) -> MeasurementRecord:
        self.num_probes += 1
        request = ProbeRequest(
            probe_id=probe_id, model=self.model, setting=choice.candidate.setting, max_steps=2
        )
        reading, writing = os.pipe()
        try:
            outcome = measure(request, math.inf, Report(writing, probe_id))
        finally:
            os.close(reading)
            os.close(writing)
        return _record(request, describe_device("cpu"), "2026-11-29", time.monotonic(), outcome)


def tune(
    prober: InThisProcess, folder: Path, trials: int = 1, lines: list[str] | None = None
) -> Recommendation:
    """`lines` hears what is shown."""
    heard = [] if lines is None else lines
    return search.tune(
        prober.model, device="cpu", batch_size=[2], trials=trials, output=folder, estimator=None,
        restrict={"precision": ["fp32"], "compile": ["off"], "checkpointing": ["none"]},
        prober=prober,
        on_progress=lambda progress: heard.append(progress_line(progress)),
    )  # fmt: skip


def trained(emitted: Emitted, folder: Path, *rate: str) -> str:
    """What the script prints of two steps."""
    sys.modules.pop("mine", None)  # a probe has imported it
    said = run_here(emitted, folder, "--steps", "2", *rate, "--log-every", "1", "--output", "kept")
    assert (folder / "kept" / "last.pt").is_file()
    return said


def test_a_task_is_tuned_and_its_script_trains(own: Path) -> None:
    said: list[str] = []
    found = tune(InThisProcess("Volumes"), own / "tuned", lines=said)
    assert found.evidence is not None, found.advice
    assert found.evidence.unit == "volumes"
    emitted = emit(own / "tuned", "pytorch")
    page = write_report(str(own / "tuned"), own / "page.html").read_text()
    printed = trained(emitted, own, "--lr", "0.1")
    assert "step 2/2  epoch" in printed
    for told in ("\n".join(said), recommendation_text(found), printed, page):
        assert " volumes/s" in told
        assert "images/s" not in told
    for target in set(TARGETS) - {"pytorch"}:
        with pytest.raises(UnsupportedError, match="--for pytorch"):
            emit(own / "tuned", target)


@needs("torchvision")
def test_the_script_says_the_whole_setting(own: Path) -> None:
    model = resolve_model("torchvision:resnet18", {"image_size": "32", "num_classes": "4"})
    setting = TrainSetting(batch_size=2, precision="bf16", accumulate=2, ema=True, clip_grad=True)
    emitted = emit_setting(model, setting, "pytorch")
    assert "levers.py" not in emitted.modules
    assert "step 2/2  epoch" in trained(emitted, own, "--lr", "0.1")


def test_the_script_checkpoints_the_blocks_that_the_task_names(own: Path) -> None:
    """Its forward runs again in backward."""
    with (own / "mine.py").open("a") as file:
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
    model = FactoryModel(factory="mine:Named")
    setting = TrainSetting(batch_size=2, precision="fp32", checkpointing="blocks")
    found = recommendation(setting=setting)
    assert found.evidence is not None
    evidence = found.evidence.model_copy(update={"unit": "volumes"})
    told = found.model_copy(update={"model": model, "evidence": evidence})
    printed = trained(emit(told, "pytorch"), own, "--lr", "0.1")
    assert printed.split().count("backward") == printed.split().count("forward") == 2


def test_an_optimizer_of_its_own_is_no_axis(own: Path) -> None:
    """And is called so; the script makes it, and asks for no rate."""
    prober = InThisProcess("OwnOptimizer")
    base = with_own_optimizer(TrainSetting(batch_size=2, precision="fp32"), {}, "mine")
    with pytest.raises(UnsupportedError, match="makes its own optimizer, and not sgd"):
        with_own_optimizer(base, {"optimizer": ["adamw", "sgd"]}, prober.model.title)
    found = tune(prober, own / "tuned")
    assert found.evidence is not None
    evidence = found.evidence.model_copy(update={"setting": base})
    found = found.model_copy(update={"setting": base, "evidence": evidence})
    assert "batch 2, fp32, own optimizer, checkpointing none" in recommendation_text(found)
    script = emit(found, "pytorch")
    assert "--lr" not in f"{script.launch}{script.warnings}"
    assert "step 2/2  epoch" in trained(script, own)


def test_a_contract_that_is_not_kept_ends_a_search_at_its_first_probe(own: Path) -> None:
    """Nothing is kept of it: once the task is mended, the same command begins where it did."""
    prober = InThisProcess("Detached")
    with pytest.raises(ContractError, match="does not depend on any parameter") as caught:
        tune(prober, own / "tuned", trials=5)
    assert caught.value.way_out.startswith("Compute it from what the module returns")
    assert prober.num_probes == 1
    assert not (own / "tuned" / "probes.jsonl").exists()
    mended = (own / "mine.py").read_text().replace(".detach()", "")
    (own / "mine.py").write_text(mended)
    del sys.modules["mine"]
    assert tune(prober, own / "tuned").status == "recommended"
