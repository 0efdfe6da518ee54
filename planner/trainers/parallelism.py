"""A setting on several devices, as a trainer runs it: what its file says, what it does by itself.

Each trainer's own values are read in its source, named at its `Parallel`. An option that it has no
word for is what the trainer makes of it, and the file says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from planner.core.schema import Model, SwinConfig, TrainSetting
from planner.core.schema.distribution import ALONE, SHARDED
from planner.libraries.registry import find_library
from planner.trainers.plan import Plan, Refusal, Trainer

WHERE = frozenset(("world_size", "nodes", "parallelism"))
OPTIONS: Mapping[str, object] = {
    name: default for name, default in ALONE.items() if name not in WHERE
}


def parallel_setting(setting: TrainSetting, always_ddp: bool) -> TrainSetting:
    """`setting` with the parallelism that is meant: several devices that name none train under DDP,
    and so does a trainer that always does."""
    if setting.parallelism == "none" and (setting.world_size > 1 or always_ddp):
        return setting.model_copy(update={"parallelism": "ddp"})
    return setting


def by_default(trainer: Trainer, setting: TrainSetting) -> TrainSetting:
    """`setting` with the options of its parallelism as `trainer` sets them where nobody says."""
    if setting.parallelism not in trainer.parallel:
        return setting
    own = dict(trainer.parallel[setting.parallelism].own(setting))
    return _with_sync(setting, setting.model_copy(update={**OPTIONS, **own}))


def as_written(trainer: Trainer, setting: TrainSetting) -> TrainSetting:
    """`setting` as `trainer` runs it with the file that is emitted: what the file has no word for
    is as by default."""
    if setting.parallelism not in trainer.parallel:
        return setting
    writes = trainer.parallel[setting.parallelism].writes
    given = {field: getattr(setting, field) for field in writes}
    return _with_sync(setting, by_default(trainer, setting).model_copy(update=given))


def _with_sync(asked: TrainSetting, found: TrainSetting) -> TrainSetting:
    """One micro-batch is the last and every one: whichever was asked."""
    if asked.accumulate > 1:
        return found
    return found.model_copy(update={"gradient_sync": asked.gradient_sync})


def parallel_reasons(
    trainer: Trainer, asked: TrainSetting, wanted: TrainSetting, run: TrainSetting
) -> list[str]:
    """What `trainer` does (`run`) otherwise than is wanted of it, a sentence each. A parallelism
    that was not `asked` is one such thing."""
    found = []
    if asked.parallelism != run.parallelism:
        found.append(
            f"{trainer.title} trains under DDP here, whose buckets hold a copy of the gradients"
        )
    others = run.differences(wanted)
    if others:
        asked_for = " and ".join(f"{name}={_said(getattr(wanted, name))}" for name in others)
        has = " and ".join(_said(value) for value in others.values())
        found.append(f"{trainer.title} has no word for {asked_for}, and trains with {has}")
    return found


def _said(value: object) -> str:
    return "torch's own" if value is None else str(value).lower()


def parallel_refusals(trainer: Trainer, plan: Plan, trainers: Iterable[Trainer]) -> list[Refusal]:
    """A parallelism that `trainer` cannot run, and what no trainer can."""
    parallelism = plan.setting.parallelism
    found = _impossible(plan.model, as_written(trainer, plan.setting))
    if parallelism != "none" and parallelism not in trainer.parallel:
        known = " or ".join(trainer.parallel)
        law = f"it does not train under {parallelism}, only {known}"
        change = f"parallelism={next(iter(trainer.parallel))}"
        found.append(Refusal(law, _way_out(change, plan, trainers)))
    elif not _runs(trainer, plan):
        law = f"it trains under {parallelism} on GPUs only, not on the CPU"
        nodes = " --set nodes=1" if plan.setting.nodes > 1 else ""
        change = f"world_size=1{nodes} --set parallelism=none"
        found.append(Refusal(law, _way_out(change, plan, trainers)))
    elif plan.device == "cpu" and plan.setting.ddp_compression == "bf16":
        law = "torch's bf16_compress_hook needs NCCL, and so a GPU (ddp_compression=bf16)"
        found.append(
            Refusal(law, "Emit with --set ddp_compression=fp16, or --set ddp_compression=none.")
        )
    return found


def _runs(trainer: Trainer, plan: Plan) -> bool:
    """Whether `trainer` runs the parallelism of `plan` on its device, and can build its model."""
    parallelism = plan.setting.parallelism
    builds = isinstance(plan.model, SwinConfig) or trainer.names(plan)
    if trainer.library is not None and not builds:
        return False
    if parallelism == "none":
        return True
    own = trainer.parallel.get(parallelism)
    return own is not None and not (own.needs_gpu and plan.device == "cpu")


def _way_out(change: str, plan: Plan, trainers: Iterable[Trainer]) -> str:
    others = ", ".join(trainer.name for trainer in trainers if _runs(trainer, plan))
    return f"Emit with --set {change} (not measured){others and f', or --for {others}'}."


def _impossible(model: Model, setting: TrainSetting) -> list[Refusal]:
    """What no step can do, as a trainer runs it (`setting`)."""
    found: list[Refusal] = []
    if setting.parallelism not in SHARDED:
        return found
    low = setting.fsdp_param_dtype != "fp32" and setting.precision in ("fp32", "tf32")
    if low and isinstance(model, SwinConfig) and _mixes_dtypes(model, setting):
        law = (
            f"with weights gathered in {setting.fsdp_param_dtype} and no autocast, the attention "
            f"of {model.library}'s Swin version {model.version} multiplies fp32 with them, "
            "which torch refuses"
        )
        way_out = (
            "Emit with --set precision=bf16, whose autocast mends it, or --set "
            "fsdp_param_dtype=fp32."
        )
        found.append(Refusal(law, way_out))
    if setting.offload != "none":
        law = "offload=activations would take the gathered weights to the host as well"
        found.append(Refusal(law, "Emit with --set offload=none, or --set parallelism=ddp."))
    return found


def _mixes_dtypes(model: SwinConfig, setting: TrainSetting) -> bool:
    """Whether fp32 buffers meet gathered weights: version 1's mask is one where a library keeps it
    for eager attention, and version 2's coordinates go through a layer. Run with torch 2.13."""
    if model.version == 2:
        return True
    attention = setting.attention
    if attention == "library":
        attention = find_library(model.library).default_attention(model)
    return attention == "eager" and model.library in ("native", "timm", "microsoft")
