"""What the doctor reads of cards, from a stand-in for the driver's library."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.machine import nvml
from planner.machine.doctor import Card, Facts, read_cards
from planner.machine.findings import judge
from tests.environment.recorded import recorded

pytestmark = pytest.mark.usefixtures("driver")


def read(monkeypatch: pytest.MonkeyPatch, words: str) -> tuple[Card, ...]:
    monkeypatch.setenv("FAKE_NVML", words)
    return read_cards()


def names(cards: tuple[Card, ...]) -> list[str]:
    facts: Facts = replace(recorded("h200"), cards=cards)
    return sorted({finding.name for finding in judge(facts)})


def test_a_card_that_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = read(monkeypatch, "none used=0")
    assert (first.recovery, first.ecc_errors, first.no_p2p) == ("", 0, {})
    assert (first.lanes, first.max_lanes, second.nvlinks_up, second.nvlinks_down) == (8, 16, 4, 0)
    assert (first.watts, first.default_watts, first.sm_mhz) == (500, 700, 1500)
    assert first.reasons == ("sw_power_cap", "hw_thermal_slowdown")
    assert names((first, second)) == ["card.power-limit", "card.throttled", "link.pcie"]


def test_a_card_that_is_sick(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = read(monkeypatch, "sick right used=6442450944")
    assert (first.recovery, first.ecc_errors, first.ecc_changes) == ("a reset", 3, True)
    assert (first.reset_pending, first.remap_failed, first.nvlinks_down) == (True, True, 1)
    assert first.no_p2p == {1: "the chipset does not support it"}
    assert len(first.holders) == 2
    found = {"card.reset", "card.busy", "link.no-p2p", "link.nvlink-down"}
    assert found <= set(names((first, second)))


@pytest.mark.parametrize(("words", "instances"), [("mig", 2), ("none", None)])
def test_instances(monkeypatch: pytest.MonkeyPatch, words: str, instances: int | None) -> None:
    assert read(monkeypatch, words)[0].instances == instances


def test_a_card_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    (card,) = read(monkeypatch, "lost")
    assert card.gpu.name == "Fake A"
    assert nvml.why_silent() == "GPU 1: GPU is lost"
    monkeypatch.setenv("FAKE_NVML", "")
    assert nvml.why_silent() == ""
