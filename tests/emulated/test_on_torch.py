"""torch's own CUDA code on an emulated GPU: what it allocates, refuses and says."""

import dataclasses
import json
import signal
from pathlib import Path
from random import Random

import pytest

from planner.core.units import GIB, MIB
from planner.machine.emulated import EmulatedMachine, emulated_gpu, holding, started
from planner.memory.allocator_config import parse_allocator_config
from tests.emulated.conftest import RTX_3090, Run, answer
from tests.memory.requests import played, random_requests, random_streams

pytestmark = pytest.mark.emulated

HELD = """
import json, torch
held = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
free, total = torch.cuda.mem_get_info()
print(json.dumps([torch.cuda.memory_reserved(), total - free]))
"""


@pytest.mark.parametrize("options", ["", "expandable_segments:True", "backend:cudaMallocAsync"])
def test_what_the_driver_sees_is_what_an_allocator_reserves(run: Run, options: str) -> None:
    reserved, held = run(HELD, PYTORCH_CUDA_ALLOC_CONF=options)
    assert reserved >= 3 << 20
    assert held == reserved + RTX_3090.context_bytes


REQUESTS = """
import json, os, torch
requests, of_streams = json.loads(os.environ["REQUESTS"])
streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
blocks, found = {}, []
for index, (entry, number) in enumerate(zip(requests, of_streams)):
    with torch.cuda.stream(streams[number]):
        if entry >= 0:
            blocks[index] = torch.empty(entry, dtype=torch.uint8, device="cuda")
        else:
            del blocks[~entry]
    found.append([torch.cuda.memory_allocated(), torch.cuda.memory_reserved()])
print(json.dumps([torch.cuda.memory_stats()["num_alloc_retries"], *found]))
"""


@pytest.mark.parametrize(
    "options",
    [
        "", "max_split_size_mb:30", "expandable_segments:True",
    ],
)  # fmt: skip
@pytest.mark.parametrize("share", [1.2, 0.9])
def test_our_allocator_holds_what_torchs_own_holds_after_each_request(
    options: str, share: float, run: Run
) -> None:
    """Also where memory is short, so that both give segments back and ask again."""
    source = Random(options)
    requests = random_requests(source, 400)
    streams, config = random_streams(source, requests, 3), parse_allocator_config(options)
    _, plenty, _ = played(requests, config, streams)
    free = int(share * max(plenty)) // (20 * MIB) * 20 * MIB
    allocated, reserved, retries = played(requests, config, streams, free)
    assert share > 1 or reserved != plenty
    asked = {"REQUESTS": json.dumps([requests, streams]), "PYTORCH_CUDA_ALLOC_CONF": options}
    pairs = zip(allocated, reserved, strict=True)
    card = dataclasses.replace(RTX_3090, memory_bytes=RTX_3090.context_bytes + free)
    found = run(REQUESTS, EmulatedMachine((card,)), **asked)
    assert found == [retries, *map(list, pairs)]


RESULTS = """
import json, torch
x = torch.randn(1000).cuda()
one = torch.zeros((), device="cuda")
print(json.dumps({
    "all": torch.isfinite(x).all().item(), "any": torch.isinf(x).any().item(),
    "one": [torch.isfinite(one).item(), torch.isnan(one).item(), torch.isinf(one).item()],
    "flags": [torch.cuda.ByteTensor([0])[0].item(), torch.cuda.ByteTensor([1])[0].item()],
    "fills": torch.full((3,), 2.5, device="cuda", dtype=torch.bfloat16).tolist(),
    "copies": torch.arange(3).cuda().tolist(),
    "joins": [
        torch.equal(torch.cat([v.cuda() for v in vectors]).cpu(), torch.cat(vectors))
        for dtype in (torch.uint8, torch.float16, torch.float32, torch.int64)
        for sizes in ([3, 2], [64, 64], [1] * 200)
        for vectors in [[torch.arange(n).to(dtype) + 1 for n in sizes]]
    ],
}))
"""
# Memory that was given back holds no numbers when losses and norms lie there.
NUMBERS = """
import json, torch
from torch.nn import functional
numbers = []
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    x = torch.randn(64, 1000, device="cuda", dtype=dtype)
    labels, soft = torch.zeros(64, device="cuda", dtype=torch.long), x.float().softmax(1)
    spoilt = [torch.full((n,), float("nan"), device="cuda") for n in [128] * 40 + [1] * 40]
    del spoilt
    norm = torch.stack(torch._foreach_norm([x, x])).norm()
    numbers += [
        x.sum(), x.mean(), x.amax(), x.float().norm(2), norm, x.var(),
        functional.cross_entropy(x.float(), labels), functional.cross_entropy(x.float(), soft),
        functional.mse_loss(x, 2 * x), functional.l1_loss(x, x),
        functional.binary_cross_entropy_with_logits(x.float(), soft),
    ]
    finite = torch.isfinite(x.amax()).logical_and(torch.isfinite(x.amin()))
    bad = (~torch.isfinite(norm) | (norm < 0)).any()
    numbers += [finite.logical_not().byte(), bad.float()]
print(json.dumps([float(number) for number in numbers]))
"""


def test_losses_and_norms_are_zero(run: Run) -> None:
    assert set(run(NUMBERS)) == {0.0}


def test_no_overflow_is_found_and_small_values_are_kept(run: Run) -> None:
    assert run(RESULTS) == {
        "all": True,
        "any": False,
        "one": [True, False, False],
        "flags": [0, 1],
        "fills": [2.5] * 3,
        "copies": [0, 1, 2],
        "joins": [True] * 12,
    }


COUNTS = """
import json, torch
sizes = [1 << power for power in range(17)]
def soil():  # what lies in memory that is given anew
    held = [torch.empty(size, dtype=torch.int64, device="cuda") for size in sizes]
    for tensor in held:
        tensor.copy_(torch.full(tensor.shape, 0x7FF123456789AB, dtype=torch.int64))
labels = torch.randint(0, 9, (4096,), device="cuda")
table, mask = labels.view(64, 64), labels > 3
every = {"return_inverse": True, "return_counts": True}
questions = {
    "sum": lambda: mask.sum().item(),
    "count_nonzero": lambda: torch.count_nonzero(mask).item(),
    "sums": lambda: max(mask.view(64, 64).sum(1).tolist()),
    "next": lambda: (labels.max() + 1).item(),
    "places": lambda: max(table.max(1).indices.tolist()),
    "argmax": lambda: max(table.argmax(1).tolist()),
    "cumsum": lambda: mask.cumsum(0)[-1].item(),
    "nonzero": lambda: len(mask.nonzero()),
    "mask": lambda: len(labels[mask]),
    "masked_select": lambda: len(labels.masked_select(mask)),
    "where": lambda: len(torch.where(mask)[0]),
    "repeat": lambda: len(table.repeat_interleave(labels[:64], 0)),
    "unique": lambda: len(labels.unique()),
    "unique dim": lambda: len(table.unique(dim=0)),
    "unique counts": lambda: [len(t) for t in labels.unique(**every)],
    "unique dim counts": lambda: [len(t) for t in table.unique(dim=0, **every)],
    "unique_consecutive": lambda: len(labels.unique_consecutive()),
    "bincount": lambda: len(labels.bincount()),
    "classes": lambda: labels.bincount(minlength=3).tolist(),
}
answers = {}
for name, ask in questions.items():
    soil()
    answers[name] = ask()
print(json.dumps(answers))
"""


def test_counts_are_defined_whatever_lies_in_memory(run: Run) -> None:
    """A mask selects nothing and sums to 0, unique finds one value, labels are all the first."""
    answers = run(COUNTS)
    assert answers.pop("classes") == [0, 0, 0]
    assert answers.pop("unique counts") == [1, 4096, 1]
    assert answers.pop("unique dim counts") == [1, 64, 1]
    assert [answers.pop(f"unique{more}") for more in ("", " dim", "_consecutive")] == [1, 1, 1]
    assert answers.pop("bincount") == 1
    assert set(answers.values()) == {0}


def test_graphs_are_captured_and_replayed_and_refuse_to_wait(run: Run) -> None:
    program = """
import json, torch
x, graph = torch.randn(64, device="cuda"), torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = x * 2
graph.replay()
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        (x * 2).sum().item()
except RuntimeError as error:
    print(json.dumps([str(error).splitlines()[0], str(error.__context__).splitlines()[0]]))
"""
    assert run(program) == [
        "CUDA error: operation failed due to a previous error during capture",
        "CUDA error: operation not permitted when stream is capturing",
    ]


FREE = """
import json, torch
print(json.dumps(torch.cuda.mem_get_info()))
"""


def test_another_process_holds_memory_until_it_is_gone(libraries: Path) -> None:
    with started(EmulatedMachine((RTX_3090,))) as environment:
        before, _ = answer(environment, FREE)
        with holding(environment, 5 * GIB) as other:
            during, _ = answer(environment, FREE)
            other.send_signal(signal.SIGKILL)
            other.wait()
            after, _ = answer(environment, FREE)
    assert before - during == 5 * GIB + RTX_3090.context_bytes
    assert after == before


def test_events_tell_the_catalogues_rates(run: Run) -> None:
    program = """
import json, torch
start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
def seconds(dtype, tf32=False):
    torch.backends.cuda.matmul.allow_tf32 = tf32
    a = torch.empty(4096, 4096, device="cuda", dtype=dtype)
    a @ a
    start.record()
    a @ a
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3
print(json.dumps([
    seconds(torch.bfloat16), seconds(torch.float32, True), seconds(torch.float32)
]))
"""
    gpu = emulated_gpu("a100-sxm-80gb")
    rates = (gpu.half_flops, gpu.tf32_flops, gpu.fp32_flops)
    expected = [2 * 4096**3 / rate + gpu.launch_seconds for rate in rates]
    assert run(program, EmulatedMachine((gpu,))) == pytest.approx(expected, rel=1e-3)
