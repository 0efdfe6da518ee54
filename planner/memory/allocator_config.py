"""What PYTORCH_ALLOC_CONF says to the CUDA caching allocator, as a value.

Keys, ranges and the meaning of `roundup_power2_divisions` are quoted from PyTorch's
c10/core/AllocatorConfig.{h,cpp} and c10/cuda/CUDAAllocatorConfig.h (torch 2.9 to 2.15).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from planner.core.errors import UnsupportedError, UsageError, shorten, unknown_name
from planner.core.units import MIB

# In the order in which torch asks for them: the first that is set wins and the others are not read
# (c10/cuda/CUDAAllocatorConfig.h of torch 2.15, `CUDAAllocatorConfig::instance`). What the project
# writes is the first: it hides the other, and 2.9.1 ignores expandable_segments in the second
# (pytorch/pytorch#183387; 2.13.0 and 2.15.0 take either, without a warning: run on 2026-11-23).
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
RECORDED_AS = "allocator_config"  # the key of a record's versions that holds the options
# kRoundUpPowerOfTwoIntervals: 1 MiB, 2 MiB … 32 GiB and above.
NUM_ROUNDUP_INTERVALS = 16

_EXAMPLE = "Write it as in PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True,max_split_size_mb:128."
# Keys torch accepts that touch host memory, locks or error timing: no effect on these statistics.
# `…_by_class` (torch 2.15) is for streams that a program gives a class, as no training does.
_WITHOUT_EFFECT = frozenset({
    "release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register", "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb", "pinned_use_background_threads", "pinned_free_catch_all",
    "pinned_max_round_threshold_mb", "pinned_max_cached_size_mb",
    "graph_capture_record_stream_reuse", "throw_on_cudamalloc_oom",
    "expandable_segments_reserve_by_class",
})  # fmt: skip


@dataclass(frozen=True)
class AllocatorConfig:
    """The allocator's options; the defaults are torch's. Sizes in bytes, None means no limit.

    `roundup_power2_divisions` holds, for requests whose power-of-two floor is 1 MiB (and less),
    2 MiB, … 32 GiB (and more), into how many steps the way to the next power of two is divided;
    empty or 0 rounds to 512 B. `per_process_memory_fraction` is a share of the device's memory, see
    `allowed_bytes`. `source` says where the options were found, for a person; it decides nothing.
    """

    expandable_segments: bool = False
    max_split_bytes: int | None = None
    max_non_split_rounding_bytes: int = 20 * MIB
    large_segment_bytes: int = 20 * MIB
    garbage_collection_threshold: float = 0.0
    roundup_power2_divisions: tuple[int, ...] = ()
    per_process_memory_fraction: float | None = None
    source: str = field(default="", compare=False)

    def allowed_bytes(self, device_bytes: int | None) -> int | None:
        """What torch lets the allocator reserve of a device of `device_bytes`; None is no limit.

        `DeviceCachingAllocator::setMemoryFraction`: a share below 1 of the device's whole memory,
        whatever the context takes besides.
        """
        share = self.per_process_memory_fraction
        if share is None or share == 1 or device_bytes is None:
            return None
        return int(share * device_bytes)


def parse_allocator_config(text: str) -> AllocatorConfig:
    """`expandable_segments:True,max_split_size_mb:128`, the syntax of PYTORCH_ALLOC_CONF (and of
    PYTORCH_CUDA_ALLOC_CONF), as a value. Raises UsageError with every fault found, and
    UnsupportedError for another backend than torch's own allocator."""
    options, faults = _split_options(text)
    values: dict[str, object] = {}
    large_segment_bytes = AllocatorConfig.large_segment_bytes
    # large_segment_size_mb first: the other sizes must not be below it.
    for key, value in sorted(options, key=lambda option: option[0] != "large_segment_size_mb"):
        if key in _WITHOUT_EFFECT:
            continue
        try:
            if key in _READERS:
                field, read = _READERS[key]
                values[field] = read(key, value, large_segment_bytes // MIB)
            elif key in _REFUSED:
                _refuse(key, value)
            else:
                known = [*_READERS, *_REFUSED, *_WITHOUT_EFFECT]
                raise unknown_name("allocator option", key, known)
        except UsageError as error:
            faults.append(error.message)
        if key == "large_segment_size_mb" and "large_segment_bytes" in values:
            large_segment_bytes = int(str(values["large_segment_bytes"]))
            values.setdefault("max_non_split_rounding_bytes", large_segment_bytes)
    if faults:
        said = "; ".join(fault.removesuffix(".") for fault in faults)
        raise UsageError(said if said.endswith("?") else f"{said}.", _EXAMPLE)
    return AllocatorConfig(**values)  # type: ignore[arg-type]


def options_text(config: AllocatorConfig) -> str:
    """The options of `config` that are not torch's defaults, as `parse_allocator_config` reads
    them; "" where all are."""
    default = parse_allocator_config(f"large_segment_size_mb:{config.large_segment_bytes // MIB}")
    default = replace(default, large_segment_bytes=AllocatorConfig.large_segment_bytes)
    found = [
        f"{key}:{_option_text(value)}"
        for key, (name, _) in _READERS.items()
        if (value := getattr(config, name)) != getattr(default, name)
    ]
    # first what bounds the others, which torch reads in the order in which they stand
    return ",".join(sorted(found, key=lambda text: not text.startswith("large_segment")))


def _option_text(value: object) -> str:
    if isinstance(value, tuple):
        return "[" + ",".join(f"{1 << at}:{parts}" for at, parts in enumerate(value)) + "]"
    return str(value // MIB) if type(value) is int else str(value)


def environment_allocator(environment: Mapping[str, str]) -> AllocatorConfig | None:
    """The options that torch would find in `environment`; None where neither variable is set.

    Raises UsageError and UnsupportedError as `parse_allocator_config`, naming the variable.
    """
    found = environment_options(environment)
    if found is None:
        return None
    name, text = found
    try:
        return replace(parse_allocator_config(text), source=f"{name}={text}")
    except (UsageError, UnsupportedError) as error:
        raise type(error)(f"{name}={text}: {error.message}", error.way_out) from error


def recorded_allocator(versions: Mapping[str, str]) -> AllocatorConfig | None:
    """The options that a measurement ran with, by its record's `versions`; None for the defaults.

    Raises UsageError and UnsupportedError as `parse_allocator_config`.
    """
    text = versions.get(RECORDED_AS)
    if text is None:
        return None
    return replace(parse_allocator_config(text), source=text)


def environment_options(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """(variable, value) of the one variable that torch reads; None where it says nothing.

    One that is set to nothing still hides those after it, as it does in torch.
    """
    name = next((name for name in VARIABLES if name in environment), None)
    return (name, environment[name]) if name and environment[name].strip() else None


@contextmanager
def allocator_in_environment(options: str | None) -> Iterator[None]:
    """Meanwhile this process's environment, which those that it starts get, says `options` and
    nothing else of the allocator; None leaves it as it is."""
    if options is None:
        yield
        return
    before = {name: os.environ.pop(name) for name in VARIABLES if name in os.environ}
    os.environ[VARIABLES[0]] = options
    try:
        yield
    finally:
        del os.environ[VARIABLES[0]]
        os.environ.update(before)


def _split_options(text: str) -> tuple[list[tuple[str, str]], list[str]]:
    """(key, value) pairs at the top level, and what could not be read as one."""
    options: list[tuple[str, str]] = []
    faults: list[str] = []
    for part in _split_at_commas("".join(text.split())):
        key, colon, value = part.partition(":")
        if key and colon and value:
            options.append((key, value))
        else:
            faults.append(f"an allocator option is written key:value, and {part!r} is not")
    return options, faults


def _split_at_commas(text: str) -> list[str]:
    """Parts between commas outside brackets; empty ones are dropped, as torch does."""
    parts = [""]
    depth = 0
    for char in text:
        depth += (char == "[") - (char == "]")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part for part in parts if part]


# Key -> the value that changes nothing, and what the others do.
_REFUSED = {
    "backend": ("native", "leaves caching to the driver, whose rules are not published"),
    "expandable_segments_reserve": (
        "", "may end a segment early: a request that does not fit then opens another, or fails",
    ),
}  # fmt: skip


def _refuse(key: str, value: str) -> None:
    harmless, does = _REFUSED[key]
    if key == "backend" and value not in ("native", "cudaMallocAsync", "hipMallocAsync"):
        raise UsageError(f"backend is native or cudaMallocAsync, not {value!r}")
    if value != harmless:
        raise UnsupportedError(
            f"{key}:{value} {does}.", f"Leave out {key!r}: that is not modelled."
        )


def _read_switch(key: str, value: str, _: int) -> bool:
    if value not in ("True", "False"):
        raise UsageError(f"{key} is True or False, not {value!r}")
    return value == "True"


def _read_mib(key: str, value: str, large_segment: int) -> int:
    """Whole MiB, although torch's option says mb: no less than a large segment has, which has 11 at
    least."""
    number, minimum = _whole(value), 11 if key.startswith("large_segment") else large_segment
    if number is None or number < minimum:
        law = f"{minimum} or more and under 2^44"
        raise UsageError(f"{key} is a whole number of MiB, {law}, not {shorten(value, 40)}")
    return number * MIB


def _whole(value: str) -> int | None:
    """What torch reads as a whole number (std::stoull), as far as MiB can be counted in bytes."""
    is_number = value.isascii() and value.isdecimal() and len(value) <= 20
    return int(value) if is_number and int(value) < 2**64 // MIB else None


def _read_share(key: str, value: str, _: int) -> float:
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    below_one = key.startswith("garbage_collection")
    if not (0 < share < 1 or (share == 1 and not below_one)):
        most = "below 1" if below_one else "1 at most"
        raise UsageError(f"{key} is a share above 0 and {most}, not {value!r}")
    return share


def _read_divisions(key: str, value: str, _: int) -> tuple[int, ...]:
    """`4`, or `[256:1,512:2,>:8]`: intervals in MiB, each a power of two, with their divisions.

    The first interval's divisions also hold below it, `>` fills everything above the last one.
    """
    if not value.startswith("["):
        return (_read_power_of_two(value, zero_allowed=False),) * NUM_ROUNDUP_INTERVALS
    if not value.endswith("]"):
        raise UsageError(f"{key} has no closing bracket in {value!r}")
    divisions = [0] * NUM_ROUNDUP_INTERVALS
    last = -1
    for number, entry in enumerate(_split_at_commas(value[1:-1])):
        bound, __, count = entry.partition(":")
        divided = _read_power_of_two(count, zero_allowed=True)
        if bound == ">":
            start = max(last, 0) + 1
            divisions[start:] = [divided] * (NUM_ROUNDUP_INTERVALS - start)
            continue
        last = _read_power_of_two(bound, zero_allowed=False).bit_length() - 1
        last = min(last, NUM_ROUNDUP_INTERVALS - 1)
        if number == 0:
            divisions[:last] = [divided] * last
        divisions[last] = divided
    return tuple(divisions)


def _read_power_of_two(value: str, *, zero_allowed: bool) -> int:
    number = _whole(value)
    if number is None or number & (number - 1) or (number == 0 and not zero_allowed):
        raise UsageError(
            f"roundup_power2_divisions counts in powers of two (4, or [256:1,512:2,>:8]), "
            f"not {value!r}"
        )
    return number


# Key -> the field, and what reads its value: given the key, the value and a large segment's MiB.
_READERS: dict[str, tuple[str, Callable[[str, str, int], object]]] = {
    "expandable_segments": ("expandable_segments", _read_switch),
    "max_split_size_mb": ("max_split_bytes", _read_mib),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _read_mib),
    "large_segment_size_mb": ("large_segment_bytes", _read_mib),
    "garbage_collection_threshold": ("garbage_collection_threshold", _read_share),
    "roundup_power2_divisions": ("roundup_power2_divisions", _read_divisions),
    "per_process_memory_fraction": ("per_process_memory_fraction", _read_share),
}
