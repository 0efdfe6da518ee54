"""A study in an Optuna storage and a file of records: it survives anything, and tuners share it.

A probe goes through five states, each on disk before the next: *leased* (a running trial with a
lease), *received* (what its worker measured, in the trial's attributes), *recorded* (its line in
probes.jsonl), *told* (that record in the attributes), and *finished*. A tuner killed at any instant
leaves one of these, and `reconcile` completes it: what was received is recorded, what was recorded
is told, and what was only leased is free again once its holder is dead or its lease over.
"""

from __future__ import annotations

import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning, UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from planner.core.files import STUDY, TUNE_PROBES, to_json
from planner.core.schema import MeasurementRecord
from search.loop.space import Candidate, Space
from search.loop.study.clock import shared_clock
from search.loop.study.dashboard import (
    CONSTRAINTS,
    FOLDER,
    METRIC,
    artifact_attribute,
    shown,
    write_artifact,
)
from search.loop.study.identity import StudyIdentity
from search.loop.study.lease import Lease, holder_name, is_dead
from search.loop.study.params import SpaceParams, constraint
from search.loop.study.records import (
    RecordsNotWrittenError,
    append_records,
    format_record,
    parse_record,
    read_records,
)
from search.loop.study.storage import StudyError, hidden_password, open_storage, storage_faults
from search.loop.study.study import STUDY_NAME, refuse_replayed

IDENTITY = "planner:identity"
FOUNDER = "founder"  # of a trial that only asks to be the first of its study
LEASE_MARGIN_SECONDS = 60.0
MAX_SAMPLES = 1000  # of step times in the study's copy: a MySQL text column ends at 64 KiB


class OptunaStudy:
    """The shared memory of one or several tuners. All methods may raise StudyError."""

    def __init__(
        self, storage: BaseStorage, name: str, space: Space,
        records_path: Path, budget_bytes: int | None, source: str,
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.space = space
        self.records_path, self.budget_bytes = records_path, budget_bytes
        self.artifacts = records_path.with_name(FOLDER)
        self.source, self.clock = source, clock
        self.holder = holder_name()
        self.identity: StudyIdentity | None = None
        self.unwritten: list[MeasurementRecord] = []
        self.spilled: Path | None = None  # where they are instead
        self.storage = storage
        with self._faults():
            self.study = optuna.create_study(
                study_name=name, storage=storage, direction="maximize", load_if_exists=True
            )
            self.study_id = storage.get_study_id_from_name(name)
            known = {n: d for t in self._trials() for n, d in t.distributions.items()}
        self.params = SpaceParams(space, known)

    def adopt(self, identity: StudyIdentity, accept_different: bool = False) -> tuple[str, ...]:
        """Makes the study ours, or checks that it is. Returns what differs where that was accepted.

        Raises StudyError where model, device or a version is another and that was not accepted.
        """
        self.identity = None if accept_different else identity
        with self._faults():
            known = self.study.user_attrs.get(IDENTITY) or self._found(identity)
        differences = identity.differences(known)
        if differences and not accept_different:
            listed = "\n".join(f"  {d}" for d in differences)
            raise StudyError(
                f"{self.source} belongs to another {identity.of_what}:\n{listed}",
                "Choose another --output (or --study-name), or go on with --accept-different.",
            )
        return differences

    def _found(self, identity: StudyIdentity) -> dict[str, Any]:
        """The identity of a study that has none yet: ours, unless another tuner comes first at the
        same instant. Trial numbers, given out one at a time, say who did."""
        attributes = {FOUNDER: to_json(identity)}
        self.study.add_trial(
            optuna.create_trial(state=TrialState.FAIL, params={}, user_attrs=attributes)
        )
        asked = (t.user_attrs.get(FOUNDER) for t in self._trials())
        first: dict[str, Any] = next(known for known in asked if known)
        self.study.set_user_attr(IDENTITY, first)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            self.study.set_metric_names([METRIC])
        return first

    def take_over(self, identity: StudyIdentity, accept_different: bool = False) -> list[str]:
        """Makes the study ours and whole again; what is to be said of it. Raises as `adopt`."""
        differences = self.adopt(identity, accept_different)
        notes = [f"Accepted as different: {d}." for d in differences]
        return [*notes, *self.reconcile()]

    def records(self) -> tuple[MeasurementRecord, ...]:
        """Every probe that ended, by whichever tuner, in the order they were leased."""
        found = []
        with self._faults():
            trials = self._trials()
        for trial in trials:
            text = trial.user_attrs.get("record")
            if trial.state == TrialState.COMPLETE and text:
                found.append(parse_record(text))
        return tuple(found)

    def busy(self) -> set[str]:
        """Ids of settings that other tuners are probing now. What a lost one had received counts
        from here on, and what it had only leased is free."""
        found = set()
        with self._faults():
            for trial in self._trials():
                if trial.state == TrialState.RUNNING and self._alive(trial):
                    found.add(str(trial.user_attrs.get("setting_id")))
                elif trial.state == TrialState.RUNNING:
                    self._settle(trial, {})
        return found

    def lease(
        self, candidate: Candidate, seconds: float, repeat: int = 0,
        most: int | None = None,
    ) -> Lease | None:  # fmt: skip
        """The right to probe a candidate for so long; None where another tuner was first, or where
        `most` probes are made or begun in the whole study.

        `repeat` counts earlier probes of the same setting: only the same repeat is a conflict.
        """
        probe_id = uuid.uuid4().hex
        attributes = {
            "probe_id": probe_id,
            "setting_id": candidate.id,
            "setting": candidate.setting.model_dump_json(exclude_defaults=True),
            "repeat": repeat,
            "holder": self.holder,
            "lease_until": self.clock() + seconds + LEASE_MARGIN_SECONDS,
        }
        with self._faults():
            self.study.add_trial(self._trial(candidate, attributes, TrialState.RUNNING))
            trials = self._trials()
            mine = next(t for t in trials if t.user_attrs.get("probe_id") == probe_id)
            # Trial numbers are given out one at a time: the lowest was the first.
            earlier = [t for t in trials if t.number < mine.number]
            if any(self._contends(t, candidate.id, repeat) for t in earlier):
                self._release(mine, "another tuner leased it first")
                return None
            if most is not None and sum(self._counts(t) for t in earlier) >= most:
                self._release(mine, f"{most} probes were made or begun")
                return None
        return Lease(candidate, probe_id, mine.number)

    def _contends(self, trial: FrozenTrial, wanted: str, repeat: int) -> bool:
        if trial.user_attrs.get("setting_id") != wanted:
            return False
        if trial.user_attrs.get("repeat", 0) != repeat:
            return False
        return self._counts(trial)

    def _counts(self, trial: FrozenTrial) -> bool:
        """Whether a trial is a probe that ended, or that a tuner is at."""
        return trial.state == TrialState.COMPLETE or (
            trial.state == TrialState.RUNNING and self._alive(trial)
        )

    def receive(self, record: MeasurementRecord) -> None:
        """Keeps what a leased probe measured while its process still ends: a tuner killed in that
        moment has lost nothing. A fault of the storage is left for `finish` to report."""
        with suppress(StudyError), self._faults():
            for trial in self._trials():
                if trial.user_attrs.get("probe_id") == record.probe_id:
                    self._handle(trial).set_user_attr("record", _study_copy(record))

    def finish(self, lease: Lease, record: MeasurementRecord) -> None:
        """Puts the record of a leased probe on disk, then tells the study.

        Raises RecordsNotWrittenError when it could not be put on disk here; then it was written to
        the temporary directory, or lies in `unwritten`, and the message says which.
        """
        assert record.probe_id == lease.probe_id, "a session stamps its records"
        self._write(record)
        with self._faults():
            trial = self._find(lease.trial_number)
            if trial.state == TrialState.RUNNING:
                self._tell(trial, record)
                trial = self._find(lease.trial_number)
            if trial.state == TrialState.FAIL:  # another tuner freed it: its lease was over
                self._adopt_record(record)

    def release(self, lease: Lease, why: str) -> None:
        """Gives a lease back: its probe did not end. One that was received is finished instead."""
        with self._faults():
            trial = self._find(lease.trial_number)
        text = trial.user_attrs.get("record")
        if trial.state == TrialState.RUNNING and text:
            self.finish(lease, parse_record(text))
        elif trial.state == TrialState.RUNNING:
            with self._faults():
                self._release(trial, why)

    def save(self, records: Sequence[MeasurementRecord]) -> None:
        """Puts on disk what is not there yet."""
        append_records(self.records_path, records)

    def reconcile(self) -> list[str]:
        """Completes what a killed tuner left, from the file to the study and back.

        Returns what is to be said of the records file: where it is faulty, and how many of its
        records are of another model, device or software than was adopted, and so left alone.
        """
        file = read_records(self.records_path)
        by_id = {r.probe_id: r for r in file.records if r.probe_id}
        with self._faults():
            for trial in self._trials():
                if trial.state == TrialState.RUNNING:
                    self._settle(trial, by_id)
            trials = [t for t in self._trials() if t.state != TrialState.FAIL]
            known = {t.user_attrs.get("probe_id") for t in trials}
            fresh = [r for r in by_id.values() if r.probe_id not in known]
            ours = [r for r in fresh if self.identity is None or self.identity.has(r)]
            for record in ours:
                self._adopt_record(record)
        append_records(self.records_path, list(self.records()))
        said = []
        if file.fault:
            said.append(f"{file.fault}: read up to there, and the study has the rest.")
        if len(fresh) > len(ours):
            said.append(
                f"{len(fresh) - len(ours)} probes in {self.records_path} are of another "
                f"{self.identity.of_what if self.identity else ''}, and are left alone."
            )
        return said

    def _settle(self, trial: FrozenTrial, by_id: dict[str, MeasurementRecord]) -> None:
        """A running trial: tell what was recorded for it, or free it when its holder is gone."""
        record = by_id.get(str(trial.user_attrs.get("probe_id")))
        text = trial.user_attrs.get("record")
        if record is None and text:
            record = parse_record(text)
        alive = self._alive(trial)
        if record is not None and not (alive and trial.user_attrs.get("holder") != self.holder):
            self._tell(trial, record)
        elif not alive:
            self._release(trial, "its tuner stopped before the probe ended")

    def _adopt_record(self, record: MeasurementRecord) -> None:
        """A record the study never heard of: its database was lost, or another study's."""
        candidate = self.space.find(record.setting)
        if candidate is None:
            return
        attributes = {
            "probe_id": record.probe_id,
            "setting_id": candidate.id,
            "status": record.status,
            "record": _study_copy(record),
            **shown(record),
        }
        self.study.add_trial(self._trial(candidate, attributes, TrialState.COMPLETE, record))

    def _trial(
        self, candidate: Candidate, attributes: dict[str, Any], state: TrialState,
        record: MeasurementRecord | None = None,
    ) -> FrozenTrial:  # fmt: skip
        return optuna.create_trial(
            state=state,
            value=self._value(record) if record else None,
            params=self.params.of(candidate),
            distributions=self.params.distributions,
            user_attrs=attributes,
            system_attrs=self._for_dashboard(record) if record else None,
            constraints={"memory": constraint(record, self.budget_bytes)} if record else None,
        )

    def _for_dashboard(self, record: MeasurementRecord) -> dict[str, Any]:
        """System attributes that optuna-dashboard reads; the record's file is there before them."""
        found: dict[str, Any] = {CONSTRAINTS: [constraint(record, self.budget_bytes)]}
        if write_artifact(self.artifacts, record.probe_id, format_record(record)):
            found |= [artifact_attribute(record.probe_id, "record.json")]
        return found

    def attach(self, file: Path) -> None:
        """Lets optuna-dashboard show a file with the study, and lets it be where that fails."""
        with suppress(OSError, StudyError), self._faults():
            if write_artifact(self.artifacts, file.name, file.read_bytes()):
                attribute = artifact_attribute(file.name, file.name)
                self.storage.set_study_system_attr(self.study_id, *attribute)

    def _tell(self, trial: FrozenTrial, record: MeasurementRecord) -> None:
        """From running to finished, unless another tuner finishes it at the same instant. Each
        write may be the last: all can be repeated."""
        with suppress(UpdateFinishedTrialError):
            handle, number = self._handle(trial), self._id(trial)
            said = {"status": record.status, "record": _study_copy(record), **shown(record)}
            for name, value in said.items():
                if trial.user_attrs.get(name) != value:  # the record was received before
                    handle.set_user_attr(name, value)
            for name, value in self._for_dashboard(record).items():
                if trial.system_attrs.get(name) != value:
                    self.storage.set_trial_system_attr(number, name, value)
            if "memory" not in handle.constraints:
                handle.set_constraint("memory", constraint(record, self.budget_bytes))
            self.study.tell(trial.number, self._value(record), skip_if_finished=True)

    def _value(self, record: MeasurementRecord) -> float:
        """Images/s; the slowest measured for a probe that has none (its constraint is violated)."""
        if record.images_per_second is not None:
            return record.images_per_second
        values = [t.value for t in self._trials() if t.state == TrialState.COMPLETE]
        return min((v for v in values if v is not None), default=1.0)

    def _release(self, trial: FrozenTrial, why: str) -> None:
        with suppress(UpdateFinishedTrialError):
            self._handle(trial).set_user_attr("released", why)
            self.study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)

    def _write(self, record: MeasurementRecord) -> None:
        try:
            append_records(self.records_path, [record])
        except RecordsNotWrittenError as error:
            raise self._spilled(record, error) from error

    def _spilled(
        self, record: MeasurementRecord, error: RecordsNotWrittenError
    ) -> RecordsNotWrittenError:
        """The record in the temporary directory, where the output's disk is full."""
        self.unwritten.append(record)
        try:
            if self.spilled is None:  # a folder only we can read, of a name that nobody can foresee
                self.spilled = Path(tempfile.mkdtemp(prefix="planner-")) / self.records_path.name
            append_records(self.spilled, [record])
        except (OSError, RecordsNotWrittenError):
            line = format_record(record).decode().strip()
            return RecordsNotWrittenError(error.message, f"The record that was not kept:\n{line}")
        return RecordsNotWrittenError(
            error.message,
            f"The last record is in {self.spilled}: free space, append that line to "
            f"{self.records_path}, and run the same command to go on.",
        )

    def _alive(self, trial: FrozenTrial) -> bool:
        """Whether a running trial's tuner can still be at it."""
        until = trial.user_attrs.get("lease_until")
        if until is None or self.clock() > float(until):
            return False
        return not is_dead(str(trial.user_attrs.get("holder", "")))

    def _trials(self) -> Sequence[FrozenTrial]:
        found: Sequence[FrozenTrial] = self.study.get_trials(deepcopy=False)
        return sorted(found, key=lambda t: t.number)

    def _handle(self, trial: FrozenTrial) -> Trial:
        """What a trial is written by."""
        return Trial(self.study, self._id(trial))

    def _id(self, trial: FrozenTrial) -> int:
        number = trial.number
        return int(self.storage.get_trial_id_from_study_id_trial_number(self.study_id, number))

    def _find(self, number: int) -> FrozenTrial:
        return next(t for t in self._trials() if t.number == number)

    @contextmanager
    def _faults(self) -> Iterator[None]:
        with storage_faults(self.source):
            yield


def _study_copy(record: MeasurementRecord) -> str:
    """The record as the study keeps it: step times thinned evenly where there are very many."""
    samples = record.samples
    if len(samples) > MAX_SAMPLES:
        stride = len(samples) / MAX_SAMPLES
        thinned = tuple(samples[int(i * stride)] for i in range(MAX_SAMPLES))
        record = record.with_samples(thinned)
    return format_record(record).decode().strip()


def make_study(
    storage: str | None, output: Path, space: Space, budget_bytes: int | None,
    name: str = STUDY_NAME,
) -> OptunaStudy:  # fmt: skip
    """The study of a model's settings, beside probes.jsonl in `output`. Raises StudyError, and
    UsageError where that holds what a replay went through: they are not its own."""
    records_path = output / TUNE_PROBES
    refuse_replayed(read_records(records_path).records, records_path)
    return open_study(storage, space, records_path, budget_bytes, name)


def open_study(
    storage: str | None, space: Space, records_path: Path,
    budget_bytes: int | None = None, name: str = STUDY_NAME,
) -> OptunaStudy:  # fmt: skip
    """The study of `storage`, or of study.db beside its records. Raises StudyError."""
    if storage is None:
        source = str(records_path.with_name(STUDY))
        storage = f"sqlite:///{source}"
    else:
        source = hidden_password(storage)
    opened = open_storage(storage, source)
    with storage_faults(source):
        clock = shared_clock(opened, None if "://" in storage else Path(storage))
    return OptunaStudy(opened, name, space, records_path, budget_bytes, source, clock)
