"""Records an exhaustive table of a factory's model on a CPU that others use too.

    python -m tests.benchmarks.record_factory TABLE [--rounds 5]

Every combination of batch and precision of `small_vit`, in rounds, each in another order. What is
timed is the process's own CPU time on one thread, which other processes stretch (they share caches
and cores) but do not add to; the records say so. The probes are the worker's own, each in a fork of
this process.
"""

from __future__ import annotations

import argparse
import os
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from statistics import median

from planner.schema import FactoryModel, MeasurementRecord, TrainSetting
from search.probe.device import describe_device, versions
from search.probe.protocol import AnswerReader, OutcomeMessage, ProbeRequest
from search.probe.worker.report import Report
from search.study.records import append_records

MODEL = FactoryModel(
    factory="tests.benchmarks.small_vit:build", image_size=(64, 64), num_classes=10
)
BATCHES = (4, 8, 16, 24, 32, 48, 64)
PRECISIONS = ("fp32", "bf16")
STEPS = {"warmup_steps": 2, "min_steps": 5, "max_steps": 5, "max_measure_seconds": 300.0}
DEADLINE_SECONDS = 900.0


def probe(setting: TrainSetting) -> MeasurementRecord:
    """One probe of `setting` in a fork of this process, timed by its CPU time."""
    request = ProbeRequest(model=MODEL, setting=setting, probe_id=uuid.uuid4().hex, **STEPS)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    load = os.getloadavg()[0]
    result, theirs = os.pipe()
    if os.fork() == 0:
        _work(request, theirs)
    os.close(theirs)
    reader, outcome = AnswerReader(request.probe_id), None
    while data := os.read(result, 1 << 16):
        for answer in reader.feed(data):
            outcome = answer if isinstance(answer, OutcomeMessage) else outcome
    os.close(result)
    used = os.wait4(-1, 0)[2]
    assert outcome is not None, "the worker ended without an answer"
    found = {
        name: getattr(outcome, name)
        for name in OutcomeMessage.model_fields
        if name not in ("format", "type", "flags")
    }
    seconds = median(outcome.step_seconds) if outcome.step_seconds else None
    return MeasurementRecord(
        model=MODEL,
        setting=setting,
        device=describe_device("cpu"),
        versions=versions(),
        date=date,
        images_per_second=setting.batch_size / seconds if seconds else None,
        probe_seconds=used.ru_utime + used.ru_stime,
        flags=(*outcome.flags, f"CPU time of one thread, at a load average of {load:.0f}"),
        **found,
    )


def _work(request: ProbeRequest, result_fd: int) -> None:
    from search.probe.worker import measure, meter

    meter.CpuMeter.mark = lambda self: time.process_time()  # type: ignore[method-assign]
    report = Report(result_fd, request.probe_id)
    report.say(measure.measure(request, time.monotonic() + DEADLINE_SECONDS, report))
    os._exit(0)


def record(table: Path, rounds: int) -> None:
    import torch

    torch.set_num_threads(1)
    settings = [
        TrainSetting(batch_size=b, precision=p, optimizer="adamw")
        for b in BATCHES
        for p in PRECISIONS
    ]
    for number in range(rounds):
        Random(number).shuffle(settings)
        for setting in settings:
            found = probe(setting)
            append_records(table, [found])
            print(number, setting.precision, setting.batch_size, found.status,
                  found.images_per_second, found.message, flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Records a table of a factory's probes.")
    parser.add_argument("table", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    record(args.table, args.rounds)


if __name__ == "__main__":
    main()
