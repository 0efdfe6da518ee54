"""What torch says of the GPUs, from a process that ends: a real one, and a stand-in for torch."""

import os
from pathlib import Path

import pytest

from planner.machine.torch_build import (
    ask_torch,
    has_code_for,
)
from planner.machine.torch_build import why_not_usable as why_not


@pytest.mark.parametrize(
    ("capability", "arch_list", "runs"),
    [
        ((8, 6), ("sm_80",), True),  # machine code of a lower minor version
        ((8, 0), ("sm_86",), False),
        ((9, 0), ("sm_80",), False),  # another major version
        ((9, 0), ("sm_80", "compute_80"), True),  # the driver compiles PTX
        ((10, 3), ("sm_100a", "compute_100a"), False),
        ((10, 0), ("sm_100a",), True),
        ((10, 3), ("sm_100f",), True),
        ((9, 4), ("gfx90a", "gfx942"), True),  # not CUDA's: it says nothing
        ((9, 0), (), True),
    ],
)
def test_code_runs_where_cudas_rules_say(
    capability: tuple[int, int], arch_list: tuple[str, ...], runs: bool
) -> None:
    assert has_code_for(capability, arch_list) == runs


STAND_IN = """
import os
class OutOfMemoryError(RuntimeError): pass
class version: cuda, hip = "13.0", None
class Properties:
    def __init__(self, index):
        self.name = os.environ["CUDA_DEVICE_ORDER"]
        self.total_memory, self.major, self.minor, self.uuid = 2**34, 9, index, f"u{index}"
class cuda:
    is_available = staticmethod(lambda: os.environ["AVAILABLE"] == "1")
    device_count = staticmethod(lambda: 4)
    get_arch_list = staticmethod(lambda: ["sm_90"])
    get_device_properties = Properties
    @staticmethod
    def init(): raise RuntimeError("The NVIDIA driver on your system is too old\\nmore")
class Tensor:
    def sum(self): return self
    def item(self): return 8.0
def ones(count, device):
    errors = {"cuda:1": RuntimeError("no kernel image is available\\nmore"),
              "cuda:2": OutOfMemoryError("full"),
              "cuda:3": RuntimeError("CUDA error: out of memory")}
    if device in errors: raise errors[device]
    return Tensor()
__version__ = "2.13.0+cu130"
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "torch.py").write_text(STAND_IN)
    known = {n: value for n, value in os.environ.items() if n != "CUDA_DEVICE_ORDER"}
    return {**known, "PYTHONPATH": str(tmp_path), "AVAILABLE": "1"}


def test_a_kernel_is_tried_on_each_and_a_full_card_is_usable(stand_in: dict[str, str]) -> None:
    build = ask_torch(stand_in)
    assert [gpu.error for gpu in build.gpus] == ["", "no kernel image is available", "", ""]
    assert (build.gpus[1].uuid, build.gpus[1].name) == ("u1", "PCI_BUS_ID")
    assert "no kernel image" in (why_not(build, 1) or "")
    assert why_not(build, 2) is None
    assert all(gpu.error == "" for gpu in ask_torch(stand_in, (0,)).gpus)


def test_why_there_is_none_is_told(stand_in: dict[str, str]) -> None:
    build = ask_torch({**stand_in, "AVAILABLE": "0"})
    assert build.reason == "The NVIDIA driver on your system is too old"
    assert "too old" in (why_not(build) or "")
    Path(stand_in["PYTHONPATH"], "torch.py").write_text("raise ImportError('libcudart.so.13')")
    assert "libcudart" in ask_torch(stand_in).error


def test_the_versions_of_its_libraries_are_told(stand_in: dict[str, str], tmp_path: Path) -> None:
    libraries = """
class nccl: version = staticmethod(lambda: (2, 29, 7))
cuda.nccl = nccl
class cudnn: version = staticmethod(lambda: 92000)
class backends: cudnn = cudnn
"""
    (tmp_path / "torch.py").write_text(STAND_IN + libraries)
    build = ask_torch(stand_in, ())
    assert build.libraries == {"cudnn": "9.20.0", "nccl": "2.29.7"}
    assert build.cudnn_error == ""
    mismatch = "def refuse(): raise RuntimeError('cuDNN version incompatibility: 9.2 and 8.9\\nx')"
    (tmp_path / "torch.py").write_text(f"{STAND_IN}{libraries}{mismatch}\ncudnn.version = refuse")
    assert ask_torch(stand_in, ()).cudnn_error == "cuDNN version incompatibility: 9.2 and 8.9"


def test_an_answer_counts_however_the_process_ends(stand_in: dict[str, str]) -> None:
    with Path(stand_in["PYTHONPATH"], "torch.py").open("a") as file:
        file.write("\nimport atexit; atexit.register(os._exit, 3); atexit.register(print, 'bye')\n")
    build = ask_torch(stand_in, ())
    assert (build.error, len(build.gpus)) == ("", 4)


@pytest.mark.parametrize(
    ("code", "question", "line"),
    [
        ("cuda.is_available = lambda: 1 / 0", "torch.cuda.is_available()", "division by zero"),
        ("class nccl: version = lambda: os.abort()\ncuda.nccl = nccl", "torch.cuda.nccl.version()",
         "status -6"),
        ("class cudnn: version = lambda: sys.exit('no cuDNN for you')\n"
         "class backends: cudnn = cudnn", "torch.backends.cudnn.version()", "no cuDNN for you"),
    ],
)  # fmt: skip
def test_a_question_that_fails_condemns_no_torch(
    stand_in: dict[str, str], code: str, question: str, line: str
) -> None:
    with Path(stand_in["PYTHONPATH"], "torch.py").open("a") as file:
        file.write(f"\nimport sys\n{code}\n")
    build = ask_torch(stand_in, ())
    assert (build.error, build.version) == ("", "2.13.0+cu130")
    assert list(build.failed) == [question]
    assert line in build.failed[question]
    assert len(build.gpus) == (0 if "is_available" in code else 4)
    assert (why_not(build) is None) != ("is_available" in code)
