"""How GPUs are joined: what `nvidia-smi topo -m`, `topo -p2p r` and `nvlink --status` say.

Layouts after NVIDIA/nccl#1505 (topo), noonghunna/club-3090#1229 (p2p) and
Azure/azhpc-diagnostics#73 (nvlink).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# What `topo -p2p` prints of a pair that has no P2P, by its own legend.
P2P_REASONS = {
    "CNS": "the chipset does not support it",
    "GNS": "the GPU does not support it",
    "TNS": "the topology does not support it",
    "NS": "it is not supported",
    "DR": "it is disabled in the driver's registry",
}


@dataclass(frozen=True)
class NvLinks:
    """The NVLinks of a GPU: how many are up and down, and GB/s of one that is up."""

    up: int = 0
    down: int = 0
    rate: float = 0.0


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """How GPU pairs are connected, (0, 1) -> "NV12", from the matrix of `nvidia-smi topo -m`."""
    return _gpu_matrix(text)


def parse_peers(text: str) -> dict[tuple[int, int], str]:
    """Whether GPU pairs read each other's memory, (0, 1) -> "OK" or why not, from the matrix of
    `nvidia-smi topo -p2p r`. Unknown pairs are left out."""
    return {pair: how for pair, how in _gpu_matrix(text).items() if how in {"OK", *P2P_REASONS}}


def parse_nvlinks(text: str) -> dict[int, NvLinks]:
    """The NVLinks by GPU, from `nvidia-smi nvlink --status`."""
    found: dict[int, NvLinks] = {}
    gpu = None
    for line in text.splitlines():
        if head := re.match(r"GPU (\d+):", line.strip()):
            gpu = int(head[1])
        elif (link := re.match(r"Link \d+: (?:([\d.]+) GB/s|<?(inactive)>?)", line.strip())) and (
            gpu is not None
        ):
            known = found.get(gpu, NvLinks())
            up, down = known.up + (link[1] is not None), known.down + (link[1] is None)
            found[gpu] = NvLinks(up, down, float(link[1]) if link[1] else known.rate)
    return found


def _gpu_matrix(text: str) -> dict[tuple[int, int], str]:
    """The cells of two GPUs, of which the first has the lower number."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in text.splitlines()]
    table = [line.split() for line in lines]
    columns = next((cells for cells in table if cells[:2] == ["GPU0", "GPU1"]), [])
    found = {}
    for cells in table:
        if not cells or not re.fullmatch(r"GPU\d+", cells[0]):
            continue
        for column, cell in zip(columns, cells[1:], strict=False):
            if re.fullmatch(r"GPU\d+", column) and cell != "X":
                found[int(cells[0][3:]), int(column[3:])] = cell
    return {pair: how for pair, how in found.items() if pair[0] < pair[1]}
