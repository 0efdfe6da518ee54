"""What is emitted, followed word for word in each trainer's own code, for two optimizer steps.

On the CPU, over a folder of made pictures. Every trainer that pip installs here is run; the others
where a variable names what pip does not have: TIMM_CHECKOUT (its train.py), MMPRETRAIN_PATH (a
folder with mmpretrain and mmcv-lite), SWIN_TRANSFORMER_CHECKOUT and SWIN_TRANSFORMER_TIMM (a folder
with timm 0.4.12). A table at the end says what ran and what was refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from planner.core.errors import UnsupportedError
from planner.core.schema import DeviceInfo
from planner.core.schema.distribution import DEEPSPEED as DEEPSPEED_STAGES
from planner.core.schema.loading import LoaderSetting
from planner.estimation.estimate import estimate, resolve
from planner.estimation.recipe import recipe_of
from planner.trainers.emission import emit_setting
from planner.trainers.plan import Emitted
from tests.trainers.cases import GIB, FakeEstimator, tiny
from tests.trainers.running.harness import RATE, Case, Run, differences, make_pictures, train

pytestmark = [
    pytest.mark.trainers,
    pytest.mark.timeout(400),
]  # starts a trainer, twice or so a minute

CUDA = DeviceInfo(kind="cuda", name="NVIDIA GeForce RTX 3090", total_bytes=24 * GIB)
Record = Callable[[str, object], None]


def row(record: Record, case: Case, result: str) -> None:
    """A line of the table at the end."""
    record("row", (case.target, case.title, result))


def ran(record: Record, case: Case, found: list[str]) -> None:
    row(record, case, "ran" if not found else f"differs: {'; '.join(found)}")
    assert not found, "\n".join(found)


# Few shapes of weights: adamw-8bit compiles a kernel for each.
ONE_BLOCK, ONE_HF_BLOCK = (
    tiny(library, depths=(1,), num_heads=(2,), embed_dim=64) for library in ("timm", "transformers")
)
# As no trainer loads by itself.
FED = LoaderSetting(workers=1, prefetch_factor=3, pin_memory=False, persistent_workers=False)
PYTORCH = [
    Case("pytorch", tiny("native"), {"attention": "eager"}, loader=FED),
    Case("pytorch", tiny("native"), {"attention": "eager", "world_size": 2}, loader=(
        FED.model_copy(update={"pipeline": "timm", "workers": 4})
    )),
    Case("pytorch", tiny("native"), {"attention": "eager", "loss": "soft-target"}, loader=(
        FED.model_copy(update={"pipeline": "transformers", "persistent_workers": True})
    )),
    Case("pytorch", tiny("native", drop_path_rate=0.2), {
        "checkpointing": "blocks", "optimizer": "adamw-fused", "clip_grad": True, "ema": True,
        "validation_batch_size": 6, "attention": "sdpa",
    }),
    Case("pytorch", tiny("torchvision"), {
        "precision": "bf16", "optimizer": "sgd", "loss": "soft-target", "attention": "eager",
    }),
    Case("pytorch", tiny("torchvision"), {
        "precision": "bf16", "loss": "label-smoothing", "world_size": 2, "attention": "eager",
    }),
    Case("pytorch", tiny("timm"), {"checkpointing": "blocks:every-2", "attention": "eager"}),
    Case("pytorch", tiny("torchvision", 2), {"checkpointing": "selective", "precision": "bf16"}),
    Case("pytorch", tiny("timm"), {"compile": "default", "attention": "eager"}),
    Case("pytorch", ONE_BLOCK, {"optimizer": "adamw-8bit", "attention": "eager"}),
    Case("pytorch", tiny("timm"), {"offload": "activations", "attention": "eager"}),
    Case("pytorch", tiny("timm"), {
        "optimizer_in_backward": True, "batch_size": 8, "accumulate": 1, "ema": True,
        "optimizer": "adamw-fused", "attention": "eager", "validation_batch_size": 6,
    }),
    Case("pytorch", tiny("timm"), {"lora_rank": 2, "lora_targets": "all", "attention": "eager"}),
    Case("pytorch", tiny("torchvision"), {
        "frozen_stages": 1, "world_size": 2, "attention": "eager",
    }),
]  # fmt: skip


@pytest.mark.parametrize("case", PYTORCH, ids=lambda case: case.title)
def test_the_plain_script(case: Case, tmp_path: Path, record_property: Record) -> None:
    compiled = case.setting.compile != "off"
    make_pictures(tmp_path / "DATA", training=16)  # an epoch is two steps
    run = train(case, tmp_path, environment={"SPY_COMPILED": "1"} if compiled else {})
    instead: dict[str, Any] = {}
    if case.setting.optimizer_in_backward:
        instead["decay"] = None  # the first weight has an optimizer of its own
    if compiled:  # nothing looks into compiled code; what saves its inputs is the compiler's choice
        unseen = ("images", "micro_batches", "autocast", "sdpa", "classes", "saved_bytes")
        instead = dict.fromkeys((*unseen, "validation_batch", "drop_path"))
    if case.setting.world_size > 1:
        instead["validation_batch"] = 3  # each of two ranks has half of the six pictures
    ran(record_property, case, differences(run, **instead))


def each_rank(case: Case) -> dict[str, Any]:
    """Of several ranks each has a part of the six pictures for validation."""
    return {"validation_batch": None} if case.setting.world_size > 1 else {}


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


TRANSFORMERS = [
    Case("transformers", tiny("transformers"), {"attention": "eager"}, loader=FED),
    Case("transformers", tiny("transformers"), {
        "checkpointing": "nested", "optimizer": "adamw-fused", "attention": "eager",
        "validation_batch_size": 6,
    }),
    Case("transformers", tiny("transformers", drop_path_rate=0.2), {
        "precision": "bf16", "optimizer": "sgd", "clip_grad": True, "loss": "label-smoothing",
        "attention": "sdpa",
    }),
    Case("transformers", tiny("transformers"), {
        "checkpointing": "blocks", "loss": "soft-target", "attention": "sdpa",
    }),
    Case("transformers", tiny("transformers", 2), {
        "checkpointing": "stages", "optimizer": "adamw-forloop",
    }),
    Case("transformers", tiny("transformers"), {
        "lora_rank": 2, "lora_targets": "all", "frozen_stages": 1, "attention": "eager",
    }),
    Case("transformers", tiny("transformers", 2), {
        "lora_rank": 2, "checkpointing": "stages", "optimizer": "sgd", "loss": "soft-target",
    }),
    Case("transformers", tiny("transformers"), {"frozen_stages": 1, "attention": "eager"}),
    Case("transformers", ONE_HF_BLOCK, {"optimizer": "adamw-8bit", "attention": "eager"}),
    Case("transformers", tiny("transformers"), {
        "offload": "activations", "loss": "soft-target", "attention": "eager",
    }),
    Case("transformers", tiny("transformers"), {"world_size": 2, "attention": "eager"}),
]  # fmt: skip


@pytest.mark.parametrize("case", TRANSFORMERS, ids=lambda case: case.title)
def test_transformers(case: Case, tmp_path: Path, record_property: Record) -> None:
    ran(record_property, case, differences(trained(case, tmp_path), **each_rank(case)))


LIGHTNING = [
    Case("lightning", tiny("native"), {"attention": "eager"}, loader=FED),
    Case("lightning", tiny("native"), {
        "precision": "bf16", "checkpointing": "blocks", "optimizer": "adamw-fused",
        "clip_grad": True, "attention": "sdpa", "validation_batch_size": 6,
    }),
    Case("lightning", tiny("timm"), {
        "checkpointing": "stages", "optimizer": "sgd", "loss": "soft-target", "attention": "eager",
    }),
    Case("lightning", tiny("native"), {"offload": "activations", "attention": "eager"}),
    Case("lightning", tiny("native"), {
            "clip_grad": True, "optimizer": "adamw-fused", "attention": "eager",
        }),
    Case("lightning", tiny("timm"), {
        "lora_rank": 2, "frozen_stages": 1, "attention": "eager",
    }),
    Case("lightning", tiny("native"), {
        "world_size": 2, "parallelism": "ddp", "ddp_bucket_view": True, "attention": "eager",
    }),
    Case("lightning", tiny("native"), {
        "world_size": 2, "parallelism": "fsdp", "attention": "eager", "clip_grad": True,
    }),
]  # fmt: skip


@pytest.mark.parametrize("case", LIGHTNING, ids=lambda case: case.title)
def test_lightning(case: Case, tmp_path: Path, record_property: Record) -> None:
    run = trained(case, tmp_path)
    instead = each_rank(case)
    if case.setting.parallelism == "fsdp":  # gathered weights are among what is saved
        instead["saved_bytes"] = None
    ran(record_property, case, differences(run, **instead))


ACCELERATE = [
    Case("accelerate", tiny("native"), {"attention": "eager"}, loader=FED),
    Case("accelerate", tiny("native"), {
        "precision": "bf16", "checkpointing": "blocks", "optimizer": "sgd", "clip_grad": True,
        "attention": "sdpa",
    }),
    Case("accelerate", tiny("torchvision"), {
        "checkpointing": "stages:0,1", "optimizer": "adamw-fused", "loss": "soft-target",
    }),
    Case("accelerate", tiny("native"), {
        "optimizer_in_backward": True, "accumulate": 1, "attention": "eager",
    }),
    Case("accelerate", tiny("timm"), {
        "lora_rank": 2, "lora_targets": "all", "attention": "eager", "clip_grad": True,
    }),
    Case("accelerate", tiny("native"), {"offload": "activations", "attention": "eager"}),
    Case("accelerate", tiny("native"), {
        "world_size": 2, "ddp_bucket_view": True, "parallelism": "ddp", "gradient_sync": "every",
        "attention": "eager",
    }),
]  # fmt: skip


@pytest.mark.parametrize("case", ACCELERATE, ids=lambda case: case.title)
def test_accelerate(case: Case, tmp_path: Path, record_property: Record) -> None:
    instead = each_rank(case)
    if case.setting.optimizer_in_backward:  # four steps an epoch, and a bias's optimizer is first
        instead = {"decay": None, "validation_batch": None}
    ran(record_property, case, differences(trained(case, tmp_path), **instead))


ONE_CPU_OF_DEEPSPEED = """
import deepspeed

# Its collectives on one CPU are C++ that it compiles behind a lock, which outlives a run that is
# killed, and whose ranks spin for each other. Without them gloo sends.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
"""

DEEPSPEED = [
    Case("deepspeed", tiny("native"), {"attention": "eager"}, loader=FED),
    Case("deepspeed", tiny("native"), {
        "checkpointing": "blocks", "optimizer": "adamw-fused", "clip_grad": True,
    }),
    Case("deepspeed", tiny("native"), {
        "precision": "bf16", "optimizer": "sgd", "attention": "sdpa", "accumulate": 1,
    }),
    Case("deepspeed", tiny("timm"), {"lora_rank": 2, "frozen_stages": 1, "attention": "eager"}),
    *(
        Case("deepspeed", tiny("native"), {
            "world_size": 2, "parallelism": stage, "attention": "eager",
            "optimizer": "adam",  # all weights in one group: ZeRO steps each group by itself
        })
        for stage in ("zero1", "zero2", "zero3")
    ),
]  # fmt: skip


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.parametrize("case", DEEPSPEED, ids=lambda case: case.title)
def test_deepspeed(case: Case, tmp_path: Path, record_property: Record) -> None:
    extensions = tmp_path / "extensions"
    environment = {"TORCH_EXTENSIONS_DIR": str(extensions)}
    run = trained(case, tmp_path, ONE_CPU_OF_DEEPSPEED, environment=environment)
    assert not extensions.exists(), "nothing is compiled"
    # It clips by a function of its own.
    instead: dict[str, Any] = {"clips": None, **each_rank(case)}
    if case.setting.accumulate == 1:  # the first epoch goes on beyond the second step
        instead["validation_batch"] = None
    if case.setting.parallelism in DEEPSPEED_STAGES:  # the optimizer has a rank's half of 35,648
        instead["num_parameters"] = 17_824
    if case.setting.parallelism == "zero3":  # of each weight by itself, and one is of odd length
        instead |= {"num_parameters": 17_825, "saved_bytes": None}  # gathered weights among them
    ran(record_property, case, differences(run, **instead))


TIMM = [
    Case("timm", tiny("timm", 2), {}, loader=FED),
    Case("timm", tiny("timm"), {
        "checkpointing": "blocks", "optimizer": "adamw-fused", "attention": "sdpa",
    }),
    Case("timm", tiny("timm", drop_path_rate=0.2), {
        "optimizer": "sgd", "loss": "cross-entropy", "clip_grad": False, "attention": "eager",
    }, loader=LoaderSetting(workers=0)),
    Case("timm", tiny("timm"), {
        "precision": "bf16", "loss": "soft-target", "clip_grad": True, "ema": True,
        "validation_batch_size": 6, "attention": "eager",
    }),
]  # fmt: skip
TIMM_CHECKOUT = os.environ.get("TIMM_CHECKOUT")


@pytest.mark.skipif(
    not TIMM_CHECKOUT, reason="TIMM_CHECKOUT names no timm repository: the package has no train.py"
)
@pytest.mark.parametrize("case", TIMM, ids=lambda case: case.title)
def test_timm(case: Case, tmp_path: Path, record_property: Record) -> None:
    run = train(case, tmp_path, scripts={"train.py": Path(str(TIMM_CHECKOUT), "train.py")})
    # train.py sets cuDNN's benchmark only where there is CUDA.
    instead: dict[str, Any] = {"benchmark": None}
    if case.model.version == 2:  # before 1.0.31 timm decays what it means to spare, and we say so
        instead["decayed_wrongly"] = None
    if case.loader is not None and not case.loader.workers:
        instead["loader"] = {**run.loader, "workers": 1}
    if case.setting.optimizer_family == "sgd":
        instead["first_rate"] = 0.0  # without a published rate, the warm-up starts at nothing
    ran(record_property, case, differences(run, **instead))


MICROSOFT = [
    Case("microsoft", tiny("microsoft", num_classes=1000, absolute_position_embedding=True), {
        "loss": "cross-entropy", "clip_grad": False,
    }, CUDA, FED),
    Case("microsoft", tiny("microsoft", num_classes=1000), {
        "checkpointing": "blocks", "loss": "soft-target", "clip_grad": True,
    }, CUDA),
    Case("microsoft", tiny("microsoft", 2, num_classes=1000, drop_path_rate=0.2), {}, CUDA),
    Case("microsoft", tiny("microsoft", num_classes=1000), {"world_size": 2}, CUDA),
]  # fmt: skip
SWIN = os.environ.get("SWIN_TRANSFORMER_CHECKOUT")
OLD_TIMM = os.environ.get("SWIN_TRANSFORMER_TIMM")


@pytest.mark.skipif(
    not (SWIN and OLD_TIMM),
    reason="SWIN_TRANSFORMER_CHECKOUT names no checkout, or SWIN_TRANSFORMER_TIMM no timm 0.4.12",
)
@pytest.mark.parametrize("case", MICROSOFT, ids=lambda case: case.title)
def test_microsoft(case: Case, tmp_path: Path, record_property: Record) -> None:
    """CUDA and NCCL are made the CPU and gloo from outside."""
    main = Path(str(SWIN), "main.py")
    environment = {"SPY_PRETEND_CUDA": "1"}
    paths = (str(OLD_TIMM),)
    run = train(case, tmp_path, scripts={"main.py": main}, paths=paths, environment=environment)
    assert all(report["ddp"] for report in run.reports), "main.py wraps the model, and we say so"
    instead = each_rank(case)
    if recipe_of(case.setting, case.model).mixes:
        # timm's loss keeps one more [images, classes] than torch's: 4 × 1000 numbers of 4 bytes,
        # in whole 512s.
        own = estimate(*resolve(case.model, case.setting)).saved_activation_bytes
        instead["saved_bytes"] = own + 32 * 512
        if case.model.version == 2:  # and each block's largest logit scale, a tensor on the host
            instead["saved_bytes"] += sum(case.model.depths) * 512
    ran(record_property, case, differences(run, **instead))


MMENGINE = [
    Case("mmengine", tiny("native", absolute_position_embedding=True), {
        "loss": "cross-entropy", "clip_grad": False, "attention": "eager",
    }, loader=FED),
    Case("mmengine", tiny("native"), {
        "checkpointing": "blocks", "loss": "soft-target", "clip_grad": True,
        "validation_batch_size": 6, "attention": "eager",
    }),
    Case("mmengine", tiny("native", 2), {
        "optimizer": "adamw-fused", "loss": "label-smoothing", "attention": "eager",
    }),
    Case("mmengine", tiny("native", drop_path_rate=0.2), {
        "optimizer": "sgd", "ema": True, "attention": "eager",
    }),
    Case("mmengine", tiny("native"), {"frozen_stages": 1, "attention": "eager"}),
    Case("mmengine", tiny("native"), {
        "world_size": 2, "parallelism": "ddp", "ddp_bucket_view": True, "attention": "eager",
    }, CUDA),
]  # fmt: skip
MMPRETRAIN = os.environ.get("MMPRETRAIN_PATH")


def mmpretrain_folder() -> Path:
    """That which holds the package."""
    found = find_spec("mmpretrain")
    assert MMPRETRAIN or (found is not None and found.origin is not None)
    return Path(MMPRETRAIN) if MMPRETRAIN else Path(str(found.origin)).parents[1]


@pytest.mark.skipif(
    find_spec("mmpretrain") is None and not MMPRETRAIN,
    reason="mmpretrain is not installed, and MMPRETRAIN_PATH names no folder with it",
)
@pytest.mark.parametrize("case", MMENGINE, ids=lambda case: case.title)
def test_mmengine(case: Case, tmp_path: Path, record_property: Record) -> None:
    script = mmpretrain_folder() / "mmpretrain" / ".mim" / "tools" / "train.py"
    paths = (MMPRETRAIN,) if MMPRETRAIN else ()
    environment = {"SPY_PRETEND_CUDA": "1"} if case.device is CUDA else {}  # made the CPU and gloo
    scripts = {"tools/train.py": script}
    run = train(case, tmp_path, scripts=scripts, paths=paths, environment=environment)
    # Its Swin is not one that the planner knows: what it saves is not estimated.
    # Its rates rise with each micro-batch: at the second of 4 × 20 (of 2 × 20 on each of two ranks)
    # a first step is taken.
    recipe = recipe_of(case.setting, case.model)
    warmup = 4 * recipe.warmup_epochs // case.setting.world_size
    share = recipe.warmup_start + (1 - recipe.warmup_start) / (warmup - 1)
    start = (recipe.learning_rate or RATE) * share
    # Its Swin is not one that the planner knows: what it saves is not estimated.
    instead = {"saved_bytes": None, "first_rate": start, **each_rank(case)}
    ran(record_property, case, differences(run, **instead))


REFUSED = [
    (Case("timm", tiny("timm"), {"frozen_stages": 1}), "cannot freeze stages"),
    (Case("mmengine", tiny("native"), {"lora_rank": 2}), "has no adapters"),
    (Case("mmengine", tiny("native", 2), {"frozen_stages": 1}), "freezes other weights"),
    (Case("mmengine", tiny("native"), {"frozen_stages": 2}), "the last norm"),
    (Case("microsoft", tiny("microsoft", num_classes=1000), {"lora_rank": 2}, CUDA), "no adapters"),
    (Case("timm", tiny("timm"), {"checkpointing": "stages"}), "every block or none"),
    (Case("timm", tiny("timm"), {"optimizer": "adafactor"}), "timm's own"),
    (Case("timm", tiny("timm"), {"optimizer": "adamw-8bit"}), "bitsandbytes"),
    (Case("mmengine", tiny("microsoft"), {"optimizer": "adamw-8bit"}, CUDA), "not one it knows"),
    (Case("microsoft", tiny("microsoft", num_classes=1000), {
        "optimizer": "adamw-8bit",
    }, CUDA), "default adamw"),
    (Case("microsoft", tiny("microsoft"), {}, CUDA), "not 10"),
    (Case("microsoft", tiny("microsoft", num_classes=1000), {"optimizer": "sgd"}, CUDA), "Nest"),
    (Case("microsoft", tiny("microsoft", num_classes=1000)), "needs CUDA"),
    (Case("microsoft", tiny("microsoft", num_classes=1000), {"precision": "bf16"}, CUDA), "bf16"),
    (Case("mmengine", tiny("native"), {"precision": "bf16"}), "needs a GPU"),
    *(
        (Case(target, tiny(library, num_classes=1000), {
            "optimizer_in_backward": True, "accumulate": 1, "precision": "fp32",
        }, CUDA), "one optimizer, which steps after")
        for target, library in (
            ("timm", "timm"), ("transformers", "transformers"), ("lightning", "native"),
            ("deepspeed", "native"), ("microsoft", "microsoft"), ("mmengine", "microsoft"),
        )
    ),
    (Case("lightning", tiny("native"), {
        "precision": "fp16", "optimizer": "adamw-fused", "clip_grad": True,
    }, CUDA), "does not clip"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "law"), REFUSED, ids=lambda v: getattr(v, "title", v))
def test_what_a_trainer_would_do_otherwise_is_refused(
    case: Case, law: str, record_property: Record
) -> None:
    with pytest.raises(UnsupportedError, match=law) as caught:
        emit_setting(
            case.model, case.setting, case.target, device=case.device, estimator=FakeEstimator()
        )
    assert caught.value.way_out
    row(record_property, case, "refused rightly")
