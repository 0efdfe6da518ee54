"""find_loader(): a whole search over simulated loaders, its files, its limits and its faults."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from planner.core.errors import UsageError
from planner.core.schema.loading import (
    DataRecommendation,
    DataSource,
    LoaderRecord,
    LoaderSetting,
)
from search.loader.finding import find_loader
from search.loop.study.records import read_records
from search.loop.study.storage import StudyError
from tests.search.loader.simulated import SOURCE, Machine, SimulatedProber

MACHINE = Machine(2, {"torchvision": 0.01, "timm": 0.008}, noise=0.002)


def find(output: Path, prober: Any = None, data: DataSource = SOURCE, **options: Any) -> Any:
    given = {"pipelines": "torchvision,timm", "workers": "0,1,2,3,4", "device": "cpu",
             "storage": str(output / "study.journal"), **options}  # fmt: skip
    return find_loader(data, prober=prober or SimulatedProber(MACHINE), output=output, **given)


def kept(output: Path) -> tuple[LoaderRecord, ...]:
    return read_records(output / "loader.jsonl", LoaderRecord).records


def test_what_it_recommends_was_run_and_is_kept(tmp_path: Path) -> None:
    prober = SimulatedProber(MACHINE)
    found = find(tmp_path, prober)
    assert found.setting in prober.asked
    assert found.setting.pipeline == "timm"
    assert found.evidence in kept(tmp_path)
    assert len(kept(tmp_path)) == found.num_probes == len(prober.asked)
    assert found.num_probes <= found.num_candidates / 3
    text = (tmp_path / "data.json").read_text()
    assert DataRecommendation.model_validate_json(text) == found


def test_the_same_search_goes_on(tmp_path: Path) -> None:
    first = SimulatedProber(MACHINE)
    assert find(tmp_path, first, trials=2).num_probes == 2
    second = SimulatedProber(MACHINE)
    found = find(tmp_path, second)
    assert not {s.title for s in first.asked} & {s.title for s in second.asked}
    assert found.num_probes == 2 + len(second.asked)
    third = SimulatedProber(MACHINE)
    assert find(tmp_path, third).setting == found.setting
    assert third.asked == []


class Interrupted(SimulatedProber):
    """Ctrl-C while the third probe runs."""

    def record(self, setting: LoaderSetting) -> LoaderRecord:
        if len(self.asked) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return super().record(setting)


def test_an_interrupt_ends_with_the_best_so_far(tmp_path: Path) -> None:
    found = find(tmp_path, Interrupted(MACHINE))
    assert found.stopped_because == "it was interrupted"
    assert found.num_probes == 2
    assert found.setting is not None
    going_on = SimulatedProber(MACHINE)
    assert find(tmp_path, going_on).num_probes == 2 + len(going_on.asked)


def test_a_study_of_other_data_is_refused(tmp_path: Path) -> None:
    find(tmp_path, trials=2)
    changed = SOURCE.model_copy(update={"fingerprint": "another"})
    with pytest.raises(StudyError, match="another data set, machine or software") as caught:
        find(tmp_path, data=changed)
    assert "data.fingerprint: simulated there, another here" in str(caught.value)
    found = find(tmp_path, data=changed, accept_different=True, trials=3)
    assert found.num_probes == 3


def test_what_is_asked_wrongly_is_said_in_one_message(tmp_path: Path) -> None:
    for options, said in (
        ({"strategy": "tp"}, "Did you mean 'tpe'"),
        ({"pipelines": "torchvison"}, "Did you mean 'torchvision'"),
        ({"workers": "2,x"}, "workers are whole numbers"),
        ({"workers": "5000"}, "from 0 to 1024"),
        ({"batch_size": 0}, "batch_size is a number from 1"),
        ({"tolerance": 2.0}, "tolerance is a share"),
        ({"gpu": "RTX 3090"}, "no model is named"),
        ({"gpu": "RTX 3009", "model": "native:swin_tiny"}, "unknown GPU"),
        ({"device": "cuda:99"}, "cuda:99 cannot be used"),
    ):
        with pytest.raises(UsageError, match=said):
            find(tmp_path, **options)  # type: ignore[arg-type]
