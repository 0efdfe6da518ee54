"""`planner gpus`: the catalogue, or some of it, with the source of each figure on request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import click

from planner.cli.arguments import detail_flag
from planner.cli.command import Command
from planner.cli.output import print_json, say
from planner.core.units import GIB
from planner.machine.cuda_support import lacking_kernels
from planner.machine.hardware.catalogue import all_gpus, find_gpu, matching_gpus
from planner.machine.hardware.gpu import Gpu
from planner.report.page.contents import Cell, Facts, Folded, Number, Part, Table, Text
from planner.report.text import parts_text

HEADERS = ("name", "GiB", "GB/s", "fp32", "tf32", "bf16", "fp16", "architecture")


@click.command(cls=Command, examples=("planner gpus rtx ti", "planner gpus a100 --detail"))
@click.argument("name", nargs=-1)
@detail_flag
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array (bytes, FLOP/s).")
def command(name: tuple[str, ...], detail: bool, as_json: bool) -> None:
    """List the GPUs that --gpu knows, or the figures of those that NAME means."""
    text = " ".join(name)  # find_gpu says what is near
    gpus = (matching_gpus(text) or (find_gpu(text),)) if text else all_gpus()
    if as_json:
        print_json([asdict(gpu) for gpu in gpus])
        return
    parts: list[Part] = _names(gpus)
    if name or detail:
        parts = [
            Table(HEADERS, [_row(gpu) for gpu in gpus]),
            Text(
                "Rates are dense TFLOP/s, a multiply-add counted as two; memory is what CUDA "
                "reports where a report was found."
            ),
        ]
    one = gpus[0].name if name else "NAME"
    next_ = f"Next: 'planner estimate MODEL --gpu {one}' says whether a model fits."
    lacking = dict.fromkeys(filter(None, (lacking_kernels(g.capability) for g in gpus)))
    parts.append(Text("\n".join([next_, *(f"{said}." for said in lacking if name)])))
    if name:
        sources = [(Text(gpu.name), Facts(list(gpu.sources.items()))) for gpu in gpus]
        parts.append(Folded("sources", [part for of_gpu in sources for part in of_gpu]))
    say(parts_text(parts, detail))


def _names(gpus: Sequence[Gpu]) -> list[Part]:
    """By architecture, the newest first."""
    found: dict[str, list[str]] = {}
    for gpu in (gpu for gpu in reversed(gpus) if gpu.capability):
        found.setdefault(gpu.architecture, []).append(gpu.name)
    found["AMD"] = [gpu.name for gpu in reversed(gpus) if not gpu.capability]
    lines = [f"- {kind}: {', '.join(names[::-1])}" for kind, names in found.items()]
    said = f"{len(gpus)} GPUs. 'planner gpus NAME' has memory and rates, --detail those of all."
    return [Text("\n".join([said, *lines]))]


def _row(gpu: Gpu) -> list[Cell]:
    rates = (gpu.fp32_flops, gpu.tf32_flops, gpu.bf16_flops, gpu.fp16_flops)
    return [
        gpu.name,
        Number(gpu.memory_bytes, f"{gpu.memory_bytes / GIB:.2f}"),
        Number(gpu.bandwidth, f"{gpu.bandwidth / 1e9:.0f}"),
        *(Number(rate, "-" if rate is None else f"{rate / 1e12:.1f}") for rate in rates),
        gpu.architecture,
    ]
