"""Models and settings that many tests of emit share."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from planner.core.schema import DeviceInfo, MeasurementRecord, SwinConfig, TrainSetting
from planner.core.schema.loading import DataResult, Feeding, LoaderRun, LoaderSetting
from planner.core.schema.result import Recommendation
from planner.trainers.imports import BESIDE
from planner.trainers.native_file import FILENAME, native_source
from planner.trainers.plan import Emitted

GIB = 1024**3


def tiny(library: str = "native", version: int = 1, **fields: Any) -> SwinConfig:
    """Two stages on 32 pixels: fast to build and to run."""
    shape = {
        "library": library, "version": version, "image_size": 32, "embed_dim": 16,
        "depths": (2, 2), "num_heads": (1, 2), "window_size": 4, "num_classes": 10,
        "drop_path_rate": 0.0,
    }  # fmt: skip
    return SwinConfig.model_validate({**shape, **fields})


def recommendation(
    model: SwinConfig | None = None, setting: TrainSetting | None = None, **fields: Any
) -> Recommendation:
    """What a tuner found for `model` with `setting` on a card of 24 GiB."""
    model = model or SwinConfig(library="timm", name="swin_tiny_patch4_window7_224")
    setting = setting or TrainSetting(batch_size=128)
    device = DeviceInfo(kind="cuda", name="NVIDIA GeForce RTX 3090", total_bytes=24 * GIB)
    evidence = MeasurementRecord(
        model=model, setting=setting, device=device, versions={"torch": "2.13.0"},
        date="2026-11-20T12:00:00Z", status="measured", step_seconds=(0.1,),
        images_per_second=1280.0, peak_allocated_bytes=9 * GIB,
    )  # fmt: skip
    found = Recommendation(
        status="recommended", model=model, device=device, versions={"torch": "2.13.0"},
        date="2026-11-20T12:00:00Z", setting=setting, evidence=evidence,
    )  # fmt: skip
    return found.model_copy(update=fields)


def feeding(loader: LoaderSetting, location: str = "/pictures") -> Feeding:
    """What a machine of 16 processors measured of `loader`."""
    run = LoaderRun(
        setting=loader, images_per_second=812.3, cpu_seconds=0.01, first_batch_seconds=1.0
    )
    data = DataResult(
        location=location, image_size=(224, 224), processors=16, setting=loader,
        images_per_second=812.3, bound="processors", runs=(run,), date="2026-11-22T08:00:00Z",
    )  # fmt: skip
    return Feeding(data=data, steps=30, images_per_second=800.0, waited=0.2)


def executed(emitted: Emitted | str) -> dict[str, Any]:
    """What a Python file of a trainer's defines, or the code beside it."""
    source = emitted if isinstance(emitted, str) else emitted.code or emitted.text
    if f"from {BESIDE} import" in source and BESIDE not in sys.modules:
        module = ModuleType(BESIDE)
        sys.modules[BESIDE] = module  # where its dataclasses look for their names
        exec(compile(native_source(), FILENAME, "exec"), module.__dict__)
    names: dict[str, Any] = {"__name__": "emitted"}
    exec(compile(source, "emitted.py", "exec"), names)
    return names


def assert_clean(folder: Path) -> None:
    """What people get passes the checks that this project puts on itself."""
    (folder / FILENAME).write_text(native_source())  # which some of them import
    config = ["--config", str(Path(__file__).parents[2] / "pyproject.toml")]
    for check in (["check", *config], ["format", "--diff", *config]):
        ended = subprocess.run(
            [sys.executable, "-m", "ruff", *check, str(folder)],
            capture_output=True, text=True, timeout=60, check=False, cwd=folder,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout


@dataclass(frozen=True)
class Judgement:
    """What an estimator answers."""

    device_total_bytes: int
    fits: bool | None


class FakeEstimator:
    """Answers `fits` and remembers what it was asked."""

    def __init__(self, fits: bool | None = True) -> None:
        self.fits = fits
        self.asked: list[tuple[SwinConfig, TrainSetting, DeviceInfo | None]] = []

    def __call__(
        self, model: SwinConfig, setting: TrainSetting, device: DeviceInfo | None
    ) -> Judgement:
        self.asked.append((model, setting, device))
        return Judgement(7 * GIB, self.fits)
