"""Words of other libraries, and ours for them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

import planner.core.errors as vocabulary
from planner.cli import main
from planner.core.errors import UsageError, find_word
from planner.core.schema import SwinConfig, TrainSetting, parse
from planner.core.schema.setting import foreign_options
from planner.estimation.arguments import ALL_FIELDS, MAX_NEAR, unknown_field
from planner.estimation.estimate import estimate

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
    assert all(vocabulary._spelt(word) == word for word in words)


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
            if schema is SwinConfig:
                data |= {"library": "native"}
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
