"""Tasks: what one training step is, for any model. A task has a module, batches and a loss.

If a factory returns a module, it is trained from images [B, C, H, W] to logits [B, classes]. For
any other step it returns a task: an object with three methods, which the recorder, a probe and an
emitted script all call.

    class Clips:
        def module(self):
            return torchvision.models.get_model("swin3d_t", num_classes=400)

        def batch(self, size, device):
            clips = torch.randn(size, 3, 16, 224, 224, device=device)
            return clips, torch.randint(400, (size,), device=device)

        def loss(self, module, batch):
            clips, labels = batch
            return torch.nn.functional.cross_entropy(module(clips), labels)

These write a task for you: `from_example` takes a module, one real batch and a loss,
`from_collator` a model of transformers with its data collator, `from_lightning` a LightningModule.
This package needs torch.
"""

from planner.core.errors import ContractError
from planner.training.tasks.contract import Task
from planner.training.tasks.example import from_collator, from_example, from_lightning
from planner.training.tasks.lookup import as_task, load_task, task_for

__all__ = [
    "ContractError",
    "Task",
    "as_task",
    "from_collator",
    "from_example",
    "from_lightning",
    "load_task",
    "task_for",
]
