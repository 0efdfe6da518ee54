"""Small programs of torch's CUDA features, a function each, for emulated cards of each capability.

`python -m tests.emulated.programs [NAME…]` in an emulated card's environment runs them, each in a
fork of one process that has imported torch and not yet touched CUDA, and prints a JSON line of
each: its peak, or what it raised.

Legend: B batch, C channels, T steps or tokens, H heads, D width.
"""

import json
import math
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

Program = Callable[[], object]
PROGRAMS: dict[str, Program] = {}
# The lowest capability of cards that have what a program uses.
NEEDS = {"sdpa_flash": (8, 0), "sdpa_cudnn": (8, 0), "fp8_product": (8, 9)}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def ones(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    return torch.ones(shape, device="cuda", dtype=dtype, requires_grad=grad)


def train(module: nn.Module, *inputs: Tensor, steps: int = 2) -> None:
    module = module.cuda()
    optimizer = torch.optim.AdamW(module.parameters())
    for _ in range(steps):
        out = module(*inputs)
        (out[0] if isinstance(out, tuple) else out).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


# ---- what is one layer, or one line

HALF, LAST = torch.float16, torch.channels_last
PROGRAMS |= {
    "conv_channels_last": lambda: train(
        nn.Conv2d(4, 8, 3).to(memory_format=LAST), ones(2, 4, 12, 12).to(memory_format=LAST)
    ),
    "conv_depthwise": lambda: train(nn.Conv2d(8, 8, 7, padding=3, groups=8), ones(2, 8, 12, 12)),
    "conv_half": lambda: train(nn.Conv2d(4, 8, 3).half(), ones(2, 4, 12, 12, dtype=HALF)),
    "conv_double": lambda: train(
        nn.Conv2d(4, 8, 3).double(), ones(2, 4, 12, 12, dtype=torch.float64)
    ),
    "multihead_attention": lambda: train(
        nn.MultiheadAttention(32, 4, batch_first=True), *[ones(2, 16, 32)] * 3
    ),
    "transformer": lambda: train(
        nn.Transformer(32, 4, 1, 1, 64, batch_first=True), ones(2, 8, 32), ones(2, 8, 32)
    ),
    "lstm_bidirectional": lambda: train(
        nn.LSTM(16, 32, 2, bidirectional=True, dropout=0.1, batch_first=True), ones(2, 5, 16)
    ),
    "lstm_projected": lambda: train(nn.LSTM(16, 32, proj_size=8), ones(5, 2, 16)),
    "lstm_half": lambda: train(nn.LSTM(16, 32).half(), ones(5, 2, 16, dtype=HALF)),
    "lstm_cell": lambda: train(nn.LSTMCell(16, 32), ones(2, 16)),
    "batch_norm": lambda: train(nn.BatchNorm2d(8), ones(2, 8, 6, 6)),
    "group_norm": lambda: train(nn.GroupNorm(2, 8), ones(2, 8, 6, 6)),
    "layer_norm_half": lambda: train(nn.LayerNorm(32).half(), ones(2, 8, 32, dtype=HALF)),
    "stft": lambda: torch.stft(
        ones(2, 400), 64, return_complex=True, window=torch.ones(64, device="cuda")
    ),
    "least_squares": lambda: torch.linalg.lstsq(torch.eye(8, device="cuda"), ones(8, 2)),
    "compiled_default": lambda: train(
        torch.compile(nn.Sequential(nn.Linear(16, 16), nn.GELU())), ones(32, 16), steps=3
    ),
    "jit_script": lambda: train(
        torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()).cuda()), ones(2, 8)
    ),
    "backward_alone": lambda: nn.Linear(8, 8).cuda()(ones(4, 8)).sum().backward(),
}
for _d, _conv, _transposed in (
    (1, nn.Conv1d, nn.ConvTranspose1d),
    (2, nn.Conv2d, nn.ConvTranspose2d),
    (3, nn.Conv3d, nn.ConvTranspose3d),
):
    for _name, _kind in ((f"conv{_d}d", _conv), (f"conv{_d}d_transposed", _transposed)):
        _input = (2, 4, *[12] * _d)
        PROGRAMS[_name] = lambda kind=_kind, shape=_input: train(kind(4, 8, 3), ones(*shape))
for _kind in (nn.LSTM, nn.GRU, nn.RNN):
    PROGRAMS[_kind.__name__.lower()] = lambda kind=_kind: train(kind(16, 32), ones(5, 2, 16))

# ---- convolutions


@program
def conv_bf16_autocast() -> None:
    with torch.autocast("cuda", torch.bfloat16):
        train(nn.Conv2d(4, 8, 3), ones(2, 4, 12, 12))


@program
def conv_benchmark() -> None:
    with torch.backends.cudnn.flags(benchmark=True):
        train(nn.Conv2d(4, 8, 3), ones(2, 4, 12, 12))


# ---- attention


def attend(
    dtype: torch.dtype, grad: bool = True, width: int = 32, heads: tuple[int, int, int] = (4, 4, 4),
    by: SDPBackend | None = None, **options: Any,
) -> None:  # fmt: skip
    q, k, v = (ones(2, number, 64, width, dtype=dtype, grad=grad) for number in heads)
    with sdpa_kernel(by) if by else nullcontext():
        out = F.scaled_dot_product_attention(q, k, v, **options)
        if grad:
            out.sum().backward()


PROGRAMS |= {
    "sdpa_grouped_queries": lambda: attend(HALF, heads=(8, 2, 2), enable_gqa=True),
    "sdpa_wide_heads": lambda: attend(HALF, width=256),
    "sdpa_flash": lambda: attend(torch.bfloat16, by=SDPBackend.FLASH_ATTENTION),
    "sdpa_efficient": lambda: attend(HALF, by=SDPBackend.EFFICIENT_ATTENTION),
    "sdpa_cudnn": lambda: attend(torch.bfloat16, by=SDPBackend.CUDNN_ATTENTION),
}


for _name, _dtype in (("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)):
    PROGRAMS[f"sdpa_{_name}"] = lambda dtype=_dtype: attend(dtype)
    PROGRAMS[f"sdpa_causal_{_name}"] = lambda dtype=_dtype: attend(dtype, is_causal=True)
    PROGRAMS[f"sdpa_mask_{_name}"] = lambda dtype=_dtype: attend(
        dtype, attn_mask=ones(64, 64, dtype=dtype)
    )
    PROGRAMS[f"sdpa_no_grad_{_name}"] = lambda dtype=_dtype: attend(dtype, grad=False)


@program
def multihead_attention_half() -> None:
    module = nn.MultiheadAttention(64, 4, batch_first=True).cuda().half()
    x = ones(2, 16, 64, dtype=torch.float16)
    module(x, x, x, need_weights=False)[0].sum().backward()


@program
def transformer_encoder_padded() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).cuda().eval()
    with torch.no_grad():
        encoder(ones(2, 8, 32), src_key_padding_mask=torch.zeros(2, 8, device="cuda").bool())


def encode(padded: int) -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    mask = torch.zeros(2, 8).bool()
    mask[1, 8 - padded :] = True
    encoder = nn.TransformerEncoder(layer, 1).cuda().eval()
    with torch.no_grad():
        assert encoder(ones(2, 8, 32), src_key_padding_mask=mask.cuda()).shape == (2, 8, 32)


@program
def nested_encoder() -> None:
    """Sizes are what the masks say: they are read back from the card."""
    encode(padded=0)
    encode(padded=3)
    mask = torch.tensor([[True] * 5 + [False] * 3]).cuda()
    nested = torch._nested_tensor_from_mask(ones(1, 8, 32), mask)
    assert nested._nested_tensor_size().tolist() == [[5, 32]]


@program
def nested() -> None:
    parts = [torch.ones(3, 8), torch.ones(5, 8)]
    strided = torch.nested.nested_tensor(parts).cuda()
    assert strided.to_padded_tensor(0).shape == (2, 5, 8)
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged, device="cuda")
    nn.Linear(8, 8).cuda()(jagged).values().sum().backward()
    assert jagged.to_padded_tensor(0).shape == (2, 5, 8)


# ---- recurrent layers


@program
def lstm_packed() -> None:
    packed = nn.utils.rnn.pack_padded_sequence(ones(5, 2, 16), torch.tensor([5, 3]))
    module = nn.LSTM(16, 32).cuda()
    module(packed)[0].data.sum().backward()


# ---- norms, resampling, losses, embeddings


@program
def grid_sample() -> None:
    images, grid = ones(2, 3, 8, 8, grad=True), torch.zeros(2, 6, 6, 2, device="cuda")
    F.grid_sample(images, grid, align_corners=False).sum().backward()


@program
def interpolate() -> None:
    images = ones(2, 3, 8, 8, grad=True)
    F.interpolate(images, scale_factor=2, mode="bicubic").sum().backward()
    F.interpolate(images, scale_factor=2, mode="bilinear", antialias=True).sum().backward()


@program
def pooling() -> None:
    images = ones(2, 3, 8, 8, grad=True)
    (F.max_pool2d(images, 2) + F.avg_pool2d(images, 2)).sum().backward()
    F.adaptive_avg_pool2d(images, 3).sum().backward()


@program
def ctc() -> None:
    scores = ones(10, 2, 5, grad=True).log_softmax(-1)
    targets = torch.ones(2, 3, dtype=torch.long, device="cuda")
    sizes = torch.full((2,), 10), torch.full((2,), 3)
    F.ctc_loss(scores, targets, *sizes).backward()


@program
def ctc_of_cudnn() -> None:
    scores = ones(10, 2, 5, grad=True).log_softmax(-1)
    F.ctc_loss(scores, torch.ones(6, dtype=torch.int), (10, 10), (3, 3)).backward()


@program
def embeddings() -> None:
    tokens = torch.zeros(2, 8, dtype=torch.long, device="cuda")
    train(nn.Embedding(50, 16), tokens)
    train(nn.EmbeddingBag(50, 16), tokens)
    nn.Embedding(50, 16, sparse=True).cuda()(tokens).sum().backward()


# ---- sorting, scatter, FFT, linear algebra, sparse


@program
def sorting() -> None:
    x = torch.zeros(64, 64, device="cuda")
    x.sort(-1)
    x.topk(4)
    x.argsort()
    x.unique()
    x.cumsum(0)
    x.median()
    x.kthvalue(3)
    torch.searchsorted(x[0], x[1])


@program
def scattering() -> None:
    x, index = ones(8, 8, grad=True), torch.zeros(8, 8, dtype=torch.long, device="cuda")
    x.gather(1, index).sum().backward()
    torch.zeros(8, 8, device="cuda").scatter_add_(1, index, x.detach())
    x.index_select(0, index[0]).sum().backward()
    torch.zeros(8, 8, device="cuda").index_add_(0, index[0], x.detach())
    x[index[0]].sum().backward()


@program
def joining() -> None:
    """What is joined may be sizes, and so is what it would be."""
    for shapes, dim in (((2, 3), (4, 3)), 0), (((2, 3), (2, 5)), 1), (((3, 1), (3, 1)), 1):
        for dtype in (torch.int64, torch.float32, torch.bool):
            parts = [torch.arange(1, math.prod(s) + 1).reshape(s).to(dtype) for s in shapes]
            joined = torch.cat([part.cuda() for part in parts], dim)
            assert torch.equal(joined.cpu(), torch.cat(parts, dim))


@program
def fft() -> None:
    x = ones(4, 16, 16, grad=True)
    torch.fft.ifft2(torch.fft.fft2(x)).abs().sum().backward()
    torch.fft.irfft(torch.fft.rfft(x)).sum().backward()


@program
def solving() -> None:
    a = torch.eye(8, device="cuda").expand(2, 8, 8).contiguous()
    torch.linalg.solve(a, ones(2, 8, 1))
    torch.linalg.inv(a)
    torch.linalg.cholesky_ex(a)
    torch.linalg.slogdet(a)


@program
def decomposing() -> None:
    a = torch.eye(8, device="cuda")
    torch.linalg.qr(a)
    torch.linalg.svd(a)
    torch.linalg.eigh(a)


@program
def sparse_coo() -> None:
    index = torch.zeros(2, 4, dtype=torch.long, device="cuda")
    matrix = torch.sparse_coo_tensor(index, ones(4), (8, 8))
    torch.sparse.mm(matrix, ones(8, 4))


@program
def sparse_csr() -> None:
    rows = torch.arange(9, device="cuda")
    columns = torch.zeros(8, dtype=torch.long, device="cuda")
    torch.sparse_csr_tensor(rows, columns, ones(8), (8, 8)) @ ones(8, 4)


@program
def fp8_product() -> None:
    a, b = (torch.zeros(32, 32, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")
    torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


@program
def int8_product() -> None:
    a = torch.zeros(32, 32, device="cuda", dtype=torch.int8)
    torch._int_mm(a, a)


@program
def matrix_products() -> None:
    a = ones(4, 8, 8, grad=True)
    torch.einsum("bij,bjk->bik", a, a).sum().backward()
    torch.baddbmm(a, a, a).sum().backward()
    (ones(8) @ ones(8)).item()
    torch.addmv(ones(8), ones(8, 8), ones(8))


# ---- compiled


@program
def compiled_reduce_overhead() -> None:
    module = torch.compile(nn.Sequential(nn.Linear(16, 16), nn.GELU()), mode="reduce-overhead")
    train(module, ones(32, 16), steps=4)  # recorded in the second, replayed from the third on


@program
def compiled_max_autotune() -> None:
    with torch.no_grad():
        torch.compile(nn.Linear(16, 16).cuda(), mode="max-autotune")(ones(32, 16))


@program
def compiled_flex_attention() -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128)
    q, k, v = (ones(1, 2, 128, 32, dtype=torch.float16, grad=True) for _ in range(3))
    torch.compile(flex_attention)(q, k, v, block_mask=mask).sum().backward()


# ---- how a program trains


@program
def graphed_callable() -> None:
    module, x = nn.Linear(8, 8).cuda(), ones(4, 8)
    torch.cuda.make_graphed_callables(module, (x,))(x).sum().backward()


@program
def pinned_memory() -> None:
    host = torch.ones(1 << 20).pin_memory()
    host.cuda(non_blocking=True).cpu()


@program
def data_parallel() -> None:
    module = nn.DataParallel(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).cuda())
    module(ones(4, 3, 16, 16)).sum().backward()


@program
def sent_to_process() -> None:
    """And back: memory of each process in the other."""
    context = torch.multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=send_back, args=(there,))
    process.start()
    sent = ones(8)
    here.send(sent)
    received = here.recv()
    assert received.tolist() == [1.0] * 8
    here.send(None)
    process.join()
    assert process.exitcode == 0


def send_back(there: Any) -> None:
    received = there.recv()
    copied = received.clone()
    del received
    there.send(copied)
    there.recv()


@program
def random_numbers() -> None:
    torch.manual_seed(0)
    torch.rand(8, device="cuda")
    torch.randn(8, device="cuda").bernoulli_()
    torch.randperm(8, device="cuda")
    torch.multinomial(ones(4), 2)
    torch.cuda.set_rng_state(torch.cuda.get_rng_state())


def run(name: str) -> dict[str, Any]:
    """What a program took, in bytes, or what it raised."""
    try:
        PROGRAMS[name]()
        torch.cuda.synchronize()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return {"name": name, "failed": why, "line": f"{last.filename}:{last.lineno}"}
    return {
        "name": name,
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }


def main(names: list[str]) -> None:
    """Each in a fork and with no compiled code of before, whose trials take memory: its bytes do
    not depend on what ran before."""
    with tempfile.TemporaryDirectory() as folder:
        for name in names or PROGRAMS:
            print(run_apart(name, f"{folder}/{name}"), flush=True)


def run_apart(name: str, cache: str) -> str:
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.environ.update(TORCHINDUCTOR_CACHE_DIR=cache, TORCHINDUCTOR_COMPILE_THREADS="1")
        os.write(write, json.dumps(run(name)).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        said = answer.read()
    _, status = os.waitpid(child, 0)
    return said or json.dumps({"name": name, "failed": f"ended by {status}"})


if __name__ == "__main__":
    main(sys.argv[1:])
