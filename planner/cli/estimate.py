"""`planner estimate`: will it fit, and how fast is it, before anything is launched."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from planner.cli.arguments import (
    model_and_settings,
    read_gpu_option,
    refuse_empty,
    split_fields,
    with_model_options,
    with_several_options,
    with_time_option,
)
from planner.cli.command import Command
from planner.cli.exports import check_exports, write_exports
from planner.cli.output import print_json
from planner.cli.several import link_of
from planner.errors import PlannerError, UsageError
from planner.estimation import Estimate, default_precision, estimate_ledger, resolve
from planner.hardware import Gpu, all_gpus
from planner.hardware.precisions import check_precision, lacks
from planner.ledger import Ledger
from planner.ledgers import is_on_shapes, record_ledgers, step_ledger
from planner.libraries.limits import SDPA_WINDOWS, batch_unit, largest_sdpa_batch
from planner.memory.allocator_config import (
    AllocatorConfig,
    environment_allocator,
    parse_allocator_config,
)
from planner.schema import Model, ResolvedSetting, SwinConfig, TrainSetting
from planner.traced_step import retrace, traced_step
from planner.units import format_bytes, parse_bytes

Rows = list[tuple[Model, ResolvedSetting]]
# What shows one estimate, by how it is typed.
_OF_ONE_ROW = {
    "--plot": "plot", "--timeline": "timeline", "--time": "times", "--snapshot": "snapshot",
    "--chrome-trace": "chrome_trace",
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
@click.option("--gpu", metavar="NAME", help="A GPU of 'planner gpus', or all: rank the catalogue.")
@click.option("--memory", metavar="SIZE", help="Memory to fit into: 24GiB, 24GB.")
@click.option(
    "--allocator",
    metavar="OPTIONS",
    help="expandable_segments:True,…: in place of this environment's PYTORCH_ALLOC_CONF.",
)
@click.option("--max-batch", is_flag=True, help="The largest batch that fits, per row.")
@click.option(
    "--trace",
    "traced",
    is_flag=True,
    help="Trace the real module on fake tensors (needs torch once), of a Swin too.",
)
@click.option("--retrace", is_flag=True, help="Trace again instead of reading the kept trace.")
@click.option("--json", "as_json", is_flag=True, help="One object, or an array for several.")
@with_time_option
@click.option("--plot", metavar="FILE", help="Draw live bytes over the step (png, svg, pdf).")
@click.option("--timeline", is_flag=True, help="The same in the terminal, coarser.")
@click.option("--snapshot", metavar="FILE", help="Write a snapshot for memory_viz (.pickle).")
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
    gc.disable()  # a process that ends with its answer: the collector would only cost time
    refuse_empty({"model": model, **given})
    rank = given["gpu"] is not None and given["gpu"].casefold() == "all"
    _refuse_together(given, rank)
    gpu = None if rank else read_gpu_option(given["gpu"])
    memory = parse_bytes(given["memory"]) if given["memory"] else None
    precision = default_precision(gpu)
    defaults = {"precision": precision}
    if given["max_batch"]:  # per precision and checkpointing, unless they are named
        defaults = {"precision": f"fp32,{precision}", "checkpointing": "none,blocks"}
    chosen, settings = model_and_settings(model, given, defaults)
    for setting in settings:
        check_precision(gpu, setting.precision)
    given["link"] = link_of(given["link"], settings, gpu)
    rows: Rows = [resolve(chosen, setting) for setting in settings]
    allocator = read_allocator_option(given["allocator"])
    if memory is not None and not given["as_json"]:
        click.echo(f"--memory {given['memory']} is {format_bytes(memory)} ({memory:,} bytes).\n")
    if given["max_batch"]:
        _print_largest(rows, gpu, memory, allocator, given)
    elif rank:
        _print_ranking(rows, allocator, given)
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
    elif given["max_batch"]:
        refused += [(o, v, "draw one batch, with --batch-size") for o, v in pictures]
        refused += [("--batch-size", sized, "it is what --max-batch finds")]
        found = "--max-batch finds the images of a device"
        refused += [("--global-batch", given["global_batch"], found)]
    together = "--gpu all" if rank else "--max-batch"
    faults = [f"  {option}: {way_out}" for option, value, way_out in refused if value]
    if faults:
        raise UsageError("\n".join([f"{together} does not go with these options:", *faults]))
    if given["plot"]:
        from planner.report.timeline import check_plot

        check_plot(given["plot"])
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
    if len(rows) > 1:
        _refuse_several(len(rows), given)
    for option, name in (("--time", "times"), ("--chrome-trace", "chrome_trace")):
        if given[name] and gpu is None:
            raise UsageError(f"{option} needs a device to predict for.", "Name one with --gpu.")
    record_traces(rows, given)
    ledgers = [step_ledger(*row, given["traced"]) for row in rows]
    found = [
        estimate_ledger(model, setting, ledger, gpu, memory, allocator, link=given["link"])
        for (model, setting), ledger in zip(rows, ledgers, strict=True)
    ]
    if given["gpus"]:
        _print_scaled(found, gpu, given)
    elif given["as_json"]:
        _print_objects([estimate.to_json() for estimate in found])
    else:
        click.echo(_table(found))
    _draw(ledgers, found, given)
    write_exports(given, ledgers[0], found[0], gpu, memory, allocator)


def _refuse_several(num_rows: int, given: dict[str, Any]) -> None:
    asked = [option for option, name in _OF_ONE_ROW.items() if given[name]]
    if asked:
        raise UsageError(
            f"{' and '.join(asked)} {'show' if len(asked) > 1 else 'shows'} one setting, and "
            f"{num_rows} were given.",
            "Give one value to each option.",
        )


def _print_scaled(found: Sequence[Estimate], gpu: Gpu | None, given: dict[str, Any]) -> None:
    """Rows of several devices beside one device."""
    from planner.scaling import scaled

    rows = scaled(found, gpu, given["traced"])
    if given["as_json"]:
        _print_objects([{**row.estimate.to_json(), "scaling": row.to_json()} for row in rows])
        return
    if not given["parallelism"] and any(row.estimate.setting.parallelism == "ddp" for row in rows):
        click.echo("Several GPUs without --parallelism run ddp.\n")
    from planner.report.scaling import scaling_table

    click.echo(_table(found) if len(rows) == 1 else scaling_table(rows))


def _print_objects(shown: list[dict[str, Any]]) -> None:
    print_json(shown[0] if len(shown) == 1 else shown)


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


def _table(found: Sequence[Estimate]) -> str:
    from planner.report.tables import breakdown_table, estimate_table

    return breakdown_table(found[0]) if len(found) == 1 else estimate_table(found)


def _draw(ledgers: Sequence[Ledger], found: Sequence[Estimate], given: dict[str, Any]) -> None:
    if given["times"]:
        from planner.report.time import time_tables

        assert found[0].throughput is not None, "a GPU was named"
        click.echo("\n" + time_tables("the step", found[0].throughput), err=given["as_json"])
    if not (given["plot"] or given["timeline"]):
        return
    from planner.report.settings import describe_setting
    from planner.report.timeline import draw_timeline, timeline_text

    if given["timeline"]:
        click.echo("\n" + timeline_text(ledgers[0]), err=given["as_json"])
    if given["plot"]:
        title = f"{found[0].model.title}\n{describe_setting(found[0].setting)}"
        draw_timeline(
            ledgers[0], Path(given["plot"]), title=title, budget_bytes=found[0].budget_bytes
        )
        click.echo(f"\nDrew {given['plot']}.", err=given["as_json"])


def _print_largest(
    rows: Rows,
    gpu: Gpu | None,
    memory: int | None,
    allocator: AllocatorConfig | None,
    given: dict[str, Any],
) -> None:
    from planner.largest import largest_batch

    smallest = [
        (model, setting.model_copy(update={"batch_size": 2 * batch_unit(setting)}))
        for model, setting in rows
    ]
    errors = record_traces(smallest, given)
    if all(errors) or (any(errors) and given["checkpointing"] and given["precision"]):
        raise next(error for error in errors if error)
    found = []
    for (model, setting), error in zip(rows, errors, strict=True):
        if error is not None:  # a row that nobody named
            click.echo(f"Without {_kind_of_row(setting)}: {error.message}\n", err=given["as_json"])
            continue
        best = largest_batch(
            model, setting, gpu, memory, allocator=allocator, traced=given["traced"],
            link=given["link"],
        )  # fmt: skip
        found.append((model, setting, best))
    if given["as_json"]:
        print_json(
            [
                {
                    "precision": setting.precision,
                    "checkpointing": setting.checkpointing,
                    "largest_batch_size": best.setting.batch_size if best else 0,
                    "estimate": best.to_json() if best else None,
                }
                for _, setting, best in found
            ]
        )
        return
    fitting = [best for _, _, best in found if best is not None]
    if fitting:
        from planner.report.tables import estimate_table

        click.echo("The largest batch that fits, by setting:\n")
        click.echo(estimate_table(fitting))
    for model, setting, best in found:
        if best is None:
            click.echo(_nothing_fits(model, setting, given["traced"]))
    bound = [best for best in fitting if _is_bound_by_sdpa(best)]
    if bound:
        click.echo(
            f"\nBatch {bound[0].setting.batch_size} is all that sdpa takes, however much memory "
            f"there is: its kernel takes {SDPA_WINDOWS:,} windows. --attention eager takes more."
        )


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


def on_every_gpu(rows: Rows) -> tuple[list[tuple[Gpu, Model, ResolvedSetting]], list[str]]:
    """`rows` on every GPU of the catalogue that has their precision, fp16 where it has no bf16; and
    which have not, a line for each precision."""
    ranked: list[tuple[Gpu, Model, ResolvedSetting]] = []
    without: dict[str, list[str]] = {}
    for (model, setting), gpu in itertools.product(rows, all_gpus()):
        if lacks(gpu, setting.precision):
            without.setdefault(setting.precision, []).append(gpu.name)
            if setting.precision != "bf16":
                continue
            setting = setting.model_copy(update={"precision": "fp16"})
        ranked.append((gpu, model, setting))
    said = []
    for precision, names in without.items():
        instead = "fp16 instead" if precision == "bf16" else "left out"
        cards = ", ".join(dict.fromkeys(names))
        said.append(f"Without {precision}, and so {instead}: {cards}.")
    return ranked, said


def _print_ranking(rows: Rows, allocator: AllocatorConfig | None, given: dict[str, Any]) -> None:
    """Every GPU of the catalogue that has the precision, the fastest that fits first."""
    as_json = given["as_json"]
    ranked, without = on_every_gpu(rows)
    record_traces(list(dict.fromkeys((model, setting) for _, model, setting in ranked)), given)
    found = []
    for gpu, model, setting in ranked:
        ledger = step_ledger(model, setting, given["traced"])
        found.append((gpu, estimate_ledger(model, setting, ledger, gpu, allocator=allocator)))
    found.sort(key=lambda pair: (not pair[1].fits, -_images(pair[1])))
    for said in without:
        click.echo(f"{said}\n", err=as_json)
    if as_json:
        print_json([{"gpu": gpu.name, **estimate.to_json()} for gpu, estimate in found])
        return
    from planner.cli.output import print_table
    from planner.report.tables import fits_word, unit

    print_table(
        [
            (
                gpu.name,
                estimate.setting.batch_size,
                estimate.setting.precision,
                estimate.setting.checkpointing,
                round(_images(estimate)),
                format_bytes(estimate.device_total_bytes),
                format_bytes(gpu.memory_bytes),
                fits_word(estimate),
            )
            for gpu, estimate in found
        ],
        (
            "gpu", "batch", "precision", "checkpointing", f"{unit(rows[0][0])}/s (predicted)",
            "needs", "has", "fits",
        ),
    )  # fmt: skip


def _images(estimate: Estimate) -> float:
    return estimate.throughput.images_per_second if estimate.throughput else 0.0
