"""Real loaders of Datasets that go wrong: what the record says, and what is left."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from planner.core import failures
from search.loader.verdict import classify_loader
from search.loader.watching import Watch
from tests.search.loader.conftest import Probe

# Deadlines of what hangs: the first is enough to come there where the machine is quiet, the last
# where it is busy.
DEADLINES_SECONDS = (2.5, 8.0, 25.0)


@pytest.mark.parametrize(
    ("data", "workers", "said"),
    [
        ("Hanging", 2, "item 17 had been loading by worker"),
        ("HangingDeaf", 0, "in stages"),  # it holds the interpreter: nothing says more
    ],
)
def test_a_hang_is_named_within_the_deadline(
    probe: Probe, data: str, workers: int, said: str
) -> None:
    for seconds in DEADLINES_SECONDS:
        record = probe(data, deadline_seconds=seconds, workers=workers)
        assert record.status == "timed_out"
        if said in record.message:
            break
    assert said in record.message


@pytest.mark.parametrize("workers", [0, 2])
def test_an_exception_is_told_with_type_text_and_item(probe: Probe, workers: int) -> None:
    record = probe("Raising", workers=workers)
    assert record.status == "crashed"
    assert "16 items in a row cannot be loaded" in record.message
    assert "KeyError: 'no caption for " in record.message
    assert record.faults[0].item.startswith("item ")


def test_an_exception_now_and_then_is_counted_and_the_probe_goes_on(probe: Probe) -> None:
    record = probe("RaisingOnce", min_steps=20, max_measure_seconds=60.0)
    assert record.status == "measured"
    (fault,) = record.faults
    assert (fault.item, fault.message) == ("item 5", "KeyError: 'no caption'")


@pytest.mark.parametrize("workers", [0, 2])
def test_an_item_of_another_shape_is_named(probe: Probe, workers: int) -> None:
    record = probe("OddShape", workers=workers, min_steps=40, max_measure_seconds=60.0)
    assert record.status == "faulty"
    assert record.message == (
        "item 9 is (a tensor [3, 7, 8] float32, int), "
        "others are (a tensor [3, 8, 8] float32, int): they make no batch"
    )


def test_pictures_of_another_size_and_type_are_flagged(probe: Probe) -> None:
    record = probe("Doubles", image_size=(16, 16))
    assert record.status == "measured"
    assert any("the setting says 16 x 16" in flag for flag in record.flags)
    assert any("float64" in flag for flag in record.flags)


def test_items_that_are_no_pictures_are_flagged(probe: Probe) -> None:
    assert any("there are no pictures in it" in flag for flag in probe("Texts").flags)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_process_that_leaks_is_flagged(probe: Probe, workers: int) -> None:
    record = probe("Leaking", min_measure_seconds=1.5, max_measure_seconds=5.0, workers=workers)
    assert record.status == "measured"
    assert any("the memory of a process that loads grows" in flag for flag in record.flags)


def test_a_worker_killed_from_outside_is_a_crash(probe: Probe) -> None:
    record = probe("Dying")
    assert record.status == "crashed"
    assert record.message == "a worker ended: SIGKILL (Killed)"


def test_a_worker_killed_by_the_kernel_is_out_of_memory() -> None:
    """The kernel's count of such kills has risen since the probe began."""
    verdict = classify_loader(RuntimeError("gone"), Watch(1, "p"), {signal.SIGKILL}, -1)
    assert verdict[0] == "out_of_memory"


def test_a_bus_error_is_shared_memory(probe: Probe) -> None:
    record = probe("DyingByBus")
    assert record.status == "out_of_memory"
    assert "/dev/shm" in record.message
    assert "--shm-size" in record.message
    assert "bus error" in record.message


SMALL_SHARED_MEMORY = """
import ctypes, subprocess, sys
CLONE_NEWNS = 0x00020000  # linux/sched.h
mounts = "mount --make-rprivate / && mount -t tmpfs -o size=64k tmpfs /dev/shm"
if ctypes.CDLL(None).unshare(CLONE_NEWNS) or subprocess.run(mounts, shell=True).returncode:
    sys.exit(77)
from planner.training.loading.sources import find_source
from planner.core.schema.loading import LoaderSetting
from search.loader.probing import probe_loader
record = probe_loader(
    find_source("tests.search.loader.faulty_data:Large"),
    LoaderSetting(pipeline="own", workers=2, batch_size=4),
    deadline_seconds=300.0, device="cpu",
)
print(record.status, record.message)
"""


@pytest.mark.release
def test_shared_memory_that_is_full_is_named() -> None:
    """With a /dev/shm of 64 KiB, as of a container that was given too little."""
    ended = subprocess.run(
        [sys.executable, "-c", SMALL_SHARED_MEMORY], capture_output=True, text=True, check=False
    )
    if ended.returncode == 77:
        pytest.skip("only root may mount a file system of its own")
    assert ended.stdout.startswith("out_of_memory /dev/shm (64"), ended.stderr
    assert "No space left on device" in ended.stdout or "bus error" in ended.stdout


def test_processes_left_behind_are_ended(probe: Probe) -> None:
    """The fixture looks whether any is left."""
    assert probe("LeavingProcesses").status == "measured"


@pytest.mark.parametrize("data", ["Stream", "InBatches", "loader"])
@pytest.mark.parametrize("workers", [0, 2])
def test_other_kinds_of_data_are_measured(probe: Probe, data: str, workers: int) -> None:
    record = probe(data, workers=workers)
    assert (record.status, record.faults) == ("measured", ())
    assert record.images_per_second


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("EmptyStream", "yields no items"),
        ("Empty", "without items"),
        ("Negative", "Negative returned fails: ValueError: __len__() should return >= 0"),
        ("no_dataset", "returned int, not a torch.utils.data.Dataset"),
        ("failing", "FileNotFoundError: /data/captions.json"),
        ("Rasing", "Did you mean"),
    ],
)
def test_data_that_are_none_are_told_in_one_line(probe: Probe, data: str, said: str) -> None:
    record = probe(data)
    assert record.status == "crashed"
    assert said in record.message


def test_torchs_texts_are_recognised() -> None:
    full = "unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)"
    assert failures.is_shared_memory_failure(full)
    assert not failures.is_shared_memory_failure("No space left on device")
    assert failures.is_out_of_files("OSError: [Errno 24] Too many open files: '/data/cat/1.jpg'")
