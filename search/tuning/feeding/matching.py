"""Whether a model can be trained on the data at all: refused before anything is probed."""

from __future__ import annotations

from planner.core.errors import UnsupportedError, UsageError
from planner.core.schema import FactoryModel, Model, NamedModel
from planner.core.schema.loading import DataSource, LoaderSetting
from search.tuning.own_model import Made

OWN_DATA = (
    "Write a function that makes the Dataset whose items the model takes, and pass "
    "--data MODULE:FACTORY."
)


def check_match(model: Model, source: DataSource) -> None:
    """Raises UsageError or UnsupportedError where `model` does not take pictures with classes, or
    takes others than `source` has. What a factory's Dataset holds is seen when it is loaded."""
    if source.kind == "factory":
        return
    if isinstance(model, NamedModel) and model.task != "classification":
        raise _other_batch(model, source)
    if model.image_size is None:
        raise _other_batch(model, source)
    if model.in_channels != 3:
        raise UsageError(
            f"{model.title} takes images of {model.in_channels} channels, and the pictures of "
            f"{source.location} are loaded with 3.",
            "Omit in_channels, or " + OWN_DATA[0].lower() + OWN_DATA[1:],
        )
    classes = source.num_classes
    if classes is not None and model.num_classes is not None and classes > model.num_classes:
        raise UsageError(
            f"{source.location} has {classes} classes, and {model.title} only {model.num_classes}.",
            f"Add --num-classes {classes}.",
        )


def check_batches(model: Model, made: Made | None, source: DataSource | None) -> None:
    """Raises UnsupportedError where what a factory `made` has batches of its own beside `source`;
    what a factory loads is left to the run."""
    if source is not None and source.kind != "factory" and made is not None and made.is_task:
        raise _other_batch(model, source)


def check_size(model: Model, loader: LoaderSetting) -> None:
    """Raises UsageError where a loader was measured at another image size than the model's."""
    size = getattr(model, "image_size", None)
    if loader.pipeline != "own" and size is not None and tuple(size) != loader.image_size:
        made, wanted = (_pixels(pair) for pair in (loader.image_size, size))
        raise UsageError(
            f"the loader was measured at {made} px, and {model.title} takes {wanted} px.",
            "Measure it for this model: pass --data in the place of --with-data, or run "
            "'planner data' with --for.",
        )


def class_notes(model: Model, source: DataSource) -> list[str]:
    """What is no fault, and worth a word: more classes in the model than in the data."""
    classes, own = source.num_classes, getattr(model, "num_classes", None)
    if classes is None or own is None or classes >= own:
        return []
    return [
        f"The data have {classes} classes and the model {own}: --num-classes {classes} would train "
        "those only."
    ]


def _other_batch(model: Model, source: DataSource) -> UnsupportedError:
    what = (
        f"{model.title} makes batches of its own"
        if isinstance(model, FactoryModel)
        else f"a step of {model.title} is {getattr(model, 'task', 'no classification')}"
    )
    return UnsupportedError(
        f"{what}, and {source.location} is loaded as pictures with a class each.", OWN_DATA
    )


def _pixels(size: tuple[int, int]) -> str:
    return f"{size[0]} × {size[1]}"
