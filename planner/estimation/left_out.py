"""What an estimate leaves out, in words: a figure is worth what is known to be missing from it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from planner.core.schema import TrainSetting
from planner.core.schema.setting import SHARDED
from planner.ledger.ledger import Ledger
from planner.memory.scratch import PATCH_EMBEDDING, ConvolutionWorkspace

FusedAttention = Literal["flash", "efficient"]
_CUDNN_ATTENTION = (
    "cuDNN's attention, whose memory differs: torch 2.11 and later use it in 16 bits on capability "
    "9.0 and 10.x where"
)
NCCL_ALONE = "what NCCL keeps for itself on one GPU, which is less than on several"


def left_out(
    setting: TrainSetting,
    convolutions: ConvolutionWorkspace = PATCH_EMBEDDING,
    kernels: Collection[FusedAttention] = (),
    capability: tuple[int, int] | None = None,
    is_recorded: bool = False,
) -> list[str]:
    """One line each. `kernels` of attention run in the step of a model that was recorded; None is
    the `capability` of no GPU in particular. A recording has what a closed form has not."""
    found = [convolutions.left_out]
    if setting.lora_rank and setting.attention == "sdpa":
        found.append(f"{_CUDNN_ATTENTION} the position bias is not trained, as with LoRA")
    if kernels and setting.autocast_dtype and (capability is None or capability[0] in (9, 10)):
        found.append(f"{_CUDNN_ATTENTION} no mask is trained")
    if "flash" in kernels and capability is not None and capability < (8, 0):
        found.append(
            f"that flash attention, which is counted, does not run on capability "
            f"{capability[0]}.{capability[1]}: the memory-efficient kernel does in fp16, and the "
            "plain formula in bf16, which keeps the scores of all tokens"
        )
    if setting.optimizer_implementation == "8bit":
        found.append(
            "what adamw-8bit compiles at its first step: one kernel for each shape of weights, in "
            "memory of the host"
        )
    if setting.parallelism != "none" and setting.world_size == 1:
        found.append(NCCL_ALONE)
    if setting.parallelism in SHARDED and not is_recorded:
        found.append(
            "a table of CUDA's copy out of what FSDP2 gathers, which its number of multiprocessors "
            "sizes: some tens of KiB, freed at once (aten/src/ATen/native/cuda/TensorShape.cu)"
        )
    if setting.parallelism == "none" and setting.world_size > 1:
        found.append(
            "communication between devices (NCCL's buffers, gradient buckets): "
            "--parallelism ddp counts them"
        )
    return found


def fused_attention(ledger: Ledger) -> set[FusedAttention]:
    """The kernels of attention that run in a step."""
    names = {operation.name for _, operation in ledger.operations()}
    known: tuple[FusedAttention, ...] = ("flash", "efficient")
    return {kernel for kernel in known if any(f"product_{kernel}_att" in name for name in names)}
