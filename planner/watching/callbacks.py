"""`planner.watch` as a callback of Lightning and of transformers.

    Trainer(callbacks=[lightning_callback("run")])
    Trainer(..., callbacks=[transformers_callback("run")])

Each takes the arguments of `planner.watch`; images and waits are known where the loader is watched
(`watch.batches`), and images else by the batches.
"""

from __future__ import annotations

from typing import Any

from planner.watching.watch import Watch, _count_images


def lightning_callback(plan: object = None, folder: Any = None, **options: Any) -> Any:
    from lightning.pytorch import Callback

    watch = Watch(plan, folder, **options)

    class WatchCallback(Callback):
        steps, images = 0, 0

        def on_train_batch_end(
            self, trainer: Any, module: Any, out: Any, batch: Any, index: int
        ) -> None:
            self.images += _count_images(batch)
            if trainer.global_step > self.steps:
                loss = out.get("loss") if isinstance(out, dict) else out
                watch.step(self.images, loss)
                self.steps, self.images = trainer.global_step, 0

        def on_exception(self, trainer: Any, module: Any, error: BaseException) -> None:
            watch.close(error)

        def on_train_end(self, trainer: Any, module: Any) -> None:
            watch.close()

    return WatchCallback()


def transformers_callback(plan: object = None, folder: Any = None, **options: Any) -> Any:
    from transformers import TrainerCallback

    watch = Watch(plan, folder, **options)

    class WatchCallback(TrainerCallback):  # type: ignore[misc]
        loss: float | None = None

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            self.loss = (logs or {}).get("loss", self.loss)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch.step(args.train_batch_size * args.gradient_accumulation_steps, self.loss)

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch.close()

    return WatchCallback()
