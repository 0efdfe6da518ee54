"""Settings that a library's code takes and a step then breaks on: what cannot run, before it fails.

`LibrarySpec.resolve` refuses them, a search leaves them out, `emit` does not write them.
"""

from dataclasses import dataclass

from planner.core.errors import UnsupportedError
from planner.core.schema import Model, NamedModel, SwinConfig, TrainSetting
from planner.core.schema.setting import GRAPH_MODES, OPTIMIZER_FAMILIES, SHARDED
from planner.libraries.maps import feature_maps

# The kernel's batch is the z of its grid (NVIDIA, CUDA C++ Programming Guide: at most 65,535). From
# 2.8 on torch goes in chunks (pull requests 154029 and 154663), but adds up the mask's gradient
# chunk by chunk at shapes that differ, which raises where the mask needs one.
SDPA_WINDOWS = 65_535

# torch._scaled_mm multiplies matrices whose columns, and the rows that they are summed over, are
# multiples of 16 (torch/_meta_registrations.py, meta_scaled_mm). A batch of 16 makes the rows of
# every layer so, which a weight's gradient sums over. Version 2's position MLP is left out by its
# few columns: its rows are those of a table.
FLOAT8_MULTIPLE = 16
FLOAT8_LEAST = 64


@dataclass(frozen=True)
class SettingFault:
    """What keeps a setting from running: the law, the value that breaks it, the way out.

    `instead` is a value of `field` that runs, where one other value is enough.
    """

    law: str
    value: str
    way_out: str
    field: str = ""
    instead: str = ""

    @property
    def message(self) -> str:
        return f"{self.law}: {self.value}"

    def error(self) -> UnsupportedError:
        return UnsupportedError(f"{self.message}.", self.way_out)


def block_limit(whose: str, num_blocks: int, setting: TrainSetting) -> SettingFault | None:
    """`blocks:K` of a model that has fewer."""
    chosen = setting.chosen_blocks
    if chosen is None or (chosen.stop or 0) <= num_blocks:
        return None
    return SettingFault(
        f"{whose} has {num_blocks} blocks",
        f"checkpointing is {setting.checkpointing}",
        f"Choose blocks:{num_blocks} or fewer, or all of them with --checkpointing blocks.",
        field="checkpointing",
        instead="blocks",
    )


def limit_of(model: Model, setting: TrainSetting, attention: str) -> SettingFault | None:
    """What keeps `setting` from running with `attention`, which the library resolved."""
    found = setting_limit(setting)
    if found is None and attention == "sdpa" and isinstance(model, SwinConfig):
        found = window_limit(model, setting)
    return found


def attention_limit(model: Model, setting: TrainSetting) -> SettingFault | None:
    """timm and transformers have a switch for attention; elsewhere fused kernels can only be kept
    from running (`Step.attention_context`)."""
    has_switch = isinstance(model, NamedModel) and model.library != "torchvision"
    if isinstance(model, SwinConfig) or has_switch or setting.attention != "sdpa":
        return None
    return SettingFault(
        f"{model.title} decides in its own code whether it uses sdpa; planner can only keep it "
        "from that, with eager",
        "attention is sdpa",
        "Omit --attention, or choose eager.",
        field="attention",
        instead="library",
    )


def graph_limit(setting: TrainSetting) -> SettingFault | None:
    """CUDA graphs write gradients into their own pool, where the next replay of forward overwrites
    them: torch raises "accessing tensor output of CUDAGraphs that has been overwritten" (issue
    169545 of pytorch/pytorch; torch 2.9 to 2.12, torch/_inductor/cudagraph_trees.py), from 2.13 on
    "accessing gradient tensor output …", and names `.grad` tensors made before the first graph as a
    way out, for which no trainer's file has a place."""
    if setting.compile not in GRAPH_MODES:
        return None
    if setting.accumulate > 1:
        kept = f"accumulate is {setting.accumulate}"
    elif not setting.zero_grad_to_none:
        kept = "zero_grad_to_none is false"
    else:
        return None
    way_out = "accumulate 1" if setting.accumulate > 1 else "zero_grad_to_none true"
    return SettingFault(
        "CUDA graphs overwrite gradients that are kept for another backward",
        f"compile is {setting.compile}, and {kept}",
        f"Choose compile default or max-autotune-no-cudagraphs, or {way_out}.",
    )


def multiplies_in_8_bits(out_features: int, in_features: int) -> bool:
    """Whether a linear layer of these sides is converted where precision is fp8."""
    sides = (out_features, in_features)
    return min(sides) >= FLOAT8_LEAST and all(side % FLOAT8_MULTIPLE == 0 for side in sides)


def batch_unit(setting: TrainSetting) -> int:
    """What a batch must be a multiple of."""
    return FLOAT8_MULTIPLE if setting.precision == "fp8" else 1


def float8_limit(setting: TrainSetting) -> SettingFault | None:
    """Products of 8 bits need batches of 16, and have not been compared beside adapters or DDP."""
    if setting.precision != "fp8":
        return None
    unknown = {"lora_rank": (setting.lora_rank, 0), "parallelism": (setting.parallelism, "none")}
    for field, (value, known) in unknown.items():
        if value != known:
            return SettingFault(
                f"precision fp8 is supported only with {field} {known}",
                f"{field} is {value}",
                f"Set {field}={known}, or precision=bf16.",
                field=field,
                instead=str(known),
            )
    unit = batch_unit(setting)
    if setting.batch_size % unit == 0:
        return None
    above = -(-setting.batch_size // unit) * unit
    return SettingFault(
        f"precision fp8 sums gradients over a batch that is a multiple of {unit}",
        f"batch_size is {setting.batch_size}",
        f"Set batch_size={above}, or precision=bf16.",
        field="batch_size",
        instead=str(above),
    )


def setting_limit(setting: TrainSetting) -> SettingFault | None:
    """What keeps `setting` from running with any model."""
    return graph_limit(setting) or float8_limit(setting) or sharding_limit(setting)


def sharding_limit(setting: TrainSetting) -> SettingFault | None:
    """What torch 2.13 raises on where `fully_shard` made weights DTensors: optimizer steps without
    a rule for them, and weights that are not contiguous (`_fsdp_param.py`)."""
    if setting.parallelism not in SHARDED:
        return None
    if setting.memory_format != "contiguous":
        return SettingFault(
            "FSDP2 shards contiguous weights only",
            f"memory_format is {setting.memory_format}",
            "Set memory_format=contiguous.",
            field="memory_format",
            instead="contiguous",
        )
    if setting.optimizer_family != "adafactor" and setting.optimizer != "sgd-fused":
        return None
    is_sgd = setting.optimizer_family == "sgd"
    step = "fused SGD" if is_sgd else "Adafactor"
    others = ", ".join(family for family in OPTIMIZER_FAMILIES if family != "adafactor")
    return SettingFault(
        f"FSDP2 keeps weights as DTensors, on which torch's {step} does not step",
        f"optimizer is {setting.optimizer}",
        f"Choose {'sgd-foreach' if is_sgd else f'one of {others}'}.",
        field="optimizer",
        instead="sgd" if is_sgd else "adamw",
    )


def trained_limit(model: Model, setting: TrainSetting) -> SettingFault | None:
    """Stages, and layers for adapters, are known only of the planner's Swins."""
    if isinstance(model, SwinConfig):
        return None
    for field in ("frozen_stages", "lora_rank"):
        if getattr(setting, field):
            return SettingFault(
                f"what is trained is a matter of the model {model.title}",
                f"{field} is {getattr(setting, field)}",
                f"Freeze inside a factory of your own, and set {field}=0.",
                field=field,
                instead="0",
            )
    return None


def window_limit(model: SwinConfig, setting: TrainSetting) -> SettingFault | None:
    """`setting` runs with sdpa: its windows must go into one launch."""
    largest = largest_sdpa_batch(model, setting)
    if largest is None or setting.batch_size <= largest:
        return None
    per_image = windows_per_image(model, setting)
    smaller = f"batch_size {largest} or less (and accumulate for a larger step), or "
    return SettingFault(
        f"sdpa's CUDA kernel takes at most {SDPA_WINDOWS:,} windows when their position bias is "
        "trained",
        f"batch_size {setting.batch_size} makes {setting.batch_size * per_image:,} "
        f"({per_image} per image)",
        f"Choose {smaller if largest else ''}attention eager.",
    )


def largest_sdpa_batch(model: SwinConfig, setting: TrainSetting) -> int | None:
    """The largest micro-batch whose windows go into one launch; None where there is no limit."""
    per_image = windows_per_image(model, setting)
    return SDPA_WINDOWS // per_image if per_image else None


def windows_per_image(model: SwinConfig, setting: TrainSetting) -> int:
    """Most windows of any stage whose position bias is trained: sides are padded to whole windows,
    and one that is smaller than a window is one. 0 where no bias is trained."""
    if setting.lora_rank:
        return 0
    trained = list(zip(feature_maps(model), model.windows, strict=True))[setting.frozen_stages :]
    return max(
        (-(-height // window) * -(-width // window) for (height, width), window in trained),
        default=0,
    )
