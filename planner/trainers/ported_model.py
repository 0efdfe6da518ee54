"""The same architecture in another library's code, where that library can express it."""

from __future__ import annotations

from planner.core.errors import UnsupportedError
from planner.core.schema import FactoryModel, Library, Model, SwinConfig, TrainSetting
from planner.libraries.limits import SettingFault, setting_limit
from planner.libraries.registry import find_library
from planner.trainers.plan import Refusal, refuse


def port_model(model: Model, library: Library, trainer: str) -> SwinConfig:
    """`model` as `library` builds it, the shapes of its weights unchanged.

    Raises UnsupportedError, in the name of `trainer`, with all that the library cannot express.
    """
    if isinstance(model, FactoryModel):
        raise UnsupportedError(
            f"{trainer} builds its models by name, and {model.factory} is a factory of your own.",
            "Use --for pytorch, which trains any model.",
        )
    if not isinstance(model, SwinConfig):
        raise UnsupportedError(
            f"{trainer} is written here for Swins, and {model.title} is not one.",
            "Use --for pytorch, which trains any model.",
        )
    if model.library == library:
        return model
    moved = model.model_copy(update={"library": library, "name": None})
    way_out = f"Use --for pytorch, which trains the model that was measured ({model.title})."
    refuse(
        trainer, [Refusal(f"{library}'s {f}", way_out) for f in find_library(library).faults(moved)]
    )
    return moved


def setting_refusals(
    model: Model, setting: TrainSetting, models: str | None = None
) -> list[Refusal]:
    """What of `setting` the library of `model` cannot run, each with its way out.

    `models` names the package whose Swin it is where that is not the model's library.
    """
    if not isinstance(model, SwinConfig):
        return _own_refusals(model, setting)
    faults = find_library(model.library).setting_faults(model, setting, models)
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
    if setting.attention == "sdpa":
        law = f"attention sdpa cannot be set from outside the model {model.title}"
        found.append(Refusal(law, f"Emit with --set attention=library{let}"))
    for field in ("frozen_stages", "lora_rank"):
        if getattr(setting, field):
            law = f"what is trained is a matter of the model {model.title} ({field})"
            found.append(Refusal(law, f"Emit with --set {field}=0{let}"))
    limit = setting_limit(setting)
    return [*found, *([Refusal(limit.message, _way_out(limit))] if limit is not None else [])]
