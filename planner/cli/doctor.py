"""`planner doctor`: is this environment set up to be fast? With `--rates`, how fast it is."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from planner.cli.output import print_json, print_table
from planner.environment.doctor import Checkup, check_environment
from planner.environment.torch_build import why_not_usable
from planner.errors import PlannerError
from planner.hardware.detect import read_device
from planner.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from planner.throughput.prediction import DeviceRates


@click.command()
@click.option("--rates", is_flag=True, help="Measure what the device achieves (under 20 s).")
@click.option("--device", default="auto", help="auto, cuda, cuda:1 or cpu: what --rates measures.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(rates: bool, device: str, as_json: bool) -> int:
    """Show what is installed, which devices are available, and what slows them down.

    Exits with status 1 if something must be fixed first.
    """
    read_device(device)  # a typing error is reported before anything is examined
    checkup = check_environment()
    measured = _measure(_device(device, checkup), checkup) if rates else None
    if as_json:
        print_json(_as_json(checkup, measured))
    else:
        _print_checkup(checkup)
        if measured:
            _print_rates(measured)
    return 0 if checkup.is_healthy else 1


def _device(name: str, checkup: Checkup) -> str:
    device = read_device(name)
    if device == "auto":
        why = why_not_usable(checkup.torch)
        if why is not None and checkup.gpus:
            click.echo(f"Measuring the CPU: {why}.", err=True)
        return "cuda:0" if why is None else "cpu"
    why = why_not_usable(checkup.torch, int(device[5:])) if device != "cpu" else None
    if why is not None:
        raise PlannerError(f"{device!r} cannot be used: {why}.", "Pass auto or cpu.")
    return device


def _measure(device: str, checkup: Checkup) -> DeviceRates:
    """The rates of `device`, numbered by its bus as everywhere here; kept, unless others or
    throttling disturbed them."""
    from planner.environment.rates import measure_rates, measuring_environment, save_rates
    from search.surrogate.device_rates import watched

    kind, _, index = device.partition(":")
    memory_bytes = checkup.torch.gpus[int(index or 0)].total_bytes if kind == "cuda" else None
    click.echo(f"Measuring {device} …", err=True)
    with (
        watched(device if kind == "cpu" else f"cuda:{index or 0}") as disturbances,
        measuring_environment(),
    ):
        measured = measure_rates(device)
    if disturbances:
        click.echo(f"Not kept: {'; '.join(disturbances)}.", err=True)
        return measured
    try:
        click.echo(f"Kept in {save_rates(measured, memory_bytes=memory_bytes)}", err=True)
    except OSError as error:
        click.echo(f"Not kept: {error}", err=True)
    return measured


def _print_checkup(checkup: Checkup) -> None:
    torch = checkup.torch
    build = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}" if torch.hip else "CPU only"
    click.echo(f"Python {checkup.python} on {checkup.system}")
    click.echo(f"torch {torch.version or 'not importable'} ({build})")
    others = [f"{name} {v}" for name, v in checkup.versions.items() if name != "torch"]
    click.echo(f"with it: {', '.join(others) or 'nothing'}")
    allocator = [f"{name}={value}" for name, value in checkup.variables.items()]
    click.echo(
        f"variables: {', '.join(allocator) or 'none set, so the allocator is at its defaults'}"
    )
    if checkup.gpus:
        rows = [
            (
                f"cuda:{position}", gpu.name, _size(gpu.total_bytes), _size(gpu.used_bytes),
                ".".join(map(str, gpu.capability)) if gpu.capability else None, gpu.driver,
            )
            for position, gpu in enumerate(checkup.gpus)
        ]  # fmt: skip
        print_table(rows, ("device", "name", "memory", "in use", "capability", "driver"))
    for finding in checkup.findings:
        click.echo(f"{finding.level}: {finding.message}. {finding.way_out}".rstrip())
    if checkup.is_healthy:
        click.echo("No problems found.")


def _print_rates(rates: DeviceRates) -> None:
    click.echo(f"\nRates, {rates.basis}:")
    rows = [
        (f"matmul {dtype}", f"{r / 1e12:.3g} TFLOP/s") for dtype, r in rates.matmul_flops.items()
    ]
    rows.append(("copy", f"{rates.bandwidth / 1e9:.3g} GB/s"))
    rows += [
        (f"{kind}, of the {'matmul' if kind in ('conv', 'attention') else 'copy'}", f"{share:.0%}")
        for kind, share in rates.kind_share.items()
        if kind != "matmul"
    ]
    rows += [
        (f"host, one {phase} operation", format_seconds(seconds))
        for phase, seconds in rates.host_seconds.items()
    ]
    print_table(rows, ("what", "rate"))


def _as_json(checkup: Checkup, rates: DeviceRates | None) -> dict[str, Any]:
    return {**asdict(checkup), "healthy": checkup.is_healthy, "rates": rates and asdict(rates)}


def _size(count: int | None) -> str | None:
    return None if count is None else format_bytes(count)
