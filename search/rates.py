"""What the device at hand achieves, for the prior: as kept, or measured now as the first act.

Measuring runs on the device, so it happens in a process that ends, and that dies with this one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, replace

from planner.environment.rates import load_rates, save_rates
from planner.hardware import recognise_gpu
from planner.schema import DeviceInfo
from planner.throughput import DeviceRates
from search.probe import guard
from search.probe.device import ask_process

# Measuring takes under 20 s; with imports and a context far less than this on the slowest machine.
DEADLINE_SECONDS = 90.0
# A shorter search is better spent on probes: a judgement.
LEAST_BUDGET_SECONDS = 60.0


def device_rates(
    where: str,
    device: DeviceInfo,
    budget_seconds: float | None,
    say: Callable[[str], None] = lambda text: None,
) -> DeviceRates | None:
    """The rates measured on `device` ("cpu", "cuda:N" is `where`), now or before.

    None where the catalogue has a GPU's, where they cannot be measured, or where the budget is too
    short to measure them. `say` hears what is done. They are kept for the next time.
    """
    kept = load_rates(device.name)
    if kept is not None:
        return kept
    if device.kind == "cuda" and recognise_gpu(device.name, device.total_bytes) is not None:
        return None
    if budget_seconds is not None and budget_seconds < LEAST_BUDGET_SECONDS:
        return None
    say(f"Measuring what {device.name} achieves, once (under 20 s).")
    measured = _measure_apart(where, min(DEADLINE_SECONDS, budget_seconds or DEADLINE_SECONDS))
    if measured is None:
        say("It could not be measured: the first probes will have to tell.")
        return None
    measured = replace(measured, name=device.name)
    try:
        save_rates(measured)
    except OSError as error:
        say(f"The rates could not be kept: {error}.")
    return measured


def _measure_apart(where: str, deadline_seconds: float) -> DeviceRates | None:
    found = ask_process(["-m", __name__, where, str(os.getpid())], deadline_seconds)
    return None if found is None else DeviceRates(**found)


def main() -> None:
    """`DEVICE PARENT_PID`: measures, and prints the rates as the last line, one JSON object."""
    guard.set_process_option(guard.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[2]):  # it died before the line above took effect
        sys.exit(1)
    from planner.environment.rates import measure_rates

    print(json.dumps(asdict(measure_rates(sys.argv[1]))))


if __name__ == "__main__":
    main()
