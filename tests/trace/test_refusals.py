"""What a trace cannot follow, in our words and with the line of the user's code."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from planner.core.errors import PlannerError, UnsupportedError  # noqa: E402
from planner.core.schema import TrainSetting  # noqa: E402
from planner.core.schema.any_model import FactoryModel  # noqa: E402
from planner.trace.ledger import trace_estimate  # noqa: E402
from tests.trace.models import (  # noqa: E402
    TINY_IMAGES,
    Classifier,
)


def line_of(text: str) -> int:
    return 1 + next(
        i for i, line in enumerate(Path(__file__).read_text().split("\n")) if text in line
    )


READS = {
    "images.mean().item()": lambda images: images.mean().item(),
    "images[0, 0, 0].tolist()": lambda images: images[0, 0, 0].tolist()[0],
}


@pytest.mark.parametrize("how", READS)
def test_a_model_that_reads_data_is_told_the_line(how: str) -> None:
    class Reads(Classifier):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images) * READS[how](images)

    with pytest.raises(UnsupportedError, match="reads a tensor's value") as refused:
        trace_estimate(TINY_IMAGES, TrainSetting(batch_size=2), Reads)
    assert f"test_refusals.py:{line_of(chr(34) + how)}," in str(refused.value)
    assert "without a prior" in str(refused.value)


def test_a_size_that_depends_on_data_is_refused() -> None:
    class Breaks(Classifier):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images[images > 0])

    with pytest.raises(
        UnsupportedError, match=r"aten\.(nonzero|index) at .*_refusals\.py:\d+ makes a tensor whose"
    ):
        trace_estimate(TINY_IMAGES, TrainSetting(batch_size=2), Breaks)


def test_an_operation_that_refuses_its_input_is_told_without_torchs_own_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Mismatched(Classifier):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images.gather(4, images))

    with pytest.raises(PlannerError, match=r"raised \w+ in aten\.gather at .*_refusals\.py:\d+: "):
        trace_estimate(TINY_IMAGES, TrainSetting(batch_size=2), Mismatched)
    assert not caplog.records  # which go to standard error where nothing else takes them


def test_a_model_that_raises_says_where() -> None:
    class Raises(Classifier):
        def forward(self, images: Tensor) -> Tensor:
            raise ValueError("no such stage")

    with pytest.raises(PlannerError, match=r"raised ValueError at .*\.py:\d+: no such stage"):
        trace_estimate(TINY_IMAGES, TrainSetting(batch_size=2), Raises)


def test_a_factory_whose_module_takes_other_images_is_told_of_the_option() -> None:
    class Larger(Classifier):
        def forward(self, images: Tensor) -> Tensor:
            raise AssertionError("Input height (224) doesn't match model (384).")

    own = FactoryModel(factory="mine:classifier")
    with pytest.raises(PlannerError, match="raised AssertionError") as refused:
        trace_estimate(own, TrainSetting(batch_size=2), Larger)
    assert "224x224 px and 1000 classes: --image-size and --num-classes say" in str(refused.value)


def test_what_a_trace_does_not_follow_is_refused() -> None:
    setting = TrainSetting(parallelism="zero3", frozen_stages=1)
    with pytest.raises(UnsupportedError, match="one device") as refused:
        trace_estimate(TINY_IMAGES, setting, Classifier)
    assert "frozen stages" in str(refused.value)


@pytest.mark.parametrize(("kind", "said"), [("blocks", "no repeated blocks"), ("nested", "blocks")])
def test_a_module_without_blocks_cannot_be_checkpointed(kind: str, said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        trace_estimate(TINY_IMAGES, TrainSetting(batch_size=2, checkpointing=kind), Classifier)


def test_recurrent_layers_say_what_is_not_counted() -> None:
    class Recurrent(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.LSTM(12, 12, batch_first=True)

        def forward(self, images: Tensor) -> Tensor:
            found = self.layers(images.flatten(2))[0].flatten(1)
            return self.head(torch.nn.functional.pad(found, (0, 12)))

    def notes(kind: type[Classifier]) -> str:
        shapes = FactoryModel(factory="tests:none", image_size=(4, 3), num_classes=10)
        return " ".join(trace_estimate(shapes, TrainSetting(batch_size=2), kind).notes)

    class Plain(Classifier):
        def forward(self, images: Tensor) -> Tensor:
            return self.head(torch.nn.functional.pad(images.flatten(1), (0, 12)))

    assert "what cuDNN keeps of them for backward" in notes(Recurrent)
    assert "cuDNN" not in notes(Plain)
