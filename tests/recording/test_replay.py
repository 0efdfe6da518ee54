"""A recorded ledger beside torch's own peaks of a step, in a process of its own, that nothing
watched: to the byte the same, allocated and reserved."""

import inspect
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from planner.core.errors import PlannerError
from planner.core.schema import FactoryModel, Model, NamedModel, SwinConfig, TrainSetting
from planner.estimation.arguments import Target
from planner.estimation.estimate import estimate_ledger, resolve
from planner.estimation.ledgers import step_ledger
from planner.ledger.ledger import Allocated, Freed, Ledger, PhaseEnded, Sent, Tagged
from planner.libraries.names import resolve_model
from planner.machine.emulated import EmulatedMachine, emulated_gpu, started
from planner.machine.hardware import Gpu, find_gpu
from planner.machine.hardware.overheads import overheads_for
from planner.memory.compiled import pool_graph_memory
from planner.memory.profile import profile_memory
from planner.recording.recordings import DEFAULT_CARD, RecordingServer
from planner.throughput.fusion import find_regions
from tests.covering import covering
from tests.recording import models
from tests.steps import torch_peaks

pytestmark = pytest.mark.timeout(400)


def own(name: str) -> FactoryModel:
    return FactoryModel(
        factory=f"tests.recording.models:{name}", image_size=(32, 32), num_classes=16
    )


OWN = own("convolutional")
SWIN = SwinConfig(image_size=(56, 56), depths=(2, 1), num_heads=(3, 6), embed_dim=96, num_classes=9)
VIT = NamedModel(
    library="timm", name="vit_tiny_patch16_224", task="classification", image_size=(224, 224),
    in_channels=3, num_classes=1000,
)  # fmt: skip
MODELS: tuple[Model, ...] = (VIT, SWIN, OWN)
DDP = {"parallelism": "ddp", "world_size": 2}
FSDP = {"parallelism": "fsdp", "world_size": 4}
SWITCHES: tuple[dict[str, Any], ...] = (
    {}, {"offload": "activations"}, {"offload_optimizer": "state"}, {"cudnn_benchmark": False},
    {"offload_optimizer": "state-and-gradients"}, {"optimizer_in_backward": True}, {"ema": True},
    {"memory_format": "channels_last"}, {"zero_grad_to_none": False}, {"clip_grad": True}, DDP,
    {**DDP, "ema": True}, FSDP,
    {**FSDP, "parallelism": "hsdp", "nodes": 2, "fsdp_reshard": False},
)  # fmt: skip
AXES = (
    MODELS, ("bf16", "fp32", "fp16", "pure-bf16"), ("none", "blocks"), (1, 2, 5),
    ("adamw", "adamw-fused", "sgd", "lion", "adafactor"), SWITCHES,
)  # fmt: skip


def setting_of(
    precision: str, checkpointing: str, accumulate: int, optimizer: str, switch: dict[str, Any]
) -> TrainSetting:
    given = {
        "precision": precision, "checkpointing": checkpointing, "accumulate": accumulate,
        "optimizer": optimizer, "clip_grad": False, **switch,
    }  # fmt: skip
    return TrainSetting(batch_size=4, **given)


def is_possible(model: Model, *values: Any) -> bool:
    """Whether `values` go together; a network of one convolution has no blocks."""
    try:
        resolve(model, setting_of(*values))
    except (PlannerError, ValueError):
        return False
    return model is not OWN or values[1] == "none"


def assert_replays(
    recorder: RecordingServer, model: Model, setting: TrainSetting, gpu: Gpu | None = None
) -> Ledger:
    gpu = gpu or find_gpu(DEFAULT_CARD)
    resolved = resolve(model, setting)
    peaks = torch_peaks(recorder, *resolved, gpu)
    ledger = recorder.record(*resolved, gpu)
    found = profile_memory(ledger, overheads_for(gpu, ledger.environment).workspace_bytes, None)
    assert (found.peak_allocated_bytes, found.peak_reserved_bytes) == peaks
    whole = estimate_ledger(*resolved, ledger, Target(gpu))
    assert sum(whole.breakdown.values()) == whole.device_total_bytes
    return ledger


@pytest.mark.parametrize(
    ("model", "values"),
    [(model, values) for model, *values in covering(*AXES, possible=is_possible)],
    ids=str,
)
def test_a_ledger_replays_to_torchs_own_peaks(
    recorder: RecordingServer, model: Model, values: list[Any]
) -> None:
    assert_replays(recorder, model, setting_of(*values))


@pytest.mark.parametrize("changes", [{"lora_rank": 4}, {"frozen_stages": 1}], ids=str)
def test_weights_that_are_not_trained(recorder: RecordingServer, changes: dict[str, Any]) -> None:
    assert_replays(recorder, SWIN, TrainSetting(batch_size=4, **changes))


def test_products_in_8_bits(recorder: RecordingServer) -> None:
    setting = TrainSetting(batch_size=16, precision="fp8")
    assert_replays(recorder, VIT, setting, find_gpu("h100-sxm-80gb"))


@pytest.mark.emulated
@pytest.mark.parametrize("card", ["t4", "a100-sxm-80gb", "rtx-4090", "h100-sxm-80gb", "rtx-5090"])
@pytest.mark.parametrize("name", ["timm:maxvit_rmlp_pico_rw_256", "torchvision:swin_v2_t"])
def test_kernels_of_each_capability(recorder: RecordingServer, name: str, card: str) -> None:
    """Convolutions, attention, and the backward of a table of positions, which sorts indices by
    kernels that torch compiled for few capabilities."""
    setting = TrainSetting(batch_size=4, precision="fp16")
    assert_replays(recorder, resolve_model(name), setting, find_gpu(card))


@pytest.mark.compiler
@pytest.mark.timeout(900)
def test_a_compiled_model_of_the_list(recorder: RecordingServer) -> None:
    """One of tests/truth/models/compiled.yaml; tests/truth holds another to what is kept of it.
    Graphs request from a pool what library kernels write too: 1.7% over torch's (2.14)."""
    model = resolve_model("torchvision:vit_b_32")
    setting = TrainSetting(batch_size=16, precision="bf16", compile="default")
    ledger = assert_replays(recorder, model, setting)
    names = {event.label for event in ledger.events if isinstance(event, Allocated)}
    assert [name for name in names if name.endswith("addmm")] == ["extern_kernels.addmm"]
    graphed = resolve(model, setting.model_copy(update={"compile": "reduce-overhead"}))
    found = profile_memory(pool_graph_memory(ledger), 0, None).peak_reserved_bytes
    assert 1 <= found / torch_peaks(recorder, *graphed)[1] < 1.03


@pytest.mark.compiler
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "adamw-8bit"}, {"compile": "default"},
        {"compile": "default", "compile_scope": "blocks"},
        {"compile": "default", "activation_memory_budget": 0.5},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_compiled(recorder: RecordingServer, changes: dict[str, Any]) -> None:
    """Inductor may compile otherwise than it remembers: so it does that first. Compiled by blocks,
    the forward and the backward of each of twelve are told."""
    setting = TrainSetting(batch_size=4, **changes)
    torch_peaks(recorder, *resolve(VIT, setting))
    operations = list(assert_replays(recorder, VIT, setting).operations())
    found = zip(operations, find_regions(operations, setting), strict=True)
    blocks = {(phase, region) for (phase, _), region in found if region}
    assert len(blocks) == (2 * 12 if setting.compile_scope == "blocks" else 0)


@pytest.mark.parametrize("changes", [{}, DDP, FSDP], ids=str)
def test_between_steps_only_what_is_kept_is_alive(
    recorder: RecordingServer, changes: dict[str, Any]
) -> None:
    """Weights in fp32, two moments of them and one `step` for each; under DDP the buckets, as
    large as all gradients; of FSDP's weights a quarter. Rounding and small tensors are below 5%."""
    resolved = resolve(SWIN, TrainSetting(batch_size=4, optimizer="adamw-fused", **changes))
    ledger = recorder.record(*resolved)
    sizes: dict[int, int] = {}
    kinds: dict[int, str] = {}
    end = max(i for i, event in enumerate(ledger.events) if type(event) is PhaseEnded)
    for event in ledger.events[:end]:
        if type(event) is Allocated:
            sizes[event.storage] = event.num_bytes
        elif type(event) is Freed:
            del sizes[event.storage]
        elif type(event) is Tagged:
            kinds[event.storage] = event.category
    held = Counter[str]()
    for storage, num_bytes in sizes.items():
        held[kinds.get(storage, "temporaries")] += num_bytes
    weights = 4 * ledger.num_parameters // (4 if changes is FSDP else 1)
    buckets = weights if changes is DDP else 0
    assert held["parameters"] == pytest.approx(weights, rel=0.05)
    assert held["optimizer_state"] == pytest.approx(2 * weights, rel=0.05)
    assert held["gradients"] == pytest.approx(buckets, rel=0.05)
    assert held["temporaries"] < 4096


def test_weights_that_are_tied_are_moved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second copy, given back at once, would leave a hole where a probe has none."""
    torch = pytest.importorskip("torch")
    from planner.recording.step import _move

    tied = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(2)))
    tied[1].weight = tied[0].weight
    made, usual = [], torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda of, **how: made.append(of) or usual(of, **how))
    _move(tied, torch.device("cpu"), torch.bfloat16)
    assert len(made) == 1


ROOT = Path(__file__).parents[2]
HSDP = {**FSDP, "parallelism": "hsdp", "nodes": 2}


def crossed(ledger: Ledger) -> dict[str, int]:
    """What a rank sends and receives in the second step, by collective. Buffers,
    which the first rank sends to the others, are left out, and norms of all gradients."""
    sent = {e.event.handle: e.event for e in ledger.exchanges() if isinstance(e.event, Sent)}
    found = Counter[str]()
    for event in sent.values():
        found[event.collective] += event.num_bytes if event.num_bytes > 1024 else 0
    return {kind: sent for kind, sent in found.items() if sent and kind != "broadcast"}


@pytest.mark.parametrize(
    "changes",
    [
        DDP, {**DDP, "accumulate": 2}, {**DDP, "clip_grad": False},
        FSDP,
        {**FSDP, "accumulate": 2, "gradient_sync": "every"}, {**HSDP, "precision": "fp32"},
    ],
    ids=str,
)  # fmt: skip
def test_closed_forms_are_beside_what_one_rank_does(
    recorder: RecordingServer, changes: dict[str, Any]
) -> None:
    """Bytes that are alive, that torch reserves and that cross; and how they are uncertain."""
    resolved, setting = resolve(SWIN, TrainSetting(batch_size=4, **changes))
    ledger, torch_ledger = step_ledger(resolved, setting), recorder.record(resolved, setting)
    closed, own = (estimate_ledger(resolved, setting, one) for one in (ledger, torch_ledger))
    off = 0.015 if setting.parallelism == "ddp" else 0.001
    off += 0.006 * (setting.gradient_sync == "every")  # whole gradients of a later micro-batch
    assert closed.peak_allocated_bytes == pytest.approx(own.peak_allocated_bytes, rel=off)
    assert closed.low_bytes <= own.device_total_bytes <= closed.high_bytes
    assert crossed(ledger) == pytest.approx(crossed(torch_ledger), rel=1e-3)


RANK = """
import json, os, sys, time, torch
from pydantic import TypeAdapter
from planner.core.schema import Model, TrainSetting
from planner.recording.step import steps_until_steady
from planner.training.assembly import add_recipe, build_training
from planner.training.step import Training
from planner.training.tasks.lookup import task_for
model = TypeAdapter(Model).validate_json(sys.argv[1])
setting = add_recipe(model, TrainSetting.model_validate_json(sys.argv[2]))
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
torch.distributed.init_process_group("nccl")
task, device = task_for(model, setting), torch.device("cuda", rank)
training = build_training(Training, task, model, setting, device)
for _ in range(steps_until_steady(setting)):
    training.step()
    torch.distributed.group.WORLD._wait_for_pending_works()  # as in steps longer than 100 ms
torch.cuda.reset_peak_memory_stats()
training.step()
peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
open(f"{sys.argv[3]}/{rank}", "w").write(json.dumps(peaks))
os._exit(0)
"""


@pytest.mark.emulated
@pytest.mark.timeout(300)
@pytest.mark.parametrize("changes", [DDP, {**FSDP, "world_size": 2}], ids=str)
def test_one_process_takes_what_the_first_of_real_ranks_does(
    recorder: RecordingServer, tmp_path: Path, changes: dict[str, Any]
) -> None:
    resolved, setting = resolve(SWIN, TrainSetting(batch_size=4, **changes))
    (tmp_path / "rank.py").write_text(RANK)
    order = ["--standalone", "--nproc-per-node", "2", "rank.py", resolved.model_dump_json()]
    with started(EmulatedMachine((emulated_gpu(DEFAULT_CARD),) * 2)) as environment:
        subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *order, setting.model_dump_json(), "."],
            cwd=tmp_path, check=True, env={**environment, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    real = json.loads((tmp_path / "0").read_text())
    assert tuple(real) == torch_peaks(recorder, resolved, setting)


def record(recorder: RecordingServer, model: Model, **changes: Any) -> Ledger:
    return recorder.record(*resolve(model, TrainSetting(**{"batch_size": 4, **changes})))


def line_of(text: str) -> str:
    lines = inspect.getsource(models).splitlines()
    return f"recording/models.py:{1 + next(n for n, line in enumerate(lines) if text in line)}"


@pytest.mark.parametrize(
    ("name", "at", "words"),
    [
        ("raises", 'ValueError("no', ("raised ValueError", "no such stage", "--image-size")),
        ("fills_host", "1 << 50", ("host's memory is full", "only the host's is short")),
    ],
)
def test_what_raises_says_where(
    recorder: RecordingServer, name: str, at: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(PlannerError) as raised:
        record(recorder, own(name))
    for said in (f"models:{name}", line_of(at), *words):
        assert said in str(raised.value)


def test_a_batch_norm_of_one_value_says_what_to_do(recorder: RecordingServer) -> None:
    with pytest.raises(PlannerError, match="a micro-batch of 2 or more") as raised:
        record(recorder, own("OfOneValue"), batch_size=1)
    assert line_of("self.head(self.change") in str(raised.value)


def test_a_process_that_dies_says_of_what(recorder: RecordingServer) -> None:
    with pytest.raises(PlannerError, match=r"models:dies ended by SIGKILL\.\nThe kernel kills"):
        record(recorder, own("dies"))


def test_a_selection_by_values_is_a_lower_bound(recorder: RecordingServer) -> None:
    assert any("lower bound" in note for note in record(recorder, own("selects")).notes)
    # The gradient of a table of positions sorts indices, as many as there are.
    assert not any("lower bound" in note for note in record(recorder, SWIN).notes)


def test_a_value_that_is_read_is_made_up(recorder: RecordingServer) -> None:
    """But for those that the optimizer reads: the scaler of fp16 asks whether all are finite."""
    notes = record(recorder, own("reads")).notes
    assert any(line_of("features.sum().item()") in note and "0 stands" in note for note in notes)
    assert not any("0 stands" in n for n in record(recorder, OWN, precision="fp16").notes)


@pytest.mark.parametrize("changes", [{}, DDP], ids=str)
def test_no_request_changes_the_next(recorder: RecordingServer, changes: dict[str, Any]) -> None:
    first = record(recorder, OWN, **changes)
    for disturbing in ("raises", "dies"):
        with pytest.raises(PlannerError):
            record(recorder, own(disturbing))
    record(recorder, VIT, precision="fp32")
    again = record(recorder, OWN, **changes)
    assert again.events == first.events
