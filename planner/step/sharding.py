"""FSDP2 on shapes: `fully_shard` of each block and then of the model, one device of many.

To be laid beside torch/distributed/fsdp/_fully_shard of torch 2.13 (`_fsdp_state.py`,
`_fsdp_param_group.py`, `_fsdp_collectives.py`): same order of operations, same names for what stays
alive, since what a local keeps alive is memory. Each device has the shards of all weights. A unit,
which is a block or what is left of the model, gathers its weights before it runs, and again before
its backward, after which it sums its gradients over all devices and keeps a share of them.
N devices share one set of shards; a shard is a weight's rows, padded to a multiple of N and divided
by N.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from planner.core.collectives import Collective, Group
from planner.core.schema import TrainSetting
from planner.core.torch_version import torch_version
from planner.step.autograd import Gradients, Node, edge_of, pointwise_cost
from planner.step.nn import Module
from planner.step.pointwise import to_dtype, unary
from planner.step.shards import Resizable, Shard, chunk_cat_table
from planner.step.strides import contiguous_strides
from planner.step.tensor import DTYPE_BYTES, Device, Parameter, Tensor, empty

State = Literal["idle", "forward", "pre_backward", "post_backward"]
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# By what weights are gathered in, the precisions that have been laid beside torch's own.
_COMPUTED = {
    "fp32": ("fp32", "bf16", "fp16", "pure-bf16"),
    "bf16": ("bf16", "pure-bf16"),
    "fp16": ("fp16",),
}
_RELEASES_SOONER = (2, 15)  # read in 2.13.0, 2.14.1 and 2.15.0
_CASTS_ON_ARRIVAL = (2, 15)
COPY_IN, REDUCE_SCATTER, ALL_REDUCE = "all_gather_copy_in", "reduce_scatter", "all_reduce"


def follows_fsdp(setting: TrainSetting) -> bool:
    """Whether this file says what FSDP2 does in `setting`; else a recording of torch's own does.

    Stages that are checkpointed run their blocks' forward in backward, weights that are not trained
    have no gradients, and what is gathered in another dtype than autocast's meets buffers in fp32.
    """
    return (
        setting.precision in _COMPUTED[setting.fsdp_param_dtype]
        and setting.checkpoints_any_model
        and setting.offload == "none"
        and not setting.frozen_stages
        and not setting.lora_rank
        and setting.optimizer_implementation != "8bit"
    )


class _Link:
    """What all units of a model share (`FSDPCommContext`), and how they talk to other devices."""

    def __init__(self, device: Device, setting: TrainSetting, rank: int) -> None:
        self.device, self.rank = device, rank
        self.num_shards = setting.shard_size
        self.num_copies = setting.num_copies
        gathered, reduced = setting.fsdp_param_dtype, setting.fsdp_reduce_dtype
        self.param_dtype = None if gathered == "fp32" else _DTYPES[gathered]
        self.reduce_dtype = _DTYPES[reduced]
        self.whole: Group = "shard" if setting.parallelism == "hsdp" else "world"
        self.all_gather_output: Tensor | None = None  # of the unit that went forward last
        self.reduce_scatter_inputs: list[tuple[Tensor, int | None]] = []
        self.order: list[_Unit] = []  # in which units went forward, until backward has ended
        self.last_copied: int | None = None  # of the sums over copies: the others come before it
        self.syncs = True

    def sends(self, collective: Collective, x: Tensor, follows: bool = True) -> int | None:
        """Hands over a collective of `x` over the shards; None where one device is all there is."""
        if self.num_shards == 1:
            return None
        return self.device.send(collective, x.num_bytes, x.dtype, self.whole, follows=follows)

    def waits(self, handle: int | None) -> None:
        if handle is not None:
            self.device.wait(handle)


class _Unit:
    """A block, or the model without its blocks (`FSDPState` and its `FSDPParamGroup`)."""

    def __init__(self, link: _Link, weights: Sequence[Parameter], reshards: bool) -> None:
        self.link, self.reshards = link, reshards
        self.weights = list(weights)
        self.shards = [Shard(weight, link.num_shards, link.rank) for weight in weights]
        self.orig_dtype = weights[0].dtype
        self.state: State = "idle"  # of the module
        self.group_state: State = "idle"  # of its weights
        self.is_root = False
        self.is_unsharded = False
        self.gathered: tuple[Tensor | None, int | None] | None = None  # until it is copied out
        self.forwards: list[int] = []  # places in `link.order`
        self.accumulated: list[Tensor | None] = [None] * len(weights)
        self.all_reduce_input: Tensor | None = None
        dtype = link.param_dtype or self.orig_dtype
        whole = [weight.storage for weight in weights]  # until `fully_shard` returns
        for weight, shard in zip(self.weights, self.shards, strict=True):
            numel = shard.padded_numel * link.num_shards
            weight.storage = Resizable(link.device, numel * DTYPE_BYTES[dtype])
            weight.dtype = dtype
            weight.strides = contiguous_strides(weight.shape)
        del whole

    @property
    def device(self) -> Device:
        return self.link.device

    # Weights come and go.

    def unshard(self) -> None:
        """Hands over the gathering of all weights, unless it has been."""
        if self.gathered is not None or self.is_unsharded:
            return
        if self.link.num_shards == 1:
            self.gathered = (None, None)
            return
        numel = sum(shard.padded_numel for shard in self.shards)
        dtype = self.weights[0].dtype
        with self.device.on(COPY_IN):
            flat = self._cast_shards(numel, dtype)
            output = empty(self.device, (numel * self.link.num_shards,), dtype, "aten.empty")
            output.storage.assign("parameters")
        del flat
        is_first = self.is_root and self.group_state == "forward"  # and waits for the optimizer
        self.gathered = (output, self.link.sends("all_gather", output, follows=is_first))

    def _cast_shards(self, numel: int, dtype: str) -> Tensor | None:
        if dtype == self.orig_dtype:
            return None
        flat = empty(self.device, (numel,), dtype, "aten.empty")
        flat.storage.assign("parameters")
        return flat

    def wait_for_unshard(self, is_forward: bool) -> None:
        """Copies what was gathered into the weights. In forward the gathered copy stays until the
        next unit has done so (`previous` lives until this returns; from torch 2.15 on it goes
        before, in `release_all_gather_state_for_comm_reuse`), else it goes at once."""
        if self.gathered is None:
            return
        output, handle = self.gathered
        previous = None
        if is_forward:
            previous, self.link.all_gather_output = self.link.all_gather_output, None
            if torch_version() >= _RELEASES_SOONER:
                previous = None
        if output is None:
            self._copy_shards()
        else:
            self.link.waits(handle)
            self._fill()
            name, numel, dtype = "fsdp.split_with_sizes_copy", output.numel, output.dtype
            self.device.compute(name, "copy", dtype, 0, 2 * numel * DTYPE_BYTES[dtype])
        self.is_unsharded = True
        if is_forward:
            self.link.all_gather_output = output
        self.gathered = output = None
        del previous

    def _fill(self) -> None:
        for weight in self.weights:
            assert isinstance(weight.storage, Resizable)
            weight.storage.fill()

    def _copy_shards(self) -> None:
        """Of one device: each weight is copied, and cast before where it is gathered in less."""
        for weight, shard in zip(self.weights, self.shards, strict=True):
            source = to_dtype(shard.detach(), weight.dtype)
            assert isinstance(weight.storage, Resizable)
            weight.storage.fill()
            pointwise_cost(self.device, "aten.copy_", source, 1)

    def reshard(self) -> None:
        if self.is_unsharded:
            for weight in self.weights:
                assert isinstance(weight.storage, Resizable)
                weight.storage.drop()
            self.is_unsharded = False

    # Around the module's forward.

    def before(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """`_pre_forward`: what the module is called with. In a recomputation weights are there."""
        if self.state == "pre_backward":
            assert self.is_unsharded
            return self._cast(args)
        self.state = "forward"
        args = self._cast(args)
        self.group_state = "forward"
        self.unshard()
        self.wait_for_unshard(is_forward=True)
        return self._reduced_after(args)

    def _cast(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """`cast_forward_inputs`."""
        dtype = self.link.param_dtype
        if dtype is None:
            return args
        return tuple([to_dtype(a, dtype) if _is_floating(a) else a for a in args])

    def _reduced_after(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """`RegisterPostBackwardFunction`: backward sums gradients once it has those of `args`."""
        inputs = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad]
        if not inputs or not self.device.grad_enabled:
            return args
        edges = tuple([edge_of(x) for x in inputs])
        node = Node(self.device, "RegisterPostBackwardFunctionBackward", edges, _pass_on, self)
        aliases: dict[int, Tensor] = {}
        for x in inputs:
            alias = x.detach()
            alias.requires_grad, alias.node, alias.slot = True, node, len(node.metadata)
            node.metadata.append((x.shape, x.dtype))
            aliases[id(x)] = alias
        return tuple([aliases.get(id(arg), arg) for arg in args])

    def after(self, result: Any) -> Any:
        """`_post_forward`."""
        if self.state == "pre_backward":
            return result
        if self.reshards:
            self.reshard()
        self.forwards.append(len(self.link.order))
        self.link.order.append(self)
        self.group_state = "idle"
        if self.device.grad_enabled:
            for tensor in _tensors_in(result):
                if tensor.node is not None:
                    tensor.node.add_hook(self.pre_backward)
        self.state = "idle"
        if self.is_root:
            self.link.all_gather_output = None
        return result

    # Around the module's backward.

    def pre_backward(self) -> None:
        """The gradient of the module's output is there. The unit that went forward before it is
        gathered too, beside the backward of this one."""
        self.state = "pre_backward"
        if self.group_state == "pre_backward":
            return
        self.group_state = "pre_backward"
        self.unshard()
        self.wait_for_unshard(is_forward=False)
        if not self.link.syncs and torch_version() >= _CASTS_ON_ARRIVAL:
            self._cast_on_arrival()
        if self.forwards:
            place = self.forwards.pop()
            if place > 0:
                self.link.order[place - 1].unshard()

    def post_backward(self) -> None:
        """All gradients of the unit's weights are there."""
        link = self.link
        self.group_state = "post_backward"
        self._accumulate()
        if not link.syncs:
            self.reshard()
            self._keep_in_reduce_dtype()
            return
        shards, grads = self._take_gradients()
        self.reshard()
        while link.reduce_scatter_inputs:
            link.waits(link.reduce_scatter_inputs.pop(0)[1])
        if not grads:
            return
        self.all_reduce_input = None
        link.reduce_scatter_inputs.append(self._reduce(shards, grads))

    def _accumulate(self) -> None:
        """`accumulate_unsharded_grad_if_needed`."""
        for index, weight in enumerate(self.weights):
            total = self.accumulated[index]
            if total is not None and weight.cell.grad is not None:
                pointwise_cost(self.device, "aten.add_", total, 2)
                weight.cell.grad = None

    def _cast_on_arrival(self) -> None:
        """`_set_unsharded_grad_dtypes`: autograd casts the first gradients that stay whole."""
        for weight in self.weights:
            found = weight.cell.accumulator
            accumulator = None if found is None else found()
            if accumulator is not None and weight.cell.grad is None:
                accumulator.metadata[0] = (weight.shape, self.link.reduce_dtype)

    def _keep_in_reduce_dtype(self) -> None:
        """`to_accumulated_grad_if_needed`: gradients that stay whole until a later micro-batch."""
        dtype = self.link.reduce_dtype
        for index, weight in enumerate(self.weights):
            grad = weight.cell.grad
            if grad is not None and grad.dtype != dtype:
                weight.cell.grad = None
                kept = to_dtype(grad, dtype)
                kept.storage.assign("gradients")
                self.accumulated[index] = kept
            del grad

    def _take_gradients(self) -> tuple[list[Shard], list[Tensor]]:
        shards: list[Shard] = []
        grads: list[Tensor] = []
        for index, (weight, shard) in enumerate(zip(self.weights, self.shards, strict=True)):
            grad = self.accumulated[index]
            if grad is None:
                grad = weight.cell.grad
                weight.cell.grad = None
            self.accumulated[index] = None
            if grad is not None:
                shards.append(shard)
                grads.append(grad)
            del grad
        return shards, grads

    def _reduce(self, shards: list[Shard], grads: list[Tensor]) -> tuple[Tensor, int | None]:
        """`foreach_reduce`: a copy of all gradients, their sum over devices, and this device's
        share of it, of which the shards' gradients are views. Returns the copy, which lives until
        the next unit has made its own. Up to torch 2.14 the last of `grads` lives until this
        returns, where there is more than one device."""
        link, device = self.link, self.device
        dtype = link.reduce_dtype
        numel = sum(shard.padded_numel for shard in shards)
        whole = empty(device, (numel * link.num_shards,), dtype, "aten.empty")
        chunks = [shard.padded_numel for shard in shards]
        size = chunk_cat_table(chunks, grads[0].dtype, dtype)
        table = empty(device, (size,), "uint8", "fsdp.chunk_cat") if size else None
        whole_bytes = whole.num_bytes + sum(grad.num_bytes for grad in grads)
        device.compute("fsdp.chunk_cat", "copy", dtype, 0, whole_bytes)
        del table
        keeps_last = link.num_shards > 1 and torch_version() < _RELEASES_SOONER
        last = grads[-1] if keeps_last else None
        grads.clear()
        with device.on(REDUCE_SCATTER):
            output = empty(device, (numel,), dtype, "aten.empty")
            output.storage.assign("gradients")
            handle = link.sends("reduce_scatter", whole)
            if link.num_shards == 1:
                pointwise_cost(device, "aten.copy_", output, 1)
        last_stream = REDUCE_SCATTER
        if link.num_copies > 1:
            last_stream = ALL_REDUCE
            self.all_reduce_input = output
            size, kind = output.num_bytes, output.dtype
            link.last_copied = device.send("all_reduce", size, kind, "replicate", follows=True)
        with device.on(last_stream):
            output = to_dtype(output, self.orig_dtype)
            output.storage.assign("gradients")
            for shard in shards:
                self._share(shard, output)
        del last
        return whole, handle

    def _share(self, shard: Shard, output: Tensor) -> None:
        """The part of `output` that is the gradient of `shard`, or is added to it."""
        part = Tensor(output.storage, shard.shape, shard.strides, output.dtype)
        if shard.cell.grad is not None:
            pointwise_cost(self.device, "aten.add_", part, 2)
        else:
            shard.cell.grad = part

    def end_backward(self) -> None:
        """This unit's part of `_root_post_backward_final_callback`."""
        if self.group_state != "post_backward":
            self.post_backward()
        self.group_state = self.state = "idle"
        self.link.waits(self.link.last_copied)
        self.link.last_copied = None
        self.all_reduce_input = None
        self.gathered = None
        self.forwards.clear()


class Sharding:
    """The units of a model, the model's own first. `rank` is this device's place among those that
    share one set of shards: the first has the most rows."""

    def __init__(
        self,
        device: Device,
        model: Module,
        setting: TrainSetting,
        rank: int = 0,
    ) -> None:
        self.link = _Link(device, setting, rank)
        known: set[int] = set()
        self.units: list[_Unit] = []
        for module in model.descendants():
            if module.is_block:
                self.units.append(self._shard(module, known, setting.fsdp_reshard))
        self.units.insert(0, self._shard(model, known, reshards=False))
        self.units[0].is_root = True
        by_weight = {id(w): s for u in self.units for w, s in zip(u.weights, u.shards, strict=True)}
        self.shards = [by_weight[id(weight)] for weight in model.parameters()]

    def _shard(self, module: Module, known: set[int], reshards: bool) -> _Unit:
        weights = [w for w in _inner_first(module) if id(w) not in known]
        known.update(id(weight) for weight in weights)
        unit = _Unit(self.link, weights, reshards)
        module.unit = unit
        return unit

    @property
    def syncs(self) -> bool:
        """`set_requires_gradient_sync`: whether backward sums gradients over devices."""
        return self.link.syncs

    @syncs.setter
    def syncs(self, syncs: bool) -> None:
        self.link.syncs = syncs

    def end_backward(self) -> None:
        """`_root_post_backward_final_callback`."""
        for unit in self.units:
            unit.end_backward()
        self.link.order.clear()
        for _, handle in self.link.reduce_scatter_inputs:
            self.link.waits(handle)
        self.link.reduce_scatter_inputs.clear()

    def add_up(self, x: Tensor) -> Tensor:
        """`x` summed over the devices that share a set of shards: `_c10d_functional.all_reduce`."""
        total = unary(x, "_c10d_functional.all_reduce")
        self.link.waits(self.link.sends("all_reduce", total))
        return total

    def close(self) -> None:
        """Units and what they share would keep each other."""
        self.link.order.clear()


def _pass_on(node: Node, grads: list[Tensor | None]) -> Gradients:
    unit: _Unit = node.data
    unit.post_backward()
    return tuple(grads)


def _inner_first(module: Module) -> Iterator[Parameter]:
    """Parameters in the order in which `fully_shard` finds them: a module's own after those of its
    submodules."""
    for _, child in module.children():
        yield from _inner_first(child)
    for value in vars(module).values():
        if isinstance(value, Parameter):
            yield value


def _is_floating(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating


def _tensors_in(result: Any) -> Iterator[Tensor]:
    for value in result if isinstance(result, tuple | list) else (result,):
        if isinstance(value, Tensor):
            yield value
