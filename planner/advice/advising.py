"""`planner.advise`: from a wish to advice. Imports no torch, but where a model must be traced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any

from planner.advice.bottleneck import Bottleneck, bottleneck
from planner.advice.cards import Card, larger_cards
from planner.advice.estimates import Estimates
from planner.advice.flags import command, device_flags, flags
from planner.advice.left_out import what_is_left_out
from planner.advice.levers import ALLOCATOR, EFFECTS, LEVERS, Effect, Lever, Updates, effects
from planner.advice.more_gpus import MoreGpus, more_gpus
from planner.advice.search import Found, Offered, Refusal, offer, search
from planner.advice.tracing import record_traces
from planner.advice.waterfall import Fall, waterfall
from planner.advice.wish import ALLOWED, Choice, Wish, read_wish
from planner.arguments import ModelLike, SettingLike
from planner.estimation import Estimate, default_precision
from planner.hardware.gpu import Gpu
from planner.memory.allocator_config import AllocatorConfig
from planner.schema import Model, TrainSetting


@dataclass(frozen=True)
class Way:
    """One way to run the wish: its estimate (bytes, images per second of one device), what is
    changed of the wish, what that changes for the result, and the command that estimates it."""

    setting: TrainSetting
    estimate: Estimate
    changes: tuple[tuple[str, object], ...]
    effects: tuple[Effect, ...]
    flags: tuple[str, ...]
    command: str

    @property
    def images_per_second(self) -> float:
        assert self.estimate.throughput is not None, "advice has rates"
        return self.estimate.throughput.images_per_second

    def to_json(self) -> dict[str, Any]:
        return {
            "setting": self.setting.model_dump(mode="json"),
            "changes": dict(self.changes),
            "effects": list(self.effects),
            "device_total_bytes": self.estimate.device_total_bytes,
            "low_bytes": self.estimate.low_bytes,
            "high_bytes": self.estimate.high_bytes,
            "fits": self.estimate.fits,
            "fits_surely": self.estimate.fits_surely,
            "images_per_second": self.images_per_second,
            "flags": list(self.flags),
            "command": self.command,
        }


@dataclass(frozen=True)
class LeverState:
    """What became of a lever: `recommended`, `adopted` (it costs nothing), `not needed`, `kept` (by
    your wish), `not allowed` (it changes the result) or `not available`, then for `reasons`. Where
    nothing fits it is `in the nearest` or `not enough`."""

    name: str
    effect: Effect
    says: str
    state: str
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Advice:
    """What `planner advise` answers. All sizes in bytes, times in seconds, rates in images per
    second of one device; predicted, nothing measured.

    `plain` is the wish as it stands. `recommended` is the fastest way that fits, None where nothing
    does; then `nearest` needs least, `missing_bytes` more than there are. `surely` is the fastest
    way whose upper end fits, where that is another. `ways` are the fastest of each way to save
    memory, fastest first; `front` the way from fast to small, each the fastest that
    needs so little, in steps of 2% of the memory and down to half of the speed;
    `waterfall` leads from `plain` to `recommended` (or `nearest`). `rated` is the card whose rates
    order the ways. `left_out` says what was not looked at.
    """

    model: Model
    gpu: str | None
    rated: str
    budget_bytes: int
    plain: Way
    recommended: Way | None
    surely: Way | None
    nearest: Way | None
    missing_bytes: int
    ways: tuple[Way, ...]
    front: tuple[Way, ...]
    waterfall: tuple[Fall, ...]
    bottleneck: Bottleneck
    cards: tuple[Card, ...]
    more_gpus: tuple[MoreGpus, ...]
    levers: tuple[LeverState, ...]
    left_out: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The object that `planner advise --json` prints: sizes are integers in bytes."""

        def shown(way: Way | None) -> dict[str, Any] | None:
            return way.to_json() if way else None

        return {
            "model": self.model.model_dump(mode="json"),
            "gpu": self.gpu,
            "rated": self.rated,
            "budget_bytes": self.budget_bytes,
            "fits": self.plain.estimate.fits,
            "plain": self.plain.to_json(),
            "recommended": shown(self.recommended),
            "surely": shown(self.surely),
            "nearest": shown(self.nearest),
            "missing_bytes": self.missing_bytes,
            "ways": [way.to_json() for way in self.ways],
            "front": [way.to_json() for way in self.front],
            "waterfall": [
                {**asdict(fall), "changes": dict(fall.changes)} for fall in self.waterfall
            ],
            "bottleneck": {
                **asdict(self.bottleneck),
                **self.bottleneck.accounts_json(),
                "largest": self.bottleneck.largest,
                "treatments": [
                    {**asdict(t), "changes": dict(t.changes)} for t in self.bottleneck.treatments
                ],
            },
            "cards": [asdict(card) for card in self.cards],
            "more_gpus": [
                {**asdict(more), "in_place_of": dict(more.in_place_of)} for more in self.more_gpus
            ],
            "levers": [asdict(lever) for lever in self.levers],
            "left_out": list(self.left_out),
        }


def advise(
    model: ModelLike,
    setting: SettingLike | None = None,
    *,
    gpu: str | Gpu | None = None,
    memory_bytes: int | str | None = None,
    batch_size: int | None = None,
    global_batch: int | None = None,
    keep: Iterable[str] = (),
    allow: Iterable[str] = (),
    allocator: str | AllocatorConfig | None = None,
    link: str | None = None,
    **overrides: Any,
) -> Advice:
    """The fastest ways to train `model` in a memory, from estimates alone.

    `model`, `setting`, `gpu`, `memory_bytes`, `allocator` and `overrides` are as `planner.estimate`
    takes them. `batch_size` (on one device) or `global_batch` (of all) are the images that an
    optimizer step must see, in micro-batches as they fit; with neither the fastest batch is sought.
    `keep` names fields of the setting that stay as they are, or effects that are not wanted
    (rounding, recipe, learning-rate, adapters); `allow` effects that are otherwise used only where
    nothing else fits (recipe), or not at all (adapters). `link` is what joins several GPUs
    (`world_size`), as `planner.estimate` takes it.
    Raises UsageError for what is unknown or cannot be read, UnsupportedError for a wish that the
    model's library or the card cannot run.
    """
    wish = read_wish(
        model, setting, gpu=gpu, memory_bytes=memory_bytes, batch_size=batch_size,
        global_batch=global_batch, keep=keep, allow=allow, allocator=allocator,
        link=link, overrides=overrides,
    )  # fmt: skip
    title = str(model) if isinstance(model, str | PathLike) else None
    of_model = {k: v for k, v in overrides.items() if k not in TrainSetting.model_fields}
    said = allocator if isinstance(allocator, str) else None
    return _Advising(wish, title, of_model, said).advice()


class _Advising:
    """One wish being answered."""

    def __init__(
        self, wish: Wish, title: str | None, of_model: Mapping[str, Any], allocator: str | None
    ) -> None:
        self.wish = wish
        self.title = title or wish.model.title
        self.of_model = of_model
        self.allocator = allocator
        self.notes = record_traces(wish)
        self.estimates = Estimates(wish)

    def advice(self) -> Advice:
        plain = self._way(Choice(self.wish.plain))
        budget = plain.estimate.budget_bytes
        assert budget is not None, "a GPU or a memory was named"
        wish, offered, found = self._search(budget)
        goal = found.fastest or found.nearest
        nearest = self._way(found.nearest) if found.nearest else None
        best = goal or Choice(wish.plain)
        surely = found.surely if found.surely != found.fastest else None
        need = nearest.estimate.device_total_bytes if nearest else 0
        return Advice(
            model=wish.model,
            gpu=wish.gpu.name if wish.gpu else None,
            rated=wish.rated.name,
            budget_bytes=budget,
            plain=plain,
            recommended=self._way(found.fastest) if found.fastest else None,
            surely=self._way(surely) if surely else None,
            nearest=nearest,
            missing_bytes=max(0, need - budget),
            ways=tuple(self._way(choice) for choice in found.ways),
            front=tuple(self._way(choice) for choice in found.front),
            waterfall=waterfall(wish, self.estimates, goal) if goal else (),
            bottleneck=bottleneck(wish, self.estimates, best, found.fastest),
            cards=larger_cards(wish, self.estimates, found.fastest, budget),
            more_gpus=more_gpus(wish, self.estimates, found.fastest),
            levers=tuple(_lever_states(wish, offered, best, bool(found.fastest))),
            left_out=(*self.notes, *what_is_left_out(wish, offered)),
        )

    def _search(self, budget: int) -> tuple[Wish, Offered, Found]:
        """First without another recipe; where nothing fits so, with one."""
        wish = self.wish
        offered = offer(wish, self.estimates)
        found = search(wish, self.estimates, offered.choices, budget)
        if found.fastest is None and "recipe" not in wish.allow | wish.keep:
            wish = wish.allowing("recipe")
            offered = offer(wish, self.estimates)
            found = search(wish, self.estimates, offered.choices, budget)
        return wish, offered, found

    def _way(self, choice: Choice) -> Way:
        wish = self.wish
        chosen = flags(choice, self.allocator, default_precision(wish.gpu))
        changes = dict(choice.setting.differences(wish.plain))
        if choice.expandable:
            changes["allocator"] = "expandable_segments:True"
        return Way(
            setting=choice.setting,
            estimate=self.estimates.at(choice),
            changes=tuple(changes.items()),
            effects=effects(choice.setting, wish.plain),
            flags=chosen,
            command=command(self.title, self.of_model, device_flags(wish), chosen),
        )


def _lever_states(
    wish: Wish, offered: Offered, best: Choice, best_fits: bool
) -> Iterable[LeverState]:
    """`best` is what is recommended or, where nothing fits, the nearest."""
    changed = set(best.setting.differences(wish.plain))
    if best.expandable:
        changed.add("allocator")
    reasons: dict[str, list[Refusal]] = {}
    for refusal in offered.refusals:
        reasons.setdefault(refusal.lever, []).append(refusal)
    for lever in LEVERS:
        refused = reasons.get(lever.name, [])
        said = tuple(f"{', '.join(r.values)}: {r.reason}" for r in refused)
        possible = wish.changes(lever, wish.sample)
        if lever.effect not in wish.allow:
            option = next(name for name, effect in ALLOWED.items() if effect == lever.effect)
            state, said = "not allowed", (f"{EFFECTS[lever.effect]}: --allow {option}",)
        elif not possible:
            is_kept = lever.changes(wish.model, wish.sample.setting, wish.rated)
            state = "kept" if any(True for _ in is_kept) else "in the wish"
        elif sum(len(r.values) for r in refused) >= len(possible):
            state = "not available"
        elif changed & set(lever.fields) and _is_used(lever, possible, best):
            state = "recommended" if best_fits else "in the nearest"
        elif lever.name in offered.adopted:
            state = "adopted"
        else:
            unused = "not needed" if best_fits else "not enough"
            state = unused if lever.role != "adopt" else "does not pay"
        yield LeverState(lever.name, lever.effect, lever.says, state, said)


def _is_used(lever: Lever, possible: Iterable[Updates], best: Choice) -> bool:
    """Whether one of the changes of a lever is in `best`: fields may have several levers."""
    if lever.role == "micro-batch":
        return True
    return any(
        all(best.expandable if f == ALLOCATOR else getattr(best.setting, f) == value
            for f, value in updates.items())
        for updates in possible
    )  # fmt: skip
