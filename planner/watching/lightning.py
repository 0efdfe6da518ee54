"""The hook for Lightning: `Trainer(callbacks=[WatchCallback("run")])`."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import Callback

from planner.watching.loaders import count_images
from planner.watching.watch import Watch


class WatchCallback(Callback):
    """Counts optimizer steps by `trainer.global_step`, and images by the batches.

    What the loop waits for data is known where the loader is watched: `fit(module,
    hook.time(loader))`. The gap between two batches would also hold what loggers and progress bars
    wait for the device. Takes the arguments of `planner.watch`.
    """

    def __init__(self, plan: object = None, folder: Any = None, **options: Any) -> None:
        super().__init__()
        self.watch = Watch(plan, folder, **options)
        self._steps = 0
        self._paused: float | None = None

    def time(self, loader: Any) -> Any:
        return self.watch.time(loader)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._steps = trainer.global_step
        if self.watch._writer is None:
            self.watch._writer = _tensorboard(trainer)
        self.watch.open()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self.watch._is_timed:
            self.watch.micro_step(count_images(batch))
        if trainer.global_step > self._steps:
            self._steps = trainer.global_step
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            self.watch.step(loss=loss)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._paused = time.perf_counter()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._paused is not None:
            self.watch.skip(time.perf_counter() - self._paused)
            self._paused = None

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.watch.close(exception)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.watch.close()


def _tensorboard(trainer: Any) -> Any | None:
    """The writer of a TensorBoard logger, where the trainer has one."""
    for logger in getattr(trainer, "loggers", ()):
        writer = getattr(logger, "experiment", None)
        if hasattr(writer, "add_scalar"):
            return writer
    return None
