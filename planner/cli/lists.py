"""`planner gpus`, `planner models` and `planner cache`: what is known, and what is kept."""

from __future__ import annotations

import time

from planner.cli.options import Printed, argument, option, reads, switch
from planner.cli.show import answer, say
from planner.core.errors import PlannerError, unknown_name
from planner.core.schema import SwinConfig, TrainSetting
from planner.core.schema.model import LIBRARIES
from planner.core.units import GIB, format_bytes, format_seconds
from planner.ledger import cache as kept
from planner.ledger.key import ANY_BATCH
from planner.machine.cuda_support import lacking_kernels
from planner.machine.hardware import Gpu, all_gpus, find_gpu
from planner.machine.hardware.catalogue import matching_gpus
from planner.report.page.contents import Cell, Facts, Folded, Number, Part, Table, Text

OF_GPUS = ("name", "GiB", "GB/s", "fp32", "tf32", "bf16", "fp16", "architecture")
OF_MODELS = ("image", "classes", "version", "window", "channels", "depths", "model")
OF_CACHE = ("model", "kept", "setting", "size", "last used")
ANY = (
    "MODEL is any model of timm, torchvision or transformers (timm:resnet50), or a function of "
    "yours (file:name)."
)
RATES = "Rates are dense TFLOP/s (a multiply-add is two); memory is what CUDA reports, if known."


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
    parts: list[Part] = [_by_architecture(found)]
    if text or request.detail:
        parts = [Table(OF_GPUS, [_gpu_row(gpu) for gpu in found]), Text(RATES)]
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


def _by_architecture(gpus: tuple[Gpu, ...]) -> Text:
    """Their names, the newest first."""
    found: dict[str, list[str]] = {}
    for gpu in gpus[::-1]:
        found.setdefault(gpu.architecture if gpu.capability else "AMD", []).append(gpu.name)
    found |= {"AMD": found.pop("AMD", [])}  # the last
    lines = [f"- {kind}: {', '.join(names[::-1])}" for kind, names in found.items()]
    said = f"{len(gpus)} GPUs. 'planner gpus NAME' has memory and rates, --detail those of all."
    return Text("\n".join([said, *lines]))


def _gpu_row(gpu: Gpu) -> list[Cell]:
    rates = (gpu.fp32_flops, gpu.tf32_flops, gpu.bf16_flops, gpu.fp16_flops)
    shown = [Number(rate, "-" if rate is None else f"{rate / 1e12:.1f}") for rate in rates]
    memory = Number(gpu.memory_bytes, f"{gpu.memory_bytes / GIB:.2f}")
    bandwidth = Number(gpu.bandwidth, f"{gpu.bandwidth / 1e9:.0f}")
    return [gpu.name, memory, bandwidth, *shown, gpu.architecture]


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
    from planner.libraries.named import names_with
    from planner.libraries.registry import SPECS

    text, library = request.text or "", request.library
    if library is not None and library not in LIBRARIES:
        raise unknown_name("library", library, LIBRARIES, f"Libraries: {', '.join(LIBRARIES)}.")
    listed = {name: SPECS[name].published for name in LIBRARIES if library in (None, name)}
    known = [(f"{name}:{one}", config) for name, of in listed.items() for one, config in of.items()]
    found = [(name, config) for name, config in known if text.casefold() in name.casefold()]
    if not found:
        others = names_with(text) if library is None else []
        if not others:
            names = [name.partition(":")[2] for name, _ in known]
            raise unknown_name("model", text, names, "Is its library installed? 'planner doctor'.")
        answer(request, [{"model": name} for name in others], lambda: _others(text, others))
        return
    rows = [_model_row(*one) for one in found]
    table = Table(("image", "classes", "model"), [[*row[:2], row[-1]] for row in rows])
    if not (text or library):
        counts = [[n, Number(len(of), f"{len(of)}"), f"{n}:{next(iter(of))}"]
                  for n, of in listed.items()]  # fmt: skip
        table = Table(("library", "Swins", "for example"), counts)
    parts: list[Part] = [
        Text(f"{ANY}\nThese Swins are estimated without torch:"),
        table,
        Text(f"Next: 'planner estimate {found[0][0]} --gpu NAME' says whether it fits."),
        Folded("all of them and their shapes", [Table(OF_MODELS, rows)]),
    ]
    data = [{"model": name, **config.model_dump(mode="json")} for name, config in found]
    answer(request, data, lambda: parts)


def _others(text: str, names: list[str]) -> list[Part]:
    """Models that are no Swins, so that torch traces them, by their names."""
    title = f"{len(names)} models have {text!r} in their names. Torch traces each once: seconds."
    return [
        Text(title),
        Table(("model",), [[name] for name in names], first=14),
        Text(f"Next: 'planner estimate {names[0]} --gpu NAME' says whether it fits."),
    ]


def _model_row(name: str, config: SwinConfig) -> list[Cell]:
    (height, width), window = config.image_size, config.window_size
    windows = str(window) if isinstance(window, int) else ",".join(map(str, window))
    classes, channels = (Number(n, str(n)) for n in (config.num_classes, config.embed_dim))
    depths = ",".join(map(str, config.depths))
    return [f"{height}x{width}", classes, f"v{config.version}", windows, channels, depths, name]


class CacheRequest(Printed):
    """What `planner cache` was asked."""

    clear: bool = switch("Remove everything that is listed.")


@reads(CacheRequest)
def cache(request: CacheRequest) -> None:
    """List the traces that are kept, from which estimates are answered without torch.

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
    table = Table(OF_CACHE, [_cache_row(entry, age) for entry, age in found])
    keys = ("file", "key", "bytes", "unused_seconds")
    rows = [(str(entry.path), entry.key, entry.num_bytes, age) for entry, age in found]
    shown: list[Part] = [table, Text(said)]
    answer(request, [dict(zip(keys, row, strict=True)) for row in rows], lambda: shown)


def _counted(number: int) -> str:
    return f"{number} {'entry' if number == 1 else 'entries'}"


def _cache_row(entry: kept.Entry, age: float) -> list[Cell]:
    from planner.report.settings import describe_setting

    key, what, setting = entry.key, "the model's description", ""
    if "name" not in key:
        batch = key["batch"]
        what = "a step at any batch above 1" if batch == ANY_BATCH else f"a step at batch {batch}"
    if "setting" in key:
        setting = describe_setting(TrainSetting(**key["setting"])).partition(", ")[2]
    size, ago = format_bytes(entry.num_bytes), f"{format_seconds(age)} ago"
    return [key["title"], what, setting, Number(entry.num_bytes, size), Number(age, ago)]
