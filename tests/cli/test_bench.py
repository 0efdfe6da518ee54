"""`planner bench attention`: cases, a real run of a small one, two files compared."""

from __future__ import annotations

import pytest

from planner.cli import main

BENCH = ["bench", "attention", "--device", "cpu"]


def test_the_guides_shape_is_there_in_every_library(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BENCH, "--list", "--library", "native", "--library", "torchvision"]) == 0
    shown = capsys.readouterr().out
    assert "guide: [2, 56, 56, 96], window 7, 3 heads; fp32: native version 1, plain, eager" in (
        shown
    )
    # 2 versions × 2 shifts × 4 paths; torchvision has no sdpa, and so 2 of them.
    assert shown.endswith("24 cases.\n")


def test_a_models_stages_have_their_own_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--list", "--library", "native", "--path", "eager"]
    assert main([*BENCH, "native:swin_tiny", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("native:swin_tiny stage 1: [2, 56, 56, 96], window 7, 3 heads")
    assert lines[-2].startswith("native:swin_tiny stage 4: [2, 7, 7, 768], window 7, 24 heads")
    assert lines[-1] == "7 cases."  # the last map is one window: it is not shifted


@pytest.mark.parametrize(
    ("options", "said", "status"),
    [
        (["native:swin_tiny", "--compare", "a", "b"], "--compare measures nothing", 2),
        (["--compare", __file__, __file__], "holds no measurements", 1),
        (["--output", "notes.txt"], "file name ends in .pt", 2),
    ],
)
def test_what_is_asked_wrongly_is_said(
    options: list[str], said: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*BENCH, *options]) == status
    assert said in capsys.readouterr().err
