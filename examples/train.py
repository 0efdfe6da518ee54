"""A training script like many: timm's ViT-B, bf16 autocast, AdamW. It knows nothing of planner.

planner emulate --gpu "RTX 4090" --steps 3 -- python examples/train.py --batch-size 64
"""

import argparse

import timm
import torch
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=64)
batch_size = parser.parse_args().batch_size

model = timm.create_model("vit_base_patch16_224").cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(100):
    images = torch.randn(batch_size, 3, 224, 224, device="cuda")
    labels = torch.randint(1000, (batch_size,), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
