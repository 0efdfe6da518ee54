"""The first minutes on a GPU: what no CPU can show, most telling first, into a file of records.

    python -m tests.truth.first --record tests/truth/first-DEVICE.jsonl
    python -m planner.machine.emulated --gpu rtx-3090 -- python -m tests.truth.first   a rehearsal

Each sight runs in a process of its own with a deadline: one that fails or hangs is a record too,
and keeps no other from being seen. docs/how-it-works.md says what depends on each. Run again, it
goes on with what was not seen.

Legend: B images, nW windows of an image, h heads, N tokens of a window, d a head's width.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from planner.core.schema import ResolvedSetting, SwinConfig, TrainSetting
from planner.core.units import MIB
from planner.libraries.maps import feature_maps
from planner.libraries.registry import find_library
from planner.libraries.resolve import resolve_model
from search.probe.device import describe_device, memory_in_use, nvml_device, versions
from search.probe.worker.worker import end

DEVICE = "cuda:0"
# What fails is looked at once more by the next run, and no more.
TRIES = 2
# The head of a long error says what, its tail where: both are kept.
HEAD_CHARACTERS, TAIL_CHARACTERS = 4000, 2000
# Run once, recorded once, replayed from then on: CUDA graphs are alike from the third step.
WARMUP_STEPS = 4
# Parts of the names of kernels and operators that compute attention.
ATTENTION_WORDS = ("attention", "fmha", "flash", "sdp", "cudnn_generated_fort", "mha")
ONE_BLOCK_A_STAGE = {"depths": "1,1,1,1"}  # compiled in a third of the time, and graphs are alike

Figures = dict[str, Any]


def tell(**figures: Any) -> None:
    """Figures as they are seen, so that a process that is ended has told them: bytes are integers,
    times are seconds."""
    print(json.dumps({"figures": figures}), flush=True)


class Subject:
    """A native Swin-T, and a step of it whose setting nobody has refused or resolved: what the
    planner refuses must be seen to fail at least once."""

    def __init__(self, overrides: Mapping[str, str] | None = None, **setting: Any) -> None:
        model = resolve_model("native:swin_tiny", dict(overrides or {}))
        assert isinstance(model, SwinConfig)
        attention = find_library("native").default_attention(model)
        fields = {"precision": "bf16", "attention": attention, **setting}
        self.model, self.setting = model, TrainSetting().model_copy(update=fields)

    @cached_property
    def training(self) -> Any:
        """A fresh one on the device, as a probe's worker makes it."""
        import torch

        from planner.training.step import Training
        from planner.training.tasks import as_task
        from planner.training.tasks.compiling import compile_as_set
        from search.probe.protocol import ProbeRequest
        from search.probe.worker.precision import set_precision
        from search.probe.worker.subject import seed_everything, touch_libraries

        request = ProbeRequest.model_construct(
            model=self.model, setting=self.setting, device=DEVICE
        )
        seed_everything(0)
        touch_libraries(request)
        built = find_library("native").build(self.model, ResolvedSetting(self.setting))
        set_precision(request)
        built = built.to(DEVICE)
        task = as_task(built, self.model, self.setting)
        compiled = compile_as_set(built, task, self.model, self.setting)
        batch = task.batch(self.setting.batch_size, torch.device(DEVICE))
        return Training(built, self.setting, task, batch, compiled)

    def attention(self, learned_bias: bool = True) -> Callable[[], Any]:
        """Fused attention of the first stage's blocks that are not shifted: queries, keys, values
        [B·nW, h, N, d] and a bias [h, N, N]."""
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        side, heads = self.model.windows[0], self.model.num_heads[0]
        height, width = feature_maps(self.model)[0]
        windows = self.setting.batch_size * -(-height // side) * -(-width // side)
        shape = (windows, heads, side**2, self.model.embed_dim // heads)
        q, k, v = (
            torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )
        bias = torch.zeros(heads, side**2, side**2, device=DEVICE, requires_grad=learned_bias)
        return lambda: scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype)[None])


def memory() -> Figures:
    """What is held now, in bytes, by the caching allocator, the runtime and the driver."""
    import torch

    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    used = memory_in_use(DEVICE)
    return {
        "allocated_bytes": torch.cuda.memory_allocated(),
        "reserved_bytes": torch.cuda.memory_reserved(),
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "used_by_runtime_bytes": total - free,
        "used_by_driver_bytes": used and used.used_bytes,
    }


def requests(call: Callable[[], object]) -> list[int]:
    """Bytes of each request for memory that `call` made, in order."""
    import torch

    from search.probe.worker.history import record_history

    trace = record_history(torch.device(DEVICE), call)["device_traces"][0]
    return [entry["size"] for entry in trace if entry["action"] == "alloc"]


def attention_kernels(call: Callable[[], object]) -> Figures:
    """The operators and kernels of attention that run while `call` does, and how many kernels the
    profiler saw at all: with none, CUPTI does not answer, and no name is an answer."""
    import torch
    from torch._C._autograd import DeviceType

    with torch.profiler.profile() as profiler:
        call()
        torch.cuda.synchronize()
    events = profiler.events() or ()
    kernels = [e.name for e in events if e.device_type != DeviceType.CPU]
    operators = [e.name for e in events if e.device_type == DeviceType.CPU]

    def chosen(names: Sequence[str]) -> list[str]:
        return sorted({n for n in names if any(w in n.lower() for w in ATTENTION_WORDS)})

    return {
        "operators": chosen(operators), "kernels": chosen(kernels), "num_kernels": len(kernels)
    }  # fmt: skip


def see_driver() -> None:
    """Whose pid the driver gives us, what it says we use, and whose total it is."""
    import torch

    nvml = nvml_device(DEVICE)
    assert nvml is not None, "NVML does not answer"
    tell(processes_before=len(nvml.processes or ()), own_pid=os.getpid())
    held = torch.zeros(256 * MIB, dtype=torch.uint8, device=DEVICE)
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    tell(**memory(), held_bytes=held.numel(), total_by_torch_bytes=total)
    tell(
        total_by_driver_bytes=nvml.memory and nvml.memory.total,
        mig=nvml.is_split,
        processes=[[process.pid, process.used_bytes] for process in nvml.processes or ()],
    )


def see_memory_return() -> None:
    """How long `used` takes to fall after a process that held most of the device was killed. This
    process makes no context: it only watches."""
    before = memory_in_use(DEVICE)
    assert before is not None
    hold = int(0.9 * before.free_bytes)
    code = (
        "import signal, torch; "
        f"held = torch.ones({hold}, dtype=torch.uint8, device={DEVICE!r}); "
        "torch.cuda.synchronize(); print(flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        full = memory_in_use(DEVICE)
        assert full is not None
        tell(used_before_bytes=before.used_bytes, used_full_bytes=full.used_bytes)
        killed = time.monotonic()
        holder.kill()
    tell(seconds_until_gone=time.monotonic() - killed)
    # What a driver keeps of a process for a while; what is left by more was not given back.
    while (now := memory_in_use(DEVICE)) and now.used_bytes > before.used_bytes + 64 * MIB:
        time.sleep(0.02)
    tell(seconds_until_returned=time.monotonic() - killed)


def see_step(subject: Subject, num_steps: int = 1) -> str:
    """Whether a setting's step runs; the text of its error where it does not, with what our
    classifier calls it."""
    import torch

    from search.probe.worker.verdict import causes, classify, read_memory

    phases = ["forward"]
    following = {"forward": "backward", "backward": "optimizer or the next forward",
                 "optimizer": "zero_grad", "zero_grad": "forward"}  # fmt: skip
    done, text = 0, ""
    try:
        for _ in range(num_steps):
            subject.training.step(lambda ended: phases.append(following[ended]))
            torch.cuda.synchronize()
            done += 1
    except Exception as error:
        # What ended it is what we came to see: nothing is hidden, all of it is recorded.
        text = whole_text(error)
        tell(
            ended_in=phases[-1],
            classified_as=classify(error, read_memory(DEVICE)),
            classified_by_text_as=classify(error)[0],
            error_types=[type(e).__name__ for e in causes(error)],
        )
    tell(completed_steps=done)
    tell(**memory())  # an illegal access leaves a context that answers this with that error
    return text


def whole_text(error: BaseException) -> str:
    """An error's own text, at a sensible length."""
    text = f"{type(error).__module__}.{type(error).__qualname__}: {error}"
    if len(text) <= HEAD_CHARACTERS + TAIL_CHARACTERS:
        return text
    return f"{text[:HEAD_CHARACTERS]}\n[…]\n{text[-TAIL_CHARACTERS:]}"


def see_near_limit(subject: Subject) -> str:
    """Two steps with 2% less memory than their tensors need: where they end and what they say.

    What they need is measured by another process, which ends before this one touches the device;
    then a ballast leaves the rest, before the libraries' handles are made, as in a first step.
    """
    import torch

    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        needed = pool.submit(needed_bytes, subject).result()
    free, before = torch.cuda.mem_get_info()[0], 0
    while free > before:  # the driver may still take back the ended process's memory
        time.sleep(0.5)
        before, free = free, torch.cuda.mem_get_info()[0]
    ballast = torch.empty(free - int(0.98 * needed), dtype=torch.uint8, device=DEVICE)
    tell(needed_bytes=needed, ballast_bytes=ballast.numel())
    return see_step(subject, 2)


def needed_bytes(subject: Subject) -> int:
    """The most that tensors take at once in two steps."""
    import torch

    for _ in range(2):
        subject.training.step()
    return torch.cuda.max_memory_allocated()


def see_attention_memory(subject: Subject) -> None:
    """Every request for memory in a forward and a backward, beside what an estimate expects."""
    import torch

    from planner.step.attention import backward_scratch

    attend, output = subject.attention(), []
    tell(forward_requests_bytes=requests(lambda: output.append(attend())))
    scratch = backward_scratch(tuple(output[0].shape), is_half=True)
    tell(expected_delta_bytes=scratch.delta, expected_workspace_bytes=scratch.workspace)
    gradient = torch.ones_like(output[0])
    found = requests(lambda: torch.autograd.backward(output[0], gradient))
    tell(backward_requests_bytes=found, workspace_is_as_expected=scratch.workspace in found)


def see_timing(subject: Subject) -> None:
    """One setting timed without a pause, told after 0.5, 3, 10 and 30 s: the median of the steps
    and of their last quarter, clocks and power."""
    import torch

    nvml = nvml_device(DEVICE)
    samples: list[float] = []
    for _ in range(WARMUP_STEPS):
        subject.training.step()
    torch.cuda.synchronize()
    began = last = time.monotonic()
    for limit in (0.5, 3, 10, 30):
        while time.monotonic() - began < limit or len(samples) < 2:
            subject.training.step()
            torch.cuda.synchronize()
            samples.append(time.monotonic() - last)
            last += samples[-1]
        figures = {
            "num_steps": len(samples),
            "median_seconds": median(samples),
            "last_quarter_seconds": median(samples[-max(1, len(samples) // 4) :]),
            "sm_mhz": nvml and nvml.sm_mhz,
            "power_watts": nvml and nvml.power_watts,
            "throttle_reasons": nvml and list(nvml.throttle_reasons),
        }
        tell(**{f"after_{limit:g}_s": figures})
    tell(first_six_over_settled=median(samples[:6]) / figures["last_quarter_seconds"])


def see_compile_cache(subject: Subject) -> None:
    """What compiling leaves in the allocator's cache, and what steps take once it is given back."""
    import torch

    began = time.monotonic()
    subject.training.step()
    torch.cuda.synchronize()
    tell(compile_seconds=time.monotonic() - began)
    see_step(subject, WARMUP_STEPS - 1)
    tell(compiled=memory())
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    tell(emptied=memory())
    see_step(subject, WARMUP_STEPS)
    tell(after_steps=memory())


def see_context(subject: Subject) -> None:
    """Bytes after an empty context, a matmul, its backward, a convolution and whole steps, and the
    workspaces that cuBLAS asks of the allocator in the caller's thread and in autograd's."""
    import torch

    used = memory_in_use(DEVICE)  # torch itself would make the context
    tell(untouched_used_bytes=used and used.used_bytes)
    left, right = (torch.randn(512, 512, device=DEVICE, requires_grad=True) for _ in range(2))
    tell(tensors=memory())
    products: list[Any] = []
    tell(forward_requests_bytes=requests(lambda: products.append(left @ right)), matmul=memory())
    backward = requests(lambda: torch.autograd.backward(products[0].sum()))
    tell(backward_requests_bytes=backward, matmul_backward=memory())
    torch.nn.Conv2d(3, 16, 4, stride=4, device=DEVICE)(torch.randn(8, 3, 64, 64, device=DEVICE))
    tell(convolution=memory())
    for name in ("first_step", "second_step"):
        subject.training.step()
        tell(**{name: memory()})


def see_attention_kernels(subject: Subject) -> None:
    """Which kernel a whole step computes attention with."""
    subject.training.step()
    tell(**attention_kernels(subject.training.step))


def see_attention_rate(subject: Subject) -> None:
    """Fused attention timed and named, with a bias that learns and with one that does not."""
    import torch
    from torch.utils.benchmark import Timer

    for name, learned in (("learned_bias", True), ("frozen_bias", False)):
        attend = subject.attention(learned)
        gradient = torch.ones_like(attend())
        names = {"attend": attend, "gradient": gradient, "torch": torch}
        both = "torch.autograd.backward(attend(), gradient)"
        seconds = {
            f"{what}_seconds": Timer(code, globals=names).blocked_autorange().median
            for what, code in (("forward", "attend()"), ("forward_backward", both))
        }
        kernels = attention_kernels(lambda: exec(both, names))  # noqa: B023
        tell(**{name: seconds | kernels})


@dataclass(frozen=True)
class Sight:
    """What is looked at, by `see`, which returns the text of an error that was looked for;
    `deadline` is in seconds."""

    what: str
    see: Callable[[], str | None]
    deadline: float
    environment: dict[str, str] = field(default_factory=dict)


def of(see: Callable[..., str | None], *rest: Any, **subject: Any) -> Callable[[], str | None]:
    return lambda: see(Subject(**subject), *rest)


SIGHTS = {
    "driver": Sight(
        "What the driver answers about our own process, and whose total it is", see_driver, 150
    ),
    "memory-return": Sight(
        "How long the memory in use takes to fall after a process that held most of it was killed",
        see_memory_return, 75,
    ),
    "sdpa-65536-windows": Sight(
        "Fused attention over 65,536 windows in one step, which one launch cannot hold",
        of(see_step, batch_size=1024, attention="sdpa",  # 9 GiB in place of 70
           overrides={"embed_dim": "24", "num_heads": "1,2,4,8", **ONE_BLOCK_A_STAGE}), 60,
    ),
    "sdpa-backward-memory": Sight(
        "Every request for memory in the backward of fused attention, with its workspace",
        of(see_attention_memory, batch_size=64), 45,
    ),
    "graphs-and-accumulation": Sight(
        "CUDA graphs under accumulation, whose gradients the next micro-batch may overwrite",
        of(see_step, 4, batch_size=64, accumulate=2, compile="reduce-overhead",
           overrides=ONE_BLOCK_A_STAGE), 200,
    ),
    "limit-eager": Sight(
        "What an eager step says when it lacks 2% of its memory",
        of(see_near_limit, batch_size=64), 75,
    ),
    "limit-compiled": Sight(
        "What a compiled step says when it lacks 2% of its memory",
        of(see_near_limit, batch_size=64, compile="default", overrides=ONE_BLOCK_A_STAGE), 240,
    ),
    "limit-expandable": Sight(
        "What an eager step with expandable segments says when it lacks 2% of its memory",
        of(see_near_limit, batch_size=64), 75,
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    ),
    "settling": Sight(
        "One setting timed for 0.5, 3, 10 and 30 s, with clocks and power",
        of(see_timing, batch_size=128), 75,
    ),
    "autotune-cache": Sight(
        "What compiling leaves in the allocator's cache, and what steps take once it is emptied",
        of(see_compile_cache, batch_size=64, compile="max-autotune"), 300,
    ),
    "context": Sight(
        "Bytes beside tensors as libraries come in, and the workspaces of cuBLAS in both threads",
        of(see_context, batch_size=8), 60,
    ),
    "lora-attention": Sight(
        "Which attention kernel runs where the position biases are frozen (LoRA)",
        of(see_attention_kernels, batch_size=16, attention="sdpa", lora_rank=8), 60,
    ),
    "attention-rate": Sight(
        "Fused attention timed and named, with a bias that learns and with one that does not",
        of(see_attention_rate, batch_size=64), 60,
    ),
}  # fmt: skip


def look(name: str) -> Figures:
    """The record of one sight: what its process told, however that ended."""
    sight = SIGHTS[name]
    record: Figures = {
        "observation": name, "what": sight.what, "status": "seen", "message": "", "figures": {},
        "device": describe_device(DEVICE).model_dump(mode="json"), "versions": versions(),
        "environment": sight.environment, "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.truth.first", "--see", name],
        env={**os.environ, **sight.environment}, start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        told, said = process.communicate(timeout=sight.deadline)
        if process.returncode:
            record |= {"status": "failed", "message": said[-TAIL_CHARACTERS:]}
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        told, _ = process.communicate()
        record |= {"status": "timed_out", "message": f"not done after {sight.deadline:g} s"}
    for line in told.splitlines():
        if line.startswith('{"figures"'):
            record["figures"] |= json.loads(line)["figures"]
        elif line.startswith('{"message"'):
            record |= json.loads(line)
    return record


def is_seen(name: str, records: Sequence[Figures]) -> bool:
    """Whether `records`, of one device, settle a sight: it was seen, or failed twice."""
    found = [record["status"] for record in records if record["observation"] == name]
    return "seen" in found or len(found) >= TRIES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path, default=Path("first.jsonl"))
    parser.add_argument("--see", choices=SIGHTS, help="look at one here and now")
    parser.add_argument("--only", nargs="+", choices=SIGHTS, default=list(SIGHTS))
    given = parser.parse_args()
    if given.see:
        print(json.dumps({"message": SIGHTS[given.see].see() or ""}))
        end()  # without Python's own end, in which a thread of torch's may still ask for its lock
    device = describe_device(DEVICE).model_dump(mode="json")
    with given.record.open("a+") as file:
        file.seek(0)
        known = [r for line in file if (r := json.loads(line))["device"] == device]
        for name in given.only:
            if not is_seen(name, known):
                record = look(name)
                print(f"{record['what']}: {record['status']}. {record['message'][:300]}")
                file.write(json.dumps(record) + "\n")
                file.flush()


if __name__ == "__main__":
    main()
