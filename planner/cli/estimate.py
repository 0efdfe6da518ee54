"""`planner estimate`, `planner advise` and `planner report`: what a training needs, predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from planner.cli.options import TO_FILE, Fields, Printed, argument, of_schema, reads, refuse_if
from planner.cli.rows import (
    RECORDING,
    Costed,
    OnDevice,
    Rows,
    check_link,
    model_and_settings,
    read_gpu,
)
from planner.cli.show import answer, say, tell
from planner.core.files import to_json
from planner.core.schema import Model, ResolvedSetting, TrainSetting, parse
from planner.core.schema.validation import option, switch
from planner.core.terminal import collect_nothing, shows_seconds
from planner.core.units import format_bytes
from planner.estimation.arguments import read_setting
from planner.estimation.estimate import Estimate, default_precision, estimate_ledger, resolve
from planner.estimation.ledgers import is_on_shapes, record_ledgers, step_ledger
from planner.libraries.limits import batch_unit
from planner.machine.hardware import Gpu, find_gpu
from planner.machine.hardware.fabric import find_fabric
from planner.machine.hardware.gpu import check_precision
from planner.recording import recordings
from planner.throughput.result import Training

if TYPE_CHECKING:
    from planner.estimation.scaling import Scaled
    from planner.report.page.contents import Part
    from planner.report.step import PredictedStep

# Options that have no effect where several GPUs are ranked, or the largest batch is sought.
NOT_RANKED = {
    "--memory": "each GPU is judged by its own memory",
    **dict.fromkeys(("--gpus", "--link", "--max-batch"), "name one GPU, or omit it"),
}
NOT_LARGEST = {
    "--batch-size": "it is what --max-batch finds",
    "--global-batch": "--max-batch finds the images of a device",
}
Row = tuple[Gpu | None, Model, ResolvedSetting]


class EstimateRequest(Costed, Rows, Printed):
    """What `planner estimate` was asked."""

    model: str = argument("MODEL", "models")
    max_batch: bool = switch("The largest batch that fits, by precision and checkpointing.",
                             heading="Setting")  # fmt: skip
    fresh: bool = switch("Record again what was recorded before.", heading=RECORDING)


@reads(EstimateRequest)
def estimate(request: EstimateRequest) -> None:
    """Predict the memory and time of training MODEL, before you launch it.

    MODEL is LIBRARY:NAME (any model of timm, torchvision or transformers: timm:resnet50), a YAML or
    JSON file, or package.module:factory. Several values for an option make one row per
    combination; --gpus 1,2,4,8 shows what many GPUs reach together. A Swin of 'planner models' is
    predicted at once; any other model's step is recorded first, once, which takes up to minutes.

    Examples:
      planner estimate native:swin_tiny --batch-size 64 --gpu "RTX 3090"
      planner estimate timm:swin_base_patch4_window7_224 --max-batch --memory 24GiB
      planner estimate native:swin_tiny --gpu "A100 SXM 80GB" --gpus 1,2,4,8
    """
    collect_nothing()
    if len(request.gpus) > 1:
        request.refuse(f"--gpu {request.gpu}", NOT_RANKED)
    elif request.max_batch:
        request.refuse("--max-batch", NOT_LARGEST)
    defaults = {}
    if request.max_batch:  # per precision and checkpointing, unless they are named
        precision = default_precision(request.only_gpu)
        defaults = {"precision": f"fp32,{precision}", "checkpointing": "none,blocks"}
    rows, said = read_rows(request.model, request, request.gpus, defaults)
    training = request.training(next(iter(request.gpus), None))
    if request.max_batch:
        _print_largest(request, rows, training)
    else:
        _print_estimates(request, rows, said, training)


def read_rows(
    model: str, asked: Rows, gpus: Sequence[Gpu], defaults: dict[str, str]
) -> tuple[list[Row], list[str]]:
    """What to estimate, a row for each setting, on each of several GPUs in a precision that it has;
    and what is said of rows that are not as they were asked. Raises UsageError and
    UnsupportedError."""
    only = gpus[0] if len(gpus) == 1 else None
    defaults = {"precision": default_precision(only), **defaults}
    chosen, settings = model_and_settings(model, asked.fields, defaults, asked.global_batch)
    for setting in settings:
        check_precision(only, setting.precision)
    check_link(asked.link, settings, only)
    resolved = [resolve(chosen, setting) for setting in settings]
    if len(gpus) < 2:
        return [(only, *row) for row in resolved], []
    from planner.estimation.scaling import on_gpus

    return on_gpus(resolved, gpus)


def _recorded(request: EstimateRequest, rows: list[Row]) -> list[Row]:
    """Records, all at once, what is recorded and is not known. The rows that have a step then; why
    others have none is said. Raises PlannerError where none has."""
    cards = recordings.stand_ins(gpu for gpu, *_ in rows)
    needed = {
        (gpu, model, setting): (model, setting, cards[gpu])
        for gpu, model, setting in rows
        if not is_on_shapes(model, setting, request.recorded)
    }
    law = "--fresh is for what is recorded, and this model is estimated on shapes."
    refuse_if(request.fresh and not needed, law, "Omit it, or add --record.")
    if request.fresh:
        recordings.forget(recordings.step_of(*one) for one in needed.values())
    failed = record_ledgers(list(needed.values()))
    errors = {row: error for row, error in zip(needed, failed, strict=True) if error}
    left = [row for row in rows if row not in errors]
    if not left:
        raise next(iter(errors.values()))
    from planner.estimation.device_estimator import describe_kind

    said = (f"Without {describe_kind(s)}: {error.message}\n" for (_, _, s), error in errors.items())
    for line in dict.fromkeys(said):
        tell(line) if request.as_json else say(line)
    return left


def _print_estimates(
    request: EstimateRequest, rows: list[Row], said: list[str], training: Training | None
) -> None:
    """The rows in their order; of several GPUs the fastest that fits first."""
    is_one, is_ranked, link = len(rows) == 1, len(request.gpus) > 1, request.link
    rows, only = _recorded(request, rows), request.only_gpu
    cards = recordings.stand_ins(gpu for gpu, *_ in rows)
    if any(gpu != cards[gpu] and not is_on_shapes(m, s, request.recorded) for gpu, m, s in rows):
        said = [*said, "Recorded on a card of each capability: others reserve some % more or less."]
    with shows_seconds():
        ledgers = [step_ledger(*row[1:], request.recorded, cards[row[0]]) for row in rows]
        found = [
            estimate_ledger(
                model, setting, ledger, gpu, request.memory_bytes, request.config, link=link,
                retries=not is_ranked,
            ).with_cost(training)
            for (gpu, model, setting), ledger in zip(rows, ledgers, strict=True)
        ]  # fmt: skip
    scaled: Sequence[Scaled] = ()
    if is_ranked:
        found.sort(key=rank)
    elif "world_size" in request.fields.setting:
        from planner.estimation import scaling

        scaled = scaling.scaled(found, only, request.recorded)

    def shown() -> Any:
        rows = [{**({"gpu": one.gpu} if is_ranked else {}), **to_json(one)} for one in found]
        if scaled:
            rows = [{**to_json(row.estimate), "scaling": row} for row in scaled]
        return rows[0] if len(rows) == 1 and (is_one or scaled) else rows

    for line in said if request.as_json else ():
        tell(f"{line}\n")
    answer(request, shown, lambda: _parts(request, found, said, scaled))


def rank(one: Estimate) -> tuple[bool, float]:
    """The fastest that fits comes first."""
    return not one.fits, -(one.throughput.images_per_second if one.throughput else 0.0)


def _parts(
    request: EstimateRequest, found: Sequence[Estimate], said: Sequence[str],
    scaled: Sequence[Scaled] = (), sizes: Sequence[Mapping[str, int]] = (),
) -> Sequence[Part]:  # fmt: skip
    """The answer of one estimate, or of several."""
    from planner.advice.flags import command_of
    from planner.report.estimates import estimate_answer, rows_answer

    def then(estimate: Estimate) -> str:
        if estimate.budget_bytes is None:
            return ""
        gpu = find_gpu(estimate.gpu) if estimate.gpu else None
        return command_of(
            "advise", estimate, request.model, request.fields.model, gpu, request.memory_bytes,
            request.link, request.config,
        )  # fmt: skip

    notes, memory, only = list(said), request.memory_bytes, request.only_gpu
    if memory is not None:
        line = f"--memory {request.memory} is {format_bytes(memory)} ({memory:,} bytes)"
        if only is not None and memory > only.memory_bytes:
            line += f", and {only.title} has {format_bytes(only.memory_bytes)}"
        notes.append(f"{line}.")
    typed = request.fields.setting
    ddp = any(estimate.setting.parallelism == "ddp" for estimate in found)
    if "world_size" in typed and "parallelism" not in typed and ddp:
        notes.append("Several GPUs without --parallelism run ddp.")
    on_shapes = [e.setting for e in found if is_on_shapes(e.model, e.setting, request.recorded)]
    if kinds := {setting.parallelism for setting in on_shapes} - {"none"}:
        kind = " and ".join(sorted(kinds))
        notes.append(f"Memory under {kind} is a closed form; --record asks torch's own code.")
    if len(found) == 1 and not sizes:
        return estimate_answer(found[0], then, notes)
    return rows_answer(found, then, notes, scaled, sizes)


def _print_largest(request: EstimateRequest, rows: list[Row], training: Training | None) -> None:
    from planner.estimation.device_estimator import Largest, find_largest, largest_notes

    rows = [
        (gpu, model, setting.model_copy(update={"batch_size": 2 * batch_unit(setting)}))
        for gpu, model, setting in rows
    ]
    found: list[Largest] = []
    for gpu, model, setting in _recorded(request, rows):
        with shows_seconds():
            found.append(
                find_largest(
                    model, setting, gpu, request.memory_bytes, request.config, request.recorded,
                    request.link, training,
                )
            )  # fmt: skip
    fitting = [one for large in found if (one := large.sure or large.best)]

    def shown() -> Any:
        notes = largest_notes(found)
        if not fitting:
            return "\n".join(notes)
        return _parts(request, fitting, notes, (), [one.sizes for one in found if one.best])

    answer(request, found, shown)


OF_PAGE = ("--targets", "--output", "--force", "--title")


class ReportRequest(Rows):
    """What `planner report` was asked."""

    targets: tuple[str, ...] = argument("RUN|MODEL…", "models")
    output: str = option("The page, one .html file.", *TO_FILE, default="report.html")
    force: bool = switch("Also replace what 'planner report' did not write.")
    title: str | None = option("The page's title.", "TEXT", "Output")


@reads(ReportRequest)
def report(request: ReportRequest) -> None:
    """Draw RUNs and MODELs as one HTML page that opens offline.

    A RUN is the --output of 'planner tune' (also while it runs), or a file of records. A MODEL is
    estimated with the options of 'planner estimate': several values make several estimates, and
    --gpu all ranks every GPU. Two runs or estimates, or more, are shown side by side.

    Examples:
      planner report run
      planner report native:swin_tiny --batch-size 64 --gpu "RTX 3090,RTX 4090"
    """
    from search.runs import check_options, check_page, check_target, is_run, write_report

    check_page(request.output, request.force)
    for target in request.targets:
        check_target(target)
    typed = {flag: value for flag, value in request.typed.items() if flag not in OF_PAGE}
    check_options(typed, request.targets)
    shown: list[str | PredictedStep] = []
    for target in request.targets:
        shown += [target] if is_run(target) else _steps(target, request)
    written = write_report(shown, request.output, title=request.title or "", force=request.force)
    say(f"Wrote {written}.")


def _steps(model: str, request: ReportRequest) -> list[PredictedStep]:
    """The estimates that the options mean: one for each GPU and each combination of values, of all
    GPUs the fastest that fits first."""
    from search.runs import step_of

    is_ranked = (request.gpu or "").casefold() == "all"
    if is_ranked:
        request.refuse("--gpu all", NOT_RANKED)
    each: list[tuple[Gpu, ...]] = [(gpu,) for gpu in request.gpus] or [()]
    rows: list[Row] = []
    for gpus in [request.gpus] if is_ranked else each:
        more, said = read_rows(model, request, gpus, {})
        rows += more
        for line in said:
            tell(line)
    link, of_model, recorded = request.link, request.fields.model, request.recorded
    record_ledgers([(model, setting, gpu) for gpu, model, setting in rows], recorded=recorded)
    steps = [
        step_of(config, setting, gpu, request.memory_bytes, request.config, link, recorded)
        for gpu, config, setting in rows
    ]
    steps = [replace(step, model_text=model, fields=of_model) for step in steps]
    return sorted(steps, key=lambda step: rank(step.estimate)) if is_ranked else steps


class AdviseRequest(Costed, OnDevice, Printed):
    """What `planner advise` was asked."""

    model: str = argument("MODEL", "models")
    fields: Fields = of_schema("one")
    gpu: str | None = option("A GPU of 'planner gpus'.", "NAME", "Device", values="gpus")
    keep: tuple[str, ...] = option(
        "Leave these fields as they are, or refuse changes of rounding, recipe or learning-rate.",
        "FIELD[,FIELD…]", "What may change", default=(), values="kept",
    )  # fmt: skip
    allow: tuple[str, ...] = option(
        "Also try recipe (other optimizers, 8 bits) or adapters (train only a part).",
        "EFFECT[,EFFECT…]", "What may change", default=(), values="allowed",
    )  # fmt: skip
    recorded: bool = switch("Record what is not tried without (compile), once: minutes.",
                            "--record", RECORDING)  # fmt: skip


@reads(AdviseRequest)
def advise(request: AdviseRequest) -> int:
    """Say how to train MODEL as fast as possible in a GPU's memory, before you launch it.

    Does it fit as it stands (bf16, or fp16 on a GPU without it, adamw, no checkpointing, not
    compiled, unless options say otherwise)? If not: the fastest ways to make it fit, what each
    change does to memory and time, and what the GPU waits for. Each way keeps the images of a step.
    An option has one value: 'planner estimate' compares several. Exit status 1 where nothing fits.

    Examples:
      planner advise native:swin_tiny --batch-size 256 --gpu "RTX 3060"
      planner advise native:swin_tiny --memory 6GiB --keep compile,offload
    """
    collect_nothing()
    from planner.advice import advising
    from planner.cli.rows import refuse_several
    from planner.report.advice import advice_answer

    refuse_several(request.fields, "advice", request.gpu)
    of_setting: dict[str, Any] = dict(request.fields.setting)
    gpu, batch_size = read_gpu(request.gpu), None
    if of_setting.get("world_size", "1") != "1":
        check_link(request.link, [read_setting(of_setting, {})], gpu)
    elif request.link is not None:  # of the GPUs that advice adds
        find_fabric(gpu, 1, request.link)
    if size := of_setting.pop("batch_size", None):
        batch_size = parse(TrainSetting, {"batch_size": size}, "the setting").batch_size
    advice = advising.advise(
        request.model, gpu=gpu, memory_bytes=request.memory, batch_size=batch_size,
        global_batch=request.global_batch, keep=_words(request.keep),
        allow=_words(request.allow), allocator=request.allocator, link=request.link,
        epochs=request.epochs, images_per_epoch=request.images_per_epoch, recorded=request.recorded,
        **{**request.fields.model, **of_setting},
    )  # fmt: skip
    answer(request, advice, lambda: advice_answer(advice))
    return 0 if advice.recommended is not None else 1


def _words(said: tuple[str, ...]) -> list[str]:
    return [word for text in said for word in text.split(",") if word.strip()]
