"""What NCCL keeps on a device for itself, outside PyTorch's allocator, beside the CUDA context."""

from __future__ import annotations

from dataclasses import dataclass

from planner.core.schema import TrainSetting
from planner.core.units import MIB, format_bytes

# Derived: a channel keeps 10 MiB to receive from a peer and 2 MiB to send to it (src/init.cc and
# src/transport/p2p.cc of NVIDIA/nccl @5067397c), and two channels to one peer are the fewest.
FEWEST_BYTES = 2 * 12 * MIB
# Quoted, of one communicator: 544 to 688 MB on 4 A100s (issue 964 of NVIDIA/nccl), 1.06 GB on 8
# H100s (issue 1685). It grows with the channels, which NVLink has more of than PCIe.
UP_TO_FOUR = (616_000_000, 688_000_000)
MORE = (1_060_000_000, 1_060_000_000)


@dataclass(frozen=True)
class Communication:
    """Bytes of all communicators of a process: what is assumed, and the ends of its range."""

    low_bytes: int = 0
    num_bytes: int = 0
    high_bytes: int = 0
    basis: tuple[str, ...] = ()


def communication_memory(setting: TrainSetting) -> Communication:
    """What the communicators of a step take. There is one over all devices; hsdp has one to shard
    and one to copy. Nothing is known of one device by itself."""
    if setting.world_size == 1 or setting.parallelism == "none":
        return Communication()
    count = 2 if setting.parallelism == "hsdp" else 1
    assumed, high = UP_TO_FOUR if setting.world_size <= 4 else MORE
    low, assumed, high = (count * figure for figure in (FEWEST_BYTES, assumed, high))
    several = f"{count} communicators" if count > 1 else "one communicator"
    basis = (
        f"{format_bytes(assumed)} of NCCL's own buffers for {several}, outside PyTorch's "
        f"allocator, within {format_bytes(low)} to {format_bytes(high)}: quoted from 4 A100s and 8 "
        "H100s, less over PCIe (NCCL_BUFFSIZE and NCCL_MAX_NCHANNELS lower it)"
    )
    return Communication(low, assumed, high, (basis,))
