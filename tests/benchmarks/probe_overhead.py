"""Where the seconds of an eager probe go that are not timed steps.

    python -m tests.benchmarks.probe_overhead [--device cuda:0] [--library timm] [--repeat 3]

A probe of Swin-T at batch 4, each time in a process of its own and forked from a server. Prints
the median seconds of each phase, and what a probe costs beyond its timed steps; keeps all of them
in results/. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from statistics import median

from tabulate import tabulate

from planner.core.schema import SwinConfig, TrainSetting
from search.probe.device import choose_device, describe_device, versions
from search.probe.parent.fork_server import ForkServer
from search.probe.parent.runner import ProbeEvent, run_probe
from search.probe.protocol import ProbeRequest
from tests.benchmarks.dated import write_results

# What each phase spends its time on, for the table's reader.
MEANING = {
    "start": "processes, Python, (forked: nothing more)",
    "import": "torch and its compiler front end",
    "device": "threads, libraries, the device's context",
    "build": "the library's import, the model, its optimizer and batch",
    "warm-up": "the first optimizer steps",
    "check": "looking at the weights, telling the answer",
    "end": "ending processes",
}


def run_once(request: ProbeRequest, fork_server: ForkServer | None) -> dict[str, float]:
    """Seconds by phase of one probe, with what it cost in all beyond its timed steps."""
    events: list[ProbeEvent] = []
    record = run_probe(
        request, deadline_seconds=600, fork_server=fork_server, on_event=events.append
    )
    assert record.status == "measured", record.message
    spent = dict.fromkeys(MEANING, 0.0)
    times = [*(event.elapsed_seconds for event in events), record.probe_seconds]
    for event, begin, end in zip(events, times[:-1], times[1:], strict=True):
        if event.phase != "measure":
            spent[event.phase if event.phase in spent else "warm-up"] += end - begin
    spent["beyond the steps"] = record.probe_seconds - sum(record.step_seconds)
    return spent


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="auto")
    parser.add_argument("--library", default="native")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    device = choose_device(options.device)
    model = SwinConfig(library=options.library)
    setting = TrainSetting(batch_size=4, precision="fp32")
    columns: dict[str, list[dict[str, float]]] = {}
    for name, make in (("own process", nullcontext), ("fork_server", lambda: ForkServer(model))):
        with make() as fork_server:
            columns[name] = [
                run_once(
                    ProbeRequest(model=model, setting=setting, device=device, max_steps=5),
                    fork_server,
                )
                for _ in range(options.repeat + 1)
            ][1:]  # the first fills the disk's cache, or waits for the fork_server
    rows = [
        [phase, *(median(run[phase] for run in runs) for runs in columns.values()), meaning]
        for phase, meaning in {**MEANING, "beyond the steps": "all of the above"}.items()
    ]
    name = describe_device(device).name
    kept = write_results(
        "probe_overhead",
        ("torch", options.library) if options.library != "native" else ("torch",),
        {"probed": name, "model": model.title, "setting": setting.model_dump(), "runs": columns},
    )
    print(f"{name}; {versions()}; {model.title}, batch 4, fp32, eager; {kept.name}")
    print(tabulate(rows, headers=["phase", *columns, ""], floatfmt=".2f"))


if __name__ == "__main__":
    main()
