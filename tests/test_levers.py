"""Figures of docs/levers.md are what its commands print, by the newest torch that was tried."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from itertools import product
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


def first_of(*cases: Any) -> list[Any]:
    """The first by default, the others in CI."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases[1:]]
    return [cases[0], *(pytest.param(*row, marks=pytest.mark.truth) for row in rows)]


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
    first_of(
        ("`expandable_segments:True`", "expandable_segments:True"),
        ("torch's defaults", ""),
        ("`garbage_collection_threshold:0.8`", "garbage_collection_threshold:0.8"),
        ("`max_split_size_mb:128`", "max_split_size_mb:128"),
    ),
)
def test_the_allocator_s_options(label: str, options: str) -> None:
    found = estimated(f"{ALLOCATOR} '{options}'" if options else ALLOCATOR.split(" --all")[0])
    total = size("device_total_bytes")(found)
    assert_row(label, size("peak_reserved_bytes")(found), kept_free(found), total)


@pytest.mark.parametrize(
    ("label", "options"),
    first_of(
        ("both", "--checkpointing blocks --set offload=activations"),
        ("nothing", ""),
        ("`--checkpointing blocks`", "--checkpointing blocks"),
        ("`--set offload=activations`", "--set offload=activations"),
    ),
)
def test_activations_in_host_memory(label: str, options: str) -> None:
    found = estimated(f"{OFFLOADED} {options}")
    first = f"{size('device_total_bytes')(found)}, {rate(found)}"
    pinned = size("pinned_host_bytes")(found) if found["pinned_host_bytes"] else "-"
    assert_row(label, first, size("saved_activation_bytes")(found), pinned)


@pytest.mark.parametrize("checkpointing", first_of(*IN_PARTS))
def test_blocks_in_parts(checkpointing: str) -> None:
    cells = []
    for column in COLUMNS:
        found = estimated(
            f'{column} --batch-size 32 --gpu "RTX 4090" --checkpointing {checkpointing}'
        )
        saved, total = (size(n)(found) for n in ("saved_activation_bytes", "device_total_bytes"))
        cells.append(f"{saved}, {total}, {rate(found)}")
    assert_row(checkpointing, *cells)


def total_and_rate(found: Found) -> str:
    return f"{size('device_total_bytes')(found)}, {rate(found)}"


SWINS = {"Swin-T": "native:swin_tiny", "Swin-L": "native:swin_large"}


FAMILIES = ("adamw-8bit", "adamw", "adamw-fused", "lion", "adafactor", "sgd")


@pytest.mark.parametrize(("label", "family"), first_of(*product(SWINS, FAMILIES)))
def test_optimizers(label: str, family: str) -> None:
    typed = f"{SWINS[label]} --gpu rtx-4090 --allocator expandable_segments:True"
    small, large = (
        estimated(f"{typed} --batch-size {batch} --optimizer {family}") for batch in (8, 64)
    )
    state = f"{small['breakdown']['optimizer_state'] / 2**20:.0f} MiB"
    assert_row(label, family, state, total_and_rate(small), total_and_rate(large))


@pytest.mark.parametrize(("label", "batch"), first_of(*product(SWINS, (1, 64))))
def test_the_optimizer_in_backward(label: str, batch: int) -> None:
    typed = f"{SWINS[label]} --batch-size {batch} --gpu rtx-4090 --set clip_grad=false --optimizer "
    cells = [
        total_and_rate(estimated(typed + family + way))
        for family in ("adamw", "adamw-fused")
        for way in ("", " --set optimizer_in_backward=true")
    ]
    assert_row(label, str(batch), *cells)


def test_the_optimizer_in_host_memory() -> None:
    found = estimated(
        'native:swin_large --batch-size 1 --gpu "RTX 3060" --optimizer adamw-fused '
        "--set offload_optimizer=state-and-gradients"
    )
    total, pinned = (size(name)(found) for name in ("device_total_bytes", "pinned_host_bytes"))
    assert f"a device total of {total}, and {pinned} of pinned host memory" in PAGE


@pytest.mark.parametrize(
    "options",
    first_of(
        "--set lora_rank=8 --set frozen_stages=2", "", "--set frozen_stages=2",
        "--set frozen_stages=3", "--set lora_rank=8", "--set lora_rank=8 --set lora_targets=all",
        "--set lora_rank=8 --precision pure-bf16", "--set lora_rank=8 --checkpointing blocks",
    ),
)  # fmt: skip
def test_adapters_and_frozen_stages(options: str) -> None:
    found = estimated(
        f"timm:swin_large_patch4_window7_224 --batch-size 8 --gpu a100-sxm-80gb {options}"
    )
    saved, total = (size(n)(found) for n in ("saved_activation_bytes", "device_total_bytes"))
    state = format_bytes(found["breakdown"]["optimizer_state"])
    assert_row(f"`{options}`" if options else "none", state, saved, total, rate(found))


@pytest.mark.parametrize(
    ("label", "options"),
    first_of(
        ("compiled block by block", "--compile default --set compile_scope=blocks"),
        ("eager", ""),
        ("compiled whole", "--compile default"),
    ),
)
def test_compilation_block_by_block(label: str, options: str) -> None:
    found = estimated(f"native:swin_tiny --gpu h100-sxm-80gb --batch-size 32 {options}")
    assert_row(label, f"{found['throughput']['images_per_second']:,.0f}")


def test_what_guides_recommend() -> None:
    whole = estimated("native:swin_large --batch-size 1 --precision fp32")
    live, total = (size(name)(whole) for name in ("peak_live_bytes", "device_total_bytes"))
    assert f"the step needs {live} alive and {total} of the device" in PAGE
    typed = "native:swin_large --batch-size 1 --set clip_grad=false"
    plain, hooked = (
        size("peak_allocated_bytes")(estimated(typed + way))
        for way in ("", " --set optimizer_in_backward=true")
    )
    assert f"allocates {hooked} in place of {plain.removesuffix(' GiB')} at batch 1" in PAGE


@pytest.mark.release
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("compiled", ["off", "default"])
def test_eight_bit_matrix_products(precision: str, compiled: str) -> None:
    pytest.importorskip("torchao")
    traced = "" if compiled == "off" else "--trace"
    found = estimated(
        "timm:swin_tiny_patch4_window7_224 --batch-size 64 --gpu h100-sxm-80gb "
        f"--precision {precision} --compile {compiled} {traced}"
    )
    total, saved = (size(n)(found) for n in ("device_total_bytes", "saved_activation_bytes"))
    rounded = f"{found['throughput']['images_per_second']:,.0f}"
    assert_row(precision, compiled, total, saved, rounded)
