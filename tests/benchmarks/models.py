"""Models that are traced, beside torch's own CUDA code: what steps of them take on an emulated GPU.

    python -m tests.benchmarks.models                 all models below, bf16 and fp32
    python -m tests.benchmarks.models timm:resnet18 … these, with --precision and --attention
    python -m tests.benchmarks.models --kept          nothing runs: what tests/truth/models keeps

Each step is `planner validate` on an emulated machine; what was recorded is not run again. It needs
torch's CUDA build and a C compiler. A model is equal where both peaks are those of the device to
within the rounding of an allocation, refused where the planner says why, else wrong.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

from planner.core.errors import PlannerError
from planner.core.schema import MeasurementRecord
from planner.core.torch_version import torch_version
from planner.estimation.estimate import estimate
from planner.machine.emulated import EmulatedMachine, emulated_gpu, started
from search.loop.study.records import read_records

TRUTH = Path(__file__).parents[1] / "truth" / "models"
CARD, BATCH_SIZE = "a100-sxm-80gb", 4
EQUAL = 0.001  # a share of the peak: requests of less than 512 B are rounded in other places
MODELS = (
    "timm:vit_tiny_patch16_224", "timm:deit3_small_patch16_224", "timm:beit_base_patch16_224",
    "timm:eva02_tiny_patch14_224", "timm:convnext_atto", "timm:resnet18", "timm:efficientnet_b0",
    "timm:mobilenetv4_conv_small", "timm:maxvit_tiny_rw_224", "timm:coatnet_nano_rw_224",
    "timm:cait_xxs24_224", "timm:xcit_nano_12_p16_224", "timm:pvt_v2_b0", "timm:mvitv2_tiny",
    "timm:hiera_tiny_224", "timm:mixer_s32_224", "timm:regnety_002", "timm:levit_128s",
    "timm:crossvit_tiny_240", "timm:pit_ti_224", "timm:davit_tiny", "timm:edgenext_xx_small",
    "torchvision:resnet18", "torchvision:vit_b_32", "torchvision:maxvit_t",
    "torchvision:mvit_v1_b", "torchvision:mvit_v2_s", "torchvision:r3d_18",
    "torchvision:shufflenet_v2_x0_5", "torchvision:squeezenet1_1", "torchvision:densenet121",
    "torchvision:googlenet", "torchvision:lraspp_mobilenet_v3_large", "torchvision:fcn_resnet50",
    "transformers:ViTForImageClassification", "transformers:BertForSequenceClassification",
    "transformers:GPT2LMHeadModel", "transformers:Dinov2ForImageClassification",
    "transformers:SegformerForSemanticSegmentation", "transformers:ConvNextForImageClassification",
    "transformers:RobertaForMaskedLM", "transformers:DistilBertForSequenceClassification",
    "transformers:ViTMAEForPreTraining", "transformers:T5ForConditionalGeneration",
    "transformers:ResNetForImageClassification", "transformers:PoolFormerForImageClassification",
)  # fmt: skip


class Verdict(NamedTuple):
    """One step: allocated and reserved bytes, (estimated - measured) / measured."""

    record: MeasurementRecord
    what: str
    allocated: float | None = None
    reserved: float | None = None
    said: str = ""


def records_path() -> Path:
    return TRUTH / f"{CARD}-torch-{'.'.join(map(str, torch_version()))}.jsonl"


def run(model: str, options: Sequence[str], path: Path) -> None:
    """Carries steps of one model out, as a person would."""
    command = [sys.executable, "-W", "ignore", "-m", "planner", "validate", model]
    command += ["--device", "cuda:0", "--quiet", "--batch-size", str(BATCH_SIZE)]
    command += ["--checkpointing", "none", "--record", str(path), *options]
    with started(EmulatedMachine((emulated_gpu(CARD),))) as environment:
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)


def judge(record: MeasurementRecord) -> Verdict:
    if record.status != "measured":
        return Verdict(record, record.status, said=str(record.message or ""))
    try:
        found = estimate(record.model, record.setting, gpu=CARD)
    except PlannerError as error:
        return Verdict(record, "refused", said=error.message)
    assert record.peak_allocated_bytes
    assert record.peak_reserved_bytes
    allocated = found.peak_allocated_bytes / record.peak_allocated_bytes - 1
    reserved = found.peak_reserved_bytes / record.peak_reserved_bytes - 1
    is_equal = max(abs(allocated), abs(reserved)) <= EQUAL
    return Verdict(record, "equal" if is_equal else "wrong", allocated, reserved)


def show(verdicts: Iterable[Verdict]) -> str:
    found = sorted(verdicts, key=lambda v: (v.what, -max(abs(v.allocated or 0), 0)))
    rows = [
        [v.record.model.title, v.record.setting.precision, v.record.setting.attention, v.what,
         *("–" if e is None else f"{e:+.3%}" for e in (v.allocated, v.reserved)), v.said[:60]]
        for v in found
    ]  # fmt: skip
    headers = ["model", "precision", "attention", "verdict", "allocated", "reserved", "said"]
    counts = ", ".join(f"{n} {what}" for what, n in sorted(Counter(v.what for v in found).items()))
    return f"{tabulate(rows, headers, disable_numparse=True)}\n\n{len(found)} steps: {counts}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="MODELs of planner estimate")
    parser.add_argument("--precision", default="bf16,fp32")
    parser.add_argument("--attention")
    parser.add_argument("--record", type=Path, default=records_path())
    parser.add_argument("--kept", action="store_true", help="run nothing")
    given = parser.parse_args()
    options = ["--precision", given.precision]
    options += ["--attention", given.attention] if given.attention else []
    for model in () if given.kept else given.models or MODELS:
        print(model, file=sys.stderr, flush=True)
        run(model, options, given.record)
    print(show(judge(record) for record in read_records(given.record).records))


if __name__ == "__main__":
    main()
