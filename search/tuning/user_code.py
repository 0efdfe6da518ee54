"""What a person gives besides a model's name, run in processes of its own: a factory; and for `tune
--data` the data, through the fastest loader and thirty steps of the emitted script.

The data are measured with the very file that the person gets. Where that fails, the recommendation
stands, with a note.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from planner.core.errors import PlannerError, UnsupportedError, UsageError
from planner.core.schema import FactoryModel, Model, NamedModel, TrainSetting
from planner.core.schema.record import DataResult, Feeding, Recommendation
from planner.core.units import format_seconds
from planner.programs.running import supervised
from planner.training.data import Data, find_data
from search.loop.signals import ending, interruptible
from search.probe.device import ask_process

STEPS, WARM_STEPS = 30, 10  # of the script; the first ones compile, tune and fill queues
FEEDING_SHARE = 0.25  # of --budget, for loader and script together
WALK_SHARE = 0.5  # of that, for the loader
SCRIPT_START_SECONDS = 120.0  # imports and workers, where no budget says less
SCRIPT_FOLDER = "fed"


def check_data(data: str, model: Model, is_task: bool) -> Data:
    """The data, if the emitted script can train `model` on them. Raises UsageError or
    UnsupportedError before anything is probed."""
    source = find_data(data)
    if is_task or (isinstance(model, NamedModel) and model.task != "classification"):
        raise UnsupportedError(
            f"{model.title} makes batches of its own, and --data feeds classifiers of images.",
            "Omit --data; 'planner data MODULE:FACTORY' measures the loader of your Dataset.",
        )
    if source.folder is None:
        return source
    if model.in_channels != 3:
        raise UsageError(
            f"{model.title} takes images of {model.in_channels} channels, and the pictures of "
            f"{source.location} have 3.",
            "Write a function that makes your Dataset, and pass --data MODULE:FACTORY.",
        )
    classes = source.num_classes or 0
    if model.num_classes is not None and classes > model.num_classes:
        raise UsageError(
            f"{source.location} has {classes} classes, and {model.title} only {model.num_classes}.",
            f"Add --num-classes {classes}.",
        )
    return source


def feed(
    step: Recommendation, data: Data, where: str, output: Path,
    seconds_left: float | None, say: Callable[[str], None],
) -> Recommendation:  # fmt: skip
    """`step` with what its data cost on the device `where`; the script is kept in `output`/fed.
    Ctrl-C ends the measurement with what is known so far."""
    if step.setting is None or step.evidence is None:
        return step
    from search.loader import find_loader

    size = getattr(step.model, "image_size", None) or (224, 224)
    notes: list[str] = []
    loader: DataResult | None = None
    fed: Feeding | None = None
    try:
        walk = 90.0 if seconds_left is None else seconds_left * WALK_SHARE
        with interruptible():
            loader = find_loader(
                data.location, batch_size=step.setting.batch_size, image_size=size, device=where,
                seconds=walk, on_progress=say,
            )  # fmt: skip
            fed = Feeding(data=loader)
            say(f"Training {STEPS} steps by the emitted script on {data.location}.")
            fed = _train(
                step.model_copy(update={"feeding": fed}), fed, data, where, output, seconds_left
            )
    except KeyboardInterrupt:
        notes.append(f"The data were not measured to the end: {ending()}.")
    except PlannerError as error:
        notes.append(f"The data were not measured to the end: {' '.join(str(error).split())}")
    if fed is None:
        return step.model_copy(update={"notes": (*step.notes, *notes)})
    fed = fed.model_copy(update={"notes": (*fed.notes, *notes)})
    return step.model_copy(update={"feeding": fed})


def _train(
    result: Recommendation, fed: Feeding, data: Data, where: str, output: Path, left: float | None
) -> Feeding:
    """`fed` with the rate of the script that `planner emit --for pytorch` writes, and its waits for
    data. Raises PlannerError where the script fails or takes too long."""
    from planner.trainers.emission import emit

    folder = output / SCRIPT_FOLDER
    emitted = emit(result, "pytorch", output=folder / "train.py")
    try:
        kept = emitted.write(folder)
    except OSError as error:
        law = f"{folder} cannot be written: {error.strerror}."
        raise PlannerError(law, "Name another folder with --output.") from None
    assert result.setting is not None
    assert result.evidence is not None
    ranks = result.setting.world_size
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    rate = result.evidence.images_per_second or 1.0
    step_seconds = result.setting.images_per_device_step / rate
    compile_seconds = result.evidence.compile_seconds or 0.0
    needed = SCRIPT_START_SECONDS + 3 * STEPS * step_seconds + 2 * compile_seconds
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch, "output.txt")
        script = emitted.write(Path(scratch, "script"))  # beside nothing else that it might import
        # The classes themselves: a folder with val/ beside them would be validated on.
        folders = [] if data.folder is None else [str(data.folder)]
        command = [
            sys.executable, *(launcher if ranks > 1 else []), str(script), *folders,
            "--steps", str(STEPS), "--log-every", str(WARM_STEPS), "--device", where,
            "--output", f"{scratch}/trained", "--lr", "1e-4",
        ]  # fmt: skip
        allowed = needed if left is None else min(needed, left)
        try:
            with log.open("wb") as file:
                status = supervised(command, file, seconds=allowed)
        except TimeoutError:
            law = f"{kept} took longer than {format_seconds(allowed)}."
            raise PlannerError(law, "Run it by itself, or give a longer --budget.") from None
        lines = log.read_text("utf-8", "replace").strip().splitlines()
        if status != 0:
            law = f"{kept} ended with status {status}: {(lines or ['-'])[-1][:300]}"
            raise PlannerError(law, "Run it by itself: it prints the rest.")
        log_lines = Path(scratch, "trained", "log.jsonl").read_text("utf-8").splitlines()
    steps = [line for line in map(json.loads, log_lines) if line.get("step", 0) > WARM_STEPS]
    speeds = [line for line in steps if "images_per_second" in line]
    seconds = sum(1 / line["images_per_second"] for line in speeds)
    waited = sum(line["waited"] / line["images_per_second"] for line in speeds)
    return fed.model_copy(update={
        "steps": STEPS, "images_per_second": len(speeds) / seconds / ranks,
        "waited": waited / seconds,
    })  # fmt: skip


# To ask a factory what it makes, torch must be imported. A judgement.
_ASK_SECONDS = 90.0


@dataclass(frozen=True)
class FactoryAnswer:
    """What a factory makes. `is_task`: it makes batches of its own, and is no module that takes
    images."""

    is_task: bool = False
    has_optimizer: bool = False


def ask_factory(model: FactoryModel) -> FactoryAnswer | None:
    """What a factory makes, asked of another process; None where that gives no answer. Raises
    PlannerError where it makes neither a module nor a whole task, or cannot be imported."""
    arguments = ["-m", "search.tuning.user_code", model.model_dump_json()]
    answer = ask_process(arguments, _ASK_SECONDS)
    if answer is None:
        return None
    if "error" in answer:
        raise PlannerError(*answer["error"])
    return FactoryAnswer(**answer)


def answer_for_factory() -> None:
    """Prints what a factory makes. The model is built on torch's meta device, without data."""
    import torch

    from planner.libraries.factories import make_builder
    from planner.training.tasks import as_task
    from planner.training.tasks.lookup import CheckedTask

    model = FactoryModel.model_validate_json(sys.argv[1])
    try:
        build = make_builder(model, TrainSetting())
        with torch.device("meta"):
            built = build()
        task = as_task(built, model, TrainSetting())
    except PlannerError as error:
        answer: dict[str, object] = {"error": [error.message, error.way_out]}
    else:
        answer = asdict(FactoryAnswer(isinstance(task, CheckedTask), hasattr(task, "optimizer")))
    print(json.dumps(answer))


if __name__ == "__main__":
    answer_for_factory()
