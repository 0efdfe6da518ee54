"""What a trainer cannot run or express of a model and a setting: faults, each a law with its way
out.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from planner.core.errors import Fault, UnsupportedError
from planner.core.schema import FactoryModel, Library, Model, SwinConfig, TrainSetting
from planner.core.schema.setting import DEEPSPEED, SHARDED
from planner.libraries.names import faults_of, find_library
from planner.trainers.plan import Plan, Trainer, refuse, way_out


def port_model(model: Model, library: Library, trainer: str) -> SwinConfig:
    """`model` as `library` builds it, with weights of the same shapes.

    Raises UnsupportedError, in the name of `trainer`, with all that the library cannot express.
    """
    if not isinstance(model, SwinConfig):
        law = f"{trainer} is written here for Swins, and {model.title} is not one."
        if isinstance(model, FactoryModel):
            law = f"{trainer} builds models by name, and {model.factory} is a factory of your own."
        raise UnsupportedError(law, "Use --for pytorch, which trains any model.")
    if model.library == library:
        return model
    ported = model.model_copy(update={"library": library, "name": None})
    instead = f"Use --for pytorch, which trains the model that was measured ({model.title})."
    faults = find_library(library).faults(ported)
    refuse(trainer, [Fault(f"{library}'s {fault}", way_out=instead) for fault in faults])
    return ported


def setting_faults(model: Model, setting: TrainSetting) -> Iterator[Fault]:
    """What the model itself cannot run of `setting`, with what to emit instead."""
    other = "build that into a factory of your own"
    if isinstance(model, SwinConfig):
        other = f"tune {model.library}'s own model"
    for fault in faults_of(model, setting):
        yield replace(fault, way_out=way_out(fault.change, other)) if fault.change else fault


# What some trainers lack: words for fields of a setting, and precisions.
IN_THE_STEP = (
    "checkpointing", "offload", "compile_scope", "activation_memory_budget", "frozen_stages",
    "lora_rank", "cudnn_benchmark", "fp8",
)  # fmt: skip
IN_THE_LOOP = ("optimizer_in_backward", "offload_optimizer", "zero_grad_to_none")
# A value beside the default that a trainer expresses even where it lacks the field otherwise.
_ALSO_EXPRESSED = {"checkpointing": "blocks"}


def word_faults(trainer: Trainer, plan: Plan) -> Iterator[Fault]:
    """A fault for each field of the setting whose value `trainer` has no word for."""
    setting = plan.setting
    for field in trainer.lacks:
        if field not in TrainSetting.model_fields:  # a precision
            continue
        value, default = getattr(setting, field), TrainSetting.model_fields[field].default
        if value not in (default, _ALSO_EXPRESSED.get(field)):
            yield _missing_word(field, value, _ALSO_EXPRESSED.get(field, default))
    if _lacks_precision(trainer, plan):
        yield _missing_word("precision", setting.precision, _nearest_precision(trainer, plan))


def _missing_word(field: str, value: object, instead: object) -> Fault:
    law = f"it has no word for {field}={str(value).lower()}"
    return Fault(law, change=f"{field}={str(instead).lower()}")


def _lacks_precision(trainer: Trainer, plan: Plan) -> bool:
    precision = plan.setting.precision
    lacks_on_cpu = plan.device == "cpu" and f"{precision} on a CPU" in trainer.lacks
    return lacks_on_cpu or precision in trainer.lacks


def _nearest_precision(trainer: Trainer, plan: Plan) -> str:
    """The nearest precision that `trainer` does not refuse as well."""
    laws = {fault.law for fault in trainer.faults(plan)}
    for precision in ("bf16", "fp16"):
        setting = plan.setting.model_copy(update={"precision": precision})
        other = replace(plan, setting=setting)
        other_laws = {fault.law for fault in trainer.faults(other)}
        if other_laws <= laws and not _lacks_precision(trainer, other):
            return precision
    return "fp32"


def parallel_setting(trainer: Trainer, setting: TrainSetting) -> TrainSetting:
    """`setting` as `trainer` runs it: without a parallelism, several devices train under DDP."""
    updates = {}
    if setting.parallelism == "none" and (setting.world_size > 1 or trainer.always_ddp):
        updates["parallelism"] = "ddp"
    if trainer.always_syncs and setting.accumulate > 1:
        updates["gradient_sync"] = "every"
    return setting.model_copy(update=updates)


def parallel_reasons(trainer: Trainer, request: TrainSetting, final: TrainSetting) -> Iterator[str]:
    """A sentence for each field where the `final` setting, which `trainer` runs, is not the one
    that was requested."""
    if request.parallelism != final.parallelism:
        yield f"{trainer.title} trains under DDP here, whose buckets hold a copy of the gradients"
    if request.gradient_sync != final.gradient_sync:
        yield f"{trainer.title} sums gradients over devices in every micro-batch"


def parallel_faults(trainer: Trainer, plan: Plan, trainers: Iterable[Trainer]) -> Iterator[Fault]:
    """A parallelism that `trainer` cannot run, or options of it that it has no word for."""
    setting = plan.setting
    capable = [other.name for other in trainers if _can_run(other, plan)]
    other = f"--for {', '.join(capable)}" if capable else ""
    if setting.parallelism != "none" and setting.parallelism not in trainer.parallel:
        supported = " or ".join(trainer.parallel)
        change = f"parallelism={next(iter(trainer.parallel))}"
        law = f"it does not train under {setting.parallelism}, only {supported}"
        yield Fault(law, way_out=way_out(change, other))
    elif not _can_run(trainer, plan):
        nodes = " --set nodes=1" if setting.nodes > 1 else ""
        law = f"it trains under {setting.parallelism} on GPUs only, not on the CPU"
        yield Fault(law, way_out=way_out(f"world_size=1{nodes} --set parallelism=none", other))
    elif setting.parallelism not in ("none", *DEEPSPEED):
        options = trainer.parallel[setting.parallelism].options
        words = {*options, "world_size", "nodes", "parallelism"}
        one_device = setting.on_one_device()
        for name, value in setting.differences(one_device).items():
            is_moot = name == "gradient_sync" and (trainer.always_syncs or setting.accumulate == 1)
            if name not in words and not is_moot:
                yield _missing_word(name, value, getattr(one_device, name))
    if setting.parallelism in SHARDED and setting.offload != "none":
        law = "offload=activations would take the gathered weights to the host as well"
        yield Fault(law, way_out=way_out("offload=none", "--set parallelism=ddp"))


def _can_run(trainer: Trainer, plan: Plan) -> bool:
    """Whether `trainer` can build the model of `plan`, and run its parallelism on its device."""
    parallelism = plan.setting.parallelism
    builds_model = isinstance(plan.model, SwinConfig) or trainer.can_name(plan)
    if trainer.library is not None and not builds_model:
        return False
    if parallelism == "none":
        return True
    support = trainer.parallel.get(parallelism)
    return support is not None and not (support.needs_gpu and plan.device == "cpu")
