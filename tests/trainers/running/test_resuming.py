"""A whole small training by the script that a trainer's file shows, and the same one ended in its
second epoch and started again.

19 pictures in batches of 3, 4 of them a step: an epoch has six batches, and its second step two.
Lightning does not restore what augments, mixes and orders pictures: its are of one colour, and
nothing in them is random.
"""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from planner.core.schema import SwinConfig, TrainSetting
from planner.core.schema.loading import LoaderSetting
from planner.core.schema.setting import CLIP_NORM
from planner.estimation.recipe import recipe_of
from planner.trainers.emission import Emitted, emit
from tests.building import build_real
from tests.trainers.cases import FakeEstimator, feeding, recommendation, tiny
from tests.trainers.ranks import follow
from tests.trainers.running.harness import CPU, NUM_VALIDATION, ROOT, make_pictures
from tests.trainers.running.test_running import ONE_CPU_OF_DEEPSPEED, script_of

import torch  # isort: skip

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(400)]  # starts each trainer three times

EPOCHS, STEPS = 3, 2  # steps of an epoch
STOP = 3  # in the second epoch
CASES = [
    ("transformers", tiny("transformers", 2), {}),
    ("accelerate", tiny("timm", 2), {"ema": True}),
    ("lightning", tiny("timm"), {"loss": "cross-entropy"}),
    ("deepspeed", tiny("timm", 2), {"ema": True}),
]


def written(target: str, model: SwinConfig, setting: TrainSetting, folder: Path) -> Emitted:
    """The trainer's files and its script in `folder`, three epochs long."""
    loader = LoaderSetting(workers=0, prefetch_factor=None, persistent_workers=False)
    found = recommendation(model, setting, device=CPU, feeding=feeding(loader))
    emitted = emit(found, target, estimator=FakeEstimator())
    text = emitted.text.replace('"num_train_epochs": 300', f'"num_train_epochs": {EPOCHS}')
    (folder / emitted.filename).write_text(text.replace("EPOCHS = 300", f"EPOCHS = {EPOCHS}"))
    for name, code in emitted.beside.items():
        (folder / name).write_text(code.replace("EPOCHS = 300", f"EPOCHS = {EPOCHS}"))
    before = "import tests.trainers.running.recorder\n"
    before += ONE_CPU_OF_DEEPSPEED if target == "deepspeed" else ""
    script = script_of(emitted)
    random = target != "lightning"
    if not random:
        script = script.replace("train_transform()", "validation_transform()")
    (folder / "your_script.py").write_text(before + script)
    make_pictures(folder / "DATA", classes=2 if random else 1, colours=256 if random else 1)
    return emitted


def run(emitted: Emitted, folder: Path, name: str, **environment: str) -> dict[str, Any]:
    record = folder / name
    given = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}",
        "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "RECORD": str(record), **environment,
    }  # fmt: skip
    command = emitted.launch.replace("accelerate launch", "python -m accelerate.commands.launch")
    _, output = follow(["bash", "-c", command], folder, given)
    assert record.exists(), f"{shlex.quote(command)}\n{output[-6000:]}"
    found = json.loads(record.read_text())
    assert isinstance(found, dict)
    return found


def average(target: str, folder: Path) -> dict[str, torch.Tensor]:
    """Of the weights, as the last checkpoint has it."""
    last = folder / "output" / str(EPOCHS % 2)
    if target == "accelerate":
        return dict(torch.load(last / "custom_checkpoint_1.pkl", weights_only=False))
    return dict(torch.load(last / "mp_rank_00_model_states.pt", weights_only=False)["average"])


def decaying(model: SwinConfig, setting: TrainSetting) -> set[str]:
    """Names of matrices and kernels, but for those that timm, or the authors' words for what
    transformers calls otherwise, spare."""
    module = build_real(model, setting)
    spared = ("logit_scale", "position_bias")
    names = module.no_weight_decay() if hasattr(module, "no_weight_decay") else ()
    return {
        name for name, p in module.named_parameters()
        if p.dim() > 1 and name not in names and not any(word in name for word in spared)
    }  # fmt: skip


@pytest.mark.parametrize(("target", "model", "fields"), CASES, ids=[case[0] for case in CASES])
def test_it_goes_on_as_if_it_had_not_been_ended(
    target: str, model: SwinConfig, fields: dict[str, Any], tmp_path: Path
) -> None:
    setting = TrainSetting(batch_size=3, accumulate=4, precision="fp32", **fields)
    if target == "deepspeed":
        pytest.importorskip("deepspeed")
    places = [tmp_path / name for name in ("whole", "ended")]
    for place in places:
        place.mkdir()
        emitted = written(target, model, setting, place)
    whole = run(emitted, places[0], "record")
    steps = whole["steps"]
    assert [len(step["losses"]) for step in steps] == [4, 2] * EPOCHS, "no batch is left out"
    for step in steps:  # of the mean loss of the images, also where there are fewer
        mean = sum(step["losses"]) / len(step["losses"])
        assert step["given"] == pytest.approx(mean, rel=1e-4)
    recipe = recipe_of(setting, model)
    assert (whole["soft"], whole["clips"]) == (setting.loss == "library", [CLIP_NORM])
    shown = {name.split("module.")[-1].removeprefix("model.") for name in whole["decayed"]}
    assert shown == decaying(model, setting)
    assert set(whole["decayed"].values()) == {recipe.weight_decay}
    rate = recipe.learning_rate
    assert rate is not None
    rates = [step["rate"] for step in steps]
    assert rates[0] == pytest.approx(rate * recipe.warmup_start, rel=1e-4)
    if target != "transformers":  # whose own cosine is a step ahead of its warm-up
        assert rates[1] == pytest.approx(rate, rel=1e-4)
    assert rates[1:] == sorted(rates[1:], reverse=True)
    sanity = NUM_VALIDATION if target == "lightning" else 0
    assert whole["validated"] == NUM_VALIDATION * EPOCHS + sanity
    run(emitted, places[1], "ended", STOP=str(STOP))
    resumed = run(emitted, places[1], "record")["steps"]
    assert [step["rate"] for step in resumed] == rates[STEPS:]
    for mine, theirs in zip(resumed, steps[STEPS:], strict=True):
        assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
    if setting.ema:
        mine, theirs = (average(target, place) for place in reversed(places))
        assert mine.keys() == theirs.keys()
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name])
