"""Reading a machine: tools that fail or hang, files of another root, and what is kept as JSON."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from planner.core.errors import PlannerError
from planner.machine import doctor
from planner.machine.facts import cpus_of, gather_facts
from planner.machine.machine import (
    DriverAnswer,
    DriverFigures,
    load_machine,
)
from planner.machine.reading.files import (
    as_cpu_list,
    read_device_files,
    read_kernel_module,
    read_numa_nodes,
    read_pci,
)
from planner.machine.reading.here import read_machine
from planner.machine.reading.tools import ask_tool
from planner.machine.smi import parse_smi
from tests.environment.recorded import FOLDER, NAMES, recorded


def tool(folder: Path, name: str, script: str) -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_tool_answers_fails_hangs_or_is_missing(tmp_path: Path) -> None:
    good = ask_tool((tool(tmp_path, "good", "echo out; echo err >&2; exit 3"), "-q"))
    assert (good.text, good.status, good.error) == ("out\nerr\n", 3, "")
    late = ask_tool((tool(tmp_path, "late", "echo begun; exec sleep 60"),), deadline_seconds=0.5)
    assert (late.status, late.error) == (None, "it did not answer within 0.5 s")
    assert ask_tool(("no-such-tool-here",)).is_missing
    (tmp_path / "plain").write_text("")
    assert "cannot be run" in ask_tool((str(tmp_path / "plain"),)).error
    binary = ask_tool((tool(tmp_path, "binary", r"printf '\377\376ok'"),))
    assert binary.text.endswith("ok")


def test_the_kernels_files(tmp_path: Path) -> None:
    port = tmp_path / "sys/devices/pci0000:00/0000:00:01.0"
    card = port / "0000:01:00.0"
    other = tmp_path / "sys/devices/pci0000:00/0000:00:02.0"
    for folder, files in (
        (port, {"max_link_width": "16", "max_link_speed": "16.0 GT/s PCIe"}),
        (card, {"vendor": "0x10de", "class": "0x030000", "numa_node": "1",
                "current_link_width": "4", "max_link_width": "16"}),
        (other, {"vendor": "0x8086", "class": "0x020000"}),
    ):  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text + "\n")
    listed = tmp_path / "sys/bus/pci/devices"
    listed.mkdir(parents=True)
    (listed / card.name).symlink_to(card)
    (listed / other.name).symlink_to(other)
    (found,) = read_pci(tmp_path).items()
    assert found[0] == "0000:01:00.0"
    assert (found[1].numa_node, found[1].width, found[1].port_max_width) == (1, 4, 16)
    for node, cpus in (("node0", "0-3"), ("node1", "4-7")):
        (tmp_path / "sys/devices/system/node" / node).mkdir(parents=True)
        (tmp_path / "sys/devices/system/node" / node / "cpulist").write_text(cpus + "\n")
    assert read_numa_nodes(tmp_path) == {"0": "0-3", "1": "4-7"}
    (tmp_path / "dev").mkdir()
    for name in ("nvidiactl", "nvidia0", "null"):
        (tmp_path / "dev" / name).write_text("")
    assert read_device_files(tmp_path) == ("nvidia0", "nvidiactl")
    assert read_kernel_module(tmp_path) == ""


@pytest.mark.parametrize("cpus", [[], [0], [0, 1, 2], [0, 2, 3, 9]])
def test_lists_of_cpus_are_read_as_they_are_written(cpus: list[int]) -> None:
    assert cpus_of(as_cpu_list(cpus)) == frozenset(cpus)
    assert as_cpu_list([0, 1, 2, 8]) == "0-2,8"


@pytest.mark.parametrize(
    "text",
    ["", "no xml", "<nvidia_smi_log>", "<nvidia_smi_log><gpu></nvidia_smi_log>", "\x00\xff"],
)
def test_what_is_no_whole_log_is_none(text: str) -> None:
    assert parse_smi(text) is None


def test_a_log_without_anything_in_it() -> None:
    log = parse_smi("WARNING: x\n<nvidia_smi_log><gpu/></nvidia_smi_log>")
    assert log is not None
    assert (log.driver, log.warnings, len(log.cards)) == ("", ("WARNING: x",), 1)
    assert (log.cards[0].link.width, log.cards[0].persistence) == (None, None)


def test_a_machine_is_kept_whole(tmp_path: Path) -> None:
    for name in NAMES:
        machine = recorded(name)
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(doctor.check_machine(machine).to_json()))
        assert load_machine(path) == replace(machine, source=machine.source or str(path))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"machine": {"format": 9}}', "[" * 100000])
def test_what_is_no_machine_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(PlannerError, match=r"a\.json"):
        load_machine(tmp_path / "a.json")


def test_nvidia_smi_tells_more_of_cards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from planner.machine.reading import here

    monkeypatch.setattr(here, "ask_torch", lambda _: recorded("a100").torch)
    monkeypatch.setattr(here, "import_errors", lambda *_: {})
    figures = {"GPU-513536b6-0000-0000-0000-1e69664bb298": DriverFigures(temperature=40)}
    told = DriverAnswer(recorded("a100").gpus, figures)
    monkeypatch.setattr(here, "ask_driver", lambda: told)
    tool(tmp_path, "nvidia-smi", f"""case "$1" in
-q) exec cat {FOLDER / 'a100' / 'smi.xml'};;
topo) exec cat {FOLDER / 'h100-pair' / 'topology.txt'};; esac""")  # fmt: skip
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    machine = read_machine({}, tmp_path)
    assert (machine.gpus_from, machine.figures) == ("NVML", {})
    facts = gather_facts(machine)
    assert [card.smi is not None for card in facts.cards] == [True]
    assert (facts.driver, facts.driver_cuda) == ("580.95.05", "13.0")
    assert facts.pairs == {(0, 1): "NV18"}
