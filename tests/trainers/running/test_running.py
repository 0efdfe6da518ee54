"""What is emitted, followed word for word in each trainer's own code, for two optimizer steps.

On the CPU, over a folder of made pictures; each trainer once, with a setting that shows most of its
words. What pip installs is run; timm's train.py where TIMM_CHECKOUT names its repository.
"""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from planner.core.schema import DeviceInfo
from planner.core.schema.loading import LoaderSetting
from planner.estimation.recipe import recipe_of
from planner.trainers.emission import emit_setting
from planner.trainers.plan import Emitted
from tests.trainers.cases import GIB, tiny
from tests.trainers.running.harness import RATE, Case, Run, differences, make_pictures, train

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(400)]  # a minute on an idle machine

CUDA = DeviceInfo(kind="cuda", name="NVIDIA GeForce RTX 3090", total_bytes=24 * GIB)
# As no trainer loads by itself.
FED = LoaderSetting(workers=1, prefetch_factor=3, pin_memory=False)


def script_of(emitted: Emitted) -> str:
    """The script that a trainer's file shows, as pasted; a rate where it leaves that open."""
    text = emitted.code or emitted.text
    head = text.partition("# Your script")[2].partition("\n# Note:")[0]
    lines = [line.removeprefix("#").removeprefix("     ") for line in head.splitlines()[1:]]
    return re.sub(r"\bLR\b|\.\.\.(?=  # yours)", str(RATE), "\n".join(lines)) + "\n"


def trained(case: Case, folder: Path, before: str = "", **more: Any) -> Run:
    """A training by the script that the trainer's file shows, `before` which stands something."""
    emitted = emit_setting(case.model, case.setting, case.target, device=case.device)
    return train(case, folder, before + script_of(emitted), **more)


ONE_CPU_OF_DEEPSPEED = """
import deepspeed

# Its collectives on one CPU are C++ that it compiles behind a lock, which outlives a run that is
# killed, and whose ranks spin for each other. Without them gloo sends.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
"""


def test_the_plain_script(tmp_path: Path) -> None:
    fields = {
        "checkpointing": "blocks", "optimizer": "adamw-fused", "clip_grad": True, "ema": True,
        "validation_batch_size": 6, "attention": "sdpa",
    }  # fmt: skip
    make_pictures(tmp_path / "DATA", training=16)  # an epoch is two steps
    case = Case("pytorch", tiny("native", drop_path_rate=0.2), fields, loader=FED)
    assert differences(train(case, tmp_path)) == []


SHOWN = [
    Case("transformers", tiny("transformers"), {
        "checkpointing": "blocks", "optimizer": "adamw-fused", "attention": "eager",
        "validation_batch_size": 6,
    }, loader=FED),
    Case("lightning", tiny("native"), {
        "checkpointing": "blocks", "optimizer": "adamw-fused", "clip_grad": True,
        "attention": "sdpa", "validation_batch_size": 6,
    }, loader=FED),
    Case("accelerate", tiny("native"), {
        "precision": "bf16", "checkpointing": "blocks", "optimizer": "sgd", "clip_grad": True,
        "attention": "sdpa",
    }, loader=FED),
]  # fmt: skip


@pytest.mark.parametrize("case", SHOWN, ids=lambda case: case.target)
def test_the_script_that_a_file_shows(case: Case, tmp_path: Path) -> None:
    assert differences(trained(case, tmp_path)) == []


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_deepspeed(tmp_path: Path) -> None:
    fields = {"checkpointing": "blocks", "optimizer": "adamw-fused", "clip_grad": True}
    extensions = tmp_path / "extensions"
    environment = {"TORCH_EXTENSIONS_DIR": str(extensions)}
    case = Case("deepspeed", tiny("native"), fields, loader=FED)
    run = trained(case, tmp_path, ONE_CPU_OF_DEEPSPEED, environment=environment)
    assert not extensions.exists(), "nothing is compiled"
    assert differences(run, clips=None) == []  # it clips by a function of its own


MIXED = {"loss": "soft-target", "clip_grad": True}
TIMM_CHECKOUT = os.environ.get("TIMM_CHECKOUT")


@pytest.mark.skipif(
    not TIMM_CHECKOUT, reason="TIMM_CHECKOUT names no timm repository: the package has no train.py"
)
def test_timm(tmp_path: Path) -> None:
    fields = {
        **MIXED, "precision": "bf16", "ema": True, "validation_batch_size": 6, "attention": "eager",
    }  # fmt: skip
    case = Case("timm", tiny("timm"), fields, loader=FED)
    run = train(case, tmp_path, scripts={"train.py": Path(str(TIMM_CHECKOUT), "train.py")})
    assert differences(run, benchmark=None) == []  # which it sets only where there is CUDA


@pytest.mark.skipif(find_spec("mmpretrain") is None, reason="mmpretrain is not installed")
def test_mmengine(tmp_path: Path) -> None:
    found = find_spec("mmpretrain")
    assert found is not None
    script = Path(str(found.origin)).parent / ".mim" / "tools" / "train.py"
    fields = {
        **MIXED, "checkpointing": "blocks", "validation_batch_size": 6, "attention": "eager",
    }  # fmt: skip
    case = Case("mmengine", tiny("native"), fields, loader=FED)
    run = train(case, tmp_path, scripts={"tools/train.py": script})
    # Its rates rise with each micro-batch: at the second of 4 × 20 a first step is taken.
    recipe = recipe_of(case.setting, case.model)
    share = recipe.warmup_start + (1 - recipe.warmup_start) / (4 * recipe.warmup_epochs - 1)
    assert recipe.learning_rate is not None
    start = recipe.learning_rate * share
    # Its Swin is not one that the planner knows: what it saves is not estimated.
    assert differences(run, saved_bytes=None, first_rate=start) == []
