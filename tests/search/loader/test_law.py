"""The law of a loader's rate, and what is expected after probes of it."""

from __future__ import annotations

import numpy as np
import pytest

from planner.schema.loading import LoaderSetting
from search.loader.law import (
    Ceilings,
    Floats,
    ImageCost,
    expected_rate,
    image_cost,
    rate_with_workers,
    softest,
)
from search.loader.posterior import NOISE, Posterior, draw_unknowns, known_costs, noise_of
from search.loader.space import make_loader_space
from tests.search.loader.simulated import SOURCE, Machine, SimulatedProber


def array(value: float) -> Floats:
    return np.array([value])


def ceilings(processors: float, main: float = 1e9, disk: float = np.inf) -> Ceilings:
    return Ceilings(array(processors), array(main), array(disk), array(0.0), array(50.0))


def test_the_smallest_of_workers_processors_main_process_and_disk_is_the_rate() -> None:
    """10 ms an image: two workers give 200 images/s, eight what eight processors give: 800."""
    seconds = array(0.01)
    assert rate_with_workers(2, seconds, 8, ceilings(800))[0] == pytest.approx(200, rel=0.01)
    assert rate_with_workers(64, seconds, 8, ceilings(800))[0] == pytest.approx(800, rel=0.01)
    assert rate_with_workers(64, seconds, 8, ceilings(800, main=300))[0] == pytest.approx(300)
    assert rate_with_workers(64, seconds, 8, ceilings(800, disk=90))[0] == pytest.approx(90)


def test_limits_that_are_alike_give_less_than_either() -> None:
    both = softest((array(100.0), array(100.0)), array(4.0))[0]
    assert both == pytest.approx(100 / 2**0.25)
    assert softest((array(100.0), array(1e9)), array(4.0))[0] == pytest.approx(100)


def test_waiting_workers_are_worth_more_than_the_processors() -> None:
    """20 ms on the clock of which 5 ms need a processor: eight workers on two processors."""
    cost = ImageCost(seconds=0.02, cpu_seconds=0.005)
    setting = LoaderSetting(workers=8, pin_memory=False)
    assert expected_rate(setting, cost, 2) > 1.5 * expected_rate(
        setting.model_copy(update={"workers": 2}), cost, 2
    )


def test_the_cost_of_an_image_is_that_of_one_thread() -> None:
    """A main process with eight threads needs 2 ms on the clock and 12 ms of processors, part of
    which they wait for each other; the stages were timed with one thread, as a worker has."""
    setting = LoaderSetting(workers=0, pin_memory=False)
    record = SimulatedProber(Machine(8, {"torchvision": 0.01})).record(setting)
    record = record.model_copy(update={"images_per_second": 500.0, "cpu_seconds_per_image": 0.012})
    assert image_cost(record) == ImageCost(pytest.approx(0.0102), pytest.approx(0.0102))
    unknown = record.model_copy(update={"stage_seconds": {}})
    assert image_cost(unknown) == ImageCost(0.012, 0.012)


def test_a_probe_s_noise_is_read_off_its_parts() -> None:
    """A machine that others slow down for seconds: samples differ between the parts of a probe."""
    calm = SimulatedProber(Machine(8, {"torchvision": 0.01})).record(LoaderSetting(workers=4))
    even = calm.model_copy(update={"batch_seconds": (0.1,) * 40})
    drifting = calm.model_copy(
        update={"batch_seconds": (0.1,) * 10 + (0.14,) * 10 + (0.1,) * 10 + (0.14,) * 10}
    )
    assert noise_of([even]) == pytest.approx(NOISE)
    assert 0.06 < noise_of([drifting]) < 0.12
    assert noise_of([even, drifting]) < noise_of([drifting])
    assert noise_of([calm.model_copy(update={"batch_seconds": (0.1, 0.2)})]) == NOISE


def test_the_cost_is_known_of_workers_too() -> None:
    setting = LoaderSetting(workers=4, pin_memory=False)
    record = SimulatedProber(Machine(8, {"torchvision": 0.01})).record(setting)
    (cost,) = known_costs([record]).values()
    assert cost.cpu_seconds == pytest.approx(0.01, rel=0.05)


def test_each_probe_corrects_what_is_expected_of_the_rest() -> None:
    """Without a probe of workers a disk of 150 images/s is not known: with one it is."""
    machine = Machine(8, {"torchvision": 0.01}, disk_seconds=1 / 150, noise=0.0)
    space = make_loader_space(
        SOURCE, machine.host, 64, (224, 224), has_cuda=False, pipelines=["torchvision"]
    )
    unknowns, prober = draw_unknowns(len(space), 0), SimulatedProber(machine)
    settings = {(c.setting.workers, c.setting.prefetch_factor): c for c in space.candidates}
    records = [prober.record(settings[0, None].setting)]
    far = [i for i, c in enumerate(space.candidates) if c.setting.workers == 16]
    before = Posterior(space, 8, unknowns, records).expected()[far]
    records.append(prober.record(settings[6, 2].setting))
    after = Posterior(space, 8, unknowns, records).expected()[far]
    true = machine.rate(space.candidates[far[0]].setting)
    assert np.all(before > 2 * true)
    assert np.allclose(after, true, rtol=0.1)


def test_what_was_probed_is_known() -> None:
    machine = Machine(4, {"torchvision": 0.01}, noise=0.0)
    space = make_loader_space(
        SOURCE, machine.host, 64, (224, 224), has_cuda=False, pipelines=["torchvision"]
    )
    prober = SimulatedProber(machine)
    records = [prober.record(c.setting) for c in space.candidates]
    posterior = Posterior(space, 4, draw_unknowns(len(space), 0), records)
    rates = [r.images_per_second or 0.0 for r in records]
    assert np.allclose(posterior.expected(), rates, rtol=0.03)
    assert max(posterior.gains(max(rates))) < 0.02
