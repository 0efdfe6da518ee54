"""`planner estimate`: the memory and time of a training, before its launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from planner.cli.options import Printed, argument, reads, refuse_if, switch
from planner.cli.rows import RECORDING, Costed, Rows, check_link, read_settings
from planner.cli.show import answer, say, tell
from planner.core.files import to_json
from planner.core.schema import Model, ResolvedSetting
from planner.core.terminal import collect_nothing, shows_seconds
from planner.core.units import format_bytes
from planner.estimation.estimate import Estimate, default_precision, estimate_ledger, resolve
from planner.estimation.ledgers import is_on_shapes, record_ledgers, step_ledger
from planner.libraries.limits import batch_multiple
from planner.machine.hardware import Gpu, find_gpu
from planner.machine.hardware.gpu import check_precision
from planner.recording import recordings
from planner.throughput.result import TrainingLength

if TYPE_CHECKING:
    from planner.estimation.scaling import Scaled
    from planner.report.page.contents import Part

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
def command(request: EstimateRequest) -> None:
    """Predict the memory and time of training MODEL, before you launch it.

    MODEL is LIBRARY:NAME (any model of timm, torchvision or transformers: timm:resnet50), a YAML or
    JSON file, or package.module:factory. Several values for an option make one row per
    combination; --gpus 1,2,4,8 shows what many GPUs reach together. A Swin of 'planner models' is
    predicted at once; any other model's step is recorded once, for seconds, or minutes if compiled.

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
    named, settings = read_settings(model, request.fields, defaults, request.global_batch)
    for setting in settings:
        check_precision(only_gpu, setting.precision)
    check_link(request.link, settings, only_gpu)
    resolved = [resolve(named, setting) for setting in settings]
    if len(gpus) < 2:
        return [(only_gpu, *row) for row in resolved], []
    from planner.estimation.scaling import spread_over_gpus

    return spread_over_gpus(resolved, gpus)


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
    from planner.report.text import describe_setting

    lines = dict[str, None]()  # one for rows that differ in the batch only
    for (_, model, setting), error in errors.items():
        lines[f"Without {describe_setting(setting, model, ['batch_size'])}: {error}\n"] = None
    for line in lines:
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
    estimates: list[Estimate] = []
    with shows_seconds():
        for gpu, model, setting in rows:
            ledger = step_ledger(model, setting, request.recorded, cards[gpu])
            target = request.target(gpu)
            found = estimate_ledger(model, setting, ledger, target, allow_retries=not is_ranked)
            estimates.append(found.with_cost(length))
    scaled: Sequence[Scaled] = ()
    if is_ranked:
        estimates.sort(key=rank_key)
    elif "world_size" in request.fields.setting:
        from planner.estimation import scaling

        scaled = scaling.scaled(estimates, request.target(request.only_gpu))

    def data() -> object:
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

    def text() -> str | Sequence[Part]:
        notes = largest_notes(results)
        if not fitting:
            return "\n".join(notes)
        sizes = [result.sizes for result in results if result.best]
        return _answer_parts(request, fitting, notes, (), sizes)

    answer(request, results, text)
