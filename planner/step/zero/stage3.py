"""ZeRO-3 of one device: its part of each weight, and weights gathered for as long as they may be.

deepspeed/runtime/zero/stage3.py, partition_parameters.py and partitioned_param_coordinator.py of
DeepSpeed 0.19.8. What stays is exact; which weights are there at one moment depends on when the
device gets to a layer, and so the ledger holds the most that can be, and `doubtful_bytes` is how
much of that need not be. What was gathered is given back when the stream that copied it is done
(`record_stream`): `late_bytes`.
"""

from __future__ import annotations

from functools import cached_property
from math import ceil

from planner.step.autograd import pointwise_cost
from planner.step.optimizers import make_optimizer
from planner.step.tensor import DTYPE_BYTES, Parameter, Tensor, empty
from planner.step.zero.step import Bucket, ZeroStep


class Zero3Step(ZeroStep):
    """Each weight is cut into equal parts, the last of them padded."""

    @cached_property
    def parts(self) -> list[int]:
        """By weight, the elements of it that a device keeps."""
        return [ceil(numel / self.layout.world_size) for numel in self.layout.numels]

    @property
    def share(self) -> int:
        return sum(self.parts)

    @property
    def bucket_element_bytes(self) -> list[int]:
        """Each bucket is in the dtype in which its gradients cross, and one buffer."""
        return [DTYPE_BYTES[name] for name in self.buckets]

    def build(self, weights: list[Tensor]) -> None:
        """Weights are cut one by one, then laid end to end; masters are copies, in fp32 too
        (`_create_fp32_partitions` compares a device with its name). Buckets and gradients of the
        part are there from now on."""
        device = self.device
        self.overlaps = self.setting.zero_overlap is not False
        self.gathered: list[Tensor] = []
        self.in_flight: list[Tensor] = []
        self.persistent: list[Tensor] = []
        parts = [self._flat(part, self.dtype, "aten.empty") for part in self.parts]
        weights.clear()
        self.flat = self._flat(self.share, self.dtype, "aten.empty")
        self.flat.storage.assign("parameters")
        parts.clear()
        self.master = Parameter(device, (self.share,))
        self.master.storage.assign("optimizer_state")
        first_gradient = self._flat(self.share, "float32", "aten.zeros")
        del first_gradient
        for name, bucket in self.buckets.items():
            buffer = self._flat(self.setting.zero_reduce_bucket, name, "aten.empty")
            buffer.storage.assign("gradients")
            bucket.buffers.append(buffer)
        self.part_gradients = self._gradient_storage(self.share)
        self.optimizer = make_optimizer(device, [self.master], self.setting)

    def _flat(self, numel: int, dtype: str, label: str) -> Tensor:
        return empty(self.device, (numel,), dtype, label)

    # Gathering -----------------------------------------------------------------------------------

    @property
    def _stays(self) -> list[bool]:
        """By weight, whether it is kept whole: `stage3_param_persistence_threshold`."""
        return [numel <= self.setting.zero_persistence for numel in self.layout.numels]

    @property
    def num_cut(self) -> int:
        """Elements of the weights that are gathered and released."""
        return sum(
            numel for numel, stays in zip(self.layout.numels, self._stays, strict=True) if not stays
        )

    @property
    def num_kept(self) -> tuple[int, int]:
        """At least and at most so many elements stay from forward to backward: a weight that is
        used again within `max_reuse` elements, of which it passes each twice on the way to the end
        and back; and any that the prefetch found there (`__params_to_release`)."""
        least = min(self.num_cut, self.setting.zero_max_reuse // 2)
        return least, self.num_cut if self.setting.zero_prefetch_bucket else least

    @property
    def num_in_flight(self) -> int:
        """Elements of the flat tensor that gathered weights are copied out of: what is fetched
        ahead, which may exceed its limit by a weight; and the largest weight beside its copy."""
        largest = max(self.layout.numels)
        ahead = self.setting.zero_prefetch_bucket
        return min(self.num_cut, ahead + largest) if ahead else min(self.num_cut, 2 * largest)

    @property
    def doubtful_bytes(self) -> int:
        """Of what the ledger holds at its peak, what need not be there then: what is gathered, and
        casts of linear layers' weights, in whose place DeepSpeed's own linear layer saves the
        weights (runtime/zero/linear.py)."""
        least, most = self.num_kept
        gathered = (most - least + self.num_in_flight) * DTYPE_BYTES[self.dtype]
        return gathered + sum(
            numel * DTYPE_BYTES[self.sent_in[weight]]
            for weight, numel in enumerate(self.layout.numels)
            if self.sent_in[weight] != self.dtype
        )

    @property
    def late_bytes(self) -> int:
        """What weights were copied out of, on another stream than the one that fetched them."""
        return self.num_in_flight * DTYPE_BYTES[self.dtype]

    def begin_forward(self) -> None:
        """`fetch_sub_module`: the most that is gathered in a forward. Gathers follow one another
        beside it, the first awaited at once."""
        self._gather(self.num_cut)
        self._hold(self.gathered, self.num_kept[1], "gathered weights")
        self._hold(self.in_flight, self.num_in_flight, "weights fetched ahead")

    def end_forward(self, is_last_use: bool) -> None:
        """What is released is gathered once more for backward."""
        self._wait()
        self.in_flight.clear()
        if is_last_use:
            self.gathered.clear()
            return
        again = self.num_cut - self.num_kept[0]
        if again:
            self._gather(again)
            self._hold(self.in_flight, self.num_in_flight, "weights fetched ahead")

    def _hold(self, tensors: list[Tensor], numel: int, label: str) -> None:
        if numel:
            tensors.append(self._flat(numel, self.dtype, label))
            tensors[-1].storage.assign("parameters")

    def _gather(self, numel: int) -> None:
        if self.layout.world_size == 1:
            return
        size = DTYPE_BYTES[self.dtype]
        ahead = max(self.setting.zero_prefetch_bucket, max(self.layout.numels))
        for start in range(0, numel, ahead):
            num_bytes = min(ahead, numel - start) * size
            handle = self.device.send("all_gather", num_bytes, self.dtype, "world", follows=False)
            self.pending.append(handle)
        if self.pending:
            self.device.wait(self.pending.pop(0))

    # During backward -----------------------------------------------------------------------------

    def take(self, weight: int, is_last: bool) -> None:
        """`reduce_independent_p_g_buckets_and_remove_grads`: copied where it finds room."""
        bucket, numel = self.buckets[self.sent_in[weight]], self.layout.numels[weight]
        limit = self.setting.zero_reduce_bucket
        if bucket.elements and bucket.elements + numel > limit:
            self._reduce(bucket)
        if bucket.elements + numel <= limit:
            self._move(weight, bucket.buffers[0].storage)
        bucket.elements += numel
        bucket.weights.append(weight)

    def _reduce(self, bucket: Bucket) -> None:
        """`__reduce_and_partition_ipg_grads`."""
        if not bucket.weights:
            return
        with self.device.on(self._reduces_on):
            self._scatter(bucket)
        for weight in bucket.weights:
            del self.gradients[weight]
        bucket.weights.clear()
        bucket.elements = 0

    def _scatter(self, bucket: Bucket) -> None:
        """`reduce_scatter_coalesced`: a copy, part by part, but of one weight without padding."""
        world_size, sent_in = self.layout.world_size, self.sent_in[bucket.weights[0]]
        numel = sum(self.parts[weight] for weight in bucket.weights) * world_size
        cast = None
        if bucket.elements > self.setting.zero_reduce_bucket and sent_in != self.dtype:
            cast = self._copy(bucket.elements, sent_in, "aten._to_copy")
        is_whole = len(bucket.weights) == 1 and numel == bucket.elements
        flat = None if is_whole else self._copy(numel, sent_in, "aten.cat")
        size = numel * DTYPE_BYTES[sent_in]
        handle = self.device.send("reduce_scatter", size, sent_in, "world", follows=True)
        self.pending.append(handle)
        if not self.overlaps:
            self._wait()
        del cast, flat

    def finish_backward(self, is_last: bool) -> None:
        """The epilogue: what is left in the buckets; all gathered weights are gone by then."""
        for bucket in self.buckets.values():
            self._reduce(bucket)
        self._wait()
        self.in_flight.clear()
        self.gathered.clear()

    # After backward ------------------------------------------------------------------------------

    def step(self) -> None:
        """`step`: weights that stay whole go, and are gathered anew when they are updated."""
        self.persistent.clear()
        self.own = list(enumerate(self.parts))
        self._norm()
        gradient = self._copy(self.share, self.dtype, "aten.cat")
        if self.dtype != "float32":
            gradient = self._copy(self.share, "float32", "aten._to_copy")
        gradient.storage.assign("gradients")
        if self.setting.clip_grad or self.setting.precision == "fp16":
            pointwise_cost(self.device, "aten.mul_", gradient, 1)
        self.optimizer.step()
        del gradient
        pointwise_cost(self.device, "aten.copy_", self.master, 1)
        self._gather_persistent()

    def _gather_persistent(self) -> None:
        """`_post_step`: one by one, padded."""
        world_size = self.layout.world_size
        for part, stays in zip(self.parts, self._stays, strict=True):
            if stays:
                self._hold(self.persistent, part * world_size, "weights that stay whole")
        num_bytes = sum(tensor.num_bytes for tensor in self.persistent)
        if num_bytes and world_size > 1:
            handle = self.device.send("all_gather", num_bytes, self.dtype, "world", follows=True)
            self.device.wait(handle)
