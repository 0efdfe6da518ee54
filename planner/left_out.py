"""What an estimate leaves out, in words: a figure is worth what is known to be missing from it."""

from __future__ import annotations

from planner.memory.convolution_workspace import PATCH_EMBEDDING, ConvolutionWorkspace
from planner.schema import Model, TrainSetting
from planner.schema.distribution import DEEPSPEED, SHARDED

# Quoted, 4 A100s and 8 H100s: issues 964 and 1685 of NVIDIA/nccl.
NCCL_BUFFERS = (
    "NCCL's own buffers, outside PyTorch's allocator: 0.5 to 1.1 GB for each communicator were "
    "seen on 4 to 8 GPUs; one GPU needs less"
)


def left_out(
    model: Model, setting: TrainSetting, convolutions: ConvolutionWorkspace = PATCH_EMBEDDING
) -> list[str]:
    """One line each."""
    counted = ", except for sdpa's backward" if setting.attention == "sdpa" else ""
    found = [f"{convolutions.left_out}{counted}"]
    if setting.lora_rank and setting.attention == "sdpa":
        found.append(
            "cuDNN's attention, whose memory differs: torch 2.11 and later use it on capability "
            "9.0 and 10.x where the position bias is not trained, as with LoRA"
        )
    if setting.optimizer_implementation == "8bit":
        found.append(
            "what adamw-8bit compiles at its first step: one kernel for each shape of weights, in "
            "memory of the host"
        )
    if setting.parallelism in SHARDED:
        found += [NCCL_BUFFERS, *left_out_of_sharding(setting)]
    elif setting.parallelism == "ddp":
        found += [NCCL_BUFFERS, "the broadcast of buffers before a forward, which is transient"]
    elif setting.parallelism in DEEPSPEED:
        found.append(NCCL_BUFFERS)
    elif setting.world_size > 1:
        found.append(
            "communication buffers of data parallelism (NCCL, gradient buckets): "
            "--set parallelism=ddp counts the buckets"
        )
    return found


def left_out_of_sharding(setting: TrainSetting) -> list[str]:
    """What no ledger of FSDP2 counts: it is made from shapes, or on fake tensors of the CPU."""
    found = [
        "a table of CUDA's copy out of what FSDP2 gathers, which its number of multiprocessors "
        "sizes: some tens of KiB, freed at once (aten/src/ATen/native/cuda/TensorShape.cu)"
    ]
    if setting.fsdp_param_dtype == "fp16" and setting.fsdp_reduce_dtype == "fp32":
        found.append(
            "copies of gradients whose rows the devices do not share evenly: from fp16 to fp32 "
            "CUDA's fused copy does not go (TensorShape.cpp, _pad_chunk)"
        )
    return found
