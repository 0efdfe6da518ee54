"""The plain script: it runs, and its step is the one that is probed."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from planner.core.schema import FactoryModel, Model, TrainSetting
from planner.libraries.missing_operators import declare_missing_operators
from planner.libraries.registry import find_library
from planner.trainers.emission import emit_setting
from planner.trainers.imports import BESIDE
from planner.trainers.native_file import FILENAME, native_source
from planner.training.step import Training
from planner.training.tasks import as_task
from tests.building import build_real
from tests.covering import covering
from tests.trainers.cases import FakeEstimator, assert_clean, executed, tiny
from tests.trainers.running.harness import make_pictures

declare_missing_operators()
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

# The scripts know nothing of the planner: what lets PyPI's torchvision import beside a CPU torch
# is done for them from outside.
RUN = (
    "import runpy, sys; from planner.libraries.missing_operators import "
    "declare_missing_operators as declare; declare(); "
    "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)


def written(text: str, folder: Path) -> Path:
    file = folder / "train.py"
    file.write_text(text)
    (folder / FILENAME).write_text(native_source())
    return file


def run_script(
    text: str, folder: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    file = written(text, folder)
    return subprocess.run(
        [sys.executable, "-c", RUN, str(file), "--device", "cpu", *arguments],
        capture_output=True, text=True, timeout=120, cwd=folder, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip


def run_here(text: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As `run_script`, in this process, which has torch already; what raises is raised here."""
    file = written(text, folder)
    argv, code = [str(file), "--device", "cpu", *arguments], 0
    with (
        patch.object(sys, "argv", argv),
        patch.object(sys, "path", [str(folder), *sys.path]),
        contextlib.chdir(folder),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        try:
            runpy.run_path(str(file), run_name="__main__")
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            err.write(f"{ended.code}\n" if isinstance(ended.code, str) else "")
        finally:
            for name in ("mine", BESIDE):  # another test may have others under these names
                sys.modules.pop(name, None)
    return subprocess.CompletedProcess(argv, code, out.getvalue(), err.getvalue())


def script(model: Model, **fields: Any) -> str:
    return emit_setting(model, TrainSetting(batch_size=2, **fields), "pytorch").text


def test_the_script_runs(tmp_path: Path) -> None:
    """In a process of its own."""
    text = script(tiny("native", 2), checkpointing="blocks", ema=True, loss="soft-target")
    ended = run_script(text, tmp_path, "--synthetic", "--steps", "2", "--log-every", "1")
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"step 2/2  epoch 1\.00  rate \S+  loss 2\.", ended.stdout), ended.stdout
    assert not (tmp_path / "output").exists(), "nothing is kept of random images"


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_every_epoch_sees_every_picture_once(tmp_path: Path) -> None:
    """9 pictures in steps of 2 × 3: the rest of an epoch begins the next one's first step."""
    names = executed(script(tiny("native"), accumulate=3, world_size=1))
    drawn = iter(names["Endless"](9, 0, 0, 0))
    seen = [next(drawn) for _ in range(27)]
    for epoch in range(3):
        assert sorted(index for index, _ in seen[9 * epoch : 9 * epoch + 9]) == list(range(9))
    assert [place for _, place in seen] == list(range(27))
    later = iter(names["Endless"](9, 0, 0, 2))
    assert [next(later) for _ in range(15)] == seen[12:]
    shared = executed(script(tiny("native"), world_size=2))
    ranks = [iter(shared["Endless"](9, rank, 0, 0)) for rank in range(2)]
    both = [next(each) for _ in range(9) for each in ranks]
    assert sorted(index for index, _ in both[:9]) == list(range(9))
    data = str(make_pictures(tmp_path / "data", training=9))
    ended = run_here(
        script(tiny("native"), accumulate=3), tmp_path, data,
        "--epochs", "3", "--workers", "0", "--log-every", "1",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "step 5/5  epoch 3.33" in ended.stdout, "27 pictures are in 5 steps of 6"
    assert [r["step"] for r in lines_of(tmp_path / "output") if "accuracy" in r] == [2, 3, 5]


class _InterruptionError(Exception):
    pass


def test_a_resumed_training_is_an_uninterrupted_one(tmp_path: Path) -> None:
    """Losses, rates, accuracies and weights, to the bit, with all that is random in a training."""
    text = script(tiny("timm", drop_path_rate=0.2), ema=True, precision="fp16", accumulate=2)
    data = str(make_pictures(tmp_path / "data", training=9))
    arguments = (data, "--epochs", "3", "--warmup-epochs", "1", "--log-every", "1")
    whole = run_here(text, tmp_path, *arguments, "--workers", "0", "--output", "whole")
    assert whole.returncode == 0, whole.stderr
    replace = Path.replace

    def replaced(part: Path, file: Path) -> Path:
        replace(part, file)
        raise _InterruptionError

    with patch.object(Path, "replace", replaced), pytest.raises(_InterruptionError):
        run_here(text, tmp_path, *arguments, "--workers", "0", "--output", "parts")
    again = run_here(text, tmp_path, *arguments, "--workers", "0", "--output", "parts")
    assert "go on from it by --resume, or take another --output" in again.stderr
    rest = run_here(
        text, tmp_path, *arguments, "--workers", "1", "--output", "parts", "--resume"
    )  # fmt: skip
    assert rest.returncode == 0, rest.stderr
    first, second = lines_of(tmp_path / "whole"), lines_of(tmp_path / "parts")
    for key in ("step", "rate", "loss", "accuracy"):
        assert [row.get(key) for row in first] == [row.get(key) for row in second], key
    states = [torch.load(tmp_path / place / "last.pt") for place in ("whole", "parts")]
    for part in {"model", "ema"} & states[0].keys():
        for name, weight in states[0][part].items():
            assert torch.equal(weight, states[1][part][name]), (part, name)
    assert (tmp_path / "parts" / "best.pt").is_file()
    model = executed(text)["build_model"]()
    model.load_state_dict(states[0].get("ema", states[0]["model"]))  # any script can


def test_a_loss_that_is_no_number_ends_it_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    data = str(make_pictures(tmp_path / "data", training=9))
    ended = run_here(
        script(tiny("native"), precision="fp32"), tmp_path, data, "--epochs", "2",
        "--workers", "0", "--lr", "1e30", "--warmup-epochs", "0",
    )  # fmt: skip
    assert ended.returncode == 1
    assert "the loss is nan by step" in ended.stderr
    assert "begin again with a smaller --lr" in ended.stderr
    assert not (tmp_path / "output" / "best.pt").exists()


def test_a_full_disk_costs_no_checkpoint_and_no_training(tmp_path: Path) -> None:
    names = executed(script(tiny("native")))
    file = tmp_path / "last.pt"
    file.write_text("as it was")
    with patch.object(torch, "save", side_effect=RuntimeError("file write failed")):
        names["write"]({}, file)
    assert file.read_text() == "as it was"
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"]


def test_published_weights_bring_their_own_recipe() -> None:
    """`--pretrained` trains shorter and at a smaller rate, unless told; a part of a model does."""
    model = find_library("timm").find("swin_tiny_patch4_window7_224")
    assert model is not None
    options = options_of(script(model), "DATA")
    assert (options.epochs, options.warmup_epochs, options.weight_decay) == (300, 20, 0.05)
    tuned = options_of(script(model), "DATA", "--pretrained", "--epochs", "3")
    assert (tuned.epochs, tuned.warmup_epochs, tuned.weight_decay) == (3, 5, 1e-8)
    assert tuned.lr == pytest.approx(options.lr * 2e-5 / 5e-4)
    frozen = options_of(script(model, frozen_stages=2), "DATA")
    assert (frozen.epochs, frozen.lr) == (30, pytest.approx(tuned.lr))
    assert "--pretrained" not in script(tiny("native"))


def options_of(text: str, *arguments: str) -> argparse.Namespace:
    with patch.object(sys, "argv", ["train.py", *arguments]):
        found: argparse.Namespace = executed(text)["arguments"]()
    return found


def test_wrong_use_is_one_line(tmp_path: Path) -> None:
    text, empty = script(tiny("native")), tmp_path / "empty"
    empty.mkdir()
    for arguments, message in (
        ((), "give a data folder, or --synthetic"),
        (("--synthetic",), "--synthetic needs --steps"),
        (("nowhere",), "No such file or directory: 'nowhere'"),
        ((str(empty),), "Couldn't find any class folder"),
    ):
        ended = run_here(text, tmp_path, *arguments)
        assert ended.returncode > 0
        assert message in ended.stderr
        assert "Traceback" not in ended.stderr
    alone = run_here(script(tiny("native"), world_size=4), tmp_path, "--synthetic", "--steps=1")
    assert "WORLD_SIZE=4 devices needs a process, and the number started is 1" in alone.stderr
    assert "use the command at the top of this file" in alone.stderr
    rate = run_here(script(tiny("native"), optimizer="sgd"), tmp_path, "--synthetic")
    assert "required: --lr" in rate.stderr, "no published rate, so none is made up"


STEPS: list[dict[str, Any]] = [
    {"accumulate": 3, "precision": "bf16", "optimizer": "adamw-forloop", "loss": "label-smoothing"},
    {"precision": "fp16", "clip_grad": True, "optimizer": "adamw-fused"},
    {"precision": "pure-bf16", "memory_format": "channels_last", "optimizer": "sgd"},
    {"ema": True, "zero_grad_to_none": False, "offload": "activations"},
    {"optimizer": "lion", "frozen_stages": 1},
    {"optimizer_in_backward": True, "precision": "bf16", "ema": True},
]


@pytest.mark.parametrize("fields", STEPS)
def test_its_step_is_the_probed_step(fields: dict[str, Any]) -> None:
    """The script's optimizer_step and `planner.training.step`'s, from the same weights and batch,
    leave the same weights after two steps, bit for bit."""
    setting = TrainSetting(batch_size=2, **{"precision": "fp32", **fields})
    names = executed(script_of(setting))
    torch.manual_seed(0)
    model: nn.Module = names["build_model"]().train()
    twin: nn.Module = names["build_model"]().train()
    twin.load_state_dict(model.state_dict())
    device = torch.device("cpu")
    images, targets = next(names["synthetic_batches"](device))

    setting = setting.with_recipe(of_swin=True)
    probed = Training(twin, setting, as_task(twin, tiny("native"), setting), (images, targets))
    for group in (group for o in probed.optimizers for group in o.param_groups):
        group.update({"lr": 1e-3, "weight_decay": 0.0})  # the probe's is one for all weights

    decay = (0.0,) if "adamw" in setting.optimizer else ()
    held = names[f"build_optimizer{'s' * setting.optimizer_in_backward}"](model, 1e-3, *decay)
    optimizer = () if setting.optimizer_in_backward else (held,)
    scaler = torch.amp.GradScaler("cpu") if setting.precision == "fp16" else None
    average = [p.detach().clone() for p in model.parameters()]

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield images, targets

    for _ in range(2):
        probed.step()
        given = (average,) if setting.ema else ()
        names["optimizer_step"](model, model, *optimizer, scaler, *given, batches())
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    if setting.ema:
        assert probed.ema is not None
        assert all(torch.equal(a, b) for a, b in zip(average, probed.ema, strict=True))
    kept = all(p.grad is not None for p in model.parameters())
    assert kept is not setting.zero_grad_to_none


def script_of(setting: TrainSetting) -> str:
    return emit_setting(tiny("native"), setting, "pytorch").text


LIBRARIES = ("native", "timm", "torchvision", "transformers")


# Each library and version, and each kind of checkpointing.
CHECKPOINTING = covering(
    LIBRARIES,
    (1, 2),
    ("none", "blocks", "blocks:1", "blocks:every-2", "selective", "stages", "stages:1"),
    pairs=[(0, 1)],
)


@pytest.mark.parametrize(("library", "version", "kind"), CHECKPOINTING)
def test_its_model_saves_what_the_probed_model_saves(library: str, version: int, kind: str) -> None:
    """Bytes held for backward: the emitted model's checkpointing and attention are the probe's."""
    model = tiny(library, version)
    spec = find_library(library)
    for attention in spec.attentions(model):
        setting = TrainSetting(checkpointing=kind, attention=attention)
        names = executed(emit_setting(model, setting, "pytorch").text)
        assert saved_bytes(names["build_model"]()) == saved_bytes(build_real(model, setting))


def saved_bytes(module: nn.Module) -> int:
    count = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal count
        count += tensor.numel() * tensor.element_size()
        return tensor

    torch.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module.train()(torch.randn(2, 3, 32, 32))
    return count


@pytest.mark.parametrize(("checkpointing", "num_blocks"), [("blocks:every-2", 1), ("selective", 2)])
def test_the_script_of_a_factory_wraps_its_blocks(
    checkpointing: str, num_blocks: int, tmp_path: Path
) -> None:
    """The wrapper stands in the script, which runs where the planner is not installed."""
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\n\nCALLS = []\n\n\n"
        "class Block(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layer = nn.Linear(48, 48)\n\n    def forward(self, x):\n"
        "        print('forward', torch._C._current_graph_task_id() != -1)\n"
        "        return self.layer(x)\n\n\ndef make():\n    return nn.Sequential(\n"
        "        nn.Flatten(), nn.Linear(3072, 48), Block(), Block(), nn.Linear(48, 10)\n    )\n"
    )
    model = FactoryModel(factory="mine:make", image_size=(32, 32), num_classes=10)
    text = script(model, checkpointing=checkpointing, accumulate=2)
    imports = re.findall(r"^ *(?:import|from) planner\b.*", text, re.MULTILINE)
    assert all("to watch only" in line for line in imports)
    ended = run_here(text, tmp_path, "--synthetic", "--steps", "1", "--lr", "0.1")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("forward True") == 2 * num_blocks  # again, in backward


SPREAD: list[dict[str, Any]] = [
    {"parallelism": "ddp", "ddp_bucket_view": True, "ddp_compression": "bf16"},
    {"parallelism": "fsdp", "checkpointing": "blocks:1", "ema": True},
    {"parallelism": "hsdp", "fsdp_shard_size": 2, "clip_grad": True, "compile": "default"},
]


def test_scripts_are_formatted_and_clean(tmp_path: Path) -> None:
    """What people get passes the checks that this project puts on itself."""
    for index, (library, version, kind) in enumerate(CHECKPOINTING):
        setting = TrainSetting(
            checkpointing=kind, ema=True, clip_grad=True, loss="soft-target", accumulate=2,
            compile="default", precision="fp32" if index % 2 else "pure-bf16",
        )  # fmt: skip
        for target in ("pytorch", "lightning"):
            changes = {"ema": False} if target == "lightning" else {}
            emitted = emit_setting(
                tiny(library, version), setting.model_copy(update=changes), target
            )
            (tmp_path / f"{target}{index}.py").write_text(emitted.text)
    for index, spread in enumerate(SPREAD):
        setting = TrainSetting(accumulate=2, world_size=4, **spread)
        emitted = emit_setting(tiny("native"), setting, "pytorch", estimator=FakeEstimator())
        (tmp_path / f"spread{index}.py").write_text(emitted.text)
    assert_clean(tmp_path)
