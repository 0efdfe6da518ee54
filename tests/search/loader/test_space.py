"""Which loaders can be on a machine, and why others cannot."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.core.errors import UnsupportedError
from planner.core.schema.loading import LoaderSetting
from planner.core.units import GIB, MIB
from planner.machine.host import Host
from search.loader.space import (
    make_loader_space,
    open_files,
    shared_bytes,
)
from search.loop.space import Space
from search.loop.study.params import SpaceParams
from tests.search.loader.simulated import SOURCE, Machine

HOST = Machine(8, {"torchvision": 0.01}).host


def space_on(host: Host, has_cuda: bool = False) -> Space[LoaderSetting]:
    return make_loader_space(
        SOURCE, host, 64, (224, 224), has_cuda=has_cuda, pipelines=["torchvision"]
    )


def test_a_quota_counts_and_not_the_processors_seen() -> None:
    held = replace(HOST, usable_cpus=64, quota_cpus=4.0)
    assert max(space_on(held).rungs) == 8


def test_memory_is_pinned_only_where_there_is_cuda() -> None:
    assert {c.setting.pin_memory for c in space_on(HOST).candidates} == {False}
    assert {c.setting.pin_memory for c in space_on(HOST, True).candidates} == {True, False}


def test_what_a_small_shared_memory_cannot_hold_is_left_out_with_the_reason() -> None:
    """A container's default. A batch of 64 is 36.75 MiB: one worker has three of them there."""
    held = replace(HOST, shared_memory_free_bytes=64 * MIB)
    space = space_on(held)
    assert {c.setting.workers for c in space.candidates} == {0}
    (line,) = space.left_out
    assert "110.25 MiB of /dev/shm, and 64.00 MiB are free" in line
    assert line.startswith("24 settings are left out")


def test_what_memory_cannot_hold_is_left_out() -> None:
    held = replace(HOST, available_bytes=GIB)
    assert max(space_on(held).rungs) < max(space_on(HOST).rungs)
    assert "of memory" in space_on(held).left_out[0]
    tighter = replace(HOST, available_bytes=64 * GIB, memory_limit_bytes=GIB)
    assert space_on(tighter).rungs == space_on(held).rungs


def test_what_a_limit_of_files_cannot_hold_is_left_out() -> None:
    held = replace(HOST, file_limit=256)
    space = space_on(held)
    assert all(open_files(c.setting) <= 256 for c in space.candidates)
    assert "a process may have 256" in space.left_out[0]


def test_nothing_that_can_run_is_an_error_with_the_reason() -> None:
    with pytest.raises(UnsupportedError, match="/dev/shm"):
        make_loader_space(
            SOURCE, replace(HOST, shared_memory_free_bytes=MIB), 64, (224, 224),
            has_cuda=False, pipelines=["torchvision"], workers=[2],
        )  # fmt: skip


def test_what_was_asked_for_is_all_there_is() -> None:
    space = make_loader_space(
        SOURCE, HOST, 8, (32, 48), has_cuda=False, pipelines=["timm"], workers=[2, 0],
        prefetch_factors=[3],
    )  # fmt: skip
    assert [(c.setting.workers, c.setting.prefetch_factor) for c in space.candidates] == [
        (0, None),
        (2, 3),
    ]
    assert shared_bytes(space.candidates[1].setting) == (2 * 3 + 1) * 8 * (3 * 32 * 48 + 8)


def test_the_plainest_is_first_and_pinned_memory_before_other() -> None:
    settings = [c.setting for c in space_on(HOST, True).candidates]
    assert [(s.workers, s.prefetch_factor, s.pin_memory) for s in settings[:4]] == [
        (0, None, True), (0, None, False), (1, 2, True), (1, 2, False),
    ]  # fmt: skip


def test_every_loader_is_a_point_of_the_study() -> None:
    space = space_on(HOST, True)
    params = SpaceParams(space)
    assert {params.candidate(params.of(c)) for c in space.candidates} == set(space.candidates)
    assert "workers_rung" in params.distributions
