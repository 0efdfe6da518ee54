"""Small steps, forward and backward: what they ask the allocator for and give back, in order, on a
device and in a trace. What a whole model asks for is too long to find a difference in.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from search.probe.worker.worker import end


class Request(NamedTuple):
    """A block of `num_bytes` asked for, or given back: the `number`th that the step asked for."""

    what: str
    num_bytes: int
    number: int


Step = Callable[[], Tensor]
STEPS: dict[str, Callable[[str], tuple[list[Tensor], Step]]] = {}


def step(make: Callable[[str], tuple[list[Tensor], Step]]) -> Callable[[str], object]:
    """`make(device)` gives the tensors that are trained, and a step of them."""
    STEPS[make.__name__] = make
    return make


def given(device: str, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.zeros(shape, device=device, requires_grad=True) for shape in shapes]


@step
def dropout(device: str) -> tuple[list[Tensor], Step]:
    (x,) = given(device, (600, 1000))
    return [x], lambda: F.dropout(x, 0.1)


@step
def embedding_of_an_expanded_row(device: str) -> tuple[list[Tensor], Step]:
    (table,) = given(device, (100, 32))
    row = torch.zeros(1, 200, dtype=torch.long, device=device)
    return [table], lambda: F.embedding(row.expand(8, 200), table)


@step
def many_embeddings(device: str) -> tuple[list[Tensor], Step]:
    (table,) = given(device, (1000, 32))
    tokens = torch.zeros(8, 513, dtype=torch.long, device=device)
    return [table], lambda: F.embedding(tokens[:, :-1], table)


@step
def many_embeddings_in_a_large_table(device: str) -> tuple[list[Tensor], Step]:
    table = torch.zeros(70000, 32, dtype=torch.bfloat16, device=device, requires_grad=True)
    tokens = torch.zeros(30, 1000, dtype=torch.long, device=device)
    return [table], lambda: F.embedding(tokens, table).mT.contiguous()


@step
def depthwise_3d(device: str) -> tuple[list[Tensor], Step]:
    x, weight = given(device, (2, 8, 16, 9, 9), (8, 1, 3, 3, 3))
    return (
        [x, weight],
        lambda: (
            F.conv3d(x.transpose(1, 2).contiguous().transpose(1, 2), weight, padding=1, groups=8)
            .transpose(1, 4)
            .contiguous()
        ),
    )


@step
def channels_last_3d(device: str) -> tuple[list[Tensor], Step]:
    x, weight = given(device, (2, 8, 4, 9, 9), (8, 1, 3, 3, 3))
    wide = torch.zeros(16, 8, 1, 1, 1, device=device, requires_grad=True)

    def convolve() -> Tensor:
        y = F.conv3d(x.contiguous(memory_format=torch.channels_last_3d), weight, groups=8)
        return F.max_pool3d(F.conv3d(y, wide), 2).contiguous()

    return [x, weight, wide], convolve


@step
def pooled_3d(device: str) -> tuple[list[Tensor], Step]:
    (x,) = given(device, (2, 16, 8, 16, 16))
    return [x], lambda: F.max_pool3d(x.mT, 2).transpose(1, 4).contiguous()


@step
def pooled_2d(device: str) -> tuple[list[Tensor], Step]:
    (x,) = given(device, (2, 16, 16, 16))
    return [x], lambda: F.max_pool2d(x.mT, 2).mT.contiguous()


@step
def depthwise_of_a_part(device: str) -> tuple[list[Tensor], Step]:
    """The gradient comes in the same format, then in another one, then in none."""
    x, weight = given(device, (4, 24, 9, 9), (16, 1, 3, 3))

    def convolve() -> Tensor:
        parts = [F.conv2d(x.sin()[:, 8:], weight, padding=1, groups=16).cos() for _ in range(3)]
        parts[1] = parts[1].contiguous(memory_format=torch.channels_last)
        parts[2] = parts[2].mT.contiguous()
        return torch.stack([part.sin().cos() for part in parts])

    return [x, weight], convolve


@step
def folded(device: str) -> tuple[list[Tensor], Step]:
    (x,) = given(device, (2, 14, 15, 8))

    def fold() -> Tensor:
        columns = F.unfold(x.permute(0, 3, 1, 2), 3, padding=1)
        maps = F.fold(columns.mT.contiguous().mT.sin(), (14, 15), 3, padding=1)
        return F.unfold(maps, 1, stride=2)

    return [x], fold


@step
def losses_of_each_and_of_all(device: str) -> tuple[list[Tensor], Step]:
    x, wanted = given(device, (64, 80, 128), (64, 80, 128))

    def losses() -> Tensor:
        total = F.mse_loss(x, wanted) + F.smooth_l1_loss(x, wanted, reduction="sum")
        return total + F.mse_loss(x.mT, wanted.mT, reduction="none")

    return [x], losses


@step
def softmax_of_turned_rows(device: str) -> tuple[list[Tensor], Step]:
    (x,) = given(device, (4, 9, 11, 13))
    return [x], lambda: x.transpose(1, 2).softmax(3).cos().mT.log_softmax(2).mT


@step
def linear_of_turned_rows(device: str) -> tuple[list[Tensor], Step]:
    x, weight, bias = given(device, (4, 16, 20), (24, 16), (24,))
    return [x, weight, bias], lambda: F.linear(x.mT, weight, bias).sin()


@step
def linear_of_turned_planes(device: str) -> tuple[list[Tensor], Step]:
    x, weight, bias = given(device, (4, 16, 5, 6), (24, 16), (24,))
    return [x, weight, bias], lambda: F.linear(x.permute(0, 2, 3, 1), weight, bias).sin()


@step
def batch_norm_of_turned_rows(device: str) -> tuple[list[Tensor], Step]:
    x, weight, bias = given(device, (4, 196, 128), (128,), (128,))

    def norm() -> Tensor:
        planes = x.bfloat16().mT.reshape(4, 128, 14, 14)
        return F.batch_norm(planes, None, None, weight, bias, True).flatten(2).mT.contiguous()

    return [x, weight, bias], norm


@step
def batch_norm_of_many_rows(device: str) -> tuple[list[Tensor], Step]:
    x, weight, bias = given(device, (16, 64, 56, 56), (64,), (64,))
    last = torch.channels_last

    def norm() -> Tensor:
        planes = x.bfloat16().contiguous(memory_format=last)
        return F.batch_norm(planes, None, None, weight, bias, True).relu()

    return [x, weight, bias], norm


def norm_and_turn(
    device: str, dtype: torch.dtype, before: torch.memory_format, after: torch.memory_format
) -> tuple[list[Tensor], Step]:
    """A convolution in one format, and the gradient of its norm in another."""
    x, kernel, weight, bias = given(device, (4, 16, 24, 24), (16, 1, 5, 5), (16,), (16,))

    def norm() -> Tensor:
        planes = x.to(dtype).contiguous(memory_format=before)
        planes = F.conv2d(planes, kernel.to(dtype), None, 1, 2, 1, 16)
        planes = F.batch_norm(planes, None, None, weight, bias, True)
        return planes.contiguous(memory_format=after)

    return [x, kernel, weight, bias], norm


@step
def norm_turned_to_channels_last(device: str) -> tuple[list[Tensor], Step]:
    return norm_and_turn(device, torch.bfloat16, torch.contiguous_format, torch.channels_last)


@step
def norm_turned_to_channels_last_fp32(device: str) -> tuple[list[Tensor], Step]:
    return norm_and_turn(device, torch.float32, torch.contiguous_format, torch.channels_last)


@step
def norm_turned_from_channels_last(device: str) -> tuple[list[Tensor], Step]:
    return norm_and_turn(device, torch.bfloat16, torch.channels_last, torch.contiguous_format)


@step
def norm_turned_from_channels_last_fp32(device: str) -> tuple[list[Tensor], Step]:
    return norm_and_turn(device, torch.float32, torch.channels_last, torch.contiguous_format)


@step
def rolled_thrice(device: str) -> tuple[list[Tensor], Step]:
    (x,) = given(device, (4, 8, 10, 12))
    return [x], lambda: x.mT.roll((1, 2, 3), (1, 2, 3)).mT.contiguous().roll(5).mT.roll(1, 0)


@step
def attended_and_turned(device: str) -> tuple[list[Tensor], Step]:
    (x,) = given(device, (2, 4, 49, 32))
    return [x], lambda: F.scaled_dot_product_attention(x, x, x).contiguous()


@step
def indexed_behind_heads(device: str) -> tuple[list[Tensor], Step]:
    """A bias of each head for each pair of places, by one index and by two."""
    x, planes = given(device, (4, 900), (4, 30, 40, 2))
    index = torch.zeros(49, 60, dtype=torch.long, device=device)
    return [x, planes], lambda: x[:, index].mT.sin() + planes[:, index, index].sum(3).mT


@step
def sum_of_a_comparison(device: str) -> tuple[list[Tensor], Step]:
    (x,) = given(device, (4, 9, 128))
    return [x], lambda: x.amax(1)


@step
def flash_of_few_queries(device: str) -> tuple[list[Tensor], Step]:
    x = torch.zeros(1, 2, 1024, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    return [x], lambda: F.scaled_dot_product_attention(x[:, :, :64], x, x)


@step
def masked(device: str) -> tuple[list[Tensor], Step]:
    x, mask = given(device, (2, 4, 49, 32), (49, 49))
    return [x, mask], lambda: F.scaled_dot_product_attention(x, x, x, mask)


@step
def sliced_and_added(device: str) -> tuple[list[Tensor], Step]:
    x, other = given(device, (4, 8, 20, 16), (4, 8, 19, 15))

    def add() -> Tensor:
        y = x * 2
        y[:, :, 1:, 1:] += other
        return y.transpose(1, 2).reshape(4, -1)

    return [x, other], add


@step
def scaled_part_of_a_view(device: str) -> tuple[list[Tensor], Step]:
    (x,) = given(device, (24, 64))

    def scale() -> Tensor:
        y = x.cos()
        part = y.view(2, 12, 64)[:, 1:].transpose(1, 2)
        part.mul_(2)
        return part.sin() + y.view(2, 12, 64)[:, 1:].mT

    return [x], scale


@step
def relu_of_a_view(device: str) -> tuple[list[Tensor], Step]:
    x, weight = given(device, (8, 12, 16), (64, 16))
    return [x, weight], lambda: F.linear(x, weight).view(8, 3, 4, 64).relu_().mean(3).cos()


@step
def normed_and_turned(device: str) -> tuple[list[Tensor], Step]:
    x, weight, bias = given(device, (64, 80, 128), (128,), (128,))
    return [x, weight, bias], lambda: F.layer_norm(x, (128,), weight, bias).mT.contiguous()


@step
def group_norm_of_channels_last(device: str) -> tuple[list[Tensor], Step]:
    """CUDA copies it, as it does its gradient."""
    x, weight, bias = given(device, (4, 96, 8, 8), (96,), (96,))
    last = torch.channels_last
    return (
        [x, weight, bias],
        lambda: F.group_norm(x.contiguous(memory_format=last), 8, weight, bias).mT.contiguous(),
    )


@step
def rms_norm_of_another_dtype(device: str) -> tuple[list[Tensor], Step]:
    x, weight = given(device, (64, 96), (96,))
    return [x, weight], lambda: F.rms_norm(x, (96,), weight) + F.rms_norm(x.half(), (96,), weight)


@step
def upsampled(device: str) -> tuple[list[Tensor], Step]:
    """A transposed convolution whose gradient is a part of another one's."""
    x, weight = given(device, (4, 96, 8, 8), (96, 48, 2, 2))
    both = (1, 1, 2, 2)
    return (
        [x, weight],
        lambda: torch.cat([F.conv_transpose2d(x, weight, None, 2), x.repeat(both)], 1).cos(),
    )


@step
def counted_in_integers(device: str) -> tuple[list[Tensor], Step]:
    (x,) = given(device, (1024, 64, 96))
    return [x], lambda: x * F.one_hot(x.argmax(-1), 96).sum((0, 1))


@step
def layer_norm_of_a_part(device: str) -> tuple[list[Tensor], Step]:
    x, weight, bias = given(device, (4, 64, 192), (96,), (96,))

    def norm() -> Tensor:
        kept, gate = x.sin().chunk(2, dim=-1)
        return kept * F.layer_norm(gate, (96,), weight, bias)

    return [x, weight, bias], norm


def normalised(requests: Iterable[Request]) -> list[Request]:
    """Blocks given back one after the other are in the order of their sizes, and those at the end
    are left out: nothing depends on either."""
    runs = itertools.groupby(requests, lambda request: request.what)
    found = [sorted(run) if what == "free" else list(run) for what, run in runs]
    return list(itertools.chain(*found[: -1 if found[-1][0].what == "free" else None]))


def run(name: str, device: str, begin: Callable[[], object] = lambda: None) -> None:
    """The step of that name, once `begin` is called; what is warm before it was asked for."""
    trained, forward = STEPS[name](device)
    gradient = torch.ones_like(forward())
    begin()
    found = torch.autograd.grad(forward(), trained, gradient)
    del found


def on_device(name: str) -> list[Request]:
    """What torch does on the GPU of this process, of blocks that the step itself asked for:
    autograd's thread gives others back after a backward has returned."""
    record = torch.cuda.memory._record_memory_history
    run(name, "cuda")  # libraries are warm
    run(name, "cuda", lambda: record(context=None))
    found, own, numbers = list[Request](), dict[int, int](), itertools.count()
    for event in torch.cuda.memory._snapshot()["device_traces"][0]:
        if event["action"] == "alloc" and event["size"]:
            own[event["addr"]] = next(numbers)
            found.append(Request("alloc", event["size"], own[event["addr"]]))
        elif event["action"] == "free_completed" and event["addr"] in own:
            found.append(Request("free", event["size"], own.pop(event["addr"])))
    record(enabled=None)
    return found


def main() -> None:
    print(json.dumps({name: on_device(name) for name in STEPS}))
    sys.stdout.flush()
    end()


if __name__ == "__main__":
    main()
