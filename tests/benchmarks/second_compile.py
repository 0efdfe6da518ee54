"""What a second compilation costs where an earlier one has filled the compiler's caches.

    python -m tests.benchmarks.second_compile          measure, on the CPU and on an emulated GPU
    python -m tests.benchmarks.second_compile --show   the newest results

Every compilation in a process of its own with one compile thread, those of a chain with one folder
of caches, as the probes of a search have it. Processor seconds of that process and of what it
starts, of the first step less that of a step once compiled, so that other work on the machine
counts little; as shares of the chain's first, measured in the same run. On the emulated GPU Triton
and ptxas compile for real, and no time of a step means anything.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from tabulate import tabulate

from planner.core.schema import SwinConfig, TrainSetting
from planner.machine.emulated import EmulatedMachine, emulated_gpu, started
from tests.benchmarks.dated import latest_results, write_results
from tests.benchmarks.regional_compile import processor_seconds

PACKAGES = ("torch", "triton")
STEPS = 4  # once compiled, of which the least counts
MODEL = SwinConfig(
    library="native", image_size=(56, 56), depths=(2, 2), num_heads=(2, 4), embed_dim=32,
    num_classes=10,
)  # fmt: skip
PLAIN: dict[str, Any] = {"batch_size": 8, "precision": "fp32", "compile": "default"}
CHAINS: Mapping[str, Mapping[str, dict[str, Any]]] = {
    "a graph for each batch": {
        "the first": {},
        "the same again": {},
        "with a fused optimizer": {"optimizer": "adamw-fused"},
        "reduce-overhead": {"compile": "reduce-overhead"},
        "with another attention": {"attention": "eager"},
        "another batch": {"batch_size": 4},
    },
    "one graph for all batches": {
        "the first": {"compile_dynamic": True},
        "the same again": {"compile_dynamic": True},
        "another batch": {"compile_dynamic": True, "batch_size": 4},
    },
}


def compile_once(device: str, fields: dict[str, Any]) -> dict[str, Any]:
    """In this process: what the first step took besides, a later step, and what caches gave."""
    import torch

    from planner.training.step import Training
    from planner.training.tasks import task_for
    from planner.training.tasks.compiling import compile_as_set

    torch.manual_seed(0)
    torch.set_num_threads(1)
    setting = TrainSetting.model_validate(PLAIN | fields)
    task = task_for(MODEL, setting)
    module = task.module().train().to(device)
    call = compile_as_set(module, task, MODEL, setting)
    batch = task.batch(setting.batch_size, torch.device(device))
    training = Training(module, setting, task, batch, call)
    seconds = []
    for _ in range(1 + STEPS):
        began = processor_seconds()
        training.step()
        seconds.append(processor_seconds() - began)
    counted = torch._dynamo.utils.counters
    hits = {
        name: counted[group][name]
        for group, name in (
            ("inductor", "fxgraph_cache_hit"), ("aot_autograd", "autograd_cache_hit"),
        )
    }  # fmt: skip
    return {"compile": seconds[0] - min(seconds[1:]), "step": min(seconds[1:]), **hits}


def measure(device: str, environment: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for chain, cases in CHAINS.items():
        with tempfile.TemporaryDirectory() as cache:
            variables = {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
            for name, fields in cases.items():
                asked = json.dumps({"device": device, "fields": fields})
                done = subprocess.run(
                    [sys.executable, "-m", __spec__.name, "--one", asked],
                    stdout=subprocess.PIPE, text=True, check=True,
                    env={**environment, **variables},
                )  # fmt: skip
                found.setdefault(chain, {})[name] = json.loads(done.stdout.splitlines()[-1])
                print(device, chain, name, found[chain][name], flush=True)
    return found


def show(results: dict[str, Any]) -> None:
    rows = []
    for device, chains in results["devices"].items():
        first = next(iter(next(iter(chains.values())).values()))
        for chain, cases in chains.items():
            for name, case in cases.items():
                share = f"{case['compile'] / first['compile']:.0%}"
                step = f"{case['step'] / first['step']:.2f}" if device == "cpu" else "-"
                rows.append((device, chain, name, f"{case['compile']:.0f} s", share, step))
    print(tabulate(rows, ("device", "compiled", "what", "processor time", "of the first", "step")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--one", type=json.loads, help="compile once, in this process")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(compile_once(**options.one)))
        return
    if not options.show:
        found = {"cpu": measure("cpu", os.environ)}
        with started(EmulatedMachine((emulated_gpu("a100-sxm-80gb"),))) as environment:
            found["emulated A100"] = measure("cuda", environment)
        write_results("second_compile", PACKAGES, {"devices": found})
    show(latest_results("second_compile"))


if __name__ == "__main__":
    main()
