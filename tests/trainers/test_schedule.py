"""The learning rate of a whole training, as each trainer's file sets it: one curve.

Read back with the trainer's own classes where they are installed (timm, transformers, torch), else
from its keys. A share of the training is written as an epoch of 300.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from planner.core.schema import TrainSetting
from planner.libraries.missing_operators import declare_missing_operators
from planner.trainers.emission import TARGETS, emit_setting
from tests.libraries.steps import needs
from tests.trainers.cases import FakeEstimator, executed, tiny
from tests.trainers.test_recipe import LIBRARIES, values

declare_missing_operators()
import torch  # noqa: E402

pytestmark = needs("timm", "transformers")

EPOCHS, PER_EPOCH = 300, 4  # PER_EPOCH optimizer steps
BATCHES = {"batch_size": 32, "accumulate": 4, "world_size": 2, "precision": "fp32"}
RATE = 5e-4 * 32 * 4 * 2 / 512  # Swin's own 5e-4 for 512 images, scaled to the global batch
# Derived: a straight line from RATE / 1000 at 0 to RATE at 20; then half a cosine, which is half
# way between RATE and RATE / 100 at 20 + 280 / 2, down to RATE / 100.
CURVE = {0: 1e-3, 5: 0.25075, 10: 0.5005, 20: 1.0, 160: 0.505, 300: 0.01}

Rates = dict[int, float]
"""epoch -> the learning rate of its first optimizer step"""


def optimizer_of(rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=rate)


def stepped(schedule: Any, optimizer: torch.optim.Optimizer) -> Rates:
    """A scheduler of torch's, stepped once an optimizer step."""
    found = {}
    for step in range(EPOCHS * PER_EPOCH + 1):
        if step % PER_EPOCH == 0:
            found[step // PER_EPOCH] = optimizer.param_groups[0]["lr"]
        optimizer.step()
        schedule.step()
    return found


def of_code(target: str) -> Rates:
    """`build_schedule` of the file, in steps of the optimizer."""
    emitted = emit_setting(
        tiny(LIBRARIES.get(target, "native")), TrainSetting(**BATCHES), target,
        estimator=FakeEstimator(),
    )  # fmt: skip
    names = executed(emitted)
    optimizer = optimizer_of(names.get("LEARNING_RATE", RATE))
    assert f"{RATE:g}" in f"{emitted.text}{emitted.code}"
    assert "decay: float = 0.05" in f"{emitted.text}{emitted.code}"
    return stepped(names["build_schedule"](optimizer, EPOCHS * PER_EPOCH), optimizer)


def of_transformers(target: str) -> Rates:
    """The Trainer's own scheduler, of its own arguments."""
    from transformers import TrainingArguments, get_scheduler

    given = {**values(target, **BATCHES)["ARGUMENTS"], "tf32": None}
    with TemporaryDirectory() as folder:  # it is made, whatever is asked of it
        arguments = TrainingArguments(folder, **given)
    optimizer = optimizer_of(arguments.learning_rate)
    steps = EPOCHS * PER_EPOCH
    schedule = get_scheduler(
        arguments.lr_scheduler_type,
        optimizer,
        num_warmup_steps=arguments.get_warmup_steps(steps),
        num_training_steps=steps,
        scheduler_specific_kwargs=arguments.lr_scheduler_kwargs,
    )
    assert (arguments.num_train_epochs, arguments.weight_decay) == (EPOCHS, 0.05)
    return stepped(schedule, optimizer)


def of_timm(target: str) -> Rates:
    """As train.py makes it of its arguments (timm 1.0.31, scheduler_factory.py)."""
    from timm.scheduler import create_scheduler_v2, scheduler_kwargs

    written = values(target, **BATCHES)
    assert written["weight_decay"] == 0.05
    optimizer = optimizer_of(written["lr"])
    given = Namespace(**written, decay_rate=0.1, cooldown_epochs=0, patience_epochs=10)
    schedule, epochs = create_scheduler_v2(
        optimizer, **scheduler_kwargs(given), updates_per_epoch=PER_EPOCH
    )
    assert epochs == EPOCHS
    return _of_timm_s(schedule, optimizer)


def of_microsoft(target: str) -> Rates:
    """As lr_scheduler.py makes it of the keys (microsoft/Swin-Transformer @f82860b): a cosine of
    timm's behind a warm-up, all three rates scaled by main.py."""
    from timm.scheduler import CosineLRScheduler

    train = values(target, **BATCHES)["TRAIN"]
    assert train["WEIGHT_DECAY"] == 0.05
    scale = 32 * 4 * 2 / 512
    optimizer = optimizer_of(train["BASE_LR"] * scale)
    warmup = train["WARMUP_EPOCHS"]
    schedule = CosineLRScheduler(
        optimizer,
        t_initial=(train["EPOCHS"] - warmup) * PER_EPOCH,
        lr_min=train["MIN_LR"] * scale,
        warmup_lr_init=train["WARMUP_LR"] * scale,
        warmup_t=warmup * PER_EPOCH,
        warmup_prefix=train["LR_SCHEDULER"]["WARMUP_PREFIX"],
        t_in_epochs=False,
    )
    return _of_timm_s(schedule, optimizer)


def _of_timm_s(schedule: Any, optimizer: torch.optim.Optimizer) -> Rates:
    found = {}
    for epoch in CURVE:
        schedule.step_update(num_updates=epoch * PER_EPOCH)
        found[epoch] = optimizer.param_groups[0]["lr"]
    return found


def of_mmengine(target: str) -> Rates:
    """mmengine's LinearLR and CosineAnnealingLR are torch's, each between its begin and its end."""
    names = values(target, **BATCHES)
    warmup, cosine = names["param_scheduler"]
    optimizer = optimizer_of(names["optim_wrapper"]["optimizer"]["lr"])
    made = torch.optim.lr_scheduler
    first = made.LinearLR(optimizer, warmup["start_factor"], total_iters=warmup["end"] * PER_EPOCH)
    least = cosine["eta_min_ratio"] * names["optim_wrapper"]["optimizer"]["lr"]
    second = made.CosineAnnealingLR(optimizer, cosine["T_max"] * PER_EPOCH, least)
    assert (cosine["begin"], cosine["end"]) == (warmup["end"], EPOCHS)
    assert names["train_cfg"]["max_epochs"] == EPOCHS
    assert names["optim_wrapper"]["optimizer"]["weight_decay"] == 0.05
    milestone = [warmup["end"] * PER_EPOCH]
    return stepped(made.SequentialLR(optimizer, [first, second], milestone), optimizer)


READERS: Mapping[str, Callable[[str], Rates]] = {
    "timm": of_timm, "transformers": of_transformers, "microsoft": of_microsoft,
    "mmengine": of_mmengine, "pytorch": of_code, "lightning": of_code, "accelerate": of_code,
    "deepspeed": of_code,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch's SequentialLR, of itself
@pytest.mark.parametrize("target", TARGETS)
def test_every_trainer_warms_up_and_cools_down_alike(target: str) -> None:
    rates = READERS[target](target)
    found = {epoch: rates[epoch] / RATE for epoch in CURVE}
    assert found == pytest.approx(CURVE, rel=2e-3)
