"""Probes of real loaders over real pictures: figures, bounds, what is left alone."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from planner.core.schema.loading import LoaderSetting
from planner.training.loading.sources import find_source
from search.loader.probing import probe_loader, stays_cached
from search.loader.stages import find_bound
from search.loader.usage import read_disk, steady_growth
from search.probe.parent.fork_server import ForkServer
from search.probe.parent.runner import ProbeEvent
from tests.loading.made import BROKEN, UNUSUAL, encoded, folder_of, listing
from tests.search.loader.conftest import AMPLE_SECONDS, QUICK, Probe
from tests.search.loader.faulty_data import Sleeping

MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("pictures") / "data", 24)


@pytest.mark.parametrize("pipeline", ["torchvision", "timm"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_folder_is_measured(probe: Probe, folder: Path, pipeline: str, workers: int) -> None:
    before = listing(folder)
    record = probe(find_source(str(folder)), pipeline=pipeline, workers=workers)
    assert (record.status, record.faults) == ("measured", ())
    assert record.images_per_second == pytest.approx(4 / median(record.batch_seconds))
    assert record.cpu_seconds_per_image
    assert record.main_bytes
    assert (record.worker_bytes is None) == (record.shared_memory_bytes is None) == (workers == 0)
    assert set(record.stage_seconds) == {"read", "decode", "transform", "collate"}
    assert record.bound in {"disk", "decode", "transform", "collate", "main process"}
    assert record.host["usable_cpus"] > 0
    assert {"torch", "pillow"} <= set(record.versions)
    assert listing(folder) == before, "nothing is written into the data"


def test_torchvisions_decoder_runs_or_says_why_not(probe: Probe, folder: Path) -> None:
    record = probe(find_source(str(folder)), pipeline="torchvision-jpeg", workers=0)
    assert record.status in ("measured", "unsupported")
    if record.status == "unsupported":
        assert "'torchvision-jpeg' does not work here" in record.message


def _forget(paths: list[Path]) -> int:
    """Drop files from the page cache, as far as their file system has one; bytes that reading the
    first of them then takes from the disk."""
    for path in paths:
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = read_disk(os.getpid()).disk_bytes
    paths[0].read_bytes()
    return read_disk(os.getpid()).disk_bytes - before


def test_a_cold_page_cache_is_told(probe: Probe, tmp_path: Path) -> None:
    root = folder_of(tmp_path / "data", 300)
    if not _forget(list(root.rglob("*.jpg"))):
        pytest.skip("this file system holds nothing on a disk, or nobody may ask")
    source = find_source(str(root))
    cold = probe(source, warm=False, min_steps=8, max_measure_seconds=60.0)
    assert cold.cold_share
    assert any("the page cache was cold" in flag for flag in cold.flags)
    warm = probe(source, min_steps=8, max_measure_seconds=60.0)
    assert not warm.cold_share, "small data are read ahead by default"


def test_unusual_pictures_load_and_broken_ones_are_counted(probe: Probe, tmp_path: Path) -> None:
    root = folder_of(tmp_path / "data", 80)
    for name, make in UNUSUAL.items():
        (root / "cat" / name).write_bytes(make())
    for name, (make, _) in BROKEN.items():
        (root / "dog" / name).write_bytes(make())
    before = listing(root)
    record = probe(find_source(str(root)), min_steps=30, max_measure_seconds=60.0)
    assert record.status == "measured"
    assert {fault.item for fault in record.faults} == {f"dog/{name}" for name in BROKEN}
    by_item = {fault.item: fault.message for fault in record.faults}
    for name, (_, said) in BROKEN.items():
        assert said in by_item[f"dog/{name}"]
    assert listing(root) == before


@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_but_broken_pictures_is_faulty(
    probe: Probe, tmp_path: Path, workers: int
) -> None:  # fmt: skip
    root = folder_of(tmp_path / "data", 6)
    for path in root.rglob("*.jpg"):
        path.write_bytes(b"")
    record = probe(find_source(str(root)), workers=workers)
    assert record.status == "faulty"
    assert "cannot be loaded" in record.message
    assert "the file is empty" in record.message


def test_shards_are_measured(probe: Probe, tmp_path: Path) -> None:
    pytest.importorskip("webdataset")
    for shard in range(2):
        with tarfile.open(tmp_path / f"train-{shard:03d}.tar", "w") as tar:
            for index in range(12):
                whole = (shard, index) != (1, 3)
                for field, data in (("jpg", encoded() if whole else b""), ("cls", b"7")):
                    info = tarfile.TarInfo(f"{shard}{index:04d}.{field}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    before = listing(tmp_path)
    record = probe(find_source(str(tmp_path)), min_steps=12, max_measure_seconds=60.0)
    assert record.status == "measured"
    (fault,) = {f.message for f in record.faults}
    assert fault == "the file is empty"
    assert {"read", "decode"} <= set(record.stage_seconds)
    assert listing(tmp_path) == before


@pytest.mark.parametrize("kind", ["disk", "parquet"])
def test_a_table_is_measured(probe: Probe, tmp_path: Path, kind: str) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"image": [{"bytes": encoded(), "path": None}] * 12, "label": list(range(12))}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    table = datasets.Dataset.from_dict(rows, features=features)
    root = tmp_path / "table"
    if kind == "disk":
        table.save_to_disk(str(root))
    else:
        root.mkdir()
        table.to_parquet(str(root / "train-00000-of-00001.parquet"))
    before = listing(root)
    record = probe(find_source(str(root)), workers=1)
    assert (record.data.kind, record.status, record.faults) == ("table", "measured", ())
    assert listing(root) == before


def test_the_rate_is_what_the_items_take(probe: Probe) -> None:
    """Items that sleep need no processor: N workers load N times as fast as one."""
    one = probe("Sleeping", workers=1, min_measure_seconds=1.0)
    four = probe("Sleeping", workers=4, min_measure_seconds=1.0)
    # No loader is faster than its items allow: batches that come free were not counted.
    assert one.images_per_second < 1.02 / Sleeping.SECONDS
    assert four.images_per_second < 4.08 / Sleeping.SECONDS
    assert four.images_per_second > 1.5 * one.images_per_second


def test_stages_count_what_waits_and_not_what_others_take(probe: Probe) -> None:
    """A user's own item is timed on the wall: this one sleeps and takes no processor."""
    record = probe("Sleeping", workers=0)
    assert record.stage_seconds["transform"] >= Sleeping.SECONDS
    assert record.cpu_seconds_per_image < Sleeping.SECONDS


def test_pinning_without_a_device_is_said_and_not_done(probe: Probe) -> None:
    record = probe("Good", pin_memory=True)
    assert record.status == "measured"
    assert any("nothing was pinned" in flag for flag in record.flags)


def test_progress_is_told_and_what_it_raises_ends_the_probe(server: ForkServer) -> None:
    """Ctrl-C arrives as what the callback raises; the fixture looks for processes left behind."""
    heard: list[ProbeEvent] = []

    def interrupted(event: ProbeEvent) -> None:
        heard.append(event)
        if event.phase == "measure":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        probe_loader(
            find_source("tests.search.loader.faulty_data:Sleeping"),
            LoaderSetting(pipeline="own", workers=2, batch_size=4),
            deadline_seconds=AMPLE_SECONDS,
            fork_server=server,
            on_progress=interrupted,
            **QUICK,
        )
    phases = [event.phase for event in heard]
    assert phases[:1] == ["start"]
    assert phases[-2:] == ["warm-up", "measure"]


def test_a_pipeline_that_is_not_the_datas_is_unsupported(probe: Probe, folder: Path) -> None:
    assert probe("Good", pipeline="timm").status == "unsupported"
    assert probe(find_source(str(folder)), pipeline="own").status == "unsupported"


def test_small_data_stay_in_the_page_cache(folder: Path) -> None:
    from planner.machine.host import Host

    source = find_source(str(folder))
    assert stays_cached(source, Host(1, 1, available_bytes=1 << 30))
    assert not stays_cached(source, Host(1, 1, available_bytes=1 << 10))
    assert not stays_cached(source, Host(1, 1))


STAGES: dict[Any, float] = {"read": 1e-3, "decode": 5e-3, "transform": 3e-3, "collate": 1e-4}


@pytest.mark.parametrize(
    ("changed", "bound"),
    [
        ({}, "decode"),
        ({"stage_seconds": {**STAGES, "transform": 9e-3}}, "transform"),
        ({"stage_seconds": {**STAGES, "read": 9e-3}}, "disk"),
        ({"worker_cpu_seconds": 2e-3, "cold_share": 0.9}, "disk"),
        ({"worker_cpu_seconds": 2e-3, "cold_share": 0.0}, "decode"),
        ({"main_cpu_seconds": 2.4e-3}, "main process"),
        ({"main_cpu_seconds": 2.4e-3, "stage_seconds": {**STAGES, "copy": 2e-3}}, "copy"),
        ({"workers": 0, "main_cpu_seconds": 9e-3, "image_seconds": 9.1e-3}, "decode"),
        ({"stage_seconds": {}}, None),
    ],
)
def test_what_bounds(changed: dict[str, Any], bound: str | None) -> None:
    """Four workers on four processors: an image each 2.5 ms, 9.1 ms of a worker's."""
    figures: dict[str, Any] = {
        "stage_seconds": STAGES, "workers": 4, "cpus": 4.0, "image_seconds": 2.5e-3,
        "main_cpu_seconds": 2e-4, "worker_cpu_seconds": 9e-3, "cold_share": 0.0,
    } | changed  # fmt: skip
    assert find_bound(figures.pop("stage_seconds"), **figures) == bound


def test_growth_is_steady_or_none() -> None:
    assert steady_growth([100 * MIB] * 12) is None
    assert steady_growth([n * 20 * MIB for n in range(1, 13)]) is not None
    settled = [40 * MIB, 60 * MIB, 80 * MIB, *[90 * MIB] * 9]
    assert steady_growth(settled) is None, "pages copied after the fork"
    assert steady_growth([100 * MIB, 300 * MIB]) is None, "too few readings"


def test_a_fault_is_a_line_that_is_not_torn() -> None:
    """Several processes write to one pipe: what is longer than PIPE_BUF would be mixed."""
    from search.loader.protocol import FaultMessage
    from search.loader.watching import _short
    from search.probe.protocol import encode

    long = _short("\ud800ü€𝄞" * 1000)
    message = encode(FaultMessage(probe_id="p" * 32, item=long, message=long))
    assert len(message) <= 4096
    assert json.loads(message)["type"] == "fault"
