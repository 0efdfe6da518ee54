"""What is recognised in a training's log, in the order of how much it explains.

Each is a text that a library writes, read in the place that is named, what it means, and what to
do. `planner explain` and the table of docs/watching.md hold the same list.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from planner.explaining.allocator_message import BEGINS

OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Sign:
    kind: str
    pattern: re.Pattern[str]
    means: str
    todo: tuple[str, ...]


def _sign(kind: str, pattern: str, means: str, *todo: str) -> Sign:
    return Sign(kind, re.compile(pattern), means, todo)


SIGNS: tuple[Sign, ...] = (
    _sign(
        OUT_OF_MEMORY,
        # The last is the allocator's too: it fails while it asks NVML for what its message says (on
        # MIG, Jetson and in some containers: pytorch #112377, #122068, #185240).
        rf"{BEGINS.pattern}|NVML_SUCCESS == .*INTERNAL ASSERT FAILED at \S*CUDACachingAllocator",
        "torch's allocator asked the device for memory and got none.",
        "A smaller micro-batch, checkpointing, or less beside it on the device: 'planner advise' "
        "says what each saves.",
    ),
    _sign(
        "library out of memory",
        # search/probe/failure.py says where each of these is written.
        r"CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|DEVICE_ALLOCATION_FAILED"
        r"|(?:CUDA|HIP)(?: driver)? error: out of memory|Triton Error \[CUDA\]: out of memory"
        r"|Cuda failure (?:\d+ )?'out of memory'",  # NCCL (NVIDIA/nccl #1235)
        "A library (cuBLAS, cuDNN, NCCL, the driver, Triton) found no memory for itself, outside "
        "of torch's allocator: the device is full.",
        "Leave the device a few hundred MiB: a smaller micro-batch, or "
        "torch.cuda.set_per_process_memory_fraction(0.95).",
    ),
    _sign(
        "perhaps out of memory",
        r"CUBLAS_STATUS_NOT_INITIALIZED|CUDNN_STATUS_NOT_SUPPORTED|CUDNN_STATUS_NOT_INITIALIZED"
        r"|CUDNN_STATUS_INTERNAL_ERROR(?!_(?:HOST|DEVICE)_ALLOCATION)"
        # Until torch 1.13 "a valid cuDNN algorithm" (marqo-ai/marqo #101, XPixelGroup/DiffBIR #59).
        r"|nable to find an engine to execute this computation|nable to find a valid cuDNN",
        "cuBLAS or cuDNN could not begin. On a device that is nearly full it lacks memory; with "
        "memory free, the library does not fit the driver or the card.",
        "Look at the free memory when it happens (nvidia-smi), or try half of the micro-batch: if "
        "that runs, it was memory. Otherwise run 'planner doctor'.",
    ),
    _sign(
        "out of host memory",
        r"DefaultCPUAllocator: can't allocate memory|DefaultCPUAllocator: not enough memory"
        r"|^\s*MemoryError\b|std::bad_alloc|Cannot allocate memory|HOST_ALLOCATION_FAILED",
        "The host's memory is full, not the GPU's: the loader's workers, pinned batches, a data "
        "set that is held whole, or offloaded activations.",
        "Fewer workers or a smaller prefetch_factor; 'planner data' measures what a worker takes.",
    ),
    _sign(
        "killed by the kernel",
        r"^\s*Killed\s*$|\bKilled\s+python|Out of memory: Killed process|oom-kill|oom_kill event"
        r"|exitcode\s*:\s*-9\b|Signal 9 \(SIGKILL\)|is killed by signal: Killed"
        # Kubernetes and Docker; srun (ZwwWayne/K-Net #30). 137 is 128 and SIGKILL.
        r"|\bOOMKilled\b(?!\W+false)|(?i:exit(?:ed with)?[ _]?(?:code|status))\W{1,8}137\b"
        r"|task \d+: Out Of Memory",
        "The kernel or the scheduler killed a process, in nearly every case because the host's "
        "memory (or the container's share of it) was full.",
        "Give the job more host memory, or use fewer workers; 'dmesg' names the process.",
    ),
    _sign(
        "shared memory is full",
        r"insufficient shared memory|out of shared memory|is killed by signal: Bus error"
        r"|unable to (?:open|write|allocate|resize) (?:to )?(?:file|shared memory)[^\n]*torch_"
        r"|No space left on device: '/torch_",
        "The loader's workers hand batches over in /dev/shm, and it is full: a container has 64 "
        "MiB of it unless it is told otherwise.",
        "docker run --shm-size=8g (or --ipc=host); else fewer workers or a smaller "
        "prefetch_factor; else torch.multiprocessing.set_sharing_strategy('file_system').",
    ),
    _sign(
        "loader worker died",
        r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (?:is killed by signal|exited unexpectedly)",
        "A process of the loader ended without an exception of Python's.",
        "The lines before it say why. Run once with num_workers=0: the data set's own error is "
        "then seen.",
    ),
    _sign(
        "too many open files",
        r"Too many open files|received 0 items of ancdata",
        "Each batch that waits between processes holds file descriptors, and the limit is reached.",
        "ulimit -n 65536, or torch.multiprocessing.set_sharing_strategy('file_system').",
    ),
    _sign(
        "collective timed out",
        r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for"
        r"|\[Rank \d+\] NCCL watchdog thread terminated",
        "A rank waited for the others in vain: one of them ended, hangs, or runs another sequence "
        "of steps. The rank that died first is the cause, the others' timeouts are not.",
        "Look for the first error of any rank above. With none: are the numbers of batches the "
        "same in all ranks? TORCH_DISTRIBUTED_DEBUG=DETAIL names the collective that differs.",
    ),
    _sign(
        "NCCL failed",
        r"nccl(?:UnhandledCuda|System|Internal|InvalidUsage|Remote)Error|NCCL error in:",
        "NCCL could not communicate: network, driver, shared memory of a container, or a rank "
        "that died.",
        "NCCL_DEBUG=INFO says which call failed; in a container raise --shm-size.",
    ),
    _sign(
        "no such device",
        r"invalid device ordinal|No CUDA GPUs are available",
        "The process asked for a GPU that it cannot see: it has fewer than the number says, or "
        "CUDA_VISIBLE_DEVICES hides them. It is no clash of versions.",
        "Count them with 'planner doctor'; start as many processes as there are GPUs.",
    ),
    _sign(
        "no kernel for this GPU",
        r"no kernel image is available|is not compatible with the current PyTorch installation",
        "This torch was not built for this GPU's architecture.",
        "'planner doctor' says which architectures it has; install a torch built for the card.",
    ),
    _sign(
        "driver too old",
        r"CUDA driver version is insufficient|NVIDIA driver on your system is too old",
        "The driver is older than the CUDA that torch was built for.",
        "Update the driver, or install a torch for the CUDA that 'nvidia-smi' shows.",
    ),
    _sign(
        "torch without CUDA",
        r"Torch not compiled with CUDA enabled",
        "This torch is built for the CPU only.",
        "Install a CUDA build; 'planner doctor' says which.",
    ),
    _sign(
        "assertion on the device",
        r"device-side assert triggered",
        "A kernel met an index out of range: in nearly every case a label that is not below the "
        "number of classes.",
        "Compare the largest label with num_classes; CUDA_LAUNCH_BLOCKING=1 names the line.",
    ),
    _sign(
        "illegal memory access",
        r"an illegal memory access was encountered",
        "A kernel read or wrote where it may not: a bug of a kernel, or a broken card. All later "
        "errors of the process follow from it.",
        "CUDA_LAUNCH_BLOCKING=1 names the operation.",
    ),
    _sign(
        "disk full",
        r"No space left on device(?!: '/torch_)|Disk quota exceeded",
        "A file could not be written: checkpoint, log or cache.",
        "Free the disk that the line names, and keep fewer checkpoints.",
    ),
    _sign(
        "non-finite loss",
        r"(?i)\bloss\b['\"]?\s*(?:is|[:=])?\s*['\"]?(?:nan|-?inf)\b|returned nan values in its",
        "The loss is no number any more: the weights are lost from there on.",
        "Go back to the checkpoint before the first line; lower the learning rate or lengthen the "
        "warm-up; bf16 in place of fp16; clip gradients.",
    ),
    _sign(
        "steps skipped by the scaler",
        r"Gradient overflow\.\s+Skipping step|OVERFLOW! Rank \d+ Skipping step"
        r"|reducing (?:loss scale )?to [\d.e+]+",
        "fp16 gradients overflowed and the step was not taken. A few at the start, and one in "
        "some thousand steps, are how a scaler finds its scale.",
        "If it goes on until the scale is below 1: bf16, or a smaller learning rate.",
    ),
    _sign(
        "more workers than processors",
        r"suggested max number of worker in current system is",
        "The loader has more workers than the machine has processors.",
        "'planner data' measures how many of them pay.",
    ),
)

# A line that holds none of these holds no sign: most lines are passed over by this.
MAY_MATTER = re.compile(
    rb"memory|Memory|ALLOC|Allocator|CUBLAS|CUDNN|engine to execute|valid cuDNN|bad_alloc|Killed"
    rb"|oom|exitcode|\b137\b|SIGKILL|torch_|DataLoader worker|open files|ancdata|Watchdog|watchdog"
    rb"|Timed out|nccl|NCCL"
    rb"|ordinal|No CUDA|kernel image|not compatible|driver|not compiled|assert triggered"
    rb"|No space|quota|[Nn][Aa][Nn]\b|\b[Ii][Nn][Ff]\b|overflow|OVERFLOW|reducing|suggested max"
)
