"""Figures of docs/levers.md are what its commands print, by the newest torch that was tried."""

import json
import shlex
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from planner.cli import cli
from planner.core.torch_version import NEWEST_TRIED, as_of
from planner.core.units import format_bytes

PAGE = (Path(__file__).parents[1] / "docs/levers.md").read_text(encoding="utf-8")
TEXT = " ".join(PAGE.split())
TECHNIQUES = (Path(__file__).parent / "techniques.md").read_text(encoding="utf-8")
ALLOCATOR = 'native:swin_tiny --batch-size 64 --gpu "RTX 3090" --allocator'
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
    return f"{found['throughput']['images_per_second']:,.0f}"


def assert_row(*cells: str) -> None:
    row = f"| {' | '.join(cells)} |"
    assert row in PAGE, row


TOTAL, SAVED = size("device_total_bytes"), size("saved_activation_bytes")


def pinned(found: Found) -> str:
    return size("pinned_host_bytes")(found) if found["pinned_host_bytes"] else "-"


def state(found: Found) -> str:
    return format_bytes(found["breakdown"]["optimizer_state"])


def total_and_rate(found: Found) -> tuple[str, str]:
    return TOTAL(found), rate(found)


# Of each table a command, and what it says in each of the columns; its rows by what is added.
TABLES: list[tuple[str, list[Callable[[Found], str]], dict[str, str]]] = [
    (
        'native:swin_base --batch-size 64 --gpu "RTX 4090"', [TOTAL, rate, SAVED, pinned],
        {"neither": "", "`--checkpointing blocks`": "--checkpointing blocks",
         "`--set offload=activations`": "--set offload=activations"},
    ),
    (
        'native:swin_base_384 --batch-size 32 --gpu "RTX 4090" --checkpointing',
        [SAVED, TOTAL, rate],
        {kind: kind for kind in ("none", "blocks:every-2", "blocks:6", "selective", "blocks")},
    ),
    (
        "timm:swin_large_patch4_window7_224 --batch-size 8 --gpu a100-sxm-80gb",
        [state, SAVED, TOTAL, rate],
        {f"`{typed}`".replace("--set ", "") if typed else "none": typed for typed in (
            "", "--set frozen_stages=2", "--set frozen_stages=3", "--set lora_rank=8",
            "--set lora_rank=8 --precision pure-bf16", "--set lora_rank=8 --checkpointing blocks",
        )},
    ),
    (
        "native:swin_tiny --gpu h100-sxm-80gb --batch-size 32", [rate],
        {"compiled block by block": "--compile default --set compile_scope=blocks",
         "not compiled": "", "compiled whole": "--compile default"},
    ),
]  # fmt: skip
ROWS = [
    first_of(*((typed, columns, *row) for row in rows.items())) for typed, columns, rows in TABLES
]


@pytest.mark.parametrize(("typed", "columns", "label", "more"), chain.from_iterable(ROWS))
def test_a_row_is_what_its_command_prints(
    typed: str, columns: list[Callable[[Found], str]], label: str, more: str
) -> None:
    found = estimated(f"{typed} {more}")
    assert_row(label, *(column(found) for column in columns))


def test_the_allocator_s_options() -> None:
    options = (
        "expandable_segments:True",
        "",
        "garbage_collection_threshold:0.8",
        "max_split_size_mb:128",
    )
    ways = [f"{ALLOCATOR} '{one}'" if one else ALLOCATOR.split(" --all")[0] for one in options]
    first, *others = (size("device_total_bytes")(estimated(way)) for way in ways)
    (plain,) = set(others)
    assert f"This Swin-T needs {first}, and {plain} with torch's defaults" in TEXT


FAMILIES = ("adamw-8bit", "adamw", "adamw-fused", "lion", "adafactor", "sgd")


@pytest.mark.parametrize("family", first_of(*FAMILIES))
def test_optimizers(family: str) -> None:
    typed = f"--gpu rtx-4090 --allocator expandable_segments:True --optimizer {family}"
    small, large = (estimated(f"native:swin_large {typed} --batch-size {n}") for n in (8, 64))
    state = f"{small['breakdown']['optimizer_state'] / 2**20:,.0f} MiB"
    assert_row(family, state, *total_and_rate(small), *total_and_rate(large))


def test_eight_bits_of_state_are_slow_with_small_batches() -> None:
    typed = "native:swin_tiny --batch-size 8 --gpu rtx-4090 --optimizer"
    slow, fast = (rate(estimated(f"{typed} {name}")) for name in ("adamw-8bit", "adamw"))
    assert f"Swin-T at batch 8 reaches {slow} images/s, with adamw {fast}" in TEXT


@pytest.mark.parametrize(("family", "batch"), first_of(("adamw-fused", 1), ("adamw", 1)))
def test_the_optimizer_in_backward(family: str, batch: int) -> None:
    typed = f"native:swin_large --batch-size {batch} --gpu rtx-4090 --set clip_grad=false "
    typed += f"--optimizer {family}"
    after, hooked = (
        total_and_rate(estimated(typed + way)) for way in ("", " --set optimizer_in_backward=true")
    )
    assert_row(f"batch {batch}, {family}", after[0], hooked[0], after[1], hooked[1])


def test_the_optimizer_in_host_memory() -> None:
    found = estimated(
        'native:swin_large --batch-size 1 --gpu "RTX 3060" --optimizer adamw-fused '
        "--set offload_optimizer=state-and-gradients"
    )
    total, pinned = (size(name)(found) for name in ("device_total_bytes", "pinned_host_bytes"))
    assert f"it needs {total}, and {pinned} of pinned host memory" in TEXT


def test_what_guides_recommend() -> None:
    whole = estimated("native:swin_large --batch-size 1 --precision fp32")
    live, total = (size(name)(whole) for name in ("peak_live_bytes", "device_total_bytes"))
    assert f"the step needs {live} alive and {total} of the device" in TECHNIQUES
    assert f"the step needs {total}" in TEXT
    typed = "native:swin_large --batch-size 1 --set clip_grad=false"
    plain, hooked = (
        size("peak_allocated_bytes")(estimated(typed + way))
        for way in ("", " --set optimizer_in_backward=true")
    )
    assert f"allocates {hooked} in place of {plain.removesuffix(' GiB')} at batch 1" in TECHNIQUES


@pytest.mark.release
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("compiled", ["off", "default"])
def test_eight_bit_matrix_products(precision: str, compiled: str) -> None:
    pytest.importorskip("torchao")
    recorded = "" if compiled == "off" else "--record"
    found = estimated(
        "timm:swin_tiny_patch4_window7_224 --batch-size 64 --gpu h100-sxm-80gb "
        f"--precision {precision} --compile {compiled} {recorded}"
    )
    assert_row(precision, compiled, TOTAL(found), SAVED(found), rate(found))
