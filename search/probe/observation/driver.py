"""What the driver answers about a process, and how soon it takes memory back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import torch

from planner.units import MIB
from search.probe.device import memory_in_use, worker_environment
from search.probe.nvml import NvmlDevice
from search.probe.observation.order import Order, Teller
from search.probe.observation.view import CudaView, NotHereError, View, driver_used

# What a driver keeps of a process for a while; what is left over by more has not been given back.
_SETTLED_BYTES = 64 * MIB
_POLL_SECONDS = 0.02
# On the CPU, where others' memory moves as well, the holder takes so much.
_CPU_HOLD_BYTES = 512 * MIB
_HOLDER = "search.probe.observation.holder"


def see_driver(order: Order, view: View, tell: Teller) -> None:
    """Whose pid the driver gives us, what it says we use, and whose total it is."""
    if not isinstance(view, CudaView):
        tell.see(own_pid=os.getpid(), **view.memory())
        raise NotHereError("the CPU has no driver to ask for processes")
    tell.see(**before_context(view.nvml))
    view.start()
    held = torch.zeros(256 * MIB, dtype=torch.uint8, device=view.device)
    view.synchronize()
    tell.see(**view.memory(), held_bytes=held.numel())
    properties = torch.cuda.get_device_properties(view.device)
    tell.see(
        total_by_torch_bytes=properties.total_memory,
        torch_name=properties.name,
        arch_list=torch.cuda.get_arch_list(),
    )
    if view.nvml is None:
        tell.miss("processes", "NVML does not answer")
        return
    tell.see(**driver_answers(view.nvml, os.getpid()))


def before_context(nvml: NvmlDevice | None) -> dict[str, Any]:
    """How busy the device was before this process touched it."""
    if nvml is None:
        return {"nvml": False}
    used = driver_used(nvml)
    processes = nvml.processes
    found: dict[str, Any] = {"nvml": True}
    if used is not None:
        found["used_before_bytes"] = used
    if processes is not None:
        found["processes_before"] = len(processes)
    return found


def driver_answers(nvml: NvmlDevice, own_pid: int) -> dict[str, Any]:
    """What NVML says of this process, which holds memory: `own_pid_answer` is ours, another's (a
    container's pid is not the host's), none, or nothing where it does not list processes."""
    found: dict[str, Any] = {"name": nvml.name, "uuid": nvml.uuid or ""}
    memory = nvml.memory
    if memory is not None:
        found["total_by_driver_bytes"] = memory.total
    mode = nvml.is_split
    found["mig"] = "no answer" if mode is None else "on" if mode else "off"
    processes = nvml.processes
    if processes is None:
        return found | {"own_pid_answer": "nothing"}
    own = [p for p in processes if p.pid == own_pid]
    found["processes"] = [
        {"pid": p.pid, "used_bytes": "not available" if p.used_bytes is None else p.used_bytes}
        for p in processes
    ]
    found["own_pid_answer"] = "ours" if own else "another's" if processes else "none"
    if own:
        used = own[0].used_bytes
        found["own_used"] = "not available" if used is None else "zero" if used == 0 else "told"
    return found


def see_memory_return(order: Order, view: View, tell: Teller) -> None:
    """How long `used` takes to fall after a process that held most of the device was killed.

    This process makes no context: it only watches.
    """
    before = memory_in_use(order.device)
    if before is None:
        raise NotHereError("nobody tells how much memory of the device is in use")
    share = order.observation.share
    hold = int(before.free_bytes * share) if view.is_cuda else _CPU_HOLD_BYTES
    holder = subprocess.Popen(
        [sys.executable, "-P", "-m", _HOLDER, order.device, str(hold)],
        env=worker_environment(), stdout=subprocess.PIPE,
    )  # fmt: skip
    assert holder.stdout is not None
    line = holder.stdout.readline().split()
    if line[:1] != [b"held"]:
        raise RuntimeError(f"the process that was to hold {hold} bytes ended: {holder.wait()}")
    full = memory_in_use(order.device)
    assert full is not None
    tell.see(
        held_bytes=int(line[1]),
        used_before_bytes=before.used_bytes,
        used_full_bytes=full.used_bytes,
    )
    killed = time.monotonic()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    tell.see(seconds_until_gone=time.monotonic() - killed)
    limit = killed + (order.observation.seconds or (20.0,))[0]
    half, half_seen = (before.used_bytes + full.used_bytes) / 2, False
    while time.monotonic() < limit:
        now = memory_in_use(order.device)
        if now is not None and not half_seen and now.used_bytes < half:
            half_seen = True
            tell.see(seconds_until_half=time.monotonic() - killed)
        if now is not None and now.used_bytes <= before.used_bytes + _SETTLED_BYTES:
            tell.see(seconds_until_returned=time.monotonic() - killed)
            return
        time.sleep(_POLL_SECONDS)
    tell.miss("seconds_until_returned", "it had not fallen when the time for looking was over")
