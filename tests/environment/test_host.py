"""What a machine gives a training, read from files as a container's and a plain machine's are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from planner.machine.host import memory_room, read_host


def lay(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "quota", "limit"),
    [
        (
            {"sys/fs/cgroup/cpu.max": "max 100000\n", "sys/fs/cgroup/memory.max": "max\n"},
            None, None,
        ),
        (
            {
                "proc/self/cgroup": "0::/pod/box\n",
                "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
                "sys/fs/cgroup/pod/box/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/pod/box/memory.max": "8589934592\n",
            },
            1.5, 8 << 30,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/box\n3:memory:/box\n",
                "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "1073741824\n",
            },
            2.0, 1 << 30,
        ),
        (
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            None, None,
        ),
    ],
    ids=["no limits", "version 2, the tightest of the groups", "version 1", "version 1, no limits"],
)  # fmt: skip
def test_control_groups(
    tmp_path: Path, files: dict[str, str], quota: float | None, limit: int | None
) -> None:
    host = read_host(lay(tmp_path, files))
    assert (host.quota_cpus, host.memory_limit_bytes) == (quota, limit)


@pytest.mark.parametrize(
    ("files", "room"),
    [
        ({}, (16 << 20, 8 << 20)),
        (
            {
                "sys/fs/cgroup/memory.max": "4194304\n",
                "sys/fs/cgroup/memory.current": "3145728\n",
                "sys/fs/cgroup/memory.stat": "anon 100\ninactive_file 1048576\n",
            },
            (4 << 20, 2 << 20),
        ),
        (
            {
                "proc/self/cgroup": "3:memory:/box\n",
                "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "4194304\n",
                "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "5242880\n",
            },
            (4 << 20, 0),
        ),
        ({"sys/fs/cgroup/memory.max": "4194304\n"}, (16 << 20, 8 << 20)),
    ],
    ids=["no limits", "cached files are given back", "version 1, over its limit", "use not told"],
)
def test_room_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], room: tuple[int, int]
) -> None:
    memory = SimpleNamespace(total=16 << 20, available=8 << 20)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert memory_room(lay(tmp_path, files)) == room
