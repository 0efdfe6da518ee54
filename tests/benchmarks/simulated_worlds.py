"""Judges the search over devices that do not exist, whose physics it does not know.

    python -m tests.benchmarks.simulated_worlds [WORLD…] [--devices 6] [--first 0] [--budget 600]
        [--pairs …] [--workers 1] [--keep]

Each device is searched whole, as `planner tune` does: its session, its limits, its baseline and its
recommendation, over its default space. The devices are those of tests/benchmarks/simulated_draws.py
as they are drawn, and with one thing more that is true of them: a precision or an attention that
crashes or gives NaN, bf16 that the card emulates, a compile mode that wins by 30%. And those of
tests/benchmarks/described_devices.py, whose physics has nothing in common with the prediction.
Regret, in %, is how much slower than the fastest setting that runs and fits the recommended one is,
by the truth that was drawn and not by what a probe said of it. Beside it, in nine of ten, that of
one who knows the best setting of each compile mode, and not which mode is best: what seconds of
compiling cost.
"""

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median
from sys import stderr
from zlib import crc32

import numpy as np

from planner.core.schema import MeasurementRecord, TrainSetting
from planner.report.text import table_text
from search.loop.options import SearchOptions
from search.loop.sampler import PLAIN_SHARE
from search.loop.search import Limits, Search, find_plain_arm
from search.loop.space import Pick
from search.loop.study import ProbeStudy, StudyIdentity
from search.loop.surrogate.prior import ALIKE_SHARE
from tests.benchmarks.described_devices import describe
from tests.benchmarks.simulated_draws import (
    PAIRS,
    TIMED_SECONDS,
    Device,
    Pair,
    SimulatedProber,
    draw_device,
    luck,
    make_pair,
    narrow_pair,
)
from tests.search.replays import ReplayProber

RESULTS = Path(__file__).with_name("results")
MAX_PROBES = 40  # of a search without a budget that does not end by itself
Change = Callable[[Device], Device]
World = Callable[[Pair, int], Device]
SIXTEEN = ("bf16", "fp16", "pure-bf16")


def failing(field: str, values: tuple[str, ...], why: str) -> Change:
    """Every setting with one of these values ends so: `crashed: bf16`."""

    def world(device: Device) -> Device:
        candidates = device.pair.space.candidates
        refused = [
            why if getattr(c.setting, field) in values else before
            for c, before in zip(candidates, device.refused, strict=True)
        ]
        return replace(device, refused=refused)

    return world


def faster(of: Callable[[TrainSetting], bool], factor: float) -> Change:
    def world(device: Device) -> Device:
        those = np.array([of(c.setting) for c in device.pair.space.candidates])
        return replace(device, seconds=np.where(those, device.seconds / factor, device.seconds))

    return world


def modes_differ(device: Device) -> Device:
    """By more than anybody has published: about as they were drawn before 7638604."""
    random = luck(device.pair, device.seed, "modes")
    for mode, ends in (("reduce-overhead", (0.93, 1.1)), ("max-autotune", (0.93, 1.2))):
        device = faster(lambda s, mode=mode: s.compile == mode, random.uniform(*ends))(device)
    return device


def emulated_bf16(device: Device) -> Device:
    """Half as slow again as fp32, as on a card whose matrix units lack it; where fp32 is not in the
    space, as much slower than before as the others are in the median."""
    space, seconds = device.pair.space, device.seconds
    factors = np.ones(len(seconds))
    for i, c in enumerate(space.candidates):
        if c.setting.precision in ("bf16", "pure-bf16"):
            plain = space.index(c.setting.model_copy(update={"precision": "fp32"}))
            factors[i] = np.nan if plain is None else 1.5 * seconds[plain] / seconds[i]
    usual = np.nanmedian(factors[factors != 1.0]) if (factors != 1.0).any() else 1.0
    return replace(device, seconds=seconds * np.nan_to_num(factors, nan=usual))


DRAWN: Mapping[str, Change] = {
    "as drawn": lambda device: device,
    "bf16 crashes": failing("precision", ("bf16", "pure-bf16"), "crashed: bf16"),
    "sdpa crashes": failing("attention", ("sdpa",), "crashed: sdpa"),
    "eager attention crashes": failing("attention", ("eager",), "crashed: eager"),
    "16 bits give NaN": failing("precision", SIXTEEN, "non_finite: nan"),
    "bf16 is emulated": emulated_bf16,
    "modes differ": modes_differ,
    "max-autotune 30% faster": faster(lambda s: s.compile == "max-autotune", 1.3),
}
# What is drawn otherwise than by RANGES.
DESCRIBED: Mapping[str, dict[str, tuple[float, float]]] = {
    "another physics": {},
    "host-bound": {"launch": (2e-5, 4e-5)},
    "cliffs": {"waves": (0.9, 1.0), "odd rows": (1.3, 1.5), "ripple": (0.05, 0.08)},
    # As they were described before 18048d0, wider than measured steps allow.
    "ragged batches": {"waves": (0.3, 1.0), "ripple": (0.0, 0.05)},
    "heat": {"heat": (0.15, 0.3)},
    "neighbours": {"neighbours": (0.3, 0.5)},
    "sdpa is slow": {"sdpa": (0.03, 0.08)},
    "fusing gains nothing": {"passes left": (0.95, 1.0), "compiled": (0.85, 0.95)},
    "bf16 is slow": {"emulated bf16": (3.0, 5.0)},
    "tuning gains 30%": {"max-autotune": (1.3, 1.4)},
    "twice the memory": {"bytes": (1.7, 2.0)},
    "slow compiler": {"compile": (150, 250)},
}
# Data-parallel on four devices: bytes/s of the link, and how much of a backward hides an exchange.
# From 10 Gbit/s Ethernet to half of PCIe 3.0 x16, and NVLink: assumptions.
SPREAD: Mapping[str, dict[str, tuple[float, float]]] = {
    "four GPUs": {"link": (5e10, 2e11), "hidden": (0.3, 1.0)},
    "four GPUs on a slow link": {"link": (1e9, 8e9), "hidden": (0.3, 1.0)},
}


@lru_cache(maxsize=1)
def four_devices(name: str) -> Pair:
    """The pair of that name, as the planner sees it on four such devices."""
    return narrow_pair(name, base=TrainSetting(world_size=4, parallelism="ddp"))


WORLDS: Mapping[str, World] = {
    **{name: lambda p, seed, of=of: of(draw_device(p, seed)) for name, of in DRAWN.items()},
    **{name: lambda p, seed, of=of: describe(p, seed, **of) for name, of in DESCRIBED.items()},
    **{
        name: lambda p, seed, of=of: describe(four_devices(p.name), seed, **of)
        for name, of in SPREAD.items()
    },
}


def regret_of_knowing(device: Device, budget_seconds: float) -> float:
    """Of probing each mode's best setting, the default mode's first, while there is time: beside
    what the plain default may keep, and an eager probe."""
    space, rates, seconds = device.pair.space, device.rates(), device.compile_seconds
    modes = np.array([c.setting.compile for c in space.candidates])
    probe = device.startup_seconds + TIMED_SECONDS
    left = (1 - PLAIN_SHARE) * budget_seconds - probe
    found = rates[modes == "off"].max()
    for mode in ("default", "reduce-overhead", "max-autotune"):
        alike = 0.0 if mode == "default" else (1 - ALIKE_SHARE) * seconds["default"]
        left -= probe + seconds[mode] - alike
        if left >= 0:
            found = max(found, rates[modes == mode].max(initial=0.0))
    return float(1 - found / rates.max())


@dataclass(frozen=True)
class Ended:
    """How the search of one device ended: losses in %, and its probes without the baseline's."""

    regret: float
    knowing: float
    nothing: bool
    probes: int


def search_device(device: Device, budget_seconds: float = math.inf) -> Ended:
    """One whole search of a device."""
    pair, stages = device.pair, list[str]()
    budget = budget_seconds if budget_seconds < math.inf else None
    trials = None if budget else MAX_PROBES
    limits = Limits(trials, budget, clock=lambda: 0.0)
    probe = ReplayProber(SimulatedProber(device), limits)

    def counted(pick: Pick, probe_id: str, deadline_seconds: float) -> MeasurementRecord:
        stages.append(pick.stage)
        return probe(pick, probe_id, deadline_seconds)

    options = SearchOptions(trials=trials, budget_seconds=budget)
    study = ProbeStudy(pair.space, budget_bytes=pair.budget_bytes)
    arm = find_plain_arm(pair.space, pair.model)
    search = Search(study, pair.prior, counted, limits, options, arm)
    stopped, _ = search.run()
    versions = {"simulated": "not measured"}
    identity = StudyIdentity(model=pair.model, device=pair.device, versions=versions)
    found = search.recommend(identity, stopped, [])
    rates = device.rates()
    index = pair.space.index(found.setting) if found.setting else None
    chosen = 0.0 if index is None else rates[index]
    losses = 1 - chosen / rates.max(), regret_of_knowing(device, budget_seconds)
    regret, knowing = (round(100 * float(loss), 3) for loss in losses)
    num_probes = len(stages) - stages.count("baseline")
    return Ended(regret, knowing, found.setting is None, num_probes)


def search_worlds(task: tuple[str, Sequence[str], Sequence[int], float]) -> dict[str, list[Ended]]:
    """Of one pair, by world: a process makes the pair's prior once."""
    pair_name, names, numbers, budget_seconds = task
    pair, ended = make_pair(pair_name), dict[str, list[Ended]]()
    for name in names:
        # Luck that worlds shared would look like a law.
        drawn = [WORLDS[name](pair, crc32(name.encode()) + n) for n in numbers]
        ended[name] = [search_device(d, budget_seconds) for d in drawn if d.rates().any()]
    return ended


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that so large a share of `values` does not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def _row(name: str, ended: Sequence[Ended]) -> list[str]:
    regret, knowing = ([getattr(e, of) for e in ended] for of in ("regret", "knowing"))
    figures = (median(regret), fmean(regret), quantile(regret, 0.9), max(regret),
               quantile(knowing, 0.9))  # fmt: skip
    counts = sum(e.nothing for e in ended), round(fmean(e.probes for e in ended))
    return [name, str(len(ended)), *(f"{f:.1f}" for f in figures), *map(str, counts)]


def show_worlds(ended: Mapping[str, Sequence[Ended]]) -> str:
    rows = [_row(name, found) for name, found in ended.items() if found]
    return table_text(rows, ("world", "devices", "median", "mean", "nine of ten", "worst",
                             "knowing", "nothing", "probes"))  # fmt: skip


def kept_worlds() -> dict[str, list[Ended]]:
    """The newest that was kept."""
    found = json.loads(sorted(RESULTS.glob("simulated_worlds-*.json"))[-1].read_text())["ended"]
    return {name: [Ended(**each) for each in ended] for name, ended in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("worlds", nargs="*", choices=[*WORLDS, []], default=[])
    parser.add_argument("--devices", type=int, default=6, help="of each pair")
    parser.add_argument("--first", type=int, default=0, help="of them")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds, 0 for none")
    parser.add_argument("--pairs", nargs="*", default=list(PAIRS))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="as tests/benchmarks/results/")
    given = parser.parse_args()
    names = given.worlds or list(WORLDS)
    numbers, budget = range(given.first, given.first + given.devices), given.budget or math.inf
    tasks = [(pair, names, numbers, budget) for pair in given.pairs]
    with get_context("spawn").Pool(given.workers) as pool:
        pairs = []
        for found in pool.imap_unordered(search_worlds, tasks, chunksize=1):
            pairs.append(found)
            print(f"{len(pairs)} of {len(tasks)} pairs are searched", file=stderr)
    ended = {name: [e for pair in pairs for e in pair[name]] for name in names}
    if given.keep:
        kept = {name: [asdict(e) for e in found] for name, found in ended.items()}
        said = {"date": str(date.today()), "budget": given.budget, "ended": kept}
        RESULTS.joinpath(f"simulated_worlds-{date.today()}.json").write_text(json.dumps(said))
    print(show_worlds(ended))


if __name__ == "__main__":
    main()
