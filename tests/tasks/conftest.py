"""A module `mine` of the user's: some tasks and modules."""

import sys
import textwrap
from pathlib import Path

import pytest

OWN = """
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Volumes:
        unit = "volumes"

        def module(self):
            return nn.Conv3d(1, 2, 3, padding=1)

        def batch(self, size, device):
            labels = torch.randint(2, (size, 4, 4, 4)).to(device)
            return torch.randn(size, 1, 4, 4, 4, device=device), labels

        def loss(self, module, batch):
            return F.cross_entropy(module(batch[0]), batch[1])

    volumes = Volumes()

    def by_example():
        return volumes.module(), volumes.batch(3, "cpu"), volumes.loss

    class OwnOptimizer(Volumes):
        def optimizer(self, parameters):
            return torch.optim.Adagrad(parameters, lr=0.1)

    def pixels():
        return nn.Conv2d(3, 10, 1)

    def few_classes():
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, 7))

    def tokens():
        return nn.Embedding(10, 10)

    class Changed(Volumes):
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its file, to which the methods of `Changed` may be added, in the current directory."""
    file = tmp_path / "mine.py"
    file.write_text(f"{textwrap.dedent(OWN).strip()}\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return file


def change(own: Path, text: str) -> None:
    """Adds lines to `Changed`, whose fault is the last."""
    with own.open("a") as file:
        file.write(textwrap.indent(textwrap.dedent(text).strip(), "    ") + "\n")
