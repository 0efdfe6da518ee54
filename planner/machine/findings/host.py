"""The host: processors, their quota and governor, memory, files."""

from __future__ import annotations

from collections.abc import Iterator

from planner.core.units import format_bytes
from planner.machine.facts import Facts
from planner.machine.findings.finding import UNKNOWN_COST, Finding
from planner.machine.host import Host

# These drivers change the frequency by themselves under the governor "powersave" (Linux,
# admin-guide/pm/intel_pstate.rst and amd-pstate.rst, active mode).
_SELF_GOVERNING = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")
_FEW_FILES = 1024


def judge_host(facts: Facts) -> Iterator[Finding]:
    yield from judge_limits(facts.host, facts.machine.scaling_driver, facts.torch.num_threads)


def judge_limits(host: Host, scaling_driver: str, threads: int = 0) -> Iterator[Finding]:
    """What a host holds back; `threads` are those that torch starts."""
    yield from _quota(host, threads)
    yield from _memory(host)
    yield from _governor(host, scaling_driver)
    yield from _files(host)


def _quota(host: Host, threads: int) -> Iterator[Finding]:
    if host.quota_cpus is None or host.quota_cpus >= host.usable_cpus:
        return
    crowd = f"; torch starts {threads} threads" if threads > host.quota_cpus else ""
    fair = max(1, int(host.quota_cpus))
    yield Finding(
        "warning", "host", "host.quota",
        f"this process may use the time of {host.quota_cpus:g} processors, and sees "
        f"{host.usable_cpus}",
        f"cpu.max of its control group; os.sched_getaffinity{crowd}",
        "what starts a thread for each processor is stopped for most of every period; how much is "
        "unknown",
        f"OMP_NUM_THREADS={fair}, and at most {fair} workers; or a larger quota (docker run "
        "--cpus, resources.limits.cpu).",
    )  # fmt: skip


def _memory(host: Host) -> Iterator[Finding]:
    limit, total = host.memory_limit_bytes, host.memory_bytes
    if limit and total and limit < total:
        yield Finding(
            "note", "host", "host.memory-limit",
            f"this process may use {format_bytes(limit)} of the host's {format_bytes(total)}",
            "memory.max of its control group; /proc/meminfo",
            "beyond it the kernel ends a process, as a rule without a message",
            "Count all workers into it.",
        )  # fmt: skip


def _governor(host: Host, driver: str) -> Iterator[Finding]:
    if host.governor == "powersave" and driver not in _SELF_GOVERNING:
        yield Finding(
            "warning", "host", "host.governor",
            "the processors are held at their lowest frequency by the governor powersave",
            f"/sys/devices/system/cpu/cpu0/cpufreq: powersave, driver {driver or 'unknown'}",
            f"slower launches and slower decoding of pictures; how much is {UNKNOWN_COST}",
            "sudo cpupower frequency-set -g performance.",
        )  # fmt: skip


def _files(host: Host) -> Iterator[Finding]:
    limit = host.file_limit
    if limit is not None and limit < _FEW_FILES:
        yield Finding(
            "warning", "host", "host.files",
            f"a process may hold only {limit} files open",
            "RLIMIT_NOFILE",
            "many workers end with 'too many open files': each tensor that they hand over is a "
            "file (PyTorch, multiprocessing: sharing strategies)",
            "ulimit -n 65536.",
        )  # fmt: skip
