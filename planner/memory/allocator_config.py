"""The options of PYTORCH_ALLOC_CONF for the CUDA caching allocator, read from text and written.

Keys and ranges are quoted from PyTorch's c10/core/AllocatorConfig.{h,cpp} and
c10/cuda/CUDAAllocatorConfig.h (torch 2.9 to 2.15). Options that few people set are not modelled: a
program on an emulated GPU has them, as its allocator is torch's own.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from planner.core.errors import UnsupportedError, UsageError, shorten, unknown_name
from planner.core.units import MIB

# In the order in which torch looks them up: the first one that is set wins, and torch reads no
# other (c10/cuda/CUDAAllocatorConfig.h of torch 2.15, `CUDAAllocatorConfig::instance`). The project
# writes the first: it hides the second, in which 2.9.1 ignores expandable_segments
# (pytorch/pytorch#183387; 2.13.0 and 2.15.0 take either, without a warning: run on 2026-11-23).
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
RECORDED_AS = "allocator_config"  # the key of a record's versions that holds the options
LARGE_SEGMENT_BYTES = 20 * MIB  # kLargeBuffer

_EXAMPLE = "Write it as in PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True,max_split_size_mb:128."
# Keys that torch accepts and that change host memory, locks or the time of an error: they have no
# effect on these statistics. Torch collects garbage only under a memory fraction; `…_by_class`
# (torch 2.15) is for streams that a program gives a class, as no training does.
_IGNORED_KEYS = frozenset({
    "garbage_collection_threshold",
    "release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register", "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb", "pinned_use_background_threads", "pinned_free_catch_all",
    "pinned_max_round_threshold_mb", "pinned_max_cached_size_mb",
    "graph_capture_record_stream_reuse", "throw_on_cudamalloc_oom",
    "expandable_segments_reserve_by_class",
})  # fmt: skip


@dataclass(frozen=True)
class AllocatorConfig:
    """The allocator's options; the defaults are torch's. Sizes are in bytes, None means no limit.

    `source` tells a person where the options come from; it decides nothing.
    """

    expandable_segments: bool = False
    max_split_bytes: int | None = None
    source: str = field(default="", compare=False)


def parse_allocator_config(text: str) -> AllocatorConfig:
    """Reads `expandable_segments:True,max_split_size_mb:128`, the syntax of PYTORCH_ALLOC_CONF (and
    of PYTORCH_CUDA_ALLOC_CONF). Raises UsageError with every fault, and UnsupportedError for an
    option that is not modelled, as a backend other than torch's own allocator."""
    options, faults = _split_options(text)
    values: dict[str, object] = {}
    for key, value in options:
        if key in _IGNORED_KEYS:
            continue
        try:
            if key in _READERS:
                field, read = _READERS[key]
                values[field] = read(key, value)
            elif key in _REFUSED:
                _refuse(key, value)
            else:
                valid_keys = [*_READERS, *_REFUSED, *_IGNORED_KEYS]
                raise unknown_name("allocator option", key, valid_keys, _EXAMPLE)
        except UsageError as error:
            faults.append(error.message)
    if faults:
        message = "; ".join(fault.removesuffix(".") for fault in faults)
        raise UsageError(message if message.endswith("?") else f"{message}.", _EXAMPLE)
    return AllocatorConfig(**values)  # type: ignore[arg-type]


def options_text(config: AllocatorConfig) -> str:
    """The options of `config` that differ from torch's defaults, as `parse_allocator_config` reads
    them; "" where none does."""
    default = AllocatorConfig()
    values = {key: getattr(config, name) for key, (name, _) in _READERS.items()}
    return ",".join(
        f"{key}:{value // MIB if type(value) is int else value}"
        for key, value in values.items()
        if value != getattr(default, _READERS[key][0])
    )


def environment_allocator(environment: Mapping[str, str]) -> AllocatorConfig | None:
    """The options that torch would read from `environment`; None where neither variable is set.

    Raises UsageError and UnsupportedError as `parse_allocator_config`, naming the variable.
    """
    variable = environment_options(environment)
    if variable is None:
        return None
    name, text = variable
    try:
        return replace(parse_allocator_config(text), source=f"{name}={text}")
    except (UsageError, UnsupportedError) as error:
        raise type(error)(f"{name}={text}: {error.message}", error.way_out) from error


def recorded_allocator(versions: Mapping[str, str]) -> AllocatorConfig | None:
    """The options that a measurement ran with, from its record's `versions`; None for the defaults.

    Raises UsageError and UnsupportedError as `parse_allocator_config`.
    """
    text = versions.get(RECORDED_AS)
    if text is None:
        return None
    return replace(parse_allocator_config(text), source=text)


def environment_options(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """(name, value) of the one variable that torch reads; None where it is empty or none is set.

    An empty variable hides those after it, as it does in torch.
    """
    name = next((name for name in VARIABLES if name in environment), None)
    return (name, environment[name]) if name and environment[name].strip() else None


@contextmanager
def set_environment_options(options: str | None) -> Iterator[None]:
    """Sets the allocator's `options` in the environment of this process, which its children
    inherit, until the block ends; None leaves the environment as it is."""
    if options is None:
        yield
        return
    original = {name: os.environ.pop(name) for name in VARIABLES if name in os.environ}
    os.environ[VARIABLES[0]] = options
    try:
        yield
    finally:
        del os.environ[VARIABLES[0]]
        os.environ.update(original)


def _split_options(text: str) -> tuple[list[tuple[str, str]], list[str]]:
    """The (key, value) pairs of the top level, and a fault for each part that is no such pair."""
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
    """The parts between the commas outside brackets. Empty parts are dropped, as in torch."""
    parts = [""]
    depth = 0
    for char in text:
        depth += (char == "[") - (char == "]")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part for part in parts if part]


# The keys that are not modelled, and what each does.
_REFUSED = {
    "backend": "leaves caching to the driver, whose rules are not published",
    "expandable_segments_reserve": "may end a segment early",
    "large_segment_size_mb": "takes other segments from the driver",
    "max_non_split_rounding_mb": "lets larger blocks serve a request",
    "per_process_memory_fraction": "lets torch run out of memory earlier",
    "roundup_power2_divisions": "rounds requests up",
}


def _refuse(key: str, value: str) -> None:
    if key == "backend" and value not in ("native", "cudaMallocAsync", "hipMallocAsync"):
        raise UsageError(f"backend is native or cudaMallocAsync, not {value!r}", "Leave it out.")
    if value != "native":
        raise UnsupportedError(
            f"{key}:{shorten(value, 40)} {_REFUSED[key]}, which is not modelled.",
            "Leave it out (--memory SIZE names a part of a device), or run the program under "
            "'planner emulate', whose allocator is torch's own.",
        )


def _read_switch(key: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise UsageError(f"{key} is True or False, not {value!r}", f"Write {key}:True.")
    return value == "True"


def _read_mib(key: str, value: str) -> int:
    """Whole MiB, although torch's option says mb; at least the size of a large segment."""
    is_number = value.isascii() and value.isdecimal() and len(value) <= 20
    number, minimum = int(value) if is_number else -1, LARGE_SEGMENT_BYTES // MIB
    if not minimum <= number < 2**64 // MIB:
        law = f"{key} is a whole number of MiB, {minimum} or more and under 2^44"
        raise UsageError(f"{law}, not {shorten(value, 40)}", f"For example {key}:512.")
    return number * MIB


# Key -> the field of AllocatorConfig, and the function that reads its value.
_READERS: dict[str, tuple[str, Callable[[str, str], object]]] = {
    "expandable_segments": ("expandable_segments", _read_switch),
    "max_split_size_mb": ("max_split_bytes", _read_mib),
}
