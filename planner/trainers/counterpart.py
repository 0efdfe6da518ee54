"""The same architecture in another library's code, where that library can express it."""

from __future__ import annotations

from planner.errors import UnsupportedError
from planner.libraries.limits import limit_of
from planner.libraries.registry import find_library
from planner.schema import FactoryModel, Library, Model, NamedModel, SwinConfig, TrainSetting
from planner.trainers.plan import Refusal, refuse


def as_library(model: Model, library: Library, trainer: str) -> SwinConfig:
    """`model` as `library` builds it, weights' shapes unchanged. `trainer` is named in the error.

    Raises UnsupportedError with all that the library cannot express.
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


def setting_faults(model: Model, setting: TrainSetting, models: str | None = None) -> list[Refusal]:
    """What of `setting` the library of `model` cannot do, each with its way out.

    `models` names the package whose Swin it is where that is not the model's library.
    """
    if isinstance(model, FactoryModel):
        return _factory_faults(model, setting)
    if isinstance(model, NamedModel):
        raise _not_written(model, "this trainer")
    spec = find_library(model.library)
    title = f"{models or spec.title}'s Swin v{model.version}"
    faults = []
    checkpointings = spec.checkpointings(model)
    if setting.checkpointing.partition(":")[0] not in checkpointings:
        faults.append(
            Refusal(
                f"{title} checkpoints {_either(checkpointings)}, not {setting.checkpointing}",
                f"Emit with --set checkpointing={checkpointings[-1]} (not measured), or tune "
                f"{model.library}'s own model.",
            )
        )
    beyond = [stage for stage in setting.checkpointed_stages or () if stage >= model.num_stages]
    if beyond:
        law = f"{title} has {model.num_stages} stages from 0, and no stage {beyond[0]}"
        faults.append(Refusal(law, "Emit with --set checkpointing=stages (not measured)."))
    attentions = spec.attentions(model)
    if setting.attention != "library" and setting.attention not in attentions:
        return [*faults, _no_attention(model, title, setting)]
    attention = attentions[0] if setting.attention == "library" else setting.attention
    return [*faults, *_limits(model, setting, attention)]


def _no_attention(model: SwinConfig, title: str, setting: TrainSetting) -> Refusal:
    attentions = find_library(model.library).attentions(model)
    return Refusal(
        f"{title} computes attention only by {_either(attentions)}, not {setting.attention}",
        f"Emit with --set attention={attentions[0]} (not measured), or tune "
        f"{model.library}'s own model.",
    )


def _limits(model: Model, setting: TrainSetting, attention: str) -> list[Refusal]:
    """What would break in the trainer as it breaks in a probe."""
    limit = limit_of(model, setting, attention)
    return [Refusal(f"{limit.law}: {limit.value}", limit.way_out)] if limit is not None else []


def _either(values: tuple[str, ...]) -> str:
    return " or ".join(values)


def _not_written(model: NamedModel, trainer: str) -> UnsupportedError:
    return UnsupportedError(
        f"{model.title} is no Swin of the planner's, and is not written for {trainer} yet.",
        "Build it in a factory of your own, and tune that: package.module:factory.",
    )


def _factory_faults(model: FactoryModel, setting: TrainSetting) -> list[Refusal]:
    way_out = f"Let {model.factory} do it, and emit with --set"
    faults = []
    if setting.checkpointing != "none":
        law = f"how {model.factory} checkpoints is its own matter, not {setting.checkpointing}"
        faults.append(Refusal(law, f"{way_out} checkpointing=none."))
    if setting.attention == "sdpa":
        law = f"how {model.factory} computes attention is its own matter, not sdpa"
        faults.append(Refusal(law, f"{way_out} attention=library."))
    return [*faults, *_limits(model, setting, setting.attention)]
