"""Before a launch: which batches of a Swin-T fit a card, with and without checkpointing?"""

from __future__ import annotations

import planner
from planner.core.units import format_bytes

MODEL = "timm:swin_tiny_patch4_window7_224"
GPU = "rtx 3090"


def main() -> None:
    print(f"{MODEL} on {GPU}, bf16, AdamW")
    for checkpointing in ("none", "blocks"):
        for batch_size in (64, 128, 256, 512):
            setting = planner.TrainSetting(batch_size=batch_size, checkpointing=checkpointing)
            found = planner.estimate(MODEL, setting, gpu=GPU)
            verdict = "fits" if found.fits else "does not fit"
            total = format_bytes(found.device_total_bytes)
            print(f"batch {batch_size:4}  checkpointing {checkpointing:6}  {total:>10}  {verdict}")


if __name__ == "__main__":
    main()
