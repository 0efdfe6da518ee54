"""A task and a library's model are tuned on the CPU, and the script that is written trains them.

Probes run in this process; tests/cli/test_tune.py has one in a process of its own.
"""

import math
import os
import sys
import time
from pathlib import Path

import pytest

import search
from planner.core.errors import ContractError, UnsupportedError
from planner.core.schema import FactoryModel, MeasurementRecord, TrainSetting
from planner.core.schema.record import Recommendation
from planner.trainers.emission import emit
from planner.trainers.plan import Emitted
from planner.trainers.registry import TARGETS
from search.loop.prober import progress_line
from search.loop.space import Pick
from search.probe.device import describe_device
from search.probe.parent import _record
from search.probe.protocol import ProbeRequest, Report
from search.probe.worker.measure import measure
from search.runs import write_report
from search.tuning.tune import with_own_optimizer
from tests.answers import recommendation_text
from tests.tasks.conftest import change
from tests.trainers.cases import recommendation, run_here


class InThisProcess:
    """A prober: some steps of `mine:name`, as a worker would take them."""

    def __init__(self, name: str) -> None:
        self.model = FactoryModel(factory=f"mine:{name}", image_size=(8, 8))
        self.num_probes = 0

    def __call__(self, pick: Pick, probe_id: str, deadline_seconds: float) -> MeasurementRecord:
        self.num_probes += 1
        request = ProbeRequest(
            probe_id=probe_id, model=self.model, setting=pick.candidate.setting, max_steps=2
        )
        with Path(os.devnull).open("wb") as nobody:
            outcome = measure(request, math.inf, Report(nobody.fileno()))
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
    found = tune(InThisProcess("Volumes"), own.parent / "tuned", lines=said)
    assert found.evidence is not None, found.advice
    assert found.evidence.unit == "volumes"
    emitted = emit(own.parent / "tuned", "pytorch")
    page = write_report(str(own.parent / "tuned"), own.parent / "page.html").read_text()
    printed = trained(emitted, own.parent, "--lr", "0.1")
    assert "step 2/2  epoch" in printed
    for told in ("\n".join(said), recommendation_text(found), printed, page):
        assert " volumes/s" in told
        assert "images/s" not in told
    for target in set(TARGETS) - {"pytorch"}:
        with pytest.raises(UnsupportedError, match="--for pytorch"):
            emit(own.parent / "tuned", target)


def test_the_script_checkpoints_the_blocks_that_the_task_names(own: Path) -> None:
    """Its forward runs again in backward."""
    layer = """
        def module(self):
            class Layer(nn.Conv3d):
                def forward(self, x):
                    print("backward" if torch._C._current_graph_task_id() != -1 else "forward")
                    return super().forward(x)

            return nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), Layer(2, 2, 1))

        def blocks(self, module):
            return [module[1]]
    """
    change(own, layer)
    model = FactoryModel(factory="mine:Changed")
    setting = TrainSetting(batch_size=2, precision="fp32", checkpointing="blocks")
    found = recommendation(setting=setting)
    assert found.evidence is not None
    evidence = found.evidence.model_copy(update={"unit": "volumes"})
    told = found.model_copy(update={"model": model, "evidence": evidence})
    printed = trained(emit(told, "pytorch"), own.parent, "--lr", "0.1")
    assert printed.split().count("backward") == printed.split().count("forward") == 2


def test_an_optimizer_of_its_own_is_no_axis(own: Path) -> None:
    """And is called so; the script makes it, and asks for no rate."""
    prober = InThisProcess("OwnOptimizer")
    base = with_own_optimizer(TrainSetting(batch_size=2, precision="fp32"), {}, "mine")
    with pytest.raises(UnsupportedError, match="makes its own optimizer, and not sgd"):
        with_own_optimizer(base, {"optimizer": ["adamw", "sgd"]}, prober.model.title)
    found = tune(prober, own.parent / "tuned")
    assert found.evidence is not None
    evidence = found.evidence.model_copy(update={"setting": base})
    found = found.model_copy(update={"setting": base, "evidence": evidence})
    assert "batch 2, fp32, own optimizer, checkpointing none" in recommendation_text(found)
    script = emit(found, "pytorch")
    assert "--lr" not in f"{script.launch}{script.warnings}"
    assert "step 2/2  epoch" in trained(script, own.parent)


def test_a_contract_that_is_not_kept_ends_a_search_at_its_first_probe(own: Path) -> None:
    """Nothing is kept of it: once the task is mended, the same command begins where it did."""
    plain = own.read_text()
    change(own, "def loss(self, module, batch): return super().loss(module, batch).detach()")
    prober = InThisProcess("Changed")
    with pytest.raises(ContractError, match="does not depend on any parameter") as caught:
        tune(prober, own.parent / "tuned", trials=5)
    assert caught.value.way_out.startswith("Compute it from what the module returns")
    assert prober.num_probes == 1
    assert not (own.parent / "tuned" / "probes.jsonl").exists()
    own.write_text(plain)
    del sys.modules["mine"]
    assert tune(prober, own.parent / "tuned").status == "recommended"
