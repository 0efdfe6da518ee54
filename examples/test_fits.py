"""A test for a CI without a GPU: this training step fits a card.

    pytest examples/test_fits.py

It needs torch's build for CUDA and a C compiler, and is skipped where one is missing. The program
trains on an emulated GPU: torch's own CUDA code asks for the memory, and kernels compute nothing.
"""

from __future__ import annotations

pytest_plugins = ["planner.programs.fixture"]


def train() -> None:
    """Two steps of a small Swin, as any program would make them."""
    import torch
    from torchvision.models import swin_t

    model = swin_t().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(torch.randn(64, 3, 224, 224, device="cuda"))
            loss = torch.nn.functional.cross_entropy(logits, logits.new_zeros(64, dtype=torch.long))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_batch_64_fits_8_gib(emulate) -> None:  # type: ignore[no-untyped-def]
    run = emulate(train, gpu="RTX 4090", memory_bytes="8GiB")
    assert run.fits, run.out_of_memory
    assert run.steps == 2
