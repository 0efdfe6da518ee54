"""The ledger of any model and setting at a batch, from the step on shapes or from a recording; and
what an estimate leaves out, in words.

Imports no torch: steps are recorded in a process of their own (`planner.recording.recordings`).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal

from planner.core.errors import PlannerError
from planner.core.schema import Model, ResolvedSetting, SwinConfig, TrainSetting
from planner.core.schema.setting import GRAPH_MODES, SHARDED
from planner.core.torch_version import torch_version
from planner.ledger.ledger import LEDGER_MICRO_BATCHES, Ledger, ShapeLedgers
from planner.libraries.names import find_library
from planner.machine.hardware import Gpu
from planner.memory.compiled import has_known_graphs, is_compiled, pool_graph_memory
from planner.memory.scratch import PATCH_EMBEDDING, ConvolutionWorkspace
from planner.recording import recordings
from planner.step.ranks import is_closed_form
from planner.step.training import has_step, run_on_shapes

MAX_SHAPE_LEDGERS = 128  # steps on shapes whose ledgers a process keeps
StepRequest = tuple[Model, ResolvedSetting, Gpu | None]


def step_ledger(
    model: Model, setting: ResolvedSetting, recorded: bool = False, gpu: Gpu | None = None
) -> Ledger:
    """The events of building the model and of its first optimizer steps: two, under a recorded DDP
    three.

    A `SwinConfig` runs on shapes unless `recorded` is set; any other model is recorded on a card
    like `gpu`. On shapes a compiled step is the recording of it that is kept; where none is, the
    eager step stands for it (`planner.memory.compiled` says how far to trust that). At most
    `LEDGER_MICRO_BATCHES` micro-batches are run, since the third repeats the second. On
    several GPUs the ledger is one rank's: a closed form on shapes; recorded, torch's own DDP and
    FSDP2, and DeepSpeed's own ZeRO.

    Raises PlannerError for what cannot be recorded.
    """
    if is_on_shapes(model, setting, recorded):
        assert isinstance(model, SwinConfig)
        ledger = _kept_compiled(model, setting, gpu) or _eager_on_shapes(model, setting)
    else:
        ledger = recordings.ledger_of(recordings.step_of(model, setting, gpu))
    is_graphed = setting.compile in GRAPH_MODES and is_compiled(ledger)
    return pool_graph_memory(ledger) if is_graphed else ledger


def _kept_compiled(config: SwinConfig, setting: ResolvedSetting, gpu: Gpu | None) -> Ledger | None:
    if not has_known_graphs(setting):
        return None
    ledger = recordings.find(recordings.step_of(config, setting, gpu))
    return ledger if isinstance(ledger, Ledger) else None


def _eager_on_shapes(config: SwinConfig, setting: ResolvedSetting) -> Ledger:
    ledger = _shared_ledgers(config, setting).ledger(setting.batch_size)
    drift = find_library(config.library).drift(config)
    return replace(ledger, notes=(*ledger.notes, *drift)) if drift else ledger


def _shared_ledgers(config: SwinConfig, setting: ResolvedSetting) -> ShapeLedgers:
    """Settings whose events are the same share their ledgers."""
    alone = {"world_size": 1, "nodes": 1} if setting.parallelism in ("none", "ddp") else {}
    num_micro_batches = min(setting.accumulate, LEDGER_MICRO_BATCHES)
    updates = {"batch_size": 1, "accumulate": num_micro_batches, **alone}
    eager = setting.uncompiled().model_copy(update=updates)
    return _ledgers(config, eager, torch_version())


def is_on_shapes(model: Model, setting: TrainSetting, recorded: bool = False) -> bool:
    """Whether the ledger comes from the step on shapes: at once, and without torch.

    Other than that are recorded: what torchao does (linear layers that multiply in 8 bits,
    `adamw-8bit`, optimizers on the host), optimizers without a step on shapes, ZeRO, and steps
    under FSDP2 that have no closed form, as those of a block that is checkpointed reentrantly and
    gathers its weights twice."""
    if not isinstance(model, SwinConfig) or recorded or not has_step(setting):
        return False
    reentrant = find_library(model.library).reentrant
    gathers_twice = setting.parallelism in SHARDED and setting.checkpointing in reentrant
    return is_closed_form(setting) and not gathers_twice


def record_ledgers(
    requests: Sequence[StepRequest],
    say: Callable[[str], None] | None = None,
    limit_seconds: float | None = None,
    recorded: bool = True,
) -> list[PlannerError | None]:
    """Records the steps of `requests` that are not kept, for at most `limit_seconds`, and returns
    for each request the error that it ended with. Steps on shapes are left out unless `recorded`.
    `say` hears how long it takes (None: standard error)."""
    steps = {r: recordings.step_of(*r) for r in requests if not is_on_shapes(r[0], r[1], recorded)}
    recordings.record(list(steps.values()), say, limit_seconds)
    results = [recordings.find(steps[r]) if r in steps else None for r in requests]
    return [result if isinstance(result, PlannerError) else None for result in results]


@lru_cache(MAX_SHAPE_LEDGERS)
def _ledgers(config: SwinConfig, setting: ResolvedSetting, torch: tuple[int, int]) -> ShapeLedgers:
    """The ledgers of a step at any batch; what they hold differs with the version of `torch`."""
    build = find_library(config.library).on_shapes(config, setting)

    def run(batch_size: int) -> Ledger:
        return run_on_shapes(build, config, setting.model_copy(update={"batch_size": batch_size}))

    return ShapeLedgers(run)


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
    """What an estimate leaves out, a line each. `kernels` are the kernels of fused attention that
    a recorded step runs; `capability` is None where no GPU was named."""
    lines = [convolutions.left_out]
    if setting.lora_rank and setting.attention == "sdpa":
        lines.append(f"{_CUDNN_ATTENTION} the position bias is not trained, as with LoRA")
    if kernels and setting.autocast_dtype and (capability is None or capability[0] in (9, 10)):
        lines.append(f"{_CUDNN_ATTENTION} no mask is trained")
    if "flash" in kernels and capability is not None and capability < (8, 0):
        lines.append(
            f"that flash attention, which is counted, does not run on capability "
            f"{capability[0]}.{capability[1]}: the memory-efficient kernel does in fp16, and the "
            "plain formula in bf16, which keeps the scores of all tokens"
        )
    if setting.optimizer_implementation == "8bit":
        lines.append(
            "what adamw-8bit compiles at its first step: one kernel for each shape of weights, in "
            "memory of the host"
        )
    if setting.parallelism != "none" and setting.world_size == 1:
        lines.append(NCCL_ALONE)
    if setting.parallelism in SHARDED and not is_recorded:
        lines.append(
            "a table of CUDA's copy out of what FSDP2 gathers, which its number of multiprocessors "
            "sizes: some tens of KiB, freed at once (aten/src/ATen/native/cuda/TensorShape.cu)"
        )
    if setting.parallelism == "none" and setting.world_size > 1:
        lines.append(
            "communication between devices (NCCL's buffers, gradient buckets): "
            "--parallelism ddp counts them"
        )
    return lines


def fused_attention(ledger: Ledger) -> set[FusedAttention]:
    """The kernels of fused attention that a step runs."""
    names = {operation.name for _, operation in ledger.operations()}
    kernels: tuple[FusedAttention, ...] = ("flash", "efficient")
    return {k for k in kernels if any(f"product_{k}_att" in name for name in names)}
