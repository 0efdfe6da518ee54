"""What machines that train together must have alike, and what comes of it if they have not."""

from __future__ import annotations

import re
from collections.abc import Sequence

from planner.machine.layers import Difference

# A machine's own by right: names of its cards and files, and what NCCL says of itself.
_OWN_VARIABLES = re.compile(
    r"NCCL_(DEBUG|SOCKET_IFNAME|IB_HCA|IB_GID_INDEX|TOPO|GRAPH|HOSTID|LIB|COMM_ID|CONF|OOB)"
    r"|GLOO_SOCKET_IFNAME"
)
# (layer, name) of a line as a pattern, and what a difference does. NCCL: NVIDIA/nccl, src/init.cc.
_RULES: tuple[tuple[str, str, str], ...] = (
    ("libraries", "NCCL", "NCCL ends at its start where versions differ"),
    ("torch", "torch|built for", "another torch brings another NCCL, and may call collectives in "
     "another order, which hangs"),
    ("driver", "driver|CUDA of the driver", "NCCL may use another way on each machine"),
    ("card", r"GPU \d+", "every step waits for the slowest card"),
    ("card", r"GPU \d+ memory", "the batch is that of the smallest memory"),
    ("settings", r"(TORCH_)?NCCL_.*|GLOO_.*", "ranks that choose differently hang or fail"),
    ("torch", "Python", "code and pickles may differ"),
    ("libraries", "accelerate|lightning|deepspeed|transformers|timm", "ranks may build another "
     "model, or call collectives in another order"),
    ("link", "--link", "the slowest machine's link is everybody's"),
)  # fmt: skip


def matters_together(difference: Difference) -> str:
    """What a difference does to a training over these machines; "" where nothing is known to."""
    if _OWN_VARIABLES.match(difference.name):
        return ""
    for layer, name, consequence in _RULES:
        if difference.layer == layer and re.fullmatch(name, difference.name):
            return consequence
    return ""


def sorted_together(differences: Sequence[Difference]) -> list[Difference]:
    """Those that matter for a training over the machines, the gravest first; then the others."""
    order = [consequence for _, _, consequence in _RULES]

    def place(difference: Difference) -> int:
        consequence = matters_together(difference)
        return order.index(consequence) if consequence else len(order)

    return sorted(differences, key=place)
