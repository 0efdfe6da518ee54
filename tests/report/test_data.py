"""What `planner data` says: the table, what bounds, the ways out, and what is in the way."""

from __future__ import annotations

from dataclasses import replace

from planner.core.schema.loading import (
    DataRecommendation,
    ItemFault,
    LoaderBound,
    LoaderRecord,
    LoaderSetting,
    StepRate,
)
from planner.core.schema.setting import TrainSetting
from planner.core.units import GIB, MIB
from planner.machine.host import Host
from planner.report.data import data_text
from search.loader.advice import (
    Advised,
    warnings_of,
    ways_out,
)
from search.probe.evidence import OTHERS_RAN
from tests.search.loader.simulated import SOURCE, Machine, SimulatedProber

HOST = Host(
    num_cpus=8, usable_cpus=8, memory_bytes=64 * GIB, available_bytes=48 * GIB,
    shared_memory_bytes=32 * GIB, shared_memory_free_bytes=32 * GIB, file_limit=65536,
)  # fmt: skip
SETTING = LoaderSetting(workers=8, pin_memory=False)


def record(bound: LoaderBound = "decode", setting: LoaderSetting = SETTING) -> LoaderRecord:
    """800 images/s of 10 ms each: 6 ms decoding, 4 ms transforming."""
    found = SimulatedProber(Machine(8, {"torchvision": 0.01, "timm": 0.01})).record(setting)
    update = {"images_per_second": 800.0, "cpu_seconds_per_image": 0.01, "bound": bound,
              "stage_seconds": {"decode": 0.006, "transform": 0.004}}  # fmt: skip
    return found.model_copy(update=update)


def advised(bound: LoaderBound = "decode", host: Host = HOST) -> Advised:
    return Advised(record(bound), [record(bound)], host, SOURCE, 0.5)


def test_a_machine_that_was_not_quiet_is_told_and_gives_no_advice() -> None:
    flag = f"{OTHERS_RAN} 1.8 of 2 processors busy meanwhile (load average 20)"
    busy = record().model_copy(update={"flags": (flag,)})
    (said,) = warnings_of(HOST, SOURCE, [busy, record()])
    assert said.startswith(f"1 of 2 probes were not alone: {flag}.")
    assert ways_out(replace(advised(), chosen=busy)) == []


def test_memory_is_what_the_control_group_allows() -> None:
    """2,000 decoded pictures are 287 MiB, the files 210 MiB: a group of 256 MiB keeps neither."""
    assert any("Keep the pictures decoded" in way for way in ways_out(advised()))
    held = replace(HOST, memory_limit_bytes=256 * MIB)
    assert not any("Keep the pictures decoded" in way for way in ways_out(advised(host=held)))
    assert any("from memory" in way for way in ways_out(advised("disk")))
    assert any("every epoch reads" in way for way in ways_out(advised("disk", held)))


def test_a_loader_that_brings_enough_needs_no_way_out() -> None:
    step = StepRate(model="m", gpu="g", setting=TrainSetting(), images_per_second=500.0,
                    uncertainty=0.35, bound="step")  # fmt: skip
    assert ways_out(replace(advised(), step=step)) == []
    slow = step.model_copy(update={"bound": "loader", "needed_cpus": 20.0})
    assert any("need about 20 of them" in way for way in ways_out(replace(advised(), step=slow)))


def test_what_is_in_the_way_is_told_with_the_way_out() -> None:
    small = replace(
        HOST, shared_memory_bytes=64 * MIB, quota_cpus=2.0, file_limit=256, governor="powersave",
        container="docker", memory_limit_bytes=100 * MIB,
    )  # fmt: skip
    cold = record().model_copy(update={"cold_share": 0.9})
    said = " ".join(warnings_of(small, SOURCE, [cold]))
    for words in ("--shm-size=8g", "time of 2", "ulimit -n", "powersave", "90% of what",
                  "larger than the memory"):  # fmt: skip
        assert words in said
    assert warnings_of(HOST, SOURCE, [record()]) == []
    assert "remount" in warnings_of(replace(small, container=None), SOURCE, [])[0]


def test_the_answer_has_the_loader_its_rate_and_the_rest() -> None:
    step = StepRate(model="native:swin_tiny", gpu="rtx 3060", setting=TrainSetting(),
                    images_per_second=2000.0, uncertainty=0.35, bound="loader",
                    needed_cpus=20.0)  # fmt: skip
    found = DataRecommendation(
        data=SOURCE, date="2026-11-22", setting=SETTING, evidence=record(), num_probes=5,
        num_candidates=26, stopped_because="it was interrupted", step=step,
        faults=(ItemFault(item="a.jpg", message="truncated", count=3),),
    )  # fmt: skip
    text = data_text(found)
    assert "torchvision, 8 workers × 2" in text
    assert "10 ms" in text
    assert "2000 images/s (1300 to 2700; predicted" in text
    assert "The loader is the limit" in text
    near = step.model_copy(update={"images_per_second": 1000.0})
    assert "either of the two may bound" in data_text(found.model_copy(update={"step": near}))
    assert "a.jpg: truncated (3 times)" in text
    assert "5 probes of 26 loaders; the search ended because it was interrupted." in text


def test_nothing_is_said_to_be_nothing() -> None:
    found = DataRecommendation(
        data=SOURCE, date="2026-11-22", setting=None, evidence=None, num_probes=1,
        stopped_because="it was so", advice="Do this.",
    )  # fmt: skip
    assert data_text(found).startswith(
        "Nothing loads /data/simulated after 1 probe: it was so.\nDo this."
    )
