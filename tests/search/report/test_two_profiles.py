"""One setting profiled in two environments: what is concluded, and what is not."""

from __future__ import annotations

from typing import Any

import pytest

from planner.core.errors import UsageError
from planner.core.schema.profile import ProfiledPart, ProfileRecord
from planner.core.units import MIB
from search.probe.evidence import OTHERS_RAN
from search.report.two_profiles import compare_profiles, two_profiles_text
from tests.search.report.test_side_by_side import record

GPU = record(64).device
STEPS = [1.0 + 0.001 * (n % 5) for n in range(30)]


def profiled(times: float = 1.0, steps: int = 30, **more: Any) -> ProfileRecord:
    samples = tuple(times * s for s in STEPS[:steps])
    probe = record(64, step_seconds=samples, **more)
    parts = (
        ProfiledPart(phase="forward", kind="matmul", measured_seconds=0.6 * times),
        ProfiledPart(phase="backward", kind="copy", measured_seconds=0.4),
    )
    return ProfileRecord(
        probe=probe, num_steps=3, step_seconds=samples[0], profiled_step_seconds=1.0, overhead=1.0,
        parts=parts, top=(),
    )  # fmt: skip


def test_how_much_longer_is_said_with_its_interval_and_where() -> None:
    found = compare_profiles(profiled(), profiled(1.5, peak_allocated_bytes=999 * MIB))
    assert found.low < 1.5 < found.high < 1.55
    assert found.kinds[0][0] == "matmul"
    text = two_profiles_text(found)
    assert text.startswith("The second's step takes 1.5 times the first's (between 1.4")
    assert "999.00 MiB" in text
    assert "100%" in text


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (profiled(1.003), "No difference that these steps show."),
        (profiled(2.0, steps=4), "Not known which is faster: only 4 steps were timed."),
        (profiled(2.0, flags=(f"{OTHERS_RAN} 2 of 4 processors busy",)), "Not known which is"),
        (profiled(2.0, flags=("slow to start", "drifted by 9%")), "Not known which is faster: dr"),
        (
            profiled(2.0, device=GPU.model_copy(update={"emulated": True})),
            "Not known which is faster: an emulated GPU's times are predicted, not measured.",
        ),
    ],
)
def test_nothing_is_concluded_from_what_shows_nothing(second: ProfileRecord, said: str) -> None:
    assert two_profiles_text(compare_profiles(profiled(), second)).startswith(said)


def test_another_setting_is_refused_by_name() -> None:
    other = profiled()
    setting = other.probe.setting.model_copy(update={"batch_size": 32})
    changed = other.model_copy(
        update={"probe": other.probe.model_copy(update={"setting": setting})}
    )
    with pytest.raises(UsageError, match="batch_size: 64 and 32"):
        compare_profiles(profiled(), changed)
