"""`planner bench attention`: cases, a real run of a small one, two files compared."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from planner.benches.records import append_record, read_records
from planner.cli import main
from planner.schema.bench import BenchRecord
from tests.benches.cases import record

TINY = """
embed_dim: 8
depths: 2
num_heads: 2
window_size: 4
image_size: 32
"""


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY)
    return str(file)


@pytest.fixture(autouse=True)
def _known_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """None: measuring them takes twenty seconds."""
    monkeypatch.setattr("search.surrogate.device_rates.device_rates", lambda *_: None)


def test_the_guides_shape_is_there_in_every_library(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "attention", "--list", "--library", "native,torchvision"]) == 0
    shown = capsys.readouterr()
    assert "guide: [2, 56, 56, 96], window 7, 3 heads: native version 1, plain, fp32, eager" in (
        shown.out
    )
    assert shown.out.endswith("24 cases.\n")  # 2 versions × 2 shifts × (4 + 2) paths
    assert "torchvision version 2 has no sdpa, compiled-sdpa" in shown.err


def test_a_models_stages_have_their_own_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--list", "--library", "native", "--path", "eager", "--shapes", "stages"]
    assert main(["bench", "attention", "native:swin_tiny", "--device", "cpu", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("native:swin_tiny stage 1: [2, 56, 56, 96], window 7, 3 heads")
    assert lines[-2].startswith("native:swin_tiny stage 4: [2, 7, 7, 768], window 7, 24 heads")
    assert lines[-1] == "7 cases."  # the last map is one window: it is not shifted


def test_a_small_case_is_timed_kept_and_shown(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bench.jsonl"
    options = ["--library", "native", "--path", "eager,sdpa", "--windows", "plain",
               "--shapes", "stages", "--measure", "1s", "--output", str(file)]  # fmt: skip
    assert main(["bench", "attention", tiny, "--device", "cpu", *options]) == 0
    shown = capsys.readouterr()
    records = read_records(file)
    assert [(r.case.path, r.status) for r in records] == [
        ("eager", "measured"), ("sdpa", "measured"),
    ]  # fmt: skip
    assert "custom stage 1: [2, 8, 8, 8], window 4, 2 heads" in shown.out
    assert "planner doctor --rates" in shown.out
    assert "2/2 native version 1, plain, fp32, sdpa" in shown.err


def test_a_file_of_somebody_else_s_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its last line has no end, as that of a record whose writer was killed."""
    notes = tmp_path / "notes.txt"
    notes.write_text("my notes\nand more")
    options = ["--device", "cpu", "--library", "native", "--path", "eager", "--output", str(notes)]
    assert main(["bench", "attention", *options]) == 1
    assert "holds something other than records.\nChoose another --output." in (
        capsys.readouterr().err
    )
    assert notes.read_text() == "my notes\nand more"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_what_was_timed(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def interrupted(file: Path, kept: BenchRecord) -> None:
        append_record(file, kept)
        signal.raise_signal(number)

    monkeypatch.setattr("planner.benches.records.append_record", interrupted)
    file = tmp_path / "bench.jsonl"
    options = ["--device", "cpu", "--library", "native", "--path", "eager", "--swin", "1",
               "--shapes", "stages", "--measure", "1s", "--output", str(file)]  # fmt: skip
    assert main(["bench", "attention", tiny, *options]) == 128 + number
    assert len(read_records(file)) == 1
    shown = capsys.readouterr()
    assert "Stopped." in shown.err
    assert "eager" in shown.out


def test_two_files_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, seconds in (("a", 1.0), ("b", 2.0)):
        append_record(tmp_path / f"{name}.jsonl", record(seconds, 0.9 * seconds, 1.1 * seconds))
    files = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    assert main(["bench", "attention", "--compare", *files]) == 0
    assert "slower by 50.0%" in capsys.readouterr().out
    assert main(["bench", "attention", "--json", "--compare", *files]) == 0
    (case,) = json.loads(capsys.readouterr().out)["cases"]
    assert case["is_real"]
    assert case["ratio"] == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--path", "egaer"], "unknown --path 'egaer'. Did you mean 'eager'?"),
        (["--shapes", "stages"], "--shapes stages needs a MODEL"),
        (["native:swin_tiny", "--shapes", "guide"], "leaves nothing of native:swin_tiny"),
        (["native:swin_tiny", "--compare", "a", "b"], "--compare measures nothing"),
        (["--batch-size", "4"], "--batch-size is of a MODEL's stages"),
        (["--budget", "0s"], "--budget 0s is no time to run in"),
        (["timm:vit_base_patch16_224"], "only theirs have window attention"),
    ],
)
def test_what_is_asked_wrongly_is_said(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = ["--output", str(tmp_path / "x.jsonl")]
    assert main(["bench", "attention", "--device", "cpu", *options, *file]) == 2
    assert said in capsys.readouterr().err


def test_the_command_imports_no_torch() -> None:
    code = (
        "import sys; from planner.cli import main; "
        "main(['bench', 'attention', '--device', 'cpu', '--list']); "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert done.returncode == 0, done.stderr
