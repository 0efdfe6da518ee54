"""Each trainer for real, on the CPU, by the launch line of what is emitted: two epochs over made
pictures; and what was ended after the first goes on to what was not ended."""

import dataclasses
import json
import os
import re
import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from planner.core.schema import DeviceInfo, FactoryModel, NamedModel, TrainSetting
from planner.trainers.emission import emit, emit_setting
from tests.trainers.cases import GIB, follow, free_port, loaded, make_pictures, recommendation, tiny

torch = pytest.importorskip("torch")
pytest.importorskip("torchvision")
pytestmark = [pytest.mark.trainers, pytest.mark.timeout(400)]  # half a minute on an idle machine

CPU = DeviceInfo(kind="cpu", name="a processor", total_bytes=16 * GIB)
EPOCHS = "--epochs 2 --warmup-epochs 1 --workers 0 --log-every 1 --device cpu --seed 3"


def trained(target: str, folder: Path, again: str = "", model: Any = None, **fields: Any) -> str:
    """What the launch line printed, followed in `folder`; `again` are further words of it."""
    if not again:
        make_pictures(folder / "DATA")
    setting = TrainSetting(**{"batch_size": 2, "precision": "fp32", **fields})
    found = recommendation(setting=setting, device=CPU)
    assert found.evidence is not None
    evidence = found.evidence.model_copy(update={"unit": "pairs" if model else None})
    told = {"model": model or tiny(num_classes=2, drop_path_rate=0.2), "evidence": evidence}
    emitted = emit(found.model_copy(update=told), target)
    emitted.write(folder)
    line = emitted.launch.replace(" LR", " 1e-3")
    words = shlex.split(f"{line} {again}" if "--steps" in line else f"{line} {EPOCHS} {again}")
    set_here = [words.pop(0) for _ in range(len(words)) if "=" in words[0]]
    if words[0] == "deepspeed":
        words[1:1] = ["--master_port", str(free_port())]
    bin_folder = Path(sys.executable).parent
    words[0] = str(bin_folder / words[0])
    own = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RANK", "WORLD_SIZE")}
    environment = {**own, **dict(word.split("=", 1) for word in set_here), "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{bin_folder}:{own['PATH']}"
    if model is not None and "planner" in emitted.text:
        environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    code, output = follow(words, folder, environment)
    assert code == 0, output[-4000:]
    return output


def weights(file: Path) -> dict[str, Any]:
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(file)
    state = torch.load(file, weights_only=False)
    return next(state[key] for key in ("model", "module", "state_dict") if key in state)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


# The last checkpoint, its weights, and what says how far it is after the first of two epochs.
LAST = {
    "accelerate": ("0", "model.safetensors", "progress.json", "[1, 0.0]"),
    "transformers": ("checkpoint-*", "model.safetensors", None, ""),
    "deepspeed": ("0", "mp_rank_00_model_states.pt", "latest", "1"),
}


@pytest.mark.parametrize("target", LAST)
def test_it_trains_and_goes_on_to_the_bit(target: str, tmp_path: Path) -> None:
    if find_spec(target) is None:
        pytest.skip(f"{target} is not installed")
    trained(target, tmp_path, accumulate=1, checkpointing="blocks")
    folders, name, progress, said = LAST[target]
    found = (tmp_path / "output").glob(folders)
    last = max(found, key=lambda folder: int(folder.name.rpartition("-")[2]))
    whole = weights(last / name)
    shutil.rmtree(last)
    if progress:
        (last.parent / progress).write_text(said)
    trained(target, tmp_path, "--resume", accumulate=1, checkpointing="blocks")
    assert same(weights(last / name), whole)


def test_lightning_trains_and_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    trained("lightning", tmp_path, accumulate=2, precision="bf16", optimizer="adamw-fused")
    first = weights(tmp_path / "output/last.ckpt")
    trained("lightning", tmp_path, "--epochs 3 --resume", accumulate=2, precision="bf16",
            optimizer="adamw-fused")  # fmt: skip
    assert not same(weights(tmp_path / "output/last.ckpt"), first)


SHOWN: list[dict[str, Any]] = [
    {"accumulate": 3, "ema": True, "checkpointing": "selective", "clip_grad": True},
    {"optimizer_in_backward": True, "precision": "bf16", "memory_format": "channels_last"},
    {"lora_rank": 2, "frozen_stages": 1, "offload": "activations", "precision": "fp16"},
]


@pytest.mark.parametrize("fields", SHOWN, ids=str)
def test_the_script_goes_on_to_the_bit(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended by Ctrl-C as it begins the second epoch; the log goes on behind its last line."""
    data = make_pictures(tmp_path / "DATA", training=7)
    setting = TrainSetting(**{"batch_size": 2, "precision": "fp32", **fields})
    model = tiny(num_classes=2, drop_path_rate=0.2)
    found = loaded(emit_setting(model, setting, "pytorch", device=CPU), tmp_path)

    def run(*more: str, ended: bool = False) -> None:
        words = [str(data), *EPOCHS.split(), "--lr", "1e-2", *more]
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        write = found.save_state
        with monkeypatch.context() as patch:
            if ended:

                def stop(state: Any, file: Path) -> None:
                    write(state, file)
                    if file.name == "last.pt":
                        raise KeyboardInterrupt

                patch.setattr(found, "save_state", stop)
                with pytest.raises(SystemExit, match="interrupted; --resume goes on"):
                    found.main()
            else:
                found.main()

    run("--output", str(tmp_path / "whole"))
    run("--output", str(tmp_path / "parts"), ended=True)
    with pytest.raises(SystemExit, match="go on from it by --resume"):
        run("--output", str(tmp_path / "parts"))
    run("--output", str(tmp_path / "parts"), "--resume")
    whole, parts = (torch.load(tmp_path / name / "last.pt") for name in ("whole", "parts"))
    assert same(parts["model"], whole["model"])
    assert same(parts.get("ema", {}), whole.get("ema", {}))
    larger = dataclasses.replace(found.SETTING, batch_size=3)
    monkeypatch.setattr(found, "SETTING", larger)
    with pytest.raises(SystemExit, match="of another step, or not everywhere"):
        run("--output", str(tmp_path / "parts"), "--resume")
    steps = [json.loads(line) for line in (tmp_path / "parts/log.jsonl").read_text().splitlines()]
    assert sum("accuracy" in line for line in steps) == 2
    assert all(line["images_per_second"] > 0 for line in steps if "loss" in line)


@pytest.mark.parametrize(
    ("target", "fields"),
    [("pytorch", {"parallelism": "ddp", "ema": True}),
     ("pytorch", {"parallelism": "fsdp", "ema": True, "checkpointing": "blocks"}),
     ("accelerate", {"parallelism": "ddp", "precision": "bf16"}),
     ("lightning", {"parallelism": "ddp"}),
     ("transformers", {"parallelism": "ddp"}),
     ("deepspeed", {"parallelism": "zero2"})],
    ids=str,
)  # fmt: skip
def test_two_ranks(target: str, fields: dict[str, Any], tmp_path: Path) -> None:
    if target != "pytorch" and find_spec(target) is None:
        pytest.skip(f"{target} is not installed")
    trained(target, tmp_path, world_size=2, batch_size=1, **fields)
    if target == "pytorch":
        first = torch.load(tmp_path / "output/last.pt")
        trained(target, tmp_path, "--epochs 3 --resume", world_size=2, batch_size=1, **fields)
        second = torch.load(tmp_path / "output/last.pt")
        assert second["step"] == first["step"] * 3 // 2
        assert {n: w.shape for n, w in second["model"].items()} == {
            n: w.shape for n, w in first["model"].items()
        }


def test_a_task_and_a_loss_that_is_no_number(tmp_path: Path) -> None:
    """The script of a task trains on its own batches; a rate too large ends with what to do."""
    (tmp_path / "own.py").write_text(
        "import torch\n\n\nclass Task:\n"
        "    unit = 'pairs'\n\n"
        "    def module(self):\n        return torch.nn.Linear(3, 1)\n\n"
        "    def batch(self, size, device):\n        return torch.randn(size, 3, device=device)\n\n"
        "    def loss(self, module, batch):\n        return module(batch).square().mean()\n"
    )
    model = FactoryModel(factory="own:Task")
    said = trained("pytorch", tmp_path, "--device cpu --log-every 5", model)
    assert re.search(r"step 20/20 .* pairs/s", said)
    with pytest.raises(AssertionError, match="begin again with a smaller --lr"):
        trained("pytorch", tmp_path, "--device cpu --lr 1e30 --output x", model)


def test_a_model_of_a_library_that_is_a_task(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = NamedModel(
        library="torchvision", name="lraspp_mobilenet_v3_large", task="segmentation",
        image_size=(64, 64), in_channels=3, num_classes=5,
    )  # fmt: skip
    said = trained("pytorch", tmp_path, "--device cpu --log-every 10", model)
    assert "step 20/20" in said
