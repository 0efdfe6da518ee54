"""What a machine gives a training, read from files as a container's and a plain machine's are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from planner.core.units import GIB
from planner.machine.host import read_host

# A machine of 16 GiB, of which 8 are available: what files of the kernel say of control groups, the
# processors that may be used so, and GiB in all and free.
GROUPS: dict[str, tuple[dict[str, str], float | None, tuple[float, float]]] = {
    "no limits": ({"cpu.max": "max 100000", "memory.max": "max"}, None, (16, 8)),
    "version 2, the tightest of the groups": (
        {
            "proc/self/cgroup": "0::/pod/box", "pod/cpu.max": "150000 100000",
            "pod/box/cpu.max": "400000 100000", "pod/box/memory.max": f"{12 * GIB}",
        },
        1.5, (12, 8),
    ),
    "cached files are given back": (
        {
            "memory.max": f"{4 * GIB}", "memory.current": f"{3 * GIB}",
            "memory.stat": f"anon 100\ninactive_file {GIB}",
        },
        None, (4, 2),
    ),
    "use is not told": ({"memory.max": f"{4 * GIB}"}, None, (4, 4)),
    "version 1, over its limit": (
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/box\n3:memory:/box",
            "cpu,cpuacct/box/cpu.cfs_quota_us": "200000",
            "cpu,cpuacct/box/cpu.cfs_period_us": "100000",
            "memory/box/memory.limit_in_bytes": f"{4 * GIB}",
            "memory/box/memory.usage_in_bytes": f"{5 * GIB}",
        },
        2.0, (4, 0),
    ),
    "version 1, no limits": (
        {"cpu/cpu.cfs_quota_us": "-1", "memory/memory.limit_in_bytes": "9223372036854771712"},
        None, (16, 8),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("files", "quota", "room"), GROUPS.values(), ids=GROUPS)
def test_control_groups_limit_processors_and_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str],
    quota: float | None, room: tuple[float, float],
) -> None:  # fmt: skip
    memory = SimpleNamespace(total=16 * GIB, available=8 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    for name, text in files.items():
        path = tmp_path / name if name.startswith("proc") else tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    host = read_host(tmp_path)
    assert host.quota_cpus == quota
    assert (host.memory_bytes, host.available_bytes) == tuple(size * GIB for size in room)
