"""This tool and others that predict training memory, asked about the same five steps.

    python -m tests.benchmarks.other_tools          measure: each tool in a process of its own
    python -m tests.benchmarks.other_tools --show   the table of the newest results, in markdown

torchinfo, accelerate and deepspeed are no dependencies: pip install --no-deps torchinfo accelerate
deepspeed (and what its import asks for: hjson, py-cpuinfo, msgpack, einops, psutil). A tool that
cannot be imported is left out, and the results say so.

The reference is the real module's own step, traced on fake tensors with CUDA's autocast lists,
CUDA's fused attention and in-place gradient sums: most bytes alive at once in the second optimizer
step, each request rounded to 512 B. It is no GPU measurement, and it is what this tool was held
equal to in its tests: the table says how far other ways of answering are from that, not which is
nearest to a card. MemTracker does not round requests, which is its -0.0%.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Any

from planner.core.schema import SwinConfig, TrainSetting
from planner.core.units import GIB
from planner.estimation.estimate import choose, estimate
from tests.benchmarks.dated import latest_results, write_results

if TYPE_CHECKING:
    from torch import nn

STEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "timm Swin-T, fp32, batch 64": (
        "timm:swin_tiny_patch4_window7_224", {"precision": "fp32", "batch_size": 64},
    ),
    "timm Swin-T, bf16, batch 64": (
        "timm:swin_tiny_patch4_window7_224", {"precision": "bf16", "batch_size": 64},
    ),
    "timm Swin-B, bf16, blocks checkpointed, batch 128": (
        "timm:swin_base_patch4_window7_224",
        {"precision": "bf16", "batch_size": 128, "checkpointing": "blocks"},
    ),
    "native Swin-T, bf16, SDPA, batch 64": (
        "native:swin_tiny", {"precision": "bf16", "batch_size": 64, "attention": "sdpa"},
    ),
    "transformers Swin-T, bf16, nested checkpointing, batch 64": (
        "transformers:microsoft/swin-tiny-patch4-window7-224",
        {"precision": "bf16", "batch_size": 64, "checkpointing": "nested"},
    ),
}  # fmt: skip
PACKAGES = ("torch", "timm", "transformers", "torchinfo", "accelerate", "deepspeed")
Ask = Callable[[SwinConfig, TrainSetting], int]  # the peak in bytes


@dataclass(frozen=True)
class Tool:
    """`title` as the table names it; what it `needs`, and what it `leaves_out` of the peak."""

    title: str
    ask: Ask
    needs: str
    leaves_out: str


def ask_reference(model: SwinConfig, setting: TrainSetting) -> int:
    from planner.memory.profile import steady_step
    from planner.trace.ledger import trace_estimate

    return steady_step(trace_estimate(model, setting)).peak_bytes


def ask_planner(model: SwinConfig, setting: TrainSetting) -> int:
    return estimate(model, setting).peak_live_bytes


def ask_mem_tracker(model: SwinConfig, setting: TrainSetting) -> int:
    """As its documentation does, over two optimizer steps."""
    return _mem_tracker_peak(model, setting, nullcontext())


def ask_mem_tracker_as_on_cuda(model: SwinConfig, setting: TrainSetting) -> int:
    from planner.trace.cuda_rules import as_on_cuda

    return _mem_tracker_peak(model, setting, as_on_cuda())


def _mem_tracker_peak(
    model: SwinConfig, setting: TrainSetting, rules: AbstractContextManager[object]
) -> int:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    from planner.trace.building import make_fake
    from planner.training.step import Training
    from planner.training.tasks import as_task

    module = _module(model, setting)
    device = torch.device("cpu")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, rules:
        make_fake(module, mode)
        task = as_task(module, model, setting)
        images, targets = batch = task.batch(setting.batch_size, device)
        training = Training(module, setting, task, batch)
        tracker = MemTracker()
        tracker.track_external(module, training.optimizer, images, targets)
        with tracker:
            training.step()  # its optimizer makes its state
            tracker.reset_mod_stats()
            training.step()
        by_device = tracker.get_tracker_snapshot("peak")
    total: int = by_device[device]["Total"]
    return total


def ask_torchinfo(model: SwinConfig, setting: TrainSetting) -> int:
    """Its `Estimated Total Size`, from a forward on the meta device."""
    from torchinfo import summary

    module = _module(model, setting).to("meta")
    shape = (setting.batch_size, model.in_channels, *model.image_size)
    found = summary(module, input_size=shape, device="meta", verbose=0)
    total: int = found.total_input + found.total_output_bytes + found.total_param_bytes
    return total


def ask_accelerate(model: SwinConfig, setting: TrainSetting) -> int:
    """What `accelerate estimate-memory` prints as `Training using Adam`: the largest of its parts.
    The command loads a model from the hub; here its functions are given the module."""
    module = _module(model, setting)  # first: what it imports needs the missing operators declared
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    dtype = {"fp32": "float32", "bf16": "bfloat16"}[setting.precision]
    total, _ = calculate_maximum_sizes(module)
    return max(estimate_training_usage(total, dtype).values())


def ask_deepspeed(model: SwinConfig, setting: TrainSetting) -> int:
    """ZeRO 2 on one device without offloading."""
    count = sum(p.numel() for p in _module(model, setting).parameters())
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    _, num_bytes = estimate_zero2_model_states_mem_needs(count, 1, 1, cpu_offload=False)
    return int(num_bytes)


def _module(model: SwinConfig, setting: TrainSetting) -> nn.Module:
    from planner.libraries.building import build_for
    from planner.trace.building import build_task

    return build_task(build_for(model, setting), model, setting)[1]


TOOLS = {
    "reference": Tool(
        "reference: the real module, traced (`planner estimate --trace`)",
        ask_reference,
        "model, torch",
        "kernels' scratch",
    ),
    "planner": Tool(
        "`planner estimate`, live bytes",
        ask_planner,
        "nothing but the name",
        "kernels' scratch; workspaces, blocks, segments and context are figures of their own",
    ),
    "mem_tracker": Tool(
        "PyTorch MemTracker, fake tensors",
        ask_mem_tracker,
        "model, torch, the training loop",
        "CUDA: the CPU's autocast lists and attention kernels are traced; in-place gradient sums, "
        "the allocator, workspaces, context",
    ),
    "mem_tracker_cuda": Tool(
        "the same under this project's CUDA rules",
        ask_mem_tracker_as_on_cuda,
        "model, torch, the training loop, those rules",
        "in-place gradient sums, the allocator, workspaces, context",
    ),
    "torchinfo": Tool(
        "torchinfo, estimated total size",
        ask_torchinfo,
        "model, torch",
        "autocast, what autograd really saves (it sums the outputs of leaf modules, twice), "
        "checkpointing, gradients, optimizer",
    ),
    "accelerate": Tool(
        "accelerate estimate-memory, training with Adam",
        ask_accelerate,
        "model (from the hub), torch",
        "activations, whatever the batch",
    ),
    "deepspeed": Tool(
        "DeepSpeed, ZeRO 2 model states on one GPU",
        ask_deepspeed,
        "parameter count, torch",
        "activations, whatever the batch; autocast (it means a model held in 16 bit)",
    ),
}  # fmt: skip


def chosen_steps() -> list[tuple[str, SwinConfig, TrainSetting]]:
    return [
        (name, *choose(model, TrainSetting(**of), None, {})) for name, (model, of) in STEPS.items()
    ]


def answer(name: str) -> list[dict[str, Any]]:
    """One tool's answers to all steps, with processor seconds, in this process: the first pays for
    the tool's imports and the model's library. Starting Python and importing planner, which this
    file does, is not counted: 0.2 s for all alike."""
    answers = []
    for _, model, setting in chosen_steps():
        before = time.process_time()
        try:
            peak: int | None = TOOLS[name].ask(model, setting)
            fault = ""
        except ModuleNotFoundError as error:
            peak, fault = None, f"{error.name} is not installed"
        seconds = round(time.process_time() - before, 3)
        answers.append({"peak_bytes": peak, "cpu_seconds": seconds, "fault": fault})
        print(name, answers[-1], file=sys.stderr, flush=True)
    return answers


def measure(names: Sequence[str]) -> None:
    """Asks these tools, and keeps what today's results already hold of the others."""
    steps = [
        {"name": n, "model": m.model_dump(mode="json"), "setting": s.model_dump(mode="json")}
        for n, m, s in chosen_steps()
    ]
    tools = _already_answered(steps)
    for name in names:
        command = [sys.executable, "-m", "tests.benchmarks.other_tools", "--answer", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        said = {k: v for k, v in vars(TOOLS[name]).items() if k != "ask"}
        # Others print to standard output too: ours is the last line.
        tools[name] = said | {"answers": json.loads(done.stdout.splitlines()[-1])}
        ordered = {name: tools[name] for name in TOOLS if name in tools}
        path = write_results("other_tools", PACKAGES, {"steps": steps, "tools": ordered})
    print(path)


def _already_answered(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Of today, about the same steps."""
    try:
        found = latest_results("other_tools")
    except FileNotFoundError:
        return {}
    alike = found["date"] == str(date.today()) and found["steps"] == steps
    return dict(found["tools"]) if alike else {}


def table(found: dict[str, Any]) -> str:
    """Markdown: a row per tool, a column per step."""
    tools = found["tools"]
    reference = [a["peak_bytes"] for a in tools["reference"]["answers"]]
    names = [step["name"] for step in found["steps"]]
    head = ["", *names, "CPU seconds: first, later", "needs", "leaves out"]
    rows = [head, ["---"] * len(head)]
    for name, tool in tools.items():
        cells = [
            _cell(a, None if name == "reference" else expected)
            for a, expected in zip(tool["answers"], reference, strict=True)
        ]
        spent = [a["cpu_seconds"] for a in tool["answers"]]
        seconds = f"{spent[0]:.2f}, {sum(spent[1:]) / (len(spent) - 1):.2f}"
        rows.append([tool["title"], *cells, seconds, tool["needs"], tool["leaves_out"]])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    versions = ", ".join(f"{k} {v}" for k, v in found["device"]["versions"].items() if v)
    return "\n".join([*lines, "", f"{found['date']}; {versions}."])


def _cell(answer: dict[str, Any], expected: int | None) -> str:
    peak = answer["peak_bytes"]
    if peak is None:
        return answer["fault"]
    size = f"{peak / GIB:.2f} GiB"
    if expected is None:
        return size
    return f"{size} (equal)" if peak == expected else f"{size} ({peak / expected - 1:+.1%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--show", action="store_true", help="print the newest results")
    parser.add_argument("--only", choices=TOOLS, nargs="+", default=list(TOOLS))
    parser.add_argument("--answer", choices=TOOLS, help="ask one tool, in this process")
    options = parser.parse_args()
    if options.answer:
        print(json.dumps(answer(options.answer)))
    elif options.show:
        print(table(latest_results("other_tools")))
    else:
        measure(options.only)


if __name__ == "__main__":
    main()
