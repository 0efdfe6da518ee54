"""Pretended machines at one study, and what they have done."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from planner.core.schema.record import Recommendation
from search.loop.records import read_records

NUM_SETTINGS = 8
# Torch's own allocator is named: else each tuner probes its winner once more, with it.
OPTIONS = (
    "--precision fp32,bf16 --checkpointing none --compile off --attention sdpa "
    "--optimizer adamw --batch-size 8,16,32,64 --tolerance 0% --budget none "
    "--allocator expandable_segments:False"
)
MODULE = "tests.search.machines.elsewhere"
PATIENCE_SECONDS = 240.0  # of a busy machine: no test depends on how much of it is used


class Park:
    """A folder in which machines put what they find, each in a folder of its own name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.begun_file = folder / "begun"
        self.begun_file.touch()
        self.running: list[subprocess.Popen[str]] = []

    def start(self, command: list[str], **variables: str) -> subprocess.Popen[str]:
        pretended = {"PRETEND_OPTIONS": OPTIONS, "PRETEND_BEGUN": str(self.begun_file)}
        started = subprocess.Popen(
            command, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **pretended, **variables},
        )  # fmt: skip
        self.running.append(started)
        return started

    def tune(self, host: str, storage: str) -> subprocess.Popen[str]:
        command = [
            sys.executable, "-m", MODULE, "tune", "native:swin_tiny", "--storage", storage,
            "--output", str(self.folder / host),
        ]  # fmt: skip
        return self.start(command, PRETEND_HOST=host, PYTHONPATH=os.pathsep.join(sys.path))

    def close(self) -> None:
        for started in self.running:
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGKILL)
            started.communicate()

    def begun(self) -> list[list[str]]:
        """Host and setting of each probe that was begun."""
        return [line.split(" ", 1) for line in self.begun_file.read_text().splitlines()]

    def check_agreement(self, *hosts: str) -> None:
        """Each setting was probed once; all machines have all probes and recommend the same."""
        settings = [setting for _, setting in self.begun()]
        assert len(settings) == len(set(settings)) == NUM_SETTINGS
        found = [
            Recommendation.model_validate_json(
                (self.folder / host / "recommendation.json").read_text()
            )
            for host in hosts
        ]
        for other in found:
            assert other.evidence == found[0].evidence
            assert other.runners_up == found[0].runners_up
            assert other.num_probes == NUM_SETTINGS
        for host in hosts:
            file = read_records(self.folder / host / "probes.jsonl")
            assert (len({r.probe_id for r in file.records}), file.fault) == (NUM_SETTINGS, "")


def finish(started: subprocess.Popen[str]) -> None:
    out, _ = started.communicate(timeout=PATIENCE_SECONDS)
    assert started.returncode == 0, out
