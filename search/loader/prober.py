"""Probes of real loaders, as a session asks for them."""

from __future__ import annotations

from typing import Any

from planner.core.schema.loading import DataSource, LoaderRecord, LoaderSetting
from search.loader.probing import loader_server, probe_loader
from search.loop.prober import show_steps
from search.loop.progress import OnProgress
from search.loop.space import Space
from search.loop.strategies.strategy import Choice
from search.probe.parent.fork_server import ForkServer


class LoaderProber:
    """Runs one probe in a process of its own, forked from one that has imported the libraries."""

    def __init__(
        self, source: DataSource, device: str, space: Space[LoaderSetting],
        on_progress: OnProgress[LoaderSetting, LoaderRecord] = lambda progress: None,
        **timing: Any,
    ) -> None:  # fmt: skip
        self.source, self.device = source, device
        self.on_progress, self.timing = on_progress, timing
        self.pipelines = tuple(dict.fromkeys(str(c.setting.pipeline) for c in space.candidates))
        self.server: ForkServer | None = None

    def __enter__(self) -> LoaderProber:
        self.server = loader_server(self.pipelines)
        return self

    def __exit__(self, *_: object) -> None:
        if self.server is not None:
            self.server.close()
            self.server = None

    def __call__(
        self, choice: Choice[LoaderSetting], probe_id: str, deadline_seconds: float
    ) -> LoaderRecord:
        return probe_loader(
            self.source,
            choice.candidate.setting,
            deadline_seconds=deadline_seconds,
            device=self.device,
            on_progress=show_steps(self.on_progress),
            fork_server=self.server,
            **self.timing,
        )
