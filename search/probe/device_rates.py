"""What the device at hand achieves, for the prior: cached, or measured once before the first probe.

Measuring runs on the device, so it happens in a process that ends, and that dies with this one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace

from planner.core.files import cache_directory, unwritable
from planner.core.schema import DeviceInfo
from planner.core.schema.record import noteworthy_bytes
from planner.core.units import format_bytes
from planner.machine import supervisor
from planner.machine.emulated import is_emulated
from planner.machine.hardware import recognise_gpu
from planner.machine.hardware.gpu import DISTURBING_REASONS
from planner.machine.nvml import NvmlDevice
from planner.machine.torch_build import bus_ordered
from planner.throughput import measured as measuring
from planner.throughput.prediction import DeviceRates
from search.probe.device import ask_process, driver_device, memory_in_use

# Measuring takes under 20 s; with imports and a context far less than this on the slowest machine.
DEADLINE_SECONDS = 90.0
# Measured on two cores that 12 processes wanted: in three runs fp32 was 242 to 263 GFLOP/s and bf16
# 884 to 988. With threads that spin bf16 was 140 to 482 (2026-11-21, torch 2.13, AMD EPYC).
WAITING = {"OMP_WAIT_POLICY": "PASSIVE"}
# A shorter search is better spent on probes: a judgement.
LEAST_BUDGET_SECONDS = 60.0
WATCH_SECONDS = 0.5  # between two looks at a device that is measured: seldom enough not to be felt


def device_rates(
    where: str,
    device: DeviceInfo,
    budget_seconds: float | None,
    say: Callable[[str], None] = lambda text: None,
) -> DeviceRates | None:
    """The rates measured on `device` ("cpu", "cuda:N" is `where`), now or before.

    None where the catalogue has a GPU's, where they cannot be measured, or where the budget is too
    short to measure them. `say` hears what is done. They are kept for the next time, but where
    something disturbed them.
    """
    kept = kept_rates(device)
    if kept is not None:
        return kept
    is_known = device.kind == "cuda" and recognise_gpu(device.name, device.total_bytes) is not None
    if is_known or (budget_seconds or LEAST_BUDGET_SECONDS) < LEAST_BUDGET_SECONDS:
        return None
    say(f"Measuring what {device.name} achieves, once (under 20 s).")
    deadline = min(DEADLINE_SECONDS, budget_seconds or DEADLINE_SECONDS)
    return watched_rates(where, _memory_bytes(device), say, deadline, device.name)


def watched_rates(
    where: str, memory_bytes: int | None, say: Callable[[str], None],
    deadline_seconds: float = DEADLINE_SECONDS, name: str = "",
) -> DeviceRates | None:  # fmt: skip
    """The rates of a device, measured now and kept for it (or for `name`), unless something
    disturbed them, which `say` hears; None where there are none, or what cannot be."""
    with watched(where) as disturbances:
        measured = _measure_apart(where, deadline_seconds)
    measured = measured and replace(measured, name=name or measured.name)
    why = measured and measuring.why_impossible(measured, memory_bytes)
    if measured is None or why:
        say(f"Not used, and not kept: {why or 'it could not be measured'}.")
        return None
    try:
        lost = "; ".join(dict.fromkeys(disturbances))
        path = lost or measuring.save_rates(measured, memory_bytes=memory_bytes)
        say(f"Not kept for the next time: {lost}." if lost else f"Kept in {path}")
    except OSError as error:
        say(f"Not kept: {unwritable(cache_directory(), error, 'set PLANNER_CACHE_DIR')}")
    return measured


def kept_rates(device: DeviceInfo, torch_version: str | None = None) -> DeviceRates | None:
    """What was measured on such a device before, under this version of torch (None: the installed
    one). Another one's rates may be many times as high: on a CPU, bf16 is fast only where oneDNN
    has a kernel for it."""
    return measuring.load_rates(device.name, torch_version, _memory_bytes(device))


def _memory_bytes(device: DeviceInfo) -> int | None:
    """What tells cards of one name apart. A CPU's memory is no part of its rates."""
    return device.total_bytes if device.kind == "cuda" else None


@contextmanager
def watched(where: str) -> Iterator[list[str]]:
    """What disturbs a GPU while one process measures on it, in words, there when the context ends:
    others' memory or processes, clocks held back, and that it is emulated. Nothing where nobody
    says.

    On a CPU others take their time from the measuring thread, whose own is what is counted.
    """
    said: list[str] = []
    if where != "cpu" and is_emulated():
        said.append("the device is emulated, and the rates are no card's")
    driver = driver_device(where)
    before = memory_in_use(where) if driver is not None else None
    if driver is None or before is None:
        yield said
        return
    watch = _Watch(driver)
    watch.start()
    try:
        yield said
    finally:
        watch.end()
        if before.used_bytes > noteworthy_bytes(before.total_bytes):
            said.append(f"others hold {format_bytes(before.used_bytes)} of the device")
        elif watch.most_holders > len(before.holders) + 1:
            said.append("other processes came to compute on the device")
        if watch.reasons:
            said.append(f"the device was throttled ({', '.join(sorted(watch.reasons))})")


class _Watch(threading.Thread):
    """Looks at a GPU now and then: how many compute on it, and what holds its clocks back."""

    def __init__(self, device: NvmlDevice) -> None:
        super().__init__(daemon=True)
        self.device = device
        self.ended = threading.Event()
        self.most_holders = 0
        self.reasons: set[str] = set()

    def run(self) -> None:
        while not self.ended.wait(WATCH_SECONDS):
            self.look()

    def look(self) -> None:
        self.most_holders = max(self.most_holders, len(self.device.processes or ()))
        self.reasons |= DISTURBING_REASONS.keys() & set(self.device.throttle_reasons)

    def end(self) -> None:
        self.ended.set()
        self.join()
        self.look()


def _measure_apart(where: str, deadline_seconds: float) -> DeviceRates | None:
    found = ask_process(["-m", __name__, where, str(os.getpid())], deadline_seconds)
    return None if found is None else DeviceRates(**found)


def main() -> None:
    """`DEVICE PARENT_PID`: measures, and prints the rates as the last line, one JSON object."""
    supervisor.set_process_option(supervisor.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[2]):  # it died before the line above took effect
        sys.exit(1)
    os.environ.update({**WAITING, **bus_ordered({}), **os.environ})  # before torch is loaded
    from planner.throughput.bench import measure_rates

    print(json.dumps(asdict(measure_rates(sys.argv[1]))))


if __name__ == "__main__":
    main()
