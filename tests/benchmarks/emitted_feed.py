"""Whether the emitted script, fed, trains as fast as its loader and its step allow.

    python -m tests.benchmarks.emitted_feed [--rounds 2] [--seconds 4]

Measures by turns, each in a process of its own: the script's loader with its batches thrown away,
its step on a batch in memory (`--synthetic`), and the script fed. First on a folder of made JPEGs,
with as many workers as there are processors, so that the law for shared ones holds
(`planner.throughput.feeding`) and the script itself says how many threads its step leaves, and with
one worker whose processor the step leaves to it. Then on a data set of one's own that sleeps and
takes no processor: there min(loader, step) itself holds, with the loader slower and with it faster.
Prints the medians of the rates, in images/s, and the ratio of the fed one to the law; keeps them in
results/. Run it on an idle machine of two cores or more: three to four minutes.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tabulate import tabulate

from planner.environment.host import read_host
from planner.loading.synthetic import make_synthetic
from planner.schema import SwinConfig, TrainSetting
from planner.schema.loading import LoaderSetting
from planner.throughput.feeding import Loading, Stepping, fed_rate
from planner.trainers.emission import emit
from search.probe.parent.supervisor import descendants
from search.probe.processes import cpu_seconds
from tests.benchmarks.dated import write_results
from tests.trainers.cases import feeding, recommendation

MODEL = SwinConfig(
    image_size=64, embed_dim=32, depths=(2, 2), num_heads=(1, 2), window_size=4, num_classes=10,
    drop_path_rate=0.0,
)  # fmt: skip
BATCH_SIZE, LOG_EVERY = 32, 4
NUM_PICTURES = 400  # an epoch of 12 batches, so that many epochs begin
# Beside a CPU torch, PyPI's torchvision imports only with this; the script knows nothing of it.
RUN = (
    "import runpy, sys; from planner.libraries.missing_operators import "
    "declare_missing_operators as declare; declare(); "
    "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)
# The script's own loader and nothing else, with log lines like the script's.
LOADER_ONLY = """
import argparse, runpy, sys
from pathlib import Path
script = runpy.run_path("train.py", run_name="emitted")
options = argparse.Namespace(
    data=Path(sys.argv[1]), workers=int(sys.argv[2]), prefetch_factor=2, pin_memory=False,
    persistent_workers=True, device="cpu", seed=0,
)
for step, _ in enumerate(script["data_loader"](options, 0, True), 1):
    if step % LOG_EVERY == 0:
        print(f"step {step}/", flush=True)
"""
SLEEPING = """
import time
import torch
from torch.utils.data import Dataset

class Sleeping(Dataset):
    picture = torch.zeros(3, 64, 64)

    def __len__(self):
        return NUM_PICTURES

    def __getitem__(self, index):
        time.sleep(SECONDS)
        return self.picture, index % 10

def make():
    return Sleeping()
"""


@dataclass(frozen=True)
class Rate:
    """Images/s, and seconds of processor time per image of all its processes."""

    images_per_second: float
    cpu_seconds: float


def measure(folder: Path, arguments: list[str], seconds: float, threads: int | None) -> Rate:
    """Of a process that prints its steps: from its second line on, for so many seconds."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    environment.pop("OMP_NUM_THREADS", None)
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, *arguments], cwd=folder, text=True, stdout=subprocess.PIPE,
        env=environment, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    begun: tuple[int, float, float] | None = None
    for number, line in enumerate(process.stdout, 1):
        found = re.match(r"step (\d+)/", line)
        assert found, line
        now = (int(found[1]), time.perf_counter(), tree_seconds(process.pid))
        if begun is None:
            begun = now if number == 2 else None  # what was prefetched at the start is used up
        elif now[1] - begun[1] >= seconds:
            break
    else:
        raise AssertionError(f"{arguments} ended with {process.wait()}")
    stop(process)
    images = (now[0] - begun[0]) * BATCH_SIZE
    return Rate(images / (now[1] - begun[1]), (now[2] - begun[2]) / images)


def stop(process: subprocess.Popen[str]) -> None:
    """With its workers, which would end some seconds later by themselves."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def tree_seconds(pid: int) -> float:
    """Seconds of processor time of a process and all below it that live."""
    return sum(map(cpu_seconds, (pid, *descendants(pid))))


@dataclass(frozen=True)
class Case:
    """A folder with `train.py`, and how it is fed. `threads` of the step, None for those that the
    script chooses; `shared` is whether loading takes processors that the step takes too."""

    title: str
    folder: Path
    data: Path | None
    workers: int
    threads: int | None
    shared: bool

    def commands(self) -> dict[str, list[str]]:
        common = ["--device", "cpu", "--log-every", str(LOG_EVERY), "--lr", "1e-4"]
        given = [str(self.data)] if self.data is not None else []
        endless = ["--steps", "1000000"]
        return {
            "loader": ["loader_only.py", str(self.data or "."), str(self.workers)],
            "step": ["train.py", "--synthetic", *endless, *common],
            "fed": ["train.py", *given, *endless, *common],
        }


def make_case(
    folder: Path,
    title: str,
    data: Path | None,
    workers: int,
    threads: int | None,
    sleeps: float = 0.0,
) -> Case:
    """Emits the script for a loader that "was measured"; with `sleeps`, seconds an item, on a data
    set that does nothing else."""
    folder.mkdir()
    setting = TrainSetting(batch_size=BATCH_SIZE, precision="fp32")
    loader = LoaderSetting(
        pipeline="own" if sleeps else "torchvision", workers=workers, pin_memory=False,
        batch_size=BATCH_SIZE, image_size=(64, 64),
    )  # fmt: skip
    source = {"kind": "factory", "location": "sleeping:make"} if sleeps else {}
    found = recommendation(MODEL, setting, feeding=feeding(loader, **source))
    (folder / "train.py").write_text(emit(found, "pytorch").text)
    (folder / "loader_only.py").write_text(LOADER_ONLY.replace("LOG_EVERY", str(LOG_EVERY)))
    items = SLEEPING.replace("NUM_PICTURES", str(NUM_PICTURES)).replace("SECONDS", repr(sleeps))
    (folder / "sleeping.py").write_text(items)
    return Case(title, folder, data, workers, threads, shared=not sleeps)


def run(case: Case, rounds: int, seconds: float) -> dict[str, float | str]:
    """The medians of the three rates, measured by turns, and the law."""
    rates: dict[str, list[Rate]] = {"loader": [], "step": [], "fed": []}
    for _ in range(rounds):
        for name, command in case.commands().items():
            rates[name].append(measure(case.folder, command, seconds, case.threads))
    middle = {name: median(r.images_per_second for r in found) for name, found in rates.items()}
    spent = {name: median(r.cpu_seconds for r in found) for name, found in rates.items()}
    loader = Loading(middle["loader"], case.workers, spent["loader"])
    step = Stepping(middle["step"], spent["step"] if case.shared else 0.0)
    law = fed_rate(loader, step, read_host().cpus)
    return {
        "data": case.title, "loader": middle["loader"], "step": middle["step"],
        "fed": middle["fed"], "law": law, "fed / law": middle["fed"] / law,
        "cpu ms loader": 1e3 * spent["loader"], "cpu ms step": 1e3 * spent["step"],
        "cpu ms fed": 1e3 * spent["fed"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--only", default="", help="cases whose title has this")
    options = parser.parse_args()
    cores = max(2, int(read_host().cpus))
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        make_synthetic(place / "pictures", NUM_PICTURES)
        step = measure_step(place, cores, options.seconds)
        cases = [
            make_case(place / "jpeg", "JPEGs, cores shared", place / "pictures", cores, None),
            make_case(place / "apart", "JPEGs, cores apart", place / "pictures", 1, cores - 1),
            # Four workers bring 4 / sleep images/s: half of what the step takes, and double.
            make_case(place / "slow", "sleeps, slower", None, 4, cores - 1, sleeps=8 / step),
            make_case(place / "fast", "sleeps, faster", None, 4, cores - 1, sleeps=2 / step),
        ]
        chosen = [case for case in cases if options.only in case.title]
        rows = [run(case, options.rounds, options.seconds) for case in chosen]
    print(tabulate(rows, headers="keys", floatfmt=".2f"))
    found = {"model": MODEL.model_dump(mode="json"), "batch_size": BATCH_SIZE, "rows": rows}
    print(write_results("emitted_feed", ("torch", "torchvision", "pillow"), found))


def measure_step(place: Path, cores: int, seconds: float) -> float:
    """Images/s of the step with the threads that it has beside a data set that sleeps."""
    probe = make_case(place / "probe", "step", None, 0, cores - 1, sleeps=1.0)
    return measure(probe.folder, probe.commands()["step"], seconds, cores - 1).images_per_second


if __name__ == "__main__":
    main()
