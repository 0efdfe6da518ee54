"""A training held against its plan: what is counted in a loop, and which differences are told."""

import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import planner
from planner.core.errors import UsageError
from planner.core.files import to_json
from planner.core.schema import TrainSetting
from planner.core.units import GIB
from planner.libraries.torchvision import declare_missing_operators
from planner.programs.explanation import LogReading
from planner.programs.watch import (
    WARM_UP_STEPS,
    Planned,
    Seen,
    Watch,
    differences,
    figures,
    read_plan,
)
from tests.trainers.cases import recommendation, run_here, tiny

PLAN = Planned("measured", "card", 64, 1000.0, 0.0, {"allocated": 8 * GIB, "reserved": 9 * GIB})
AS_PLANNED = Seen(steps=10, images=640, seconds=0.65, waited=0.02, gpu="card", peaks=PLAN.peaks)
BATCH, IMAGES, CLASSES = 4, 32, 4
STEPS = IMAGES // BATCH


def test_a_loop_is_timed_without_its_warm_up_its_pauses_and_what_comes_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 4 s a step 3 are spent waiting; the warm-up takes a minute, a validation an hour."""
    now = [0.0]
    monkeypatch.setattr("planner.programs.watch.perf_counter", lambda: now[0])

    def slow() -> Iterator[list[torch.Tensor]]:
        for _ in range(WARM_UP_STEPS + 12):
            now[0] += 3.0
            yield [torch.zeros(BATCH, 3)]

    said: list[str] = []
    with planner.watch(every_seconds=40, say=said.append) as watch:
        now[0] += 60.0
        for number, _ in enumerate(watch.batches(slow())):
            now[0] += 1.0
            watch.step()
            if number == WARM_UP_STEPS + 2:
                with watch.pause():
                    now[0] += 3600.0
        now[0] += 4.0
        watch.step(5 * BATCH)
    after_pause = "planner.watch: step 9: 1 images/s, 75% waiting for data"
    assert said[:2] == [after_pause, "planner.watch: waiting for data: 75% of the time was spent "
                        "waiting for batches."]  # fmt: skip
    rest = (8 + 5) * BATCH / (9 * 4.0)
    assert said[2:] == [f"planner.watch: step 18: {rest:.4g} images/s, 67% waiting for data"]


def test_each_rank_tells_what_differs_and_the_first_its_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", "3")
    (tmp_path / "recommendation.json").write_text(recommendation().model_dump_json())
    said: list[str] = []
    with planner.watch(tmp_path, every_seconds=0, say=said.append) as watch:
        for _ in range(WARM_UP_STEPS + 3):
            watch.step(1)
    kinds = [line.split(": ")[2] for line in said]
    assert kinds == ["other batch", "other device"]
    assert {line.partition(": ")[0] for line in said} == {"[rank3]"}


DIFFERENCES: dict[str, Seen] = {
    "more allocated than planned": replace(AS_PLANNED, peaks={"allocated": int(8.5 * GIB)}),
    "more reserved than planned": replace(AS_PLANNED, peaks={"reserved": 10 * GIB}),
    "slower than planned": replace(AS_PLANNED, seconds=0.75),
    "waiting for data": replace(AS_PLANNED, waited=0.2),
    "allocator retries": replace(AS_PLANNED, retries=2),
    "other batch": replace(AS_PLANNED, steps=20),
    "other device": replace(AS_PLANNED, seconds=9.0, gpu="another"),
}


@pytest.mark.parametrize("kind", DIFFERENCES)
def test_each_difference_is_a_sentence_that_explain_knows(kind: str) -> None:
    assert differences(AS_PLANNED, PLAN) == {}
    found = differences(DIFFERENCES[kind], PLAN)
    assert list(found) == [kind]
    log = f"2026-11-30 WARNING [rank1]: planner.watch: {kind}: {found[kind]}\n".encode()
    assert list(LogReading().read(BytesIO(log)).findings) == [kind]


def test_a_prediction_is_told_by_its_range_and_without_a_rate_nothing_is() -> None:
    """A rate that may be 35% less is not slower at 30% less."""
    predicted = replace(PLAN, basis="predicted", doubt=0.35)
    assert differences(replace(AS_PLANNED, seconds=0.9), predicted) == {}
    assert (
        "predicted"
        in differences(replace(AS_PLANNED, seconds=1.0), predicted)["slower than planned"]
    )
    assert differences(replace(AS_PLANNED, gpu="another"), replace(PLAN, rate=None)) == {}
    assert differences(replace(AS_PLANNED, seconds=100.0), None) == {}


def test_figures_stand_beside_those_of_the_plan() -> None:
    assert figures(AS_PLANNED, PLAN) == (
        "984.6 images/s (plan: 1,000), 3% waiting for data, peak allocated 8.00 GiB "
        "(plan: 8.00 GiB), peak reserved 9.00 GiB (plan: 9.00 GiB)"
    )


def test_plans_are_read_from_all_that_planner_writes(tmp_path: Path) -> None:
    found = recommendation()
    (tmp_path / "recommendation.json").write_text(found.model_dump_json())
    for plan in (found, tmp_path, str(tmp_path / "recommendation.json")):
        said = read_plan(plan)
        assert said.basis == "measured"
        assert said.rate == found.evidence.images_per_second  # type: ignore[union-attr]
    estimate = planner.estimate("native:swin_tiny", batch_size=8, accumulate=2, gpu="rtx 3090")
    advice = planner.advise("native:swin_tiny", batch_size=8, gpu="rtx 3090")
    for name, answer in (("estimate", [to_json(estimate)]), ("advice", to_json(advice))):
        (tmp_path / f"{name}.json").write_text(json.dumps(answer))
    for plan in (estimate, tmp_path / "estimate.json"):
        said = read_plan(plan)
        assert (said.basis, said.images) == ("predicted", 16)
        assert said.gpu == estimate.gpu
        assert said.peaks == {
            "allocated": estimate.peak_allocated_bytes, "reserved": estimate.peak_reserved_bytes
        }  # fmt: skip
    assert read_plan(tmp_path / "advice.json").rate == advice.recommended.images_per_second  # type: ignore[union-attr]
    for broken in (7, tmp_path / "none", {"a": 1}):
        with pytest.raises(UsageError):
            planner.watch(broken)


# In each trainer, really run on the CPU with a tiny model.

declare_missing_operators()  # of torchvision, which trainers import


class counted(Watch):  # noqa: N801
    """The images of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def step(self, images: int | None = None) -> None:
        self.steps.append(images or self._pending)
        super().step(images)


@pytest.mark.trainers
def test_transformers(tmp_path: Path) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, CLASSES)

        def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
            logits = self.head(pixel_values)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    data = [{"pixel_values": torch.randn(8), "labels": i % CLASSES} for i in range(2 * IMAGES)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"), per_device_train_batch_size=BATCH, num_train_epochs=2,
        gradient_accumulation_steps=2, report_to=[], use_cpu=True, eval_strategy="epoch",
        disable_tqdm=True,
    )  # fmt: skip
    with counted() as watch:
        trainer = Trainer(Model(), arguments, train_dataset=data, eval_dataset=data[:8],
                          callbacks=[watch.callback(TrainerCallback)])  # fmt: skip
        trainer.train()
    assert watch.steps == [2 * BATCH] * 2 * STEPS


@pytest.mark.trainers
def test_lightning(tmp_path: Path) -> None:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, CLASSES)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            images, targets = batch
            return nn.functional.cross_entropy(self.inner(images), targets)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    data = TensorDataset(torch.randn(IMAGES, 8), torch.randint(CLASSES, (IMAGES,)))
    with counted() as watch:
        trainer = pl.Trainer(
            max_epochs=4, accumulate_grad_batches=2, accelerator="cpu", logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=tmp_path, callbacks=[watch.callback(pl.Callback)],
        )  # fmt: skip
        trainer.fit(Module(), DataLoader(data, BATCH))
    assert watch.steps == [2 * BATCH] * (4 * STEPS // 2)


@pytest.mark.trainers
def test_the_emitted_script_is_watched_and_profiled_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setting = TrainSetting(batch_size=4, accumulate=2, precision="fp32")
    plan = recommendation(tiny(), setting)
    plan = plan.model_copy(update={"device": plan.device.model_copy(update={"kind": "cpu"})})
    (tmp_path / "plan.json").write_text(plan.model_dump_json())
    emitted = planner.emit(plan, "pytorch")
    run_here(emitted, tmp_path, "--synthetic", "--steps", "8", "--watch", "plan.json",
             "--profile", "TRACED")  # fmt: skip
    traced = json.loads(gzip.decompress((tmp_path / "TRACED/trace.json.gz").read_bytes()))
    names = [str(event.get("name")) for event in traced["traceEvents"]]
    assert names.count("aten::convolution_backward") == 3 * setting.accumulate  # steps 3 to 5
    (line, *_) = capsys.readouterr().err.splitlines()
    assert re.match(r"planner.watch: step 8: [\d.]+ images/s \(plan: 1,280\), \d+% waiting", line)
