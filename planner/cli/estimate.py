"""`planner estimate`: will it fit, and how fast is it, before anything is launched."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from planner.cli.arguments import (
    detail_flag,
    given_fields,
    model_and_settings,
    read_gpus_option,
    refuse_empty,
    split_fields,
    with_cost_options,
    with_model_options,
    with_several_options,
)
from planner.cli.command import Command
from planner.cli.exports import check_exports, write_exports
from planner.cli.output import print_json, say
from planner.cli.several import link_of
from planner.core.collector import collect_once
from planner.core.errors import PlannerError, UsageError
from planner.core.files import to_json
from planner.core.schema import Model, ResolvedSetting, SwinConfig, TrainSetting
from planner.core.terminal import shows_seconds
from planner.core.units import format_bytes, parse_bytes
from planner.estimation.estimate import Estimate, default_precision, estimate_ledger, resolve
from planner.estimation.ledgers import is_on_shapes, record_ledgers, step_ledger
from planner.libraries.limits import SDPA_WINDOWS, batch_unit, largest_sdpa_batch
from planner.machine.hardware import Gpu, find_gpu
from planner.machine.hardware.overheads import processors_of
from planner.machine.hardware.precisions import check_precision, lacks
from planner.memory.allocator_config import (
    AllocatorConfig,
    environment_allocator,
    parse_allocator_config,
)
from planner.memory.scratch import on_device
from planner.throughput.cost import read_training
from planner.trace.kept_step import retrace, traced_step

if TYPE_CHECKING:
    from planner.estimation.scaling import Scaled

Rows = list[tuple[Model, ResolvedSetting]]
RowsOnGpus = list[tuple[Gpu, Model, ResolvedSetting]]
# What shows one estimate, by how it is typed.
_OF_ONE_ROW = {
    "--timeline": "timeline", "--chrome-trace": "chrome_trace",
}  # fmt: skip


@click.command(
    cls=Command,
    examples=(
        'planner estimate native:swin_tiny --batch-size 64 --gpu "RTX 3090"',
        "planner estimate timm:swin_base_patch4_window7_224 --max-batch --memory 24GiB",
        'planner estimate native:swin_tiny --gpu "A100 SXM 80GB" --gpus 1,2,4,8',
    ),
)
@click.argument("model")
@with_model_options
@with_several_options
@with_cost_options
@click.option("--gpu", metavar="NAME", help="A GPU of 'planner gpus'; several, or all, are ranked.")
@click.option("--memory", metavar="SIZE", help="Memory to fit into: 24GiB, 24GB.")
@click.option(
    "--allocator",
    metavar="OPTIONS",
    help="expandable_segments:True,…: used in place of PYTORCH_ALLOC_CONF.",
)
@click.option(
    "--max-batch", is_flag=True,
    help="The largest batch that fits, for each precision and checkpointing.",
)  # fmt: skip
@click.option(
    "--trace",
    "traced",
    is_flag=True,
    help="Trace the real module on tensors without data (needs torch once), also for a Swin.",
)
@click.option("--retrace", is_flag=True, help="Trace again instead of reading the kept trace.")
@detail_flag
@click.option("--json", "as_json", is_flag=True, help="One object, or an array for several.")
@click.option("--timeline", is_flag=True, help="Draw the bytes alive over the step.")
@click.option(
    "--chrome-trace", metavar="FILE", help="Write the step for Perfetto (.json, .json.gz)."
)
def command(model: str, **given: Any) -> None:  # fmt: skip
    """Estimate the memory and time of training MODEL, before you launch it.

    MODEL is LIBRARY:NAME (see 'planner models'), a YAML or JSON file, or package.module:factory.
    Several values for an option make one row per combination; --gpus 1,2,4,8 makes a table of what
    many GPUs reach together. A model that is not a Swin of 'planner models' is traced once;
    'planner cache' lists the kept traces.
    """
    collect_once()
    refuse_empty({"model": model, **given})
    gpus = read_gpus_option(given["gpu"])
    ranked = gpus if len(gpus) > 1 else ()
    gpu = None if ranked or not gpus else gpus[0]
    _refuse_together(given, bool(ranked))
    if given["chrome_trace"] and gpu is None:
        raise UsageError("--chrome-trace needs a device to predict for.", "Name one with --gpu.")
    memory = parse_bytes(given["memory"]) if given["memory"] else None
    precision = default_precision(gpu)
    defaults = {"precision": precision}
    if given["max_batch"]:  # per precision and checkpointing, unless they are named
        defaults = {"precision": f"fp32,{precision}", "checkpointing": "none,blocks"}
    chosen, settings = model_and_settings(model, given, defaults)
    for setting in settings:
        check_precision(gpu, setting.precision)
    asked = given["epochs"], given["images_per_epoch"], given["price_per_hour"]
    given["training"] = read_training(*asked, ranked[0] if ranked else gpu)  # whichever the card
    given["link"] = link_of(given["link"], settings, gpu)
    rows: Rows = [resolve(chosen, setting) for setting in settings]
    shown = next((option for option, name in _OF_ONE_ROW.items() if given[name]), None)
    if shown and len(rows) > 1:
        raise UsageError(
            f"{shown} shows one setting, and {len(rows)} were given.",
            "Give one value to each option.",
        )
    allocator = read_allocator_option(given["allocator"])
    given["model"] = model
    if given["max_batch"]:
        _print_largest(rows, gpu, memory, allocator, given)
    elif ranked:
        _print_ranking(on_gpus(rows, ranked), allocator, given)
    else:
        _print_estimates(rows, gpu, memory, allocator, given)


def _refuse_together(given: dict[str, Any], rank: bool) -> None:
    """Raises UsageError for options that have no effect beside others: none is ignored silently."""
    pictures = [(option, given[name]) for option, name in _OF_ONE_ROW.items()]
    sized = given["batch_size"] or "batch_size" in split_fields(given["fields"])[1]
    refused: list[tuple[str, object, str]] = []
    if rank:
        way_out = "name one GPU, or omit it"
        refused += [(o, v, way_out) for o, v in pictures]
        refused += [("--max-batch", given["max_batch"], way_out)]
        refused += [("--memory", given["memory"], "each GPU is judged by its own memory")]
        refused += [(o, given[o.strip("-")], way_out) for o in ("--gpus", "--link")]
        refused += [("--price-per-hour", given["price_per_hour"], "each GPU has its own price")]
    elif given["max_batch"]:
        refused += [(o, v, "draw one batch, with --batch-size") for o, v in pictures]
        refused += [("--batch-size", sized, "it is what --max-batch finds")]
        found = "--max-batch finds the images of a device"
        refused += [("--global-batch", given["global_batch"], found)]
    together = f"--gpu {given['gpu']}" if rank else "--max-batch"
    faults = [f"  {option}: {way_out}" for option, value, way_out in refused if value]
    if faults:
        raise UsageError("\n".join([f"{together} does not go with these options:", *faults]))
    check_exports(given)


def read_allocator_option(options: str | None) -> AllocatorConfig | None:
    """The caching allocator's options as given, else as torch would find them here."""
    if options is None:
        return environment_allocator(os.environ)
    return replace(parse_allocator_config(options), source=f"--allocator {options}")


def _print_estimates(
    rows: Rows,
    gpu: Gpu | None,
    memory: int | None,
    allocator: AllocatorConfig | None,
    given: dict[str, Any],
) -> None:
    is_one = len(rows) == 1
    rows = _traceable(rows, given)
    with shows_seconds():
        ledgers = [step_ledger(*row, given["traced"]) for row in rows]
        found = [
            estimate_ledger(
                model, setting, ledger, gpu, memory, allocator, link=given["link"], retries=True
            ).with_cost(given["training"])
            for (model, setting), ledger in zip(rows, ledgers, strict=True)
        ]
    if given["gpus"]:
        from planner.estimation.scaling import scaled

        beside = scaled(found, gpu, given["traced"])
        shown = [{**to_json(row.estimate), "scaling": row} for row in beside]
    else:
        beside, shown = [], to_json(found)
    if given["as_json"]:
        print_json(shown[0] if len(shown) == 1 and (is_one or beside) else shown)
    else:
        _say(found, memory, allocator, given, scaled=beside)
    if given["timeline"]:
        from planner.report.live import timeline_text

        drawn = timeline_text(on_device(ledgers[0], processors_of(gpu)))
        click.echo(f"\n{drawn}", err=given["as_json"])
    write_exports(given, ledgers[0], found[0], gpu)


def _say(
    found: Sequence[Estimate], memory: int | None, allocator: AllocatorConfig | None,
    given: dict[str, Any], lead: str = "", said: Sequence[str] = (), scaled: Sequence[Scaled] = (),
) -> None:  # fmt: skip
    """The answer of one estimate, or of several."""
    from planner.advice.flags import command_of
    from planner.report.estimates import estimate_answer, rows_answer
    from planner.report.text import parts_text

    fields = given_fields(given, ())[0]

    def then(estimate: Estimate) -> str:
        if estimate.budget_bytes is None:
            return ""
        gpu = find_gpu(estimate.gpu) if estimate.gpu else None
        return command_of(
            "advise", estimate, given["model"], fields, gpu, memory, given["link"], allocator
        )

    said = [*said, *_notes(found, memory, given)]
    if len(found) == 1 and not lead:
        parts = estimate_answer(found[0], then, said)
    else:
        parts = rows_answer(found, then, lead, said, scaled)
    say(parts_text(parts, given["detail"]))


def _notes(found: Sequence[Estimate], memory: int | None, given: dict[str, Any]) -> Iterator[str]:
    if memory is not None:
        said = f"--memory {given['memory']} is {format_bytes(memory)} ({memory:,} bytes)"
        gpu = find_gpu(found[0].gpu) if found[0].gpu else None
        if gpu is not None and memory > gpu.memory_bytes:
            said += f", and {gpu.title} has {format_bytes(gpu.memory_bytes)}"
        yield f"{said}."
    ddp = any(estimate.setting.parallelism == "ddp" for estimate in found)
    if given["gpus"] and not given["parallelism"] and ddp:
        yield "Several GPUs without --parallelism run ddp."


def record_traces(rows: Rows, given: dict[str, Any]) -> list[PlannerError | None]:
    """Traces, all at once, what takes a trace and is not kept; by row the error it ended with."""
    traced = [row for row in rows if not is_on_shapes(*row, given["traced"])]
    if given["retrace"]:
        if not traced:
            raise UsageError(
                "--retrace is for what is traced, and this model is estimated without a trace.",
                "Omit it, or add --trace.",
            )
        for row in traced:
            retrace(*row)
    errors = iter(record_ledgers(traced))
    return [None if is_on_shapes(*row, given["traced"]) else next(errors) for row in rows]


def _traceable(rows: Rows, given: dict[str, Any]) -> Rows:
    """Those that can be traced; why others cannot is said. Raises PlannerError where none can."""
    errors = record_traces(rows, given)
    left: Rows = []
    lines = []
    for row, error in zip(rows, errors, strict=True):
        if error is None:
            left.append(row)
        else:
            lines.append(f"Without {_kind_of_row(row[1])}: {error.message}")
    if not left:
        raise next(error for error in errors if error)
    for line in dict.fromkeys(lines):
        click.echo(f"{line}\n", err=given["as_json"])
    return left


def _print_largest(
    rows: Rows,
    gpu: Gpu | None,
    memory: int | None,
    allocator: AllocatorConfig | None,
    given: dict[str, Any],
) -> None:
    from planner.estimation.largest import largest_batch

    smallest = [
        (model, setting.model_copy(update={"batch_size": 2 * batch_unit(setting)}))
        for model, setting in rows
    ]
    found = []
    for model, setting in _traceable(smallest, given):
        with shows_seconds():
            best, most = (
                largest_batch(
                    model, setting, gpu, memory, allocator=allocator, traced=given["traced"],
                    link=given["link"], retries=retries,
                )
                for retries in (False, True)
            )  # fmt: skip
        most_images = max(_batch_size(best), _batch_size(most))
        best = best.with_cost(given["training"]) if best else None
        found.append((model, setting, best, most_images))
    if given["as_json"]:
        print_json(
            [
                {
                    "precision": setting.precision,
                    "checkpointing": setting.checkpointing,
                    "largest_batch_size": _batch_size(best),
                    "largest_with_retries": most,
                    "estimate": best,
                }
                for _, setting, best, most in found
            ]
        )
        return
    fitting = [best for _, _, best, _ in found if best is not None]
    notes = [
        _nothing_fits(model, setting, given["traced"])
        for model, setting, best, _ in found if best is None
    ]  # fmt: skip
    retried = [
        f"{most}{f' ({_kind_of_row(setting)})' if len(found) > 1 else ''}"
        for _, setting, best, most in found
        if most > _batch_size(best)
    ]
    if retried:
        notes.append(
            f"Larger batches, up to {', '.join(retried)}, run only if torch frees cached memory, "
            "which slows at least the first steps."
        )
    bound = [best for best in fitting if _is_bound_by_sdpa(best)]
    if bound:
        notes.append(
            f"Batch {bound[0].setting.batch_size} is all that sdpa takes, however much memory "
            f"there is: its kernel takes {SDPA_WINDOWS:,} windows. --attention eager takes more."
        )
    if not fitting:
        say("\n".join(notes))
        return
    best = max(fitting, key=lambda one: (images_per_second(one), _batch_size(one)))
    fastest = ", the fastest" if len(fitting) > 1 and best.throughput else ""
    lead = f"The largest batch that fits is {_batch_size(best)} ({_kind_of_row(best.setting)}"
    lead += f"{fastest}){'.' if best.fits_surely else ': to be sure, take a tenth less.'}"
    _say(fitting, memory, allocator, given, lead, notes)


def _batch_size(found: Estimate | None) -> int:
    return found.setting.batch_size if found else 0


def _is_bound_by_sdpa(best: Estimate) -> bool:
    if best.setting.attention != "sdpa" or not isinstance(best.model, SwinConfig):
        return False
    return best.setting.batch_size == largest_sdpa_batch(best.model, best.setting)


def _kind_of_row(setting: TrainSetting) -> str:
    return f"{setting.precision}, checkpointing {setting.checkpointing}"


def _nothing_fits(model: Model, setting: ResolvedSetting, traced: bool) -> str:
    ways = ["a smaller image or model"]
    if setting.checkpointing == "none":
        ways.insert(0, "--checkpointing blocks")
    if setting.precision in ("fp32", "tf32"):
        ways.insert(0, "--precision bf16")
    if setting.optimizer_family != "sgd":
        ways.append("--optimizer sgd")
    error = None if is_on_shapes(model, setting, traced) else traced_step(model, setting).error(1)
    least = f"batch {batch_unit(setting)} fits"
    if error is not None:
        least = "batch 2 fits, and batch 1 does not run,"
    return f"Not even {least} with {_kind_of_row(setting)}. Try {', '.join(ways)}."


def on_gpus(rows: Rows, gpus: Sequence[Gpu]) -> tuple[RowsOnGpus, list[str]]:
    """`rows` on each GPU that has their precision, fp16 where it has no bf16; and which have not, a
    line for each precision."""
    ranked: RowsOnGpus = []
    without: dict[str, list[str]] = {}
    for (model, setting), gpu in itertools.product(rows, gpus):
        if lacks(gpu, setting.precision):
            without.setdefault(setting.precision, []).append(gpu.name)
            if setting.precision != "bf16":
                continue
            setting = setting.model_copy(update={"precision": "fp16"})
        ranked.append((gpu, model, setting))
    said = []
    for precision, names in without.items():
        instead = "fp16 instead" if precision == "bf16" else "left out"
        cards = list(dict.fromkeys(names))
        named = ", ".join(cards) if len(cards) < 9 else f"{len(cards)} cards ('planner gpus')"
        said.append(f"Without {precision}, and so {instead}: {named}.")
    if not ranked:
        raise UsageError(" ".join(said), "Choose another --precision, or another GPU.")
    return ranked, said


def _print_ranking(
    rows: tuple[RowsOnGpus, list[str]], allocator: AllocatorConfig | None, given: dict[str, Any]
) -> None:
    """Each GPU that has the precision, the fastest that fits first."""
    as_json = given["as_json"]
    ranked, without = rows
    left = _traceable(list(dict.fromkeys((m, setting) for _, m, setting in ranked)), given)
    ranked = [row for row in ranked if row[1:] in left]
    found = []
    with shows_seconds():
        for gpu, model, setting in ranked:
            ledger = step_ledger(model, setting, given["traced"])
            one = estimate_ledger(model, setting, ledger, gpu, allocator=allocator)
            found.append((gpu, one.with_cost(given["training"])))
    found.sort(key=lambda pair: (not pair[1].fits, -images_per_second(pair[1])))
    if as_json:
        for said in without:
            click.echo(f"{said}\n", err=True)
        print_json([{"gpu": gpu.name, **to_json(estimate)} for gpu, estimate in found])
        return
    _say([estimate for _, estimate in found], None, allocator, given, said=without)


def images_per_second(estimate: Estimate) -> float:
    return estimate.throughput.images_per_second if estimate.throughput else 0.0
