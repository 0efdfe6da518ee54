"""Settings that a library's code accepts and a step then breaks on: each limit finds one before it
fails. `resolve` refuses such settings, a search omits them, `emit` does not write them.
"""

from planner.core.errors import Fault
from planner.core.schema import FactoryModel, NamedModel, SwinConfig, TrainSetting
from planner.core.schema.setting import GRAPH_MODES, OPTIMIZER_FAMILIES, SHARDED
from planner.libraries.maps import feature_maps

# The kernel's batch is the z of its grid (NVIDIA, CUDA C++ Programming Guide: at most 65,535). From
# 2.8 on torch splits it into chunks (pull requests 154029 and 154663), but adds up the gradient of
# the mask over chunks of different shapes, which raises if the mask needs a gradient.
SDPA_WINDOWS = 65_535

# torch._scaled_mm multiplies matrices whose columns, and the rows that they are summed over, are
# multiples of 16 (torch/_meta_registrations.py, meta_scaled_mm). The gradient of a weight sums over
# the rows of a layer's input, which are multiples of 16 if the batch is one. Version 2's position
# MLP, whose rows are those of a table, is excluded by its few columns.
FLOAT8_MULTIPLE = 16


def block_limit(model_name: str, num_blocks: int, setting: TrainSetting) -> Fault | None:
    """The fault of checkpointing `blocks:K` in a model that has fewer blocks."""
    blocks = setting.chosen_blocks
    if blocks is None or (blocks.stop or 0) <= num_blocks:
        return None
    return Fault(
        f"{model_name} has {num_blocks} blocks",
        f"checkpointing is {setting.checkpointing}",
        f"Choose blocks:{num_blocks} or fewer, or all of them with --checkpointing blocks.",
        change="checkpointing=blocks",
    )


def swin_limit(model: SwinConfig, setting: TrainSetting, attention: str) -> Fault | None:
    """The fault of `setting` with a Swin whose attention is resolved to `attention`."""
    fault = setting_limit(setting)
    return window_limit(model, setting) if fault is None and attention == "sdpa" else fault


def module_faults(model: NamedModel | FactoryModel, setting: TrainSetting) -> list[Fault]:
    """The faults of `setting` with a model that is no Swin of the planner's, which is changed from
    outside only. Its stages and layers are not known, and only timm and transformers have a switch
    for sdpa: elsewhere planner can disable fused kernels (`Step.attention_context`)."""
    faults = []
    if not setting.checkpoints_any_model:
        faults.append(Fault(
            f"{model.title} has checkpointing none, blocks (all, blocks:6 or blocks:every-2) or "
            "selective",
            f"checkpointing is {setting.checkpointing}",
            "Choose --checkpointing blocks, or name the modules in its task: blocks(module).",
            change="checkpointing=blocks",
        ))  # fmt: skip
    has_switch = isinstance(model, NamedModel) and model.library != "torchvision"
    if setting.attention == "sdpa" and not has_switch:
        faults.append(Fault(
            f"the code of {model.title} decides whether it uses sdpa; planner can only turn that "
            "off, with eager",
            "attention is sdpa",
            "Omit --attention, or choose eager.",
            change="attention=library",
        ))  # fmt: skip
    for field in ("frozen_stages", "lora_rank"):
        if getattr(setting, field):
            faults.append(Fault(
                f"settings freeze or adapt only the planner's Swins, and {model.title} is none",
                f"{field} is {getattr(setting, field)}",
                f"Freeze inside a factory of your own, and set {field}=0.",
                change=f"{field}=0",
            ))  # fmt: skip
    limit = setting_limit(setting)
    return faults if limit is None else [*faults, limit]


def graph_limit(setting: TrainSetting) -> Fault | None:
    """The fault of keeping gradients for another backward beside CUDA graphs. These write gradients
    into their own pool, where the next replay of forward overwrites them: torch raises "accessing
    tensor output of CUDAGraphs that has been overwritten" (issue 169545 of pytorch/pytorch; torch
    2.9 to 2.12, torch/_inductor/cudagraph_trees.py), from 2.13 on "accessing gradient tensor output
    …", and names `.grad` tensors made before the first graph as a way out, for which no trainer's
    file has a place."""
    if setting.compile not in GRAPH_MODES:
        return None
    if setting.accumulate > 1:
        value = f"accumulate is {setting.accumulate}"
    elif not setting.zero_grad_to_none:
        value = "zero_grad_to_none is false"
    else:
        return None
    way_out = "accumulate 1" if setting.accumulate > 1 else "zero_grad_to_none true"
    return Fault(
        "CUDA graphs overwrite gradients that are kept for another backward",
        f"compile is {setting.compile}, and {value}",
        f"Choose compile default or max-autotune-no-cudagraphs, or {way_out}.",
    )


def batch_multiple(setting: TrainSetting) -> int:
    """The number that a batch must be a multiple of."""
    return FLOAT8_MULTIPLE if setting.precision == "fp8" else 1


def float8_limit(setting: TrainSetting) -> Fault | None:
    """The fault of fp8 with a batch that is no multiple of 16, or with adapters or DDP, which
    nobody has compared with it."""
    if setting.precision != "fp8":
        return None
    supported = {"lora_rank": (setting.lora_rank, 0), "parallelism": (setting.parallelism, "none")}
    for field, (value, supported_value) in supported.items():
        if value != supported_value:
            return Fault(
                f"precision fp8 is supported only with {field} {supported_value}",
                f"{field} is {value}",
                f"Set {field}={supported_value}, or precision=bf16.",
                change=f"{field}={supported_value}",
            )
    multiple = batch_multiple(setting)
    if setting.batch_size % multiple == 0:
        return None
    next_batch = -(-setting.batch_size // multiple) * multiple
    return Fault(
        f"precision fp8 sums gradients over a batch that is a multiple of {multiple}",
        f"batch_size is {setting.batch_size}",
        f"Set batch_size={next_batch}, or precision=bf16.",
        change=f"batch_size={next_batch}",
    )


def setting_limit(setting: TrainSetting) -> Fault | None:
    """The fault of `setting` with any model."""
    return graph_limit(setting) or float8_limit(setting) or sharding_limit(setting)


def sharding_limit(setting: TrainSetting) -> Fault | None:
    """The fault of `setting` with the DTensors of `fully_shard`: torch 2.13 raises in optimizer
    steps without a rule for them, and for weights that are not contiguous (`_fsdp_param.py`)."""
    if setting.parallelism not in SHARDED:
        return None
    if setting.memory_format != "contiguous":
        return Fault(
            "FSDP2 shards contiguous weights only",
            f"memory_format is {setting.memory_format}",
            "Set memory_format=contiguous.",
            change="memory_format=contiguous",
        )
    if setting.optimizer_family != "adafactor" and setting.optimizer != "sgd-fused":
        return None
    is_sgd = setting.optimizer_family == "sgd"
    step = "fused SGD" if is_sgd else "Adafactor"
    families = ", ".join(family for family in OPTIMIZER_FAMILIES if family != "adafactor")
    return Fault(
        f"FSDP2 keeps weights as DTensors, on which torch's {step} does not step",
        f"optimizer is {setting.optimizer}",
        f"Choose {'sgd-foreach' if is_sgd else f'one of {families}'}.",
        change=f"optimizer={'sgd' if is_sgd else 'adamw'}",
    )


def window_limit(model: SwinConfig, setting: TrainSetting) -> Fault | None:
    """The fault of a batch with too many windows for one launch of sdpa."""
    largest = largest_sdpa_batch(model, setting)
    if largest is None or setting.batch_size <= largest:
        return None
    per_image = windows_per_image(model, setting)
    smaller = f"batch_size {largest} or less (and accumulate for a larger step), or "
    return Fault(
        f"sdpa's CUDA kernel takes at most {SDPA_WINDOWS:,} windows when their position bias is "
        "trained",
        f"batch_size {setting.batch_size} makes {setting.batch_size * per_image:,} "
        f"({per_image} per image)",
        f"Choose {smaller if largest else ''}attention eager.",
    )


def largest_sdpa_batch(model: SwinConfig, setting: TrainSetting) -> int | None:
    """The largest micro-batch whose windows fit into one launch; None if there is no limit."""
    per_image = windows_per_image(model, setting)
    return SDPA_WINDOWS // per_image if per_image else None


def windows_per_image(model: SwinConfig, setting: TrainSetting) -> int:
    """The maximum number of windows over the stages whose position bias is trained; 0 without such
    a stage. Sides are padded to whole windows, and a smaller side counts as one."""
    if setting.lora_rank:
        return 0
    trained = list(zip(feature_maps(model), model.windows, strict=True))[setting.frozen_stages :]
    return max(
        (-(-height // window) * -(-width // window) for (height, width), window in trained),
        default=0,
    )
