"""Which loaders can be on a machine, and why others cannot."""

from __future__ import annotations

from dataclasses import replace

from planner.core.schema.loading import LoaderSetting
from planner.core.units import MIB
from planner.machine.host import Host
from search.loader.space import (
    make_loader_space,
)
from search.loop.space import Space
from tests.search.loader.simulated import SOURCE, Machine

HOST = Machine(8, {"torchvision": 0.01}).host


def space_on(host: Host, has_cuda: bool = False) -> Space[LoaderSetting]:
    return make_loader_space(
        SOURCE, host, 64, (224, 224), has_cuda=has_cuda, pipelines=["torchvision"]
    )


def test_what_a_small_shared_memory_cannot_hold_is_left_out_with_the_reason() -> None:
    """A container's default. A batch of 64 is 36.75 MiB: one worker has three of them there."""
    held = replace(HOST, shared_memory_free_bytes=64 * MIB)
    space = space_on(held)
    assert {c.setting.workers for c in space.candidates} == {0}
    (line,) = space.left_out
    assert "110.25 MiB of /dev/shm, and 64.00 MiB are free" in line
    assert line.startswith("24 settings are left out")
