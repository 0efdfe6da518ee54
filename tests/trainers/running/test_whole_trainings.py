"""Trainers that have a main program of their own, to the last epoch and once more from a
checkpoint; and what they do to images, beside what their authors' own configuration does.

As in test_running.py: on the CPU, over made pictures, where the same variables name what pip does
not have. Where all pictures are one, of one class and not augmented, a training is the same
whatever the order: a resumed one then ends with the very numbers of one that was not interrupted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from planner.core.schema import TrainSetting
from planner.estimation.recipe import recipe_of
from planner.trainers.emission import emit_setting
from tests.trainers.cases import FakeEstimator, executed, tiny
from tests.trainers.running.harness import Case, Run, train
from tests.trainers.running.test_running import (
    CUDA,
    MMPRETRAIN,
    OLD_TIMM,
    SWIN,
    TIMM_CHECKOUT,
    mmpretrain_folder,
)

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(900)]

EPOCHS, MICRO_BATCHES = 3, 5  # the first warms up; an epoch is two steps of 2 × 4 images and a rest
PLAIN: dict[str, Any] = {"loss": "cross-entropy"}


class Whole(NamedTuple):
    """A training of three epochs. `more` makes them so, and leaves images as they are.

    `checkpoints` are its files' names by the number of epochs behind them, and `holds` what of one
    must be as if nothing had happened. `again` is put to the line to go on from a file.
    `epochs_at` are the epochs, as the schedule counts, at which steps are taken, and `images` those
    that each has seen since the one before.
    """

    case: Case
    more: str
    checkpoints: str
    first_number: int
    holds: tuple[str, ...]
    again: str
    epochs_at: tuple[float, ...]
    images: tuple[int, ...]


WHOLE = {
    # The rest of an epoch is a step of its own.
    "timm": Whole(
        Case("timm", tiny("timm"), {**PLAIN, "ema": True, "attention": "eager"}),
        "--no-aug --epochs 2 --warmup-epochs 1",
        "output/train/*/checkpoint-{}.pth.tar", -1, ("state_dict", "state_dict_ema", "optimizer"),
        "--resume {}", tuple(step / 3 for step in range(9)), (8, 8, 4) * 3,
    ),
    # The rest is seen and not learned from. Two steps an epoch are what the schedule expects: it is
    # told the place after a step, in whole steps of all batches behind. (Up to 32 pixels it would
    # crop at random from a black frame.)
    "microsoft": Whole(
        Case("microsoft", tiny("microsoft", num_classes=1000, image_size=64), PLAIN, CUDA),
        "--opts AUG.AUTO_AUGMENT none AUG.COLOR_JITTER 0. AUG.REPROB 0. "
        "TRAIN.EPOCHS 3 TRAIN.WARMUP_EPOCHS 1",
        "output/swin/default/ckpt_epoch_{}.pth", -1, ("model", "optimizer", "scaler"),
        "", tuple(step / 2 for step in (0, 0, 1, 3, 4, 5)), (8, 8, 12, 8, 12, 8),
    ),
    # The rest is taken into the next epoch's first step. Rates are those of batches, of which the
    # warm-up's last has the whole rate.
    "mmengine": Whole(
        Case("mmengine", tiny("native"), {**PLAIN, "ema": True, "attention": "eager"}),
        "train_cfg.max_epochs=3 "
        "param_scheduler.0.end=1 param_scheduler.1.begin=1 param_scheduler.1.end=3 "
        "param_scheduler.1.T_max=2",
        "work_dirs/swin_mmpretrain/epoch_{}.pth", 0,
        ("state_dict", "ema_state_dict", "optimizer", "param_schedulers"),
        "--resume {}", (1 / 4, 3 / 4, *(batch / 5 for batch in (5, 7, 9, 11, 13, 14))),
        (8,) * 7 + (4,),
    ),
}  # fmt: skip


def scripts(target: str) -> dict[str, Any]:
    """Where the trainer's program lies, and what it needs to run here. Skips where it is not."""
    if target == "timm":
        if not TIMM_CHECKOUT:
            pytest.skip("TIMM_CHECKOUT names no timm repository")
        return {"scripts": {"train.py": Path(TIMM_CHECKOUT, "train.py")}}
    if target == "microsoft":
        if not (SWIN and OLD_TIMM):
            pytest.skip("SWIN_TRANSFORMER_CHECKOUT or SWIN_TRANSFORMER_TIMM is not set")
        return {
            "scripts": {"main.py": Path(SWIN, "main.py")}, "paths": (OLD_TIMM,),
            "environment": {"SPY_PRETEND_CUDA": "1"},
        }  # fmt: skip
    if find_spec("mmpretrain") is None and not MMPRETRAIN:
        pytest.skip("mmpretrain is not installed")
    folder = mmpretrain_folder()
    return {
        "scripts": {"tools/train.py": folder / "mmpretrain" / ".mim" / "tools" / "train.py"},
        "paths": (MMPRETRAIN,) if MMPRETRAIN else (),
    }


def whole_run(target: str, case: Case, folder: Path, more: str) -> Run:
    given = scripts(target)
    environment = {**given.pop("environment", {}), "SPY_WHOLE": "1"}
    return train(case, folder, more=more, environment=environment, edit=unaugmented, **given)


def unaugmented(text: str) -> str:
    """mmengine's options change no list: the two transforms are cut out of its file."""
    transform = r" +dict\(\n +type=\"(RandAugment|RandomErasing)\",.*?(?=^ +dict\(\n +type=)"
    return re.sub(transform, "", text, flags=re.DOTALL | re.MULTILINE)


def same_pictures(folder: Path, number: int) -> None:
    from PIL import Image

    for part, count in (("train", number), ("val", 4), ("validation", 4)):
        for index in range(count):
            place = folder / part / "class0"
            place.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (32, 32), (120, 60, 200)).save(place / f"{index}.png")


def rates(run: Run) -> list[float]:
    return [step["rate"] for step in run.reports[0]["steps"]]


def curve(case: Case, epoch: float) -> float:
    """The recipe's rate at `epoch` of three, of which one is the warm-up."""
    recipe = recipe_of(case.setting, case.model)
    assert recipe.learning_rate is not None
    if epoch < 1:
        share = recipe.warmup_start + (1 - recipe.warmup_start) * epoch
    else:
        fall = 0.5 * (1 + math.cos(math.pi * (epoch - 1) / (EPOCHS - 1)))
        share = recipe.final_share + (1 - recipe.final_share) * fall
    return recipe.learning_rate * share


def differing(one: Any, other: Any, place: str) -> list[str]:
    """Where two checkpoints' parts are not the same to the last bit."""
    import torch

    if isinstance(one, torch.Tensor):
        return [] if torch.equal(one, other) else [place]
    if isinstance(one, Mapping):
        keys = [] if one.keys() == other.keys() else [f"{place}: keys"]
        return keys + [d for k in one.keys() & other.keys() for d in differing(
            one[k], other[k], f"{place}.{k}")]  # fmt: skip
    if isinstance(one, list | tuple):
        return [d for a, b in zip(one, other, strict=True) for d in differing(a, b, place)]
    return [] if one == other else [f"{place}: {one} {other}"]


@pytest.mark.parametrize("target", WHOLE)
def test_a_training_ends_as_the_recipe_says_and_goes_on_where_it_was(
    target: str, tmp_path: Path
) -> None:
    import torch

    whole = WHOLE[target]
    same_pictures(tmp_path / "DATA", 4 * MICRO_BATCHES + 2)
    run = whole_run(target, whole.case, tmp_path, whole.more)
    assert tuple(run.reports[0]["images"][: len(whole.images)]) == whole.images
    wanted = [curve(whole.case, epoch) for epoch in whole.epochs_at]
    assert rates(run) == pytest.approx(wanted, rel=1e-4)

    def checkpoint(epochs: int) -> Path:
        files = sorted(tmp_path.glob(whole.checkpoints.format(epochs + whole.first_number)))
        return files[-1]

    last = torch.load(checkpoint(EPOCHS), weights_only=False)
    checkpoint(EPOCHS).unlink()
    resumed = whole_run(
        target, whole.case, tmp_path, f"{whole.more} {whole.again.format(checkpoint(2))}"
    )
    again = torch.load(checkpoint(EPOCHS), weights_only=False)
    assert rates(resumed) == rates(run)[-len(rates(resumed)) :]
    assert len(rates(resumed)) < len(rates(run))
    found = [d for part in whole.holds for d in differing(last[part], again[part], part)]
    assert not found, found


SIZE: dict[str, Any] = {"num_classes": 1000, "image_size": 64}


def recipe_removed(text: str) -> str:
    """main.py's file with the model and how a step runs, and of the recipe nothing."""
    found = yaml.safe_load(text)
    del found["AUG"], found["TEST"], found["DATA"]["INTERPOLATION"]
    del found["MODEL"]["LABEL_SMOOTHING"]
    found["TRAIN"] = {"ACCUMULATION_STEPS": found["TRAIN"]["ACCUMULATION_STEPS"]}
    return str(yaml.safe_dump(found))


def test_the_recipe_is_what_main_py_does_by_itself(tmp_path: Path) -> None:
    """Its file and one that says nothing of a recipe make the same objects, losses, clipping, decay
    and rates; so does train.py with timm's."""
    reports: dict[str, dict[str, Any]] = {}
    for name, case, edit in (
        ("written", Case("microsoft", tiny("microsoft", **SIZE), {}, CUDA), str),
        ("own", Case("microsoft", tiny("microsoft", **SIZE), {}, CUDA), recipe_removed),
        ("timm", Case("timm", tiny("timm", **SIZE)), str),
    ):
        (tmp_path / name).mkdir()
        run = train(case, tmp_path / name, edit=edit, **scripts(case.target))
        reports[name] = run.reports[0]
    written, own, timm = reports.values()
    for key in ("recipe", "losses", "clips", "decays", "steps"):
        assert written[key] == own[key], key
    timm["recipe"]["Mixup"] = timm["recipe"].pop("FastCollateMixup")
    assert timm["recipe"].keys() == own["recipe"].keys()
    for name, (theirs, *_) in own["recipe"].items():
        (ours, *_) = timm["recipe"][name]
        shared = ours.keys() & theirs.keys()  # either version of timm has some of its own
        assert {k: ours[k] for k in shared} == {k: theirs[k] for k in shared}, name
    assert timm["losses"] == own["losses"]
    assert timm["clips"] == own["clips"]


@pytest.mark.parametrize("version", [1, 2])
def test_mmengine_s_file_has_the_recipe_of_mmpretrain_s_own(version: int) -> None:
    """Images, mixing, loss, first weights, clipping and rates; its own decays two tables of version
    2 that the authors spare, and clips version 1 only."""
    from planner.libraries.missing_operators import declare_missing_operators

    scripts("mmengine")
    declare_missing_operators()
    from mmengine.config import Config
    from mmpretrain.registry import TRANSFORMS
    from mmpretrain.utils import register_all_modules

    register_all_modules()
    place = {
        1: "swin_transformer/swin-tiny_16xb64_in1k.py",
        2: "swin_transformer_v2/swinv2-tiny-w8_16xb64_in1k-256px.py",
    }[version]
    own = Config.fromfile(mmpretrain_folder() / "mmpretrain" / ".mim" / "configs" / place)
    side = 224 if version == 1 else 256
    model = tiny("native", version, image_size=side, num_classes=1000, window_size=side // 32)
    setting = TrainSetting(batch_size=1024, precision="fp32")
    ours = executed(emit_setting(model, setting, "mmengine", estimator=FakeEstimator()).text)

    def transforms(config: Any, part: str) -> list[str]:
        pipeline = config[f"{part}_dataloader"]["dataset"]["pipeline"]
        return [repr(TRANSFORMS.build(transform)) for transform in pipeline]

    for part in ("train", "val"):
        assert transforms(ours, part) == transforms(own, part)
    augments = ours["model"]["train_cfg"]
    assert augments["augments"] == own.model.train_cfg.augments
    assert augments["probs"] == [0.5, 0.5], "mmpretrain's choice where nobody says"
    assert ours["model"]["head"]["loss"] == own.model.head.loss
    assert ours["model"]["init_cfg"] == own.model.init_cfg
    assert ours["data_preprocessor"] == own.data_preprocessor
    mine, theirs = ours["optim_wrapper"], own.optim_wrapper
    assert mine["clip_grad"] == theirs.get("clip_grad", {"max_norm": 5.0})
    for key in ("lr", "weight_decay"):
        assert mine["optimizer"][key] == theirs.optimizer[key]
    kinds = {k: v for k, v in mine["paramwise_cfg"].items() if k != "custom_keys"}
    assert kinds == {k: v for k, v in theirs.paramwise_cfg.items() if k != "custom_keys"}
    warmup, cosine = ours["param_scheduler"]
    assert warmup == own.param_scheduler[0]
    assert cosine["eta_min_ratio"] * mine["optimizer"]["lr"] == own.param_scheduler[1].eta_min
    assert ours["train_cfg"] == own.train_cfg
