"""A command on an emulated GPU.

`python -m planner.machine.emulated --gpu rtx-3090 -- python train.py`
"""

from __future__ import annotations

import subprocess
import sys

import click

from planner.core.errors import PlannerError
from planner.core.units import parse_bytes
from planner.machine.emulated.machine import EmulatedMachine, emulated_gpu
from planner.machine.emulated.starting import holding, started


@click.command()
@click.option("--gpu", required=True, help="A GPU of the catalogue: planner gpus lists them.")
@click.option("--gpus", "count", default=1, metavar="N", help="How many of it there are (1).")
@click.option("--memory", help="Its memory, where it is another: 8GiB.")
@click.option("--sms", "num_sms", type=int, help="Its multiprocessors, where they are others.")
@click.option("--context", help="What each process's CUDA context takes of it.")
@click.option("--slice", "is_slice", is_flag=True, help="Make it a MIG instance.")
@click.option("--held", help="What another process holds of the first GPU, meanwhile.")
@click.option("--no-nvml", is_flag=True, help="Leave the management library out.")
@click.option("--hide-processes", is_flag=True, help="NVML knows no processes, as in a container.")
@click.option("--waits", is_flag=True, help="Take as long as the catalogue's rates say.")
@click.option("--log", default="", help="A file for the names of functions that are not emulated.")
@click.argument("command", nargs=-1, required=True)
def main(
    gpu: str,
    count: int,
    memory: str | None,
    num_sms: int | None,
    context: str | None,
    is_slice: bool,
    held: str | None,
    no_nvml: bool,
    hide_processes: bool,
    waits: bool,
    log: str,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND on an emulated GPU: torch's own CUDA code, whose kernels compute nothing. What it
    allocates is what torch would; times are the catalogue's rates, and nothing that was measured.
    """
    changes: dict[str, object] = {"is_slice": is_slice}
    if memory:
        changes["memory_bytes"] = parse_bytes(memory)
    if num_sms:
        changes["num_sms"] = num_sms
    if context:
        changes["context_bytes"] = parse_bytes(context)
    one = emulated_gpu(gpu, **changes)
    machine = EmulatedMachine(
        (one,) * count,
        has_nvml=not no_nvml,
        hides_processes=hide_processes,
        waits=waits,
        log=log,
    )
    raise SystemExit(_run(machine, command, parse_bytes(held) if held else 0))


def _run(machine: EmulatedMachine, command: tuple[str, ...], held_bytes: int) -> int:
    with started(machine) as environment:
        if not held_bytes:
            return subprocess.run(command, env=environment, check=False).returncode
        with holding(environment, held_bytes):
            return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    try:
        main(prog_name="python -m planner.machine.emulated")
    except PlannerError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(error.exit_status)
