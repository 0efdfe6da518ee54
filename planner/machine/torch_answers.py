"""What torch says of itself and of the GPUs it sees, printed as JSON: `torch_build.ask_torch` runs
this file as a program of its own.

A question may end the process. So what is known so far is printed before each one, in a line: the
last line holds. A kernel that runs is the only proof that a GPU can be used; a card that is full
has still proven that it can.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

NO_ANSWER = "no answer"


class Asking:
    """`answers` are printed before each question; those that raise or end the process are among the
    `failed`, with why."""

    def __init__(self, torch: Any) -> None:
        self.torch, self.failed = torch, dict[str, str]()
        self.answers: dict[str, Any] = {
            "version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip,
            "failed": self.failed, "gpus": [],
        }  # fmt: skip

    def ask(self, name: str, question: Callable[[], Any], otherwise: Any = "") -> Any:
        self.failed[name] = NO_ANSWER
        print(json.dumps(self.answers), flush=True)
        try:
            answer = question()
        except Exception as error:
            self.failed[name] = first_line(error)
            return otherwise
        del self.failed[name]
        return answer

    def ask_quietly(self, name: str, question: Callable[[], Any]) -> Any:
        """A question whose answer may be missing: an error is none of torch's failures."""
        answer = self.ask(name, question)
        self.failed.pop(name, None)
        return answer

    def ask_all(self, tried: list[int] | None) -> None:
        """Every question; a kernel on the GPUs with an index in `tried` (None: on all)."""
        torch, answers = self.torch, self.answers
        cuda = torch.cuda
        answers["available"] = self.ask("torch.cuda.is_available()", cuda.is_available, False)
        if answers["available"]:
            answers["arch_list"] = self.ask("torch.cuda.get_arch_list()", cuda.get_arch_list, [])
            for index in range(self.ask("torch.cuda.device_count()", cuda.device_count, 0)):
                name = f"torch.cuda.get_device_properties({index})"
                gpu = self.ask(name, partial(self.read_properties, index), None)
                if gpu is None:
                    break
                answers["gpus"].append(gpu)
                if tried is None or index in tried:
                    self.try_out(gpu, f"cuda:{index}")
        elif answers["cuda"] or answers["hip"]:
            answers["reason"] = self.ask("torch.cuda.init()", partial(self.error_of, cuda.init))
        name = "torch.backends.cudnn.version()"
        answers["cudnn"], answers["cudnn_error"] = self.ask(name, self.read_cudnn, ["", ""])
        if answers["cuda"]:
            name = "torch.cuda.nccl.version()"
            answers["nccl"] = self.ask_quietly(
                name, lambda: ".".join(map(str, cuda.nccl.version()))
            )

    def read_properties(self, index: int) -> dict[str, Any]:
        p = self.torch.cuda.get_device_properties(index)
        return {
            "name": p.name, "total_bytes": p.total_memory, "capability": [p.major, p.minor],
            "uuid": str(getattr(p, "uuid", "")), "error": "",
        }  # fmt: skip

    def try_out(self, gpu: dict[str, Any], device: str) -> None:
        """Adds why a kernel, and why an expandable segment, fail on a GPU."""
        gpu["error"] = self.ask(f"a kernel on {device}", partial(self.run_kernel, device))
        if self.answers["cuda"] and not gpu["error"]:
            name = f"an expandable segment on {device}"
            gpu["segment_error"] = self.ask_quietly(name, partial(self.map_segment, device))

    def run_kernel(self, device: str) -> str:
        return self.error_of(lambda: self.torch.ones(8, device=device).sum().item())

    def map_segment(self, device: str) -> str:
        """Only asking for one tells: virtual GPUs do not say that they lack them."""
        torch = self.torch
        set_options = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        set_options = set_options or torch.cuda.memory._set_allocator_settings
        set_options("expandable_segments:True")
        try:
            return self.error_of(lambda: torch.empty(1 << 22, dtype=torch.uint8, device=device))
        finally:
            set_options("expandable_segments:False")

    def error_of(self, question: Callable[[], object]) -> str:
        """Why a question fails; "" where it does not, or where only memory is lacking."""
        try:
            question()
        except self.torch.OutOfMemoryError:
            return ""
        except Exception as error:
            return "" if "CUDA error: out of memory" in str(error) else first_line(error)
        return ""

    def read_cudnn(self) -> list[str]:
        try:
            return [str(self.torch.backends.cudnn.version() or ""), ""]
        except AttributeError:
            return ["", ""]
        except Exception as error:
            return ["", first_line(error)]


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


if __name__ == "__main__":
    import torch

    asking = Asking(torch)
    asking.ask_all(json.loads(sys.argv[1]))
    print(json.dumps(asking.answers), flush=True)
