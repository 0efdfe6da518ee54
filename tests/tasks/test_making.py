"""What a factory may return, each recorded; and what is said of a step that keeps no contract."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")


from planner.core.errors import PlannerError, UnsupportedError  # noqa: E402
from planner.core.schema import FactoryModel, TrainSetting  # noqa: E402
from planner.estimation.estimate import estimate_ledger, resolve  # noqa: E402
from planner.ledger.cache import decode, encode  # noqa: E402
from planner.training.tasks import ContractError, task_for  # noqa: E402
from tests.answers import estimate_text  # noqa: E402
from tests.equality import recorded  # noqa: E402

OWN = """
    import torch
    from torch import nn
    from torch.nn import functional as F

    from planner.training.tasks import from_example

    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv3d(1, 2, 3, padding=1)

        def forward(self, x):
            return {"out": self.conv(x)}

    def dense_loss(module, batch):
        return F.cross_entropy(module(batch["image"])["out"], batch["label"])

    class Volumes:
        unit = "volumes"

        def module(self):
            return Dense()

        def batch(self, size, device):
            return {
                "image": torch.randn(size, 1, 4, 4, 4, device=device),
                "label": torch.randint(2, (size, 4, 4, 4)).to(device),
            }

        def loss(self, module, batch):
            return dense_loss(module, batch)

    volumes = Volumes()

    def by_example():
        return Dense(), Volumes().batch(3, "cpu"), dense_loss

    class ReadsItsData(Volumes):
        def batch(self, size, device):
            batch = super().batch(size, device)
            assert batch["label"].max().item() <= 1, "a real batch"
            return batch

    class OwnOptimizer(Volumes):
        def optimizer(self, parameters):
            return torch.optim.SGD(parameters, lr=1.0)

    class Summed(Volumes):
        def loss(self, module, batch):
            return module(batch["image"])["out"].sum(dim=0)

    class Detached(Volumes):
        def loss(self, module, batch):
            return dense_loss(module, batch).detach()

    def dense_module():
        return Dense()

    def pixels():
        return nn.Conv2d(3, 10, 1)

    def few_classes():
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, 7))

    def tokens():
        return nn.Embedding(10, 10)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's in the current directory."""
    name = f"own_tasks_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(OWN))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def factory(own: str, name: str) -> FactoryModel:
    return FactoryModel(factory=f"{own}:{name}", image_size=(4, 4), num_classes=10)


SETTING = TrainSetting(batch_size=2, precision="fp32")


@pytest.mark.parametrize("name", ["Volumes", "volumes", "by_example"])
def test_every_form_of_a_task_is_recorded_alike(own: str, name: str) -> None:
    ledger = recorded(factory(own, name), SETTING)
    expected = recorded(factory(own, "Volumes"), SETTING)
    assert ledger.num_parameters == 2 * 27 + 2
    assert [type(event) for event in ledger.events] == [type(event) for event in expected.events]


def test_a_task_may_make_its_optimizer(own: str) -> None:
    model = factory(own, "OwnOptimizer")
    with_state = recorded(factory(own, "Volumes"), SETTING)
    ledger = recorded(model, SETTING)
    assert len(ledger.events) < len(with_state.events)
    assert (ledger.own_optimizer, with_state.own_optimizer) == ("SGD", "")
    assert "the task makes its optimizer (SGD)" in ledger.notes
    assert encode({}, ledger) != encode({}, with_state)
    assert decode(encode({}, ledger), {}) == ledger
    shown = estimate_text(estimate_ledger(model, resolve(model, SETTING)[1], ledger))
    assert "batch 2, fp32, own optimizer, checkpointing none" in " ".join(shown.split())
    task_for(model, SETTING.model_copy(update={"optimizer": "own"}))
    with pytest.raises(UnsupportedError, match="makes its own optimizer, and not adamw-fused"):
        task_for(model, SETTING.model_copy(update={"optimizer": "adamw-fused"}))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Summed", r"the loss of .*:Summed is a tensor \[2, 4, 4, 4\], not a scalar"),
        ("Detached", "does not depend on any parameter"),
        (
            "pixels",
            r"made a tensor \[2, 10, 4, 4\] of images \[2, 3, 4, 4\]",
        ),
        ("few_classes", "returned logits of 7 classes, and num_classes is 10"),
    ],
)
def test_a_contract_that_is_not_kept_is_told_as_such(own: str, name: str, message: str) -> None:
    with pytest.raises(ContractError, match=message) as caught:
        recorded(factory(own, name), SETTING)
    assert "fake" not in str(caught.value)


@pytest.mark.parametrize("name", ["dense_module", "tokens"])
def test_a_step_that_breaks_on_images_is_told_of_tasks(own: str, name: str) -> None:
    with pytest.raises(PlannerError, match="let its factory return a task") as caught:
        recorded(factory(own, name), SETTING)
    assert "register_fake" not in str(caught.value)


BROKEN = """
    import torch
    from torch import nn

    class Task:
        def module(self):
            return nn.Linear(3, 3)

        def batch(self, size, device):
            return torch.randn(size, 3, device=device)

        def loss(self, module, batch):
            return module(batch).sum()

    class Broken(Task):
"""


def broken(folder: Path, monkeypatch: pytest.MonkeyPatch, changed: str) -> FactoryModel:
    """A task of which only `changed`, the last line of its file, is wrong."""
    name = f"broken_{abs(hash(changed))}"
    (folder / f"{name}.py").write_text(f"{textwrap.dedent(BROKEN).lstrip()}    {changed}\n")
    monkeypatch.syspath_prepend(str(folder))
    return FactoryModel(factory=f"{name}:Broken")


@pytest.mark.parametrize(
    ("changed", "raised", "called"),
    [
        ("def module(self): return nn.Linear('a', 3)",
         "module() of {} raised TypeError", "module()"),
        ("def blocks(self, module): return module.layers", "blocks() of {} raised AttributeError",
         "blocks(a Linear)"),
        ("def loss(self, module, batch): return math.sqrt(2) * module(batch).sum()",
         "loss() of {} raised NameError", "loss(module, batch)"),
    ],
)  # fmt: skip
def test_a_method_that_raises_is_named_by_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str, raised: str, called: str
) -> None:
    """The user's line, also where an error is raised in torch, or before the method began."""
    model = broken(tmp_path, monkeypatch, changed)
    setting = TrainSetting(batch_size=2, checkpointing="blocks" if "blocks" in changed else "none")
    with pytest.raises(ContractError) as caught:
        recorded(model, setting)
    file = tmp_path / f"{model.parts[0]}.py"
    line = f"{file}:{len(file.read_text().splitlines())}: "
    assert caught.value.message.startswith(f"{raised.format(model.title)} at {line}")
    assert caught.value.way_out == f"It was called as {called}: mend it there."


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("def module(self): return nn.Linear(3, 3).requires_grad_(False)", "no trained parameter"),
        ("def loss(self, module, batch): return self.module().to(batch.device)(batch).sum()",
         "the loss depends on no trained parameter of the module"),
    ],
)  # fmt: skip
def test_a_step_that_trains_another_module_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str, message: str
) -> None:
    """It would run, and train nothing of what is counted."""
    with pytest.raises(ContractError, match=message):
        recorded(broken(tmp_path, monkeypatch, changed), SETTING)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("def batch(self, size, device): return {'a': [], 'b': 1}",
         "returned a dict with 'a', 'b', and no tensor is in it"),
        ("def optimizer(self, parameters): return [torch.optim.SGD(parameters)] * 2",
         "returned a list of 2, not one torch.optim.Optimizer"),
        ("batch = None", "a task without batch(size, device)."),
    ],
)  # fmt: skip
def test_what_a_method_may_not_return_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str, said: str
) -> None:
    with pytest.raises(ContractError, match=re.escape(said)):
        recorded(broken(tmp_path, monkeypatch, changed), SETTING)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("def batch(self, size, device): return super().batch(4, device)", "same shapes for every"),
        (
            "def blocks(self, module): return [nn.Linear(1, 1)]",
            "not in the module, of class Linear",
        ),
    ],
)
def test_what_would_only_seem_to_be_done_is_refused(
    changed: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of one length whatever is asked for, and blocks that nobody calls."""
    own = f"{OWN}\n    class Changed(Volumes):\n        {changed}\n"
    (tmp_path / "changed_task.py").write_text(textwrap.dedent(own))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "changed_task", raising=False)
    setting = TrainSetting(batch_size=2, checkpointing="blocks" if "blocks" in changed else "none")
    with pytest.raises(PlannerError, match=said):
        recorded(FactoryModel(factory="changed_task:Changed"), setting)
