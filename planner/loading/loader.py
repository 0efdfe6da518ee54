"""The real loader of a setting: a torch `DataLoader`, in timm's case with its prefetcher."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from planner.errors import PlannerError, UnsupportedError
from planner.loading.datasets import EndlessSampler, Repeated, load_own, open_dataset
from planner.loading.pipelines import Steps, steps_of
from planner.schema.loading import DataSource, LoaderSetting

Collate = Callable[[list[Any]], Any]
OWN_ONLY = "A function that makes a Dataset is loaded with the pipeline 'own', and only such is."


def make_loader(
    source: DataSource,
    setting: LoaderSetting,
    device: torch.device | str,
    train: bool = True,
    *,
    seed: int = 0,
    endless: bool = False,
    among: Sequence[int] | None = None,
    wrap: Callable[[Dataset[Any]], Dataset[Any]] | None = None,
    wrap_collate: Callable[[Collate], Collate] | None = None,
) -> Iterable[Any]:
    """A loader of batches of `source`, as a training on `device` would make it.

    A batch is (images [B, 3, H, W], targets [B]), on the host (`to_device` copies it); timm's is on
    the device already, and what the user's own Dataset yields is its own matter. In training items
    are shuffled (by `seed`) and a smaller last batch is dropped. `endless` goes through the data
    again and again (and `among` only through these items). `wrap` may put a data set around ours.
    Without a CUDA device nothing is pinned, whatever the setting says: torch would only warn.

    Raises PlannerError where the data cannot be read, UnsupportedError where the pipeline cannot
    run here.
    """
    device = torch.device(device)
    dataset, steps, collate = _open(source, setting, train=train, endless=endless)
    if wrap is not None:
        dataset = wrap(dataset)
    if wrap_collate is not None:
        collate = wrap_collate(collate or default_collate)
    loader = DataLoader(
        dataset,
        batch_size=setting.batch_size,
        num_workers=setting.workers,
        prefetch_factor=setting.prefetch_factor,
        persistent_workers=setting.persistent_workers,
        pin_memory=pins(setting, device),
        collate_fn=collate,
        drop_last=train,
        generator=torch.Generator().manual_seed(seed),
        **_order(dataset, setting, train, endless, seed, among),
    )
    if steps is not None and steps.on_device is not None:
        return steps.on_device(loader, device)  # type: ignore[no-any-return]
    return loader


def _open(
    source: DataSource, setting: LoaderSetting, *, train: bool, endless: bool
) -> tuple[Dataset[Any], Steps | None, Collate | None]:
    """The data set, its steps where they are ours, and its collation where it has one."""
    if (source.kind == "factory") != (setting.pipeline == "own"):
        raise UnsupportedError(
            f"{source.location} cannot be loaded with the pipeline {setting.pipeline!r}.", OWN_ONLY
        )
    if source.kind == "factory":
        own = load_own(source)
        dataset = own.dataset
        if endless and isinstance(dataset, IterableDataset):
            dataset = Repeated(dataset)
        return dataset, None, own.collate
    steps = steps_of(setting.pipeline, setting.image_size, train)
    return open_dataset(source, steps, endless=endless, train=train), steps, steps.collate


def _order(
    dataset: Dataset[Any],
    setting: LoaderSetting,
    train: bool,
    endless: bool,
    seed: int,
    among: Sequence[int] | None,
) -> dict[str, Any]:
    """The arguments that say in which order items come; a stream has its own."""
    if isinstance(dataset, IterableDataset):
        return {}
    num_items = len(dataset)  # type: ignore[arg-type]
    if endless:
        return {"sampler": EndlessSampler(num_items, seed, among)}
    if train and num_items < setting.batch_size:
        raise PlannerError(
            f"the data have {num_items} items, fewer than one batch of {setting.batch_size}.",
            "Pass a smaller batch.",
        )
    return {"shuffle": train}


def pins(setting: LoaderSetting, device: torch.device) -> bool:
    """Whether batches are laid in pinned memory: only a CUDA device copies faster from there."""
    return setting.pin_memory and device.type == "cuda" and torch.cuda.is_available()


def to_device(batch: Any, device: torch.device, *, non_blocking: bool = True) -> Any:
    """`batch` with all of its tensors on `device`."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=non_blocking)
    if isinstance(batch, dict):
        return {k: to_device(v, device, non_blocking=non_blocking) for k, v in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(v, device, non_blocking=non_blocking) for v in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(to_device(v, device, non_blocking=non_blocking) for v in batch)
    return batch
