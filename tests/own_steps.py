"""Steps that docs/your-own-model.md has a row for, each as small as it may be."""

import torch
from torch import Tensor, nn

WIDTH, QUEUED = 128, 512  # a bias of 512 bytes, which no allocator rounds up


class Contrast(nn.Module):
    """A student, a teacher that follows it, and a queue of what the teacher said, as in MoCo."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.teacher.requires_grad_(False)
        self.queue: Tensor
        self.pointer: Tensor
        self.register_buffer("queue", torch.randn(QUEUED, WIDTH))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.int64))

    def forward(self, images: Tensor) -> Tensor:
        at = int(self.pointer)
        found: Tensor = self.student(images) @ self.queue.clone().T
        with torch.no_grad():
            self.teacher.weight.mul_(0.99).add_(self.student.weight, alpha=0.01)
            self.queue[at : at + len(images)] = self.teacher(images)
            self.pointer[0] = (at + len(images)) % QUEUED
        return found


class Contrasted:
    def module(self) -> nn.Module:
        return Contrast()

    def batch(self, size: int, device: torch.device) -> Tensor:
        return torch.randn(size, WIDTH, device=device)

    def loss(self, module: nn.Module, batch: Tensor) -> Tensor:
        found: Tensor = module(batch)
        return found.logsumexp(dim=1).mean()


class Hooked(Contrasted):
    """Only the last of two layers is trained, and the loss takes what a hook saw of the first."""

    def module(self) -> nn.Module:
        self.seen: list[Tensor] = []
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        module[0].requires_grad_(False)
        module[0].register_forward_hook(lambda _, __, output: self.seen.append(output))
        return module

    def loss(self, module: nn.Module, batch: Tensor) -> Tensor:
        self.seen.clear()
        return super().loss(module, batch) + self.seen[0].square().mean()


class Momentum(Contrasted):
    """Its own optimizer, which keeps one moment."""

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
