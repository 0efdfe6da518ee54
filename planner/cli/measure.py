"""`planner tune` and `planner data`: measurements on this machine."""

import shlex
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from planner.cli.options import Fields, Json, Printed, argument, model_options, of_schema, reads
from planner.cli.rows import read_duration, read_piped, split_values
from planner.cli.show import answer, show_on, tell
from planner.core.errors import UsageError, refuse_if
from planner.core.files import MAX_RESULT_BYTES, parse_json, read_text
from planner.core.schema import TrainSetting, parse
from planner.core.schema.model import MAX_SIZE
from planner.core.schema.record import MAX_WORKERS
from planner.core.schema.validation import option, switch
from planner.estimation.arguments import read_model
from planner.estimation.predicted import Predicted, is_predicted, read_predicted
from planner.libraries.names import resolve_model
from planner.machine.nvml import devices
from search import check_platform
from search.loop.options import SEARCH, SearchOptions, begin_at
from search.loop.signals import handle_signals
from search.loop.space import HELD, held_error

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Pipeline = Literal["torchvision", "timm"]


class DataRequest(Json):
    """The request of `planner data`."""

    data: str = argument("DIR|MODULE:FACTORY", "dir")
    batch_size: int = option("Images in a micro-batch.", default=64, bounds=(1, MAX_SIZE))
    image_size: int = option("In pixels.", "PX", default=224, bounds=(1, MAX_SIZE))
    pipeline: Pipeline = option("Whose transforms are used: torchvision or timm.", "P",
                                default="torchvision", values=get_args(Pipeline))  # fmt: skip
    max_workers: int | None = option("At most so many worker processes.", bounds=(1, MAX_WORKERS),
                                     shown="twice the processors")  # fmt: skip
    device: str = option("auto, cpu, cuda:0 …", "DEVICE", default="auto", values="devices")
    budget: str = option("Begin no further loader after this time.", "TIME", default="90s")
    quiet: bool = switch("Show only the result and errors.", also="-q")


@reads(DataRequest)
def data(request: DataRequest) -> int:
    """Find how fast this machine feeds a training, and with which DataLoader.

    The data are a folder with a folder of pictures per class, or package.module:factory, which
    returns a Dataset. Nothing is written. Workers 0, 1, 2, 4 … are measured until two
    doublings gain less than 5%; Ctrl-C ends with the best so far.

    Examples:
      planner data pictures --batch-size 64
      planner data my_data:build --budget 30s --json
    """
    check_platform()
    seconds = read_duration("--budget", request.budget)
    try:
        from search.loader import find_loader, loader_text
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise UsageError(
            "a DataLoader is torch's, and torch is not installed.", "pip install torch"
        ) from None
    with handle_signals(*SIGNALS) as interrupts:
        result = find_loader(
            request.data, pipeline=request.pipeline, batch_size=request.batch_size,
            image_size=(request.image_size, request.image_size), max_workers=request.max_workers,
            device=request.device, seconds=seconds,
            on_progress=(lambda line: None) if request.quiet else tell,
        )  # fmt: skip
        answer(request, result, lambda: loader_text(result))
        return 0 if interrupts.number is None else interrupts.exit_status


class TuneRequest(Printed):
    """The request of `planner tune`."""

    model: str | None = argument("MODEL", "models", default=None)
    fields: Fields = of_schema("searched", single=tuple(HELD), without=("world_size", "nodes"))
    from_: str | None = option(
        "Begin at what 'planner advise' or 'planner estimate' printed with --json (- is standard "
        "input): its model, memory and setting; options typed here win.", "FILE", SEARCH, "--from",
        values="file",
    )  # fmt: skip
    way: int | None = option("Which way of the advice, or which of several estimates.", "N", SEARCH,
                             shown="the recommended", bounds=(1, MAX_SIZE))  # fmt: skip
    search: Mapping[str, Any] = model_options(SearchOptions)
    quiet: bool = switch("Show no progress: only the result, warnings and errors.", also="-q")


@reads(TuneRequest)
def tune(request: TuneRequest) -> int:
    """Find the fastest way to train MODEL on a device, by short real training runs (probes).

    MODEL is LIBRARY:NAME, a YAML or JSON file, or package.module:factory; with --from it may be
    omitted. Run the same command again to continue where it stopped; Ctrl-C ends it with
    the best setting so far. Several GPUs run ddp, unless --parallelism names what to search.
    Exit status 1 where nothing was found.

    Examples:
      planner tune native:swin_tiny --budget 10m --output run
      planner tune native:swin_tiny --precision bf16 --checkpointing none,blocks --trials 20
    """
    check_platform()
    from planner.report.searches import recommendation_answer
    from search.loop.records import ResultNotWrittenError
    from search.runs import interval_of
    from search.tuning import tune as tuning

    arguments = tune_arguments(request)
    write_error: ResultNotWrittenError | None = None
    with handle_signals(*SIGNALS) as interrupts:
        try:
            with show_on(request.quiet) as show:
                recommendation = tuning.tune(**arguments, on_progress=show.update)
        except KeyboardInterrupt:
            tell("Error: interrupted before anything was found.")
            return interrupts.exit_status
        except ResultNotWrittenError as error:
            recommendation, write_error = error.recommendation, error
        next_step = ""
        if recommendation.setting is not None:
            output = request.search.get("output") or tuning.default_output(recommendation.model)
            folder = shlex.quote(str(output))
            next_step = f"Next: planner emit {folder} --for TRAINER, or planner report {folder}"
        text = partial(recommendation_answer, recommendation, interval_of, next_step)
        answer(request, recommendation, text)
        if interrupts.number is not None:
            return interrupts.exit_status
    if write_error is not None:
        raise write_error
    return 0 if recommendation.status == "recommended" else 1


def tune_arguments(request: TuneRequest) -> dict[str, Any]:
    """The typed options as arguments of `tune`. With --from, the search begins at the setting that
    its file names. Raises UsageError and UnsupportedError."""
    setting_fields = dict(request.fields.setting)
    sizes = setting_fields.pop("batch_size", None)
    fixed = {field: setting_fields.pop(field) for field in HELD if field in setting_fields}
    for field, text in fixed.items():
        if "," in text:
            raise held_error(field)
    typed = {
        "batch_size": None if sizes is None else sizes.split(","),
        "base": parse(TrainSetting, fixed, "--set"),
        "restrict": {field: tuple(split_values(text)) for field, text in setting_fields.items()},
        **request.search,
    }
    model_fields, model = request.fields.model, None
    if request.model is not None:
        model = resolve_model(request.model, model_fields)
    if request.from_ is not None:
        start = _read_start(request.from_, request.way, typed.get("device", "auto"))
        model = model or read_model(start.model, model_fields)
        return {"model": model, **begin_at(start, typed, fixed)}
    refuse_if(model is None, "no MODEL was named.", "For example 'planner tune timm:resnet50'.")
    refuse_if(request.way is not None, "--way chooses among what --from names.", "Add --from FILE.")
    return {"model": model, **typed}


def _read_start(path: str, way: int | None, device: str) -> Predicted:
    """The setting in the file of --from; prints it. Raises UsageError and UnsupportedError."""
    data, source = read_piped(path), "standard input"
    if path != "-":
        data, source = parse_json(read_text(Path(path), MAX_RESULT_BYTES), path), path
    law = f"{source} is not what `planner advise` or `planner estimate` prints with --json."
    refuse_if(not is_predicted(data), law, "A study is continued by the command that began it.")
    start = read_predicted(data, source, way)
    refuse_if(
        start.gpu and device == "auto" and not devices(),
        f"{start.source} is for {start.where}, and no GPU answers here: 'planner doctor' says why.",
        "Add --device cuda:0 if torch finds it, or --device cpu, whose times are not a card's.",
    )
    role = f"is not probed first: it {start.shortfall}" if start.shortfall else "is probed first"
    tell(f"From {start.source}, the setting predicted at {start.summary} on {start.where} {role}.")
    return start
