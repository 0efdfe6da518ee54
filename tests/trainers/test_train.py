"""`train.py` as a module, each piece once; and emitted: the probed file but for its block."""

import contextlib
import dataclasses
import math
import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from planner.core.schema import FactoryModel, NamedModel, SwinConfig, TrainSetting  # noqa: E402
from planner.libraries.limits import batch_multiple  # noqa: E402
from planner.libraries.names import build_named  # noqa: E402
from planner.libraries.torchvision import declare_missing_operators  # noqa: E402
from planner.trainers.block import BEGINS, ENDS  # noqa: E402
from planner.trainers.emission import emit_setting  # noqa: E402
from planner.trainers.plan import Emitted  # noqa: E402
from planner.training import levers, train  # noqa: E402
from planner.training.assembly import build_training, step_setting  # noqa: E402
from planner.training.setting import FOLDER, step_values, train_source  # noqa: E402
from planner.training.step import Training  # noqa: E402
from planner.training.tasks import as_task  # noqa: E402
from tests.steps import build_real  # noqa: E402
from tests.trainers.cases import loaded, make_pictures, tiny  # noqa: E402

declare_missing_operators()
CPU = torch.device("cpu")
NATIVE = FOLDER.with_name("libraries") / "native" / "native_swin.py"


def named(library: str, name: str) -> NamedModel:
    """A classifier of ten classes that a library builds by name."""
    sizes = {"image_size": (224, 224), "in_channels": 3, "num_classes": 10}
    return NamedModel(library=library, name=name, task="classification", **sizes)


EACH: list[tuple[Any, dict[str, Any]]] = [
    (tiny(), {}),
    (tiny("timm", 2), {"checkpointing": "selective", "ema": True, "accumulate": 2}),
    (tiny("native", 2), {"lora_rank": 0, "frozen_stages": 1, "offload": "activations"}),
    (tiny("timm"), {"lora_rank": 4, "lora_targets": "all", "attention": "sdpa"}),
    (FactoryModel(factory="mine:make"), {"compile": "default", "compile_scope": "blocks"}),
    (named("torchvision", "swin_t"), {"parallelism": "fsdp", "world_size": 8,
                                      "optimizer": "adamw-fused"}),
    (named("torchvision", "vit_b_32"), {"attention": "eager"}),
    (named("transformers", "microsoft/swin-tiny-patch4-window7-224"), {"attention": "sdpa"}),
]  # fmt: skip


def emitted(model: Any, **fields: Any) -> Emitted:
    setting = TrainSetting(**{"batch_size": 4, "precision": "fp32", **fields})
    return emit_setting(model, setting, "pytorch")


@pytest.mark.parametrize(("model", "fields"), EACH, ids=str)
def test_the_emitted_file_is_the_probed_one_but_for_its_block(
    model: Any, fields: dict[str, Any]
) -> None:
    found = emitted(model, **fields)
    assert found.text.partition(BEGINS)[0] == train_source().partition(BEGINS)[0]
    assert found.text.partition(ENDS)[2] == train_source().partition(ENDS)[2]
    for name, text in found.modules.items():
        source = NATIVE if name == "native_swin.py" else FOLDER / name
        assert text == source.read_text("utf-8")


@pytest.mark.parametrize(("model", "fields"), EACH, ids=str)
def test_the_block_says_what_the_probe_is_told(
    model: Any, fields: dict[str, Any], tmp_path: Path
) -> None:
    """Every field of a step; and the model has the same weights, of the same shapes."""
    found = loaded(emitted(model, **fields), tmp_path)
    setting = TrainSetting(batch_size=4, precision="fp32", **fields)
    told = step_setting(model, setting.with_recipe(isinstance(model, SwinConfig)))
    recipe = setting.with_recipe(isinstance(model, SwinConfig))
    for name in step_values(model, recipe):
        assert getattr(found.SETTING, name) == getattr(told, name), name
    if not isinstance(model, FactoryModel):
        alone = dataclasses.replace(found.SETTING, parallelism="none", world_size=1)
        module = found.prepare_model(found.build_model().train(), alone, CPU, None)
        is_named = isinstance(model, NamedModel)
        build = build_named if is_named else build_real
        probed_module = build(model, setting.attention if is_named else setting)
        mine, theirs = module.state_dict(), probed_module.state_dict()
        assert {n: w.shape for n, w in mine.items()} == {n: w.shape for n, w in theirs.items()}
        trained = [
            [n for n, p in m.named_parameters() if p.requires_grad] for m in (module, probed_module)
        ]
        assert trained[0] == trained[1]


def test_its_step_is_the_probed_one(tmp_path: Path) -> None:
    """The same weights after two steps on the same batch, accumulated, clipped and averaged."""
    model = tiny()
    fields = {"accumulate": 2, "clip_grad": True, "ema": True, "loss": "cross-entropy"}
    found = loaded(emitted(model, **fields), tmp_path)
    setting = TrainSetting(batch_size=4, precision="fp32", **fields)
    torch.manual_seed(0)
    task = as_task(build_real(model, setting), model, setting)
    training = build_training(Training, task, model, setting, CPU)
    module = found.build_model()
    module.load_state_dict(training.model.state_dict())
    weights = [{"params": list(module.parameters())}]
    optimizers = found.build_optimizers(weights, found.SETTING, 1e-4)
    step = found.Step(module, found.SETTING, task.loss, optimizers, module, module)
    for _ in range(2):
        training.step()
        step(iter([training.batch] * 2))
    pairs = zip(module.parameters(), training.model.parameters(), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    pairs = zip(step.average, training.average or (), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


@pytest.mark.parametrize(
    "model", [tiny(version=version, absolute_position_embedding=True) for version in (1, 2)],
    ids=["v1", "v2"],
)  # fmt: skip
def test_what_decays(model: SwinConfig) -> None:
    """Matrices and kernels, and nothing that stands for a position, a bias or a norm."""
    module = build_real(model, TrainSetting())
    names = {id(p): name for name, p in module.named_parameters()}
    decayed, spared = (
        {names[id(p)] for p in group["params"]} for group in train.decay_groups(module, 0.05)
    )
    assert {"head.weight", "patch_embed.proj.weight"} <= decayed
    assert all(name.endswith("weight") and "norm" not in name for name in decayed)
    assert any("absolute_pos" in name for name in spared)
    parts = ("position_bias", "absolute_pos", "cpb_mlp", "logit_scale", "bias", "norm")
    assert all(any(part in name for part in parts) for name in spared)


def test_the_rate_rises_and_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    options = train.argparse.Namespace(epochs=10, warmup_epochs=2)
    monkeypatch.setattr(train, "SETTING", train.Setting(warmup_start=0.01, final_share=0.1))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule, rates = train.build_schedule(optimizer, 100, options), []
    for _ in range(101):
        rates.append(schedule.get_last_lr()[0] / 2)
        optimizer.step()
        schedule.step()
    assert rates[0] == pytest.approx(0.01)
    assert rates[10] == pytest.approx(0.505)
    assert rates[20] == pytest.approx(1.0)
    assert rates[60] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 2)))
    assert rates[100] == pytest.approx(0.1)


def test_mixed_targets_are_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each picture as much as its target says: images are the classes' own values."""
    targets = torch.tensor([0, 1, 2, 3])
    images = torch.nn.functional.one_hot(targets, 4).float().view(4, 4, 1, 1).expand(4, 4, 16, 16)
    for seed in range(20):
        mixup, cutmix = ((0.8, 1.0), (0.8, 0.0), (0.0, 1.0))[seed % 3]
        setting = train.Setting(num_classes=4, smoothing=0.0, mixup=mixup, cutmix=cutmix)
        monkeypatch.setattr(train, "SETTING", setting)
        torch.manual_seed(seed)
        mixed, soft = train.mix_images(images.contiguous(), targets)
        assert torch.allclose(mixed.mean((2, 3)), soft, atol=1e-5)
        assert torch.allclose(soft.sum(1), torch.ones(4))


def test_every_epoch_sees_every_picture_once() -> None:
    """And one that was resumed sees what an uninterrupted one sees; ranks share them."""
    from planner.training.pictures import Endless, Seeded

    drawn = iter(Endless(9, 0, 0, 1))
    seen = [next(drawn) for _ in range(27)]
    for epoch in range(3):
        assert sorted(index for index, _ in seen[9 * epoch : 9 * epoch + 9]) == list(range(9))
    later = iter(Endless(9, 0, 12, 1))
    assert [next(later) for _ in range(15)] == seen[12:]
    ranks = [iter(Endless(9, 0, rank, 2)) for rank in range(2)]
    both = [next(each) for _ in range(9) for each in ranks]
    assert both[:9] == seen[:9]

    class Random(torch.utils.data.Dataset):  # type: ignore[misc]
        def __getitem__(self, index: int) -> tuple[float, float]:
            return random.random(), torch.rand(()).item()

    before = random.getstate()
    data = Seeded(Random(), 0)
    assert data[3, 7] == data[5, 7] != data[3, 8]
    assert random.getstate() == before


def test_pictures_are_read_in_both_ways(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    pytest.importorskip("timm")
    from planner.training import pictures

    folder = make_pictures(tmp_path, training=4, validation=2)
    how = {"auto_augment": "rand-m9-mstd0.5-inc1", "erasing": 1.0, "height": 32, "width": 32}
    for pipeline in ("torchvision", "timm"):
        setting = train.Setting(pipeline=pipeline, interpolation="bicubic", crop_share=0.875, **how)
        data, collate = pictures.open_pictures(folder, setting, train=True)
        items = [data[index] for index in range(4)]
        images, _ = (collate or torch.utils.data.default_collate)(items)
        if pipeline == "timm":
            assert images.dtype == torch.uint8
            images = pictures.normalize(images, 0.0)
        assert images.shape == (4, 3, 32, 32)
        assert images.abs().max() < 5
        held, _ = pictures.open_pictures(folder, setting, train=False)
        assert len(held) == 2
    assert pictures.open_pictures(folder / "train", setting, train=False) == (None, None)
    with pytest.raises(SystemExit, match="2 classes, the model 1"):
        pictures.open_pictures(folder, train.Setting(num_classes=1), train=True)


def test_what_ends_a_training_leaves_the_file_that_was_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "last.pt"
    train.save_state({"step": 1}, file)
    (tmp_path / "last.part").mkdir()  # as on a full disk, nothing can be written
    with contextlib.suppress(IsADirectoryError):
        train.save_state({"step": 2}, file)
    assert torch.load(file) == {"step": 1}


def test_layers_of_multiples_of_the_batch_s_are_in_8_bits() -> None:
    assert batch_multiple(TrainSetting(batch_size=16, precision="fp8")) == levers.FLOAT8_MULTIPLE
    for sides, is_large in {(64, 64): True, (63, 64): False, (72, 64): False}.items():
        assert levers.is_float8_layer(torch.nn.Linear(*sides)) == is_large
