"""How each trainer loads its data: the measured loader, or Swin's usual one, and what of it a
trainer has no word for."""

from __future__ import annotations

from typing import Any

from planner.core.schema.loading import DataResult, LoaderSetting
from planner.estimation.recipe import usual_loader
from planner.trainers.comments import one_line
from planner.trainers.plan import Plan, Trainer

EVERY_FIELD = ("workers", "prefetch_factor", "pin_memory", "persistent_workers")
"""What a DataLoader is told of a LoaderSetting beside the batch."""

_READS = {
    "torchvision": "torchvision's transforms on PIL images",
    "timm": "timm's transforms, with bytes to the device and normalised there",
    "own": "your own Dataset",
}


def train_loader(plan: Plan) -> LoaderSetting:
    """How one process loads what it trains on.

    What was measured fed one process with the whole machine: several on it share its workers. The
    usual eight are each process's own, as in Swin's published training.
    """
    setting = plan.setting
    if plan.loader is None:
        usual = usual_loader(setting)
        return usual.model_copy(update={"pin_memory": plan.device == "cuda"})
    workers = max(1, plan.loader.workers // setting.world_size) if plan.loader.workers else 0
    return plan.loader.model_copy(update={"batch_size": setting.batch_size, "workers": workers})


def training_load(plan: Plan) -> dict[str, Any]:
    """The arguments of a DataLoader for training; a smaller last batch is dropped."""
    return {**train_loader(plan).arguments, "drop_last": True}


def validation_load(plan: Plan) -> dict[str, Any]:
    """The arguments of a DataLoader for validation: as many workers, since those of the training
    rest meanwhile, and none that hold their memory until the next validation."""
    batch_size = plan.recipe.validation_batch_size
    given = {**train_loader(plan).arguments, "batch_size": batch_size}
    return {**given, "persistent_workers": False}


def loader_heading(plan: Plan) -> tuple[str, ...]:
    """Where the loader's figures come from, a comment's line each; a task's loader is the user's,
    and only what was measured is said of it."""
    if plan.fed is None or plan.loader is None:
        return () if plan.is_task else (_usual_heading(plan),)
    lines = [_measured_heading(plan.fed)]
    world, workers = plan.setting.world_size, train_loader(plan).workers
    if world > 1 and plan.loader.workers:
        lines.append(
            f"Workers are those of one process: the {plan.loader.workers} measured are shared by "
            f"{world} processes, {workers} each."
        )
    return tuple(lines)


def _usual_heading(plan: Plan) -> str:
    workers = train_loader(plan).workers
    shown = f"{workers} workers" if plan.setting.world_size == 1 else f"{workers} in each process"
    return (
        f"Loader: not measured. It has {shown}, as Swin's authors use; give it no more than there "
        "are processors."
    )


def _measured_heading(fed: DataResult) -> str:
    count = f"{fed.processors:g} processor{'s' if fed.processors > 1 else ''}"
    day = f", {one_line(fed.date[:10])}" if fed.date else ""
    return (
        f"Loader: {fed.setting.title}, measured at {fed.images_per_second:.1f} images/s on "
        f"{count}, bound by its {fed.bound}{day}."
    )


def loader_warnings(trainer: Trainer, plan: Plan) -> tuple[str, ...]:
    """What of the measured loader `trainer` does otherwise: the law, the value, the way out."""
    if plan.loader is None or plan.is_task:
        return ()
    loader, found = train_loader(plan), []
    for name, own in trainer.loads_by_itself.items():
        value = getattr(loader, name)
        if loader.workers and value != own:
            law = f"{trainer.title} has no {name}: it loads with {str(own).lower()}"
            found.append(f"{law}, not with the measured {str(value).lower()}. {_WAY_OUT}")
    measured = _READS[loader.pipeline]
    if loader.pipeline not in trainer.pipelines and trainer.reads is not None:
        found.append(
            f"{trainer.title} reads pictures by itself ({trainer.reads}), not with {measured}, "
            f"which was measured: its rate was not. {_WAY_OUT}"
        )
    elif loader.pipeline not in trainer.pipelines:
        found.append(
            f"The loader was measured with {measured}: its rate holds where your data set reads "
            "pictures in that way."
        )
    return tuple(found)


_WAY_OUT = "The plain script loads as measured: --for pytorch."
