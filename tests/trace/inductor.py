"""Inductor's own estimate of the memory of a compiled forward and backward, lowered for the CPU.

Its scheduler fuses for the CPU, which is not how it fuses for a GPU, but decides by the same rules
what is in memory and when it dies. Needs torch; nothing is generated.
"""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._guards import detect_fake_mode
from torch._inductor import memory
from torch._inductor.compile_fx import partition_fn
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V

from planner.core.schema import SwinConfig, TrainSetting
from planner.trace.building import build_task
from planner.trace.cuda_rules import as_on_cuda
from tests.building import build_real


class _Known(BaseException):
    """Both peaks are known."""


def inductor_peaks(config: SwinConfig, setting: TrainSetting) -> dict[str, int]:
    """Peak bytes of "forward" and "backward": parameters and images left out, saved tensors in."""
    peaks: dict[str, int] = {}
    reorder = memory.reorder_for_peak_memory

    def spy(phase: str) -> Any:
        def reordered(
            nodes: Any, buffers: Any, fused: Any, inputs: Any, outputs: Any, *rest: Any
        ) -> Any:
            ordered = reorder(nodes, buffers, fused, inputs, outputs, *rest)
            freeable = memory.get_freeable_input_buf(ordered, inputs)
            memory.assign_memory_planning_info_for_scheduler_buffers(ordered, buffers)
            peaks[phase] = memory.estimate_peak_memory(ordered, freeable, outputs)[0]
            return ordered

        return reordered

    def lower(module: torch.fx.GraphModule, inputs: Any, phase: str) -> None:
        with (
            V.set_fake_mode(detect_fake_mode(inputs)),
            mock.patch.object(memory, "reorder_for_peak_memory", spy(phase)),
        ):
            post_grad_passes(module, False)
            graph = GraphLowering(
                module, example_inputs=inputs, is_backward=phase == "backward", is_inference=False
            )
            with V.set_graph_handler(graph), V.set_debug_handler(DebugContext()):
                graph.run(*inputs)
                graph.init_wrapper_code()
                graph._update_scheduler()

    def forward(module: torch.fx.GraphModule, inputs: Any) -> Any:
        lower(module, inputs, "forward")
        return module.forward

    def backward(module: torch.fx.GraphModule, inputs: Any) -> Any:
        lower(module, inputs, "backward")
        raise _Known

    def partition(joint: Any, inputs: Any, **kwargs: Any) -> Any:
        with V.set_fake_mode(detect_fake_mode(inputs)):
            return partition_fn(joint, inputs, **kwargs)

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    task, module, _ = build_task(lambda: build_real(config, setting), config, setting)
    images, _ = task.batch(setting.batch_size, torch.device("cpu"))
    torch._dynamo.reset()
    precision = setting.autocast_dtype
    autocast = torch.autocast("cpu", dtype=getattr(torch, precision or "bfloat16"),
                              enabled=precision is not None)  # fmt: skip
    with as_on_cuda(), autocast, contextlib.suppress(_Known):
        output = torch.compile(module, backend=backend, dynamic=False, fullgraph=True)(images)
        getattr(output, "logits", output).sum().backward()
    torch._dynamo.reset()
    return peaks
