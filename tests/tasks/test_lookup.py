"""What a factory may return, each recorded; and what is said of a step that keeps no contract."""

from pathlib import Path

import pytest

from planner.core.errors import PlannerError, UnsupportedError
from planner.core.schema import FactoryModel, TrainSetting
from planner.estimation.estimate import estimate_ledger, resolve
from planner.ledger.cache import decode, encode
from planner.training.tasks import ContractError, task_for
from tests.answers import estimate_text
from tests.steps import recorded
from tests.tasks.conftest import change

SETTING = TrainSetting(batch_size=2, precision="fp32")


def mine(name: str) -> FactoryModel:
    return FactoryModel(factory=f"mine:{name}", image_size=(4, 4), num_classes=10)


def test_every_form_of_a_task_is_recorded_alike(own: Path) -> None:
    found = [recorded(mine(name), SETTING) for name in ("Volumes", "volumes", "by_example")]
    assert {ledger.num_parameters for ledger in found} == {2 * 27 + 2}
    kinds = [[type(event) for event in ledger.events] for ledger in found]
    assert kinds[0] == kinds[1] == kinds[2]


def test_a_task_may_make_its_optimizer(own: Path) -> None:
    model = mine("OwnOptimizer")
    with_state = recorded(mine("Volumes"), SETTING)
    ledger = recorded(model, SETTING)
    assert len(ledger.events) < len(with_state.events)
    assert (ledger.own_optimizer, with_state.own_optimizer) == ("Adagrad", "")
    assert "the task makes its optimizer (Adagrad)" in ledger.notes
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
        ("pixels", r"made a tensor \[2, 10, 4, 4\] of images \[2, 3, 4, 4\]"),
        ("few_classes", "returned logits of 7 classes, and num_classes is 10"),
        ("tokens", "let its factory return a task"),
    ],
)
def test_a_module_that_is_no_classifier_of_images_is_told_as_such(
    own: Path, name: str, message: str
) -> None:
    with pytest.raises(PlannerError, match=message) as caught:
        recorded(mine(name), SETTING)
    assert "fake" not in str(caught.value)


def record_changed(own: Path, changed: str) -> None:
    change(own, changed)
    kept = "blocks" if "blocks" in changed else "none"
    recorded(mine("Changed"), SETTING.model_copy(update={"checkpointing": kept}))


LOSS = "def loss(self, module, batch): return"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (f"{LOSS} module(batch[0]).sum(dim=0)",
         r"the loss of .*:Changed is a tensor \[2, 4, 4, 4\], not a scalar"),
        (f"{LOSS} super().loss(module, batch).detach()", "does not depend on any parameter"),
        # It would run, and train nothing of what is counted.
        ("def module(self): return super().module().requires_grad_(False)", "no trained parameter"),
        (f"{LOSS} super().loss(self.module().to(batch[0].device), batch)",
         "the loss depends on no trained parameter of the module"),
        ("def batch(self, size, device): return {'a': [], 'b': 1}",
         "returned a dict with 'a', 'b', and no tensor is in it"),
        ("def optimizer(self, parameters): return [torch.optim.SGD(parameters)] * 2",
         "returned a list of 2, not one torch.optim.Optimizer"),
        ("batch = None", r"a task without batch\(size, device\)\."),
        # What would only seem to be done.
        ("def batch(self, size, device): return super().batch(4, device)", "same shapes for every"),
        ("def blocks(self, module): return [nn.Linear(1, 1)]",
         "not in the module, of class Linear"),
    ],
)  # fmt: skip
def test_a_contract_that_is_not_kept_is_told_as_such(own: Path, changed: str, message: str) -> None:
    with pytest.raises(PlannerError, match=message):
        record_changed(own, changed)


@pytest.mark.parametrize(
    ("changed", "raised", "called"),
    [
        ("def module(self): return nn.Linear('a', 3)", "module() of {} raised TypeError",
         "module()"),
        ("def blocks(self, module): return module.layers", "blocks() of {} raised AttributeError",
         "blocks(a Conv3d)"),
        (f"{LOSS} math.sqrt(2) * module(batch[0]).sum()", "loss() of {} raised NameError",
         "loss(module, batch)"),
    ],
)  # fmt: skip
def test_a_method_that_raises_is_named_by_its_line(
    own: Path, changed: str, raised: str, called: str
) -> None:
    """The user's line, also where an error is raised in torch, or before the method began."""
    with pytest.raises(ContractError) as caught:
        record_changed(own, changed)
    line = f"{own}:{len(own.read_text().splitlines())}: "
    assert caught.value.message.startswith(f"{raised.format(mine('Changed').title)} at {line}")
    assert caught.value.way_out == f"It was called as {called}: mend it there."
