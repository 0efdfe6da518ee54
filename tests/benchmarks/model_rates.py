"""Predicted beside published rates of timm's models: `python -m tests.benchmarks.model_rates`
prints a line for each row of `model_rates.jsonl` beside it, then each class of model.

The rows are what others measured at 224 px with cudnn.benchmark on. Steps of torch 1.12 have no
fused attention; theirs is SGD, here AdamW, a few percent of a step at most. A forward runs in
evaluation: batch norm with what it learned, which reads and writes its images once, as any other
element-wise kernel, and no copy of what an activation overwrites, which only autograd keeps. A
fixed quarter of the models entered no fit; RepVGG is left out, whose branches may be folded. Rows
channels last or in fp32 entered none: what is said of such convolutions holds them all.
Below them stand whole steps that were measured on an H200 and an H100 (`tests/truth/*/rows.jsonl`).
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median, quantiles

from planner.core.errors import PlannerError, UnsupportedError
from planner.core.schema import NamedModel, TrainSetting, parse
from planner.estimation.estimate import resolve
from planner.estimation.ledgers import step_ledger
from planner.ledger.ledger import Operation
from planner.libraries.names import resolve_model
from planner.machine.hardware import find_gpu
from planner.throughput.prediction import predict_step
from planner.throughput.rates import rates_for
from planner.throughput.result import Throughput
from search.loop.records import read_records
from tests.truth.compare import gpu_of, predicted_step

ROWS = Path(__file__).with_suffix(".jsonl")
TRUTH = Path(__file__).parents[1] / "truth"
HELD_OUT_ONE_IN = 4
CLASSES = {
    "depthwise or grouped": ("convnext", "efficientnet", "mobilenet", "regnet", "resnext", "mnas",
                             "rexnet", "ghostnet", "pvt", "twins", "visformer", "poolformer"),
    "dense convolutions": ("resnet", "wide", "seresnet", "densenet", "vgg", "dla", "hrnet",
                           "legacy", "res2net", "tresnet"),
}  # fmt: skip


@dataclass(frozen=True)
class Rate:
    """A row of `model_rates.jsonl`. `span` is what was timed."""

    source: str
    model: str
    gpu: str
    span: str
    batch_size: int
    precision: str
    images_per_second: float
    memory_format: str = "contiguous"

    @property
    def is_fitted_kind(self) -> bool:
        """Of the kind that is fitted: in fp16, contiguous. The others are judged only."""
        return (self.memory_format, self.precision) == ("contiguous", "fp16")

    @property
    def is_held_out(self) -> bool:
        return hashlib.sha256(self.model.encode()).digest()[0] % HELD_OUT_ONE_IN == 0

    @property
    def apart(self) -> str:
        if not self.is_fitted_kind:
            return f"judged only, {self.memory_format}, {self.precision}"
        return "held out" if self.is_held_out else "fitted"

    @property
    def group(self) -> str:
        name = self.model.removeprefix("timm:").removeprefix("tf_")
        found = [group for group, heads in CLASSES.items() if name.startswith(heads)]
        return found[0] if found else "attention and mixers"

    def error(self) -> float:
        """Of the predicted rate, relative to the measured one."""
        return self.predicted.images_per_second / self.images_per_second - 1

    @property
    def is_within(self) -> bool:
        """Whether the error is within what is said of such operations, whatever the card."""
        if self.is_fitted_kind:
            return abs(self.error()) <= stated(self.predicted)
        found = self.predicted
        return abs(self.images_per_second / found.images_per_second - 1) <= found.uncertainty

    @cached_property
    def predicted(self) -> Throughput:
        asked = {
            "batch_size": self.batch_size,
            "precision": self.precision,
            "memory_format": self.memory_format,
            "attention": "sdpa" if self.span == "forward" else "eager",
        }
        model, setting = resolve(
            resolve_model(self.model, {}), parse(TrainSetting, asked, self.model)
        )
        rates = rates_for(find_gpu(self.gpu), model)
        try:
            ledger = step_ledger(model, setting)
        except UnsupportedError:  # it has no attention that could be chosen
            ledger = step_ledger(model, setting.model_copy(update={"attention": "library"}))
        except PlannerError:  # torch's backward of attention fails beyond 65,535 windows
            setting = setting.model_copy(update={"batch_size": self.batch_size // 2})
            ledger = step_ledger(model, setting)
        operations: list[Operation] = list(ledger.operations())
        if self.span != "step":
            timed = self.span.split("+")
            operations = [(p, o) for p, o in operations if p in timed]
        if self.span == "forward":
            rates = replace(rates, batch_norm_share=1.0, num_sms=None)
            operations = evaluated(operations)
        return predict_step(operations, rates, setting, 1)


def evaluated(operations: list[Operation]) -> list[Operation]:
    """Without the copies that keep for backward what an activation in place overwrites."""
    following = [*operations[1:], operations[-1]]
    return [
        (phase, one)
        for (phase, one), (_, after) in zip(operations, following, strict=True)
        if not (one.name == "aten.clone" and after.name.endswith("_") and after.path == one.path)
    ]


def stated(found: Throughput) -> float:
    """The uncertainty that operations of these kinds have on a card whose rows train."""
    card = rates_for(
        find_gpu("rtx-3090"), NamedModel(library="timm", name="any", task="classification")
    )
    return card.uncertainty_of(TrainSetting(attention="eager"), found.kind_seconds)


def rows() -> list[Rate]:
    return [Rate(**json.loads(line)) for line in ROWS.read_text().splitlines()]


def summary(errors: Sequence[float]) -> str:
    sizes = [abs(error) for error in errors]
    ninth = quantiles(sizes, n=10)[-1] if len(sizes) > 1 else sizes[0]
    return (
        f"{len(sizes)} rows, median {median(sizes):.1%}, nine of ten within {ninth:.1%}, "
        f"worst {max(sizes):.1%}"
    )


def measured_steps(card: str, *names: str) -> Iterator[tuple[str, float, float, str]]:
    """Of other models than Swins on an H200 or H100, all or those of `names`: the model, the error
    of the predicted seconds, what is said of it, and what takes them."""
    for row in read_records(TRUTH / card / "rows.jsonl").records:
        title = row.model.title
        if row.status != "measured" or "swin" in title or (names and title not in names):
            continue
        found = predicted_step(row, rates_for(gpu_of(row), row.model))
        host = f"host {found.host_seconds:.3f} s of {found.step_seconds:.3f}"
        error = found.step_seconds / median(row.step_seconds) - 1
        yield title, error, found.uncertainty, f"batch {row.setting.batch_size}, {host}"


def main() -> None:
    errors: dict[str, list[float]] = defaultdict(list)
    for row in rows():
        width = stated(row.predicted) if row.is_fitted_kind else row.predicted.uncertainty
        error, said = row.error(), f"of ±{width:.0%}"
        where = f"{row.gpu:14} {row.span:16} {row.model:40} {row.apart}"
        print(f"{error:+7.1%} {said}  {where}", flush=True)
        of_card = [f"all, {row.gpu}, {row.span}"] if row.is_fitted_kind else []
        for key in (row.apart, f"{row.apart}, {row.group}", *of_card):
            errors[key].append(error)
    for card in ("h200", "h100"):
        for title, error, uncertainty, what in measured_steps(card):
            rate = Rate("", title, card, "step", 1, "bf16", 1.0)
            where = f"{card}, seconds of a step  {title:40} {rate.apart}"
            print(f"{error:+7.1%} of ±{uncertainty:.0%}  {where}, {what}", flush=True)
            errors[f"{card}, {rate.apart}, {rate.group}"].append(error)
    for key, found in sorted(errors.items()):
        print(f"{key}: {summary(found)}")


if __name__ == "__main__":
    main()
