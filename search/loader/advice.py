"""What bounds a loader, what would make it faster, and what of the machine is in the way.

Every gain is predicted from the stages' measured seconds, and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.core.schema.loading import (
    DataSource,
    ItemFault,
    LoaderBound,
    LoaderRecord,
    Pipeline,
    StepRate,
)
from planner.core.units import format_bytes, format_seconds
from planner.machine.findings.container import judge_shared_memory
from planner.machine.findings.host import judge_limits
from planner.machine.host import ROOT, Host
from planner.machine.reading.files import read_scaling_driver
from search.loader.pictures import SMALLER_PX
from search.loader.space import batch_bytes
from search.probe.evidence import others_ran

CPU_BOUNDS: tuple[LoaderBound, ...] = ("decode", "transform", "collate")
_WORTH_SAYING = 0.02  # of the time: a stage below it is no way out
MAX_FAULTS = 100


@dataclass(frozen=True)
class Advised:
    """What advice is given from: the chosen probe, all that ran (fastest first), the machine."""

    chosen: LoaderRecord
    ran: Sequence[LoaderRecord]
    host: Host
    source: DataSource
    smaller_share: float | None = None  # of the pixels, in pictures of SMALLER_PX
    step: StepRate | None = None
    unsupported: frozenset[Pipeline] = frozenset()  # what was probed and cannot run here

    @property
    def rate(self) -> float:
        return self.chosen.images_per_second or 0.0

    @property
    def num_loading(self) -> int:
        """Processes that load: the workers, or without them the one process."""
        return max(self.chosen.setting.workers, 1)

    @property
    def loading(self) -> str:
        return "1 process" if self.num_loading == 1 else f"{self.num_loading} processes"

    @property
    def cpu_seconds(self) -> float:
        """Of a processor, for one image."""
        return self.chosen.cpu_seconds_per_image or sum(self.chosen.stage_seconds.values())

    def rate_at(self, cpu_seconds: float) -> float:
        """Images/s if an image cost so much instead, and processors went on being what bounds."""
        return self.rate * self.cpu_seconds / cpu_seconds if cpu_seconds else self.rate


def bound_line(found: Advised) -> str:
    """What bounds the chosen loader, with the figures that say so."""
    bound, cpu = found.chosen.bound, found.cpu_seconds
    if bound is None:
        return ""
    busy = found.rate * cpu / found.host.cpus
    stages = ", ".join(
        f"{stage} {format_seconds(seconds)}"
        for stage, seconds in found.chosen.stage_seconds.items()
        if seconds
    )
    what = {"main process": "the main process, which takes every batch", "disk": "the disk"}
    few = bound in CPU_BOUNDS and found.num_loading < found.host.cpus
    where = f" in {found.loading}" if few else ""
    return (
        f"It is bound by {what.get(bound, bound)}{where}: one image takes {format_seconds(cpu)} of "
        f"a processor ({stages}), and {found.host.cpus:g} processors were busy for "
        f"{min(busy, 1):.0%} of the time."
    )


def ways_out(found: Advised) -> list[str]:
    """What would load faster, for what bounds the chosen loader; nothing where the step does, and
    nothing from a measurement that others disturbed."""
    if others_ran(found.chosen.flags):
        return []
    if found.step is not None and found.step.bound == "step":
        return []
    bound = found.chosen.bound
    if bound in CPU_BOUNDS:
        ways = [_smaller_pictures, _other_pipeline, _more_workers, _more_processors, _cache]
    elif bound == "disk":
        ways = [_shards, _memory, _smaller_pictures]
    elif bound == "main process":
        ways = [_bytes_not_floats, _pinning]
    elif bound == "copy":
        ways = [_pinning, _bytes_not_floats]
    else:
        ways = []
    return [said for way in ways if (said := way(found))]


def _smaller_pictures(found: Advised) -> str:
    """Decoding goes by the pixels of the file, and so does reading; what comes after does not."""
    share, stages = found.smaller_share, found.chosen.stage_seconds
    decode, whole = stages.get("decode", 0.0), sum(stages.values())
    if share is None or share > 1 - _WORTH_SAYING or not decode:
        return ""
    # Stages are timed in one process; of all processes' time decoding is taken to have that share.
    saved = found.cpu_seconds * decode / whole * (1 - share)
    if saved < _WORTH_SAYING * found.cpu_seconds:
        return ""
    text = (
        f"Resize the pictures once to {SMALLER_PX} px on their short side, which leaves "
        f"{share:.0%} of their pixels"
    )
    if found.chosen.bound == "disk":
        return f"{text}: less is read."
    faster = found.rate_at(found.cpu_seconds - saved)
    return f"{text}: about {faster:.4g} images/s instead of {found.rate:.4g} (predicted)."


def _other_pipeline(found: Advised) -> str:
    """What was measured of the others, else what else there is."""
    best: dict[str, LoaderRecord] = {}
    for record in found.ran:
        best.setdefault(record.setting.pipeline, record)
    best.pop(found.chosen.setting.pipeline, None)
    if best:
        said = ", ".join(f"{p} {r.images_per_second or 0:.4g}" for p, r in best.items())
        return f"No other way to decode that was measured is faster here (images/s: {said})."
    if found.chosen.setting.pipeline == "own":
        return "A faster decoder in your Dataset: see what torchvision.io.decode_jpeg takes."
    if "torchvision-jpeg" in (*found.unsupported, found.chosen.setting.pipeline):
        return ""
    return "A faster decoder: '--pipelines torchvision-jpeg' probes torchvision's own."


def _more_workers(found: Advised) -> str:
    """What comes before more processors: a worker for each that is here."""
    if not _lacks_workers(found):
        return ""
    each = found.rate / found.num_loading
    return (
        f"More workers: {found.loading} loaded on {found.host.cpus:g} processors, and each worker "
        f"brings about {each:.4g} images/s (predicted). No probe with more workers succeeded: "
        "allow more with --workers, --budget or --trials."
    )


def _lacks_workers(found: Advised) -> bool:
    """Whether processors are left for more workers, and none with more of them was measured."""
    own = found.chosen.setting
    return found.num_loading < found.host.cpus and not any(
        r.setting.pipeline == own.pipeline and r.setting.workers > own.workers for r in found.ran
    )


def _more_processors(found: Advised) -> str:
    cpu = found.cpu_seconds
    if _lacks_workers(found) or not cpu:
        return ""
    if found.step is None:
        return f"More processors: each brings about {1 / cpu:.4g} images/s (predicted)."
    needed = found.step.needed_cpus or 0.0
    return (
        f"More processors: {found.step.images_per_second:.4g} images/s need about {needed:.3g} of "
        f"them, and {found.host.cpus:g} are here."
    )


def _cache(found: Advised) -> str:
    """Decoded pictures kept as bytes, where they fit into half of the memory that is free."""
    items, available = found.source.num_items, found.host.free_bytes
    height, width = found.chosen.setting.image_size
    if items is None or available is None:
        return ""
    need = items * 3 * height * width
    if need > available // 2:
        return ""
    return (
        f"Keep the pictures decoded: {items:,} of {height}×{width} px are {format_bytes(need)} as "
        f"bytes, and {format_bytes(available)} of memory are free (crops are then of these pixels)."
    )


def _shards(found: Advised) -> str:
    if found.source.kind == "shards":
        return "More shards on more disks, or a copy of them on a local one."
    return (
        "Pack the files into tar shards (WebDataset) or a table of datasets: these are read one "
        "after another, where a folder is read here and there."
    )


def _memory(found: Advised) -> str:
    total, memory = found.source.total_bytes, found.host.usable_bytes
    if total is None or memory is None:
        return ""
    if total < memory // 2:
        return (
            f"The data are {format_bytes(total)}: from the second epoch on they come from memory. "
            "Read them once before ('cat' them to /dev/null), or copy them to /dev/shm."
        )
    return (
        f"The data are {format_bytes(total)}, and this machine has {format_bytes(memory)} of "
        "memory: every epoch reads from the disk. A faster disk, or smaller pictures."
    )


def _bytes_not_floats(found: Advised) -> str:
    if found.chosen.setting.pipeline == "timm":
        return "One process takes all batches: use one training process for each device."
    floats = batch_bytes(found.chosen.setting)
    return (
        f"Hand over bytes and divide on the device, as timm's loader does: a batch is "
        f"{format_bytes(floats)} as float32 and a quarter of that as bytes."
    )


def _pinning(found: Advised) -> str:
    if found.chosen.setting.pin_memory:
        return ""
    return "Pin the memory (pin_memory=True): copies to the device then run beside the step."


def warnings_of(host: Host, source: DataSource, records: Sequence[LoaderRecord]) -> list[str]:
    """What of the machine or the data is in the way, with the way out."""
    in_container = host.container is not None
    findings = [
        *judge_shared_memory(host, in_container),
        *judge_limits(host, read_scaling_driver(ROOT)),
    ]
    of_machine = [
        f"{found.message[0].upper()}{found.message[1:]}. {found.next_step}"
        for found in findings
        if found.level != "note"
    ]
    said = (_others(records), *of_machine, _cold(records), _beyond_memory(host, source))
    return [line for line in said if line]


def _others(records: Sequence[LoaderRecord]) -> str:
    """Whether the probes had the machine to themselves; of those that had not, the last."""
    measured = [r for r in records if r.status == "measured"]
    said = [flag for r in measured if (flag := others_ran(r.flags))]
    if not said:
        return ""
    return (
        f"{len(said)} of {len(measured)} probes were not alone: {said[-1]}. Rates are too low, and "
        "how many workers pay cannot be told from them: measure again when the machine is idle, "
        "with another --output."
    )


def _cold(records: Sequence[LoaderRecord]) -> str:
    """The first epoch against later ones, where a probe read what the page cache did not hold."""
    cold = [r for r in records if (r.cold_share or 0.0) > 0.2 and r.images_per_second]
    if not cold:
        return ""
    first = cold[0]
    return (
        f"{first.cold_share or 0.0:.0%} of what {first.setting.title} read came from the disk, not "
        f"from the page cache ({first.images_per_second or 0:.4g} images/s): a first epoch is that "
        "cold, and later ones are warm only where the data fit into memory."
    )


def _beyond_memory(host: Host, source: DataSource) -> str:
    total, memory = source.total_bytes, host.usable_bytes
    if total is None or memory is None or total < memory:
        return ""
    return (
        f"The data ({format_bytes(total)}) are larger than the memory ({format_bytes(memory)}): no "
        "epoch finds all of them in the page cache."
    )


def all_faults(source: DataSource, records: Sequence[LoaderRecord]) -> tuple[ItemFault, ...]:
    """The items that could not be loaded, of the data and of all probes; those met most first."""
    found: dict[tuple[str, str], ItemFault] = {}
    for fault in (*source.faults, *(f for r in records for f in r.faults)):
        key = (fault.item, fault.message)
        before = found[key].count if key in found else 0
        found[key] = fault.model_copy(update={"count": fault.count + before})
    return tuple(sorted(found.values(), key=lambda f: (-f.count, f.item))[:MAX_FAULTS])
