"""Files of a person's: whatever they hold, the answer is a value or one UsageError, and soon."""

import json
import os
from pathlib import Path

import pytest

from planner.core.errors import PlannerError, UsageError
from planner.core.files import (
    check_output,
    parse_json,
    parse_yaml,
    read_text,
    write_output,
    write_whole,
)
from planner.libraries.names import resolve_model
from planner.trainers.emission import read_result


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("deep.json", '{"depths": ' + "[" * 9000 + "]" * 9000 + "}", "nested too deep"),
        ("deep.yaml", "depths: " + "[" * 9000 + "]" * 9000, "nested too deep"),
        ("bomb.yaml", "a: &a [x, x]\ndepths: [*a, *a]", "holds an alias"),
        ("digits.json", '{"embed_dim": ' + "9" * 5000 + "}", "thousands of digits"),
        ("digits.yaml", "embed_dim: " + "9" * 5000, "thousands of digits"),
        ("broken.yaml", "embed_dim: [", "is not YAML"),
        ("list.yaml", "- 1", "holds no fields"),
        ("twice.yaml", "embed_dim: 48\nembed_dim: 96", "'embed_dim' occurs twice"),
        ("many.json", json.dumps({f"field{i}": 1 for i in range(3000)}), "and 2,980 more"),
        ("long.json", json.dumps({"x" * 10_000: 1}), "no such field"),
        ("large.json", "[" + " " * 300_000, "larger than 256.00 KiB"),
    ],
)
def test_a_hostile_model_file_is_one_short_error(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(UsageError, match=message) as caught:
        resolve_model(file)
    assert len(str(caught.value)) < 6000


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="there is no file without an end")
def test_a_file_without_an_end_is_not_read_to_it() -> None:
    with pytest.raises(UsageError, match="larger than"):
        read_result("/dev/zero")


def test_a_path_that_is_none_is_one_error() -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        resolve_model("a\0b.yaml")
    with pytest.raises(UsageError, match="cannot be read"):
        resolve_model("x" * 5000 + ".yaml")


@pytest.mark.parametrize("name", ["swin.json", "SWIN.JSON", "Swin.Yaml"])
def test_a_byte_order_mark_and_capitals_are_no_fault(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_text(json.dumps({"embed_dim": 48}), encoding="utf-8-sig")
    assert resolve_model(str(file)).embed_dim == 48  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("MODEL: {TYPE: [1]}", r"describes a \[1\] model"),
        ("MODEL: {TYPE: swin}\nBASE: ['other.yaml']", "BASE"),
        ("MODEL: {TYPE: swin, SWIN: 3}", "SWIN is a section"),
        ("MODEL: {TYPE: swin, SWIN: {1: 2, DEPTH: 3}}", "not supported: 1, DEPTH"),
        ("MODEL: {TYPE: swin, NUM_CLASSES: many}\nDATA: {DATASET: own}", "num_classes"),
    ],
)
def test_an_authors_file_of_other_types_is_one_error(
    tmp_path: Path, content: str, message: str
) -> None:
    file = tmp_path / "swin.yaml"
    file.write_text(content)
    with pytest.raises(PlannerError, match=message):
        resolve_model(str(file))


def test_nesting_within_reason_is_read() -> None:
    deep = "[" * 32 + "]" * 32
    assert json.dumps(parse_json(deep, "it")) == json.dumps(parse_yaml(deep, "it")) == deep


def test_what_is_written_is_whole_or_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    write_whole(file, "first\n")
    with pytest.raises(UnicodeEncodeError):
        write_whole(file, "half \ud800")
    assert read_text(file, 100) == "first\n"
    assert [found.name for found in tmp_path.iterdir()] == ["result.json"]
    before = os.umask(0)
    os.umask(before)
    assert file.stat().st_mode & 0o777 == 0o666 & ~before


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        (
            "folder.json",
            UsageError,
            r"folder.json' is a folder, and a trace is one file\.\nName a ",
        ),
        ("a.jsn", UsageError, r"a trace's file name ends in \.json or \.json\.gz, and .*a\.jsn'"),
        (".json", UsageError, r"ends in \.json or"),
        ("nowhere/a.json", PlannerError, r"the folder .*nowhere' does not exist"),
        ("x" * 300 + ".json", PlannerError, r"cannot be written: File name too long\.\n"),
        ("nul\0.json", PlannerError, "cannot be written: .*embedded null"),
    ],
)
def test_a_file_that_cannot_be_written_is_known_first(
    name: str, kind: type[PlannerError], message: str, tmp_path: Path
) -> None:
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(kind, match=message):
        write_output(check_output(tmp_path / name, "a trace", (".json", ".json.gz")), b"{}")
    assert [found.name for found in tmp_path.iterdir()] == ["folder.json"]
    whole = check_output(tmp_path / "A.JSON.GZ", "a trace", (".json", ".json.gz"))
    assert write_output(whole, b"{}").read_bytes() == b"{}"
