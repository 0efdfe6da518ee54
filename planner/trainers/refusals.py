"""What a trainer cannot run or say of a model and a setting: each a law with its way out."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from planner.core.errors import UnsupportedError
from planner.core.schema import FactoryModel, Library, Model, SwinConfig, TrainSetting
from planner.core.schema.setting import ALONE, DEEPSPEED, SHARDED
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


class Lever(NamedTuple):
    """What a setting may ask (on a CPU only, some of it), and some trainers cannot express.

    `law` follows "it"; `change` is what --set takes to do without.
    """

    name: str
    asked: Callable[[TrainSetting], bool]
    law: str
    change: str
    on_cpu_only: bool = False

    @property
    def field(self) -> str:
        """Of the setting, in which it is asked."""
        return self.change.partition("=")[0]


LEVERS = (
    Lever("checkpointing-in-parts", lambda s: s.checkpointing not in ("none", "blocks"),
          "checkpoints every block or none", "checkpointing=blocks"),
    Lever("offload", lambda s: s.offload != "none",
          "has no place for activations in host memory", "offload=none"),
    Lever("compile", lambda s: s.compile != "off", "does not compile", "compile=off"),
    Lever("compile_scope", lambda s: s.compile_scope != "model",
          "cannot compile block by block", "compile_scope=model"),
    Lever("activation_memory_budget", lambda s: s.activation_memory_budget < 1,
          "sets no activation memory budget", "activation_memory_budget=1"),
    Lever("optimizer_in_backward", lambda s: s.optimizer_in_backward,
          "has one optimizer, which steps after backward", "optimizer_in_backward=false"),
    Lever("offload_optimizer", lambda s: s.offload_optimizer != "none",
          "makes its optimizer on the device", "offload_optimizer=none"),
    Lever("zero_grad_to_none", lambda s: not s.zero_grad_to_none,
          "always sets gradients to None", "zero_grad_to_none=true"),
    Lever("frozen_stages", lambda s: s.frozen_stages > 0,
          "cannot freeze stages", "frozen_stages=0"),
    Lever("lora_rank", lambda s: s.lora_rank > 0,
          "has no adapters", "lora_rank=0 --set lora_targets=attention"),
    Lever("ema", lambda s: s.ema, "keeps no average of the weights", "ema=false"),
    Lever("memory_format", lambda s: s.memory_format == "channels_last",
          "does not lay images out channels_last", "memory_format=contiguous"),
    Lever("cudnn_benchmark", lambda s: not s.cudnn_benchmark,
          "always has cuDNN try its algorithms", "cudnn_benchmark=true"),
    Lever("pure-bf16", lambda s: s.precision == "pure-bf16",
          "has no pure bf16 training", "precision=bf16"),
    Lever("fp8", lambda s: s.precision == "fp8",
          "converts no linear layers to 8 bits", "precision=bf16"),
    Lever("bf16-on-cpu", lambda s: s.precision == "bf16",
          "needs a GPU, not the CPU, for autocast to bf16", "precision=fp32", True),
    Lever("fp16-on-cpu", lambda s: s.precision == "fp16",
          "needs a GPU, not the CPU, for autocast to fp16", "precision=fp32", True),
)  # fmt: skip


def lever_refusals(trainer: Trainer, plan: Plan) -> list[Refusal]:
    """A refusal for each lever that the setting asks and `trainer` does not express."""
    return [
        Refusal(
            f"it {lever.law} ({lever.field}={_value(plan, lever)})",
            way_out(_change(trainer, plan, lever)),
        )
        for lever in _refused(trainer, plan)
    ]


def _refused(trainer: Trainer, plan: Plan) -> list[Lever]:
    return [
        lever
        for lever in LEVERS
        if trainer.expresses is not None
        and lever.name not in trainer.expresses
        and lever.asked(plan.setting)
        and (plan.device == "cpu" or not lever.on_cpu_only)
    ]


def _change(trainer: Trainer, plan: Plan, lever: Lever) -> str:
    """What --set takes to do without: of the precisions the nearest that `trainer` does not refuse
    in its turn."""
    if lever.field != "precision":
        return lever.change
    laws = {refusal.law for refusal in trainer.refusals(plan)}
    for precision in (lever.change.partition("=")[2], "fp16", "fp32"):
        setting = plan.setting.model_copy(update={"precision": precision})
        other = replace(plan, setting=setting)
        others = (refused.field for refused in _refused(trainer, other))
        own = {refusal.law for refusal in trainer.refusals(other)}
        if own <= laws and "precision" not in others:
            return f"precision={precision}"
    return lever.change


def _value(plan: Plan, lever: Lever) -> str:
    value = getattr(plan.setting, lever.field)
    return str(value).lower() if isinstance(value, bool) else f"{value}"


OPTIONS: Mapping[str, object] = {
    name: ALONE[name] for name in ALONE if name not in ("world_size", "nodes", "parallelism")
}


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
        for name, default in OPTIONS.items():
            value = getattr(setting, name)
            is_moot = name == "gradient_sync" and (trainer.sums_each or setting.accumulate == 1)
            if value != default and name not in writes and not is_moot:
                default = str(default).lower()
                law = f"it has no word for {name}={str(value).lower()}"
                yield Refusal(law, way_out(f"{name}={default}"))
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
