"""Models and settings that many tests of emit share; and a launch line of several ranks, followed
with a deadline: nothing of it is left behind."""

import contextlib
import importlib
import io
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

from planner.core.schema import DeviceInfo, MeasurementRecord, SwinConfig, TrainSetting
from planner.core.schema.record import DataResult, Feeding, LoaderRun, LoaderSetting, Recommendation
from planner.machine.supervisor import descendants
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


def loaded(emitted: Emitted, folder: Path) -> Any:
    """`train.py` of what was emitted, as a module, with what lies beside it."""
    emitted.write(folder)
    names = [Path(name).stem for name in (emitted.filename, *emitted.modules)]
    with patch.object(sys, "path", [str(folder), *sys.path]):
        for name in names:
            sys.modules.pop(name, None)
        found = importlib.import_module("train")
        for name in names:  # imported when they are first asked for
            if name in ("levers", "pictures", "native_swin"):
                importlib.import_module(name)
    return found


def run_here(emitted: Emitted, folder: Path, *arguments: str) -> str:
    """What `train.py` prints of a training on the CPU, in this process and in `folder`."""
    argv = ["train.py", "--device", "cpu", *arguments]
    with (
        contextlib.chdir(folder),
        patch.object(sys, "path", [str(folder), *sys.path]),
        contextlib.redirect_stdout(io.StringIO()) as out,
    ):
        module = loaded(emitted, folder)
        with patch.object(sys, "argv", argv):
            module.main()
    return out.getvalue()


def make_pictures(folder: Path, training: int = 6, validation: int = 4, classes: int = 2) -> Path:
    """DATA/train/CLASS and DATA/val/CLASS with pictures of 40 pixels, each class a colour."""
    image = importlib.import_module("PIL.Image")
    for part, count in (("train", training), ("val", validation)):
        for number in range(count):
            name = number % classes
            file = folder / part / f"class{name}" / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            colour = [16 * number % 100, 40, 40]
            colour[name % 3] += 120
            image.new("RGB", (40, 40), tuple(colour)).save(file)
    return folder


SECONDS = 240.0  # a launcher and two ranks import torch, on a busy machine


def follow(command: list[str], folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    """(the exit code, everything that was printed) of `command`, run in `folder`.

    It ends with its launcher, whoever holds its output still. Past the deadline, or if the test
    itself is stopped, every process below it ends: torchrun's ranks lead sessions of their own, so
    they are found by their parents.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        started = subprocess.Popen(
            command, cwd=folder, env=environment, start_new_session=True,
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            started.wait(SECONDS)
        finally:
            for process in sorted((*descendants(started.pid), started.pid), reverse=True):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            started.wait()
        output.seek(0)
        return started.returncode, output.read()


def free_port() -> int:
    """One that nobody listened on a moment ago."""
    with socket.create_server(("localhost", 0)) as found:
        return int(found.getsockname()[1])
