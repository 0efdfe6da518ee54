"""The time model from first principles: what each law says, on a device whose rates are round.

The device below does 1e12 FLOP/s in fp32, ten times that in bf16, and moves 1e9 bytes/s, so that
an operation of 1e9 FLOPs takes a millisecond and one of 1e6 bytes does too.
"""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import advise, estimate
from planner.cli import main
from planner.core.files import to_json
from planner.core.schema import MeasurementRecord, NamedModel, TrainSetting
from planner.ledger.ledger import Computed, Operation, OperationKind
from planner.machine.hardware import all_gpus, find_gpu
from planner.machine.hardware.gpu import Gpu
from planner.report.timing import hours_text
from planner.throughput.fusion import find_regions, fuse_operations
from planner.throughput.prediction import device_seconds, predict_step
from planner.throughput.rates import (
    HOST_SPREAD,
    KIND_UNCERTAINTY,
    MEASURED_CARDS,
    WIDE_UNCERTAINTY,
    DeviceRates,
    rates_for,
    window_attention_flops,
)
from planner.throughput.result import HOST_WAIT, Cost, Throughput, TrainingLength, training_cost
from search.loop.records import read_records
from tests.truth.compare import predicted_step

MS = 1e-3
EAGER = TrainSetting(precision="fp32", batch_size=8)
DEVICE = DeviceRates(
    name="round",
    basis="made up for the test",
    matmul_flops={"float32": 1e12, "tf32": 5e12, "bfloat16": 1e13, "float16": 1e13},
    bandwidth=1e9,
    kind_share={
        "matmul": 1.0, "conv": 0.5, "attention": 0.5, "pointwise": 1.0, "reduction": 0.5,
        "copy": 1.0,
    },
    kernel_seconds=0.0,
    graph_kernel_seconds=0.0,
    host_seconds={"forward": 0.0, "backward": 0.0, "optimizer": 0.0, "zero_grad": 0.0},
    launch_seconds=0.0,
    compiled_launch_seconds=0.0,
    graph_seconds=0.0,
)  # fmt: skip


def matmul(flops: float, num_bytes: float = 0, dtype: str = "float32") -> Computed:
    return Computed("aten.mm", "matmul", dtype, int(flops), int(num_bytes), 1, "")


def moving(num_bytes: float, kind: OperationKind = "pointwise", kernels: int = 1) -> Computed:
    return Computed(f"aten.{kind}", kind, "float32", 0, int(num_bytes), kernels, "")


def step(
    *operations: Operation, rates: DeviceRates = DEVICE, setting: TrainSetting = EAGER
) -> Throughput:
    return predict_step(operations, rates, setting)


def slow_host(seconds: float) -> DeviceRates:
    phases = ("forward", "backward", "optimizer", "zero_grad")
    return replace(DEVICE, host_seconds=dict.fromkeys(phases, seconds))


CONV = matmul(1e10)._replace(kind="conv")  # reaches half of the rate
LAWS: list[tuple[str, Computed, float, dict[str, object], dict[str, float]]] = [
    # phase, operation, milliseconds, the setting's fields, the device's rates
    ("forward", matmul(1e9, 1e3), 1, {}, {}),  # the slower of FLOPs and bytes counts
    ("forward", matmul(1e9, 3e6), 3, {}, {}),
    ("forward", moving(2e6, "reduction"), 4, {}, {}),
    ("forward", matmul(1e10), 10, {"precision": "fp32"}, {}),
    ("forward", matmul(1e10), 2, {"precision": "tf32"}, {}),
    ("forward", matmul(1e10, dtype="bfloat16"), 1, {"precision": "bf16"}, {}),
    # Convolutions of fp32 tensors run in TF32 unless fp32 was asked for (training/assembly.py).
    ("forward", CONV, 20, {"precision": "fp32"}, {}),
    ("forward", CONV, 4, {"precision": "tf32"}, {}),
    ("forward", CONV, 4, {"precision": "bf16"}, {}),
    # A dense one of few channels waits for its layout's copies.
    ("forward", moving(4e6)._replace(kind="conv"), 8, {}, {"convolution_bandwidth_share": 0.5}),
    ("forward", moving(4e6)._replace(kind="conv"), 4, {}, {}),
    # Each kernel has a start.
    ("forward", moving(1e6, kernels=4), 5, {}, {"kernel_seconds": 1 * MS}),
    # Backward reaches less of the matrix rate.
    ("forward", matmul(1e9), 1, {}, {"backward_matmul_share": 0.5}),
    ("backward", matmul(1e9), 2, {}, {"backward_matmul_share": 0.5}),
    ("backward", moving(1e6), 1, {}, {"backward_matmul_share": 0.5}),
    # Fused attention has one share of the matmul rate, whichever kernel runs: half of it.
    ("forward", matmul(1e9, dtype="bfloat16")._replace(kind="attention"), 0.2, {}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("phase", "operation", "took", "fields", "rates"), LAWS)
def test_an_operation_takes(
    phase: str, operation: Computed, took: float, fields: dict[str, object], rates: dict[str, float]
) -> None:
    device, setting = replace(DEVICE, **rates), EAGER.model_copy(update=fields)
    found = step((phase, operation), rates=device, setting=setting)
    assert found.step_seconds == pytest.approx(took * MS)


def test_without_bf16_units_a_bf16_matmul_is_no_faster_than_fp32() -> None:
    volta = rates_for(find_gpu("v100-sxm-32gb"))
    assert volta.matmul_rate("bfloat16", "bf16") == volta.matmul_rate("float32", "fp32")
    assert volta.matmul_rate("float32", "tf32") == volta.matmul_rate("float32", "fp32")


def test_small_batches_are_bound_by_the_host_and_large_ones_are_not() -> None:
    """Ten operations that take the host 1 ms each to issue."""
    rates = slow_host(1 * MS)
    small = step(*[("forward", moving(1e5))] * 10, rates=rates)
    large = step(*[("forward", moving(1e7))] * 10, rates=rates)
    assert small.step_seconds == pytest.approx(10 * MS)
    assert small.kind_seconds[HOST_WAIT] == pytest.approx(9 * MS)
    assert large.step_seconds == pytest.approx(100 * MS)
    assert large.kind_seconds.get(HOST_WAIT, 0.0) < 0.1 * large.step_seconds
    assert large.host_seconds == pytest.approx(10 * MS)


def test_fp16_waits_for_the_device_before_the_optimizer() -> None:
    """A slow forward on the device hides a slow optimizer on the host, and the next step's start,
    but GradScaler reads found_inf: the host's work on the optimizer is no longer hidden."""
    rates = replace(DEVICE, host_seconds={"forward": 0.0, "backward": 0.0, "optimizer": 1 * MS})
    operations = [("forward", moving(1e7)), *[("optimizer", moving(0))] * 9]
    assert step(*operations, rates=rates).step_seconds == pytest.approx(10 * MS)
    setting = EAGER.model_copy(update={"precision": "fp16"})
    assert step(*operations, rates=rates, setting=setting).step_seconds == pytest.approx(19 * MS)


def test_on_a_cpu_issuing_and_computing_add_up() -> None:
    rates = replace(slow_host(1 * MS), asynchronous=False)
    assert step(*[("forward", moving(2e6))] * 5, rates=rates).step_seconds == pytest.approx(15 * MS)


def test_accumulation_repeats_all_but_the_optimizer() -> None:
    micro = [("forward", moving(1e6)), ("backward", moving(2e6))]
    setting = EAGER.model_copy(update={"accumulate": 4})
    once = predict_step([*micro, ("optimizer", moving(5e6))], DEVICE, setting, 1)
    whole = predict_step([*micro * 4, ("optimizer", moving(5e6))], DEVICE, setting)
    assert once.step_seconds == pytest.approx(17 * MS)
    assert whole.step_seconds == pytest.approx(17 * MS)
    assert whole.images_per_second == pytest.approx(4 * 8 / (17 * MS))
    assert whole.phase_seconds == pytest.approx(
        {"forward": 4e-3, "backward": 8e-3, "optimizer": 5e-3}
    )


def fused_whole(operations: list[Operation]) -> list[Operation]:
    """As where the model is compiled whole."""
    whole = TrainSetting(compile="default")
    return fuse_operations(operations, find_regions(operations, whole))[0]


def test_fusion_joins_chains_and_keeps_matrix_work_and_the_optimizer_apart() -> None:
    add, norm, cast = moving(3e6), moving(2e6, "reduction"), moving(2e6, "copy")
    work = matmul(1e9)
    fused = fused_whole(
        [
            ("forward", add), ("forward", norm), ("forward", cast), ("forward", work),
            ("forward", add), ("backward", cast), ("optimizer", add), ("optimizer", add),
        ]
    )  # fmt: skip
    kinds = [(phase, op.kind, op.kernels) for phase, op in fused]
    assert kinds == [
        ("forward", "pointwise", 1), ("forward", "matmul", 1), ("forward", "pointwise", 1),
        ("backward", "copy", 1), ("optimizer", "pointwise", 1), ("optimizer", "pointwise", 1),
    ]  # fmt: skip
    assert add.num_bytes < fused[0][1].num_bytes < sum(op.num_bytes for op in (add, norm, cast))


def test_compiling_helps_the_host_and_graphs_help_it_more() -> None:
    rates = replace(slow_host(1 * MS), compiled_launch_seconds=0.5 * MS, graph_seconds=0.1 * MS)
    chain = [("forward", moving(1e3)), ("forward", moving(1e3)), ("forward", matmul(1e3))] * 20

    def seconds(mode: str) -> float:
        setting = EAGER.model_copy(update={"compile": mode})
        return step(*chain, rates=rates, setting=setting).step_seconds

    assert seconds("off") == pytest.approx(60 * MS, rel=0.01)
    assert seconds("default") == pytest.approx(20 * MS, rel=0.01)
    assert seconds("max-autotune-no-cudagraphs") == seconds("default")
    assert seconds("reduce-overhead") < 0.1 * seconds("default")


KINDS: tuple[OperationKind, ...] = (
    "matmul", "conv", "attention", "pointwise", "reduction", "copy",
)  # fmt: skip
computed = st.builds(
    Computed,
    name=st.just("op"),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    flops=st.integers(0, 10**12),
    num_bytes=st.integers(0, 10**9),
    kernels=st.integers(1, 5),
    path=st.just(""),
)
operation_lists = st.lists(
    st.tuples(st.sampled_from(["forward", "backward", "optimizer", "zero_grad"]), computed),
    min_size=1,
    max_size=30,
)
gpus = st.sampled_from(all_gpus())
modes = st.sampled_from(["off", "default", "reduce-overhead"])
precisions = st.sampled_from(["fp32", "tf32", "bf16", "fp16"])


@given(operation_lists, gpus, modes, precisions)
def test_parts_sum_to_the_step(
    operations: list[Operation], gpu: Gpu, mode: str, precision: str
) -> None:
    setting = TrainSetting.model_validate({"compile": mode, "precision": precision})
    took = predict_step(operations, rates_for(gpu), setting)
    for account in (took.phase_seconds, took.kind_seconds, took.bound_seconds):
        assert sum(account.values()) == pytest.approx(took.step_seconds)
    assert took.step_seconds >= 0.999 * took.host_seconds


@given(operation_lists, gpus, st.integers(2, 5))
def test_more_work_never_takes_less_time(operations: list[Operation], gpu: Gpu, times: int) -> None:
    rates = rates_for(gpu)
    larger = [
        (phase, op._replace(flops=op.flops * times, num_bytes=op.num_bytes * times))
        for phase, op in operations
    ]
    small, large = step(*operations, rates=rates), step(*larger, rates=rates)
    assert large.step_seconds >= small.step_seconds * 0.9999
    assert large.step_seconds <= small.step_seconds * times * 1.0001


def test_assumed_rates_stay_under_the_datasheets_peaks() -> None:
    peaks = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8": "fp8"}
    for gpu in all_gpus():
        rates = rates_for(gpu)
        for dtype, rate in rates.matmul_flops.items():
            peak = getattr(gpu, f"{peaks.get(dtype, dtype)}_flops")
            assert 0.3 * peak < rate <= peak, gpu.name
        # Of an H20 a third: it has 78 multiprocessors for what an H100 has 132 for.
        assert 0.3 * gpu.bandwidth <= rates.bandwidth < gpu.bandwidth, gpu.name
        assert "fitted to measurements" in rates.basis


def kept_kernels(card: str) -> list[dict[str, Any]]:
    path = Path(__file__).parents[1] / "truth" / card / "kernels.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


def test_attention_over_windows_takes_what_it_took_on_an_h200() -> None:
    """Of larger windows, by the kernel that takes its learned bias. Of small ones these kernels are
    too short to tell: whole steps of a Swin-T did, on an H100."""
    asked = {"kernel": "sdpa efficient", "d": 32, "bias": "learned"}
    found = {k["N"]: k for k in kept_kernels("h200") if asked.items() <= k.items()}
    for tokens in (144, 256):
        rates = window_attention_flops(find_gpu("h200"), tokens)
        flops = 4 * (64 * 196 // tokens) * 12 * tokens**2 * 32
        for phase, times in (("forward", 1), ("backward", 2.5)):
            took = times * flops / rates["bfloat16"]
            assert took == pytest.approx(found[tokens][f"{phase}_seconds"], rel=0.25), tokens


def test_kinds_of_a_swins_step_take_what_they_took_on_an_h100() -> None:
    path = Path(__file__).parents[1] / "truth" / "h100" / "profiles.jsonl"
    told = next(json.loads(x) for x in path.read_text().splitlines() if '"swin_tiny"' in x)
    record = MeasurementRecord.model_validate(told["probe"])
    found = predicted_step(record, rates_for(find_gpu("h100-sxm-80gb"), record.model))
    for kind in ("attention", "matmul"):
        took = sum(seconds for _, of, _, seconds in told["seconds"] if of == kind)
        assert found.kind_seconds[kind] == pytest.approx(took, rel=0.15)


def test_what_a_search_chose_between_on_an_h100_took_as_long_as_predicted() -> None:
    folder = Path(__file__).parents[1] / "truth" / "h100"
    records = [
        r for f in ("tuned", "compiled") for r in read_records(folder / f"{f}.jsonl").records
    ]
    assert len(records) == 12
    for record in records:
        found = predicted_step(record, rates_for(find_gpu("h100-sxm-80gb"), record.model))
        assert found.step_seconds == pytest.approx(median(record.step_seconds), rel=0.11)


def test_batch_norm_takes_what_it_took_on_an_h200() -> None:
    """Kernels of few channels; of many it is up to half faster than predicted."""
    found = [k for k in kept_kernels("h200") if k["kernel"] == "batch_norm" and k["C"] <= 256]
    rates, setting = rates_for(find_gpu("h200")), TrainSetting(precision="bf16")
    assert len(found) == 6
    for kernel in found:
        numel, channels = 64 * kernel["C"] * kernel["pixels"] ** 2, kernel["C"]
        size = 4 if kernel["dtype"] == "float32" else 2
        for phase, times, name in (("forward", 2, ""), ("backward", 3, "_backward")):
            moved = times * size * numel + (28 if name else 24) * channels
            one = Computed(f"aten.native_batch_norm{name}", "reduction", kernel["dtype"],
                           numel + 2 * channels, moved, 1, "")  # fmt: skip
            took = device_seconds(phase, one, rates, setting)
            assert took == pytest.approx(kernel[f"{phase}_seconds"], rel=0.4)
            last = setting.model_copy(update={"memory_format": "channels_last"})
            assert device_seconds(phase, one, rates, last) <= took


def test_only_what_was_measured_alike_narrows_the_uncertainty() -> None:
    eager = TrainSetting(attention="eager", precision="bf16")
    rates, wide = rates_for(find_gpu("rtx-3090")), WIDE_UNCERTAINTY
    assert rates.uncertainty_of(eager, {}) == MEASURED_CARDS["rtx-3090"] < wide
    for update in ({"compile": "default"}, {"attention": "sdpa"}, {"precision": "tf32"}):
        assert rates.uncertainty_of(eager.model_copy(update=update), {}) == wide
    assert rates_for(find_gpu("rtx-4090")).uncertainty_of(eager, {}) == wide
    half = {"matmul": 1.0, HOST_WAIT: 1.0}  # for a host that nobody knows
    spread = HOST_SPREAD - 1
    assert rates.uncertainty_of(eager, half, 2.0) == pytest.approx(max(wide, spread))
    # Another model is known as well as the kinds of operations that it spends its time on.
    resnet = NamedModel(library="timm", name="resnet50", task="classification")
    rates, known = rates_for(find_gpu("rtx-3090"), resnet), KIND_UNCERTAINTY
    found = rates.uncertainty_of(eager, {"pointwise": 1, "copy": 1})
    assert found == pytest.approx((known["pointwise"] + known["copy"]) / 2)


def test_an_operation_counts_as_what_takes_most_of_it() -> None:
    rates = replace(slow_host(4 * MS), kernel_seconds=2 * MS)
    operations: list[Operation] = [
        ("forward", matmul(5e9)),  # 5 ms of FLOPs, and 2 ms to start
        ("forward", moving(1e6)),  # 1 ms of bytes: its start takes longer
        ("backward", moving(6e6)),
        ("backward", matmul(1e9, 8e6)),  # 8 ms of bytes
        ("optimizer", moving(0)),  # issued 4 ms after the last
    ]
    took = step(*operations, rates=rates)
    assert took.bound_seconds["matrix units"] == pytest.approx(7 * MS)
    assert took.bound_seconds["bandwidth"] == pytest.approx((6 + 2 + 8 + 2) * MS)
    assert took.bound_seconds["kernel starts"] == pytest.approx((1 + 2 + 2) * MS)
    assert took.bound_seconds.get("host", 0) == pytest.approx(took.kind_seconds.get(HOST_WAIT, 0))
    assert took.matrix_flops == 6e9


# A whole training takes what its images take.

# 8 GPUs of 1,000 images/s: 28.8 million images an hour. Within 20% either way that is up to 34.56
# and down to 23.04 million.
EIGHT_CARDS = Throughput(0.064, 1000.0, "a card", 0.2, devices=8)
TRAINING = TrainingLength(epochs=288, images_per_epoch=1_000_000)


def cost_at(predicted: Throughput = EIGHT_CARDS, training: TrainingLength = TRAINING) -> Cost:
    return training_cost(training, predicted)


def test_hours_are_those_of_all_devices_with_the_range_of_the_rate() -> None:
    one = cost_at(replace(EIGHT_CARDS, devices=1))
    assert (one.seconds, one.low_seconds, one.high_seconds) == pytest.approx(
        (288_000, 240_000, 360_000)
    )
    assert hours_text(one) == "80 h (67–100)"


def test_of_several_devices_whose_exchange_is_not_known_only_the_least_is() -> None:
    cost = cost_at()
    assert cost.seconds == pytest.approx(36_000)
    assert cost.high_seconds is None
    assert hours_text(cost) == "10 h (8.3 at least)"


def test_an_epoch_is_of_imagenet_and_without_a_rate_there_are_no_hours() -> None:
    cost = cost_at(replace(EIGHT_CARDS, devices=1), TrainingLength(epochs=1))
    assert cost.images_per_epoch == 1_281_167
    assert training_cost(TRAINING, None) is None
    assert training_cost(None, EIGHT_CARDS) is None


def test_estimates_and_ways_have_it_and_the_command_says_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = "estimate native:swin_tiny --gpu a100-sxm-80gb --gpus 1,2 --epochs 9"
    assert main([*line.split(), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    alone = estimate("native:swin_tiny", gpu="a100-sxm-80gb", epochs=9)
    assert rows[0]["cost"] == to_json(alone.cost)
    assert rows[1]["cost"]["devices"] == 2
    ways = advise(
        "native:swin_tiny", gpu="a100-sxm-80gb", batch_size=64, epochs=9,
        keep=("checkpointing", "offload", "attention", "activation_memory_budget"),
    )  # fmt: skip
    assert ways.as_asked.estimate.cost == alone.cost
    assert to_json(ways.recommended)["cost"]["seconds"] < alone.cost.seconds


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--gpu a100-sxm-80gb --images-per-epoch 2", "its length was not said"),
        ("--gpu a100-sxm-80gb --epochs 0", "above 0"),
        ("--memory 24GiB --epochs 3", "depends on the GPU"),
    ],
)
def test_a_training_that_is_not_whole_is_refused_with_a_way_out(
    options: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = ["estimate", "native:swin_tiny", *options.split()]
    assert main(typed) == 2
    law, way_out = capsys.readouterr().err.strip().splitlines()
    assert said in law
    added = shlex.split(way_out.rstrip(".").partition(" --")[2])
    if "--epochs" in typed and added[0] == "epochs":
        typed = typed[: typed.index("--epochs")]
    assert main([*typed, f"--{added[0]}", added[1], "--json"]) == 0
