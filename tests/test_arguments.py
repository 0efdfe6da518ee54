"""The Python interface with arguments of other types and sizes than it is for."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner import TrainSetting, advise, emit_setting, emulate, estimate
from planner.core.errors import UsageError
from planner.core.schema.model import MAX_SIZE
from tests.steps import TINY, TINY_FIELDS


def test_the_largest_sizes_are_counted_in_order_and_do_not_fit() -> None:
    """Requests beyond 2^60 units: reserved bytes were less than live ones, and it fitted."""
    found = estimate(
        "native:swin_tiny", image_size=MAX_SIZE, in_channels=MAX_SIZE, batch_size=MAX_SIZE,
        gpu="rtx 3090", attention="eager",
    )  # fmt: skip
    assert found.fits is False
    assert found.peak_live_bytes <= found.peak_allocated_bytes <= found.peak_reserved_bytes


def test_what_people_naturally_pass_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "tiny.json"
    file.write_text(json.dumps(TINY_FIELDS))
    expected = estimate(TINY, batch_size=4, memory_bytes=24 << 30)
    assert estimate(file, batch_size=4, memory_bytes=24 << 30) == expected
    assert estimate(TINY_FIELDS, batch_size=4, memory_bytes=24 << 30) == expected
    assert estimate(TINY, {"batch_size": 4}, memory_bytes="24GiB") == expected
    assert estimate(TINY, batch_size=4, memory_bytes=np.int64(24 << 30)) == expected
    assert estimate(TINY, {"batch_size": 4}, gpu="t4").setting.precision == "fp16"
    with_text = estimate(TINY, batch_size=4, allocator="expandable_segments:True")
    assert with_text.device_total_bytes <= expected.device_total_bytes


def test_several_devices_without_a_parallelism_run_ddp_as_on_the_command_line() -> None:
    """Communication was left out: 8 devices in Python were one that has no neighbours."""
    eight = estimate(TINY, gpu="t4", world_size=8)
    assert eight.setting.parallelism == "ddp"
    assert estimate(TINY, TrainSetting(precision="fp16"), gpu="t4", world_size=8) == eight
    sharded = estimate(
        TINY, TrainSetting(precision="fp16", parallelism="fsdp"), gpu="t4", world_size=8
    )
    assert sharded.setting.parallelism == "fsdp"
    assert estimate(TINY, gpu="t4", world_size="1").setting.parallelism == "none"
    assert repr(advise(TINY, gpu="t4", world_size=8, batch_size=4)).count("--parallelism ddp") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"model": None}, "a model is"),
        ({"model": {"embed_dims": 3}}, "embed_dims: no such field"),
        ({"setting": 4}, "a setting is"),
        ({"setting": {"batch": 4}}, "batch: no such field"),
        ({"gpu": 3090}, "a GPU is"),
        ({"memory_bytes": "24"}, "24GiB"),
        ({"memory_bytes": float("nan")}, "from 1 byte"),
        ({"memory_bytes": [1]}, "a number of bytes"),
        ({"allocator": 5}, "options are text"),
        ({"memory": "24GiB"}, "Write memory_bytes='24GiB'."),
        ({"gpus": 8}, "Write world_size=8, parallelism='ddp'."),
        ({"batchsize": 4}, "'batchsize': no such field of a model or a setting. Did you mean"),
    ],
)
def test_what_no_estimate_can_be_made_of_is_a_usage_error(
    arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        estimate(**{"model": TINY, **arguments})


def test_every_face_takes_a_model_by_its_name_and_words_as_the_command_does() -> None:
    named = emit_setting("native:swin_tiny", {"batch_size": 4}, "pytorch").text
    config = estimate("native:swin_tiny").model
    assert named == emit_setting(config, TrainSetting(batch_size=4), "pytorch").text
    wish = {"memory_bytes": "2GiB", "batch_size": 4}
    words = advise(TINY, keep="compile, attention", allow="recipe", **wish)  # type: ignore[arg-type]
    assert words == advise(TINY, keep=["compile", "attention"], allow=["recipe"], **wish)  # type: ignore[arg-type]


def test_a_command_is_a_list_of_words() -> None:
    for command in ("python train.py", []):
        with pytest.raises(UsageError, match=r"Write a list: \['python', 'train.py'\]"):
            emulate(command, gpu="rtx 3090")
