"""The same architecture in another library's code, where that library can express it."""

from __future__ import annotations

from planner.errors import UnsupportedError
from planner.libraries.limits import SettingFault, graph_limit
from planner.libraries.registry import find_library
from planner.schema import FactoryModel, Library, Model, NamedModel, SwinConfig, TrainSetting
from planner.trainers.plan import Refusal, refuse


def port_model(model: Model, library: Library, trainer: str) -> SwinConfig:
    """`model` as `library` builds it, the shapes of its weights unchanged.

    Raises UnsupportedError, in the name of `trainer`, with all that the library cannot express.
    """
    if isinstance(model, FactoryModel):
        raise UnsupportedError(
            f"{trainer} builds its models by name, and {model.factory} is a factory of your own.",
            "Use --for pytorch, accelerate, lightning or deepspeed, which train any module.",
        )
    if isinstance(model, NamedModel):
        raise _not_written(model, trainer)
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
    if isinstance(model, FactoryModel):
        return _factory_refusals(model, setting)
    if isinstance(model, NamedModel):
        raise _not_written(model, "this trainer")
    faults = find_library(model.library).setting_faults(model, setting, models)
    return [Refusal(fault.message, _way_out(fault, model)) for fault in faults]


def _way_out(fault: SettingFault, model: SwinConfig) -> str:
    if not fault.field:
        return fault.way_out
    return (
        f"Emit with --set {fault.field}={fault.instead} (not measured), or tune {model.library}'s "
        "own model."
    )


def _not_written(model: NamedModel, trainer: str) -> UnsupportedError:
    return UnsupportedError(
        f"{model.title} is not one of the planner's Swin models, and cannot be written for "
        f"{trainer} yet.",
        "Build it in a factory of your own, and tune that: package.module:factory.",
    )


def _factory_refusals(model: FactoryModel, setting: TrainSetting) -> list[Refusal]:
    way_out = f"Let {model.factory} do it, and emit with --set"
    found = []
    if setting.checkpointing != "none":
        law = (
            f"checkpointing {setting.checkpointing} cannot be set from outside the factory "
            f"{model.factory}"
        )
        found.append(Refusal(law, f"{way_out} checkpointing=none."))
    if setting.attention == "sdpa":
        law = f"attention sdpa cannot be set from outside the factory {model.factory}"
        found.append(Refusal(law, f"{way_out} attention=library."))
    limit = graph_limit(setting)
    return found if limit is None else [*found, Refusal(limit.message, limit.way_out)]
