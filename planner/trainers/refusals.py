"""What a trainer cannot run or say of a model and a setting: each a law with its way out."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from planner.core.errors import UnsupportedError
from planner.core.schema import FactoryModel, Library, Model, SwinConfig, TrainSetting
from planner.core.schema.setting import DEEPSPEED, SHARDED
from planner.libraries.limits import SettingFault, attention_limit, setting_limit
from planner.libraries.names import find_library
from planner.trainers.plan import Plan, Refusal, Trainer, refuse, way_out


def port_model(model: Model, library: Library, trainer: str) -> SwinConfig:
    """`model` as `library` builds it, the shapes of its weights unchanged.

    Raises UnsupportedError, in the name of `trainer`, with all that the library cannot express.
    """
    if not isinstance(model, SwinConfig):
        law = f"{trainer} is written here for Swins, and {model.title} is not one."
        if isinstance(model, FactoryModel):
            law = f"{trainer} builds models by name, and {model.factory} is a factory of your own."
        raise UnsupportedError(law, "Use --for pytorch, which trains any model.")
    if model.library == library:
        return model
    moved = model.model_copy(update={"library": library, "name": None})
    way_out = f"Use --for pytorch, which trains the model that was measured ({model.title})."
    refuse(
        trainer, [Refusal(f"{library}'s {f}", way_out) for f in find_library(library).faults(moved)]
    )
    return moved


def setting_refusals(model: Model, setting: TrainSetting) -> list[Refusal]:
    """What of `setting` the library of `model` cannot run, each with its way out."""
    if not isinstance(model, SwinConfig):
        return _own_refusals(model, setting)
    faults = find_library(model.library).setting_faults(model, setting)
    own = f", or tune {model.library}'s own model"
    return [Refusal(fault.message, _way_out(fault, own)) for fault in faults]


def _way_out(fault: SettingFault, else_: str = "") -> str:
    if not fault.field:
        return fault.way_out
    return f"Emit with --set {fault.field}={fault.instead} (not measured){else_}."


def _own_refusals(model: Model, setting: TrainSetting) -> list[Refusal]:
    let = f", and let {model.title} do it."
    found = []
    if not setting.checkpoints_any_model:
        law = (
            f"checkpointing {setting.checkpointing} cannot be set from outside the model "
            f"{model.title}"
        )
        blocks = "Emit with --set checkpointing=blocks, or --set checkpointing=none"
        found.append(Refusal(law, f"{blocks}{let}"))
    if attention_limit(model, setting) is not None:
        law = f"attention sdpa cannot be set from outside the model {model.title}"
        found.append(Refusal(law, f"Emit with --set attention=library{let}"))
    for field in ("frozen_stages", "lora_rank"):
        if getattr(setting, field):
            law = f"what is trained is a matter of the model {model.title} ({field})"
            found.append(Refusal(law, f"Emit with --set {field}=0{let}"))
    limit = setting_limit(setting)
    return [*found, *([Refusal(limit.message, _way_out(limit))] if limit is not None else [])]


# Words that some trainers lack: of fields of a setting, and of precisions.
IN_THE_STEP = (
    "checkpointing", "offload", "compile_scope", "activation_memory_budget", "frozen_stages",
    "lora_rank", "cudnn_benchmark", "fp8",
)  # fmt: skip
IN_THE_LOOP = ("optimizer_in_backward", "offload_optimizer", "zero_grad_to_none")
# Beside the default, what a trainer says even of a field that it has no other word for.
_SAID = {"checkpointing": "blocks"}


def word_refusals(trainer: Trainer, plan: Plan) -> Iterator[Refusal]:
    """One for each field of the setting whose value `trainer` has no word for."""
    setting = plan.setting
    for field in trainer.lacks:
        if field not in TrainSetting.model_fields:  # a precision
            continue
        value, default = getattr(setting, field), TrainSetting.model_fields[field].default
        if value not in (default, _SAID.get(field)):
            yield _no_word(field, value, _SAID.get(field, default))
    if _lacks_precision(trainer, plan):
        yield _no_word("precision", setting.precision, _other_precision(trainer, plan))


def _no_word(field: str, value: object, instead: object) -> Refusal:
    law = f"it has no word for {field}={str(value).lower()}"
    return Refusal(law, way_out(f"{field}={str(instead).lower()}"))


def _lacks_precision(trainer: Trainer, plan: Plan) -> bool:
    precision = plan.setting.precision
    of_cpu = plan.device == "cpu" and f"{precision} on a CPU" in trainer.lacks
    return of_cpu or precision in trainer.lacks


def _other_precision(trainer: Trainer, plan: Plan) -> str:
    """The nearest that `trainer` does not refuse in its turn."""
    laws = {refusal.law for refusal in trainer.refusals(plan)}
    for precision in ("bf16", "fp16"):
        setting = plan.setting.model_copy(update={"precision": precision})
        other = replace(plan, setting=setting)
        own = {refusal.law for refusal in trainer.refusals(other)}
        if own <= laws and not _lacks_precision(trainer, other):
            return precision
    return "fp32"


def parallel_setting(trainer: Trainer, setting: TrainSetting) -> TrainSetting:
    """`setting` as `trainer` runs it: several devices that name no parallelism train under DDP."""
    updates = {}
    if setting.parallelism == "none" and (setting.world_size > 1 or trainer.always_ddp):
        updates["parallelism"] = "ddp"
    if trainer.sums_each and setting.accumulate > 1:
        updates["gradient_sync"] = "every"
    return setting.model_copy(update=updates)


def parallel_reasons(trainer: Trainer, asked: TrainSetting, run: TrainSetting) -> Iterator[str]:
    """What `trainer` does (`run`) otherwise than it was asked, a sentence each."""
    if asked.parallelism != run.parallelism:
        yield f"{trainer.title} trains under DDP here, whose buckets hold a copy of the gradients"
    if asked.gradient_sync != run.gradient_sync:
        yield f"{trainer.title} sums gradients over devices in every micro-batch"


def parallel_refusals(
    trainer: Trainer, plan: Plan, trainers: Iterable[Trainer]
) -> Iterator[Refusal]:
    """A parallelism that `trainer` cannot run, or an option of it that it has no word for."""
    setting = plan.setting
    others = [other.name for other in trainers if _runs(other, plan)]
    also = f", or --for {', '.join(others)}" if others else ""
    if setting.parallelism != "none" and setting.parallelism not in trainer.parallel:
        known = " or ".join(trainer.parallel)
        change = f"parallelism={next(iter(trainer.parallel))}"
        law = f"it does not train under {setting.parallelism}, only {known}"
        yield Refusal(law, f"Emit with --set {change} (not measured){also}.")
    elif not _runs(trainer, plan):
        nodes = " --set nodes=1" if setting.nodes > 1 else ""
        law = f"it trains under {setting.parallelism} on GPUs only, not on the CPU"
        change = f"world_size=1{nodes} --set parallelism=none"
        yield Refusal(law, f"Emit with --set {change} (not measured){also}.")
    elif setting.parallelism not in ("none", *DEEPSPEED):
        writes = trainer.parallel[setting.parallelism].writes
        words = {*writes, "world_size", "nodes", "parallelism"}
        alone = setting.on_one_device()
        for name, value in setting.differences(alone).items():
            is_moot = name == "gradient_sync" and (trainer.sums_each or setting.accumulate == 1)
            if name not in words and not is_moot:
                yield _no_word(name, value, getattr(alone, name))
    if setting.parallelism in SHARDED and setting.offload != "none":
        law = "offload=activations would take the gathered weights to the host as well"
        yield Refusal(law, "Emit with --set offload=none, or --set parallelism=ddp.")


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
