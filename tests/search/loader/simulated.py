"""Simulated loaders: a machine's physics in place of its DataLoader, by other means than the law's.

Workers are the customers of a closed network of queues (processors, a disk), solved by mean value
analysis; the main process takes their batches out of a buffer as deep as the prefetch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log2
from random import Random

from planner.core.schema.loading import DataSource, LoaderRecord, LoaderSetting, Pipeline
from planner.core.units import GIB, MIB
from planner.machine.host import Host
from search.loader.space import shared_bytes
from search.loop.strategies.strategy import Choice

SOURCE = DataSource(
    kind="folder", location="/data/simulated", num_items=2000, num_classes=10,
    total_bytes=2000 * 110_000, fingerprint="simulated",
)  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """Seconds are of one image. `wait_seconds` pass without a processor or a bandwidth (a network's
    latency), `disk_seconds` are of a disk that serves one at a time."""

    cpus: int
    cpu_seconds: dict[Pipeline, float]
    wait_seconds: float = 0.0
    disk_seconds: float = 0.0
    main_seconds: float = 2e-5
    twins: bool = False  # two processors share a core, and do 1.3 times the work of one
    crowding: float = 0.02  # what every doubling of processes beyond the processors costs
    noise: float = 0.01
    worker_bytes: int = 150 * MIB

    def rate(self, setting: LoaderSetting) -> float:
        """True images/s of a loader in a steady state."""
        cpu = self.cpu_seconds[setting.pipeline]
        if setting.workers == 0:
            return 1 / (cpu + self.wait_seconds + self.disk_seconds + self.main_seconds)
        made = self._made(setting.workers, cpu * 1.05)
        taken = 1 / self.main_seconds
        depth = setting.workers * (setting.prefetch_factor or 1)
        # A finite buffer between two stages of random times loses a little where they are alike.
        near = min(made, taken) / max(made, taken)
        return min(made, taken) * (1 - 0.15 * near**2 / (1 + depth / 2))

    def _made(self, workers: int, cpu: float) -> float:
        """Images/s of the workers by themselves: exact for one server, as is usual for several (the
        queue of a fast server, and the rest of the service as a delay)."""
        power = self._power(workers)
        queued, delay = cpu / power, cpu * (1 - 1 / power) + self.wait_seconds
        lengths = [0.0, 0.0]
        rate = 0.0
        for n in range(1, workers + 1):
            times = [queued * (1 + lengths[0]), self.disk_seconds * (1 + lengths[1])]
            rate = n / (sum(times) + delay)
            lengths = [rate * t for t in times]
        crowd = max(1.0, (workers + 1) / self.cpus)
        return rate * (1 - self.crowding) ** log2(crowd)

    def _power(self, workers: int) -> float:
        """What the processors do at most, in processors' work."""
        if not self.twins or workers <= self.cpus / 2:
            return float(self.cpus)
        return self.cpus * 1.3 / 2

    @property
    def host(self) -> Host:
        return Host(
            num_cpus=self.cpus, usable_cpus=self.cpus, memory_bytes=512 * GIB,
            available_bytes=500 * GIB, shared_memory_bytes=256 * GIB,
            shared_memory_free_bytes=256 * GIB, file_limit=65536,
        )  # fmt: skip


@dataclass
class SimulatedProber:
    """Probes of a machine, with its noise; `asked` are the settings in turn."""

    machine: Machine
    seed: int = 0
    source: DataSource = SOURCE
    asked: list[LoaderSetting] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)

    def __call__(
        self, choice: Choice[LoaderSetting], probe_id: str, deadline_seconds: float
    ) -> LoaderRecord:
        setting = choice.candidate.setting
        self.asked.append(setting)
        return self.record(setting)

    def record(self, setting: LoaderSetting) -> LoaderRecord:
        machine = self.machine
        rate = machine.rate(setting) * self.random.lognormvariate(0.0, machine.noise)
        batch = setting.batch_size / rate
        times = tuple(batch * self.random.lognormvariate(0.0, 0.02) for _ in range(8))
        middle = sorted(times)[4]
        times = tuple(t * batch / middle for t in times)
        cpu = machine.cpu_seconds[setting.pipeline]
        read = machine.disk_seconds + machine.wait_seconds
        return LoaderRecord(
            data=self.source, setting=setting, date="2026-11-22T09:00:00+00:00", status="measured",
            batch_seconds=times, images_per_second=rate, first_batch_seconds=1.0,
            cpu_seconds_per_image=cpu + machine.main_seconds, worker_bytes=machine.worker_bytes,
            main_bytes=400 * MIB, shared_memory_bytes=shared_bytes(setting),
            stage_seconds={
                "read": read + 1e-4, "decode": 0.6 * cpu, "transform": 0.4 * cpu,
                "collate": 1e-4, "copy": 0.0,
            },
            bound="decode", probe_seconds=6.0,
        )  # fmt: skip
