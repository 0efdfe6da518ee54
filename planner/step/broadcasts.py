"""What `DistributedDataParallel` sends from the first device to the others: weights once, buffers
with forwards (torch/csrc/distributed/c10d/comm.cpp of torch 2.13)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from planner.core.units import MIB
from planner.step.reducer import BROADCAST_LABEL, Gradients, Weight, assign_buckets

CHUNK_BYTES = 250 * MIB  # `broadcast_bucket_size` of DistributedDataParallel
MAX_IN_FLIGHT = 2


class States:
    """Parameters and buffers that the first device sends to the others, flattened in chunks."""

    def __init__(self, gradients: Gradients, buffers: Sequence[Weight], broadcasts: bool) -> None:
        self.gradients = gradients
        self.buffers = buffers if broadcasts else ()
        self.is_stale = True  # `require_forward_param_sync`: gradients were summed since

    def at_build(self, parameters: Sequence[Weight]) -> None:
        """`_sync_module_states`: every parameter, frozen ones too, and the buffers."""
        self._broadcast([*parameters, *self.buffers])

    def at_forward(self) -> None:
        """`_sync_buffers`."""
        if self.is_stale and self.buffers:
            self._broadcast(self.buffers)

    def _broadcast(self, tensors: Sequence[Weight]) -> None:
        """`broadcast_coalesced`: at most two chunks at once."""
        in_flight: deque[tuple[list[Weight], Any, int]] = deque()
        for places in sorted(assign_buckets(tensors, (CHUNK_BYTES,)), key=min):
            if len(in_flight) == MAX_IN_FLIGHT:
                self._finish(*in_flight.popleft())
            in_flight.append(self._start([tensors[place] for place in places]))
        while in_flight:
            self._finish(*in_flight.popleft())

    def _start(self, chunk: list[Weight]) -> tuple[list[Weight], Any, int]:
        """One tensor needs no copy (`flatten_dense_tensors`)."""
        dtype, num_bytes = chunk[0].dtype, sum(t.num_bytes for t in chunk)
        flat = None
        if len(chunk) > 1:
            flat = self.gradients.make(sum(t.numel for t in chunk), dtype, BROADCAST_LABEL)
            self.gradients.compute("aten.cat", dtype, 2 * num_bytes)
        return chunk, flat, self.gradients.send("broadcast", num_bytes, dtype, follows=True)

    def _finish(self, chunk: list[Weight], flat: Any, handle: int) -> None:
        self.gradients.wait(handle)
        for tensor in chunk:
            if tensor.numel:
                self.gradients.compute("aten.copy_", tensor.dtype, 2 * tensor.num_bytes)
