"""The same architecture in another library's code, where that library can express it."""

from __future__ import annotations

from planner.emit.plan import Model, Refusal, refuse
from planner.errors import UnsupportedError
from planner.schema import FactoryModel, Library, SwinConfig, TrainSetting

CHECKPOINTING: dict[tuple[Library, int], tuple[str, ...]] = {
    # What the library does by itself, torchvision's blocks excepted, which a wrapper does.
    ("native", 1): ("none", "blocks", "stages"),
    ("native", 2): ("none", "blocks", "stages"),
    ("timm", 1): ("none", "blocks"),
    ("timm", 2): ("none", "blocks"),
    ("torchvision", 1): ("none", "blocks"),
    ("torchvision", 2): ("none", "blocks"),
    ("transformers", 1): ("none", "nested"),
    ("transformers", 2): ("none", "stages"),
    ("microsoft", 1): ("none", "blocks"),
    ("microsoft", 2): ("none", "blocks"),
}
FUSED_ATTENTION: frozenset[tuple[Library, int]] = frozenset(
    {("native", 1), ("native", 2), ("timm", 1), ("transformers", 1)}
)


def as_library(model: Model, library: Library, trainer: str) -> SwinConfig:
    """`model` as `library` builds it, weights' shapes unchanged. `trainer` is named in the error.

    Raises UnsupportedError with all that the library cannot express.
    """
    if isinstance(model, FactoryModel):
        raise UnsupportedError(
            f"{trainer} builds its models by name, and {model.factory} is a factory of your own.",
            "Use --for pytorch, accelerate, lightning or deepspeed, which train any module.",
        )
    if model.library == library:
        return model
    refuse(trainer, _inexpressible(model, library))
    return model.model_copy(update={"library": library, "name": None})


def _inexpressible(model: SwinConfig, library: Library) -> list[Refusal]:
    way_out = f"Use --for pytorch, which trains the model that was measured ({model.title})."
    faults = []
    if isinstance(model.window_size, tuple) and not (library == "timm" and model.version == 1):
        faults.append(f"{library}'s Swin has one window for all stages, not {model.window_size}")
    if not model.patch_norm and library != "microsoft":
        faults.append(f"{library}'s Swin always normalises its patches (patch_norm=false)")
    if model.absolute_position_embedding and library in ("timm", "torchvision"):
        faults.append(f"{library}'s Swin has no absolute position embedding")
    return [Refusal(fault, way_out) for fault in faults]


def setting_faults(model: Model, setting: TrainSetting) -> list[Refusal]:
    """What of `setting` the library of `model` cannot do, each with its way out."""
    if isinstance(model, FactoryModel):
        return _factory_faults(model, setting)
    key = (model.library, model.version)
    title = f"{model.library}'s Swin v{model.version}"
    faults = []
    kinds = CHECKPOINTING[key]
    kind = setting.checkpointing.partition(":")[0]
    if kind not in kinds or (kind != setting.checkpointing and model.library != "native"):
        offered = " or ".join(kinds)
        faults.append(
            Refusal(
                f"{title} checkpoints {offered}, not {setting.checkpointing}",
                f"Emit with --set checkpointing={kinds[-1]} (not measured), or tune "
                f"{model.library}'s own model.",
            )
        )
    if setting.attention == "sdpa" and key not in FUSED_ATTENTION:
        faults.append(
            Refusal(
                f"{title} has explicit attention alone, not sdpa",
                "Emit with --set attention=eager (not measured; it takes more memory), or tune "
                f"{model.library}'s own model.",
            )
        )
    return faults


def _factory_faults(model: FactoryModel, setting: TrainSetting) -> list[Refusal]:
    way_out = f"Let {model.factory} do it, and emit with --set"
    faults = []
    if setting.checkpointing != "none":
        law = f"how {model.factory} checkpoints is its own matter, not {setting.checkpointing}"
        faults.append(Refusal(law, f"{way_out} checkpointing=none."))
    if setting.attention == "sdpa":
        law = f"how {model.factory} computes attention is its own matter, not sdpa"
        faults.append(Refusal(law, f"{way_out} attention=library."))
    return faults
