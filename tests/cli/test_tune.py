"""`planner tune` through the real command: real probes of a tiny Swin on the CPU, and bad input."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from planner.cli import main
from planner.cli.tune import _arguments
from planner.cli.tune import command as tune_command
from planner.core.schema import TrainSetting
from planner.core.units import GIB
from search.loop.options import SearchOptions
from search.loop.study.records import format_record, read_records
from tests.search.tables import invented_table

TINY = [
    "native:swin_tiny", "--set", "embed_dim=16", "--set", "depths=1,1", "--set", "num_heads=1,2",
    "--image-size", "32", "--set", "window_size=4", "--num-classes", "10", "--device", "cpu",
    "--compile", "off", "--attention", "eager", "--optimizer", "adamw", "--precision", "fp32,bf16",
    "--checkpointing", "none,blocks", "--batch-size", "2,4,8",
]  # fmt: skip


def planner(*arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=timeout, env=environment()
    )


def command(*arguments: str) -> list[str]:
    return [
        sys.executable,
        "-c",
        "from planner.cli import main; raise SystemExit(main())",
        *arguments,
    ]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def test_it_tunes_with_real_probes_and_goes_on_from_there(tmp_path: Path) -> None:
    arguments = ["tune", *TINY, "--trials", "2", "--output", str(tmp_path)]
    done = planner(*arguments)
    assert done.returncode == 0, done.stderr
    records = read_records(tmp_path / "probes.jsonl").records
    assert len(records) == 2
    result = json.loads((tmp_path / "recommendation.json").read_text())
    assert TrainSetting.model_validate(result["setting"]) in [r.setting for r in records]
    assert result["evidence"]["status"] == "measured"
    assert "Recommended for native:swin_tiny" in done.stdout
    assert "probe 1 of 2" in done.stderr
    again = planner(*arguments, "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["setting"] == result["setting"]
    assert read_records(tmp_path / "probes.jsonl").records == records


@pytest.mark.release
def test_a_short_budget_recommends_beside_other_work(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(os.cpu_count() or 1):
            loop = [sys.executable, "-c", "while True: pass"]
            stack.callback(stack.enter_context(subprocess.Popen(loop)).kill)
        asked = ["tune", "native:swin_tiny", "--device", "cpu", "--budget", "60s"]
        done = planner(*asked, "--output", str(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["status"] == "recommended"
    assert found["baseline"]["status"] == "measured"


@pytest.mark.release
@pytest.mark.parametrize(
    "model",
    ["timm:swin_tiny_patch4_window7_224", "transformers:microsoft/swin-tiny-patch4-window7-224"],
)
def test_real_models_of_other_libraries(tmp_path: Path, model: str) -> None:
    if importlib.util.find_spec(model.partition(":")[0]) is None:
        pytest.skip("not installed")
    small = [
        model,
        *TINY[1:-6],
        "--precision",
        "fp32",
        "--checkpointing",
        "none",
        "--batch-size",
        "2",
    ]
    done = planner("tune", *small, "--output", str(tmp_path), "--no-baseline")
    assert done.returncode == 0, done.stderr
    assert "Recommended for" in done.stdout


@pytest.mark.release
def test_an_interrupt_leaves_the_best_so_far_and_no_process(tmp_path: Path) -> None:
    tuner = subprocess.Popen(
        command("tune", *TINY, "--strategy", "exhaustive", "--output", str(tmp_path)),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
        start_new_session=True,
        # A suite started in the background ignores interrupts, and so would what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    patience = time.monotonic() + 240
    while not read_records(tmp_path / "probes.jsonl").records and time.monotonic() < patience:
        time.sleep(0.1)
    tuner.send_signal(signal.SIGINT)
    out, err = tuner.communicate(timeout=60)
    assert tuner.returncode == 130, err
    assert "Recommended" in out
    assert "it was interrupted" in out
    assert "Traceback" not in err
    left = subprocess.run(
        ["ps", "-o", "pid=", "-s", str(tuner.pid)], capture_output=True, text=True
    )
    assert left.stdout.strip() == ""


def test_a_replay_through_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "table.jsonl"
    table.write_bytes(b"".join(format_record(r) for r in invented_table()))
    assert main(["tune", "--replay", str(table), "--strategy", "tpe"]) == 0
    out = capsys.readouterr().out
    assert "nothing was run" in out
    assert "Next:" not in out  # nothing was kept
    kept = tmp_path / "kept here"
    assert main(["tune", "--replay", str(table), "--strategy", "tpe", "--output",
                 str(kept)]) == 0  # fmt: skip
    assert capsys.readouterr().out.endswith(
        f"\n\nNext: planner emit '{kept}' --for TRAINER, or planner report '{kept}'\n"
    )


def test_a_replay_through_the_command_writes_over_no_measured_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "probes.jsonl"
    run.write_bytes(b"".join(format_record(r) for r in invented_table()))
    assert main(["tune", "--replay", str(tmp_path), "--trials", "1"]) == 0, "its folder names it"
    assert str(run) in capsys.readouterr().out
    assert main(["tune", "--replay", str(run), "--output", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "a replay writes only over what another replay left" in error
    assert "Choose another --output, or omit it" in error
    assert list(tmp_path.iterdir()) == [run]


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["native:swin_tiny", "--precision", "bf17"], 2, "bf16"),
        (["native:swin_tny"], 2, "swin_tiny"),
        (["nosuch.models:make", "--device", "cpu"], 2, "there is no module 'nosuch'"),
        (["native:swin_tiny", "--strategy", "planer"], 2, "planner"),
        (["native:swin_tiny", "--memory", "24"], 2, "24GiB"),
        (["native:swin_tiny", "--set", "embed_dims=3"], 2, "embed_dim"),
        (["native:swin_tiny", "--batch-size", "many"], 2, "many"),
        (["native:swin_tiny", "--device", "tpu"], 2, "tpu"),
        (["native:swin_tiny", "--gpu", "rtx 3090"], 2, "--from advice.json begins there"),
        (["native:swin_tiny", "--device", "cpu", "--precision", "fp16"], 1, "fp32 and bf16"),
        (["native:swin_tiny", "--device", "cpu", "--storage", "study"], 2, "neither"),
        ([], 2, "MODEL"),
        (["--replay", "nowhere.jsonl"], 2, "does not exist"),
    ],
)
def test_bad_input_is_one_clear_error(
    tmp_path: Path, arguments: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    returned = main(["tune", *arguments, "--output", str(tmp_path)])
    error = capsys.readouterr().err
    assert returned == status, error
    assert said in error
    assert "Traceback" not in error


@pytest.mark.release
def test_it_tunes_over_two_real_ranks(tmp_path: Path) -> None:
    """gloo on the CPU: both ways to spread are measured, and the world is told."""
    arguments = [
        "tune", *TINY, "--gpus", "2", "--parallelism", "ddp,fsdp", "--output", str(tmp_path),
        "--precision", "fp32", "--checkpointing", "none", "--global-batch", "8", "--no-baseline",
        "--batch-size", "4", "--trials", "2",
    ]  # fmt: skip
    done = planner(*arguments)
    assert done.returncode == 0, done.stderr
    records = read_records(tmp_path / "probes.jsonl").records
    assert {r.setting.parallelism for r in records} == {"ddp", "fsdp"}
    for record in records:
        assert (record.status, len(record.ranks)) == ("measured", 2), record.message
        assert record.setting.global_batch == 8
    assert "images/s of all 2 devices" in done.stdout
    assert "Each probe is 2 ranks" in done.stdout
    assert "1 thread of the CPU" in done.stdout, "OMP_NUM_THREADS said so"


def test_what_is_typed_wins_over_what_it_begins_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wish = ["--gpu", "rtx 3090", "--memory", "2GiB", "--batch-size", "256", "--keep", "compile"]
    assert main(["advise", "native:swin_tiny", *wish, "--num-classes", "10", "--json"]) == 0
    file = tmp_path / "advice.json"
    file.write_text(capsys.readouterr().out)
    ways = json.loads(file.read_text())["ways"]

    def asked(*typed: str) -> dict[str, Any]:
        return _arguments(tune_command.make_context("tune", ["--from", str(file), *typed]).params)

    found = asked("--way", "2")
    way = ways[1]["setting"]
    assert (found["model"].num_classes, found["memory_bytes"]) == (10, 2 * GIB)
    assert (found["global_batch"], found["start"]["batch_size"]) == (256, way["batch_size"])
    assert found.get("allocator") == ways[1]["allocator"]
    found = asked("--memory", "3GiB", "--batch-size", "8", "--num-classes", "5", "--gpus", "2")
    assert (found["model"].num_classes, found["memory_bytes"]) == (5, "3GiB")
    assert "global_batch" not in found
    del found["model"]
    assert SearchOptions.of(found).base.world_size == 2
    assert main(["tune", "--way", "2"]) == 2
    assert main(["tune", "--from", str(file), "--replay", "x"]) == 2
    assert main(["tune", "--from", str(file), "--way", "99"]) == 2
