"""`planner advise`: the fastest ways to fit, from estimates only."""

from __future__ import annotations

from typing import Any

import click

from planner.cli.arguments import (
    MODEL_FLAGS,
    SEVERAL_FLAGS,
    SEVERAL_OPTIONS,
    detail_flag,
    given_fields,
    read_gpu_option,
    with_cost_options,
    with_options,
)
from planner.cli.command import Command
from planner.cli.output import print_json, say
from planner.cli.several import check_counts, link_of
from planner.core.collector import collect_once
from planner.core.schema.model import MAX_SIZE
from planner.estimation.arguments import read_setting
from planner.machine.hardware import Gpu
from planner.machine.hardware.fabric import find_fabric

_COUNT = click.IntRange(1, MAX_SIZE)


@click.command(
    cls=Command,
    examples=(
        'planner advise native:swin_tiny --batch-size 256 --gpu "RTX 3060"',
        "planner advise native:swin_tiny --memory 6GiB --keep compile,offload",
    ),
)
@click.argument("model")
@click.option("--gpu", metavar="NAME", help="A GPU of 'planner gpus'.")
@click.option("--memory", metavar="SIZE", help="Memory to fit into: 24GiB, 24GB.")
@click.option(
    "--batch-size",
    type=_COUNT,
    metavar="N",
    help="The micro-batch as it stands; each way keeps the images of its step.",
)
@click.option(
    "--images-per-step",
    "--global-batch",
    "global_batch",
    type=_COUNT,
    metavar="N",
    help="Images per optimizer step, on all GPUs.",
)
@click.option(
    "--keep",
    metavar="FIELD[,FIELD…]",
    multiple=True,
    help="Leave these fields as they are, or refuse changes of rounding, recipe or learning-rate.",
)
@click.option(
    "--allow",
    metavar="EFFECT[,EFFECT…]",
    multiple=True,
    help="Also try recipe (other optimizers, 8 bits) or adapters (train only a part).",
)
@click.option("--allocator", metavar="OPTIONS", help="Used in place of PYTORCH_ALLOC_CONF.")
@with_options(SEVERAL_FLAGS)
@with_cost_options
@with_options(MODEL_FLAGS)
@click.option(
    "--trace",
    "traced",
    is_flag=True,
    help="Trace what is not looked at without (compile, …), once: some minutes.",
)
@detail_flag
@click.option("--json", "as_json", is_flag=True, help="One object.")
def command(model: str, **given: Any) -> int:
    """Say how to train MODEL as fast as possible in a GPU's memory, before you launch it.

    Does it fit as it stands (bf16, or fp16 on a GPU without it, adamw, no checkpointing, not
    compiled; --set says otherwise)? If not: the fastest ways to make it fit, what each change
    saves and costs, and what the device waits for. Exit status 1 where nothing fits.
    """
    collect_once()
    of_model, of_setting = given_fields({"model": model, **given}, tuple(SEVERAL_OPTIONS))
    check_counts(of_setting)
    gpu, link = read_gpu_option(given["gpu"]), given["link"]
    if of_setting.get("world_size", "1") != "1":
        link = _link(link, of_setting, gpu)
    elif link is not None:  # of the GPUs that advice adds
        find_fabric(gpu, 1, link)
    overrides: dict[str, Any] = {**of_model, **of_setting}
    from planner.advice.advising import advise

    advice = advise(
        model,
        gpu=gpu,
        memory_bytes=given["memory"],
        batch_size=given["batch_size"],
        global_batch=given["global_batch"],
        keep=_words(given["keep"]),
        allow=_words(given["allow"]),
        allocator=given["allocator"],
        link=link,
        epochs=given["epochs"],
        images_per_epoch=given["images_per_epoch"],
        price_per_hour=given["price_per_hour"],
        traced=given["traced"],
        **overrides,
    )
    if given["as_json"]:
        print_json(advice)
    else:
        from planner.report.advice import advice_answer
        from planner.report.text import parts_text

        say(parts_text(advice_answer(advice), given["detail"]))
    return 0 if advice.recommended is not None else 1


def _link(text: str | None, of_setting: dict[str, str], gpu: Gpu | None) -> str | None:
    """The link of several GPUs, as `planner estimate` takes it."""
    spread = {f: of_setting[f] for f in SEVERAL_OPTIONS.values() if f in of_setting}
    return link_of(text, [read_setting(spread, {})], gpu)


def _words(said: tuple[str, ...]) -> list[str]:
    return [word for text in said for word in text.split(",") if word.strip()]
