"""What a step asks the caching allocator for, one request after the other, on a device and in a
trace: small modules from images [B, 3, 16, 16] to logits, one for each law of a kernel's.

Legend: B batch, C channels, N tokens, S side of a feature map.
"""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.core.schema import FactoryModel, TrainSetting
from planner.ledger.ledger import Allocated, Marked, Scratch
from planner.machine.hardware.catalogue import find_gpu
from planner.machine.hardware.overheads import processors_of
from planner.memory.scratch import scratch_bytes
from planner.trace.ledger import trace_estimate
from search.probe.protocol import ProbeRequest
from search.probe.worker.precision import set_precision
from search.probe.worker.subject import build_training
from search.probe.worker.worker import end

IMAGE, CLASSES, BLOCK_BYTES = 16, 10, 512


class Tokens(nn.Module):
    """Images to tokens [B, 64, 96], then what a subclass does with them, then logits."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, 96, 2, stride=2), nn.Linear(96, CLASSES)

    def mix(self, tokens: Tensor) -> Tensor:
        return tokens

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.mix(self.patches(images).flatten(2).mT.contiguous())
        logits: Tensor = self.head(tokens.mean(1))
        return logits


class Strided(Tokens):
    """A linear layer over some of the tokens only: the bias is added to the product itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(96, 96)

    def mix(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.layer(tokens[:, 3:40])
        return found


class Pooled(Tokens):
    """The largest of each four tokens: backward counts how many are, in integers."""

    def mix(self, tokens: Tensor) -> Tensor:
        found: Tensor = tokens.unflatten(1, (16, 4)).amax(2)
        return found


class Attending(Tokens):
    """Flash attention whose keys are split."""

    def mix(self, tokens: Tensor) -> Tensor:
        heads = tokens.repeat(1, 8, 1).unflatten(2, (2, 48)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)


class Convolved(Tokens):
    """A convolution over the tokens' own layout, channels last."""

    stride, groups, outputs = 2, 1, 96

    def __init__(self) -> None:
        super().__init__()
        kernel = 3 if self.groups > 1 else 2
        padding = kernel // 2
        self.convolution = nn.Conv2d(
            96, self.outputs, kernel, self.stride, padding, groups=self.groups
        )
        self.head = nn.Linear(self.outputs, CLASSES)

    def map(self, tokens: Tensor) -> Tensor:
        found: Tensor = tokens.mT.unflatten(2, (8, 8))
        return found

    def mix(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.convolution(self.map(tokens))
        return found.flatten(2).mT


class Cropped(Convolved):
    def map(self, tokens: Tensor) -> Tensor:
        return super().map(tokens).contiguous()[:, :, 1:7, 1:7]


class Behind(Convolved):
    """Tokens behind another one: their map is not contiguous in any format, nor is its gradient."""

    stride, groups = 2, 96

    def mix(self, tokens: Tensor) -> Tensor:
        first, rest = tokens[:, :1], torch.cat([tokens[:, :1], tokens], 1)[:, 1:]
        return torch.cat([first, super().mix(rest)], 1)


class Grouped(Convolved):
    groups = 8


class Depthwise(Convolved):
    groups, outputs = 96, 192

    def map(self, tokens: Tensor) -> Tensor:
        return super().map(tokens).contiguous()


class Volumes(Tokens):
    """A depthwise convolution over tokens in three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv3d(96, 96, 3, (1, 2, 2), 1, groups=96, bias=False)

    def mix(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.convolution(tokens.mT.unflatten(2, (4, 4, 4)))
        return found.flatten(2).mT


class Batched(Tokens):
    """Batch norm of rows, whose backward has sums of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(96)

    def mix(self, tokens: Tensor) -> Tensor:
        found: Tensor = tokens + self.norm(tokens.mean(1))[:, None]
        return found


class Normed(Convolved):
    """Batch norm of a map whose channels are last, of enough rows for several blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(96)

    def mix(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.norm(self.map(tokens.repeat_interleave(256, 0)))
        means: Tensor = found.unflatten(0, (len(tokens), 256)).mean(1)
        return means.flatten(2).mT


class GroupNormed(Normed):
    """Group norm of the same, which CUDA copies, as it does its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, 96)  # type: ignore[assignment]

    def mix(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.norm(self.map(tokens))
        return found.flatten(2).mT


class GroupNormedContiguous(Normed):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, 96)  # type: ignore[assignment]

    def mix(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.norm(self.map(tokens).contiguous())
        return found.flatten(2).mT


class Masked(Tokens):
    """Attention with a mask, whose gradient is not contiguous."""

    def mix(self, tokens: Tensor) -> Tensor:
        heads = tokens.unflatten(2, (2, 48)).transpose(1, 2)
        mask = tokens.new_zeros(64, 64)
        return F.scaled_dot_product_attention(heads, heads, heads, mask).mT.flatten(1, 2).mT


class Weighed(Tokens):
    """Softmax whose gradient comes transposed."""

    def mix(self, tokens: Tensor) -> Tensor:
        return (tokens @ tokens.mT).softmax(-1).mT @ tokens


class Counted(Tokens):
    """A class for each token, one-hot."""

    def mix(self, tokens: Tensor) -> Tensor:
        return tokens * F.one_hot(tokens.argmax(-1), 96)


class Scaled(Tokens):
    """RMS norm in one kernel, and of what autocast gives, whose weight is of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide = nn.RMSNorm(96), nn.Linear(96, 96)

    def mix(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.norm(tokens.float()) + self.norm(self.wide(tokens))
        return found


class Summed(Tokens):
    """How many tokens there are of each class: integers, in sums of many blocks."""

    def mix(self, tokens: Tensor) -> Tensor:
        classes = tokens.repeat_interleave(256, 0).argmax(-1)
        return tokens * F.one_hot(classes, 96).sum((0, 1))


class Upsampled(Convolved):
    """A transposed convolution whose gradient is a part of another one's."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(96, 48, 2, stride=2)

    def mix(self, tokens: Tensor) -> Tensor:
        found = self.map(tokens).contiguous()
        both = torch.cat([self.up(found), found.repeat(1, 1, 2, 2)[:, 48:]], 1)
        return both.cos().flatten(2).mT


class Parted(Tokens):
    """Layer norm of a part of the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm = nn.Linear(96, 192), nn.LayerNorm(96)

    def mix(self, tokens: Tensor) -> Tensor:
        kept, gate = self.wide(tokens).chunk(2, dim=-1)
        found: Tensor = kept * self.norm(gate)
        return found


MODULES = (
    Tokens, Strided, Pooled, Attending, Masked, Weighed, Counted, Summed, Scaled, Parted,
    Convolved, Cropped, Behind, Grouped, Depthwise, Volumes, Upsampled, Batched, Normed,
    GroupNormed, GroupNormedContiguous,
)  # fmt: skip


def model_of(name: str) -> FactoryModel:
    factory = f"{__package__}.requested:{name}"
    return FactoryModel(factory=factory, image_size=(IMAGE, IMAGE), num_classes=CLASSES)


def setting_of(precision: str) -> TrainSetting:
    return TrainSetting(batch_size=4, precision=precision)


def rounded(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def in_trace(name: str, precision: str, card: str) -> list[int]:
    """Of the second step."""
    device, found = processors_of(find_gpu(card)), []
    events = trace_estimate(model_of(name), setting_of(precision)).events
    ends = (i for i, e in enumerate(events) if isinstance(e, Marked) and e.phase == "zero_grad")
    for event in events[next(ends) :]:
        if isinstance(event, Scratch):
            found.append(scratch_bytes(device, event.law, event.sizes))
        elif isinstance(event, Allocated):
            found.append(event.num_bytes)
    return [rounded(num_bytes) for num_bytes in found if num_bytes]


def on_device(name: str, precision: str) -> list[int]:
    """Of the third step, on the GPU of this process."""
    request = ProbeRequest(model=model_of(name), setting=setting_of(precision), device="cuda:0")
    set_precision(request)
    training = build_training(request)
    for _ in range(2):
        training.step()
    torch.cuda.memory._record_memory_history("all", context=None)
    training.step()
    (trace,) = torch.cuda.memory._snapshot()["device_traces"]
    torch.cuda.memory._record_memory_history(None)
    return [rounded(entry["size"]) for entry in trace if entry["action"] == "alloc"]


def main() -> None:
    """Pairs of names and precisions as JSON on standard input, requests as JSON on the output."""
    print(json.dumps([on_device(*pair) for pair in json.load(sys.stdin)]))
    end()


if __name__ == "__main__":
    main()
