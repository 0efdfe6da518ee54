"""`watch.jsonl`, explained: a real one, and one that was cut."""

from __future__ import annotations

import json
from pathlib import Path

import torch

import planner
from planner.core.files import to_json
from planner.report.explanation import explanation_text
from planner.watching.analysis import judge
from planner.watching.expectation import Expectation
from planner.watching.explaining.explanation import explain
from tests.trainers.cases import tiny


def watched(folder: Path) -> None:
    with planner.watch(folder=folder, interval_seconds=0) as hook:
        for number in range(8):
            hook.step(4, loss=torch.tensor(float("nan") if number > 5 else 1.0))


def test_a_real_log_is_told(tmp_path: Path) -> None:
    watched(tmp_path)
    for source in (tmp_path, tmp_path / "watch.jsonl"):
        found = explain(source)
        assert found.kind == "watch"
        assert [finding.kind for finding in found.findings] == ["non-finite loss"]
        text = explanation_text(found)
        assert "8 steps" in text
        assert "finished" in text
        assert json.dumps(to_json(found))


def test_only_the_last_run_counts_and_torn_lines_are_passed_over(tmp_path: Path) -> None:
    watched(tmp_path)
    path = tmp_path / "watch.jsonl"
    start = path.read_text().splitlines()[0]
    path.write_text(path.read_text() + start + '\n{"kind":"int\n')
    found = explain(path)
    assert found.findings == []
    assert "no last line" in explanation_text(found)


def test_each_event_that_a_watch_writes_is_known_and_shown(tmp_path: Path) -> None:
    line = {
        "steps": 1, "images": 8, "alloc_retries": 3, "ooms": 1, "loss": float("inf"), "scale": 1.0,
        "clocks": {"slowed_by": ["heat"], "busy_percent": 5}, "wait_share": 0.3,
        "images_per_second": 1.0, "peak_allocated_bytes": 9, "peak_reserved_bytes": 9,
    }  # fmt: skip
    plan = Expectation("plan", "estimated", "a GPU", 4, 100.0, 1, 1)
    judged = (event for gpu in ("a GPU", "b") for event in judge(line, {"scale": 2.0}, plan, gpu))
    events = {event.name: event.message for event in judged} | {"of tomorrow": "unheard of"}
    written = [{"kind": "event", "event": e, "message": said} for e, said in events.items()]
    lines = [{"kind": "start", "planner": 1, "rank": 0}, *written]
    path = tmp_path / "watch.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    findings = explain(path).findings
    assert len(findings) == 13
    for finding, message in zip(findings, events.values(), strict=True):
        assert message[:200] in finding.evidence[0][1]
        assert (finding.kind == "another event") == (message == "unheard of")


def test_an_out_of_memory_event_is_held_against_a_plan(tmp_path: Path) -> None:
    watched(tmp_path)
    event = {
        "kind": "event", "event": "out of memory", "message": "no", "text":
        "CUDA out of memory. Tried to allocate 9.00 MiB. GPU 0 has a total capacity of 24.00 GiB "
        "of which 7.00 MiB is free. Of the allocated memory 20.00 GiB is allocated by PyTorch",
    }  # fmt: skip
    path = tmp_path / "watch.jsonl"
    path.write_text(path.read_text() + json.dumps(event) + "\n")
    found = explain(path, planner.estimate(tiny(), batch_size=64, gpu="rtx 3090"))
    assert found.seen["missing_bytes"] == found.relief.needed_bytes == 2 << 20


_FOREIGN = [
    *(f'{{"kind": "event", "event": "out of memory", "allocated_bytes": {value}, "text": {value}}}'
      for value in ('"many"', "NaN", "-1", f"1{'0' * 400}", "{}")),
    '{"kind": "event", "event": ["a"], "message": {"b": 1}}',
    '{"kind": "start", "planner": 1, "rank": [1], "device": {"name": [[]]}}\n{"kind": "event"}',
    '{"kind": "start", "planner": 1, "device": "cuda", "plan": 3, "rank": "first"}',
    '{"kind": "end", "steady": [1], "step": "ten", "seconds": "long", "status": {"a": [1]}}',
    '{"kind": "end", "steady": {"images_per_second": "fast", "wait_share": NaN}, "seconds": 1e999}',
]  # fmt: skip


def test_a_log_that_somebody_else_wrote_is_told_without_what_is_wrong_in_it(
    tmp_path: Path,
) -> None:
    start = '{"kind": "start", "planner": 1, "plan": {"images_per_second": "9", "wait_share": 0.1}}'
    path = tmp_path / "watch.jsonl"
    plan = planner.estimate(tiny(), batch_size=4, gpu="rtx 3090")
    for line in _FOREIGN:
        path.write_text(f"{start}\n{line}\n")
        found = explain(path, plan)
        assert found.kind == "watch", line
        assert explanation_text(found), line
        assert json.loads(json.dumps(to_json(found), allow_nan=False))["kind"] == "watch", line
