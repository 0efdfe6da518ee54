"""The hook for transformers: `Trainer(…, callbacks=[WatchCallback("run")])`."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback

from planner.watching.watch import Watch


class WatchCallback(TrainerCallback):  # type: ignore[misc]
    """Counts optimizer steps, and images and waits by the trainer's own loader, which is timed in
    place. Evaluations and checkpoints are no training. Takes the arguments of `planner.watch`."""

    def __init__(self, plan: object = None, folder: Any = None, **options: Any) -> None:
        self.watch = Watch(plan, folder, **options)
        self._last = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.watch.open()
        loader = kwargs.get("train_dataloader")
        if loader is not None:
            self.watch.time(loader)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        images = None
        if not self.watch._is_timed:
            images = args.train_batch_size * args.gradient_accumulation_steps
        self.watch.step(images)
        self._last = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        for name in ("loss", "grad_norm"):
            if isinstance((logs or {}).get(name), float):
                self.watch.see_number(name, logs[name])

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._pause()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._pause()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.watch.close()

    def _pause(self) -> None:
        """Everything since the last step."""
        now = time.perf_counter()
        if self._last:
            self.watch.skip(now - self._last)
            self._last = now
