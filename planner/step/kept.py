"""Results that selective checkpointing keeps, so that its recomputation need not compute them.

torch/utils/checkpoint.py, `_CachingTorchDispatchMode` and `_CachedTorchDispatchMode`: forward
stores the results of chosen operations, whether backward needs them or not; the recomputation
takes each one out again, and what it does not reach stays until the checkpointed call's frame dies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from planner.step.tensor import Device, Tensor

Results = tuple[Tensor, ...]


class KeptResults:
    """What one checkpointed call keeps, in the order in which it was computed."""

    __slots__ = ("_kept", "is_recomputing")

    def __init__(self) -> None:
        self._kept: deque[Results] = deque()
        self.is_recomputing = False

    def __del__(self) -> None:
        while self._kept:
            for tensor in self._kept.popleft():
                tensor.storage.let_go()

    def result_of(self, compute: Callable[[], Results]) -> Results:
        """What `compute` gives: computed and kept, or taken out of what was kept."""
        if not self.is_recomputing:
            results = compute()
            self._kept.append(tuple(result.detach() for result in results))
            for result in results:
                result.storage.hold()
            return results
        results = self._kept.popleft()
        for result in results:
            result.storage.let_go()
        return results


def kept(device: Device, compute: Callable[[], Results]) -> Results:
    """The results of an operation that selective checkpointing keeps, wherever it is run."""
    if device.kept_results is None:
        return compute()
    return device.kept_results.result_of(compute)
