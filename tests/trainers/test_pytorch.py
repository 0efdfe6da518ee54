"""The plain script: it runs, and its step is the one that is probed."""

from __future__ import annotations

import contextlib
import gzip
import io
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

from planner.libraries.missing_operators import declare_missing_operators
from planner.libraries.registry import find_library
from planner.schema import FactoryModel, Model, SwinConfig, TrainSetting
from planner.tasks import as_task
from planner.trainers.emission import emit_setting
from planner.training import Training
from tests.building import build_real
from tests.covering import covering
from tests.trainers.cases import tiny

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


def run_script(
    text: str, folder: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    file = folder / "train.py"
    file.write_text(text)
    return subprocess.run(
        [sys.executable, "-c", RUN, str(file), "--device", "cpu", *arguments],
        capture_output=True, text=True, timeout=120, cwd=folder, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip


def run_here(text: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As `run_script`, in this process, which has torch already; what raises is raised here."""
    file = folder / "train.py"
    file.write_text(text)
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
            sys.modules.pop("mine", None)  # a factory of the test's, which another may have too
    return subprocess.CompletedProcess(argv, code, out.getvalue(), err.getvalue())


def script(model: Model, **fields: Any) -> str:
    return emit_setting(model, TrainSetting(batch_size=2, **fields), "pytorch").text


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (tiny("timm", 2), {"checkpointing": "blocks", "ema": True, "loss": "soft-target"}),
        *(
            pytest.param(tiny(library), fields, marks=pytest.mark.combinations)
            for library, fields in (
                ("native", {"checkpointing": "stages:0", "accumulate": 2}),
                ("torchvision", {"checkpointing": "selective", "precision": "bf16"}),
                ("transformers", {"checkpointing": "nested", "precision": "fp32"}),
            )
        ),
    ],
)
def test_the_script_runs(model: SwinConfig, fields: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = tmp_path / "out" / "last.pt"
    ended = run_script(
        script(model, **fields), tmp_path, "--synthetic", "--steps", "2", "--output",
        str(checkpoint), "--log-every", "1",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "step 2/2  loss 2." in ended.stdout, ended.stdout
    saved = torch.load(checkpoint)
    built = build_real(model, TrainSetting(**fields))
    assert set(saved["model"]) == set(built.state_dict()), "a checkpoint any script can load"


def test_the_script_profiles_three_steps(tmp_path: Path) -> None:
    text = script(tiny("native"), precision="fp32")
    ended = run_here(text, tmp_path, "--synthetic", "--steps", "6", "--profile", "traced")
    assert ended.returncode == 0, ended.stderr
    trace = gzip.decompress((tmp_path / "traced" / "trace.json.gz").read_bytes())
    assert set(re.findall(r"ProfilerStep#\d+", trace.decode())) == {
        f"ProfilerStep#{number}" for number in (2, 3, 4)
    }
    few = run_here(text, tmp_path, "--synthetic", "--steps", "4", "--profile", "traced")
    assert few.returncode == 2
    assert "--profile is of steps 3 to 5" in few.stderr


def test_the_script_trains_on_a_folder(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    for part, count in (("train", 4), ("val", 2)):
        for name in ("cat", "dog"):
            folder = tmp_path / "data" / part / name
            folder.mkdir(parents=True)
            for index in range(count):
                pillow.new("RGB", (40, 48), (index * 20, 90, 90)).save(folder / f"{index}.png")
    ended = run_here(
        script(tiny("native"), accumulate=2), tmp_path, str(tmp_path / "data"), "--epochs", "1",
        "--workers", "0", "--log-every", "1",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "step 2/2" in ended.stdout, "8 images / (2 × 2) = 2 steps"
    assert "validation" in ended.stdout


def test_on_the_cpu_workers_take_threads_of_the_step(tmp_path: Path) -> None:
    """Threads that share processors with workers wait for each other; one is always left."""
    pillow = pytest.importorskip("PIL.Image")
    for part in ("train", "val"):
        (tmp_path / "data" / part / "cat").mkdir(parents=True)
        pillow.new("RGB", (40, 48)).save(tmp_path / "data" / part / "cat" / "0.png")
    text = script(tiny("native"))
    for workers, left in (("3", 5), ("9", 1)):
        arguments = (str(tmp_path / "data"), "--epochs", "1", "--workers", workers)
        with (
            patch.object(torch, "get_num_threads", return_value=8),
            patch.object(torch, "set_num_threads") as chosen,
            patch.dict(os.environ),
        ):
            os.environ.pop("OMP_NUM_THREADS", None)
            ended = run_here(text, tmp_path, *arguments)
            os.environ["OMP_NUM_THREADS"] = "2"
            run_here(text, tmp_path, *arguments)
        assert "there are 1 images" in str(ended.stderr) + str(ended.returncode)
        chosen.assert_called_once_with(left)


def test_wrong_use_is_one_line(tmp_path: Path) -> None:
    text = script(tiny("native"))
    for arguments, message in (
        ((), "give a data folder, or --synthetic"),
        (("--synthetic",), "--synthetic needs --steps"),
    ):
        ended = run_here(text, tmp_path, *arguments)
        assert ended.returncode == 2
        assert message in ended.stderr
        assert "Traceback" not in ended.stderr
    alone = run_here(script(tiny("native"), world_size=4), tmp_path, "--synthetic", "--steps=1")
    assert "WORLD_SIZE=4 devices needs a process, and the number started is 1" in alone.stderr
    assert "use the command at the top of this file" in alone.stderr
    rate = run_here(script(tiny("native"), optimizer="sgd"), tmp_path, "--synthetic")
    assert "required: --lr" in rate.stderr, "no published rate, so none is made up"


STEPS: list[Any] = [
    {"accumulate": 3, "clip_grad": True},
    {"precision": "bf16", "optimizer": "adamw-forloop", "loss": "label-smoothing"},
    {"precision": "fp16", "clip_grad": True, "optimizer": "adamw-fused"},
    {"precision": "pure-bf16", "memory_format": "channels_last", "optimizer": "sgd"},
    {"ema": True, "amsgrad": True, "zero_grad_to_none": False},
    {"optimizer": "lion"},
    {"offload": "activations"},
    {"optimizer_in_backward": True, "precision": "bf16", "ema": True},
    {"optimizer_in_backward": True, "optimizer": "lion"},
    pytest.param({}, marks=pytest.mark.combinations),
    pytest.param({"optimizer": "rmsprop-forloop"}, marks=pytest.mark.combinations),
]


@pytest.mark.parametrize("fields", STEPS)
def test_its_step_is_the_probed_step(fields: dict[str, Any]) -> None:
    """The script's optimizer_step and `planner.training`'s, from the same weights and batch, leave
    the same weights after two steps, bit for bit."""
    setting = TrainSetting(batch_size=2, **{"precision": "fp32", **fields})
    names: dict[str, Any] = {"__name__": "emitted"}
    exec(compile(script_of(setting), "train.py", "exec"), names)
    torch.manual_seed(0)
    model: nn.Module = names["build_model"]().train()
    twin: nn.Module = names["build_model"]().train()
    twin.load_state_dict(model.state_dict())
    device = torch.device("cpu")
    images, targets = next(names["synthetic_batches"](device))

    probed = Training(twin, setting, as_task(twin, tiny("native"), setting), (images, targets))
    for group in (group for o in probed.optimizers for group in o.param_groups):
        group.update({"lr": 1e-3, "weight_decay": 0.05 if "adamw" in setting.optimizer else 0.0})

    held = names[f"build_optimizer{'s' * setting.optimizer_in_backward}"](model, 1e-3)
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
KINDS = (
    "none",
    "blocks",
    "blocks:1",
    "blocks:every-2",
    "selective",
    "stages",
    "stages:1",
    "nested",
)
CHECKPOINTING = [
    (library, version, kind)
    for library in LIBRARIES
    for version in (1, 2)
    for kind in KINDS
    if kind != "nested" or (library, version) == ("transformers", 1)
]


@pytest.mark.parametrize(
    ("library", "version", "kind"),
    covering(
        LIBRARIES, (1, 2), KINDS, pairs=[(0, 1), (0, 2)],
        possible=lambda *case: case in CHECKPOINTING,
    ),
)  # fmt: skip
def test_its_model_saves_what_the_probed_model_saves(library: str, version: int, kind: str) -> None:
    """Bytes held for backward: the emitted model's checkpointing and attention are the probe's."""
    model = tiny(library, version)
    spec = find_library(library)
    for attention in spec.attentions(model):
        setting = TrainSetting(checkpointing=kind, attention=attention)
        names: dict[str, Any] = {"__name__": "emitted"}
        exec(compile(emit_setting(model, setting, "pytorch").text, "train.py", "exec"), names)
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


def test_a_factory_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n\n\ndef make():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))\n"
    )
    model = FactoryModel(factory="mine:make", image_size=(32, 32), num_classes=10)
    ended = run_here(script(model), tmp_path, "--synthetic", "--steps", "1")
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("checkpointing", "num_blocks"),
    [
        ("blocks", 2),
        ("blocks:every-2", 1),
        ("selective", 2),
        pytest.param("blocks:1", 1, marks=pytest.mark.combinations),
    ],
)
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
    ended = run_here(text, tmp_path, "--synthetic", "--steps", "1")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("forward True") == 2 * num_blocks  # again, in backward
    (tmp_path / "train.py").write_text(text)
    config = str(Path(__file__).parents[2] / "pyproject.toml")
    for check in ("check", "format"):
        options = ["--check"] if check == "format" else []
        clean = subprocess.run(
            [sys.executable, "-m", "ruff", check, *options, "--config", config, "train.py"],
            capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path,
        )  # fmt: skip
        assert clean.returncode == 0, clean.stdout


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
    config = ["--config", str(Path(__file__).parents[2] / "pyproject.toml")]
    for check in (["check", *config], ["format", "--check", *config]):
        ended = subprocess.run(
            [sys.executable, "-m", "ruff", *check, str(tmp_path)],
            capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout


def test_pictures_without_torchvision_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torchvision", "torchvision.datasets", "torchvision.transforms"):
        monkeypatch.setitem(sys.modules, name, None)
    ended = run_here(script(tiny("native")), tmp_path, str(tmp_path))
    assert ended.returncode == 1
    assert "Install the torchvision of this torch" in ended.stderr
