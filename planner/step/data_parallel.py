"""`DistributedDataParallel` on shapes: the buckets in which gradients cross between devices.

As torch makes it by default (`find_unused_parameters=False`, `gradient_as_bucket_view=False`):
torch/nn/parallel/distributed.py and torch/csrc/distributed/c10d/reducer.cpp of torch 2.13. The
bytes do not depend on how many devices there are: a single GPU holds them too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from planner.step.autograd import pointwise_cost
from planner.step.tensor import Device, GradientCell, Parameter, Tensor, empty
from planner.units import MIB, format_bytes

# `_DEFAULT_FIRST_BUCKET_BYTES` and `bucket_cap_mb`: limits after the first backward; until then
# all gradients share one bucket (distributed.py, `_ddp_init_helper`).
REBUILT_LIMITS = (MIB, 25 * MIB)
BUCKET_LABEL = "DDP bucket"


def assign_buckets(sizes: Iterable[int], limits: Sequence[int]) -> list[list[int]]:
    """Which of `sizes` (bytes, in order) share a bucket, by position: a bucket closes when it has
    reached its limit, which it may overshoot (`compute_bucket_assignment_by_size`). The last limit
    holds for all further buckets."""
    buckets: list[list[int]] = []
    bucket: list[int] = []
    filled = 0
    for position, num_bytes in enumerate(sizes):
        bucket.append(position)
        filled += num_bytes
        if filled >= limits[min(len(buckets), len(limits) - 1)]:
            buckets.append(bucket)
            bucket, filled = [], 0
    return [*buckets, bucket] if bucket else buckets


class Reducer:
    """The buckets of one model: they are kept from when it is wrapped, besides its gradients."""

    def __init__(self, device: Device, parameters: Sequence[Parameter]) -> None:
        self.device = device
        self.parameters = {id(p.cell): p for p in parameters}
        self.ready: list[Parameter] = []  # in the order of their gradients, until they are rebuilt
        self.is_rebuilt = False
        self.buckets = [self._allocate(parameters)]
        device.on_gradient = self.take

    @property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self.buckets)

    def take(self, cell: GradientCell) -> None:
        """A parameter's gradient is ready: it is copied into its bucket, summed there over all
        devices and copied back."""
        parameter = self.parameters[id(cell)]
        for _ in range(2):
            pointwise_cost(self.device, "aten.copy_", parameter, 1)
        if not self.is_rebuilt:
            self.ready.append(parameter)

    def rebuild(self) -> None:
        """`_rebuild_buckets`, with which the second forward begins: in the order in which gradients
        became ready. The old bucket goes first."""
        if self.is_rebuilt or not self.ready:
            return
        buckets = assign_buckets((p.num_bytes for p in self.ready), REBUILT_LIMITS)
        self._agree_on_indices(len(buckets))
        self.buckets.clear()
        self.buckets += [self._allocate([self.ready[i] for i in bucket]) for bucket in buckets]
        self.is_rebuilt = True
        self.ready.clear()

    def _agree_on_indices(self, num_buckets: int) -> None:
        """`sync_bucket_indices`: two small tensors that the first rank sends to the others."""
        indices = empty(self.device, (len(self.ready) + 1,), "int32", "aten.empty")
        sizes = empty(self.device, (num_buckets,), "int32", "aten.empty")
        del indices, sizes

    def _allocate(self, parameters: Sequence[Parameter]) -> Tensor:
        numel = sum(p.numel for p in parameters)
        bucket = empty(self.device, (numel,), parameters[0].dtype, BUCKET_LABEL)
        bucket.storage.assign("gradients")
        return bucket


def data_parallel_notes(reducer: Reducer | None) -> tuple[str, ...]:
    """What a ledger with buckets rests on."""
    if reducer is None:
        return ()
    return (
        f"DistributedDataParallel as torch makes it by default: {len(reducer.buckets)} gradient "
        f"buckets of {format_bytes(reducer.num_bytes)} in all, held beside the gradients and "
        "counted with them, on one GPU as on many (gradient_as_bucket_view=True needs less)",
    )
