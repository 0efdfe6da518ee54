"""Pictures to train on, a launch line followed word for word, and what should have been seen."""

from __future__ import annotations

import json
import os
import random
import shlex
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from planner.core.schema import DeviceInfo, SwinConfig, TrainSetting
from planner.core.schema.distribution import ALONE
from planner.core.schema.loading import LoaderSetting
from planner.estimation.estimate import estimate, resolve
from planner.estimation.recipe import UNDECAYED, recipe_of
from planner.trainers.emission import Emitted, emit
from planner.trainers.loader import EVERY_FIELD, train_loader
from planner.trainers.plan import Plan
from planner.trainers.registry import TRAINERS
from tests.building import build_real
from tests.trainers.cases import GIB, FakeEstimator, feeding, recommendation
from tests.trainers.ranks import StoodStillError, follow, free_port

SPY = Path(__file__).with_name("spy.py")
ROOT = Path(__file__).parents[3]
CPU = DeviceInfo(kind="cpu", name="a processor", total_bytes=16 * GIB)
RATE = 1e-3  # LR, where the optimizer has no published rate
NUM_TRAINING, NUM_VALIDATION = 19, 6  # two steps of 8 images and 3 that are dropped


@dataclass(frozen=True)
class Run:
    """A training: what was asked, and the reports of its ranks."""

    emitted: Emitted
    model: SwinConfig
    setting: TrainSetting
    reports: list[dict[str, Any]]
    output: str
    loader: dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A model and a setting for a trainer, and where it is run."""

    target: str
    model: SwinConfig
    fields: dict[str, Any] = field(default_factory=dict)
    device: DeviceInfo = CPU
    loader: LoaderSetting | None = None  # as measured

    @property
    def setting(self) -> TrainSetting:
        return TrainSetting(
            **{"batch_size": 4, "accumulate": 2, "precision": "fp32", **self.fields}
        )


def make_pictures(
    folder: Path,
    training: int = NUM_TRAINING,
) -> Path:
    """train/, val/ and validation/, of NUM_TRAINING and NUM_VALIDATION small pictures."""
    from PIL import Image

    made = random.Random(0)
    for part, count in (
        ("train", training), ("val", NUM_VALIDATION), ("validation", NUM_VALIDATION),
    ):  # fmt: skip
        for index in range(count):
            place = folder / part / f"class{index % 2}"
            place.mkdir(parents=True, exist_ok=True)
            colour = tuple(made.randrange(256) for _ in range(3))
            Image.new("RGB", (48, 48), colour).save(place / f"{index}.png")
    return folder


def train(
    case: Case,
    folder: Path,
    script: str = "",
    scripts: dict[str, Path] | None = None,
    environment: dict[str, str] | None = None,
) -> Run:
    """Emits for `case`, writes the files into `folder` and follows the launch line.

    `script` is what your_script.py says; `scripts` are where a trainer's own lie. All run under the
    spy.
    """
    fed = feeding(case.loader) if case.loader is not None else None
    found = recommendation(case.model, case.setting, device=case.device, feeding=fed)
    emitted = emit(found, case.target, estimator=FakeEstimator())
    (folder / emitted.filename).write_text(emitted.text)
    for name, text in emitted.beside.items():
        (folder / name).write_text(text)
    own = folder / "your_script.py"
    own.write_text(f"import tests.trainers.running.spy\n{script}")
    _mend_imports(folder / "site")
    data = folder / "DATA"
    if not data.exists():
        make_pictures(data)
    command = _command(emitted.launch, data, scripts or {}, folder)
    own_paths = (str(ROOT), str(folder / "site"), os.environ.get("PYTHONPATH", ""))
    given = {
        **os.environ, "OMP_NUM_THREADS": "1", "SPY_REPORT": str(folder / "report"),
        "PYTHONPATH": os.pathsep.join(own_paths),
        "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", **(environment or {}),
    }  # fmt: skip
    tries = 1 if case.setting.world_size == 1 else 2
    ended, output = _followed(["bash", "-c", command], folder, given, tries)
    reports = [json.loads(file.read_text()) for file in sorted(folder.glob("report.*"))]
    whole = ended == 0 and len(reports) == case.setting.world_size
    assert whole, f"{command}\n{output[-6000:]}"
    return Run(emitted, case.model, case.setting, reports, output, _loader(case))


def _followed(words: list[str], folder: Path, given: dict[str, str], tries: int) -> tuple[int, str]:
    """Two ranks stood still once, and nobody knows why: where there is another try they are
    launched again, with a warning that says where they stood."""
    for old in folder.glob("report.*"):
        old.unlink()
    try:
        return follow(words, folder, given, 300)
    except StoodStillError as stood:
        if tries == 1:
            raise
        warnings.warn(str(stood), stacklevel=2)
        return _followed(words, folder, given, tries - 1)


def _loader(case: Case) -> dict[str, Any]:
    """What the DataLoader of a training is to be made with: as measured, or the usual, and what the
    trainer has no word for as it does that by itself."""
    fed = feeding(case.loader).data if case.loader is not None else None
    plan = Plan(case.model, case.setting, (), device=case.device.kind, fed=fed)
    found = {name: getattr(train_loader(plan), name) for name in EVERY_FIELD}
    if case.target == "pytorch" and case.loader is None:
        found["workers"] = min(found["workers"], os.cpu_count() or 1)
    return {**found, **TRAINERS[case.target].loads_by_itself}


def _mend_imports(folder: Path) -> None:
    """Lets a launcher import PyPI's torchvision beside a CPU torch, as the spy does for scripts."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "if any(word.endswith('accelerate') for word in sys.orig_argv[:2]):\n"
        "    from planner.libraries.missing_operators import declare_missing_operators\n"
        "    declare_missing_operators()\n"
    )


def _command(launch: str, data: Path, scripts: dict[str, Path], folder: Path) -> str:
    """The launch line with DATA and LR filled in, the script under the spy and a port of its own.

    `your_script.py` imports the spy by itself: its trainer starts it.
    """
    words = shlex.split(launch)
    words = [w.replace("DATA", str(data)) for w in words]
    words = [w if w != "LR" else str(RATE) for w in words]
    words = [w.removesuffix("=LR") + f"={RATE}" if w.endswith("=LR") else w for w in words]
    for place, word in enumerate(words):
        if word.endswith(".py") and word != "your_script.py" and not word.startswith("-"):
            words[place : place + 1] = [str(SPY), str(scripts.get(word, folder / word))]
            break
    for launcher, port in (("deepspeed", "--master_port"), ("launch", "--main_process_port")):
        if launcher in words:
            place = words.index(launcher) + 1
            words[place:place] = [port, str(free_port())]
    words = [sys.executable if word == "python" else word for word in words]
    return " ".join(
        word if "=" in word and not word.startswith("-") and index < 4 else shlex.quote(word)
        for index, word in enumerate(words)
    )


def differences(run: Run, **instead: Any) -> list[str]:
    """What was seen otherwise than asked. `instead` are values that a trainer may show for its own
    reasons, each said where it is called; None there leaves a value unlooked at."""
    wanted = {**expected(run.model, run.setting), "loader": run.loader, **instead}
    found = []
    for rank, report in enumerate(run.reports):
        seen = observed(report)
        for key, value in wanted.items():
            if value is not None and not _alike(key, seen.get(key), value):
                found.append(f"rank {rank}: {key} is {seen.get(key)!r}, not {value!r}")
    return found


def _alike(key: str, seen: Any, wanted: Any) -> bool:
    """Whether the two are one: bytes within one allocation's rounding, rates in six digits."""
    if key == "saved_bytes" and seen is not None:
        return bool(abs(seen - wanted) <= 512)
    if key == "first_rate":
        return seen == pytest.approx(wanted, rel=1e-5)
    return bool(seen == wanted)


def expected(model: SwinConfig, setting: TrainSetting) -> dict[str, Any]:
    """What a training of `setting` shows, in the words of `observed`."""
    recipe = recipe_of(setting, model)
    setting = setting.with_recipe(of_swin=True)
    micro = setting.accumulate * 2
    _, setting = resolve(model, setting)
    # A CPU's tensors are on the host already: there an offload moves nothing.
    by_itself = {**ALONE, "offload": "none"}
    judged = estimate(model, setting.model_copy(update=by_itself))
    # What fused attention keeps is the kernel's matter, and the CPU's is not CUDA's.
    kernels = setting.attention == "sdpa" and setting.checkpointing == "none"
    compared = setting.precision == "fp32" and not kernels
    implementation = setting.optimizer_implementation
    dtypes = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}
    found = {
        "world": setting.world_size,
        "images": [setting.batch_size * setting.accumulate] * 2,
        "micro_batches": [setting.accumulate] * 2,
        "autocast": dtypes.get(setting.precision),
        "parameter_dtype": "torch.float32",
        "checkpoints": _checkpoints(model, setting) * micro,
        "sdpa": setting.attention == "sdpa",
        "fused": implementation == "fused",
        "foreach": None if implementation == "8bit" else implementation == "foreach",
        "nesterov": False,
        "decay": recipe.weight_decay,
        "decayed_wrongly": [],
        "clips": [recipe.clip_norm] * 2 if recipe.clip_norm is not None else [],
        "drop_path": model.drop_path_rate,
        "classes": model.num_classes,
        "soft": recipe.mixes,
        "smoothing": None if recipe.mixes else recipe.smoothing,  # mixed into the targets
        "first_rate": recipe.learning_rate and recipe.learning_rate * recipe.warmup_start,
        "averaged": setting.ema,
        "offloads": setting.offload != "none",
        "compiles": [setting.compile] if setting.compile != "off" else [],
        "validation_batch": recipe.validation_batch_size,
        "num_parameters": _trained(model, setting),
        "saved_bytes": judged.saved_activation_bytes if compared else None,
        "benchmark": True,
    }
    if setting.optimizer_family == "sgd":
        found["momentum"] = 0.9
    else:
        found["betas"] = [0.9, 0.999]
    return found


def decayed_wrongly(decays: Mapping[str, Sequence[float]]) -> list[str]:
    """Trained weights that decay though the recipe spares them, or the other way round; none where
    none decays. `decays` are each one's decay and its number of dimensions."""
    if not any(decay for decay, _ in decays.values()):
        return []
    return [
        name
        for name, (decay, dimensions) in decays.items()
        if (decay > 0) == (dimensions < 2 or any(part in name for part in UNDECAYED))
    ]


def _trained(model: SwinConfig, setting: TrainSetting) -> int:
    """Numbers in the weights that are trained."""
    return sum(p.numel() for p in build_real(model, setting).parameters() if p.requires_grad)


def _checkpoints(model: SwinConfig, setting: TrainSetting) -> int:
    """Calls of `checkpoint` in a forward."""
    chosen = setting.checkpointed_stages
    if setting.chosen_blocks is not None:
        return len(range(sum(model.depths))[setting.chosen_blocks])
    counts = {"none": 0, "blocks": sum(model.depths), "stages": model.num_stages}
    return len(chosen) if chosen is not None else counts[setting.checkpointing]


def observed(report: dict[str, Any]) -> dict[str, Any]:
    """The report in the words of `expected`."""
    first, second = report["steps"]
    groups = first["groups"]
    losses = report["losses"]
    smoothing = max([s for _, s in losses if isinstance(s, int | float)], default=0.0)
    assert second["rate"] >= first["rate"], "the warm-up rises; main.py's from the third step on"
    return {
        **{key: report.get(key) for key in (
            "world", "images", "micro_batches", "autocast", "parameter_dtype", "checkpoints",
            "clips", "classes", "num_parameters", "saved_bytes", "benchmark", "drop_path",
            "offloads",
        )},
        "loader": next(iter(report["loaders"]), None),
        "sdpa": report["sdpa"] > 0,
        "fused": bool(groups[0].get("fused")),
        # None is torch's own choice on CUDA: foreach, where nothing is fused.
        "foreach": not groups[0].get("fused") and groups[0].get("foreach") is not False,
        "nesterov": bool(groups[0].get("nesterov")),
        "momentum": groups[0].get("momentum"),
        "betas": list(groups[0].get("betas") or ()) or None,
        "decay": max(group["weight_decay"] for group in groups),
        "decayed_wrongly": decayed_wrongly(report["decays"]),
        "soft": any("soft" in name.lower() for name, _ in losses),
        "smoothing": smoothing,
        "first_rate": first["rate"],
        "averaged": report["averaged"] > 0 or bool(report["averages"]),
        "compiles": [call["mode"] for call in report["compiles"]],
        "validation_batch": next(iter(report["validation_batches"]), None),
    }  # fmt: skip


__all__ = ["CPU", "RATE", "Case", "Run", "differences", "make_pictures", "train"]
