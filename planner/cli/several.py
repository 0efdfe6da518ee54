"""Rows of a grid that are spread over devices, as they are typed."""

from __future__ import annotations

import re
from collections.abc import Sequence

from planner.cli.output import tell
from planner.core.errors import UsageError, shorten
from planner.core.schema import TrainSetting
from planner.core.schema.distribution import PARALLELISMS, owners
from planner.estimation.arguments import share_of
from planner.machine.hardware import Gpu
from planner.machine.hardware.fabric import find_fabric, usual_link

Row = dict[str, str]


def spread_rows(rows: Sequence[Row], global_batch: str | None) -> list[Row]:
    """`rows` with what their number of devices means: several without a parallelism run ddp; where
    there are several counts, one device runs alone. A row has the options of its own parallelism,
    and its share of a global batch. Raises UsageError."""
    counts = {row.get("world_size", "1") for row in rows}
    kinds = {row.get("parallelism", "") for row in rows}
    found: list[Row] = []
    for row in rows:
        made = dict(row)
        several = made.get("world_size", "1") != "1"
        if several:
            made.setdefault("parallelism", "ddp")
        elif len(counts) > 1:
            made |= {"parallelism": "none", "nodes": "1"}
        if len(counts) > 1 or len(kinds) > 1:
            made = _own_options(made)
        if global_batch is not None:
            made = _share(made, global_batch)
        if made not in found:
            found.append(made)
    return found


def check_counts(row: Row) -> None:
    """Raises UsageError where `--gpus` or `--nodes` of a row is not one count."""
    _count("--gpus", row.get("world_size", "1"))
    _count("--nodes", row.get("nodes", "1"))


def _own_options(row: Row) -> Row:
    kind = row.get("parallelism", "none")
    return {
        field: value
        for field, value in row.items()
        if kind in owners(field) or kind not in PARALLELISMS
    }


def _share(row: Row, global_batch: str) -> Row:
    if "batch_size" in row:
        raise UsageError(
            "--batch-size and --global-batch say the same thing twice.",
            "Name the images of each device, or those of all together.",
        )
    counts = (
        _count(*named) for named in (
            ("--global-batch", global_batch),
            ("--gpus", row.get("world_size", "1")),
            ("--accumulate", row.get("accumulate", "1")),
        )
    )  # fmt: skip
    return {**row, "batch_size": str(share_of(*counts))}


def _count(option: str, text: str) -> int:
    is_number = re.fullmatch(r"\s*[0-9]{1,12}\s*", text)
    if not is_number or not int(text):
        raise UsageError(
            f"{option} takes a whole number from 1 on, not {shorten(text)}.",
            f"For example {option} 8.",
        )
    return int(text)


def link_of(text: str | None, settings: Sequence[TrainSetting], gpu: Gpu | None) -> str | None:
    """The link that was named; else the file of one that was measured between such GPUs here, which
    is told; None where it is what the GPU usually has. Raises UsageError."""
    check_link(text, settings, gpu)
    most = max((setting.devices_per_node for setting in settings), default=1)
    if text is not None or gpu is None or most < 2:
        return text
    from planner.machine.links.kept import kept_link

    path = kept_link(gpu, most)
    if path is None or "," in str(path):  # a comma parts two links
        usual_link(gpu)
        return None
    tell(f"The link between GPUs is what was measured here: {path}")
    return str(path)


def check_link(text: str | None, settings: Sequence[TrainSetting], gpu: Gpu | None) -> None:
    """Raises UsageError where a link that was named joins nothing, or cannot be."""
    if text is None:
        return
    if gpu is None:
        raise UsageError("--link is for time, which needs a GPU.", "Name one with --gpu.")
    if all(setting.world_size == 1 for setting in settings):
        raise UsageError(
            f"--link {text} joins several GPUs, and there is one.", "Say how many with --gpus."
        )
    for setting in settings:
        find_fabric(gpu, setting.nodes, text, setting.devices_per_node)
