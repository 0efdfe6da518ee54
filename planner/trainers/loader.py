"""How each trainer loads its data: the measured loader, or Swin's usual one, and what of it a
trainer has no word for."""

from __future__ import annotations

from typing import Any

from planner.core.schema.loading import LoaderRecord, LoaderSetting, recorded_processors
from planner.estimation.recipe import usual_loader
from planner.trainers.comments import one_line
from planner.trainers.plan import Plan, Trainer

EVERY_FIELD = ("workers", "prefetch_factor", "pin_memory", "persistent_workers")
"""What a DataLoader is told of a LoaderSetting beside the batch."""

_READS = {
    "torchvision": "torchvision's transforms on PIL images",
    "torchvision-jpeg": "torchvision's own JPEG decoder and its transforms on tensors",
    "timm": "timm's transforms, with bytes to the device and normalised there",
    "transformers": "an image processor of transformers",
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
    shared = _possible_workers(plan.loader, plan.fed) // setting.world_size
    workers = max(1, shared) if plan.loader.workers else 0
    given = plan.loader.model_dump()
    return LoaderSetting.model_validate(
        {**given, "batch_size": setting.batch_size, "workers": workers}
    )


def training_load(plan: Plan) -> dict[str, Any]:
    """The arguments of a DataLoader for training; a smaller last batch is dropped."""
    return {**_given(train_loader(plan)), "drop_last": True}


def validation_load(plan: Plan) -> dict[str, Any]:
    """The arguments of a DataLoader for validation: as many workers, since those of the training
    rest meanwhile, and none that hold their memory until the next validation."""
    batch_size = plan.recipe.validation_batch_size
    given = {**_given(train_loader(plan)), "batch_size": batch_size}
    return {**given, "persistent_workers": False}


def _given(loader: LoaderSetting) -> dict[str, Any]:
    """Without workers DataLoader takes no prefetch_factor but None, its default."""
    return {name: value for name, value in loader.arguments.items() if value is not None}


def _possible_workers(loader: LoaderSetting, fed: LoaderRecord | None) -> int:
    """Its workers, but no more than the measuring machine had processors, unless so many were
    measured."""
    if fed is None or fed.setting.workers >= loader.workers:
        return loader.workers
    processors = _processors(fed)
    return loader.workers if processors is None else min(loader.workers, processors)


def _processors(fed: LoaderRecord) -> int | None:
    """Whole ones of the machine that measured."""
    found = recorded_processors(fed.host)
    return None if found is None else max(1, int(found))


def loader_heading(plan: Plan) -> tuple[str, ...]:
    """Where the loader's figures come from, a comment's line each; a task's loader is the user's,
    and only what was measured is said of it."""
    if plan.loader is None:
        return () if plan.is_task else (_usual_heading(plan),)
    lines = [_measured_heading(plan.loader, plan.fed)]
    world, workers = plan.setting.world_size, train_loader(plan).workers
    if world > 1 and plan.loader.workers:
        lines.append(
            f"Workers are those of one process: the {plan.loader.workers} measured are shared by "
            f"{world} processes, {workers} each."
        )
    elif workers != plan.loader.workers:
        lines.append(
            f"{workers} workers, not {plan.loader.workers}: the machine that measured had no more "
            "processors."
        )
    return tuple(lines)


def _usual_heading(plan: Plan) -> str:
    workers = train_loader(plan).workers
    shown = f"{workers} workers" if plan.setting.world_size == 1 else f"{workers} in each process"
    return (
        f"Loader: not measured. It has {shown}, as Swin's authors use; give it no more than there "
        "are processors."
    )


def _measured_heading(loader: LoaderSetting, fed: LoaderRecord | None) -> str:
    if fed is None or fed.images_per_second is None:
        return f"Loader: {loader.title}; its rate is not known."
    count = _processors(fed)
    place = f" on {count} processor{'s' if count > 1 else ''}" if count is not None else ""
    bound = f", bound by {fed.bound}" if fed.bound is not None else ""
    day = f", probed {one_line(fed.date)}" if fed.date else ""
    return (
        f"Loader: {loader.title}, measured at {fed.images_per_second:.1f} images/s"
        f"{place}{bound}{day}."
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
