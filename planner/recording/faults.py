"""What stops a recording, in words: what was raised, the line of code, and the way out."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterable
from pathlib import Path

import torch

import planner
from planner.core.errors import PlannerError, UnsupportedError
from planner.core.failures import SIGNS
from planner.core.schema import FactoryModel, Model, SwinConfig, TrainSetting

# Frames in these are not what a person would mend.
_OTHERS = tuple(str(Path(package.__file__ or "").parent) + "/" for package in (torch, planner))
OURS = "the training step"  # a place that no one else's code is called from
MAX_SAID = 240  # characters of what was raised
_PROBED = "'planner tune' can still measure it: it runs the model on a real GPU, without a prior."
_HOST = "Free memory on this machine, or record on one that has more: only the host's is short."


def refuse(model: Model, setting: TrainSetting) -> None:
    """Raises UnsupportedError for what a setting says of Swins only."""
    if not isinstance(model, SwinConfig) and (setting.frozen_stages or setting.lora_rank):
        raise UnsupportedError(
            f"frozen stages and LoRA are not known of {model.title}.",
            "Omit these options; freeze and adapt inside a factory of your own.",
        )


def error_of(model: Model, raised: BaseException) -> PlannerError:
    """What a person is told of what building or training `model` raised."""
    where = place(traceback.extract_tb(raised.__traceback__))
    kind = type(raised).__name__
    said = str(raised).strip().partition("\n")[0][:MAX_SAID]
    line = f"{kind}: {said}"
    message = f"the step of {model.title} raised {kind} at {where}{f': {said}' if said else '.'}"
    sign = next((sign for sign in SIGNS if sign.is_sure(line)), None)
    if sign is None:
        return PlannerError(message, f"{_given(model)}{_PROBED}")
    way_out = _HOST if sign.kind == "out of host memory" else " ".join(sign.told())
    return PlannerError(f"{message}\n{sign.means}", way_out)


def death_of(model: Model, status: int) -> PlannerError:
    """What a person is told where the process ended before it could answer."""
    if status >= 0:
        how, way_out = f"with status {status}", "What it said last is above."
    else:
        how, way_out = f"by {signal.Signals(-status).name}", "What it said last is above."
        if -status == signal.SIGKILL:
            way_out = f"The kernel kills what takes too much of the host's memory. {_HOST}"
    message = f"the process that recorded the step of {model.title} ended {how}."
    return PlannerError(message, f"{way_out} {_PROBED}")


def place(frames: Iterable[traceback.FrameSummary]) -> str:
    """`file:line` of the innermost frame outside torch and this package."""
    outside = [f for f in frames if not f.filename.startswith((*_OTHERS, "<"))]
    return f"{outside[-1].filename}:{outside[-1].lineno}" if outside else OURS


def place_now() -> str:
    """Where the code that runs now was called."""
    return place(traceback.extract_stack())


def _given(model: Model) -> str:
    """What a module gets unless it is told another, and how it is given another."""
    task = (
        "If the model takes another input than this step gives it, or returns something else, let "
        "its factory return a task: the module, its batch and its loss. "
    )
    if not isinstance(model, FactoryModel):
        return task
    height, width = model.image_size
    return (
        f"A module is given images of {height}x{width} px and {model.num_classes} classes: "
        f"--image-size and --num-classes say others. {task}"
    )
