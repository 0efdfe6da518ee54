"""What of a setting not every trainer can express: one law for each lever, refused alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from planner.trainers.plan import LeverName, Plan, Refusal, Trainer, way_out


class Lever(NamedTuple):
    """A field of a setting, in the cases in which some trainers cannot express it.

    `law` follows "it"; `change` is what --set takes to do without.
    """

    name: LeverName
    field: str
    asked: Callable[[Plan], bool]
    law: str
    change: str


LEVERS = (
    Lever(
        "checkpointing-in-parts", "checkpointing",
        lambda plan: plan.setting.checkpointing not in ("none", "blocks"),
        "checkpoints every block or none", "checkpointing=blocks",
    ),
    Lever(
        "offload", "offload", lambda plan: plan.setting.offload != "none",
        "has no place for activations in host memory", "offload=none",
    ),
    Lever(
        "compile", "compile", lambda plan: plan.setting.compile != "off",
        "does not compile", "compile=off",
    ),
    Lever(
        "compile_scope", "compile_scope", lambda plan: plan.setting.compile_scope != "model",
        "cannot compile block by block", "compile_scope=model",
    ),
    Lever(
        "compile_dynamic", "compile_dynamic", lambda plan: plan.setting.compile_dynamic,
        "cannot ask for graphs of any batch", "compile_dynamic=false",
    ),
    Lever(
        "compile_fullgraph", "compile_fullgraph", lambda plan: plan.setting.compile_fullgraph,
        "cannot refuse graph breaks", "compile_fullgraph=false",
    ),
    Lever(
        "activation_memory_budget", "activation_memory_budget",
        lambda plan: plan.setting.activation_memory_budget < 1,
        "sets no activation memory budget", "activation_memory_budget=1",
    ),
    Lever(
        "optimizer_in_backward", "optimizer_in_backward",
        lambda plan: plan.setting.optimizer_in_backward,
        "has one optimizer, which steps after backward", "optimizer_in_backward=false",
    ),
    Lever(
        "zero_grad_to_none", "zero_grad_to_none", lambda plan: not plan.setting.zero_grad_to_none,
        "always sets gradients to None", "zero_grad_to_none=true",
    ),
    Lever(
        "frozen_stages", "frozen_stages", lambda plan: plan.setting.frozen_stages > 0,
        "cannot freeze stages", "frozen_stages=0",
    ),
    Lever(
        "lora_rank", "lora_rank", lambda plan: plan.setting.lora_rank > 0,
        "has no adapters", "lora_rank=0 --set lora_targets=attention",
    ),
    Lever(
        "ema", "ema", lambda plan: plan.setting.ema,
        "keeps no average of the weights", "ema=false",
    ),
    Lever(
        "memory_format", "memory_format",
        lambda plan: plan.setting.memory_format == "channels_last",
        "does not lay images out channels_last", "memory_format=contiguous",
    ),
    Lever(
        "pure-bf16", "precision", lambda plan: plan.setting.precision == "pure-bf16",
        "has no pure bf16 training", "precision=bf16",
    ),
    Lever(
        "fp8", "precision", lambda plan: plan.setting.precision == "fp8",
        "converts no linear layers to 8 bits", "precision=bf16",
    ),
    Lever(
        "bf16-on-cpu", "precision",
        lambda plan: plan.device == "cpu" and plan.setting.precision == "bf16",
        "needs a GPU, not the CPU, for autocast to bf16", "precision=fp32",
    ),
    Lever(
        "fp16-on-cpu", "precision",
        lambda plan: plan.device == "cpu" and plan.setting.precision == "fp16",
        "needs a GPU, not the CPU, for autocast to fp16", "precision=fp32",
    ),
)  # fmt: skip


def lever_refusals(trainer: Trainer, plan: Plan) -> list[Refusal]:
    """A refusal for each lever that the setting asks and `trainer` does not express."""
    return [
        Refusal(f"it {lever.law} ({lever.field}={_value(plan, lever)})", way_out(lever.change))
        for lever in LEVERS
        if lever.name not in trainer.expresses and lever.asked(plan)
    ]


def _value(plan: Plan, lever: Lever) -> str:
    value = getattr(plan.setting, lever.field)
    return str(value).lower() if isinstance(value, bool) else f"{value}"
