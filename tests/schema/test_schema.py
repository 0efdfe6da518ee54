"""What a person may say of a model and a setting, of a size and a duration, and where it ends."""

import json
import re
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import planner.core.errors as vocabulary
from planner.cli import main
from planner.core.errors import UsageError, find_word, shorten, unknown_name
from planner.core.schema import FactoryModel, SwinConfig, TrainSetting, parse
from planner.core.schema.model import MAX_SIZE
from planner.core.schema.setting import OPTIMIZER_FAMILIES, foreign_options
from planner.core.units import format_bytes, parse_bytes, parse_percent, parse_seconds
from planner.estimation.arguments import ALL_FIELDS, MAX_NEAR, unknown_field
from planner.estimation.estimate import estimate

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"image_size": ","}, "image_size: give a number"),
        ({"depths": "x"}, "depths: give a number"),
        ({"depths": "100000000,2,6,2"}, "equal to 1000 "),
        ({"depths": (1,) * 17, "num_heads": (1,) * 17}, "num_heads: Tuple should have at most 16"),
        ({"embed_dim": MAX_SIZE + 1}, "equal to 1048576"),
        (
            {"image_size": 10**5000},
            "too large to show)\n  image_size.1",
        ),
        ({"mlp_ratio": 0.001}, "mlp_ratio 0.001 leaves the first stage's MLP no channel"),
        ({"mlp_ratio": INF}, "mlp_ratio"),
        ({"drop_path_rate": NAN}, "drop_path_rate"),
        ({"version": "3"}, "version"),
        ({"name": "\x1b[31mred"}, "one line"),
        ({"name": "x" * 201}, "200"),
        ({3: 4}, "3: no such field"),
        ({"window_size": 0}, "window_size: Input should be greater than or equal to 1 (got 0)"),
        ({"window_size": "seven"}, "window_size: Input should be a valid integer"),
    ],
)
def test_what_is_no_model_is_said_in_the_fields_own_name(fields: dict[Any, Any], said: str) -> None:
    """Once, whatever types a field may have."""
    with pytest.raises(UsageError) as caught:
        parse(SwinConfig, fields, "swin.yaml")
    assert said in str(caught.value)
    assert str(caught.value).count(said) == 1
    assert len(str(caught.value)) < 500
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        *((field, MAX_SIZE + 1, f"{field}: .*{MAX_SIZE}") for field in
          ("batch_size", "accumulate", "world_size", "lora_rank", "frozen_stages")),
        ("checkpointing", "stages:" + "9" * 5000, "checkpointing"),
        ("checkpointing", "blocks\n", "checkpointing"),
        ("checkpointing", "stages:١", "checkpointing"),
        ("checkpointing", "blocks:0", "blocks:every-2, selective"),
        ("checkpointing", "selective:2", "blocks:every-2, selective"),
        ("optimizer", "adamw\n", "optimizer"),
    ],
)  # fmt: skip
def test_a_value_that_no_setting_has_is_refused(field: str, value: object, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse(TrainSetting, {field: value}, "the setting")


def test_a_value_is_shown_short() -> None:
    assert len(shorten("x" * 10_000)) < 130
    assert "too large" in shorten(10**5000)


def test_a_name_of_another_type_is_unknown() -> None:
    near = str(unknown_name("model", "swin_tin", ("swin_tiny", "swin_t", "swin_tine"), "See all."))
    assert "Did you mean 'swin_tiny', 'swin_tine' or 'swin_t'?" in near
    assert "unknown trainer None" in str(unknown_name("trainer", None, ("timm",), "See all."))


@pytest.mark.parametrize(
    ("read", "texts"),
    [
        (parse_bytes, ["9" * 400 + "GiB", "0B", "0.1B", "2EiB", "99999999TiB", "-1GiB", "",
                       "nanGiB", "24GiB\nx"]),
        (parse_seconds, ["9" * 400 + "h", "", "-5s", "nan", "inf", "1y", "10", "1h30"]),
        (parse_percent, ["nan", "inf", "-1%", "100%", "1", ""]),
    ],
)  # fmt: skip
def test_what_is_no_memory_no_duration_and_no_share_is_refused(
    read: Callable[[str], object], texts: list[str]
) -> None:
    for text in texts:
        with pytest.raises(UsageError):
            read(text)


def test_sizes_and_durations_are_read() -> None:
    assert parse_bytes(" 1.5 GiB ") == 3 * 1024**3 // 2
    assert parse_bytes("24GB") == 24 * 10**9
    assert parse_seconds("1h30m") == 5400
    assert parse_percent("5%") == 0.05
    assert format_bytes(parse_bytes("1024TiB")) == "1024.00 TiB"


# Every fault of a configuration in one message, in the user's field names, one line each.


def faults_of(schema: type[BaseModel], **data: Any) -> list[str]:
    with pytest.raises(UsageError) as caught:
        parse(schema, data, "swin.yaml")
    headline, *lines = caught.value.message.splitlines()
    counted = "one fault" if len(lines) == 1 else f"{len(lines)} faults"
    assert headline == f"swin.yaml has {counted}:"
    return [line.strip() for line in lines]


def test_faults_of_fields_and_between_fields_come_together() -> None:
    assert faults_of(SwinConfig, drop_rate=2, depths=(2, 2), num_heads=(3, 6, 12), windw=7) == [
        "drop_rate: Input should be less than 1 (got 2)",
        "windw: no such field. Did you mean 'window_size'?",
        "num_heads has 3 entries and depths has 2",
    ]


def test_a_fault_between_fields_is_not_heard_of_a_field_at_fault() -> None:
    """num_heads is fine beside the depths that were meant, whatever they were."""
    (fault,) = faults_of(SwinConfig, depths="2,2,two", num_heads=(3, 6, 12))
    assert fault.startswith("depths.2: Input should be a valid integer")


def test_every_fault_between_fields_has_its_line() -> None:
    assert faults_of(SwinConfig, num_heads=(3, 6, 12, 25), image_size=2, window_size=(7, 7)) == [
        "window_size has 2 entries and depths has 4",
        "num_heads[3] = 25 does not divide the stage's 768 channels (embed_dim × 2^3)",
        "image_size 2x2 is smaller than one patch (patch_size 4)",
    ]


def test_a_side_stands_for_a_square_in_every_model() -> None:
    assert parse(FactoryModel, {"factory": "a:b", "image_size": 96}, "").image_size == (96, 96)
    assert parse(SwinConfig, {"image_size": "96x128"}, "").image_size == (96, 128)


# The levers of a setting and the fields that speak of several devices: what each may say, and what
# does not go together.


EXCLUDED: list[tuple[dict[str, Any], str, list[dict[str, Any]]]] = [
    (
        {"optimizer_in_backward": True}, "frees each gradient as soon as it is there",
        [{"accumulate": 2}, {"clip_grad": True}, {"precision": "fp16"},
         {"zero_grad_to_none": False}, {"world_size": 2}, {"parallelism": "ddp"},
         {"optimizer": "adamw-8bit"}],
    ),
    (
        {"offload_optimizer": "state"}, "copies each gradient to the host in backward",
        [{"optimizer": "adamw-8bit"}, {"optimizer_in_backward": True}, {"clip_grad": True},
         {"precision": "fp16"}, {"zero_grad_to_none": False}, {"world_size": 2},
         {"parallelism": "ddp"}],
    ),
    ({"offload_optimizer": "state-and-gradients"}, "gradients that are gone", [{"accumulate": 2}]),
    ({}, "compile is off", [{"compile_scope": "blocks"}, {"activation_memory_budget": 0.5}]),
    ({"offload": "activations"}, "chooses what is saved", [{"compile": "default"}]),
    ({"lora_targets": "all"}, "adds no adapters", [{}]),
    ({"parallelism": "zero1"}, "sends each weight as bytes", [{"memory_format": "channels_last"}]),
    ({"parallelism": "zero3"}, "have no elements between steps", [{"ema": True}]),
    ({"world_size": 8}, "cannot be split over 3 nodes", [{"nodes": 3}]),
    ({"parallelism": "ddp"}, "belongs to parallelism fsdp or hsdp", [{"fsdp_reshard": False}]),
    ({"parallelism": "hsdp", "world_size": 8}, "two machines or more", [{}, {"nodes": 8}]),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "said", "excluded"), EXCLUDED, ids=str)
def test_what_does_not_go_together_is_refused(
    fields: dict[str, Any], said: str, excluded: list[dict[str, Any]]
) -> None:
    """What the way out sets or omits, each by itself, is enough."""
    for other in excluded:
        asked = {**fields, **other}
        with pytest.raises(UsageError, match=said) as caught:
            parse(TrainSetting, asked, "the setting")
        way_out = caught.value.way_out
        mended = [{**asked, f: value} for f, value in re.findall(r"(\w+)=([\w-]+)", way_out)]
        for omitted in re.findall(r"(?:omit|or) (\w+)(?=[.,]| or )", way_out.lower()):
            mended.append({f: value for f, value in asked.items() if f != omitted})
        assert len(mended) == 1 + ("multiple of" not in way_out)
        for setting in mended:
            parse(TrainSetting, setting, "the setting")


def test_a_field_that_is_gone_says_what_there_is_instead() -> None:
    with pytest.raises(UsageError, match="planner emulate"):
        parse(TrainSetting, {"ddp_bucket_view": True}, "the setting")


def test_over_how_many_devices_weights_are_sharded() -> None:
    for fields, size in (
        ({"parallelism": "ddp"}, 1), ({"parallelism": "zero2"}, 1), ({"parallelism": "fsdp"}, 16),
        ({"parallelism": "zero3"}, 16), ({"parallelism": "hsdp", "nodes": 2}, 8),
    ):  # fmt: skip
        assert TrainSetting.model_validate({"world_size": 16, **fields}).shard_size == size


WORDS: dict[str, dict[str, str]] = json.loads(
    Path(vocabulary.__file__).with_name("vocabulary.json").read_text()
)
ALL = list(chain.from_iterable(answers.items() for answers in WORDS.values()))
# What some fields of ours ask for beside them.
BESIDE = {"compile_": {"compile": "default"}, "lora_targets": {"lora_rank": 4}}


def assignments(answer: str) -> Iterator[tuple[str, str]]:
    """Each FIELD=VALUE that an answer tells to write, with every value of a choice."""
    written = answer.partition(" (")[0]
    for field, values in re.findall(r"(?:^|--set )([a-z0-9_]+)=(\S+)", written):
        for value in values.split("|"):
            number = "64" if field == "image_size" else "4"
            yield field, {"N": number, "RATE": "0.1"}.get(value, value)


def test_no_word_is_written_twice_and_none_in_a_way_that_is_never_found() -> None:
    words = [word for word, _ in ALL]
    assert len(set(words)) == len(words)
    assert all(vocabulary._normalize(word) == word for word in words)
    optimizers = {value for _, answer in ALL for _, value in assignments(answer)}
    assert optimizers >= set(OPTIMIZER_FAMILIES), "each is a word of some library"


def test_every_answer_is_a_field_of_ours_or_says_why_there_is_none() -> None:
    for word, answer in ALL:
        found = list(assignments(answer))
        for field, value in found:
            schema = TrainSetting if field in TrainSetting.model_fields else SwinConfig
            data: dict[str, object] = {field: value}
            for prefix, beside in BESIDE.items():
                data |= beside if field.startswith(prefix) else {}
            if field in foreign_options("none"):
                data |= {"parallelism": "fsdp"}
            if {"hsdp", "nodes"} & {field, value} or data.get("parallelism") == "hsdp":
                data |= {"world_size": 8, "nodes": 4}
            parse(schema, data, word)
        if not found:
            assert answer.startswith("--") or answer.endswith("."), word
        if word in TrainSetting.model_fields:  # answers only for a value that is none
            assert found[0][0] == word


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("gradient_checkpointing", "True", "Write --set checkpointing=blocks."),
        ("gradient_checkpointing", "False", "checkpointing=blocks. Where it is off, omit it."),
        ("per_device_train_batch_size", "4", "Write --set batch_size=4."),
        ("optim", "adamw_bnb_8bit", "Write --set optimizer=adamw-8bit (torchao's"),
        ("optim", "unheard", "Write --set optimizer=adamw|adamw-fused|"),
        ("BetterTransformer", "true", "Write --set attention=sdpa"),
        ("torch_empty_cache_steps", "10", "does not lower the peak"),
    ],
)
def test_a_word_is_answered_with_ours(field: str, value: str, said: str) -> None:
    assert said in unknown_field(field, value, "--set ").way_out


def test_an_unknown_field_gets_a_few_near_ones() -> None:
    for field in ("zero_bucket", "batch", "qwopeiru"):
        said = str(unknown_field(field, "1"))
        assert sum(f"'{known}'" in said for known in ALL_FIELDS) <= MAX_NEAR
        assert "planner estimate MODEL --json" in said


def test_a_word_is_answered_as_a_field_an_option_and_a_value(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And what the answer says to write is then taken."""
    command = ["estimate", "native:swin_tiny"]
    for typed in (["--fp16"], ["--set", "fp16=1"], ["--precision", "16-mixed"]):
        assert main([*command, *typed]) == 2
        said = capsys.readouterr().err
        found = re.search(r"Write (?:(?:--set |--)?precision[= ])?(fp16)\b", said)
        assert found, said
        assert main([*command, "--precision", found[1]]) == 0
        assert "fp16" in capsys.readouterr().out
    with pytest.raises(UsageError, match=r"a word of transformers\. Write batch_size=8\."):
        estimate("native:swin_tiny", {"per_device_train_batch_size": 8})


def test_a_value_of_another_field_is_no_answer() -> None:
    assert find_word("lora") is not None
    with pytest.raises(UsageError) as raised:
        parse(TrainSetting, {"precision": "lora"}, "the setting")
    assert "lora_rank" not in str(raised.value)
