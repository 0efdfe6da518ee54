"""`planner gpus`, `planner models` and `planner cache`: the catalogues, and the kept recordings."""

import time

from planner.cli.options import Printed, argument, option, reads, switch
from planner.cli.show import answer, say
from planner.core.errors import PlannerError, unknown_name
from planner.core.schema.model import SWIN_LIBRARIES
from planner.core.units import format_bytes
from planner.ledger import cache as recordings
from planner.machine.hardware import all_gpus, find_gpu
from planner.machine.hardware.gpu import matching_gpus
from planner.machine.torch_build import lacking_kernels
from planner.report.page.contents import Facts, Folded, Number, Part, Table, Text
from planner.report.text import (
    ANY_MODEL,
    CACHE_HEADERS,
    GPU_HEADERS,
    MODEL_HEADERS,
    UNITS,
    cache_row,
    gpu_row,
    gpus_by_architecture,
    model_row,
    names_answer,
)


class GpusRequest(Printed):
    """The request of `planner gpus`."""

    name: tuple[str, ...] = argument("[NAME]…", "gpus", default=())


@reads(GpusRequest)
def gpus(request: GpusRequest) -> None:
    """List the GPUs that --gpu knows, or the figures of those that NAME means.

    Of several NAMEs it lists each GPU that all of them match, or else each that one of them does.

    Examples:
      planner gpus rtx ti
      planner gpus h200 a100 --detail
    """
    text = " ".join(request.name)  # where nothing matches, find_gpu suggests names
    matches = (gpu for name in request.name for gpu in matching_gpus(name) or [find_gpu(name)])
    matching = matching_gpus(text) or tuple(dict.fromkeys(matches)) if text else all_gpus()
    parts: list[Part] = [gpus_by_architecture(matching)]
    if text or request.detail:
        parts = [Table(GPU_HEADERS, [gpu_row(gpu) for gpu in matching]), Text(UNITS)]
    example = matching[0].name if text else "NAME"
    lines = [f"Next: 'planner estimate MODEL --gpu {example}' says whether a model fits."]
    if text:
        lacking = dict.fromkeys(filter(None, (lacking_kernels(g.capability) for g in matching)))
        lines += [f"{law}." for law in lacking]
    parts.append(Text("\n".join(lines)))
    if text:
        sources = [(Text(gpu.name), Facts(list(gpu.sources.items()))) for gpu in matching]
        parts.append(Folded("sources", [part for of_gpu in sources for part in of_gpu]))
    answer(request, matching, lambda: parts)


class ModelsRequest(Printed):
    """The request of `planner models`."""

    text: str | None = argument("TEXT", "models", default=None)
    library: str | None = option(f"Only this one: {', '.join(SWIN_LIBRARIES)}.", "LIBRARY",
                                 values=SWIN_LIBRARIES)  # fmt: skip


@reads(ModelsRequest)
def models(request: ModelsRequest) -> None:
    """List the Swins that are estimated without torch, or the models whose name contains TEXT.

    Examples:
      planner models swin_tiny
      planner models convnext
      planner models --library timm --json
    """
    from planner.libraries.names import SPECS, search_names

    text, library = request.text or "", request.library
    if library is not None and library not in SWIN_LIBRARIES:
        raise unknown_name("library", library, SWIN_LIBRARIES, "'planner models' lists them.")
    published = {name: SPECS[name].published for name in SWIN_LIBRARIES if library in (None, name)}
    swins = [(f"{n}:{swin}", c) for n, models in published.items() for swin, c in models.items()]
    matches = [(name, config) for name, config in swins if text.casefold() in name.casefold()]
    if not matches:
        others = search_names(text) if library is None else []
        if not others:
            names = [name.partition(":")[2] for name, _ in swins]
            raise unknown_name("model", text, names, "'planner doctor' lists the libraries here.")
        answer(request, [{"model": name} for name in others], lambda: names_answer(text, others))
        return
    rows = [model_row(*swin) for swin in matches]
    table = Table(("image", "classes", "model"), [[*row[:2], row[-1]] for row in rows])
    if not (text or library):
        counts = [[n, Number(len(configs), f"{len(configs)}"), f"{n}:{next(iter(configs))}"]
                  for n, configs in published.items()]  # fmt: skip
        table = Table(("library", "Swins", "for example"), counts)
    parts: list[Part] = [
        Text(f"{ANY_MODEL}\nThese Swins are estimated without torch:"),
        table,
        Text(f"Next: 'planner estimate {matches[0][0]} --gpu NAME' says whether it fits."),
        Folded("all of them and their shapes", [Table(MODEL_HEADERS, rows)]),
    ]
    data = [{"model": name, **config.model_dump(mode="json")} for name, config in matches]
    answer(request, data, lambda: parts)


class CacheRequest(Printed):
    """The request of `planner cache`."""

    clear: bool = switch("Remove everything that is listed.")


@reads(CacheRequest)
def cache(request: CacheRequest) -> None:
    """List what is kept between runs: recordings, from which estimates are answered without torch,
    models that were looked up by name, and what searches expected.

    Examples:
      planner cache
      planner cache --clear
    """
    folder = recordings.folder()
    if request.clear:
        try:
            say(f"Removed {_count_entries(recordings.clear())} from {folder}.")
        except OSError as error:
            law = f"{folder} cannot be cleared: {error.strerror}."
            raise PlannerError(law, "Remove it yourself, or set PLANNER_CACHE_DIR.") from error
        return
    aged = [(entry, max(time.time() - entry.used, 0.0)) for entry in recordings.entries()]
    size = format_bytes(sum(entry.num_bytes for entry, _ in aged))
    summary = f"{_count_entries(len(aged))} in {folder}: {size} of at most "
    summary += f"{format_bytes(recordings.MAX_CACHE_BYTES)}; the least recently used go first."
    table = Table(CACHE_HEADERS, [cache_row(entry, age) for entry, age in aged])
    keys = ("file", "key", "bytes", "unused_seconds")
    rows = [(str(entry.path), entry.key, entry.num_bytes, age) for entry, age in aged]
    parts: list[Part] = [table, Text(summary)]
    answer(request, [dict(zip(keys, row, strict=True)) for row in rows], lambda: parts)


def _count_entries(number: int) -> str:
    return f"{number} {'entry' if number == 1 else 'entries'}"
