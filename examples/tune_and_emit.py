"""Find the fastest setting of a small Swin by real training runs, and write a script with it.

Run: python tune_and_emit.py [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

import planner
import search

MODEL = planner.SwinConfig(
    image_size=32, embed_dim=16, depths=(2, 2), num_heads=(1, 2), window_size=4, num_classes=10
)  # fmt: skip


def main(folder: Path) -> None:
    found = search.tune(
        MODEL,
        device="cpu",
        batch_size=[4, 8],
        restrict={"precision": ["fp32"], "compile": ["off"]},
        trials=2,
        output=folder,
    )
    assert found.setting is not None, found.advice
    chosen = found.setting.differences(planner.TrainSetting())
    print(f"fastest of {found.num_probes} probes: {chosen}")
    emitted = planner.emit(found, "pytorch")
    script = emitted.write(folder)
    print(f"wrote {script}; train with: {emitted.launch}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "tune-small-swin"))
