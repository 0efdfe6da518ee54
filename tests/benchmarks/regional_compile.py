"""How long a small Swin compiles as a whole and block by block, on the CPU.

    python -m tests.benchmarks.regional_compile          measure (two minutes on an idle core)
    python -m tests.benchmarks.regional_compile --show   the newest results

Each in a process of its own with an empty cache and one compile thread. Processor seconds of that
process and the C++ compilers it starts, of the first step less that of a step once compiled, so
that other work on the machine counts little. One stage of 4 blocks without stochastic depth, whose
rates would each be a graph; images of 56, float32, torch.compile's default mode; a block's width
hardly matters to the compiler.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from typing import Any

from tabulate import tabulate

from planner.core.schema import SwinConfig, TrainSetting
from tests.benchmarks.dated import latest_results, write_results

SCOPES = ("model", "blocks")
PACKAGES = ("torch",)


MODEL = SwinConfig(
    library="native", image_size=(56, 56), depths=(4,), num_heads=(1,), embed_dim=16,
    num_classes=10, drop_path_rate=0.0,
)  # fmt: skip


def compile_once(scope: str) -> dict[str, Any]:
    """In this process: what the first step took, and how many graphs were compiled."""
    import torch

    from planner.training.step import Training
    from planner.training.tasks import task_for
    from planner.training.tasks.compiling import compile_as_set

    setting = TrainSetting.model_validate(
        {"batch_size": 2, "precision": "fp32", "compile": "default", "compile_scope": scope}
    )
    task = task_for(MODEL, setting)
    module = task.module().train()
    call = compile_as_set(module, task, MODEL, setting)
    training = Training(module, setting, task, task.batch(2, torch.device("cpu")), call)
    seconds = []
    for _ in range(2):
        began = processor_seconds()
        training.step()
        seconds.append(processor_seconds() - began)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return {"seconds": seconds[0] - seconds[1], "graphs": graphs}


def processor_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def measure() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for scope in SCOPES:
        with tempfile.TemporaryDirectory() as cache:
            variables = {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
            done = subprocess.run(
                [sys.executable, "-m", __spec__.name, "--scope", scope],
                capture_output=True, text=True, check=True, env={**os.environ, **variables},
            )  # fmt: skip
        found[scope] = json.loads(done.stdout.splitlines()[-1])
    return found


def show(results: dict[str, Any]) -> None:
    rows = [
        (name, case["graphs"], f"{case['seconds']:.0f} s")
        for name, case in results["cases"].items()
    ]
    print(tabulate(rows, ("compiled", "graphs", "processor time")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--scope", choices=SCOPES, help="compile once, in this process")
    options = parser.parse_args()
    if options.scope:
        print(json.dumps(compile_once(options.scope)))
        return
    if not options.show:
        write_results("regional_compile", PACKAGES, {"cases": measure()})
    show(latest_results("regional_compile"))


if __name__ == "__main__":
    main()
