"""`planner estimate`, `planner advise` and `planner report`: predictions before a launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from planner.cli.options import TO_FILE, Fields, Printed, argument, of_schema, reads, refuse_if
from planner.cli.rows import RECORDING, Costed, OnDevice, Rows, check_link, parse_gpu, read_settings
from planner.cli.show import answer, say, tell
from planner.core.files import to_json
from planner.core.schema import Model, ResolvedSetting, TrainSetting, parse
from planner.core.schema.validation import option, switch
from planner.core.terminal import collect_nothing, shows_seconds
from planner.core.units import format_bytes
from planner.estimation.arguments import read_setting
from planner.estimation.estimate import Estimate, default_precision, estimate_ledger, resolve
from planner.estimation.ledgers import is_on_shapes, record_ledgers, step_ledger
from planner.libraries.limits import batch_multiple
from planner.machine.hardware import Gpu, find_gpu
from planner.machine.hardware.fabric import find_fabric
from planner.machine.hardware.gpu import check_precision
from planner.recording import recordings
from planner.throughput.result import TrainingLength

if TYPE_CHECKING:
    from planner.estimation.scaling import Scaled
    from planner.report.page.contents import Part
    from planner.report.step import PredictedStep

# Options that have no effect where several GPUs are ranked, or with --max-batch.
NOT_FOR_RANKING = {
    "--memory": "each GPU is judged by its own memory",
    **dict.fromkeys(("--gpus", "--link", "--max-batch"), "name one GPU, or omit it"),
}
NOT_FOR_MAX_BATCH = {
    "--batch-size": "it is what --max-batch finds",
    "--global-batch": "--max-batch finds the images of a device",
}
StepRow = tuple[Gpu | None, Model, ResolvedSetting]


class EstimateRequest(Costed, Rows, Printed):
    """The request of `planner estimate`."""

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
        request.refuse(f"--gpu {request.gpu}", NOT_FOR_RANKING)
    elif request.max_batch:
        request.refuse("--max-batch", NOT_FOR_MAX_BATCH)
    defaults = {}
    if request.max_batch:  # per precision and checkpointing, unless they are named
        precision = default_precision(request.only_gpu)
        defaults = {"precision": f"fp32,{precision}", "checkpointing": "none,blocks"}
    rows, remarks = read_rows(request.model, request, request.gpus, defaults)
    length = request.training_length(next(iter(request.gpus), None))
    if request.max_batch:
        _print_largest(request, rows, length)
    else:
        _print_estimates(request, rows, remarks, length)


def read_rows(
    model: str, request: Rows, gpus: Sequence[Gpu], defaults: dict[str, str]
) -> tuple[list[StepRow], list[str]]:
    """The rows to estimate: one for each setting, and on several GPUs one for each GPU, in a
    precision that it has; and remarks on rows that differ from the request. Raises UsageError and
    UnsupportedError."""
    only_gpu = gpus[0] if len(gpus) == 1 else None
    defaults = {"precision": default_precision(only_gpu), **defaults}
    config, settings = read_settings(model, request.fields, defaults, request.global_batch)
    for setting in settings:
        check_precision(only_gpu, setting.precision)
    check_link(request.link, settings, only_gpu)
    resolved = [resolve(config, setting) for setting in settings]
    if len(gpus) < 2:
        return [(only_gpu, *row) for row in resolved], []
    from planner.estimation.scaling import on_gpus

    return on_gpus(resolved, gpus)


def _record_rows(request: EstimateRequest, rows: list[StepRow]) -> list[StepRow]:
    """Record all steps that must be recorded and are not in the cache. Returns the rows that have a
    step then, and prints why others have none. Raises PlannerError where no row has one."""
    cards = recordings.stand_ins(gpu for gpu, *_ in rows)
    needed = {
        (gpu, model, setting): (model, setting, cards[gpu])
        for gpu, model, setting in rows
        if not is_on_shapes(model, setting, request.recorded)
    }
    law = "--fresh is for what is recorded, and this model is estimated on shapes."
    refuse_if(request.fresh and not needed, law, "Omit it, or add --record.")
    if request.fresh:
        recordings.forget(recordings.step_of(*step) for step in needed.values())
    outcomes = record_ledgers(list(needed.values()))
    errors = {row: error for row, error in zip(needed, outcomes, strict=True) if error}
    remaining = [row for row in rows if row not in errors]
    if not remaining:
        raise next(iter(errors.values()))
    from planner.estimation.largest import describe_kind

    text = (f"Without {describe_kind(s)}: {error.message}\n" for (_, _, s), error in errors.items())
    for line in dict.fromkeys(text):
        tell(line) if request.as_json else say(line)
    return remaining


def _print_estimates(
    request: EstimateRequest, rows: list[StepRow], remarks: list[str], length: TrainingLength | None
) -> None:
    """Print the estimates in the order of the rows; for several GPUs the fastest that fits is
    first."""
    is_single, is_ranked = len(rows) == 1, len(request.gpus) > 1
    rows = _record_rows(request, rows)
    cards = recordings.stand_ins(gpu for gpu, *_ in rows)
    if any(gpu != cards[gpu] and not is_on_shapes(m, s, request.recorded) for gpu, m, s in rows):
        text = "Recorded on a card of each capability: others reserve some % more or less."
        remarks = [*remarks, text]
    with shows_seconds():
        ledgers = [step_ledger(*row[1:], request.recorded, cards[row[0]]) for row in rows]
        estimates = [
            estimate_ledger(
                model, setting, ledger, request.target(gpu), allow_retries=not is_ranked
            ).with_cost(length)
            for (gpu, model, setting), ledger in zip(rows, ledgers, strict=True)
        ]
    scaled: Sequence[Scaled] = ()
    if is_ranked:
        estimates.sort(key=rank_key)
    elif "world_size" in request.fields.setting:
        from planner.estimation import scaling

        scaled = scaling.scaled(estimates, request.target(request.only_gpu))

    def data() -> Any:
        rows = [{**({"gpu": e.gpu} if is_ranked else {}), **to_json(e)} for e in estimates]
        if scaled:
            rows = [{**to_json(row.estimate), "scaling": row} for row in scaled]
        return rows[0] if len(rows) == 1 and (is_single or scaled) else rows

    for line in remarks if request.as_json else ():
        tell(f"{line}\n")
    answer(request, data, lambda: _answer_parts(request, estimates, remarks, scaled))


def rank_key(estimate: Estimate) -> tuple[bool, float]:
    """A key that sorts the fastest estimate that fits first."""
    time = estimate.throughput
    return not estimate.fits, -(time.images_per_second if time else 0.0)


def _answer_parts(
    request: EstimateRequest, estimates: Sequence[Estimate], remarks: Sequence[str],
    scaled: Sequence[Scaled] = (), sizes: Sequence[Mapping[str, int]] = (),
) -> Sequence[Part]:  # fmt: skip
    """The answer with one estimate, or with several as rows."""
    from planner.advice.flags import command_of
    from planner.report.estimates import estimate_answer, rows_answer

    def next_command(estimate: Estimate) -> str:
        if estimate.budget_bytes is None:
            return ""
        target = request.target(find_gpu(estimate.gpu) if estimate.gpu else None)
        return command_of("advise", estimate, request.model, request.fields.model, target)

    notes, memory, only = list(remarks), request.memory_bytes, request.only_gpu
    if memory is not None:
        line = f"--memory {request.memory} is {format_bytes(memory)} ({memory:,} bytes)"
        if only is not None and memory > only.memory_bytes:
            line += f", and {only.title} has {format_bytes(only.memory_bytes)}"
        notes.append(f"{line}.")
    typed = request.fields.setting
    has_ddp = any(estimate.setting.parallelism == "ddp" for estimate in estimates)
    if "world_size" in typed and "parallelism" not in typed and has_ddp:
        notes.append("Several GPUs without --parallelism run ddp.")
    shaped = [e.setting for e in estimates if is_on_shapes(e.model, e.setting, request.recorded)]
    if kinds := {setting.parallelism for setting in shaped} - {"none"}:
        kind = " and ".join(sorted(kinds))
        notes.append(f"Memory under {kind} is a closed form; --record asks torch's own code.")
    if len(estimates) == 1 and not sizes:
        return estimate_answer(estimates[0], next_command, notes)
    return rows_answer(estimates, next_command, notes, scaled, sizes)


def _print_largest(
    request: EstimateRequest, rows: list[StepRow], length: TrainingLength | None
) -> None:
    from planner.estimation.largest import Largest, find_largest, largest_notes

    rows = [
        (gpu, model, setting.model_copy(update={"batch_size": 2 * batch_multiple(setting)}))
        for gpu, model, setting in rows
    ]
    results: list[Largest] = []
    for gpu, model, setting in _record_rows(request, rows):
        with shows_seconds():
            results.append(find_largest(model, setting, request.target(gpu), length))
    fitting = [result for large in results if (result := large.sure or large.best)]

    def text() -> Any:
        notes = largest_notes(results)
        if not fitting:
            return "\n".join(notes)
        sizes = [result.sizes for result in results if result.best]
        return _answer_parts(request, fitting, notes, (), sizes)

    answer(request, results, text)


PAGE_FLAGS = ("--targets", "--output", "--force", "--title")


class ReportRequest(Rows):
    """The request of `planner report`."""

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
    typed = {flag: value for flag, value in request.typed.items() if flag not in PAGE_FLAGS}
    check_options(typed, request.targets)
    shown: list[str | PredictedStep] = []
    for target in request.targets:
        shown += [target] if is_run(target) else _predicted_steps(target, request)
    written = write_report(shown, request.output, title=request.title or "", force=request.force)
    say(f"Wrote {written}.")


def _predicted_steps(model: str, request: ReportRequest) -> list[PredictedStep]:
    """The steps that the options mean: one for each GPU and each combination of values. With
    --gpu all, the fastest that fits is first."""
    from search.runs import predicted_step

    is_ranked = (request.gpu or "").casefold() == "all"
    if is_ranked:
        request.refuse("--gpu all", NOT_FOR_RANKING)
    gpu_groups: list[tuple[Gpu, ...]] = [(gpu,) for gpu in request.gpus] or [()]
    rows: list[StepRow] = []
    for gpus in [request.gpus] if is_ranked else gpu_groups:
        new_rows, remarks = read_rows(model, request, gpus, {})
        rows += new_rows
        for line in remarks:
            tell(line)
    requests = [(config, setting, gpu) for gpu, config, setting in rows]
    record_ledgers(requests, recorded=request.recorded)
    steps = [predicted_step(config, setting, request.target(gpu)) for gpu, config, setting in rows]
    steps = [replace(step, model_text=model, fields=request.fields.model) for step in steps]
    return sorted(steps, key=lambda step: rank_key(step.estimate)) if is_ranked else steps


class AdviseRequest(Costed, OnDevice, Printed):
    """The request of `planner advise`."""

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
    setting_fields: dict[str, Any] = dict(request.fields.setting)
    gpu, batch_size = parse_gpu(request.gpu), None
    if setting_fields.get("world_size", "1") != "1":
        check_link(request.link, [read_setting(setting_fields, {})], gpu)
    elif request.link is not None:  # the link between the GPUs that advice adds
        find_fabric(gpu, 1, request.link)
    if size := setting_fields.pop("batch_size", None):
        batch_size = parse(TrainSetting, {"batch_size": size}, "the setting").batch_size
    advice = advising.advise(
        request.model, gpu=gpu, memory_bytes=request.memory, batch_size=batch_size,
        global_batch=request.global_batch, keep=_split_words(request.keep),
        allow=_split_words(request.allow), allocator=request.allocator, link=request.link,
        epochs=request.epochs, images_per_epoch=request.images_per_epoch, recorded=request.recorded,
        **{**request.fields.model, **setting_fields},
    )  # fmt: skip
    answer(request, advice, lambda: advice_answer(advice))
    return 0 if advice.recommended is not None else 1


def _split_words(texts: tuple[str, ...]) -> list[str]:
    return [word for text in texts for word in text.split(",") if word.strip()]
