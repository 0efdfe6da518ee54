"""torch's own messages with figures that people reported, by version of their wording, and where.

The wording is torch's; the figures are of the issue that is named.
"""

from __future__ import annotations

from dataclasses import dataclass

KIB, MIB, GIB = 1024, 1024**2, 1024**3


@dataclass(frozen=True)
class Reported:
    source: str
    text: str
    requested: float
    total: float | None = None
    free: float | None = None
    allocated: float | None = None
    unused: float | None = None
    process: float | None = None
    other: float | None = None
    pools: float | None = None
    allowed: float | None = None


_HINT = (
    "If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation "
    "for Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
_OLD_HINT = (
    "If reserved memory is >> allocated memory try setting max_split_size_mb to avoid "
    "fragmentation.  See documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
)

REPORTED = [
    Reported(
        "pytorch/pytorch pull request #13751 (torch 1.0)",
        "RuntimeError: CUDA out of memory. Tried to allocate 16.00 GiB (GPU 0; 11.93 GiB total "
        "capacity; 4.00 GiB already allocated; 7.33 GiB free; 179.00 KiB cached)",
        16 * GIB, 11.93 * GIB, 7.33 * GIB, 4 * GIB, 179 * KIB,
    ),
    Reported(
        "pytorch/pytorch issue #16417 (torch 1.0)",
        "RuntimeError: CUDA out of memory. Tried to allocate 12.50 MiB (GPU 0; 10.92 GiB total "
        "capacity; 8.57 MiB already allocated; 9.28 GiB free; 4.68 MiB cached)",
        12.5 * MIB, 10.92 * GIB, 9.28 * GIB, 8.57 * MIB, 4.68 * MIB,
    ),
    Reported(
        "pytorch/pytorch issue #35901 (torch 1.4)",
        "RuntimeError: CUDA out of memory. Tried to allocate 10.84 GiB (GPU 0; 23.65 GiB total "
        "capacity; 1.06 GiB already allocated; 10.26 GiB free; 12.53 GiB reserved in total by "
        "PyTorch)",
        10.84 * GIB, 23.65 * GIB, 10.26 * GIB, 1.06 * GIB, (12.53 - 1.06) * GIB,
    ),
    Reported(
        "microsoft/StyleSwin issue #11 (torch 1.10), broken by the terminal",
        "RuntimeError: CUDA out of memory. Tried to allocate 1024.00 MiB (GPU 3; 23.65 GiB total "
        "capacity; 19.49 GiB already allocated; 474.00 MiB free; 22.10 GiB reserved in total by "
        "PyTorch) If res\nerved memory is >> allocated memory try setting max_split_size_mb",
        GIB, 23.65 * GIB, 474 * MIB, 19.49 * GIB, (22.10 - 19.49) * GIB,
    ),
    Reported(
        "mxin262/SwinTextSpotter issue #54 (torch 1.12)",
        "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 7.92 GiB total "
        "capacity; 6.76 GiB already allocated; 66.50 MiB free; 6.87 GiB reserved in total by "
        f"PyTorch) {_OLD_HINT}",
        20 * MIB, 7.92 * GIB, 66.5 * MIB, 6.76 * GIB, (6.87 - 6.76) * GIB,
    ),
    Reported(
        "YingqianWang/iPASSR issue #9 (torch 1.13 on Windows: more than the card)",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 10.73 GiB (GPU 0; "
        "8.00 GiB total capacity; 17.20 GiB already allocated; 0 bytes free; 19.15 GiB reserved "
        f"in total by PyTorch) {_OLD_HINT}",
        10.73 * GIB, 8 * GIB, 0, 17.20 * GIB, (19.15 - 17.20) * GIB,
    ),
    Reported(
        "kerrj/lerf issue #73 (torch 2.1)",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a "
        "total capacty of 23.65 GiB of which 1.66 GiB is free. Including non-PyTorch memory, this "
        "process has 20.81 GiB memory in use. Of the allocated memory 12.09 GiB is allocated by "
        "PyTorch, and 4.84 GiB is reserved by PyTorch but unallocated.",
        3 * GIB, 23.65 * GIB, 1.66 * GIB, 12.09 * GIB, 4.84 * GIB, 20.81 * GIB,
    ),
    Reported(
        "FoundationVision/GenerateU issue #10 (torch 2.1 in a container)",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 496.00 MiB. GPU 0 has "
        "a total capacty of 14.75 GiB of which 235.06 MiB is free. Process 20398 has 14.52 GiB "
        "memory in use. Of the allocated memory 14.06 GiB is allocated by PyTorch, and 330.42 MiB "
        "is reserved by PyTorch but unallocated.",
        496 * MIB, 14.75 * GIB, 235.06 * MIB, 14.06 * GIB, 330.42 * MIB, 14.52 * GIB, 0,
    ),
    Reported(
        "pytorch/pytorch issue #16417, a comment of 2024 (torch 2.2)",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 22.00 MiB. GPU 0 has a "
        "total capacity of 23.65 GiB of which 11.06 MiB is free. Including non-PyTorch memory, "
        "this process has 23.60 GiB memory in use. Of the allocated memory 22.90 GiB is allocated "
        f"by PyTorch, and 194.87 MiB is reserved by PyTorch but unallocated. {_HINT}",
        22 * MIB, 23.65 * GIB, 11.06 * MIB, 22.90 * GIB, 194.87 * MIB, 23.60 * GIB,
    ),
    Reported(
        "Comfy-Org/ComfyUI issue #9529 (ROCm)",
        "HIP out of memory. Tried to allocate 432.00 MiB. GPU 0 has a total capacity of 15.92 GiB "
        "of which 7.12 GiB is free. Of the allocated memory 8.08 GiB is allocated by PyTorch, and "
        "321.96 MiB is reserved by PyTorch but unallocated.",
        432 * MIB, 15.92 * GIB, 7.12 * GIB, 8.08 * GIB, 321.96 * MIB,
    ),
    Reported(
        "ROCm/TheRock issue #2118 (torch 2.9: a limit, and pools)",
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total "
        "capacity of 255.98 GiB of which 244.65 GiB is free. 1.05 GiB allowed; Of the allocated "
        "memory 1017.01 MiB is allocated by PyTorch, with 17.00 MiB allocated in private pools "
        "(e.g., HIP Graphs), and 54.99 MiB is reserved by PyTorch but unallocated.",
        2 * MIB, 255.98 * GIB, 244.65 * GIB, 1017.01 * MIB, 54.99 * MIB,
        pools=17 * MIB, allowed=1.05 * GIB,
    ),
    Reported(
        "a public log of torch 2.11's wording with another process beside it",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.95 GiB. GPU 0 has a total "
        "capacity of 14.57 GiB of which 1.58 GiB is free. Process 2493055 has 12.02 GiB memory in "
        "use. Including non-PyTorch memory, this process has 966.00 MiB memory in use. Of the "
        "allocated memory 734.07 MiB is allocated by PyTorch, and 33.93 MiB is reserved by PyTorch "
        "but unallocated.",
        1.95 * GIB, 14.57 * GIB, 1.58 * GIB, 734.07 * MIB, 33.93 * MIB, 966 * MIB, 12.02 * GIB,
    ),
    Reported(
        "EvilBT/ComfyUI_SLK_joy_caption_two issue #28 (cudaMallocAsync)",
        "torch.cuda.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of "
        "memory)\nCurrently allocated     : 15.16 GiB\nRequested               : 512.00 KiB\n"
        "Device limit            : 15.99 GiB\nFree (according to CUDA): 0 bytes\nPyTorch limit "
        "(set by user-supplied memory fraction)\n                        : 17179869184.00 GiB",
        512 * KIB, 15.99 * GIB, 0, 15.16 * GIB,
    ),
    Reported(
        "lllyasviel/Fooocus issue #1139 (MPS)",
        "RuntimeError: MPS backend out of memory (MPS allocated: 8.89 GB, other allocations: "
        "172.98 MB, max allowed: 9.07 GB). Tried to allocate 6.25 MB on private pool.",
        6.25 * MIB,
    ),
]  # fmt: skip

# kind -> lines that people reported in other words than those of LINES, with where.
OTHER_LINES = {
    "out of memory": (  # pytorch/pytorch issue #122068
        'RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/'
        'CUDACachingAllocator.cpp":830, please report a bug to PyTorch.',
    ),
    "library out of memory": (  # NVIDIA/nccl issue #1235
        "ng30903:3063028:3066152 [3] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    ),
    "perhaps out of memory": (  # marqo-ai/marqo issue #101
        "RuntimeError: Unable to find a valid cuDNN algorithm to run convolution",
    ),
    "out of host memory": ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",),
    "killed by the kernel": (
        "      Reason:       OOMKilled",  # Azure/azure-databricks-operator issue #62
        "      Exit Code:    137",
        "WARNING: Job failed: exit code 137",  # podman-container-tools/podman issue #10825
        "srun: error: gpu20-15: task 0: Out Of Memory",  # ZwwWayne/K-Net issue #30
    ),
}

# kind -> a line that people reported, with where.
LINES = {
    "library out of memory": "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling "
    "`cublasCreate(handle)`",
    "perhaps out of memory": "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "out of host memory": "RuntimeError: [enforce fail at alloc_cpu.cpp:75] . "
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4611686018427387904 bytes.",
    "killed by the kernel": "Killed",
    # facebookresearch/mmf issue #441
    "shared memory is full": "ERROR: Unexpected bus error encountered in worker. This might be "
    "caused by insufficient shared memory (shm).",
    # THU-DA-6D-Pose-Group/GDR-Net issue #16
    "loader worker died": "RuntimeError: DataLoader worker (pid(s) 3216) exited unexpectedly",
    "too many open files": "OSError: [Errno 24] Too many open files: '/data/train/a/1.jpg'",
    # hiyouga/LlamaFactory issue #6269
    "collective timed out": "[rank4]:[E1206 18:44:12.755262105 ProcessGroupNCCL.cpp:607] [Rank 4] "
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7753, "
    "OpType=_REDUCE_SCATTER_BASE, NumelIn=544997376, NumelOut=68124672, Timeout(ms)=600000) ran "
    "for 600099 milliseconds before timing out.",
    "NCCL failed": "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1333, "
    "unhandled system error, NCCL version 2.14.3",
    "no such device": "RuntimeError: CUDA error: invalid device ordinal",
    "no kernel for this GPU": "RuntimeError: CUDA error: no kernel image is available for "
    "execution on the device",
    "driver too old": "RuntimeError: The NVIDIA driver on your system is too old (found version "
    "11040).",
    "torch without CUDA": "AssertionError: Torch not compiled with CUDA enabled",
    "assertion on the device": "RuntimeError: CUDA error: device-side assert triggered",
    "illegal memory access": "RuntimeError: CUDA error: an illegal memory access was encountered",
    "disk full": "OSError: [Errno 28] No space left on device",
    "non-finite loss": "Train: 3 [ 100/1251 (  8%)]  Loss:  nan (6.92)  Time: 0.4s",
    "steps skipped by the scaler": "Gradient overflow.  Skipping step, loss scaler 0 reducing "
    "loss scale to 32768.0",
    "more workers than processors": "UserWarning: This DataLoader will create 8 worker processes "
    "in total. Our suggested max number of worker in current system is 2",
}
