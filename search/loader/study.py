"""What the probes of one study of loaders have in common: data, machine and software."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from planner.core.schema.loading import LOADER_FORMAT, DataSource, LoaderRecord
from planner.machine.host import Host
from search.loop.study.identity import differences_between

# What of a machine decides how fast it loads; what is free of it changes by the minute.
TELLING = (
    "num_cpus", "usable_cpus", "quota_cpus", "memory_limit_bytes", "shared_memory_bytes",
    "file_limit",
)  # fmt: skip


@dataclass(frozen=True)
class LoaderIdentity:
    """Any difference makes probes another study's. `processor` is its name."""

    data: DataSource
    host: Host
    processor: str
    versions: dict[str, str]

    @property
    def of_what(self) -> str:
        return "data set, machine or software"

    def to_json(self) -> dict[str, Any]:
        return {
            "format": LOADER_FORMAT,
            "data": telling_data(self.data),
            "host": self.telling_host(),
            "versions": dict(sorted(self.versions.items())),
        }

    def telling_host(self) -> dict[str, Any]:
        host = asdict(self.host)
        return {"processor": self.processor, **{name: host[name] for name in TELLING}}

    def differences(self, known: dict[str, Any]) -> tuple[str, ...]:
        return tuple(differences_between(known, self.to_json()))

    def has(self, record: LoaderRecord) -> bool:
        ours = self.telling_host()
        same_host = all(record.host.get(name) == value for name, value in ours.items())
        same_data = telling_data(record.data) == telling_data(self.data)
        return same_host and same_data and record.versions == self.versions

    def stamped(self, record: LoaderRecord) -> LoaderRecord:
        """The record as this study keeps it."""
        host = {**record.host, **self.telling_host()}
        update = {"data": self.data, "host": host, "versions": self.versions}
        return record.model_copy(update=update)


def telling_data(data: DataSource) -> dict[str, Any]:
    """What makes data others: where they lie, what kind they are, and their fingerprint."""
    return {"kind": data.kind, "location": data.location, "fingerprint": data.fingerprint}
