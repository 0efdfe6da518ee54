"""What stops a recording, in words; and the warm process that no request changes."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from planner.core.errors import PlannerError
from planner.core.schema import FactoryModel, Model, TrainSetting
from planner.estimation.estimate import resolve
from planner.ledger.ledger import Ledger
from planner.recording.recordings import Recorder
from tests.recording import models
from tests.recording.test_replay import DDP, OWN, SWIN, VIT


def own(name: str) -> FactoryModel:
    return FactoryModel(
        factory=f"tests.recording.models:{name}", image_size=(32, 32), num_classes=16
    )


def record(recorder: Recorder, model: Model, **changes: Any) -> Ledger:
    return recorder.record(*resolve(model, TrainSetting(**{"batch_size": 4, **changes})))


def line_of(text: str) -> str:
    lines = inspect.getsource(models).splitlines()
    return f"recording/models.py:{1 + next(n for n, line in enumerate(lines) if text in line)}"


@pytest.mark.parametrize(
    ("name", "at", "words"),
    [
        ("raises", 'ValueError("no', ("raised ValueError", "no such stage", "--image-size")),
        ("fills_host", "1 << 50", ("host's memory is full", "only the host's is short")),
    ],
)
def test_what_raises_says_where(
    recorder: Recorder, name: str, at: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(PlannerError) as raised:
        record(recorder, own(name))
    for said in (f"models:{name}", line_of(at), *words):
        assert said in str(raised.value)


def test_a_batch_norm_of_one_value_says_what_to_do(recorder: Recorder) -> None:
    with pytest.raises(PlannerError, match="a micro-batch of 2 or more") as raised:
        record(recorder, own("OfOneValue"), batch_size=1)
    assert line_of("self.head(self.change") in str(raised.value)


def test_a_process_that_dies_says_of_what(recorder: Recorder) -> None:
    with pytest.raises(PlannerError, match=r"models:dies ended by SIGKILL\.\nThe kernel kills"):
        record(recorder, own("dies"))


def test_a_selection_by_values_is_a_lower_bound(recorder: Recorder) -> None:
    assert any("lower bound" in note for note in record(recorder, own("selects")).notes)
    # The gradient of a table of positions sorts indices, as many as there are.
    assert not any("lower bound" in note for note in record(recorder, SWIN).notes)


def test_a_value_that_is_read_is_made_up(recorder: Recorder) -> None:
    """But for those that the optimizer reads: the scaler of fp16 asks whether all are finite."""
    notes = record(recorder, own("reads")).notes
    assert any(line_of("features.sum().item()") in note and "0 stands" in note for note in notes)
    assert not any("0 stands" in n for n in record(recorder, OWN, precision="fp16").notes)


@pytest.mark.parametrize("changes", [{}, DDP], ids=str)
def test_no_request_changes_the_next(recorder: Recorder, changes: dict[str, Any]) -> None:
    first = record(recorder, OWN, **changes)
    for disturbing in ("raises", "dies"):
        with pytest.raises(PlannerError):
            record(recorder, own(disturbing))
    record(recorder, VIT, precision="fp32")
    again = record(recorder, OWN, **changes)
    assert again.events == first.events
