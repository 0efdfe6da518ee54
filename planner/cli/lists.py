"""`planner gpus`, `planner models` and `planner cache`: what is known, and what is kept."""

import time

from planner.cli.options import Printed, argument, option, reads, switch
from planner.cli.show import answer, say
from planner.core.errors import PlannerError, unknown_name
from planner.core.schema.model import LIBRARIES
from planner.core.units import format_bytes
from planner.ledger import cache as kept
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
    """What `planner gpus` was asked."""

    name: tuple[str, ...] = argument("[NAME]…", "gpus", default=())


@reads(GpusRequest)
def gpus(request: GpusRequest) -> None:
    """List the GPUs that --gpu knows, or the figures of those that NAME means.

    Of several NAMEs it lists each GPU that all of them match, or else each that one of them does.

    Examples:
      planner gpus rtx ti
      planner gpus h200 a100 --detail
    """
    text = " ".join(request.name)  # find_gpu says what is near
    of_each = (gpu for name in request.name for gpu in matching_gpus(name) or [find_gpu(name)])
    found = matching_gpus(text) or tuple(dict.fromkeys(of_each)) if text else all_gpus()
    parts: list[Part] = [gpus_by_architecture(found)]
    if text or request.detail:
        parts = [Table(GPU_HEADERS, [gpu_row(gpu) for gpu in found]), Text(UNITS)]
    one = found[0].name if text else "NAME"
    lines = [f"Next: 'planner estimate MODEL --gpu {one}' says whether a model fits."]
    if text:
        lacking = dict.fromkeys(filter(None, (lacking_kernels(g.capability) for g in found)))
        lines += [f"{said}." for said in lacking]
    parts.append(Text("\n".join(lines)))
    if text:
        sources = [(Text(gpu.name), Facts(list(gpu.sources.items()))) for gpu in found]
        parts.append(Folded("sources", [part for of_gpu in sources for part in of_gpu]))
    answer(request, found, lambda: parts)


class ModelsRequest(Printed):
    """What `planner models` was asked."""

    text: str | None = argument("TEXT", "models", default=None)
    library: str | None = option(f"Only this one: {', '.join(LIBRARIES)}.", "LIBRARY",
                                 values=LIBRARIES)  # fmt: skip


@reads(ModelsRequest)
def models(request: ModelsRequest) -> None:
    """List the Swins that are estimated without torch, or the models whose name contains TEXT.

    Examples:
      planner models swin_tiny
      planner models convnext
      planner models --library timm --json
    """
    from planner.libraries.names import SPECS, names_with

    text, library = request.text or "", request.library
    if library is not None and library not in LIBRARIES:
        raise unknown_name("library", library, LIBRARIES, "'planner models LIBRARY:' lists all.")
    listed = {name: SPECS[name].published for name in LIBRARIES if library in (None, name)}
    known = [(f"{name}:{one}", config) for name, of in listed.items() for one, config in of.items()]
    found = [(name, config) for name, config in known if text.casefold() in name.casefold()]
    if not found:
        others = names_with(text) if library is None else []
        if not others:
            names = [name.partition(":")[2] for name, _ in known]
            raise unknown_name("model", text, names, "Is its library installed? 'planner doctor'.")
        answer(request, [{"model": name} for name in others], lambda: names_answer(text, others))
        return
    rows = [model_row(*one) for one in found]
    table = Table(("image", "classes", "model"), [[*row[:2], row[-1]] for row in rows])
    if not (text or library):
        counts = [[n, Number(len(of), f"{len(of)}"), f"{n}:{next(iter(of))}"]
                  for n, of in listed.items()]  # fmt: skip
        table = Table(("library", "Swins", "for example"), counts)
    parts: list[Part] = [
        Text(f"{ANY_MODEL}\nThese Swins are estimated without torch:"),
        table,
        Text(f"Next: 'planner estimate {found[0][0]} --gpu NAME' says whether it fits."),
        Folded("all of them and their shapes", [Table(MODEL_HEADERS, rows)]),
    ]
    data = [{"model": name, **config.model_dump(mode="json")} for name, config in found]
    answer(request, data, lambda: parts)


class CacheRequest(Printed):
    """What `planner cache` was asked."""

    clear: bool = switch("Remove everything that is listed.")


@reads(CacheRequest)
def cache(request: CacheRequest) -> None:
    """List the recordings that are kept, from which estimates are answered without torch.

    Examples:
      planner cache
      planner cache --clear
    """
    where = kept.folder()
    if request.clear:
        try:
            say(f"Removed {_counted(kept.clear())} from {where}.")
        except OSError as error:
            raise PlannerError(f"{where} cannot be cleared: {error.strerror}.") from error
        return
    found = [(entry, max(time.time() - entry.used, 0.0)) for entry in kept.entries()]
    size = format_bytes(sum(entry.num_bytes for entry, _ in found))
    said = f"{_counted(len(found))} in {where}: {size} of at most "
    said += f"{format_bytes(kept.MAX_CACHE_BYTES)}; the least recently used go first."
    table = Table(CACHE_HEADERS, [cache_row(entry, age) for entry, age in found])
    keys = ("file", "key", "bytes", "unused_seconds")
    rows = [(str(entry.path), entry.key, entry.num_bytes, age) for entry, age in found]
    shown: list[Part] = [table, Text(said)]
    answer(request, [dict(zip(keys, row, strict=True)) for row in rows], lambda: shown)


def _counted(number: int) -> str:
    return f"{number} {'entry' if number == 1 else 'entries'}"
