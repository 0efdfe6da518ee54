"""A setting in words, the same in every table and sentence."""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import cache

from planner.core.schema import Model, SwinConfig, TrainSetting
from planner.core.schema.setting import OWN_OPTIMIZER
from planner.core.units import GIB, format_bytes, format_seconds
from planner.ledger.cache import Entry
from planner.machine.hardware import Gpu
from planner.report.page.contents import Cell, Number, Part, Table, Text

ALWAYS_SAID = ("batch_size", "precision", "optimizer", "checkpointing")
_NAMED_BY_VALUE = ("precision", "optimizer", "loss")
_NAMES = {"batch_size": "batch", "clip_grad": "gradient clipping"}


def describe_setting(
    setting: TrainSetting, model: Model | None = None, without: Container[str] = ()
) -> str:
    """`batch 64, bf16, adamw, checkpointing none, accumulate 4`: what is always worth saying, then
    what differs from the default and the recipe of `model`; where no model is at hand, from that of
    a Swin and of others. Fields in `without` are said elsewhere."""
    for of_swin in (True, False) if model is None else (isinstance(model, SwinConfig),):
        setting = setting.without_recipe(of_swin)
    other = setting.differences(_default())
    always = {field: getattr(setting, field) for field in ALWAYS_SAID}
    return in_words({f: v for f, v in {**always, **other}.items() if f not in without})


@cache
def _default() -> TrainSetting:
    return TrainSetting()


def describe_changes(setting: TrainSetting, against: TrainSetting) -> str:
    """What makes a setting another than `against`: `batch 32, compile default`."""
    return in_words(setting.differences(against)) or "the same setting"


def value_text(value: object) -> str:
    """A field's value: `yes` and `no` for what is on and off."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def in_words(fields: Mapping[str, object]) -> str:
    """`batch 32, accumulate 8, adamw-fused`: each field's name and value; only its value where that
    says what it is."""
    return ", ".join(_said(field, value) for field, value in fields.items())


def _said(field: str, value: object) -> str:
    if field in _NAMED_BY_VALUE:
        return "own optimizer" if value == OWN_OPTIMIZER else value_text(value)
    if field == "allocator" and value == "expandable_segments:True":
        return "expandable segments"
    if field == "world_size":
        return f"on each of {value} GPUs" if value != 1 else "on 1 GPU"
    name = _NAMES.get(field, field.replace("_", " "))
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return f"{name} {value}"


# Rows of the catalogues, and of what is kept.

OF_GPUS = ("name", "GiB", "GB/s", "fp32", "tf32", "bf16", "fp16", "architecture")
OF_MODELS = ("image", "classes", "version", "window", "channels", "depths", "model")
OF_CACHE = ("model", "kept", "setting", "size", "last used")
ANY = (
    "MODEL is any model of timm, torchvision or transformers (timm:resnet50), or a function of "
    "yours (file:name)."
)
RATES = "Rates are dense TFLOP/s (a multiply-add is two); memory is what CUDA reports, if known."


def by_architecture(gpus: tuple[Gpu, ...]) -> Text:
    """Their names, the newest first."""
    found: dict[str, list[str]] = {}
    for gpu in gpus[::-1]:
        found.setdefault(gpu.architecture if gpu.capability else "AMD", []).append(gpu.name)
    found |= {"AMD": found.pop("AMD", [])}  # the last
    lines = [f"- {kind}: {', '.join(names[::-1])}" for kind, names in found.items()]
    said = f"{len(gpus)} GPUs. 'planner gpus NAME' has memory and rates, --detail those of all."
    return Text("\n".join([said, *lines]))


def gpu_row(gpu: Gpu) -> list[Cell]:
    rates = (gpu.fp32_flops, gpu.tf32_flops, gpu.bf16_flops, gpu.fp16_flops)
    shown = [Number(rate, "-" if rate is None else f"{rate / 1e12:.1f}") for rate in rates]
    memory = Number(gpu.memory_bytes, f"{gpu.memory_bytes / GIB:.2f}")
    bandwidth = Number(gpu.bandwidth, f"{gpu.bandwidth / 1e9:.0f}")
    return [gpu.name, memory, bandwidth, *shown, gpu.architecture]


def names_answer(text: str, names: list[str]) -> list[Part]:
    """Models that are no Swins, so that torch records them, by their names."""
    title = f"{len(names)} models have {text!r} in their names. Each is recorded once: seconds."
    return [
        Text(title),
        Table(("model",), [[name] for name in names], first=14),
        Text(f"Next: 'planner estimate {names[0]} --gpu NAME' says whether it fits."),
    ]


def model_row(name: str, config: SwinConfig) -> list[Cell]:
    (height, width), window = config.image_size, config.window_size
    windows = str(window) if isinstance(window, int) else ",".join(map(str, window))
    classes, channels = (Number(n, str(n)) for n in (config.num_classes, config.embed_dim))
    depths = ",".join(map(str, config.depths))
    return [f"{height}x{width}", classes, f"v{config.version}", windows, channels, depths, name]


def cache_row(entry: Entry, age: float) -> list[Cell]:
    key, what, setting = entry.key, "the model's description", ""
    if "name" not in key:
        what = f"a step at batch {key['batch']}"
    if "setting" in key:
        setting = describe_setting(TrainSetting(**key["setting"])).partition(", ")[2]
    size, ago = format_bytes(entry.num_bytes), f"{format_seconds(age)} ago"
    return [key["title"], what, setting, Number(entry.num_bytes, size), Number(age, ago)]
