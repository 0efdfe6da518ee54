"""Several pretended machines at one study, and what they have done."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from planner.core.schema.result import Recommendation
from search.loop.study.records import read_records

SPACE = (
    "--precision fp32,bf16 --checkpointing none,blocks --compile off --attention sdpa "
    "--optimizer adamw --batch-size 8,16,512"
)
NUM_SETTINGS = 12
# Torch's own allocator is named: else each tuner probes its winner once more, with it.
OPTIONS = f"{SPACE} --strategy exhaustive --no-baseline --allocator expandable_segments:False"
MODULE = "tests.search.machines.elsewhere"
PATIENCE_SECONDS = 240.0  # of a busy machine: no test depends on how much of it is used


class Park:
    """A folder with one study (a journal on its disk, unless another storage is named), in which
    machines put what they find, each in a folder of its own name."""

    def __init__(self, folder: Path, storage: str | None = None) -> None:
        self.folder = folder
        self.storage = storage or str(folder / "study.journal")
        self.begun_file = folder / "begun"
        self.begun_file.touch()
        self.running: list[subprocess.Popen[str]] = []

    def environment(self, options: str = OPTIONS, **pretended: object) -> dict[str, str]:
        fields = {f"PRETEND_{name.upper()}": str(value) for name, value in pretended.items()}
        return {
            **os.environ, "OMP_NUM_THREADS": "1", "PRETEND_OPTIONS": options,
            "PRETEND_BEGUN": str(self.begun_file), **fields,
        }  # fmt: skip

    def start(
        self, host: str, *arguments: str, options: str = OPTIONS, **pretended: object
    ) -> subprocess.Popen[str]:
        output = str(self.folder / host)
        tuner = subprocess.Popen(
            [sys.executable, "-m", MODULE, "tune", "native:swin_tiny", "--storage", self.storage,
             "--output", output, *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env=self.environment(options, host=host, **pretended),
        )  # fmt: skip
        self.running.append(tuner)
        return tuner

    def close(self) -> None:
        for tuner in self.running:
            if tuner.poll() is None:
                os.killpg(tuner.pid, signal.SIGKILL)
            tuner.communicate()

    def begun(self) -> list[tuple[str, str]]:
        """Host and setting of each probe that was begun."""
        lines = self.begun_file.read_text().splitlines()
        return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines]

    def times_begun(self) -> Counter[str]:
        return Counter(setting for _, setting in self.begun())

    def wait_for(self, num: int) -> None:
        """Until so many probes were begun."""
        patience = time.monotonic() + PATIENCE_SECONDS
        while len(self.begun()) < num:
            ended = [t for t in self.running if t.poll() not in (None, 0, -signal.SIGKILL)]
            assert not ended, ended[0].communicate()[0]
            assert time.monotonic() < patience, "nothing is begun"
            time.sleep(0.02)

    def found(self, host: str) -> Recommendation:
        text = (self.folder / host / "recommendation.json").read_text()
        return Recommendation.model_validate_json(text)

    def recorded(self, host: str) -> set[str]:
        file = read_records(self.folder / host / "probes.jsonl")
        assert file.fault == ""
        return {record.probe_id for record in file.records}

    def check_agreement(self, *hosts: str) -> Recommendation:
        """All machines recommend the same from the same probes, and have all of these."""
        first, *others = [self.found(host) for host in hosts]
        for other in others:
            assert other.setting == first.setting
            assert other.evidence == first.evidence
            assert other.runners_up == first.runners_up
            assert other.num_probes == first.num_probes
        known = [self.recorded(host) for host in hosts]
        assert all(ids == known[0] for ids in known)
        assert len(known[0]) == first.num_probes
        return first


def finish(tuner: subprocess.Popen[str], status: int = 0) -> str:
    out, _ = tuner.communicate(timeout=PATIENCE_SECONDS)
    assert tuner.returncode == status, out
    return out
