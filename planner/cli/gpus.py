"""`planner gpus`: the catalogue, or some of it, with the source of each figure on request."""

from __future__ import annotations

from dataclasses import asdict

import click

from planner.cli.command import Command
from planner.cli.output import print_json, print_table, say
from planner.core.units import GIB
from planner.machine.cuda_support import lacking_kernels
from planner.machine.hardware.catalogue import all_gpus, find_gpu, matching_gpus
from planner.machine.hardware.gpu import Gpu

HEADERS = ("name", "memory GiB", "GB/s", "fp32", "tf32", "bf16", "fp16", "architecture")


@click.command(cls=Command, examples=("planner gpus rtx ti", "planner gpus a100 --sources"))
@click.argument("name", nargs=-1)
@click.option("--sources", is_flag=True, help="Say where each figure comes from.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array (bytes, FLOP/s).")
def command(name: tuple[str, ...], sources: bool, as_json: bool) -> None:
    """List the GPUs that --gpu knows: all, or those that NAME means (`planner gpus rtx ti`)."""
    gpus = _chosen(" ".join(name))
    if as_json:
        print_json([asdict(gpu) for gpu in gpus])
        return
    print_table([_row(gpu) for gpu in gpus], HEADERS)
    say(
        "\nRates are dense TFLOP/s, a multiply-add counted as two; memory is what CUDA reports "
        "where a report was found (--sources).\n"
        f"Next: 'planner estimate MODEL --gpu {gpus[0].name}' says whether a model fits."
    )
    if name:
        for said in dict.fromkeys(filter(None, (lacking_kernels(g.capability) for g in gpus))):
            say(f"{said}.")
    if sources:
        for gpu in gpus:
            click.echo(f"\n{gpu.name}")
            for figure, source in gpu.sources.items():
                click.echo(f"  {figure}: {source}")


def _chosen(text: str) -> tuple[Gpu, ...]:
    if not text:
        return all_gpus()
    return matching_gpus(text) or (find_gpu(text),)  # which says what is near


def _row(gpu: Gpu) -> tuple[object, ...]:
    rates = (gpu.fp32_flops, gpu.tf32_flops, gpu.bf16_flops, gpu.fp16_flops)
    return (
        gpu.name,
        round(gpu.memory_bytes / GIB, 2),
        round(gpu.bandwidth / 1e9),
        *(None if rate is None else round(rate / 1e12, 1) for rate in rates),
        gpu.architecture,
    )
