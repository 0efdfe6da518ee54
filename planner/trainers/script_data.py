"""How the plain script reads its data: the measured pipeline, and the way of a batch to the device.

Each pipeline is the one that `planner.loading.pipelines` measures, written out. Training draws from
a sampler without end, so that no worker runs dry between two epochs; batches are copied to a CUDA
device on a stream of their own, and nothing waits for the device between two lines of the log.
"""

from __future__ import annotations

from string import Template

from planner.schema.loading import Pipeline
from planner.trainers.loader import train_loader
from planner.trainers.plan import Plan, Refusal
from planner.trainers.recipe import recipe_of
from planner.trainers.source import image_lines

IMPORTS = (
    "from pathlib import Path",
    "from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler",
)


def standard_modules(plan: Plan) -> tuple[str, ...]:
    """What is imported of the standard library."""
    found = {"timm": ("functools",), "own": ("sys",)}
    return ("itertools", *found.get(pipeline_of(plan), ()))


def pipeline_of(plan: Plan) -> Pipeline:
    """What runs in the script's loader."""
    return train_loader(plan).pipeline


def own_factory(plan: Plan) -> str | None:
    """MODULE:FACTORY of the user's Dataset, None where the script reads a folder of pictures."""
    if pipeline_of(plan) != "own" or plan.fed is None:
        return None
    return plan.fed.data.location


def data_refusals(plan: Plan) -> list[Refusal]:
    """A Dataset of the user's is loaded by its factory's name only."""
    if pipeline_of(plan) == "own" and own_factory(plan) is None:
        law = "the loader was measured with your own Dataset (pipeline=own), which no record names"
        return [Refusal(law, "Tune again with --data MODULE:FACTORY.")]
    return []


def data_notes(plan: Plan) -> tuple[str, ...]:
    """What the script reads otherwise than it was measured."""
    kind = plan.fed.data.kind if plan.fed is not None else "folder"
    if kind in ("folder", "factory"):
        return ()
    what = {"shards": "tar shards", "table": "a table of datasets"}[kind]
    return (
        f"The loader was measured on {what}, and this script reads a folder per class: the rate "
        "holds where dataset() reads yours, the one function to change.",
    )


def data_source(plan: Plan) -> str:
    """From the data to batches on the device: `dataset`, `data_loader`, `on_device`."""
    pipeline = pipeline_of(plan)
    mixed = "    if train:\n        images, targets = mix(images, targets)\n"
    lines = "".join(f"    {line}\n" for line in image_lines(plan.setting))
    factory = own_factory(plan)
    if factory is not None:
        module, _, name = factory.partition(":")
        read = _OWN.substitute(module=module, name=name)
    else:
        read = _folder_source(pipeline, plan.model.in_channels)
    return read + _DATA.substitute(
        unwrapped=_UNWRAPPED if factory is not None else "",
        collate="        collate_fn=collate,\n" if pipeline in ("timm", "own") else "",
        normalise=_NORMALISE if pipeline == "timm" else "",
        mix=mixed if recipe_of(plan.setting).mixes else "",
        prepare=lines,
    )


def _folder_source(pipeline: Pipeline, channels: int | None) -> str:
    needs = "torchvision" if pipeline.startswith("torchvision") else f"torchvision and {pipeline}"
    imports = sorted(("from torchvision.datasets import ImageFolder", _PIPELINE_IMPORTS[pipeline]))
    return _HELPERS.get(pipeline, "") + _FOLDER.substitute(
        imports="".join(f"        {line}\n" for line in imports),
        needs=needs,
        channels=_OTHER_CHANNELS if channels != 3 else "",
        transform=_TRANSFORMS[pipeline],
        loader=", loader=read_picture" if pipeline == "torchvision-jpeg" else "",
    )


_V2 = "from torchvision.transforms import v2"
_PIPELINE_IMPORTS = {
    "torchvision": _V2,
    "torchvision-jpeg": _V2,
    "timm": "from timm.data import create_transform",
    "transformers": "from transformers import ViTImageProcessor",
}
_CROPPED = """\
    if train:
        crop = [v2.RandomResizedCrop((HEIGHT, WIDTH), antialias=True), v2.RandomHorizontalFlip()]
    else:
        crop = [v2.Resize(max(HEIGHT, WIDTH), antialias=True), v2.CenterCrop((HEIGHT, WIDTH))]
    scaled = v2.ToDtype(torch.float32, scale=True)
    transform = v2.Compose([v2.ToImage(), *crop, scaled, v2.Normalize(MEAN, STD)])
"""
_TRANSFORMS = {
    "torchvision": _CROPPED,
    "torchvision-jpeg": _CROPPED,
    # timm's own, for its prefetcher: it leaves pictures as bytes, normalised on the device.
    "timm": (
        "    size = (CHANNELS, HEIGHT, WIDTH)\n"
        "    transform = create_transform(size, is_training=train, use_prefetcher=True)\n"
    ),
    "transformers": (
        '    size = {"height": HEIGHT, "width": WIDTH}\n'
        "    transform = Processed(ViTImageProcessor(size=size, image_mean=MEAN, image_std=STD))\n"
    ),
}
_HELPERS = {
    "torchvision-jpeg": '''def read_picture(path: str) -> Any:
    """uint8 [3, height, width]: a JPEG by torchvision's decoder, any other picture by PIL."""
    from torchvision.datasets.folder import pil_loader
    from torchvision.io import ImageReadMode, decode_jpeg
    from torchvision.transforms.v2.functional import pil_to_tensor

    data = Path(path).read_bytes()
    if data[:3] != b"\\xff\\xd8\\xff":
        return pil_to_tensor(pil_loader(path))
    encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return decode_jpeg(encoded, mode=ImageReadMode.RGB)


''',
    "timm": '''def collate(items: list[Any]) -> Any:
    """Bytes [batch, channels, height, width] and classes [batch]."""
    from timm.data.loader import fast_collate

    return fast_collate(items)


@functools.lru_cache
def pixels(device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and deviation of bytes, copied to the device once."""
    values = torch.tensor([MEAN, STD], device=device).mul(255).view(2, -1, 1, 1)
    return values[0], values[1]


''',
    "transformers": '''class Processed:
    """A picture as an image processor of transformers makes it, by itself: no random crop."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def __call__(self, picture: Any) -> Tensor:
        return self.processor(picture, return_tensors="pt")["pixel_values"][0]


''',
}
_OTHER_CHANNELS = """\
    raise SystemExit(f"pictures have 3 channels and the model {CHANNELS}: make its Dataset here")
"""
_FOLDER = Template(
    '''def dataset(options: argparse.Namespace, train: bool) -> Dataset[Any] | None:
    """Pictures of DATA/train/CLASS/ (or DATA/CLASS/) or of DATA/val/CLASS/; None where there are
    none to validate."""
    try:
$imports\
    except (ImportError, RuntimeError) as error:  # the latter where it was built for another torch
        raise SystemExit(
            "Pictures are read with $needs, which cannot be imported: "
            f"{error}. Install the torchvision of this torch, or try --synthetic --steps 20."
        ) from error
$channels    names = ("train", "training") if train else ("val", "valid", "validation", "test")
    parts = [options.data / name for name in names if (options.data / name).is_dir()]
    if not train and not parts:
        return None
    folder = parts[0] if parts else options.data
$transform\
    found = ImageFolder(folder, transform$loader)
    if len(found.classes) > NUM_CLASSES:
        raise SystemExit(f"{folder} has {len(found.classes)} classes, the model {NUM_CLASSES}")
    return found


'''
)
_OWN = Template(
    '''def dataset(options: argparse.Namespace, train: bool) -> Dataset[Any] | None:
    """What your own function makes, a Dataset or a DataLoader of one. It makes nothing to validate:
    write that here."""
    if not train:
        return None
    sys.path.insert(0, str(Path.cwd()))  # your module is found where you stand
    from $module import $name

    return $name()


'''
)
_UNWRAPPED = """\
    collate = None
    if isinstance(data, DataLoader):
        data, collate = data.dataset, data.collate_fn
    if not hasattr(data, "__len__"):
        raise SystemExit("your Dataset has no length: write the DataLoader of its stream here")
"""
_NORMALISE = """\
    if images.dtype == torch.uint8:
        mean, std = pixels(images.device)
        images = images.float().sub_(mean).div_(std)
"""
_DATA = Template(
    '''class Epochs(Sampler[int]):
    """A rank's images, epoch after epoch without end, each epoch in its own order: no worker starts
    over between two of them, and every batch is whole."""

    def __init__(self, num_images: int, rank: int, seed: int) -> None:
        self.num_images, self.rank, self.seed = num_images, rank, seed
        self.num_batches = num_images // (BATCH_SIZE * WORLD_SIZE)  # of an epoch

    def __iter__(self) -> Iterator[int]:
        kept = self.num_batches * BATCH_SIZE * WORLD_SIZE
        for epoch in itertools.count():
            drawn = torch.Generator().manual_seed(self.seed + epoch)
            order = torch.randperm(self.num_images, generator=drawn)
            yield from order[self.rank : kept : WORLD_SIZE].tolist()


def data_loader(options: argparse.Namespace, rank: int, train: bool) -> DataLoader[Any] | None:
    """Batches for training without end, or those for validation, None where there are none."""
    data = dataset(options, train)
    if data is None:
        return None
$unwrapped    sampler: Sampler[int] | None = None
    if train:
        sampler = Epochs(len(data), rank, options.seed)
    elif WORLD_SIZE > 1:
        sampler = DistributedSampler(data, shuffle=False)
    return DataLoader(
        data,
        BATCH_SIZE if train else VALIDATION_BATCH_SIZE,
        sampler=sampler,
$collate        num_workers=options.workers,
        prefetch_factor=options.prefetch_factor if options.workers else None,
        pin_memory=options.pin_memory and torch.device(options.device).type == "cuda",
        persistent_workers=options.persistent_workers and train and options.workers > 0,
    )


class Waits:
    """How long the device waits for batches, by a mark before and after each. CUDA's marks are
    events, read when the device has passed them, so that the loop never waits for one."""

    def __init__(self, device: torch.device) -> None:
        self.cuda, self.marks = device.type == "cuda", []

    def mark(self) -> None:
        if not self.cuda:
            self.marks.append(time.perf_counter())
            return
        self.marks.append(torch.cuda.Event(enable_timing=True))
        self.marks[-1].record()

    def seconds(self) -> float:
        """Since the last call, when the device has done its work."""
        pairs = list(zip(self.marks[::2], self.marks[1::2], strict=False))
        self.marks.clear()
        if self.cuda:
            return sum(asked.elapsed_time(given) for asked, given in pairs) / 1000
        return sum(given - asked for asked, given in pairs)


def prepared(images: Tensor, targets: Tensor, train: bool) -> tuple[Tensor, Tensor]:
    """A batch on the device as the model takes it."""
$normalise$mix$prepare    return images, targets


def synthetic_batches(device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    images = torch.randn(BATCH_SIZE, CHANNELS, HEIGHT, WIDTH, device=device)
    targets = torch.randint(NUM_CLASSES, (BATCH_SIZE,), device=device)
    while True:
        yield prepared(images, targets, train=True)


def on_device(
    data: DataLoader[Any], device: torch.device, train: bool, waits: Waits
) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of `data`, copied on a stream of their own while the device still computes."""
    copying = torch.cuda.Stream(device) if device.type == "cuda" else None
    waits.mark()
    for images, targets in data:
        with torch.cuda.stream(copying) if copying is not None else nullcontext():
            images = images.to(device, non_blocking=True)
            targets = targets.to(device, non_blocking=True)
        if copying is not None:
            computing = torch.cuda.current_stream(device)
            computing.wait_stream(copying)
            for tensor in (images, targets):
                tensor.record_stream(computing)  # not given to the next copy before it was used
        waits.mark()
        yield prepared(images, targets, train)
        waits.mark()


@torch.no_grad()
def accuracy(model: nn.Module, data: DataLoader[Any], device: torch.device) -> float:
    """The share of validation images whose best class is right, over all devices."""
    model.eval()
    counts = torch.zeros(2, device=device)
    for images, targets in on_device(data, device, False, Waits(device)):
        with torch.autocast(device.type, dtype=AUTOCAST) if AUTOCAST else nullcontext():
            output = model(images)
        best = getattr(output, "logits", output).argmax(dim=1)
        counts += torch.stack([(best == targets).sum(), torch.tensor(len(best), device=device)])
    if dist.is_initialized():
        dist.all_reduce(counts)
    model.train()
    return float(counts[0] / counts[1])
'''
)
