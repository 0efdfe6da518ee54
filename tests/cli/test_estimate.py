"""`planner estimate` as it is typed: what it prints, and what it says of a mistake."""

import json
import re
import shlex
from typing import Any

import pytest
from click.testing import CliRunner, Result

from planner.cli import cli, main
from planner.core.errors import UsageError
from planner.report import text as terminal

A100 = ("--gpu", "a100-sxm-80gb")
MANY = ("native:swin_tiny", *A100, "--gpus")


def invoke(*arguments: str) -> Result:
    from planner.cli.estimate import command

    return CliRunner().invoke(command, list(arguments))


def rows(*arguments: str) -> list[dict[str, Any]]:
    found = json.loads(invoke(*arguments, "--json").stdout)
    return found if isinstance(found, list) else [found]


def test_several_values_are_one_row_per_combination(tiny: str) -> None:
    arguments = (tiny, "--batch-size", "2,4", "--checkpointing", "none,blocks:1,stages:0,1,blocks")
    found = json.loads(invoke(*arguments, "--json").stdout)
    assert [(f["setting"]["batch_size"], f["setting"]["checkpointing"]) for f in found] == [
        (2, "none"), (2, "blocks:1"), (2, "stages:0,1"), (2, "blocks"),
        (4, "none"), (4, "blocks:1"), (4, "stages:0,1"), (4, "blocks"),
    ]  # fmt: skip
    table = invoke(*arguments).stdout
    assert table.count("stages:0,1") == 2


@pytest.mark.parametrize(
    "typed",
    [
        ("--gpu", "rtx 3090"),
        ("--memory", "2GiB", "--batch-size", "2,4", "--checkpointing", "none,blocks"),
        ("--gpu", "a100-sxm-80gb", "--gpus", "1,2", "--allocator", "expandable_segments:True"),
        ("--gpu", "t4", "--max-batch", "--precision", "fp16", "--set", "depths=1,1"),
    ],
    ids=" ".join,
)
def test_a_first_screen_is_one_and_its_next_step_runs(
    tiny: str, typed: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "WIDTH", 80)
    text = invoke(tiny, *typed).stdout.rstrip()
    assert len(text.splitlines()) < 24
    command = text.partition("\nNext:\n  ")[2].partition("\n\n")[0].partition("\n--detail")[0]
    assert CliRunner().invoke(cli, shlex.split(command)[1:]).exit_code == 0


def test_set_reaches_fields_of_model_and_setting(tiny: str) -> None:
    found = json.loads(
        invoke(tiny, "--set", "embed_dim=48", "--set", "accumulate=3", "--set",
               "depths=1,1", "--json").stdout
    )  # fmt: skip
    assert found["model"]["embed_dim"] == 48
    assert found["model"]["depths"] == [1, 1]
    assert found["setting"]["accumulate"] == 3


def test_the_largest_batch_is_per_precision_and_checkpointing(tiny: str) -> None:
    shallow = (tiny, "--set", "depths=1,1", "--max-batch", "--memory", "1GiB")
    found = json.loads(invoke(*shallow, "--precision", "bf16", "--json").stdout)
    by_kind = {(f["precision"], f["checkpointing"]): f["largest_batch_size"] for f in found}
    assert set(by_kind) == {("bf16", "none"), ("bf16", "blocks")}
    assert by_kind["bf16", "none"] < by_kind["bf16", "blocks"]


def test_the_batch_that_surely_fits_comes_first_and_is_what_goes_on(tiny: str) -> None:
    """It named one that fits by a hair as the largest, and handed that on."""
    text = invoke(
        tiny, "--set", "depths=1,1", "--max-batch", "--gpu", "t4", "--memory", "1GiB"
    ).stdout
    found = re.match(r"Surely fits: batch (\d+) \(.*, the fastest\). Up to (\d+) probably", text)
    assert found is not None, text
    sure, most = map(int, found.groups())
    assert sure < most
    assert f"--batch-size {sure} " in text.partition("Next:")[2]
    command = shlex.split(text.partition("Next:\n")[2].partition("\n\n")[0].partition("\n--")[0])
    assert command[1] == "advise"
    row = rows(tiny, *(w for w in command[3:]))[0]
    assert row["uncertainty"]["high_bytes"] <= row["budget_bytes"]


def test_a_sharding_that_is_no_faster_within_the_error_stands_behind_ddp() -> None:
    text = invoke(*MANY, "1,8", "--batch-size", "64", "--parallelism", "fsdp,ddp").stdout
    said = " ".join(text.split())
    assert re.match(
        r"The \w+ that fits is 8 gpus, ddp: .* Equal within the error: 8 gpus, fsdp", said
    )
    assert "--gpus 8 --parallelism ddp" in said.partition("Next:")[2]


def test_the_allocators_options_are_honoured_whatever_is_asked(tiny: str) -> None:
    """They were dropped unsaid by several GPUs and by --max-batch."""
    ways = ((), ("--allocator", "expandable_segments:True"))
    largest = ("--max-batch", "--gpu", "t4", "--precision", "fp16", "--checkpointing", "none",
               "--set", "depths=1,1")  # fmt: skip
    for asked in (largest, ("--gpu", "t4,rtx-3090")):
        plain, spared = (invoke(tiny, *asked, *way, "--json").stdout for way in ways)
        assert plain != spared


def test_decimal_and_binary_sizes_are_said_back(tiny: str) -> None:
    assert "24GB is 22.35 GiB (24,000,000,000 bytes)" in invoke(tiny, "--memory", "24GB").stdout
    assert "24GiB is 24.00 GiB" in invoke(tiny, "--memory", "24GiB").stdout
    more = invoke(tiny, "--memory", "48GiB", "--gpu", "3090").stdout
    assert "bytes), and GeForce RTX 3090 24 GB has 23.56 GiB." in more


def test_several_gpus_without_a_parallelism_run_ddp_and_it_is_said(tiny: str) -> None:
    text = invoke(tiny, *A100, "--gpus", "1,2,8").stdout
    assert "\nSeveral GPUs without --parallelism run ddp.\n" in text
    assert "run ddp" not in invoke(tiny, *A100, "--gpus", "2", "--parallelism", "ddp").stdout


def test_a_global_batch_is_split_over_gpus_and_micro_batches(tiny: str) -> None:
    found = rows(tiny, *A100, "--gpus", "1,2,4", "--global-batch", "64", "--accumulate", "2")
    assert [f["setting"]["batch_size"] for f in found] == [32, 16, 8]
    assert {f["scaling"]["global_batch"] for f in found} == {64}


def test_some_gpus_are_ranked_and_the_fastest_that_fits_is_the_answer(tiny: str) -> None:
    text = invoke(tiny, "--gpu", "t4,RTX 3090, h100 sxm", "--batch-size", "4096").stdout
    assert text.startswith("The fastest that fits is h100-sxm-80gb, bf16: ")
    rows = [line.split()[0] for line in text.splitlines() if " yes " in line]
    assert rows == ["h100-sxm-80gb", "rtx-3090", "t4"]
    alike = invoke(tiny, "--gpu", "h100 sxm,h200 sxm").stdout
    said = " ".join(alike.split())
    assert said.startswith("2 of 2 are equally fast, as they wait for the host: ")
    assert "Compare them at a larger --batch-size. The first, h" in said
    small = invoke("native:swin_large", "--batch-size", "512", "--gpu", "t4,v100-sxm-16gb").stdout
    assert small.startswith("None fits: ")
    assert "Next:\n  planner advise native:swin_large --batch-size 512 " in small


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["native:swin_tiny", "--max-batch"], 1, "--memory"),
        (["native:swin_tiny", "--fresh"], 2, "--fresh is for what is recorded"),
        (["native:swin_tiny", "--gpu", "all", "--memory", "1GiB"], 2, "by its own memory"),
        (["native:swin_tiny", "--max-batch", "--batch-size", "8"], 2, "is what --max-batch finds"),
        (["native:swin_tiny", "--gpu", "t4", "--gpu", "l4"], 2, "--gpu is typed twice"),
        (["train.py"], 2, "planner emulate --gpu NAME -- python train.py"),
        (["resnet50"], 2, "Did you mean timm:resnet50 or torchvision:resnet50?"),
        ([*MANY, "3", "--global-batch", "64"], 2, "split into 3 equal parts"),
        ([*MANY, "2", "--global-batch", "64", "--batch-size", "8"], 2, "Give one of the two"),
        ([*MANY, "1", "--link", "pcie4"], 2, "joins several GPUs, and there is one"),
        ([*MANY, "2", "--link", "pcie6"], 2, "unknown link 'pcie6'. Did you mean 'pcie"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else None,
)
def test_a_mistake_is_answered_in_a_few_lines_without_a_traceback(
    capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, said: str
) -> None:
    assert main(["estimate", *arguments]) == status
    out, err = capsys.readouterr()
    assert said in err
    assert "Traceback" not in err
    assert out == ""


def test_a_fault_of_a_field_names_the_option_that_was_typed(tiny: str) -> None:
    for typed, said in (("--gpus 0", "--gpus"), ("--batch-size 0", "--batch-size"),
                        ("--set world_size=0", "world_size")):  # fmt: skip
        found = invoke(tiny, *typed.split()).exception
        assert isinstance(found, UsageError)
        assert f"\n  {said}: Input should be" in found.message
