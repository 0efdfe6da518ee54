"""What errors say: the one place that recognises their texts, for logs as for probes.

Each sign is a text that a library writes, read in the place that is named (else in torch 2.13),
what it means, and what to do, in the order of how much it explains. What a text may also mean
otherwise is `maybe` only, with what would tell them apart. `planner explain` and the table of
docs/troubleshooting.md hold the same list. A new one must pass `MAY_MATTER` too, at the end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

OUT_OF_MEMORY = "out of memory"
_BACKENDS = r"(?:CUDA|HIP|XPU|NPU|MPS backend)"
ALLOCATOR_MESSAGE = re.compile(  # how torch's own begins
    rf"{_BACKENDS} out of memory(?:\. Tried to allocate [\d.]| \(MPS allocated:)"
    rf"|(?<![`'\"\w.])[\w.]*Error: {_BACKENDS} out of memory"
    r"|Allocation on device \d* ?would exceed allowed memory"
)
_LIBRARY, _HOST = "library out of memory", "out of host memory"
_SHARED_MEMORY, _OPEN_FILES = "shared memory is full", "too many open files"
_BEFORE = 60  # characters before a match that may take its meaning away
_ADVICE = re.compile(
    r"(?i)\b(?:avoid\w*|prevents?|in case of|fix(?:es)?|if you (?:see|get|hit|encounter|run into))"
    r"\b[^.:]{0,30}$"
)
# A line of Python or a shell that a log echoes, as tracebacks do: also within rich's frames.
_SOURCE = re.compile(
    r"[\W\d]*(?:rank\d+\]:\W*)?(?:(?:raise|if|elif|except|assert|return|export)\b"
    r"|print\(|[\w.]{1,40}\.(?:error|warn|warning|info|debug)\()|\s*(?:#|//)"
)


@dataclass(frozen=True)
class Sign:
    """`pattern` claims, `maybe` says only that it may be so: `apart` is then what tells. Neither
    counts where `unless` is in what matches or shortly before it."""

    kind: str
    pattern: re.Pattern[str]
    means: str
    todo: tuple[str, ...]
    maybe: re.Pattern[str]
    apart: str
    unless: re.Pattern[str]

    def is_sure(self, line: str) -> bool | None:
        """Whether a line says it surely, or may mean it; None where it does neither."""
        for pattern, sure in ((self.pattern, True), (self.maybe, False)):
            for match in pattern.finditer(line):
                before = max(match.start() - _BEFORE, 0)
                if not self.unless.search(line, before, match.end()) and not _ADVICE.search(
                    line, before, match.start()
                ):
                    return sure
        return None


def is_source(line: str) -> bool:
    """Whether a line of a log is code that it echoes: what it names did not happen by that."""
    return bool(_SOURCE.match(line))


_NEVER = "(?!)"


def _sign(
    kind: str, pattern: str, means: str, *todo: str,
    maybe: str = _NEVER, apart: str = "", unless: str = _NEVER,
) -> Sign:  # fmt: skip
    return Sign(
        kind, re.compile(pattern), means, todo, re.compile(maybe), apart, re.compile(unless)
    )


# Names that /dev/shm's files have: torch's storages, and Python's semaphores and shared blocks.
_IN_SHM = r"/(?:torch_|dev/shm/|psm_|pymp-|sem\.|mp-)"
_LOSS = r"loss(?:_step|_epoch|_value)?['\"]?(?:\s*[:=]\s*|\s+)['\"]?(?:tensor\()?"

SIGNS: tuple[Sign, ...] = (
    _sign(
        OUT_OF_MEMORY,
        # The last is the allocator's too: it fails while it asks NVML for what its message says (on
        # MIG, Jetson and in some containers: pytorch #112377, #122068, #185240). Until torch 0.4
        # THC's allocator said "cuda runtime error (2)".
        rf"{ALLOCATOR_MESSAGE.pattern}"
        r"|NVML_SUCCESS == .{0,80}INTERNAL ASSERT FAILED at \S{0,80}CUDACachingAllocator"
        r"|cuda runtime error \(2\) ?: out of memory at \S{0,120}THC(?:Stor|Tensor|CachingAlloc)",
        "torch's allocator asked the device for memory and got none.",
        "A smaller micro-batch, checkpointing, or less beside it on the device: 'planner advise' "
        "says what each saves.",
        # In other people's words: of a caught one, of a hint, of a source line that is echoed.
        maybe=rf"(?i:{_BACKENDS}|GPU|ran) out of (?:the )?memory",
        apart="torch's own message follows with its figures ('Tried to allocate …') where an "
        "allocation failed: without it these are words about one.",
        unless=r"(?i)\b(?:if|when\w*|avoid\w*|prevent\w*|may|might|could|can|unless|without|help\w*"
        r"|reduc\w+|caus\w+|due to|never|not|raise|print)\b|[#\"'`(]\s*(?:CUDA|GPU|ran) out",
    ),
    _sign(
        _LIBRARY,
        # cuDNN 9 (cudnn_graph.h, status 4004); expandable segments (c10/cuda/driver_api.h); Triton
        # loading a kernel (triton-lang/triton @04e0bbd third_party/nvidia/backend/driver.c).
        r"DEVICE_ALLOCATION_FAILED|(?:CUDA|HIP) driver error: out of memory"
        r"|Triton Error \[CUDA\]: out of memory",
        "Memory was refused outside of torch's allocator, to a library (cuBLAS, cuDNN, NCCL, "
        "Triton), the driver or a context: the device is full.",
        "Leave the device a few hundred MiB: a smaller micro-batch, or "
        "torch.cuda.set_per_process_memory_fraction(0.95).",
        # cuBLAS's handle or workspace, also after an index that was out of range; cuDNN until 8;
        # what cudaMalloc and cudaHostAlloc say alike (ATen/cuda/Exceptions.h, ATen/cuda/
        # CachingHostAllocator.cpp); NCCL, which asks for both (NVIDIA/nccl #1235).
        maybe=r"CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
        r"|(?:CUDA|HIP) error: out of memory|Cuda failure (?:\d+ )?'out of memory'"
        r"|cuda runtime error \(2\) ?: out of memory"
        r"(?! at \S{0,120}THC(?:Stor|Tensor|CachingAlloc))",
        apart="look at the free memory when it happens (nvidia-smi), or try half of the "
        "micro-batch: if that runs, it was memory. With memory free, the library does not fit the "
        "driver or the card ('planner doctor'), an earlier error of the process is the cause "
        "(CUDA_LAUNCH_BLOCKING=1 names it), or the host had none to pin (pin_memory in the stack).",
    ),
    _sign(
        "cuBLAS or cuDNN failed",
        r"CUBLAS_STATUS_NOT_INITIALIZED|CUDNN_STATUS_NOT_SUPPORTED|CUDNN_STATUS_NOT_INITIALIZED"
        r"|CUDNN_STATUS_INTERNAL_ERROR(?!_(?:HOST|DEVICE)_ALLOCATION)"
        # Until torch 1.13 "a valid cuDNN algorithm" (marqo-ai/marqo #101, XPixelGroup/DiffBIR #59).
        r"|nable to find an engine to execute this computation|nable to find a valid cuDNN",
        "cuBLAS or cuDNN could not begin, for one of three reasons: the device is nearly full, the "
        "library does not fit the driver or the card, or a kernel before failed.",
        "Look at the free memory when it happens (nvidia-smi), or try half of the micro-batch: if "
        "that runs, it was memory. Otherwise run 'planner doctor', and with "
        "CUDA_LAUNCH_BLOCKING=1.",
    ),
    _sign(
        _HOST,
        # c10/core/impl/alloc_cpu.cpp; numpy/_core/_exceptions.py; CPython; cuDNN (status 4003).
        r"DefaultCPUAllocator: (?:can't allocate|not enough) memory|HOST_ALLOCATION_FAILED"
        r"|MemoryError: Unable to allocate|^\s*(?:\S+ )?MemoryError\b(?!.*(?:CUDA|cuda))",
        "The host's memory is full, not the GPU's: the loader's workers, pinned batches, a data "
        "set that is held whole, or offloaded activations.",
        "Fewer workers or a smaller prefetch_factor; 'planner data' measures what a worker takes.",
        # C++'s operator new, as its terminate handler prints it, and thrust's of a device (thrust/
        # system/cuda); ENOMEM of any call.
        maybe=r"std::bad_alloc|Cannot allocate memory",
        apart="'free -g' at that time, and 'dmesg'. Limits on a process (ulimit -v and -l, "
        "vm.max_map_count) give the same words, and so does a size that is nonsense.",
        unless=r"ECC|ibv_|CUDA|cuda|torch_",
    ),
    _sign(
        "killed by the kernel",
        # mm/oom_kill.c; Kubernetes and Docker; srun (ZwwWayne/K-Net #30) and slurmstepd.
        r"Out of memory: Killed process|oom-kill:|oom[-_]kill event|invoked oom-killer"
        r"|\bOOMKilled\b(?!\W+(?:false|0))|task \d+: Out Of Memory",
        "The kernel or the scheduler killed a process because the host's memory (or the "
        "container's share of it) was full.",
        "Give the job more host memory, or use fewer workers; 'dmesg' names the process.",
        # SIGKILL, as a shell, torchrun, torch's DataLoader and subprocess say it; 137 is 128 + 9.
        maybe=r"^\s*Killed\s*$|\bKilled\s+python|exitcode\s*: ?-9\b|Signal 9 \(SIGKILL\)"
        r"|is killed by signal: Killed|Signals\.SIGKILL"
        r"|(?i:exit(?:ed with)?[ _]?(?:code|status))\W{1,8}137\b",
        apart="'dmesg | grep -i oom' (sacct, 'kubectl describe pod') names the process if it was "
        "memory. Otherwise somebody sent SIGKILL: a scheduler, a user, or the launcher to the "
        "ranks that were left when another had failed.",
    ),
    _sign(
        _SHARED_MEMORY,
        # aten/src/ATen/MapAllocator.cpp; CPython's multiprocessing.
        rf"No space left on device: ['\"]{_IN_SHM}"
        r"|unable to \w+ [^\n]{0,60}/torch_[^\n]{0,80}No space left on device",
        "The loader's workers hand batches over in /dev/shm, and it is full: a container has 64 "
        "MiB of it unless it is told otherwise.",
        "docker run --shm-size=8g (or --ipc=host); else fewer workers or a smaller "
        "prefetch_factor; else torch.multiprocessing.set_sharing_strategy('file_system').",
        # torch/csrc/DataLoader.cpp says "might" and "possible" itself: it is what SIGBUS mostly is;
        # greatlog/UnpairedSR #17 has it with 64 GB of /dev/shm and an LMDB file.
        maybe=r"insufficient shared memory|workers are out of shared memory"
        r"|is killed by signal: Bus error|exitcode\s*: ?-7\b|Signal 7 \(SIGBUS\)"
        r"|^\s*(?:\S+: line \d+: +\d+ )?Bus error|Fatal Python error: Bus error"
        # NCCL's transport/shm.cc, of a file that may also be forbidden (pytorch #37004).
        r"|SemLock.{0,80}No space|Error while creating shared memory segment"
        r"|unable to (?:write|allocate|resize) (?:to )?(?:file|shared memory)[^\n]{0,60}torch_",
        apart="'df -h /dev/shm' while it trains. With room there, it may not be written to, or a "
        "data file that is mapped into memory (LMDB, memmap) was cut or its disk fails: "
        "num_workers=0 then fails too.",
    ),
    _sign(
        "loader worker died",
        r"DataLoader worker \(pid(?:\(s\))? [\d, ]{1,200}\) (?:is killed by signal|exited unexp)",
        "A process of the loader ended without an exception of Python's.",
        "The lines before it say why. Run once with num_workers=0: the data set's own error is "
        "then seen.",
    ),
    _sign(
        _OPEN_FILES,
        r"Too many open files",  # EMFILE and ENFILE, as the C library says them
        "Each batch that waits between processes holds file descriptors, and the limit is reached.",
        "ulimit -n 65536, or torch.multiprocessing.set_sharing_strategy('file_system').",
        # CPython's multiprocessing/reduction.py: fewer descriptors came than were sent (pytorch
        # #973); MapAllocator.cpp until torch 1.9, which did not say why.
        maybe=r"received 0 items of ancdata"
        r"|unable to open shared memory object <\S{1,80}> in read-write mode\s*$",
        apart="'ulimit -n' against the number of files in /proc/PID/fd while it trains; far from "
        "the limit, the worker that sent the batch was gone.",
    ),
    _sign(
        "collective timed out",
        # torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp; gloo/transport/tcp/unbound_buffer.cc
        r"Watchdog caught collective operation timeout|Timed out waiting \d{1,12}ms for",
        "A rank waited for the others in vain: one of them ended, hangs, cannot be reached, or "
        "runs another sequence of steps. The rank that died first is the cause, the others' "
        "timeouts are not.",
        "Look for the first error of any rank above. With none: are the numbers of batches the "
        "same in all ranks? TORCH_DISTRIBUTED_DEBUG=DETAIL names the collective that differs.",
    ),
    _sign(
        "NCCL failed",
        # torch/csrc/distributed/c10d/NCCLUtils.hpp; torch/csrc/cuda/nccl.cpp
        r"nccl(?:UnhandledCuda|System|Internal|InvalidUsage|Remote)Error|NCCL error(?: in|:)"
        r"|NCCL Error \d",
        "NCCL could not communicate: network, driver, shared memory of a container, a rank that "
        "died, or an error of CUDA before it.",
        "NCCL_DEBUG=INFO says which call failed; in a container raise --shm-size.",
    ),
    _sign(
        "rank is gone",
        # gloo/transport/tcp/pair.cc; nccl.h: a peer that is gone
        r"gloo/transport/[^\n]{0,80}Connection (?:closed|reset) by peer|ncclRemoteError",
        "Another rank closed its connection: it failed, was ended, or came to its end before this "
        "one. It is the cause, and this rank's error is not.",
        "Look for the first error of any other rank, and for what ended it.",
    ),
    _sign(
        "ranks did not meet",
        # torch/csrc/distributed/c10d/TCPStore.cpp, socket.cpp
        r"DistStoreError|Timed out after \d{1,9} seconds waiting for (?:clients|workers)"
        r"|client socket has timed out after",
        "Ranks wait for each other at a store that one of them keeps, and some did not come in "
        "time: they were not started, failed before, or cannot reach it.",
        "Are MASTER_ADDR, MASTER_PORT and the number of ranks the same everywhere, and is the port "
        "open between the machines? The first error of the ranks that are missing says more.",
    ),
    _sign(
        "gradients missing in DDP",
        # torch/csrc/distributed/c10d/reducer.cpp
        r"Expected to have finished reduction in the prior iteration",
        "DistributedDataParallel did not get a gradient of every parameter: some took no part in "
        "the loss of a rank.",
        "Freeze what is not trained (requires_grad=False), or find_unused_parameters=True; "
        "TORCH_DISTRIBUTED_DEBUG=DETAIL names the parameters.",
    ),
    _sign(
        "time limit reached",
        r"CANCELLED AT \S{1,40} DUE TO TIME LIMIT",  # slurmstepd
        "Slurm ended the job at its time limit.",
        "Ask for more time (--time), or save often and resume: 'sbatch --signal=B:USR1@120' warns "
        "two minutes before.",
    ),
    _sign(
        "preempted",
        r"CANCELLED AT \S{1,40} DUE TO PREEMPTION",  # slurmstepd
        "Slurm took the machine for a job that goes before.",
        "Save often and resume; --requeue begins the job again.",
    ),
    _sign(
        "segmentation fault",
        # SIGSEGV, as torchrun, a shell, Python's faulthandler and torch's DataLoader say it
        r"exitcode\s*: ?-11\b|Signal 11 \(SIGSEGV\)|^\s*(?:\S+: line \d+: +\d+ )?Segmentation fault"
        r"|Fatal Python error: Segmentation|killed by signal: Segmentation|Signals\.SIGSEGV",
        "A library in C or C++ touched memory that it may not: a bug of it, or two builds that do "
        "not fit each other.",
        "'python -X faulthandler' prints the stack; were all extensions built for this torch?",
    ),
    _sign(
        "faulty GPU memory",
        r"uncorrectable ECC error",  # cudaErrorECCUncorrectable, and the kernel's log
        "The card read memory that it could not correct: hardware, and no fault of the training.",
        "Resume on another card; 'nvidia-smi -q -d ECC,ROW_REMAPPER' says whether a reset repairs "
        "this one.",
    ),
    _sign(
        "GPU fault (Xid)",
        # docs.nvidia.com/deploy/xid-errors
        r"NVRM: Xid \(|(?:GPU has|NVRM:) fallen off the bus",
        "The driver logged a fault of the card. 79: it has fallen off the bus (power, heat, slot); "
        "48, 63, 64, 94, 95: its memory; 74: NVLink; 13, 31, 43, 45: mostly the program's own.",
        "Look the number up in NVIDIA's table of Xid errors; 'planner doctor' looks at the card.",
    ),
    _sign(
        "no driver",
        r"Found no NVIDIA driver",  # torch/csrc/cuda, as cudaErrorInsufficientDriver without one
        "torch finds no NVIDIA driver: none is installed, or the container was started without "
        "GPUs.",
        "nvidia-smi must work beside the training; docker run --gpus all.",
    ),
    _sign(
        "no such device",
        r"invalid device ordinal|No CUDA GPUs are available",
        "The process asked for a GPU that it cannot see: it has fewer than the number says, or "
        "CUDA_VISIBLE_DEVICES hides them. It is no clash of versions.",
        "Count them with 'planner doctor'; start as many processes as there are GPUs.",
    ),
    _sign(
        "device busy",
        # cudaErrorDevicesUnavailable
        r"CUDA-capable device(?:s are|\(s\) is/are) busy or unavailable",
        "The driver gives the card to nobody new: another process has it for itself (compute mode "
        "exclusive), the card must be reset, or the driver is not well installed.",
        "nvidia-smi lists processes and compute mode.",
    ),
    _sign(
        "no kernel for this GPU",
        r"no kernel image is available|is not compatible with the current PyTorch installation",
        "This torch, or the extension that the stack names, was not built for this GPU's "
        "architecture.",
        "'planner doctor' says which architectures it has; install a torch built for the card.",
    ),
    _sign(
        "kernel too large for this GPU",
        # triton-lang/triton python/triton/runtime/errors.py; ptxas
        r"out of resource: ?(?:shared memory|threads|registers|tensor memory)"
        r"|uses too much shared data",
        "A kernel needs more shared memory or threads of a multiprocessor than this GPU has: it "
        "was tuned for a larger card. Neither the device's memory nor /dev/shm is full.",
        "Smaller blocks or num_stages where the kernel is yours; else --compile default, or a "
        "library's release that knows the card.",
    ),
    _sign(
        "driver too old",
        r"NVIDIA driver on your system is too old",
        "The driver is older than the CUDA that torch was built for.",
        "Update the driver, or install a torch for the CUDA that 'nvidia-smi' shows.",
        # cudaErrorInsufficientDriver is also what is said without any driver (CUDA's own list).
        maybe=r"CUDA driver version is insufficient",
        apart="'nvidia-smi' shows the newest CUDA that the driver knows; if it fails itself, there "
        "is no driver to be reached.",
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
        "A kernel's own check failed: in most cases an index out of range, as a label that is not "
        "below the number of classes; else a value that may not be (a probability outside of 0 to "
        "1, or NaN). The line above names the check.",
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
        "kernel failed",
        # cudaErrorLaunchFailure, MisalignedAddress, IllegalInstruction, LaunchTimeout
        r"unspecified launch failure|misaligned address|an illegal instruction was encountered"
        r"|the launch timed out and was terminated|CU(?:BLAS|DNN)_STATUS_EXECUTION_FAILED",
        "A kernel began and did not end well, and does not say why: a bug of it, an index out of "
        "range, a card that is unstable, or a driver's time limit on a card with a display. All "
        "later errors of the process follow from it.",
        "CUDA_LAUNCH_BLOCKING=1 names the operation; 'dmesg | grep Xid' says what the driver saw.",
    ),
    _sign(
        "overwritten by CUDA graphs",
        # torch/_inductor/cudagraph_trees.py; of gradients from torch 2.13 on.
        r"accessing (?:gradient )?tensor output of CUDAGraphs that has been overwritten",
        "A tensor that a compiled step returned was read after the next replay of its CUDA graph "
        "had written over it: an output, or gradients kept for another backward.",
        "For gradients: accumulate 1, .grad tensors that exist before the first graph is recorded, "
        "or mode max-autotune-no-cudagraphs or default. For outputs: clone them.",
    ),
    _sign(
        "disk full",
        # ENOSPC and EDQUOT as Python says them, with the file
        rf"No space left on device: b?['\"](?!{_IN_SHM})|Disk quota exceeded",
        "A file could not be written: the file system of the line has no room, no inodes, or your "
        "quota is used up.",
        "Free the disk that the line names, and keep fewer checkpoints.",
        # Semaphores and what joblib shares say the same without a file (python/cpython #93253);
        # torch's writer does not say why (caffe2/serialize/inline_container.cc), and a network's
        # file system that fails for a moment looks alike (rwth-i6/returnn #1829).
        maybe=r"No space left on device(?!: b?['\"])|PytorchStreamWriter failed writing"
        r"|inline_container\.cc:\d{1,5}\] \. unexpected pos",
        apart="'df -h', 'df -i' and 'quota' of the folder. With room there: semaphores and what "
        "processes share lie in /dev/shm ('df -h /dev/shm'), and a network's file system may have "
        "failed for a moment.",
        unless="/torch_|SemLock",
    ),
    _sign(
        "non-finite loss",
        # detectron2/engine/train_loop.py; MAE's and DETR's engines; lines of progress
        r"Loss became infinite or NaN|(?i:loss is (?:nan|-?inf), stopping)"
        # of the loss as a whole: a word before it may name a part, or a validation
        r"|(?i:(?<![\w/.])(?:train(?:ing)?[_ /]?|total[_ ]|(?:lm|avg|average|mean|epoch|batch) "
        rf"|(?<![a-z] )){_LOSS}nan\b)"
        r"(?!, v_num=)",  # Lightning's bar until 2.0 says so of a loss it was not given (#4295)
        "The loss is no number. Where it is finite again in later lines, the step was skipped (as "
        "fp16's scaler does); else the weights are lost from there on.",
        "Go back to the checkpoint before the first line; lower the learning rate or lengthen the "
        "warm-up; bf16 in place of fp16; clip gradients.",
        # A part of a loss, a validation's, an infinite one, anomaly mode's (torch/csrc/autograd/
        # python_anomaly_mode.cpp), and what transformers' Trainer logs of losses that are none: it
        # adds nothing for them (logging_nan_inf_filter).
        maybe=r"(?i:\b\w{0,40}loss(?!_?scal)\w{0,40}['\"]?(?:\s*[:=]\s*|\s+)['\"]?(?:tensor\()?(?:nan|-?inf)"
        r"\b)|'loss': 0\.0,.{0,20}'grad_norm': nan|returned nan values in its",
        apart="is the loss of the training itself finite in the lines that follow? Then one part, "
        "one validation or one skipped step had none (an empty batch, a class without examples).",
        unless=r"(?i)\b(?:best|min(?:imum)?|lowest|prev\w*|init\w*|threshold|patience|if|when|assert"
        r"|isnan|isinf)(?:\b|_)",
    ),
    _sign(
        "loss scale at its minimum",
        # deepspeed/runtime/fp16/loss_scaler.py; fairseq/optim/dynamic_loss_scaler.py
        r"Current loss scale already at minimum|Minimum loss scale reached",
        "fp16 gradients overflow at every scale that was tried: they, or the loss, are no numbers "
        "any more.",
        "bf16 in place of fp16; a smaller learning rate, a longer warm-up; look for the first loss "
        "that is NaN.",
    ),
    _sign(
        "steps skipped by the scaler",
        # apex/amp/handle.py; DeepSpeed; fairseq/trainer.py
        r"Gradient overflow\.\s+Skipping step|OVERFLOW! Rank \d+ Skipping step"
        r"|reducing loss scale to [\d.e+]|overflow detected, (?:ignoring gradient, )?setting loss",
        "fp16 gradients overflowed and the step was not taken. A few at the start, and one in "
        "some thousand steps, are how a scaler finds its scale.",
        "If it goes on until the scale is below 1: bf16, or a smaller learning rate.",
    ),
    _sign(
        "more workers than processors",
        r"suggested max number of worker in current system is",  # torch/utils/data/dataloader.py
        "The loader has more workers than the machine has processors.",
        "'planner data' measures how many of them pay.",
    ),
)

# Of a probe's error what may be so counts too.
_PATTERNS = {sign.kind: (sign.pattern, sign.maybe) for sign in SIGNS}
# oneDNN has one text for a primitive whose code or scratchpad found no memory; one that does not
# exist is "could not create a primitive descriptor …".
_ONEDNN = re.compile(r"could not create a primitive\s*$", re.MULTILINE)
# What libraries say when they find no memory, and also when something else is wrong: where the
# device's free memory can be read, it decides.
_AMBIGUOUS = re.compile(
    # ATen/cuda/CublasHandlePool.cpp: the handle that the backward's thread makes for itself, at the
    # fullest moment of a step; also after an illegal access (EleutherAI/lm-evaluation-harness #1689
    # has both).
    r"CUBLAS_STATUS_NOT_INITIALIZED when calling `cublas(?:Lt)?Create"
    # ATen/native/cudnn/Conv_v8.cpp; it begins with "GET was", "FIND was" or "Unable". No engine
    # found memory for its kernels or its workspace (pytorch #108645, #81620), or none supports this
    # GPU or this dtype on it.
    r"|nable to find an engine to execute this computation"
)
# What a rank says whose collective another rank has left: gloo's transport, which begins with its
# file ("[…/gloo/transport/tcp/pair.cc:553] Connection closed by peer", and as often "Read error …
# Connection reset by peer": torch 2.13), and NCCL through c10d's watchdog, which ends the process
# (ncclRemoteError is what NCCL calls a peer that is gone: nccl.h).
_LOST_PEER = re.compile(
    "gloo/transport/|ncclRemoteError|Watchdog caught collective operation timeout"
)


def _may_say(kind: str, text: str) -> bool:
    return any(pattern.search(text) for pattern in _PATTERNS[kind])


def is_allocation_failure(text: str) -> bool:
    """Whether an error's text says that there was no memory, or may well mean it."""
    if any(_may_say(kind, text) for kind in (OUT_OF_MEMORY, _LIBRARY, _HOST)):
        return True
    return bool(_ONEDNN.search(text) or _AMBIGUOUS.search(text))


def is_ambiguous(text: str) -> bool:
    """Whether an error's text may mean that there was no memory, and may mean something else."""
    return bool(_AMBIGUOUS.search(text))


def is_lost_peer(text: str) -> bool:
    """Whether an error's text says that another rank is gone."""
    return bool(_LOST_PEER.search(text))


def is_shared_memory_failure(text: str) -> bool:
    """Whether a loader's error says that /dev/shm is full (torch: aten/src/ATen/MapAllocator.cpp).
    Where pages run out later, a worker ends by SIGBUS."""
    return _may_say(_SHARED_MEMORY, text)


def is_out_of_files(text: str) -> bool:
    """Whether no more files could be opened (EMFILE, ENFILE as the C library says them)."""
    return _may_say(_OPEN_FILES, text)


# A line that holds none of these holds no sign: most lines are passed over by this. Plain words,
# since a log may have gigabytes.
MAY_MATTER: tuple[bytes, ...] = (
    b"of memory", b"of the memory", b"te memory", b"gh memory", b"ed memory", b"y memory",
    b"Memory",
    b"ALLOC", b"CUDACachingAllocator", b"CUBLAS", b"CUDNN", b"engine to execute", b"valid cuDNN",
    b"bad_alloc", b"Killed", b"oom-kill", b"oom_kill", b"exitcode", b"137", b"SIGKILL", b"SIGSEGV",
    b"SIGBUS", b"Bus error", b"egmentation", b"torch_", b"DataLoader worker", b"open files",
    b"ancdata",
    b"Watchdog", b"Timed out", b"timed out after", b"nccl", b"NCCL ", b"CUDAGraphs", b"by peer",
    b"DistStore", b"finished reduction", b"DUE TO", b"ECC error", b"Xid", b"fallen off", b"busy or",
    b"launch failure", b"launch timed", b"misaligned", b"illegal", b"out of resource",
    b"shared data", b"device ordinal", b"No CUDA", b"kernel image", b"not compatible",
    b"NVIDIA driver", b"driver version", b"driver error", b"not compiled", b"assert triggered",
    b"No space", b"quota", b"PytorchStream", b"unexpected pos", b"nan", b"NaN", b"NAN", b"Nan",
    b"inf", b"Inf", b" INF", b"=INF", b":INF", b"infinite", b"overflow",
    b"OVERFLOW", b"loss scale", b"would exceed", b"suggested max",
)  # fmt: skip
