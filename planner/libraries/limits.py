"""Settings that a library's code accepts and a step then breaks on: faults that are known before it
fails. `resolve` refuses such settings, a search omits them, `emit` does not write them.
"""

from collections.abc import Iterator

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


def block_faults(model_name: str, num_blocks: int, setting: TrainSetting) -> Iterator[Fault]:
    """Of checkpointing `blocks:K` in a model that has fewer blocks."""
    blocks = setting.chosen_blocks
    if blocks is not None and (blocks.stop or 0) > num_blocks:
        yield Fault(
            f"{model_name} has {num_blocks} blocks",
            f"checkpointing is {setting.checkpointing}",
            f"Choose blocks:{num_blocks} or fewer, or all of them with --checkpointing blocks.",
            change="checkpointing=blocks",
        )


def swin_faults(model: SwinConfig, setting: TrainSetting, attention: str) -> Iterator[Fault]:
    """Of `setting` with a Swin whose attention is resolved to `attention`."""
    yield from faults_with_any_model(setting)
    if attention == "sdpa":
        yield from window_faults(model, setting)


def module_faults(model: NamedModel | FactoryModel, setting: TrainSetting) -> Iterator[Fault]:
    """Of `setting` with a model that is no Swin of the planner's, which is changed from outside
    only. Its stages and layers are not known, and only timm and transformers have a switch for
    sdpa: elsewhere planner can disable fused kernels (`Step.attention_context`)."""
    if not setting.checkpoints_any_model:
        yield Fault(
            f"{model.title} has checkpointing none, blocks (all, blocks:6 or blocks:every-2) or "
            "selective",
            f"checkpointing is {setting.checkpointing}",
            "Choose --checkpointing blocks, or name the modules in its task: blocks(module).",
            change="checkpointing=blocks",
        )
    has_switch = isinstance(model, NamedModel) and model.library != "torchvision"
    if setting.attention == "sdpa" and not has_switch:
        yield Fault(
            f"the code of {model.title} decides whether it uses sdpa; planner can only turn that "
            "off, with eager",
            "attention is sdpa",
            "Omit --attention, or choose eager.",
            change="attention=library",
        )
    for field in ("frozen_stages", "lora_rank"):
        if getattr(setting, field):
            yield Fault(
                f"settings freeze or adapt only the planner's Swins, and {model.title} is none",
                f"{field} is {getattr(setting, field)}",
                f"Freeze inside a factory of your own, and set {field}=0.",
                change=f"{field}=0",
            )
    yield from faults_with_any_model(setting)


def faults_with_any_model(setting: TrainSetting) -> Iterator[Fault]:
    """Of `setting` with any model."""
    yield from graph_faults(setting)
    yield from float8_faults(setting)
    yield from sharding_faults(setting)


def graph_faults(setting: TrainSetting) -> Iterator[Fault]:
    """Of keeping gradients for another backward beside CUDA graphs. These write gradients into
    their own pool, where the next replay of forward overwrites them: torch raises "accessing tensor
    output of CUDAGraphs that has been overwritten" (issue 169545 of pytorch/pytorch; torch 2.9 to
    2.12, torch/_inductor/cudagraph_trees.py), from 2.13 on "accessing gradient tensor output …",
    and names `.grad` tensors made before the first graph as a way out, for which no trainer's file
    has a place."""
    kept = {
        "accumulate 1": (setting.accumulate > 1, f"accumulate is {setting.accumulate}"),
        "zero_grad_to_none true": (not setting.zero_grad_to_none, "zero_grad_to_none is false"),
    }
    for instead, (is_kept, value) in kept.items():
        if is_kept and setting.compile in GRAPH_MODES:
            yield Fault(
                "CUDA graphs overwrite gradients that are kept for another backward",
                f"compile is {setting.compile}, and {value}",
                f"Choose compile default or max-autotune-no-cudagraphs, or {instead}.",
            )


def batch_multiple(setting: TrainSetting) -> int:
    """The number that a batch must be a multiple of."""
    return FLOAT8_MULTIPLE if setting.precision == "fp8" else 1


def float8_faults(setting: TrainSetting) -> Iterator[Fault]:
    """Of fp8 with a batch that is no multiple of 16, or with adapters or DDP, which nobody has
    compared with it."""
    if setting.precision != "fp8":
        return
    supported = {"lora_rank": (setting.lora_rank, 0), "parallelism": (setting.parallelism, "none")}
    for field, (value, supported_value) in supported.items():
        if value != supported_value:
            yield Fault(
                f"precision fp8 is supported only with {field} {supported_value}",
                f"{field} is {value}",
                f"Set {field}={supported_value}, or precision=bf16.",
                change=f"{field}={supported_value}",
            )
    multiple = batch_multiple(setting)
    next_batch = -(-setting.batch_size // multiple) * multiple
    if setting.batch_size != next_batch:
        yield Fault(
            f"precision fp8 sums gradients over a batch that is a multiple of {multiple}",
            f"batch_size is {setting.batch_size}",
            f"Set batch_size={next_batch}, or precision=bf16.",
            change=f"batch_size={next_batch}",
        )


def sharding_faults(setting: TrainSetting) -> Iterator[Fault]:
    """Of `setting` with the DTensors of `fully_shard`: torch 2.13 raises in optimizer steps without
    a rule for them, and for weights that are not contiguous (`_fsdp_param.py`)."""
    if setting.parallelism not in SHARDED:
        return
    if setting.memory_format != "contiguous":
        yield Fault(
            "FSDP2 shards contiguous weights only",
            f"memory_format is {setting.memory_format}",
            "Set memory_format=contiguous.",
            change="memory_format=contiguous",
        )
    if setting.optimizer_family == "adafactor" or setting.optimizer == "sgd-fused":
        is_sgd = setting.optimizer_family == "sgd"
        families = ", ".join(family for family in OPTIMIZER_FAMILIES if family != "adafactor")
        yield Fault(
            "FSDP2 keeps weights as DTensors, on which torch's "
            f"{'fused SGD' if is_sgd else 'Adafactor'} does not step",
            f"optimizer is {setting.optimizer}",
            f"Choose {'sgd-foreach' if is_sgd else f'one of {families}'}.",
            change=f"optimizer={'sgd' if is_sgd else 'adamw'}",
        )


def window_faults(model: SwinConfig, setting: TrainSetting) -> Iterator[Fault]:
    """Of a batch with too many windows for one launch of sdpa."""
    largest = largest_sdpa_batch(model, setting)
    if largest is not None and setting.batch_size > largest:
        per_image = windows_per_image(model, setting)
        smaller = f"batch_size {largest} or less (and accumulate for a larger step), or "
        yield Fault(
            f"sdpa's CUDA kernel takes at most {SDPA_WINDOWS:,} windows when their position bias "
            "is trained",
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
