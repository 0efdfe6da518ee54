"""Values that a step reads and that need no data: a trace goes on, and states what it assumes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from planner.core.schema import TrainSetting  # noqa: E402
from planner.trace.ledger import trace_estimate  # noqa: E402
from planner.trace.run import trace_training  # noqa: E402
from planner.trace.values import FINITE, MIDDLE, SMALL  # noqa: E402
from tests.trace.models import TINY_IMAGES, Classifier  # noqa: E402

SETTING = TrainSetting(batch_size=2, precision="bf16")
Read = Callable[[Tensor], object]


def read_in_forward(read: Read) -> tuple[object, tuple[str, ...]]:
    """What `read` returns when a forward calls it in a trace, and the assumptions stated."""
    found: list[object] = []

    class Reads(Classifier):
        def forward(self, images: Tensor) -> Tensor:
            found.append(read(images))
            return super().forward(images)

    trace = trace_training(Reads, TINY_IMAGES, SETTING, num_steps=1)
    return found[0], trace.assumptions


def written(images: Tensor) -> list[list[float]]:
    mask = images.new_zeros(2, 3)
    mask[:, 1:] = 1
    mask.view(-1)[0] += 5
    return (mask * 2).tolist()


CONSTANTS: dict[str, tuple[Read, object]] = {
    "arange": (lambda images: torch.arange(2, images.shape[1] + 2).tolist(), [2, 3, 4]),
    "computed": (lambda images: (torch.ones(2, 3).cumsum(1) > 2).sum().item(), 2),
    "like": (lambda images: torch.full_like(images, 7)[0, 0, 0].tolist(), [7.0] * 4),
    "written": (written, [[10.0, 2.0, 2.0], [0.0, 2.0, 2.0]]),
    "chosen": (lambda images: int(torch.linspace(0, 1, 5)[torch.tensor(3)] * 4), 3),
    "masked": (lambda images: torch.arange(6)[torch.arange(6) > 3].tolist(), [4, 5]),
    # Too large to write down, all elements equal.
    "large": (lambda images: bool((torch.ones(SMALL + 1) == 1).view(-1, 1).all()), True),
}


@pytest.mark.parametrize("kind", CONSTANTS)
def test_a_constant_is_read_as_it_is(kind: str) -> None:
    read, expected = CONSTANTS[kind]
    assert read_in_forward(read) == (expected, ())


def test_a_small_table_among_the_buffers_is_a_constant() -> None:
    class Table(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("levels", torch.tensor([1, 2, 4]))
            self.register_buffer("calls", torch.tensor(0))
            self.read: list[tuple[list[int], int]] = []

        def forward(self, images: Tensor) -> Tensor:
            self.calls += 1
            read.append((self.levels.tolist(), int(self.calls)))
            return super().forward(images)

    read: list[tuple[list[int], int]] = []
    assert trace_training(Table, TINY_IMAGES, SETTING).assumptions == ()
    assert read == [([1, 2, 4], 1), ([1, 2, 4], 2)]


RANDOM: dict[str, tuple[Read, object]] = {
    "uniform_": (lambda images: torch.empty(1).uniform_(2.0, 6.0).item(), 4.0),
    "rand": (lambda images: torch.rand(1).item() < 0.3, False),
    "randint": (lambda images: int(torch.randint(0, 5, (1,))), 2),
    "which of sizes": (lambda images: int(torch.empty(1).uniform_(0.0, 1.0).item()), 0),
}


@pytest.mark.parametrize("kind", RANDOM)
def test_a_random_number_has_the_middle_of_its_range(kind: str) -> None:
    read, expected = RANDOM[kind]
    assert read_in_forward(read) == (expected, (MIDDLE,))


def large(images: Tensor) -> Tensor:
    return images.repeat(1, 400, 8, 8)  # [2, 1200, 32, 32]


CHECKS: dict[str, tuple[Read, bool]] = {
    "isfinite": (lambda images: bool(torch.isfinite(images).all()), True),
    "isnan": (lambda images: bool(images.isnan().any()), False),
    "large": (lambda images: bool(torch.isfinite(large(images)).all()), True),
    "not": (lambda images: bool((~torch.isfinite(large(images))).any()), False),
}


@pytest.mark.parametrize("kind", CHECKS)
def test_a_check_finds_all_values_finite(kind: str) -> None:
    read, expected = CHECKS[kind]
    assert read_in_forward(read) == (expected, (FINITE,))


def test_the_notes_state_what_was_assumed() -> None:
    class Checked(Classifier):
        def forward(self, images: Tensor) -> Tensor:
            if not torch.isfinite(images).all():
                raise ValueError("not finite")
            return super().forward(images) * torch.rand(1).item()

    notes = trace_estimate(TINY_IMAGES, SETTING, Checked).notes
    assert notes[-2:] == (MIDDLE, FINITE)
