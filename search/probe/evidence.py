"""What records of one setting prove: its rate, whether it fits, what disturbed it. And of samples
while they come: when enough steps were timed, and whether the machine was quiet.

Whether it was quiet is judged by what the kernel counts of the processors that this process may run
on, less what the process used itself. A control group that hides these counts hides other programs
too. Linux only.
"""

import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from planner.core.schema import MeasurementRecord, TrainSetting
from planner.machine.host import read_host
from search.probe.protocol import ProbeRequest

REPEAT_SHARE = 0.01  # two processes of one setting differ by about this, whatever each one says
# The flag of a probe whose compile_seconds are less than those of a first compilation.
FROM_CACHE = "compiled from a cache: compile_seconds is less than a first compile"
# Beginnings of flags: the probe took fewer steps, could not win any more, its device was throttled.
HURRIED = "hurried by the deadline:"
STOPPED_EARLY = "stopped early:"
THROTTLED = "throttled:"
# A probe with one of these words in a flag may be slower than its device is by itself.
DISTURBANCES = (
    THROTTLED, "other processes on the GPU", "other processes took", "drifted by", HURRIED,
)  # fmt: skip
# One or two samples show no spread: the next may take half as long or twice. A judgement.
FEW_SAMPLES, FEW_SPREAD = 3, 2.0


def is_disturbed(record: MeasurementRecord) -> bool:
    """Whether heat, other programs or drift slowed the probe, as they might not another time."""
    return any(word in flag for flag in record.flags for word in DISTURBANCES)


def was_throttled(record: MeasurementRecord) -> bool:
    return any(flag.startswith(THROTTLED) for flag in record.flags)


def slowed_by(record: MeasurementRecord) -> str:
    """What disturbed a probe that was measured: "heat" or "others"; "" where nothing did."""
    if record.status != "measured" or not is_disturbed(record):
        return ""
    return "heat" if was_throttled(record) else "others"


def usual_cause(records: Iterable[MeasurementRecord]) -> str:
    """What usually slows the probes of a device, and will slow the training: "heat" where most were
    throttled, "others" where other programs disturbed all, else "". One probe is not enough."""
    kinds = [slowed_by(record) for record in records if record.status == "measured"]
    if kinds.count("heat") > max(len(kinds) / 2, 1):
        return "heat"
    return "others" if kinds.count("others") == len(kinds) > 1 else ""


def representatives(records: Sequence[MeasurementRecord], is_hot: bool) -> list[MeasurementRecord]:
    """The records of a device as it usually runs: throttled where it `is_hot`, else undisturbed;
    all records where there is none such. The others are faster or slower for another reason."""
    usual = [r for r in records if (was_throttled(r) if is_hot else not is_disturbed(r))]
    return usual or list(records)


def rate_interval(images: int, samples: Sequence[float]) -> tuple[float, float]:
    """Images/s, (low, high), from the `images` of an optimizer step and the seconds of samples of
    it: their 95% interval, never narrower than the difference between two processes that run one
    setting, and wide where there are few."""
    interval = median_interval(samples)
    margin = FEW_SPREAD if len(samples) < FEW_SAMPLES else 1 + REPEAT_SHARE / 2
    return images / (interval.high * margin), images * margin / interval.low


def is_feasible(record: MeasurementRecord, budget_bytes: int | None) -> bool:
    """Whether a probe ran to its end within the budget."""
    if record.status != "measured" or not record.step_seconds:
        return False
    num_bytes = record.used_bytes
    return budget_bytes is None or num_bytes is None or num_bytes <= budget_bytes


def price_of_compiling(records: Sequence[MeasurementRecord]) -> float:
    """The seconds that compiling a setting takes: the most of its probes, since in the others the
    compiler found its earlier work in a cache."""
    return max(r.compile_seconds or 0.0 for r in records)


# Judgement: the usual 95%, two-sided.
CONFIDENCE = 0.95


@dataclass(frozen=True)
class MedianInterval:
    """A median with the bounds between which the true one lies, in the samples' unit.

    `certain` is False where there are too few samples for the confidence: the bounds are then
    merely the smallest and the largest sample.
    """

    median: float
    low: float
    high: float
    certain: bool

    @property
    def half_width(self) -> float:
        """Half of the interval's width as a share of the median (0.01 is ±1%)."""
        return (self.high - self.low) / 2 / self.median


def median_interval(samples: Sequence[float]) -> MedianInterval:
    """The median of `samples` and its distribution-free confidence interval.

    The number of samples below the true median is Binomial(n, 1/2), so the k-th smallest and the
    k-th largest enclose it with probability 1 - 2 P(X < k): k is the largest that keeps this above
    `CONFIDENCE` (6 samples are needed for 95%). Raises ValueError without samples.
    """
    if not samples:
        raise ValueError("there is no median of no samples")
    ordered = sorted(samples)
    n = len(ordered)
    middle = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    k = _enclosing_rank(n, (1 - CONFIDENCE) / 2)
    return MedianInterval(middle, ordered[max(k, 1) - 1], ordered[n - max(k, 1)], k >= 1)


def _enclosing_rank(n: int, tail: float) -> int:
    """The largest k with P(Binomial(n, 1/2) < k) <= tail; 0 where even k = 1 has more."""
    term = math.exp(-n * math.log(2))
    below = 0.0
    for k in range(n // 2 + 1):
        below += term
        if below > tail:
            return k
        term *= (n - k) / (k + 1)
    return n // 2


# The time of so many steps is kept free before the deadline: for the steps on their way and for the
# untimed one that looks at the loss.
_RESERVED_STEPS = 4
# Fewer samples may all have been disturbed: too few to give up.
_SAMPLES_TO_GIVE_UP = 3
# A drift that matters, as a share, and the samples a quarter needs to show it.
_DRIFT = 0.01
_LEAST_QUARTER = 3


@dataclass(frozen=True)
class StopRule:
    """Judges by the samples so far, in seconds per step, whether they are enough. `started` and
    `deadline` are instants of `time.monotonic`."""

    request: ProbeRequest
    started: float
    deadline: float

    def is_enough(self, samples: Sequence[float]) -> bool:
        if not samples:
            return False
        if self.is_hopeless(samples):
            return True
        enough = len(samples) >= self.request.max_steps
        if not enough and len(samples) < self.request.min_steps:
            return self.is_ending(max(samples))
        if self.is_late(samples):
            return True
        if sum(samples) < self.request.min_measure_seconds:
            return False
        return enough or self.is_precise(samples)

    def is_precise(self, samples: Sequence[float]) -> bool:
        """Whether the median is known to the precision asked for."""
        interval = median_interval(samples)
        return interval.certain and interval.half_width <= self.request.median_precision

    def is_hopeless(self, samples: Sequence[float]) -> bool:
        """Whether even the fastest median that the samples allow is too slow to matter."""
        rate = self.request.give_up_images_per_second
        if rate is None or len(samples) < _SAMPLES_TO_GIVE_UP:
            return False
        if sum(samples) < self.request.give_up_seconds:
            return False
        return self.best_images_per_second(samples) < rate

    def best_images_per_second(self, samples: Sequence[float]) -> float:
        return self.request.setting.images_per_device_step / median_interval(samples).low

    def is_late(self, samples: Sequence[float]) -> bool:
        has_lasted = time.monotonic() - self.started >= self.request.max_measure_seconds
        return has_lasted or self.is_ending(max(samples))

    def is_ending(self, step_seconds: float, more_steps: int = 0) -> bool:
        """Whether the deadline is too near for `more_steps`: one sample in time says more than
        several that come too late."""
        reserve = (_RESERVED_STEPS + more_steps) * step_seconds
        return time.monotonic() + reserve >= self.deadline

    def flags(self, samples: Sequence[float]) -> list[str]:
        """The flags of the samples: why they ended, if not because they are precise, and whether
        they drifted, on a device whose clocks may have."""
        drift = drift_flags(samples) if self.request.min_measure_seconds else []
        return self._why_ended(samples) + drift

    def _why_ended(self, samples: Sequence[float]) -> list[str]:
        if self.is_hopeless(samples):
            return [
                f"{STOPPED_EARLY} at best {self.best_images_per_second(samples):.4g} a second, "
                f"under the {self.request.give_up_images_per_second:.4g} that would matter"
            ]
        if self.is_precise(samples):
            return []
        interval = median_interval(samples)
        if not interval.certain:
            few = f"{len(samples)} samples are" if len(samples) > 1 else "1 sample is"
            hurry = f"{HURRIED} " if len(samples) < self.request.min_steps else ""
            return [f"{hurry}{few} too few for an interval of the median"]
        return [f"the median is known to ±{interval.half_width:.1%} only"]


def drift_flags(samples: Sequence[float]) -> list[str]:
    """A flag where the last quarter of the samples took more or less time than the first."""
    quarter = len(samples) // 4
    if quarter < _LEAST_QUARTER:
        return []
    first, last = median(samples[:quarter]), median(samples[-quarter:])
    if abs(last / first - 1) <= _DRIFT:
        return []
    return [
        f"drifted by {last / first - 1:+.1%} while steps were timed: {1000 * first:.4g} ms in the "
        f"first quarter, {1000 * last:.4g} ms in the last"
    ]


# A share of the processors; an idle machine's services take one or two percent. A judgement.
_NOTEWORTHY_SHARE = 0.1
_LEAST_WATCHED_SECONDS = 0.2  # the kernel counts in hundredths of a second
_WAITING = ("idle", "iowait")
_COUNTED_TWICE = ("guest", "guest_nice")  # in user and nice already (proc(5), /proc/stat)


class QuietWatch:
    """Counts what others take of the processors from the moment at which it is made."""

    def __init__(self) -> None:
        self.before = _read()

    def flags(self, needed: float = math.inf) -> list[str]:
        """A flag where others took some of the `needed` processors (all). None below a fifth of a
        second, for which the counts are too coarse."""
        passed = (now - then for now, then in zip(_read(), self.before, strict=True))
        seconds, busy, own = passed
        if seconds < _LEAST_WATCHED_SECONDS:
            return []
        others = (busy - own) / seconds
        host = read_host()
        room = host.usable_cpus - others
        if others < _NOTEWORTHY_SHARE * host.usable_cpus or room >= min(needed, host.cpus):
            return []
        taken = min(others, host.usable_cpus)
        return [
            f"other programs kept {taken:.2g} of {host.usable_cpus} processors busy meanwhile "
            f"(load average {os.getloadavg()[0]:.3g})"
        ]


def _read() -> tuple[float, float, float]:
    """Seconds so far: of the clock, of the processors' work for any program, and for this one."""
    return time.monotonic(), busy_seconds(), time.process_time()


def busy_seconds() -> float:
    """The seconds that the processors of this process have worked so far, for any program."""
    import psutil  # evidence is read anywhere, and gathered on Linux

    counted = psutil.cpu_times(percpu=True)
    usable = [counted[n] for n in os.sched_getaffinity(0) if n < len(counted)]
    left_out = (*_WAITING, *_COUNTED_TWICE)
    fields = [field for cpu in usable for field in cpu._asdict().items()]
    return float(sum(seconds for name, seconds in fields if name not in left_out))


@dataclass(frozen=True)
class Contender:
    """A setting with all its measured probes. Rates are in images/s of one device, from the probes
    of the device as it usually runs. Where it usually is throttled, heat made the steps of each
    record `slower` times as long, and rates are those at one heat."""

    setting: TrainSetting
    records: tuple[MeasurementRecord, ...]
    slower: tuple[float, ...] = ()

    @property
    def judged(self) -> list[MeasurementRecord]:
        return representatives(self.records, is_hot=bool(self.slower))

    @property
    def evidence(self) -> MeasurementRecord:
        """The record that stands for the setting."""
        return self.judged[0]

    @property
    def measured_rate(self) -> float:
        samples = [s for record in self.judged for s in record.step_seconds]
        return self.setting.images_per_device_step / median(samples)

    @property
    def rate(self) -> float:
        if not self.slower:
            return self.measured_rate
        pairs = zip(self.records, self.slower, strict=True)
        samples = [s / slower for record, slower in pairs for s in record.step_seconds]
        return self.setting.images_per_device_step / median(samples)

    @property
    def compile_seconds(self) -> float:
        return price_of_compiling(self.records)
