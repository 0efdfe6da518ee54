"""Dated results of a benchmark: where it ran, with what, and what it found."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")


def write_results(name: str, packages: Sequence[str], found: Mapping[str, Any]) -> Path:
    """`results/NAME-DATE.json`: the machine, the versions of `packages`, and `found`."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{date.today()}.json"
    everything = {"date": str(date.today()), "device": describe_machine(packages), **found}
    path.write_text(json.dumps(everything, indent=1) + "\n")
    return path


def latest_results(name: str) -> dict[str, Any]:
    """The newest results of a benchmark. FileNotFoundError where there are none."""
    paths = sorted(RESULTS.glob(f"{name}-????-??-??.json"))
    if not paths:
        raise FileNotFoundError(f"no results/{name}-DATE.json: run the benchmark first")
    found: dict[str, Any] = json.loads(paths[-1].read_text())
    return found


def describe_machine(packages: Sequence[str]) -> dict[str, Any]:
    """The processor, how busy it was (processes waiting, one minute's average), and versions."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {"python": platform.python_version()} | {p: _version(p) for p in packages},
    }


def processor() -> str:
    """Its name where Linux says it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
