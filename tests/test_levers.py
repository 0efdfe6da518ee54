"""Figures of docs/levers.md are what its commands print, by the newest torch that was tried."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from planner.cli import cli
from planner.core.torch_version import NEWEST_TRIED, as_of
from planner.core.units import format_bytes

PAGE = (Path(__file__).parents[1] / "docs/levers.md").read_text(encoding="utf-8")
ALLOCATOR = 'native:swin_tiny --batch-size 64 --gpu "RTX 3090" --allocator'
OFFLOADED = 'native:swin_base --batch-size 64 --gpu "RTX 4090"'
IN_PARTS = ("none", "blocks:every-2", "blocks:6", "selective", "blocks")
COLUMNS = (
    "native:swin_base_384 --attention sdpa",
    "timm:swin_base_patch4_window12_384 --attention sdpa",
    "timm:swin_base_patch4_window12_384 --attention eager",
)
Found = dict[str, Any]


def estimated(typed: str) -> Found:
    with as_of(".".join(map(str, NEWEST_TRIED))):
        ended = CliRunner().invoke(cli, shlex.split(f"estimate {typed} --json"))
    assert ended.exit_code == 0, ended.output
    found: Found = json.loads(ended.stdout)
    return found


def size(name: str) -> Callable[[Found], str]:
    return lambda found: format_bytes(found[name])


def rate(found: Found) -> str:
    return f"{found['throughput']['images_per_second']:.0f}"


def kept_free(found: Found) -> str:
    return format_bytes(found["peak_reserved_bytes"] - found["peak_allocated_bytes"])


def assert_row(*cells: str) -> None:
    assert f"| {' | '.join(cells)} |" in PAGE


@pytest.mark.parametrize(
    ("label", "options"),
    [
        ("torch's defaults", ""),
        *(
            (f"`{option}`", option)
            for option in (
                "expandable_segments:True", "garbage_collection_threshold:0.8",
                "max_split_size_mb:128",
            )
        ),
    ],
)  # fmt: skip
def test_the_allocator_s_options(label: str, options: str) -> None:
    found = estimated(f"{ALLOCATOR} '{options}'" if options else ALLOCATOR.split(" --all")[0])
    total = size("device_total_bytes")(found)
    assert_row(label, size("peak_reserved_bytes")(found), kept_free(found), total)


@pytest.mark.parametrize(
    ("label", "options"),
    [
        ("nothing", ""),
        ("`--checkpointing blocks`", "--checkpointing blocks"),
        ("`--set offload=activations`", "--set offload=activations"),
        ("both", "--checkpointing blocks --set offload=activations"),
    ],
)
def test_activations_in_host_memory(label: str, options: str) -> None:
    found = estimated(f"{OFFLOADED} {options}")
    first = f"{size('device_total_bytes')(found)}, {rate(found)}"
    pinned = size("pinned_host_bytes")(found) if found["pinned_host_bytes"] else "-"
    assert_row(label, first, size("saved_activation_bytes")(found), pinned)


@pytest.mark.parametrize("checkpointing", IN_PARTS)
def test_blocks_in_parts(checkpointing: str) -> None:
    cells = []
    for column in COLUMNS:
        found = estimated(
            f'{column} --batch-size 32 --gpu "RTX 4090" --checkpointing {checkpointing}'
        )
        saved, total = (size(n)(found) for n in ("saved_activation_bytes", "device_total_bytes"))
        cells.append(f"{saved}, {total}, {rate(found)}")
    assert_row(checkpointing, *cells)
