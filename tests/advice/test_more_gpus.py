"""What `planner advise` says of more GPUs: twice as many, and weights shared among them."""

import re
from typing import Any

import pytest

from planner.advice.advising import Advice, advise
from planner.advice.ways import MoreGpus
from planner.cli import main
from planner.core.units import MIB
from planner.estimation.estimate import estimate
from tests.answers import advice_text
from tests.steps import TINY_FIELDS

SMALL = {**TINY_FIELDS, "library": "native"}
WISH: dict[str, Any] = {"gpu": "a100-sxm-80gb", "batch_size": 64}


def more_of(**wish: Any) -> tuple[MoreGpus, ...]:
    return advise(SMALL, **{**WISH, **wish}).more_gpus


def test_a_figure_is_that_of_estimate_for_the_same_setting() -> None:
    for more in more_of(world_size=2, parallelism="fsdp"):
        found = estimate(
            SMALL, gpu="a100-sxm-80gb", batch_size=more.batch_size, world_size=more.gpus,
            parallelism=more.parallelism,
        )  # fmt: skip
        assert more.device_total_bytes == found.device_total_bytes
        assert found.throughput is not None
        assert more.images_per_second == found.throughput.all_images_per_second
        assert found.throughput.communication is not None
        assert more.link == found.throughput.communication.link


def test_what_does_not_fit_alone_does_not_on_each_of_two() -> None:
    (more,) = more_of(gpu="rtx 3090", memory_bytes="600MiB", batch_size=2048)
    assert not more.fits
    assert more.images_per_second is None
    found = estimate(
        SMALL, gpu="rtx 3090", memory_bytes="600MiB", batch_size=more.batch_size,
        world_size=2, parallelism="ddp",
    )  # fmt: skip
    assert 600 * MIB < more.device_total_bytes <= found.device_total_bytes


def test_a_gpu_whose_link_is_not_known_has_no_such_line() -> None:
    assert more_of(gpu="gh200") == ()
    found = advise(SMALL, gpu="gh200", world_size=2, parallelism="fsdp", link="nvlink-h100")
    assert found.more_gpus[0].link == "nvlink-h100"
    assert "--link nvlink-h100" in (found.recommended or found.plain).command
    one = advise(SMALL, gpu="a100-sxm-80gb", batch_size=16, link="pcie4")
    assert one.more_gpus[0].link == "pcie4"
    assert "--link" not in (one.recommended or one.plain).command, "estimate refuses it there"


def text_of(advice: Advice) -> str:
    return " ".join(advice_text(advice).split())


def test_what_a_second_gpu_does_in_place_of_another_lever_is_said() -> None:
    """Two GPUs that shard: 64 images fit in so little only with some lever, 32 on each without."""
    wish = {"world_size": 2, "parallelism": "fsdp", "gpu": "a100-sxm-80gb", "link": "nvlink-a100"}
    plain = estimate(SMALL, batch_size=64, **wish)
    half = estimate(SMALL, batch_size=32, **{**wish, "world_size": 4})
    between = (plain.device_total_bytes + half.device_total_bytes) // 2
    advice = advise(SMALL, batch_size=64, memory_bytes=between, **wish)
    (more,) = advice.more_gpus
    assert not advice.plain.estimate.fits
    assert more.fits
    assert more.in_place_of
    assert "4 fsdp over nvlink-a100 32 yes" in " ".join(text_of(advice).split())


def test_the_command_takes_gpus_and_says_what_each_reaches(
    tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("advise", tiny, "--gpu", "a100-sxm-80gb", "--gpus", "2", "--parallelism", "fsdp")
    assert main([*arguments, "--batch-size", "16"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    found = re.search(r"on each of 2 GPUs, .*; ([\d,]+) images/s on 2 GPUs \(([\d,]+) each\)", said)
    assert found is not None, said
    of_all, each = (int(rate.replace(",", "")) for rate in found.groups())
    assert abs(of_all - 2 * each) <= 1
