"""The loaders worth probing on a machine: pipelines × workers × prefetch × pinning, less what
cannot be there, with the reason."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from itertools import product

from planner.core.errors import UnsupportedError
from planner.core.schema.loading import DataSource, LoaderSetting, Pipeline
from planner.core.units import MIB, format_bytes
from planner.machine.host import Host
from planner.training.loading.sources import check_pipeline
from search.loop.axes import in_order
from search.loop.space import Candidate, Space, refusal_line, setting_id

# In the order in which a person would try them: of two that are equally fast the first is plainer.
LIBRARIES: dict[Pipeline, str] = {
    "torchvision": "torchvision",
    "torchvision-jpeg": "torchvision",
    "timm": "timm",
    "transformers": "transformers",
}
PREFETCH_FACTORS = (2, 4, 8)
BYTES_PER_CHANNEL = 4  # float32; timm's loader hands over bytes and divides on the device
# At the least, of what a forked worker has for itself beside the pages it shares: the smallest of
# this project's probes had 15 MiB.
LEAST_WORKER_BYTES = 8 * MIB
# What a process holds open by itself (libraries, the terminal, queues' locks), a worker's queues,
# pipes and sentinel, and a batch's two tensors on their way: counted under torch 2.13 on Linux.
OWN_FILES, WORKER_FILES, BATCH_FILES = 64, 8, 2
FREE_MEMORY_SHARE = 0.9  # of what is available: a loader is not the only one to take from it


def pipelines_of(source: DataSource) -> tuple[Pipeline, ...]:
    """The pipelines whose library is installed and that the data allow: a Dataset of one's own does
    what it does."""
    if source.kind == "factory":
        return ("own",)
    return tuple(p for p, lib in LIBRARIES.items() if importlib.util.find_spec(lib) is not None)


def worker_ladder(cpus: float) -> tuple[int, ...]:
    """0, and powers of two and 3·2^k up to twice the processors; four at least."""
    largest = max(4, round(2 * cpus))
    powers = [2**k for k in range(largest.bit_length())]
    return (0, *sorted({n for p in powers for n in (p, 3 * p) if n <= largest}))


def make_loader_space(
    source: DataSource, host: Host, batch_size: int, image_size: tuple[int, int], *,
    has_cuda: bool, pipelines: Sequence[Pipeline] | None = None,
    workers: Sequence[int] | None = None, prefetch_factors: Sequence[int] | None = None,
) -> Space[LoaderSetting]:  # fmt: skip
    """Every loader to consider for batches of one size. Raises UnsupportedError where nothing
    is left, or where a pipeline cannot load such data.

    Memory is pinned only where there is CUDA. Workers persist: probes of a steady state cannot tell
    them from others, and an epoch that starts them anew takes longer by their start.
    """
    chosen = pipelines or pipelines_of(source)
    if not chosen:
        raise UnsupportedError(
            "none of torchvision, timm and transformers is installed, and pictures need one.",
            "Install torchvision, or pass a MODULE:FACTORY of your own.",
        )
    for pipeline in chosen:
        check_pipeline(source, pipeline)
    common = {"batch_size": batch_size, "image_size": image_size}
    pins = (True, False) if has_cuda else (False,)
    found: list[LoaderSetting] = []
    for pipeline, n in product(chosen, sorted(set(workers or worker_ladder(host.cpus)))):
        factors = sorted(set(prefetch_factors or PREFETCH_FACTORS)) if n else [None]
        for factor, pin in product(factors, pins):
            found.append(
                LoaderSetting(
                    pipeline=pipeline,
                    workers=n,
                    prefetch_factor=factor,
                    pin_memory=pin,
                    persistent_workers=n > 0,
                    **common,
                )
            )
    return _possible(found, host)


def _possible(found: Sequence[LoaderSetting], host: Host) -> Space[LoaderSetting]:
    refused: dict[str, list[str]] = {}
    kept = []
    for setting in found:
        law, said = why_impossible(setting, host)
        if law:
            refused.setdefault(law, []).append(said)
        else:
            kept.append(setting)
    if not kept:
        first = next(iter(refused.values()))[0]
        raise UnsupportedError(f"{first}.", "Choose fewer --workers, or a smaller --batch-size.")
    return loader_space(kept, tuple(refusal_line(messages) for messages in refused.values()))


def loader_space(
    settings: Iterable[LoaderSetting], refused: tuple[str, ...] = ()
) -> Space[LoaderSetting]:
    """A space of just these settings, the plainest first within each pipeline."""
    found = list({setting_id(s): s for s in settings}.values())
    order = {pipeline: i for i, pipeline in enumerate(dict.fromkeys(s.pipeline for s in found))}
    found.sort(key=lambda s: (*plainness(s), order[s.pipeline]))
    axes = ("pipeline", "prefetch_factor", "pin_memory", "persistent_workers")
    choices = {axis: in_order(getattr(s, axis) for s in found) for axis in axes}
    return Space(
        candidates=tuple(loader_candidate(s) for s in found),
        rungs=tuple(sorted({s.workers for s in found})),
        choices=choices,
        left_out=refused,
        rung_field="workers",
    )


def batch_bytes(setting: LoaderSetting) -> int:
    """A batch as it crosses from a worker: [B, 3, H, W] and a label of 8 bytes for each image."""
    height, width = setting.image_size
    channel = 1 if setting.pipeline == "timm" else BYTES_PER_CHANNEL
    return setting.batch_size * (3 * height * width * channel + 8)


def loader_candidate(setting: LoaderSetting) -> Candidate[LoaderSetting]:
    return Candidate(setting_id(setting), setting, setting.pipeline)


def plainness(setting: LoaderSetting) -> tuple[int, ...]:
    """Sort key, the plainest first: fewer workers, then less memory. Of two that load alike the one
    with pinned memory is first: only from there does a copy to the device run beside a step."""
    return (setting.workers, setting.prefetch_factor or 0, int(not setting.pin_memory))


def is_plain_loader(setting: LoaderSetting) -> bool:
    """Whether it needs nothing that a machine may lack: one process."""
    return setting.workers == 0


def shared_bytes(setting: LoaderSetting) -> int:
    """What lies in /dev/shm at the fullest: every batch that is prefetched, and the one in use."""
    if setting.workers == 0:
        return 0
    return (setting.workers * (setting.prefetch_factor or 1) + 1) * batch_bytes(setting)


def host_bytes(setting: LoaderSetting) -> int:
    """What the workers of a setting and their batches take of the host's memory."""
    pinned = 2 * batch_bytes(setting) if setting.pin_memory else 0
    return setting.workers * LEAST_WORKER_BYTES + shared_bytes(setting) + pinned


def open_files(setting: LoaderSetting) -> int:
    """What the training process holds open: each tensor in shared memory is a file."""
    batches = setting.workers * (setting.prefetch_factor or 0) * BATCH_FILES
    return OWN_FILES + setting.workers * WORKER_FILES + batches


def why_impossible(setting: LoaderSetting, host: Host) -> tuple[str, str]:
    """The law by which a setting cannot be on this host, and what it says; two empty texts where
    it can be."""
    memory = host.free_bytes
    if memory is not None:
        memory = int(FREE_MEMORY_SHARE * memory)
    laws: tuple[tuple[str, Callable[[LoaderSetting], int], int | None], ...] = (
        ("/dev/shm", shared_bytes, host.shared_memory_free_bytes),
        ("memory", host_bytes, memory),
    )
    for law, need, limit in laws:
        if limit is not None and need(setting) > limit:
            return law, (
                f"{setting.title} needs {format_bytes(need(setting))} of {law}, and "
                f"{format_bytes(limit)} are free"
            )
    if host.file_limit is not None and open_files(setting) > host.file_limit:
        return "files", (
            f"{setting.title} holds about {open_files(setting)} files open, and a process may have "
            f"{host.file_limit}"
        )
    return "", ""
