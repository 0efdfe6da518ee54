"""`planner profile` as it is typed: whose setting it runs, and one line for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.cli import main
from planner.cli.measure import asked
from planner.cli.options import Fields
from planner.core.errors import UsageError
from planner.core.schema import TrainSetting
from planner.core.schema.record import Recommendation
from tests.trainers.cases import recommendation, tiny

MODEL = tiny("native")


def write(folder: Path, found: Recommendation) -> Path:
    folder.mkdir()
    (folder / "recommendation.json").write_text(found.model_dump_json())
    return folder


def test_a_run_gives_its_model_and_setting_and_options_change_them(tmp_path: Path) -> None:
    found = recommendation(MODEL, TrainSetting(precision="fp32", batch_size=8))
    run = write(tmp_path / "run", found)
    for target in (run, run / "recommendation.json"):
        model, setting = asked(str(target), Fields({}, {}))
        assert model == found.model
        assert (setting.precision, setting.batch_size) == ("fp32", 8)
    changed = asked(str(run), Fields({}, {"batch_size": "4", "checkpointing": "blocks"}))[1]
    assert (changed.batch_size, changed.checkpointing) == (4, "blocks")
    with pytest.raises(UsageError, match="embed_dim would make another model"):
        asked(str(run), Fields({"embed_dim": "64"}, {}))


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["gone"], 2, "there is no run gone and no such model."),
        ([".", "--device", "cpu"], 2, "recommendation.json does not exist."),
        (["gone/recommendation.json"], 2, "gone/recommendation.json does not exist."),
        (["native:swin_tiny", "--batch-size", "1,2"], 2, "not for --batch-size 1,2."),
        (["native:swin_tiny", "--device", "gpu"], 2, "gpu"),
    ],
)
def test_a_mistake_is_one_error(
    arguments: list[str], status: int, said: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["profile", *arguments]) == status
    err = capsys.readouterr().err
    assert err.startswith("Error: ")
    assert said in err
    assert list(tmp_path.iterdir()) == []
