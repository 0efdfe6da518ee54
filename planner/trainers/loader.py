"""How each trainer loads its data: the measured loader, or Swin's usual one, and what of it a
trainer has no word for."""

from __future__ import annotations

from planner.core.schema.loading import DataResult, LoaderSetting
from planner.estimation.recipe import usual_loader
from planner.trainers.comments import one_line
from planner.trainers.plan import Plan, Trainer


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
    """What of the measured loader `trainer` does otherwise: the law, and the way out."""
    if plan.loader is None or plan.is_task or trainer.reads is None:
        return ()
    return (
        f"{trainer.title} loads pictures by itself ({trainer.reads}), and not as was measured "
        f"({plan.loader.title}): its rate was not. The plain script does: --for pytorch.",
    )
