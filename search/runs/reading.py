"""A search read from what it left: a folder, one file of it, or the storage of its study.

What cannot be read is told and does not keep the rest from being shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from planner.core.errors import PlannerError, UsageError
from planner.core.files import (
    MAX_RESULT_BYTES,
    TUNE_PROBES,
    TUNE_RESULT,
    parse_json,
    read_text,
)
from planner.core.schema import MeasurementRecord, SwinConfig
from planner.core.schema.record import Recommendation
from planner.core.units import GIB
from planner.libraries.registry import find_library
from planner.report.estimates import apart_fields
from planner.report.searches import Run, cited
from planner.trainers.emission import read_result
from search.loop.contenders import choose, contenders
from search.loop.records import parse_record, read_records
from search.loop.request import model_flags, read_options, tune_command
from search.probe.evidence import is_disturbed, is_feasible, rate_interval

if TYPE_CHECKING:
    from optuna import Study

FILES = (TUNE_RESULT, TUNE_PROBES)
STORAGES = (".db", ".journal", ".log")
_SQLITE = "sqlite:///"
MOST_NAMED = 6
_WAY_OUT = "Name the --output of a 'planner tune', a file of records, or a MODEL."

T = TypeVar("T")


def is_run(target: str) -> bool:
    """Whether a target is a search: a folder, a file of records or of a recommendation, a storage.
    Whatever else there is may be a MODEL, which can be a JSON file too."""
    path = Path(target)
    try:
        if "://" in target or path.is_dir() or path.suffix in (".jsonl", *STORAGES):
            return True
        return path.suffix == ".json" and path.is_file() and _is_result(path)
    except (OSError, ValueError):  # a name that no file can have
        return False


def interval_of(record: MeasurementRecord) -> tuple[float, float] | None:
    """Where its rate lies; None where nothing was timed."""
    images = record.setting.batch_size * record.setting.accumulate
    return rate_interval(images, record.samples) if record.samples else None


def read_run(target: str | Path, study_name: str | None = None) -> Run:
    """What is known of a search. Raises UsageError where nothing of it can be read."""
    path, text = Path(target), str(target)
    reader = Reader(str(path))
    if "://" in text or path.suffix in STORAGES:
        reader.read_storage(text, study_name)
    elif path.is_dir() or path.name in FILES:
        reader.read_folder(path if path.is_dir() else path.parent)
    elif not path.exists():
        raise UsageError(f"{path} does not exist.", _WAY_OUT)
    elif path.suffix == ".json":
        reader.found = read_result(path)
    else:
        reader.records = reader.read_file(path)
        of = {f"{record.model.title} on {record.device.title}" for record in reader.records}
        if len(of) > 1:
            named = ", ".join(sorted(of)[:3])
            raise UsageError(
                f"{path} holds records of {len(of)} models or devices ({named} …).",
                "A run is of one: name the folder that 'planner tune' wrote.",
            )
    if reader.found or reader.records:
        return reader.run()
    why = "\n".join(reader.faults)
    raise UsageError(why or f"{path} holds no search: no {TUNE_RESULT}, no probes.", _WAY_OUT)


@dataclass
class Reader:
    """Reads one thing after the other and keeps what was wrong with them."""

    place: str
    found: Recommendation | None = None
    records: tuple[MeasurementRecord, ...] = ()
    tuners: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def run(self) -> Run:
        found, records = self.found, self.records
        if found and not records and (records := cited(found)):
            self.faults.append(
                f"{TUNE_PROBES} was not read: only the {len(records)} probes that the "
                "recommendation cites are shown."
            )
        mixture = describe_mixture(records) if records else None
        run = Run(
            self.place, found, records, found.evidence if found else None, interval_of, self.place,
            search_again(found, self.place),
            (*self.faults, *([mixture] if mixture else [])),
            self.tuners, frozenset(r.probe_id for r in records if is_disturbed(r)),
        )  # fmt: skip
        ran = contenders(records, run.budget_bytes)
        if run.best is None and ran:
            run = replace(run, best=choose(ran).evidence)
        is_within = partial(is_feasible, budget_bytes=run.budget_bytes)
        return replace(run, studies=studies_of(records, is_within)) if records else run

    def read_folder(self, folder: Path) -> None:
        self.place = str(folder)
        if (folder / TUNE_RESULT).exists():
            self.found = self._tried(lambda: read_result(folder / TUNE_RESULT), None)
        self.records = self.read_file(folder / TUNE_PROBES)

    def read_storage(self, storage: str, study_name: str | None) -> None:
        from search.loop.storage import hidden_password

        path = Path(storage.removeprefix(_SQLITE))
        if "://" not in str(storage.removeprefix(_SQLITE)):
            if not path.exists():  # Optuna would make it
                raise UsageError(f"{path} does not exist.", _WAY_OUT)
            storage = f"{_SQLITE}{path}" if path.suffix == ".db" else storage
        self.place = hidden_password(storage)
        self.read_study(storage, study_name)

    def read_file(self, path: Path) -> tuple[MeasurementRecord, ...]:
        """The records of a file up to its first fault."""
        file = self._tried(lambda: read_records(path), None)
        if file is not None and file.fault:
            self.faults.append(f"{file.fault}; what stands before it was read.")
        return file.records if file is not None else ()

    def read_study(self, storage: str, name: str | None) -> None:
        """What only its study knows: who made a probe, and probes that the file lacks."""
        kept: list[tuple[int, dict[str, str]]] = self._tried(
            lambda: trials_of(storage, name), [], "The study was not read: "
        )
        known = {record.probe_id for record in self.records if record.probe_id}
        holders: dict[str, str] = {}
        for number, attributes in kept:
            try:
                record = parse_record(attributes["record"])
            except ValueError as error:
                self.faults.append(f"trial {number} of the study is not a record: {error}")
                continue
            if record.probe_id not in known:
                self.records = (*self.records, record)
            if holder := attributes.get("tuner"):
                holders[record.probe_id] = str(holder)
        order = {holder: n for n, holder in enumerate(dict.fromkeys(holders.values()), start=1)}
        self.tuners = {
            probe_id: f"tuner {order[holder]} ({holder})" for probe_id, holder in holders.items()
        }

    def _tried(self, read: Callable[[], T], otherwise: T, said: str = "") -> T:
        try:
            return read()
        except PlannerError as error:
            self.faults.append(f"{said}{error.message}")
            return otherwise


def trials_of(storage: str, name: str | None) -> list[tuple[int, dict[str, str]]]:
    """(number, attributes) of a study's ended probes, in the order they were begun. Raises
    StudyError where it cannot be opened, UsageError where several are there and none was named."""
    import optuna

    from search.loop.storage import StudyError, hidden_password, open_storage, storage_faults
    from search.loop.study import RECORD

    source = hidden_password(storage)
    opened = open_storage(storage, source)
    with storage_faults(source):
        names = optuna.get_all_study_names(opened)
        wanted = name or (names[0] if len(names) == 1 else "")
        listed = ", ".join(names[:5]) or "none"
        if wanted not in names:
            if name is None and names:
                raise UsageError(f"{source} holds {len(names)} studies.",
                                 f"Name one with --study-name: {listed}.")  # fmt: skip
            raise StudyError(f"{source} has no study {wanted!r}.", f"There are: {listed}.")
        trials = optuna.load_study(study_name=wanted, storage=opened).get_trials(deepcopy=False)
    ended = (t for t in trials if t.state.is_finished() and t.user_attrs.get(RECORD))
    return [(t.number, t.user_attrs) for t in sorted(ended, key=lambda t: t.number)]


def describe_mixture(records: Sequence[MeasurementRecord]) -> str | None:
    """In what the models, devices and software of records differ, as one sentence; None where all
    are of one environment."""
    from search.loop.study import Identity

    first, *others = map(Identity.of, records)
    found = dict.fromkeys(line for other in others for line in other.differences(first))
    if not found:
        return None
    more = f"; and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    named = "; ".join([*found][:MOST_NAMED])
    return f"These records are of several environments: {named}{more}."


def search_again(found: Recommendation | None, place: str) -> str:
    """The command that goes on; "" where no result keeps what was asked, or a name does not say the
    model."""
    if found is None:
        return ""
    try:
        asked = read_options(found.asked or {})
    except UsageError:
        return ""
    model = found.model
    if isinstance(model, SwinConfig):
        named = find_library(model.library).find(model.name or "")
        if named != model:  # another Swin of the same name
            return ""
    asked = replace(asked, output=asked.output or Path(place))
    return tune_command(model.title, asked, model_flags(model))


def _is_result(path: Path) -> bool:
    """Whether a JSON file is a recommendation."""
    if path.name == TUNE_RESULT:
        return True
    try:
        data = parse_json(read_text(path, MAX_RESULT_BYTES), str(path))
    except UsageError:
        return False
    return isinstance(data, dict) and "num_probes" in data


def studies_of(
    records: Sequence[MeasurementRecord], is_within: Callable[[MeasurementRecord], bool]
) -> tuple[Study, Study]:
    """By images/s, and by memory in GiB and images/s. The parameters are the axes that were varied;
    what measured no value has failed, and what is not within the budget breaks a constraint."""
    import optuna
    from optuna.trial import TrialState, create_trial

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    axes = apart_fields([record.setting for record in records])
    names = {axis: "batch" if axis == "batch_size" else axis.replace("_", " ") for axis in axes}
    known = {names[axis]: _distribution(records, axis) for axis in axes}
    alone = optuna.create_study(directions=["maximize"])
    both = optuna.create_study(directions=["minimize", "maximize"])
    for study in (alone, both):  # Optuna counts from 0, our tables from 1
        study.add_trial(create_trial(state=TrialState.FAIL))
    for record in records:
        size = record.used_bytes and record.used_bytes / GIB
        rate = record.images_per_second
        for study, values in ((alone, (rate,)), (both, (size, rate))):
            ran = record.status == "measured" and None not in values
            study.add_trial(
                create_trial(
                    state=TrialState.COMPLETE if ran else TrialState.FAIL,
                    values=[v for v in values if v is not None] if ran else None,
                    params={names[axis]: _value(record, axis) for axis in axes},
                    distributions=known,
                    constraints={"budget": float(not is_within(record))},
                )
            )
    return alone, both


def _distribution(records: Sequence[MeasurementRecord], axis: str) -> Any:
    from optuna.distributions import CategoricalDistribution, IntDistribution

    values = [_value(record, axis) for record in records]
    if all(type(value) is int for value in values):
        return IntDistribution(min(values), max(values), log=axis == "batch_size")
    return CategoricalDistribution(sorted(set(values), key=str))


def _value(record: MeasurementRecord, axis: str) -> Any:
    """What a parameter of a study may be: other values as texts."""
    value = getattr(record.setting, axis)
    return value if isinstance(value, str | int | float | None) else str(value)
