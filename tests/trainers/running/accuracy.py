"""How accurate a small Swin becomes by each trainer's file, and by main.py with a file that says
nothing of a recipe: a made task on the CPU, in hours.

    python -m tests.trainers.running.accuracy RESULTS.jsonl [--seeds 3] [TARGET ...]

Lengths and rates are changed in the files, alike in all: 30 epochs, two of them warm-up, a rate
that suits so few pictures. The variables of test_running.py name what pip does not have. A line of
RESULTS is a run: the share of 1,000 pictures that it has right after its last epoch.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import tempfile
import time
from collections.abc import Callable
from colorsys import hsv_to_rgb
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from planner.trainers.emission import emit_setting
from tests.trainers.cases import tiny
from tests.trainers.running.harness import CPU, Case, train
from tests.trainers.running.test_running import CUDA, ONE_CPU_OF_DEEPSPEED, script_of
from tests.trainers.running.test_whole_trainings import recipe_removed, scripts

EPOCHS, WARMUP, BATCH, RATE = 30, 2, 32, 2e-3
NUM_TRAINING, NUM_VALIDATION, SIDE = 1280, 1000, 80
LIBRARIES = {
    "microsoft": "microsoft", "pytorch": "native", "timm": "timm", "transformers": "transformers",
    "accelerate": "timm", "lightning": "timm", "deepspeed": "timm", "mmengine": "native",
}  # fmt: skip
OWN = "main.py's own"


def texture(kind: int, made: np.random.Generator) -> np.ndarray[Any, Any]:
    """A picture [SIDE, SIDE, 3] of one of ten kinds: five textures, in warm or cold colours."""
    y, x = np.mgrid[:SIDE, :SIDE].astype(float)
    period = made.uniform(5, 9)
    a, b = (2 * np.pi * (axis / period + made.uniform()) for axis in (x, y))
    waves = np.sin(a), np.sin(b), np.sin(a) * np.sin(b), np.sin(a + b), np.ones_like(a)
    share = (waves[kind // 2] > 0)[..., None]
    hue = made.normal(0.08 if kind % 2 else 0.6, 0.06)
    one, other = (
        255 * np.array(hsv_to_rgb(hue % 1, *made.uniform(0.4, 1, 2)))
        for hue in (hue, hue + made.normal(0.3, 0.05))
    )
    mixed = np.where(share, one, other) + made.normal(0, 10, (SIDE, SIDE, 3))
    return mixed.clip(0, 255).astype(np.uint8)


def make_task(folder: Path) -> None:
    """train/, and the same pictures as val/ and validation/: the trainers' names differ."""
    made = np.random.default_rng(0)
    for part, count in (("train", NUM_TRAINING), ("val", NUM_VALIDATION)):
        for index in range(count):
            place = folder / part / f"class{index % 10}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(texture(index % 10, made)).save(place / f"{index}.png")
    (folder / "validation").symlink_to("val")


def shortened(text: str, seed: int) -> str:
    """A file with this training's lengths, rate and seed."""
    for old, new in {
        "EPOCHS = 300": f"EPOCHS = {EPOCHS}",
        '"num_train_epochs": 300': f'"num_train_epochs": {EPOCHS}, "seed": {seed}',
        "epochs: 280": f"epochs: {EPOCHS - WARMUP}\nseed: {seed}",
        "warmup_epochs: 20": f"warmup_epochs: {WARMUP}",
        "max_epochs=300": f"max_epochs={EPOCHS}",
        "end=20": f"end={WARMUP}", "begin=20": f"begin={WARMUP}", "end=300": f"end={EPOCHS}",
        "T_max=280": f"T_max={EPOCHS - WARMUP}",
        "warmup_lr: 3.125e-08": f"warmup_lr: {RATE / 1000}",
        "min_lr: 3.125e-07": f"min_lr: {RATE / 100}",
        "eta_min=3.125e-07": f"eta_min={RATE / 100}",
        "3.125e-05": str(RATE),
    }.items():  # fmt: skip
        text = text.replace(old, new)
    return text


def of_main(seed: int) -> str:
    options = {
        "TRAIN.EPOCHS": EPOCHS, "TRAIN.WARMUP_EPOCHS": WARMUP, "SEED": seed,
        "TRAIN.BASE_LR": RATE * 512 / BATCH, "TRAIN.WARMUP_LR": RATE * 512 / BATCH / 1000,
        "TRAIN.MIN_LR": RATE * 512 / BATCH / 100,
    }  # fmt: skip
    return f"--opts {' '.join(f'{key} {value}' for key, value in options.items())}"


def last(pattern: str, texts: list[str]) -> float:
    return float(re.findall(pattern, "\n".join(texts))[-1])


def of_table(place: Path, column: str) -> float:
    with place.open() as file:
        return [float(row[column]) for row in csv.DictReader(file) if row[column]][-1]


def reached(target: str, folder: Path, output: str) -> float:
    """The share of pictures that are right after the last epoch, as the trainer wrote it."""

    def texts(pattern: str) -> list[str]:
        return [
            file.read_text()
            for file in sorted(folder.glob(pattern), key=lambda f: f.stat().st_mtime)
        ]

    found: dict[str, Callable[[], float]] = {
        "pytorch": lambda: last(r'"accuracy": ([\d.]+)', texts("output/log.jsonl")),
        "accelerate": lambda: last(r"accuracy ([\d.]+)", [output]),
        "deepspeed": lambda: last(r"accuracy ([\d.]+)", [output]),
        "transformers": lambda: last(
            r'"eval_accuracy": ([\d.]+)', texts("output/checkpoint-*/trainer_state.json")
        ),
        "lightning": lambda: of_table(next(folder.glob("**/metrics.csv")), "accuracy"),
        "timm": lambda: (
            of_table(next(folder.glob("output/train/*/summary.csv")), "eval_top1") / 100
        ),
        "microsoft": lambda: last(r"Acc@1 ([\d.]+)", texts("output/**/log_rank0.txt")) / 100,
        "mmengine": lambda: last(
            r'"accuracy/top1": ([\d.]+)', texts("work_dirs/*/*/vis_data/scalars.json")
        ) / 100,
    }  # fmt: skip
    return found[target]()


def run(name: str, seed: int, task: Path, folder: Path) -> float:
    target = "microsoft" if name == OWN else name
    shape: dict[str, Any] = {
        "num_classes": 1000, "image_size": 64, "embed_dim": 32, "num_heads": (2, 4),
        "drop_path_rate": 0.1,
    }  # fmt: skip
    fields = {
        "batch_size": BATCH,
        "accumulate": 1,
        "attention": "eager",
        "validation_batch_size": 100,
    }
    if target == "microsoft":
        del fields["attention"], fields["validation_batch_size"]
    device = CUDA if target == "microsoft" else CPU
    case = Case(target, tiny(LIBRARIES[target], **shape), fields, device)

    def edit(text: str) -> str:
        return shortened(recipe_removed(text) if name == OWN else text, seed)

    given = scripts(target) if target in ("timm", "microsoft", "mmengine") else {}
    environment = {**given.pop("environment", {}), "SPY_WHOLE": "1"}
    script, more = "", ""
    if target in ("transformers", "accelerate", "lightning", "deepspeed"):
        script = ONE_CPU_OF_DEEPSPEED if target == "deepspeed" else ""
        script += script_of(emit_setting(case.model, case.setting, target, device=device))
        for call in ("set_seed", "seed_everything", "manual_seed"):
            script = script.replace(f"{call}(0", f"{call}({seed}")
        script = script.replace("data_seed=0", f"data_seed={seed}")
    elif target == "microsoft":
        more = of_main(seed)
    elif target == "mmengine":
        more = f"randomness.seed={seed}"
    elif target == "pytorch":
        more = f"--epochs {EPOCHS} --warmup-epochs {WARMUP} --lr {RATE} --seed {seed}"
    (folder / "DATA").symlink_to(task)
    ended = train(
        case, folder, script, environment=environment, seconds=7200, more=more, edit=edit, **given
    )
    return reached(target, folder, ended.output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("targets", nargs="*", default=[OWN, *LIBRARIES])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        make_task(task := Path(place, "task"))
        for seed in range(options.seeds):
            for name in options.targets:
                began = time.monotonic()
                (folder := Path(place, f"{name}{seed}".replace(" ", ""))).mkdir()
                found = {
                    "trainer": name, "seed": seed, "accuracy": run(name, seed, task, folder),
                    "minutes": round((time.monotonic() - began) / 60, 1),
                    "torch": version("torch"), "date": f"{datetime.now(UTC):%Y-%m-%d}",
                }  # fmt: skip
                print(line := json.dumps(found), flush=True)
                with options.results.open("a") as file:
                    file.write(f"{line}\n")


if __name__ == "__main__":
    main()
