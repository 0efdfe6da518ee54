"""What of a setting not every trainer can express: one law for each lever, refused alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from planner.core.schema import TrainSetting
from planner.trainers.plan import LeverName, Plan, Refusal, Trainer, way_out


class Lever(NamedTuple):
    """What a setting may ask (on a CPU only, some of it), and some trainers cannot express.

    `law` follows "it"; `change` is what --set takes to do without.
    """

    name: LeverName
    asked: Callable[[TrainSetting], bool]
    law: str
    change: str
    on_cpu_only: bool = False

    @property
    def field(self) -> str:
        """Of the setting, in which it is asked."""
        return self.change.partition("=")[0]


LEVERS = (
    Lever("checkpointing-in-parts", lambda s: s.checkpointing not in ("none", "blocks"),
          "checkpoints every block or none", "checkpointing=blocks"),
    Lever("offload", lambda s: s.offload != "none",
          "has no place for activations in host memory", "offload=none"),
    Lever("compile", lambda s: s.compile != "off", "does not compile", "compile=off"),
    Lever("compile_scope", lambda s: s.compile_scope != "model",
          "cannot compile block by block", "compile_scope=model"),
    Lever("compile_fullgraph", lambda s: s.compile_fullgraph,
          "cannot refuse graph breaks", "compile_fullgraph=false"),
    Lever("activation_memory_budget", lambda s: s.activation_memory_budget < 1,
          "sets no activation memory budget", "activation_memory_budget=1"),
    Lever("optimizer_in_backward", lambda s: s.optimizer_in_backward,
          "has one optimizer, which steps after backward", "optimizer_in_backward=false"),
    Lever("offload_optimizer", lambda s: s.offload_optimizer != "none",
          "makes its optimizer on the device", "offload_optimizer=none"),
    Lever("zero_grad_to_none", lambda s: not s.zero_grad_to_none,
          "always sets gradients to None", "zero_grad_to_none=true"),
    Lever("frozen_stages", lambda s: s.frozen_stages > 0,
          "cannot freeze stages", "frozen_stages=0"),
    Lever("lora_rank", lambda s: s.lora_rank > 0,
          "has no adapters", "lora_rank=0 --set lora_targets=attention"),
    Lever("ema", lambda s: s.ema, "keeps no average of the weights", "ema=false"),
    Lever("memory_format", lambda s: s.memory_format == "channels_last",
          "does not lay images out channels_last", "memory_format=contiguous"),
    Lever("cudnn_benchmark", lambda s: not s.cudnn_benchmark,
          "always has cuDNN try its algorithms", "cudnn_benchmark=true"),
    Lever("pure-bf16", lambda s: s.precision == "pure-bf16",
          "has no pure bf16 training", "precision=bf16"),
    Lever("fp8", lambda s: s.precision == "fp8",
          "converts no linear layers to 8 bits", "precision=bf16"),
    Lever("bf16-on-cpu", lambda s: s.precision == "bf16",
          "needs a GPU, not the CPU, for autocast to bf16", "precision=fp32", True),
    Lever("fp16-on-cpu", lambda s: s.precision == "fp16",
          "needs a GPU, not the CPU, for autocast to fp16", "precision=fp32", True),
)  # fmt: skip


def lever_refusals(trainer: Trainer, plan: Plan) -> list[Refusal]:
    """A refusal for each lever that the setting asks and `trainer` does not express."""
    return [
        Refusal(
            f"it {lever.law} ({lever.field}={_value(plan, lever)})",
            way_out(_change(trainer, plan, lever)),
        )
        for lever in _refused(trainer, plan)
    ]


def _refused(trainer: Trainer, plan: Plan) -> list[Lever]:
    return [
        lever
        for lever in LEVERS
        if lever.name not in trainer.expresses
        and lever.asked(plan.setting)
        and (plan.device == "cpu" or not lever.on_cpu_only)
    ]


def _change(trainer: Trainer, plan: Plan, lever: Lever) -> str:
    """What --set takes to do without: of the precisions the nearest that `trainer` does not refuse
    in its turn."""
    if lever.field != "precision":
        return lever.change
    laws = {refusal.law for refusal in trainer.refusals(plan)}
    for precision in (lever.change.partition("=")[2], "fp16", "fp32"):
        setting = plan.setting.model_copy(update={"precision": precision})
        other = replace(plan, setting=setting)
        others = (refused.field for refused in _refused(trainer, other))
        own = {refusal.law for refusal in trainer.refusals(other)}
        if own <= laws and "precision" not in others:
            return f"precision={precision}"
    return lever.change


def _value(plan: Plan, lever: Lever) -> str:
    value = getattr(plan.setting, lever.field)
    return str(value).lower() if isinstance(value, bool) else f"{value}"
