"""Recorded models and tasks beside torch's own CUDA code: what was recorded of them on an emulated
GPU, held to the estimate and to TABLES.md. One by default, three in CI, a sample of all before a
release.
"""

import functools
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from random import Random
from statistics import median

import pytest

pytest.importorskip("torch")
pytest.importorskip("timm")
pytest.importorskip("torchvision")
pytest.importorskip("transformers")

from planner.core.schema import MeasurementRecord
from search.loop.records import read_records
from tests.models.table import COMPILED, LISTED, TRUTH, Verdict, judge, library_of, run
from tests.truth.matrix import read_matrix

RECORDS = sorted(TRUTH.glob("*.jsonl"))[-1]
TABLES = Path(__file__).parent / "TABLES.md"
POINTS = "tests.models.tasks:Points"
MORE = ("timm:resnet18", "tests.models.tasks:UNETR")
PACKAGES = {"tests.models.tasks:TextToImage": "diffusers", "tests.models.tasks:UNETR": "monai"}
SAMPLED = 16

Step = tuple[str, str, str]  # model, precision, checkpointing


@functools.cache
def records() -> dict[Step, MeasurementRecord]:
    return {step_key(record): record for record in read_records(RECORDS).records}


def step_key(record: MeasurementRecord) -> Step:
    setting = record.setting
    return record.model.title, setting.precision, setting.checkpointing


def shown() -> tuple[dict[str, list[int]], dict[Step, str]]:
    """TABLES.md's counts by library, and the verdict of each step that is not equal."""
    text = TABLES.read_text(encoding="utf-8")
    block = text.split("<!-- python -m tests.models.table --kept -->\n```\n")[1]
    counts, _, others = block.split("\n```\n")[0].partition("\n\n")  # none, where all are equal
    rows = [line.split() for line in counts.splitlines()[2:]]
    steps = [line.split() for line in others.splitlines()[2:]]
    return (
        {library: list(map(int, numbers)) for library, *numbers in rows},
        {(model, precision, kept): what for model, precision, kept, what, *_ in steps},
    )


def test_every_step_of_the_list_is_recorded_and_measured() -> None:
    wanted = {
        (row.model.title, row.setting.precision, row.setting.checkpointing)
        for row in read_matrix(LISTED)
    }
    assert set(records()) == wanted
    assert {record.status for record in records().values()} == {"measured"}
    assert all(record.device.emulated for record in records().values())


def test_the_tables_count_what_is_recorded() -> None:
    counts, others = shown()
    found = Counter(library_of(record) for record in records().values())
    assert {library: numbers[1] for library, numbers in counts.items()} == {
        **found, "all": len(records())
    }  # fmt: skip
    for library, (_, steps, equal, *_) in counts.items():
        unequal = [s for s in others if library in ("all", library_of(records()[s]))]
        assert equal == steps - len(unequal)


def is_as_shown(verdict: Verdict) -> bool:
    return verdict.what == shown()[1].get(step_key(verdict.record), "equal")


def package_of(record: MeasurementRecord) -> str:
    library = library_of(record)
    return PACKAGES.get(record.model.title, "torch") if library == "own" else library


def is_installed(record: MeasurementRecord) -> bool:
    return find_spec(package_of(record)) is not None


@pytest.mark.parametrize(
    "model", [POINTS, *(pytest.param(model, marks=pytest.mark.truth) for model in MORE)]
)
def test_a_small_model_is_equal(model: str) -> None:
    record = records()[model, "bf16", "none"]
    if not is_installed(record):
        pytest.skip(f"{package_of(record)} is not installed")
    assert judge(record).what == "equal"


@pytest.mark.release
def test_a_sample_is_what_the_tables_say() -> None:
    chosen = Random(0).sample(list(records().values()), SAMPLED)
    judged = [judge(record) for record in chosen if is_installed(record)]
    assert [v for v in judged if not is_as_shown(v)] == []
    if missing := {package_of(record) for record in chosen if not is_installed(record)}:
        pytest.skip(f"the others are as shown; not installed: {', '.join(sorted(missing))}")


def compiled_records() -> dict[str, MeasurementRecord]:
    path = sorted((TRUTH / "compiled").glob("*.jsonl"))[-1]
    return {record.model.title: record for record in read_records(path).records}


def test_the_compiled_steps_of_the_list_are_recorded_and_shown() -> None:
    text = TABLES.read_text(encoding="utf-8")
    block = text.split("<!-- python -m tests.models.table --compiled --kept -->\n```\n")[1]
    rows = [line.split() for line in block.split("\n```")[0].splitlines()[2:]]
    shown = {model: what for model, what, *_ in rows}
    allocated, reserved = ([abs(float(row[n].rstrip("%"))) for row in rows] for n in (2, 3))
    page = (Path(__file__).parents[2] / "docs/accuracy.md").read_text(encoding="utf-8")
    assert (
        f"| {len(rows)} other models, compiled | the same | allocated {median(allocated):.1f}% "
        f"median, {max(allocated)}% worst; reserved {max(reserved)}% worst |"
    ) in page
    listed = {row.model.title for row in read_matrix(COMPILED)}
    assert set(compiled_records()) == listed == set(shown)
    assert set(shown.values()) == {"within"}
    for record in compiled_records().values():
        assert record.status == "measured"
        assert record.device.emulated
        assert record.setting.compile == "default"


@pytest.mark.compiler
def test_a_compiled_step_is_within_its_range() -> None:
    assert judge(compiled_records()["torchvision:mobilenet_v3_small"]).what == "within"


@pytest.mark.emulated
def test_the_command_records_the_same_again(tmp_path: Path) -> None:
    run([POINTS], tmp_path / "again.jsonl")
    again = read_records(tmp_path / "again.jsonl").records
    assert len(again) == 2
    for record in again:
        kept = records()[step_key(record)]
        assert record.peak_allocated_bytes == kept.peak_allocated_bytes
        assert record.peak_reserved_bytes == kept.peak_reserved_bytes
