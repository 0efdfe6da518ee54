"""What the study of a search knows beside its records: who made which probe."""

from __future__ import annotations

import json
from dataclasses import dataclass

from planner.core.errors import UsageError
from planner.core.schema import MeasurementRecord
from search.loop.study.records import parse_record
from search.loop.study.storage import StudyError, hidden_password, open_storage, storage_faults
from search.loop.study.study import STUDY_NAME


@dataclass(frozen=True)
class KeptStudy:
    """The probes of a study in the order they were leased; `tuners` by the probe's id."""

    records: tuple[MeasurementRecord, ...]
    tuners: dict[str, str]
    faults: tuple[str, ...] = ()


def read_study(storage: str, name: str | None = None) -> KeptStudy:
    """A study of this planner's. Raises StudyError where it cannot be opened, UsageError where
    several are there and none was named."""
    import optuna
    from optuna.trial import TrialState

    source = hidden_password(storage)
    opened = open_storage(storage, source)
    with storage_faults(source):
        names = optuna.get_all_study_names(opened)
        chosen = _chosen(names, name, source)
        study = optuna.load_study(study_name=chosen, storage=opened)
        trials = sorted(study.get_trials(deepcopy=False), key=lambda t: t.number)
    records: list[MeasurementRecord] = []
    holders: dict[str, str] = {}
    faults = []
    for trial in trials:
        text = trial.user_attrs.get("record")
        if trial.state != TrialState.COMPLETE or not text:
            continue
        try:
            records.append(parse_record(text))
        except ValueError as error:
            faults.append(f"{source}: trial {trial.number} is not a record: {error}")
            continue
        holder = trial.user_attrs.get("holder")
        if holder:
            holders[str(trial.user_attrs.get("probe_id"))] = str(holder)
    return KeptStudy(tuple(records), _named(holders), tuple(faults))


def _chosen(names: list[str], name: str | None, source: str) -> str:
    """The study that is meant: the one that was named, the usual one, or the only one."""
    if name is not None or STUDY_NAME in names:
        wanted = name or STUDY_NAME
        if wanted not in names:
            listed = ", ".join(names[:5]) or "none"
            raise StudyError(f"{source} has no study {wanted!r}.", f"There are: {listed}.")
        return wanted
    if len(names) == 1:
        return names[0]
    if not names:
        raise StudyError(f"{source} holds no study.")
    raise UsageError(
        f"{source} holds {len(names)} studies.",
        f"Name one with --study-name: {', '.join(names[:5])}.",
    )


def _named(holders: dict[str, str]) -> dict[str, str]:
    """Each probe's tuner as a person would tell them apart: `tuner 1 (host, process 123)`."""
    order = {holder: n for n, holder in enumerate(dict.fromkeys(holders.values()), start=1)}
    return {
        probe_id: f"tuner {order[holder]}{_place(holder)}" for probe_id, holder in holders.items()
    }


def _place(holder: str) -> str:
    try:
        host, _, pid, *_ = json.loads(holder)
    except (ValueError, TypeError):
        return ""
    return f" ({host}, process {pid})"
