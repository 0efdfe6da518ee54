"""Ledgers of models that are traced: at any batch what a trace at that batch says, kept on disk."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from planner import TrainSetting, estimate, largest_batch
from planner.core.errors import ContractError, UnsupportedError, UsageError
from planner.core.schema import FactoryModel, Model, ResolvedSetting
from planner.estimation.ledgers import record_ledgers, step_ledger
from planner.ledger import cache as ledger_cache
from planner.ledger.affine import in_canonical_order
from planner.ledger.ledger import Ledger
from planner.trace.here import may_trace_here
from planner.trace.kept_step import TracedStep, _held_step, retrace, traced_step
from tests.covering import covering
from tests.traced_models import CLASSES, IMAGE

assert torch.__version__  # imported: these tests trace in their own process


def model_of(name: str) -> FactoryModel:
    return FactoryModel(
        factory=f"tests.traced_models:{name}", image_size=(IMAGE, IMAGE), num_classes=CLASSES
    )


def setting(**fields: Any) -> ResolvedSetting:
    return ResolvedSetting(TrainSetting(**{"precision": "bf16", "batch_size": 5, **fields}))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLANNER_CACHE_DIR", str(tmp_path))
    forget()
    return tmp_path / "ledgers"


def forget() -> None:
    """As a new process: what is known is on disk."""
    _held_step.cache_clear()


def direct(model: Model, chosen: ResolvedSetting) -> Ledger:
    from planner.trace.ledger import trace_estimate

    return trace_estimate(model, chosen)


def assert_as_traced(model: Model, chosen: ResolvedSetting) -> None:
    found, traced = step_ledger(model, chosen), direct(model, chosen)
    assert in_canonical_order(found.events) == in_canonical_order(traced.events)
    assert found.num_parameters == traced.num_parameters
    assert found.batch_size == chosen.batch_size


@pytest.mark.parametrize(
    ("name", "fields"),
    covering(["Small", "Normalized"], [{}, {"precision": "fp16", "accumulate": 2}]),
    ids=str,
)
def test_a_batch_read_from_recordings_is_that_batch_traced(
    name: str, fields: dict[str, Any]
) -> None:
    model, chosen = model_of(name), setting(**fields)
    assert_as_traced(model, chosen)
    forget()
    assert_as_traced(model, chosen)
    assert "checked at 3" in " ".join(step_ledger(model, chosen).notes)


@pytest.mark.parametrize("name", ["Contrastive", "Even"])
def test_a_step_that_is_not_affine_is_traced_at_each_batch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, chosen = model_of(name), setting(batch_size=8)
    assert_as_traced(model, chosen)
    notes = " ".join(step_ledger(model, chosen).notes)
    assert "Each batch size is traced by itself" in notes
    assert {"Contrastive": "mm", "Even": "2, 3, 7"}[name] in notes
    if name == "Contrastive":
        with pytest.raises(UnsupportedError, match=r"(?s)evenly.*--batch-size 8,16"):
            largest_batch(model, memory_bytes="1GiB")
    forget()
    monkeypatch.setattr("planner.trace.ledger.trace_estimate", None)  # nothing is traced again
    step_ledger(model, chosen)
    assert traced_step(model, chosen).reason, "advice and --max-batch say why there is no line"


def test_the_largest_batch_of_any_model_fits_and_the_next_does_not() -> None:
    model = model_of("Small")
    best = largest_batch(model, memory_bytes="700MiB", precision="fp32")
    assert best is not None
    assert best.fits
    batch = best.setting.batch_size
    assert batch > 100
    single = estimate(model, best.setting, memory_bytes="700MiB")
    assert replace(single, assumed=()) == replace(best, assumed=())
    more = estimate(model, best.setting, memory_bytes="700MiB", batch_size=batch + 1)
    assert not more.fits or more.num_alloc_retries, "only by freeing cached memory"


def test_retracing_makes_anew_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model, chosen = model_of("Small"), setting()
    step_ledger(model, chosen)
    calls = []

    def trace(model: FactoryModel, chosen: ResolvedSetting, **options: Any) -> Ledger:
        calls.append(chosen.batch_size)
        return direct_again(model, chosen, **options)

    from planner.trace.ledger import trace_estimate as direct_again

    monkeypatch.setattr("planner.trace.ledger.trace_estimate", trace)
    forget()
    step_ledger(model, chosen)
    assert calls == []
    forget()
    retrace(model, chosen)
    step_ledger(model, chosen)
    assert calls == [2, 7, 3]


def test_an_error_that_stays_is_kept_and_another_is_not() -> None:
    frozen = setting(frozen_stages=1)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="frozen stages"):
            step_ledger(model_of("Small"), frozen)
        forget()
    with pytest.raises(UsageError, match="NoSuchModel"):
        step_ledger(model_of("NoSuchModel"), setting())
    assert [entry.key["setting"]["frozen_stages"] for entry in ledger_cache.entries()] == [1]


def test_a_trace_is_made_elsewhere_where_torch_is_not_as_it_begins() -> None:
    """What is kept must be what a new process finds."""
    assert may_trace_here(model_of("Small"))
    for state in (
        torch.no_grad, torch.inference_mode, partial(torch.autocast, "cpu"),
        partial(torch.device, "meta"), FakeTensorMode,
    ):  # fmt: skip
        with state():
            assert not may_trace_here(model_of("Small")), state
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(may_trace_here, model_of("Small")).result()


def test_a_trace_draws_none_of_the_random_numbers_of_a_training() -> None:
    before = torch.get_rng_state()
    step_ledger(model_of("Small"), setting())
    assert torch.equal(torch.get_rng_state(), before)


ELSEWHERE = f"""
import sys
names = sys.argv[1:]
from planner.core.schema import FactoryModel, TrainSetting
from planner.estimation import ledgers
from planner.estimation.ledgers import record_ledgers, step_ledger
models = [
    FactoryModel(factory="tests.traced_models:" + name, image_size={IMAGE}, num_classes={CLASSES})
    for name in names
]
setting = TrainSetting(batch_size=5)
errors = record_ledgers([(model, setting) for model in models])
print([type(error).__name__ for error in errors])
print([len(step_ledger(m, setting).events) for m, e in zip(models, errors) if e is None])
print([error.message for error in errors if "ended with" in str(error)])
print([name for name in ("torch", "numpy", "optuna") if name in sys.modules])
"""


def run_elsewhere(*names: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ELSEWHERE, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


def test_another_process_makes_all_traces_where_torch_is_not_imported(cache: Path) -> None:
    """What it found is there at once, and in the next process, without torch in either."""
    first = run_elsewhere("Convolutional", "NoSuchModel", "ends_its_process")
    second = run_elsewhere("Convolutional")
    errors, lengths, ended, heavy = first.stdout.splitlines()
    assert errors == "['NoneType', 'UsageError', 'PlannerError']"
    assert "ends_its_process ended with status 7" in ended
    assert lengths == f"[{len(direct(model_of('Convolutional'), setting()).events)}]"
    assert heavy == "[]"
    assert first.stderr.count("Tracing") == 1
    assert "for each of 3 settings" in first.stderr
    assert second.stdout.splitlines() == ["['NoneType']", lengths, "[]", "[]"]
    assert second.stderr == ""
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [("Adversarial", r"optimizer of its own \(Adam\)"), ("Wrong", "not images -> logits")],
)
def test_a_step_that_breaks_its_contract_is_traced_once(
    name: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At two samples, in seconds: not again at the batch that was asked for."""
    traced: list[int] = []
    trace = TracedStep._trace

    def counted(step: TracedStep, batch_size: int) -> Ledger:
        traced.append(batch_size)
        return trace(step, batch_size)

    monkeypatch.setattr(TracedStep, "_trace", counted)
    with pytest.raises(ContractError, match=said):
        step_ledger(model_of(name), setting(batch_size=512))
    assert traced == [2]


def test_a_limit_holds_where_torch_is_imported_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that was asked what a name means has imported it."""
    assert "torch" in sys.modules
    (tmp_path / "waiting.py").write_text("import time\n\n\ndef build():\n    time.sleep(600)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = FactoryModel(factory="waiting:build")
    (error,) = record_ledgers([(model, setting())], limit_seconds=1)
    assert error is not None
    assert "waiting:build was not done after 1 s, and was ended" in error.message
