"""What a compile mode means for a step, and how far its ledger is to be trusted."""

from __future__ import annotations

from planner.schema import Model, SwinConfig, TrainSetting
from planner.schema.setting import GRAPH_MODES

# Relative to reserved bytes. Saved tensors are those of torch's own partition, to the byte. The
# step's peak lay between 0.95 and 1.02 of what Inductor's scheduler estimates where it lowers the
# same graphs for a CPU (torch 2.13, 2026-11-20, seven two-block Swins; backward has the peak,
# forwards lay between 0.80 and 0.98). For a GPU it fuses otherwise and may pad strides, and no
# compiled step on a GPU has been measured by us: the range is some three times that (inferred).
COMPILED_RANGE = (0.85, 1.2)
# Where the model breaks into several graphs, the step is taken for eager, and the range is widened
# to hold the published spread (inferred).
BROKEN_RANGE = (0.55, 1.25)


def is_one_graph(model: Model, setting: TrainSetting) -> bool:
    """Whether `torch.compile` takes the model whole. Of ours, transformers' version 1 breaks into
    several graphs where it is checkpointed (5 graph breaks, transformers 5.23). Under DDP torch
    itself breaks any model, at the ends of its buckets (torch/_dynamo/backends/distributed.py)."""
    if setting.parallelism == "ddp":
        return False
    if not isinstance(model, SwinConfig) or setting.checkpointing == "none":
        return True
    return not (model.library == "transformers" and model.version == 1)


def shares_a_ledger(mode: str) -> str:
    """The mode whose ledger is that of `mode`: tuning kernels changes no buffer."""
    if mode == "off":
        return "off"
    return "reduce-overhead" if mode in GRAPH_MODES else "default"


def left_out_of(model: Model, setting: TrainSetting) -> list[str]:
    """What a compiled step's ledger does not know."""
    if not is_one_graph(model, setting):
        return [
            "what compilation changes: the model breaks into several graphs, so the step is "
            "estimated as eager and the range widened"
        ]
    return [
        "what Inductor does to its kernels' order, padded strides and scratch of tuned kernels",
        "compilation itself, which takes memory of the host, and the first steps' warm-up",
    ]
