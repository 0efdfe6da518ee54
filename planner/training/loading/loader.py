"""The real loader of a setting: a torch `DataLoader`, in timm's case with its prefetcher."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from planner.core.errors import PlannerError
from planner.core.schema.loading import DataSource, LoaderSetting
from planner.training.loading.datasets import EndlessSampler, Repeated, load_own, open_dataset
from planner.training.loading.pipelines import steps_of
from planner.training.loading.sources import check_pipeline

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class OpenData:
    """Data opened for a pipeline: the data set, how it makes batches (None: torch's default), and
    what is around the loader where a step is left for the device."""

    dataset: Dataset[Any]
    collate: Collate | None = None
    on_device: Callable[[Any, torch.device], Any] | None = None


def open_data(
    source: DataSource, setting: LoaderSetting, *, train: bool = True, endless: bool = False
) -> OpenData:
    """The data as `setting.pipeline` loads them.

    Raises PlannerError where the data cannot be read, UnsupportedError where the pipeline cannot
    run here.
    """
    check_pipeline(source, setting.pipeline)
    if source.kind == "factory":
        dataset, collate = load_own(source)
        if endless and isinstance(dataset, IterableDataset):
            dataset = Repeated(dataset)
        return OpenData(dataset, collate)
    steps = steps_of(setting.pipeline, setting.image_size, train)
    dataset = open_dataset(source, steps, endless=endless, train=train)
    return OpenData(dataset, steps.collate, steps.on_device)


def load(
    data: OpenData,
    setting: LoaderSetting,
    device: torch.device,
    *,
    train: bool = True,
    seed: int = 0,
    endless: bool = False,
    among: Sequence[int] | None = None,
    context: BaseContext | None = None,
) -> Iterable[Any]:
    """A loader of batches of data that were opened, as a training on `device` would make it.

    A batch is (images [B, 3, H, W], targets [B]), on the host (`to_device` copies it); timm's is on
    the device already, and what the user's own Dataset yields is its own matter. In training items
    are shuffled (by `seed`) and a smaller last batch is dropped. `endless` goes through the data
    again and again, only through the items `among`. `context` starts its workers (None: as Python
    starts processes here). Without a CUDA device nothing is pinned, whatever the setting says:
    torch would only warn.
    """
    loader = DataLoader(
        data.dataset,
        **{**setting.arguments, "pin_memory": pins(setting, device)},
        collate_fn=data.collate,
        drop_last=train,
        generator=torch.Generator().manual_seed(seed),
        multiprocessing_context=context if setting.workers else None,
        **_order(data.dataset, setting, train, endless, seed, among),
    )
    return data.on_device(loader, device) if data.on_device is not None else loader


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
