"""One probe of a loader in a process of its own, from its start to its end; always a record.

Imports no torch. Whatever the data, the user's code or the machine do, what was started is ended
within the deadline.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from statistics import median
from typing import Any

from planner.core.schema.loading import DataSource, ItemFault, LoaderRecord, LoaderSetting
from planner.machine.host import Host, read_host
from search.loader import worker
from search.loader.protocol import (
    ANSWERS,
    FaultMessage,
    LoaderOrder,
    LoaderOutcome,
    LoaderRequest,
)
from search.probe.device import choose_device, versions
from search.probe.parent.attendance import Attendance
from search.probe.parent.fork_server import ForkServer
from search.probe.parent.runner import Hearing, ProbeEvent

# What a loader's processes import; the first must be there.
LOADER_MODULES = (
    "search.loader.measure", "search.loader.preload", "PIL.JpegImagePlugin",
    "torchvision.transforms.v2", "timm.data",
)  # fmt: skip
PROCESSOR_MODULE = "transformers.models.vit.image_processing_vit"
PACKAGES = (
    "torch", "torchvision", "timm", "transformers", "pillow", "numpy", "webdataset", "datasets",
)  # fmt: skip
_MOST_FAULTS = 100
# Files that one process may open beyond those that were seen, before it is warned of.
_FILES_SHARE = 0.5
_SHARED_SHARE = 0.5


def loader_server(pipelines: tuple[str, ...] = ()) -> ForkServer:
    """A process with torch and the loaders' libraries imported, from which probes are forked: a
    context manager. transformers takes seconds to import, and is where `pipelines` name it."""
    more = (PROCESSOR_MODULE,) if "transformers" in pipelines else ()
    return ForkServer(modules=(*LOADER_MODULES, *more))


def probe_loader(
    source: DataSource,
    setting: LoaderSetting,
    *,
    deadline_seconds: float,
    warm: bool | None = None,
    device: str = "auto",
    seed: int = 0,
    on_progress: Callable[[ProbeEvent], None] | None = None,
    fork_server: ForkServer | None = None,
    **timing: Any,
) -> LoaderRecord:
    """How fast `setting` loads `source` here: one loader, drained as fast as it gives.

    Returns a record whatever happens, at `deadline_seconds` at the latest (and the seconds that it
    takes to end what was started). `warm` reads the pictures once before, so that they come from
    the page cache; by default where all of them would stay in it, as they do from a training's
    second epoch on. `on_progress` hears of import, open, warm, stages, start, warm-up, measure and
    end; its steps are rounds, and their seconds a batch's. Batches are copied to `device` where
    that is a GPU. `timing` are the fields of `search.probe.protocol.Timing`: how long to measure,
    and when to give up.

    Raises UsageError where there is no such device, and what `on_progress` raises (Ctrl-C too: all
    processes are ended then).
    """
    host = read_host()
    request = LoaderRequest(
        source=source,
        setting=setting,
        device=choose_device(device),
        warm=stays_cached(source, host) if warm is None else warm,
        seed=seed,
        **timing,
    )
    started = time.monotonic()
    counts: Counter[tuple[str, str]] = Counter()

    def heard(answer: FaultMessage | LoaderOutcome) -> None:
        if isinstance(answer, FaultMessage):
            counts[answer.item, answer.message] += 1

    hearing = Hearing(started, on_progress, heard)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    order = LoaderOrder(request=request, deadline_seconds=deadline_seconds)
    outcome = Attendance(
        [order], LoaderOutcome, hearing.hear, deadline_seconds, fork_server, worker.__name__,
        answers=ANSWERS,
    ).run()  # fmt: skip
    hearing.tell("end")
    return _record(request, outcome, counts, host, date, started)


def stays_cached(source: DataSource, host: Host) -> bool:
    """Whether all of the data fit into half of the memory that is available: then every epoch but
    the first finds them in the page cache."""
    return source.total_bytes is not None and source.total_bytes <= (host.free_bytes or 0) // 2


def _record(
    request: LoaderRequest,
    outcome: LoaderOutcome,
    counts: Counter[tuple[str, str]],
    host: Host,
    date: str,
    started: float,
) -> LoaderRecord:
    seconds = median(outcome.batch_seconds) if outcome.batch_seconds else None
    found = outcome.model_dump(exclude={"format", "type", "flags", "phase", "lost_others"})
    flags = (*outcome.flags, *_limits(outcome, host))
    return LoaderRecord(
        **found,
        data=request.source,
        setting=request.setting,
        host=asdict(host),
        versions=versions(PACKAGES),
        date=date,
        images_per_second=request.setting.batch_size / seconds if seconds else None,
        faults=_faults(counts),
        probe_seconds=time.monotonic() - started,
        flags=flags,
    )


def _limits(outcome: LoaderOutcome, host: Host) -> list[str]:
    """What of the machine's limits a training with this loader comes near."""
    told = []
    files, limit = outcome.open_files, host.file_limit
    if files is not None and limit is not None and files > _FILES_SHARE * limit:
        told.append(f"{files} files were open at once, of {limit} allowed (ulimit -n)")
    shared, room = outcome.shared_memory_bytes, host.shared_memory_bytes
    if shared is not None and room is not None and shared > _SHARED_SHARE * room:
        told.append(f"the batches that wait take {shared / room:.0%} of /dev/shm")
    return told


def _faults(counts: Counter[tuple[str, str]]) -> tuple[ItemFault, ...]:
    """The items that could not be loaded, those first that were met most often."""
    return tuple(
        ItemFault(item=item, message=message, count=count)
        for (item, message), count in counts.most_common(_MOST_FAULTS)
    )
