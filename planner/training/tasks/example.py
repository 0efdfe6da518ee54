"""Tasks from an example: one real batch, which is resized; a data collator; a LightningModule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from planner.core.errors import PlannerError, UnsupportedError, UsageError
from planner.training.tasks.contract import all_tensors, describe, map_tensors, rebuild, tree_values

Loss = Callable[[Any, Any], Tensor]


class ExampleTask:
    """The task of `from_example`: a module, a real batch of `num_items`, and a loss."""

    def __init__(self, module: nn.Module, example: Any, loss: Loss, num_items: int) -> None:
        self._module, self.example, self._loss, self.num_items = module, example, loss, num_items

    def module(self) -> nn.Module:
        return self._module

    def batch(self, size: int, device: torch.device) -> Any:
        """The example's items, again from the first where there are fewer than `size`."""
        return map_tensors(resize(self.example, self.num_items, size), lambda t: t.to(device))

    def loss(self, module: Any, batch: Any) -> Tensor:
        return self._loss(module, batch)


def from_example(
    module: nn.Module, batch: Any, loss: Loss, batch_size: int | None = None
) -> ExampleTask:
    """A task from one real batch, which is resized.

    Tensors whose first dimension is the batch are repeated or cut, and so are lists of samples.
    `batch_size` is the number of items in `batch`, where that cannot be seen.

        def build():
            model = UNet()
            batch = next(iter(loader))          # {"image": [4, 1, 96, 96, 96], "label": …}
            return planner.training.tasks.from_example(
                model, batch, lambda model, b: dice(model(b["image"]), b["label"])
            )

    Raises UsageError where the number of items is not clear, or is not `batch_size`.
    """
    return ExampleTask(module, batch, loss, count_items(batch, batch_size))


def from_collator(
    model: nn.Module, collator: Callable[[list[Any]], Any], dataset: Sequence[Any]
) -> CollatorTask:
    """A task from a transformers model, whose data collator makes batches from a dataset.

        def build():
            model = AutoModelForMaskedLM.from_config(config)
            return planner.training.tasks.from_collator(
                model, DataCollatorForLanguageModeling(tokenizer), dataset["train"]
            )

    The loss is the `loss` that the model returns, so the batch must have labels.
    """
    return CollatorTask(model, collator, dataset)


class CollatorTask:
    """The task of `from_collator`."""

    def __init__(
        self, model: nn.Module, collator: Callable[[list[Any]], Any], dataset: Sequence[Any]
    ) -> None:
        self.model, self.collator, self.dataset = model, collator, dataset

    def module(self) -> nn.Module:
        return self.model

    def batch(self, size: int, device: torch.device) -> Any:
        """The dataset's first items, again from the first where there are fewer than `size`."""
        items = [self.dataset[index % len(self.dataset)] for index in range(size)]
        return map_tensors(self.collator(items), lambda t: t.to(device))

    def loss(self, module: Any, batch: Any) -> Tensor:
        output = module(**batch)
        loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        if not isinstance(loss, Tensor):
            raise UsageError(
                f"the model returned {describe(output)} without a loss for the batch's fields "
                f"{', '.join(batch)}.",
                "Have the collator add labels, or write a task with a loss of your own.",
            )
        return loss


def resize(tree: Any, num_items: int, size: int) -> Any:
    """A batch of `size` items from one of `num_items`: its items in order, again and again."""
    if isinstance(tree, Tensor):
        if tree.dim() == 0 or tree.shape[0] != num_items:
            return tree
        return tree[torch.arange(size, device=tree.device) % num_items]
    if _is_samples(tree, num_items):
        # Clone each: a sample that is used twice must take its memory twice.
        return [map_tensors(tree[i % num_items], torch.clone) for i in range(size)]
    return rebuild(tree, lambda inner: resize(inner, num_items, size))


def _is_samples(tree: Any, num_items: int) -> bool:
    """A list with one entry for each item; [images, labels] is a list too, of whole batches."""
    if not isinstance(tree, list) or len(tree) != num_items:
        return False
    return not all(_may_hold(inner, num_items) for inner in tree)


def _may_hold(tree: Any, num_items: int) -> bool:
    """Whether every tensor of `tree` is a batch of `num_items`, or lies in a list of so many."""
    if isinstance(tree, Tensor):
        return tree.dim() == 0 or tree.shape[0] == num_items
    if isinstance(tree, list) and len(tree) == num_items:
        return True
    return all(_may_hold(inner, num_items) for inner in tree_values(tree))


def count_items(batch: Any, batch_size: int | None) -> int:
    """The number of items in `batch`. Raises UsageError where it is unclear."""
    if next(all_tensors(batch), None) is None:
        raise UsageError(
            f"the example batch is {describe(batch)} and holds no tensor.",
            "Give the batch as your loader yields it: tensors in tuples, lists or dicts.",
        )
    if batch_size is None and _is_columns(batch):
        batch = tuple(batch)
    sizes = sorted(_sizes(batch))
    matches = [size for size in sizes if _may_hold(batch, size)]
    if batch_size is not None:
        if batch_size not in sizes:
            raise UsageError(
                f"batch_size is {batch_size}, and nothing in the example batch has {batch_size} "
                "items.",
                f"Its tensors' first dimensions and its lists' lengths are {_join_sizes(sizes)}.",
            )
        matches = [batch_size]
    if len(matches) != 1:
        several = f"may have {_join_sizes(matches)} items"
        fault = several if matches else "shows no single number of items"
        raise UsageError(
            f"the example batch {fault}.",
            f"Say how many: from_example(module, batch, loss, batch_size=N), one of "
            f"{_join_sizes(matches or sizes)}.",
        )
    if _is_ambiguous(batch, matches[0]):
        raise UsageError(
            f"a list of the example batch holds {matches[0]} tensors whose first dimension is "
            f"{matches[0]}: as many samples, or so many whole batches.",
            "Take an example batch with another number of items.",
        )
    return matches[0]


def _is_columns(batch: Any) -> bool:
    """Whether a batch is a list [images, labels], as torch's own collator makes it, and not a list
    of samples, which would all have three dimensions or more."""
    if not isinstance(batch, list):
        return False
    dims = {inner.dim() if isinstance(inner, Tensor) else None for inner in batch}
    return len(dims) > 1 or not all(d is not None and d >= 3 for d in dims)


def _is_ambiguous(tree: Any, num_items: int) -> bool:
    """Whether a list may be read in two ways: as samples, and as so many whole batches."""
    if isinstance(tree, list) and len(tree) == num_items > 1:
        dims = {inner.dim() if isinstance(inner, Tensor) else 0 for inner in tree}
        if len(dims) == 1 and min(dims) and all(_may_hold(inner, num_items) for inner in tree):
            return True
    return any(_is_ambiguous(inner, num_items) for inner in tree_values(tree))


def _sizes(tree: Any) -> set[int]:
    """Every first dimension of a tensor and every length of a list in `tree`."""
    if isinstance(tree, Tensor):
        return {tree.shape[0]} if tree.dim() else set()
    lengths = {len(tree)} if isinstance(tree, list) and tree else set()
    return lengths.union(*map(_sizes, tree_values(tree)))


def _join_sizes(sizes: Sequence[int]) -> str:
    return " or ".join(map(str, sizes))


# A LightningModule as a task: its `training_step` is the loss. This imports no Lightning.


def is_lightning(value: object) -> bool:
    """Whether `value` is a LightningModule of `lightning` or of `pytorch_lightning`."""
    return any(kind.__name__ == "LightningModule" for kind in type(value).__mro__)


def from_lightning(module: Any, batch: Any = None, batch_size: int | None = None) -> LightningTask:
    """A task from a LightningModule and one real batch, by default one of `train_dataloader()`.

        def build():
            return planner.training.tasks.from_lightning(Segmenter(), next(iter(loader)))

    A factory may return the LightningModule itself if it has a `train_dataloader`. The loss is what
    `training_step(batch, 0)` returns, and the optimizer what `configure_optimizers` returns.
    Raises UnsupportedError for manual optimization, and PlannerError where there is no batch.
    """
    if not module.automatic_optimization:
        raise UnsupportedError(
            f"{type(module).__name__} optimizes by itself (automatic_optimization is False), and "
            "its step is then no loss.",
            "Write a task whose loss(module, batch) returns the loss of one step.",
        )
    if batch is None:
        batch = _first_batch(module)
    return LightningTask(module, batch, _training_loss, count_items(batch, batch_size))


class LightningTask(ExampleTask):
    """The task of `from_lightning`."""

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of `configure_optimizers`, without its schedule."""
        module: Any = self.module()
        result = module.configure_optimizers()
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], list | tuple):
            result = result[0]
        if isinstance(result, list | tuple) and len(result) == 1:
            result = result[0]
        if isinstance(result, Mapping):
            result = result["optimizer"]
        if not isinstance(result, torch.optim.Optimizer):
            raise UnsupportedError(
                f"configure_optimizers of {type(module).__name__} returned {describe(result)}, not "
                "one optimizer.",
                "Write a task with the one optimizer that trains the module.",
            )
        return result


def _training_loss(module: Any, batch: Any) -> Tensor:
    if hasattr(module, "_orig_mod"):  # torch.compile wrapped it
        raise UnsupportedError(
            "a LightningModule is not compiled in a probe: its training_step would call the module "
            "as it was.",
            "Choose --compile off, or write a task whose loss calls the module that it is given.",
        )
    result = module.training_step(batch, 0)
    return result["loss"] if isinstance(result, Mapping) else result  # type: ignore[no-any-return]


def _first_batch(module: Any) -> Any:
    try:
        loader = module.train_dataloader()
    except Exception as error:  # Lightning raises its own where a module has no loader
        raise PlannerError(
            f"{type(module).__name__} has no train_dataloader to take a batch from "
            f"({type(error).__name__}).",
            "Return planner.training.tasks.from_lightning(module, batch) with one real batch.",
        ) from error
    return next(iter(loader))
