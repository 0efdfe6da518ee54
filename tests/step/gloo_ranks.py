"""Two processes that train a small Swin under torch's own DistributedDataParallel, over gloo.

    python -m tests.step.gloo_ranks FOLDER RANK

Reads FOLDER/modes.json (name -> changes to `BASE`) and writes, for the first rank, what each mode
allocates and frees, with DDP and without it, to FOLDER/events.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from planner import SwinConfig, TrainSetting
from planner.ledger.ledger import Allocated, Event, Freed, Marked
from planner.step.reducer import steps_until_steady

WORLD_SIZE = 2
# 0.6 million parameters: two buckets by torch's limits.
MODEL = SwinConfig(
    image_size=(56, 56), depths=(1, 1), num_heads=(2, 4), embed_dim=96, num_classes=10,
    drop_path_rate=0.0,
)  # fmt: skip
BASE = TrainSetting(
    batch_size=2, precision="fp32", attention="eager", optimizer="sgd-forloop", parallelism="ddp",
    world_size=WORLD_SIZE,
)  # fmt: skip
LEAST_BYTES = 64  # below lie the scalars that torch keeps on the host, which here is the device
Row = tuple[Any, ...]


def without_ddp(setting: TrainSetting) -> TrainSetting:
    fields = TrainSetting.model_fields
    plain = {f: info.default for f, info in fields.items() if f.startswith("ddp_")}
    return setting.model_copy(update={"parallelism": "none", **plain})


def rows_of(events: list[Event] | tuple[Event, ...]) -> list[Row]:
    """What is allocated and freed after the build, frees between two allocations sorted."""
    sizes: dict[int, int] = {}
    rows: list[Row] = []
    freed: list[int] = []
    for event in events:
        if isinstance(event, Freed):
            freed += [sizes[event.storage]] if event.storage in sizes else []
            continue
        if not isinstance(event, Allocated | Marked):
            continue
        rows += [("-", num_bytes) for num_bytes in sorted(freed)]
        freed.clear()
        if isinstance(event, Marked):
            rows.append(("end", event.phase, event.step))
        else:
            sizes[event.storage] = event.num_bytes
            rows.append(("+", event.num_bytes))
    built = rows.index(("end", "build", 0)) + 1
    return [row for row in rows[built:] if row[0] == "end" or row[1] >= LEAST_BYTES]


def run_ranks(folder: Path, modes: Mapping[str, Mapping[str, Any]], seconds: float) -> Any:
    """(name, "ddp" or "none") -> rows of the first rank. Both processes end within `seconds`."""
    (folder / "modes.json").write_text(json.dumps(modes))
    command = [sys.executable, "-m", __spec__.name, str(folder)]
    logs = [(folder / f"rank{rank}.log").open("w") for rank in range(WORLD_SIZE)]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=log, stderr=subprocess.STDOUT)
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [rank.wait(timeout=seconds) for rank in ranks]
    finally:
        for rank, log in zip(ranks, logs, strict=True):
            rank.kill()
            rank.wait()
            log.close()
    said = "\n".join((folder / f"rank{r}.log").read_text()[-2000:] for r in range(WORLD_SIZE))
    assert codes == [0] * WORLD_SIZE, said
    return json.loads((folder / "events.json").read_text())


def measure(setting: TrainSetting, num_steps: int) -> list[Row]:
    from tests.building import build_real
    from tests.cpu_memory import measure_cpu_memory_events

    build = partial(build_real, MODEL, setting)
    return rows_of(measure_cpu_memory_events(build, MODEL, setting, num_steps).events)


def work(folder: Path, rank: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), WORLD_SIZE)
    limit = timedelta(seconds=300)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=limit)
    found, plain = {}, {}
    for name, changes in json.loads((folder / "modes.json").read_text()).items():
        setting = BASE.model_copy(update=changes)
        num_steps = steps_until_steady(setting)
        alone = without_ddp(setting)
        key = (alone.model_dump_json(), num_steps)
        if key not in plain:
            plain[key] = measure(alone, num_steps)
        found[name] = {"ddp": measure(setting, num_steps), "none": plain[key]}
    if rank == 0:
        (folder / "events.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    work(Path(sys.argv[1]), int(sys.argv[2]))
