"""What a probe trains with: its precision, how cuDNN chooses, what the compiler is told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import backends

from planner.core.errors import UnsupportedError
from planner.core.schema import FactoryModel, TrainSetting
from planner.training.building import set_precision
from search.probe.protocol import ProbeRequest, Report
from search.probe.worker import measure, subject
from tests.search.probes import request_of

# (precision, what fp32 matmul is set to, whether cuDNN may use TF32)
PRECISIONS = [("fp32", "highest", False), ("tf32", "high", True), ("bf16", "highest", True)]


def request(precision: str) -> ProbeRequest:
    setting = TrainSetting.model_validate({"precision": precision})
    return ProbeRequest(model=FactoryModel(factory="a:b"), setting=setting)


@pytest.fixture(autouse=True)
def _precision_is_put_back() -> Iterator[None]:
    benchmark = backends.cudnn.benchmark
    yield
    set_precision(request("bf16").setting)
    backends.cudnn.benchmark = benchmark


@pytest.mark.parametrize(("wanted", "below"), [("tf32", (7, 5)), ("fp8", (8, 0))])
def test_matrix_units_that_the_device_lacks_are_refused(
    monkeypatch: pytest.MonkeyPatch, wanted: str, below: tuple[int, int]
) -> None:
    asked = request(wanted)
    with pytest.raises(UnsupportedError, match=f"{wanted} needs an NVIDIA GPU.*cpu supports only"):
        subject.refuse_unsupported(asked)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    lacking, having = (
        asked.model_copy(update={"device": "cuda:0", "capability": capability})
        for capability in (below, (8, 9))
    )
    with pytest.raises(UnsupportedError, match=f"{wanted} needs .*cuda:0 supports only fp32"):
        subject.refuse_unsupported(lacking)
    subject.refuse_unsupported(having)
    subject.refuse_unsupported(request("bf16"))


@pytest.mark.parametrize(("precision", "matmul", "cudnn"), PRECISIONS)
@pytest.mark.parametrize("value", ["tf32", "ieee"])
@pytest.mark.parametrize(
    "owner", [backends, backends.cudnn, backends.cudnn.conv, backends.cuda.matmul]
)
def test_precision_holds_over_what_the_newer_interface_set(
    owner: Any, value: str, precision: str, matmul: str, cudnn: bool
) -> None:
    """Whose getters and the older ones' raise where the two disagree (torch 2.9 to 2.13)."""
    set_precision(request("bf16").setting)
    owner.fp32_precision = value
    set_precision(request(precision).setting)
    assert torch.get_float32_matmul_precision() == matmul
    assert backends.cuda.matmul.allow_tf32 == (matmul == "high")
    assert backends.cudnn.allow_tf32 == cudnn
    assert (backends.cudnn.conv.fp32_precision == "tf32") == cudnn


def test_users_precision_gives_way_to_the_settings(report: Report) -> None:
    for factory in ("sets_tf32_anew", "sets_tf32_of_old"):
        outcome = measure.measure(request_of(factory), float("inf"), report)
        assert outcome.status == "measured", outcome.message


def test_compiler_is_told_what_emitted_files_tell_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """dynamic=None would compile anew for a last batch of another size, and then for any size."""
    told: dict[str, Any] = {}
    monkeypatch.setattr(torch, "compile", lambda module, **said: told.update(said) or module)
    subject.build_training(request_of("Tiny", compile="reduce-overhead"))
    assert told == {"mode": "reduce-overhead", "dynamic": False}
