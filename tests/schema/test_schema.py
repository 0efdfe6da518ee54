"""What a person may say of a model and a setting, of a size and a duration, and where it ends."""

from __future__ import annotations

from typing import Any

import pytest

from planner.core.errors import UsageError, shorten, unknown_name
from planner.core.schema import SwinConfig, TrainSetting, parse
from planner.core.schema.model import MAX_SIZE
from planner.core.units import format_bytes, parse_bytes, parse_percent, parse_seconds

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"image_size": ","}, "image_size: give a number"),
        ({"depths": "x"}, "depths: give a number"),
        ({"num_heads": ""}, "num_heads: give a number"),
        ({"window_size": " , "}, "window_size: give a number"),
        ({"pretrained_window_size": ","}, "pretrained_window_size: give a number"),
        ({"depths": "100000000,2,6,2"}, "1000"),
        ({"depths": (1,) * 17, "num_heads": (1,) * 17}, "16"),
        ({"embed_dim": MAX_SIZE + 1}, "1048576"),
        ({"image_size": 10**5000}, "too large to show"),
        ({"mlp_ratio": 0.001}, "mlp_ratio 0.001 leaves the first stage's MLP no channel"),
        ({"mlp_ratio": INF}, "mlp_ratio"),
        ({"mlp_ratio": NAN}, "mlp_ratio"),
        ({"mlp_ratio": 1e300}, "mlp_ratio"),
        ({"drop_path_rate": NAN}, "drop_path_rate"),
        ({"version": "3"}, "version"),
        ({"name": "swin\nimport os"}, "one line"),
        ({"name": "\x1b[31mred"}, "one line"),
        ({"name": "x" * 201}, "200"),
        ({3: 4}, "3: no such field"),
    ],
)
def test_what_is_no_model_is_said_in_the_fields_own_name(fields: dict[Any, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(SwinConfig, fields, "swin.yaml")
    assert said in str(caught.value)
    assert len(str(caught.value)) < 500
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize("field", ["batch_size", "accumulate", "world_size", "lora_rank",
                                   "frozen_stages"])  # fmt: skip
def test_no_size_of_a_setting_is_without_bound(field: str) -> None:
    assert parse(TrainSetting, {field: MAX_SIZE}, "the setting")
    with pytest.raises(UsageError, match=f"{field}: .*{MAX_SIZE}"):
        parse(TrainSetting, {field: MAX_SIZE + 1}, "the setting")


@pytest.mark.parametrize(
    "fields",
    [
        {"checkpointing": "stages:" + "9" * 5000},
        {"checkpointing": "blocks\n"},
        {"optimizer": "adamw\n"},
        {"checkpointing": "stages:١"},
    ],
)
def test_a_setting_is_written_as_it_is_read(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        parse(TrainSetting, fields, "the setting")


def test_a_value_is_shown_short_and_escaped() -> None:
    assert shorten("a\x1b[0m") == r"'a\x1b[0m'"
    assert len(shorten("x" * 10_000)) < 130
    assert "too large" in shorten(10**5000)


def test_a_name_of_another_type_is_unknown() -> None:
    near = str(unknown_name("model", "swin_tin", ("swin_tiny", "swin_t", "swin_tine")))
    assert "Did you mean 'swin_tiny', 'swin_tine' or 'swin_t'?" in near
    assert "unknown trainer None" in str(unknown_name("trainer", None, ("timm",)))


@pytest.mark.parametrize("text", ["9" * 400 + "GiB", "0B", "0.1B", "2EiB", "99999999TiB", "-1GiB",
                                  "", "nanGiB", "24GiB\nx"])  # fmt: skip
def test_a_memory_that_nobody_has_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["9" * 400 + "h", "", "-5s", "nan", "inf", "1y", "10", "1h30"])
def test_a_duration_that_nobody_waits_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_seconds(text)


@pytest.mark.parametrize("text", ["nan", "inf", "-1%", "100%", "1", ""])
def test_a_share_is_below_one(text: str) -> None:
    with pytest.raises(UsageError):
        parse_percent(text)


def test_sizes_and_durations_are_read() -> None:
    assert parse_bytes(" 1.5 GiB ") == 3 * 1024**3 // 2
    assert parse_bytes("24GB") == 24 * 10**9
    assert parse_seconds("1h30m") == 5400
    assert parse_percent("5%") == 0.05
    assert format_bytes(parse_bytes("1024TiB")) == "1024.00 TiB"
