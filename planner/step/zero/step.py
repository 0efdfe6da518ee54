"""ZeRO-1 and ZeRO-2 of one device: flat weights, its share of the optimizer, gradient buckets.

deepspeed/runtime/zero/stage_1_and_2.py of DeepSpeed 0.19.8, with the same order of events; the
function that each step stands for is named. `contiguous_gradients`, `reduce_scatter` and
`use_multi_rank_bucket_allreduce` are on, as by default: gradients are all-reduced, although the
option is called reduce_scatter. Scalars are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.core.schema import TrainSetting
from planner.step.autograd import pointwise_cost
from planner.step.optimizers import make_optimizer
from planner.step.tensor import DTYPE_BYTES, Device, Parameter, Storage, Tensor, empty
from planner.step.zero.layout import Layout

SCOPE = "DeepSpeed"  # the path of its events
# With overlap_comm gradients are copied and summed on a stream of their own.
REDUCTION_STREAM = "reduction"


@dataclass
class Bucket:
    """Gradients of one dtype on their way: one buffer, or two in turn (`IPGBucket`)."""

    buffers: list[Tensor] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    elements: int = 0
    turn: int = 0


class ZeroStep:
    """What the engine and its optimizer do around forward and backward.

    `dtype` is that of the weights; `sent_in` the dtype in which a weight's gradient crosses, by
    weight. `rank` None is the fullest device.
    """

    def __init__(
        self,
        device: Device,
        setting: TrainSetting,
        layout: Layout,
        dtype: str,
        sent_in: Mapping[int, str],
        rank: int | None = None,
    ) -> None:
        self.device = device
        self.setting = setting
        self.layout = layout
        self.dtype = dtype
        self.sent_in = sent_in
        self.overlaps = bool(setting.zero_overlap)
        in_backward = setting.parallelism == "zero2" or self.overlaps
        self.rank = layout.fullest_rank(in_backward) if rank is None else rank
        self.own = layout.of_rank(self.rank)
        self.is_own = {weight for weight, _ in self.own}
        self.gradients: dict[int, Tensor] = {}
        self.buckets = {name: Bucket() for name in sorted(set(sent_in.values()))}
        self.has_buffers = False
        self.pending: list[int] = []  # handles of what is being summed
        self.partition: Tensor | None = None  # `grads_in_partition`
        self.accumulated: list[Tensor] | None = None  # `all_grad_tensors`
        self.averaged: list[Tensor] = []  # `averaged_gradients`

    @property
    def share(self) -> int:
        """Elements that a device updates."""
        return self.layout.share

    @property
    def bucket_element_bytes(self) -> list[int]:
        """Of each buffer of a bucket, the bytes of an element."""
        return [DTYPE_BYTES[self.dtype]] * (len(self.buckets) * (1 + self.overlaps))

    @property
    def _reduces_on(self) -> str:
        """The stream that copies and sums gradients."""
        return REDUCTION_STREAM if self.overlaps else ""

    def build(self, weights: list[Tensor]) -> None:
        """`__init__`: flattens `weights`, which go, and clones its own share in fp32."""
        layout, device = self.layout, self.device
        rest = layout.aligned - layout.num_parameters
        padding = empty(device, (rest,), self.dtype, "aten.zeros") if rest else None
        self.flat = empty(device, (layout.aligned,), self.dtype, "aten.cat")
        self.flat.storage.assign("parameters")
        del padding
        weights.clear()
        clone = None
        if self.dtype != "float32":
            clone = empty(device, (layout.share,), self.dtype, "aten.clone")
        self.master = Parameter(device, (layout.share,))
        self.master.storage.assign("optimizer_state")
        del clone
        first_gradient = empty(device, (layout.share,), "float32", "aten.zeros")
        del first_gradient  # `initialize_optimizer_states`
        self.optimizer = make_optimizer(device, [self.master], self.setting)

    def begin_forward(self) -> None:
        """Weights are all there."""

    def end_forward(self, is_last_use: bool) -> None:
        """No backward follows an evaluation: `is_last_use`."""

    @property
    def doubtful_bytes(self) -> int:
        """Of what the ledger holds at its peak, what need not be there then."""
        return 0

    @property
    def late_bytes(self) -> int:
        """What is freed and waits for another stream."""
        return 0

    # During backward -----------------------------------------------------------------------------

    def take(self, weight: int, is_last: bool) -> None:
        """`process_gradients`: the gradient of `weight` is there; `is_last` in the last
        micro-batch."""
        self._set_up_buckets()
        if self.setting.parallelism == "zero2" or (self.overlaps and is_last):
            self._put_in_bucket(weight)

    def _set_up_buckets(self) -> None:
        """`setup_buckets`: all of them, at the first gradient; of as many elements whatever the
        model. `torch_autocast` has one for each dtype in which gradients cross."""
        if self.has_buffers:
            return
        for _ in range(1 + self.overlaps):
            for bucket in self.buckets.values():
                bucket.buffers.append(self._gradient_storage(self.setting.zero_reduce_bucket))
                bucket.turn = 0
        self.has_buffers = True

    def _gradient_storage(self, numel: int) -> Tensor:
        made = empty(self.device, (numel,), self.dtype, "aten.empty")
        made.storage.assign("gradients")
        return made

    def _put_in_bucket(self, weight: int) -> None:
        """`reduce_independent_p_g_buckets_and_remove_grads`: copied, or as it is where it is larger
        than the bucket."""
        bucket, numel = self.buckets[self.sent_in[weight]], self.layout.numels[weight]
        limit = self.setting.zero_reduce_bucket
        if bucket.elements + numel > limit:
            self._reduce(bucket)
            if self.overlaps:
                bucket.turn = 1 - bucket.turn
        if numel <= limit:
            self._move(weight, bucket.buffers[bucket.turn].storage)
        bucket.elements += numel
        bucket.weights.append(weight)

    def _move(self, weight: int, storage: Storage) -> None:
        """The gradient becomes a view of `storage`."""
        view = Tensor(storage, (self.layout.numels[weight],), (1,), self.dtype)
        pointwise_cost(self.device, "aten.copy_", view, 1)
        self.gradients[weight] = view

    def _reduce(self, bucket: Bucket) -> None:
        """`reduce_ipg_grads`: sums over all devices, and keeps what is its own."""
        if not bucket.weights:
            return
        with self.device.on(self._reduces_on):
            self._wait()  # `average_tensor` lets the stream that computes wait for the one before
            self._average(bucket)
            for weight in bucket.weights:
                if weight in self.is_own:
                    self._keep(weight)
                elif self.setting.parallelism == "zero2":
                    del self.gradients[weight]
        bucket.weights.clear()
        bucket.elements = 0

    def _average(self, bucket: Bucket) -> None:
        """`average_tensor`, `allreduce_and_scatter`: runs of one owner, so many at a time that they
        just exceed the bucket's size."""
        whole = Tensor(self.flat.storage, (bucket.elements,), (1,), self.dtype)
        pointwise_cost(self.device, "aten.div_", whole, 1)
        sent_in = self.sent_in[bucket.weights[0]]
        runs: list[int] = []
        for numel in self.layout.runs(bucket.weights):
            runs.append(numel)
            if sum(runs) > self.setting.zero_reduce_bucket:
                self._all_reduce(runs, sent_in)
                runs = []
        if runs:
            self._all_reduce(runs, sent_in)

    def _all_reduce(self, runs: list[int], sent_in: str) -> None:
        """`allreduce_and_copy_with_multiple_ranks`: one run crosses as it is, several as a copy of
        them; a copy in another dtype is made besides."""
        numel = sum(runs)
        flat = self._copy(numel, self.dtype, "aten.cat") if len(runs) > 1 else None
        cast = self._copy(numel, sent_in, "aten._to_copy") if sent_in != self.dtype else None
        size = numel * DTYPE_BYTES[sent_in]
        handle = self.device.send("all_reduce", size, sent_in, "world", follows=True)
        self.pending.append(handle)
        if not self.overlaps:
            self._wait()
        if cast is not None and flat is not None:
            pointwise_cost(self.device, "aten.copy_", flat, 1)
        del flat, cast

    def _copy(self, numel: int, dtype: str, label: str) -> Tensor:
        made = empty(self.device, (numel,), dtype, label)
        pointwise_cost(self.device, label, made, 1)
        return made

    def _keep(self, weight: int) -> None:
        """`copy_grads_in_partition`: whole gradients, of those that its share only touches too."""
        if self.partition is None:
            numel = sum(self.layout.numels[own] for own, _ in self.own)
            self.partition = self._gradient_storage(numel)
        self._move(weight, self.partition.storage)

    def finish_backward(self, is_last: bool) -> None:
        """`reduce_gradients` (stage 1, in the last micro-batch only) and the epilogue, which drops
        all buffers."""
        is_first_stage = self.setting.parallelism == "zero1"
        if is_first_stage and not is_last:
            return
        if is_first_stage and not self.overlaps:
            for weight in sorted(self.gradients):
                self._put_in_bucket(weight)
        for bucket in self.buckets.values():
            self._reduce(bucket)
        self._wait()
        self._accumulate()
        if is_last:
            self._average_own()
        for bucket in self.buckets.values():
            bucket.buffers.clear()
        self.has_buffers = False
        self.partition = None
        self.gradients.clear()

    def _accumulate(self) -> None:
        """Gradients of its own share are added up over micro-batches."""
        missing = [weight for weight, _ in self.own if weight not in self.gradients]
        for weight in missing:
            self.gradients[weight] = self._gradient_storage(self.layout.numels[weight])
        new = [self.gradients[weight] for weight, _ in self.own]
        if self.accumulated is None:
            self.accumulated = new
            return
        for gradient in new:
            pointwise_cost(self.device, "aten.add_", gradient, 2)

    def _average_own(self) -> None:
        """`get_flat_partition`: views of its own share, and zeros where that ends in padding."""
        assert self.accumulated is not None
        self.averaged = list(self.accumulated)
        self.accumulated = None
        rest = self.layout.share - sum(numel for _, numel in self.own)
        if rest:
            self.averaged.append(self._gradient_storage(rest))

    # After backward ------------------------------------------------------------------------------

    def step(self) -> None:
        """`step`: the norm, its own share of the optimizer's step, and all weights gathered."""
        self._norm()
        gradient = self._master_gradient()
        if self.setting.clip_grad or self.setting.precision == "fp16":
            pointwise_cost(self.device, "aten.mul_", gradient, 1)
        self.optimizer.step()
        del gradient
        pointwise_cost(self.device, "aten.copy_", self.master, 1)
        if self.layout.world_size > 1:
            size, dtype = self.flat.num_bytes, self.dtype
            handle = self.device.send("all_gather", size, dtype, "world", follows=True)
            self.device.wait(handle)
        if self.setting.ema:
            pointwise_cost(self.device, "aten._foreach_lerp_", self.flat, 2)

    def _norm(self) -> None:
        """`get_grad_norm_direct`: each gradient is copied in fp64, one at a time."""
        for _, numel in self.own:
            in_double = self._copy(numel, "float64", "aten._to_copy")
            pointwise_cost(self.device, "aten.linalg_vector_norm", in_double, 1)
            del in_double
        self.device.wait(self.device.send("all_reduce", 4, "float32", "world", follows=True))

    def _master_gradient(self) -> Tensor:
        """Its share in one piece and in fp32; the gradients that it was made of go."""
        share = self.layout.share
        flat = self.averaged[0]
        if len(self.averaged) > 1:
            flat = self._copy(share, self.dtype, "aten.cat")
        if self.dtype != "float32":
            gradient = self._copy(share, "float32", "aten._to_copy")
        else:
            gradient = flat
        del flat
        self.averaged.clear()
        gradient.storage.assign("gradients")
        return gradient

    def _wait(self) -> None:
        for handle in self.pending:
            self.device.wait(handle)
        self.pending.clear()
