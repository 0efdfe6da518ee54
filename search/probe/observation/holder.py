"""`python -m search.probe.observation.holder DEVICE BYTES`: holds memory until it is killed.

Takes what it can get of so much, in pieces, and says how much that was.
"""

from __future__ import annotations

import signal
import sys

import torch

from planner.units import MIB
from search.probe.parent.supervisor import PR_SET_PDEATHSIG, set_process_option

_PIECE_BYTES = 256 * MIB


def main() -> None:
    set_process_option(PR_SET_PDEATHSIG, signal.SIGKILL)
    device, wanted = sys.argv[1], int(sys.argv[2])
    pieces: list[torch.Tensor] = []
    held = 0
    while held + _PIECE_BYTES <= wanted:
        try:
            pieces.append(torch.ones(_PIECE_BYTES, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            break
        held += _PIECE_BYTES
    if device != "cpu":
        torch.cuda.synchronize(device)
    print(f"held {held}", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
