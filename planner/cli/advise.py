"""`planner advise`: the fastest ways to train within a GPU's memory, before the launch."""

from typing import Any

from planner.cli.options import Fields, Printed, argument, of_schema, option, reads, switch
from planner.cli.rows import RECORDING, Costed, OnDevice, check_link, parse_gpu, refuse_several
from planner.cli.show import answer
from planner.core.schema import TrainSetting, parse
from planner.core.terminal import collect_nothing
from planner.estimation.arguments import read_setting
from planner.machine.hardware.fabric import find_fabric


class AdviseRequest(Costed, OnDevice, Printed):
    """The request of `planner advise`."""

    model: str = argument("MODEL", "models")
    fields: Fields = of_schema("one")
    gpu: str | None = option("A GPU of 'planner gpus'.", "NAME", "Device", values="gpus")
    keep: tuple[str, ...] = option(
        "Leave these fields as they are, or refuse changes of rounding, recipe or learning-rate.",
        "FIELD[,FIELD…]", "What may change", default=(), values="kept",
    )  # fmt: skip
    allow: tuple[str, ...] = option(
        "Also try recipe (other optimizers, 8 bits) or adapters (train only a part).",
        "EFFECT[,EFFECT…]", "What may change", default=(), values="allowed",
    )  # fmt: skip
    recorded: bool = switch("Record what is not tried without (compile), once: minutes.",
                            "--record", RECORDING)  # fmt: skip


@reads(AdviseRequest)
def command(request: AdviseRequest) -> int:
    """Say how to train MODEL as fast as possible in a GPU's memory, before you launch it.

    Does it fit as it stands (bf16, or fp16 on a GPU without it, adamw, no checkpointing, not
    compiled, unless options say otherwise)? If not: the fastest ways to make it fit, what each
    change does to memory and time, and what the GPU waits for. Each way keeps the images of a step.
    An option has one value: 'planner estimate' compares several. Exit status 1 where nothing fits.

    Examples:
      planner advise native:swin_tiny --batch-size 256 --gpu "RTX 3060"
      planner advise native:swin_tiny --memory 6GiB --keep compile,offload
    """
    collect_nothing()
    from planner.advice.advice import advise as find_advice
    from planner.report.advice import advice_answer

    refuse_several(request.fields, "advice", request.gpu)
    setting_fields: dict[str, Any] = dict(request.fields.setting)
    gpu, batch_size = parse_gpu(request.gpu), None
    if setting_fields.get("world_size", "1") != "1":
        check_link(request.link, [read_setting(setting_fields, {})], gpu)
    elif request.link is not None:  # the link between the GPUs that advice adds
        find_fabric(gpu, 1, request.link)
    if size := setting_fields.pop("batch_size", None):
        batch_size = parse(TrainSetting, {"batch_size": size}, "the setting").batch_size
    advice = find_advice(
        request.model, gpu=gpu, memory_bytes=request.memory, batch_size=batch_size,
        global_batch=request.global_batch, keep=_split_words(request.keep),
        allow=_split_words(request.allow), allocator=request.allocator, link=request.link,
        epochs=request.epochs, images_per_epoch=request.images_per_epoch, recorded=request.recorded,
        **{**request.fields.model, **setting_fields},
    )  # fmt: skip
    answer(request, advice, lambda: advice_answer(advice))
    return 0 if advice.recommended is not None else 1


def _split_words(texts: tuple[str, ...]) -> list[str]:
    return [word for text in texts for word in text.split(",") if word.strip()]
