"""The study of a search: an Optuna study, filled from records, whose ended trials carry them.

The lines of the file of records are the truth. Without `--storage` the study is in memory and one
tuner holds the folder. In a storage several tuners share it: RUNNING trials are what the others are
probing, and heartbeats free the trials of a dead tuner.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial
from pydantic import BaseModel

from planner.core.errors import PlannerError, refuse_if, shorten
from planner.core.schema import DeviceInfo, MeasurementRecord, Model, parse
from search.loop.options import hidden_password
from search.loop.records import (
    RecordFile,
    RecordsNotWrittenError,
    append_records,
    format_record,
    parse_record,
    read_records,
)
from search.loop.space import Candidate, Space
from search.probe.evidence import is_feasible

IDENTITY = "identity"  # an attribute of the study
RECORD, UNTIL = "record", "until"  # attributes of its trials
MAX_SAMPLES = 1000  # of step times in the study's copy: a MySQL text column ends at 64 KiB
MARGIN_SECONDS = 60.0  # a trial may outlast its probe's deadline by so much
CHOOSING_SECONDS = 0.05  # between looks at whether another tuner has chosen
CREATION_SECONDS = 2.0  # another tuner may need so long to make its tables
HEARTBEAT_SECONDS, GRACE_SECONDS = 10, 60  # a tuner without a heartbeat for so long is dead


class SpaceParams:
    """A space as Optuna's parameters: `batch_size`, and each axis with more than one value.

    A categorical parameter keeps the values with which a study first had it. Where the study at
    hand has other values for an axis (`theirs`), the axis gets a name made of its own values.
    """

    def __init__(self, space: Space, theirs: Mapping[str, BaseDistribution] | None = None) -> None:
        self.space = space
        choices = {
            axis: CategoricalDistribution(values)
            for axis, values in space.choices.items()
            if len(values) > 1
        }
        self.axes = {_name(axis, ours, theirs or {}): axis for axis, ours in choices.items()}
        sizes = [c.setting.batch_size for c in space.candidates]
        self.distributions: dict[str, BaseDistribution] = {
            "batch_size": IntDistribution(min(sizes), max(sizes)),
            **{name: choices[axis] for name, axis in self.axes.items()},
        }
        self._candidates = {_key(self.of(c)): c for c in space.candidates}

    def of(self, c: Candidate) -> dict[str, Any]:
        """A candidate as parameters."""
        axes = {name: getattr(c.setting, axis) for name, axis in self.axes.items()}
        return {"batch_size": c.setting.batch_size, **axes}

    def candidate(self, params: Mapping[str, Any]) -> Candidate | None:
        """The candidate of parameters; None where the space lacks the combination."""
        return self._candidates.get(_key(params))

    def suggest(self, trial: Trial) -> Candidate | None:
        """The candidate of a trial, as the sampler or whoever enqueued the trial has chosen."""
        for name, distribution in self.distributions.items():
            if isinstance(distribution, CategoricalDistribution):
                trial.suggest_categorical(name, distribution.choices)
            elif isinstance(distribution, IntDistribution):
                trial.suggest_int(name, distribution.low, distribution.high)
        return self.candidate(trial.params)


def _name(axis: str, ours: CategoricalDistribution, theirs: Mapping[str, BaseDistribution]) -> str:
    if theirs.get(axis, ours) == ours:
        return axis
    return f"{axis} of {', '.join(map(str, ours.choices))}"


def _key(params: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(params.items()))


class StudyIdentity(BaseModel, frozen=True):
    """What all probes of a study have in common."""

    model: Model
    device: DeviceInfo
    versions: dict[str, str]

    def has(self, record: MeasurementRecord) -> bool:
        """Whether a record is of this model, device and software."""
        same = (record.model, record.versions) == (self.model, self.versions)
        return same and record.device.is_like(self.device)

    def differences(self, other: StudyIdentity) -> list[str]:
        """How this differs from `other`, a line for each field. Two readings of one card's memory
        are no difference, nor is another card of the same kind."""
        ours, theirs = self.model_dump(mode="json"), other.model_dump(mode="json")
        if other.device.is_like(self.device):
            ours["device"] = theirs["device"]
        ours["device"]["uuid"] = theirs["device"]["uuid"]
        if ours["model"].keys() != theirs["model"].keys():  # of different kinds
            ours["model"], theirs["model"] = ({"name": i.model.title} for i in (self, other))
        return [
            f"{part}.{field}: {theirs[part].get(field)} there, {ours[part].get(field)} here"
            for part in ("device", "model", "versions")
            for field in sorted({*ours[part], *theirs[part]})
            if theirs[part].get(field) != ours[part].get(field)
        ]

    @classmethod
    def of(cls, record: MeasurementRecord) -> StudyIdentity:
        return cls(model=record.model, device=record.device, versions=record.versions)


@dataclass
class ProbeStudy:
    """All probes of one model on one device: in an Optuna study, and in the file at `path` (None:
    only in the study). `is_shared`: other tuners may use it. The storage may raise StudyError,
    writing the file RecordsNotWrittenError."""

    space: Space
    path: Path | None = None
    budget_bytes: int | None = None
    storage: str | None = None
    name: str = "planner"
    _records: dict[int, MeasurementRecord] = field(default_factory=dict)

    def __post_init__(self) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.is_shared = self.storage is not None
        self.source = str(self.path) if self.storage is None else hidden_password(self.storage)
        opened = None if self.storage is None else open_storage(self.storage, self.source)
        with storage_faults(self.source):
            self.optuna_study = optuna.create_study(
                study_name=self.name, storage=opened, direction="maximize", load_if_exists=True
            )
            trials = self.optuna_study.get_trials(deepcopy=False)
        theirs = {name: d for t in trials for name, d in t.distributions.items()}
        self.params = SpaceParams(self.space, theirs)

    def take_over(self, identity: StudyIdentity, accept_different: bool = False) -> list[str]:
        """Makes the study this search's, adds the records of the file that it lacks, and returns
        notes. Raises StudyError where the model, the device or a version is another, unless that is
        accepted."""
        file = read_records(self.path) if self.path else RecordFile(())
        notes = [f"{file.fault}: read up to there."] if file.fault else []
        ours = [r for r in file.records if accept_different or identity.has(r)]
        others = [StudyIdentity.of(r) for r in file.records if not identity.has(r)]
        foreign = others[-1:] if accept_different or not ours else []
        with storage_faults(self.source):
            attribute = self.optuna_study.user_attrs.get(IDENTITY)
            if attribute is None:
                self.optuna_study.set_user_attr(IDENTITY, identity.model_dump(mode="json"))
            else:
                foreign.append(parse(StudyIdentity, attribute, f"the study {self.source}"))
        differences = dict.fromkeys(line for o in foreign for line in identity.differences(o))
        if differences and not accept_different:
            raise StudyError(
                f"{self.source} belongs to another model, device or software:\n  "
                + "\n  ".join(differences),
                "Choose another --output (or --storage), or go on with --accept-different.",
            )
        notes += [f"Accepted as different: {line}." for line in differences]
        if others and not accept_different:
            notes.append(
                f"{len(others)} probes in {self.path} are of another model, device or software, "
                "and are left alone."
            )
        self.fill(ours)
        return notes

    def fill(self, records: Iterable[MeasurementRecord]) -> None:
        """Adds the `records` that the study lacks, of settings in its space."""
        probe_ids = {record.probe_id for record in self.records()}
        with storage_faults(self.source):
            for record in records:
                candidate = self.space.find(record.setting)
                if candidate is not None and record.probe_id not in probe_ids:
                    rate = self._value(record)
                    trial = create_trial(  # as Optuna would have made it of the probe
                        state=TrialState.PRUNED if rate is None else TrialState.COMPLETE,
                        value=rate,
                        params=self.params.of(candidate),
                        distributions=self.params.distributions,
                        user_attrs={RECORD: _study_copy(record)},
                    )
                    self.optuna_study.add_trial(trial)

    def _value(self, record: MeasurementRecord) -> float | None:
        """The value of a trial: images/s; None where it failed, or took more than the budget."""
        return record.images_per_second if is_feasible(record, self.budget_bytes) else None

    def records(self) -> list[MeasurementRecord]:
        """The records of all tuners, in the order in which the probes began."""
        with storage_faults(self.source):
            trials = self.optuna_study.get_trials(deepcopy=False)
        for trial in trials:
            text = trial.user_attrs.get(RECORD)
            if text and trial.number not in self._records and trial.state.is_finished():
                self._records[trial.number] = parse_record(text)
        return [self._records[number] for number in sorted(self._records)]

    def keep(self, record: MeasurementRecord) -> None:
        """Appends a record to the file; it is on disk when this returns. Raises
        RecordsNotWrittenError."""
        if self.path is None:
            return
        try:
            append_records(self.path, [record])
        except RecordsNotWrittenError as error:
            line = format_record(record).decode().strip()
            way_out = f"{error.way_out} The record that was not kept:\n{line}"
            raise RecordsNotWrittenError(error.message, way_out) from error

    def tell(self, trial: Trial, record: MeasurementRecord) -> float:
        """The value of a trial whose probe ended. Raises TrialPruned where it has none."""
        trial.set_user_attr(RECORD, _study_copy(record))
        self._records[trial.number] = record
        rate = self._value(record)
        if rate is None:
            raise optuna.TrialPruned(record.status)
        return rate

    def save(self) -> None:
        """Appends the records of all tuners to the file."""
        if self.path is not None:
            append_records(self.path, self.records())

    def begin(self, trial: Trial, deadline_seconds: float, limit: int | None) -> bool:
        """Whether a trial may be probed. Of several tuners that chose one setting at once, the one
        whose trial has the lowest number may. The whole study has at most `limit` probes."""
        if not self.is_shared:
            return True
        until = time.time() + deadline_seconds + MARGIN_SECONDS
        trial.set_user_attr(UNTIL, until)
        while True:
            trials = self.optuna_study.get_trials(deepcopy=False)
            earlier = [t for t in trials if t.number < trial.number]
            running = [t for t in earlier if t.state == TrialState.RUNNING and self._is_alive(t)]
            if all(UNTIL in t.user_attrs for t in running):
                break
            time.sleep(CHOOSING_SECONDS)
        ended = [t for t in earlier if t.state.is_finished() and RECORD in t.user_attrs]
        others = [*running, *(t for t in ended if t.number not in self._records)]
        is_taken = any(t.params == trial.params for t in others)
        return not is_taken and (limit is None or len(running) + len(ended) < limit)

    def _is_alive(self, trial: FrozenTrial) -> bool:
        """Whether the tuner of a RUNNING trial may be alive: until its probe should have ended, by
        clocks that agree. The heartbeats of a database tell sooner, except of a tuner that was
        killed before its first."""
        begun = trial.datetime_start.timestamp() if trial.datetime_start else 0.0
        return time.time() < float(trial.user_attrs.get(UNTIL, begun + MARGIN_SECONDS))

    def busy(self) -> set[str]:
        """Ids of the settings that other tuners are probing now."""
        if not self.is_shared:
            return set()
        with storage_faults(self.source), warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            optuna.storages.fail_stale_trials(self.optuna_study)
            running = self.optuna_study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        candidates = (self.params.candidate(t.params) for t in running if self._is_alive(t))
        return {candidate.id for candidate in candidates if candidate is not None}


def _study_copy(record: MeasurementRecord) -> str:
    """A record as the study has it: very many step times are thinned evenly."""
    samples, stride = record.step_seconds, len(record.step_seconds) / MAX_SAMPLES
    if stride > 1:
        few = tuple(samples[int(i * stride)] for i in range(MAX_SAMPLES))
        record = record.model_copy(update={"step_seconds": few})
    return format_record(record).decode().strip()


# The storage: any of Optuna's, with errors that say what to do.


class StudyError(PlannerError):
    """The study cannot be opened, read or written, or it belongs to another model or device."""


@contextmanager
def storage_faults(source: str, *more: type[Exception]) -> Iterator[None]:
    """Turns the errors of Optuna and its databases, and `more`, into a StudyError."""
    from sqlalchemy.exc import SQLAlchemyError

    errors: tuple[type[Exception], ...] = (
        optuna.exceptions.OptunaError, SQLAlchemyError, OSError, json.JSONDecodeError, *more,
    )  # fmt: skip
    try:
        yield
    except errors as error:
        raise StudyError(
            f"{source} cannot be used: {_root_text(error)}.",
            "Mend that and run the same command: a study that is gone is made again from the "
            "probes in --output.",
        ) from error


def _root_text(error: BaseException) -> str:
    """The database driver's own words, without SQL and its parameters (and so no passwords)."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(getattr(error, "orig", None) or error).splitlines()
    return (lines or [type(error).__name__])[0].removesuffix(".")


def open_storage(storage: str, source: str) -> BaseStorage:
    """Any Optuna storage: a database URL, or the path of a journal file (`.journal`, `.log`).

    Raises StudyError where it cannot be reached or is not an Optuna study.
    """
    from sqlalchemy.exc import IntegrityError, OperationalError

    is_journal = storage.endswith((".journal", ".log"))
    refuse_if(
        not is_journal and "://" not in storage,
        f"--storage is a database URL or a journal file, and {shorten(storage)} is neither.",
        "Write sqlite:///study.db, postgresql://…, or a path that ends in .journal.",
    )
    with storage_faults(source, ImportError, ValueError, RuntimeError):
        if is_journal:
            return JournalStorage(JournalFileBackend(storage))
        try:
            return _database(storage)
        except (IntegrityError, OperationalError):
            # Two tuners make the tables at the same instant, which Optuna does not guard against.
            time.sleep(CREATION_SECONDS)
            return _database(storage)


def _database(storage: str) -> RDBStorage:
    """Tuners that share an SQLite file wait for each other instead of failing at once. A server, or
    a firewall on the way to it, may close a connection that no probe has used for long."""
    options: dict[str, Any] = {"pool_pre_ping": True}
    if storage.startswith("sqlite"):
        options = {"connect_args": {"timeout": 60}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)  # of heartbeats
        return RDBStorage(
            storage, options, heartbeat_interval=HEARTBEAT_SECONDS, grace_period=GRACE_SECONDS
        )
