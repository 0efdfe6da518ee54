"""Communication beside computing, by arithmetic: a link of round figures, ledgers made by hand.

The link moves 1 GB/s of bus bandwidth between two ranks and takes no time to start, so that an
all-reduce of 1e6 bytes between two ranks (factor 1) takes a millisecond. The device is that of
`test_prediction`: 1e6 bytes take it a millisecond too.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.core.schema import TrainSetting
from planner.core.schema.setting import Group
from planner.ledger.ledger import Awaited, Computed, Event, Ledger, PhaseEnded, Sent
from planner.machine.hardware.fabric import Curve, Fabric, Link
from planner.throughput.prediction import predict_step
from planner.throughput.result import COLLECTIVE_WAIT, HOST_WAIT, Throughput
from planner.throughput.timeline import Exchanges, group_layout
from tests.throughput.test_prediction import DEVICE, MS, moving, slow_host

ROUND = Link(
    "round", "", "nvlink", 0.0, (Curve("all_reduce", 2, ((1, 1e-9), (10**9, 1.0))),), (), ()
)
TWO = TrainSetting(precision="fp32", batch_size=8, world_size=2, parallelism="ddp")
NO_CONTENTION = 1.0


def send(handle: int, num_bytes: float, follows: bool = True, group: Group = "world") -> Sent:
    return Sent(handle, "all_reduce", int(num_bytes), "float32", group, follows)


def work(num_bytes: float, path: str = "") -> Computed:
    return moving(num_bytes)._replace(path=path)


def ledger(*steady: Event) -> Ledger:
    """A first step that does nothing, then `steady`."""
    return Ledger((PhaseEnded("zero_grad", 0), *steady, PhaseEnded("zero_grad", 1)), 8, 0)


def predict(
    made: Ledger,
    setting: TrainSetting = TWO,
    contention: float = NO_CONTENTION,
    spread: float = 0.0,
    **rates: object,
) -> Throughput:
    link = replace(ROUND, spread=spread)
    exchanges = Exchanges(made.exchanges(), Fabric(link, link), contention)
    device = replace(DEVICE, **rates)  # type: ignore[arg-type]
    recorded = min(setting.accumulate, 2)
    return predict_step(made.operations(), device, setting, recorded, exchanges)


def buckets(*sizes: float) -> list[Event]:
    """Backward of 2 ms for each bucket, sent as it is full; all are awaited at the end."""
    events: list[Event] = [work(1e6), PhaseEnded("forward", 1)]
    for handle, size in enumerate(sizes):
        events += [work(2e6), send(handle, size)]
    events += [Awaited(handle) for handle in range(len(sizes))]
    return [*events, PhaseEnded("backward", 1)]


def test_all_but_the_last_bucket_hide_behind_backward() -> None:
    """1 ms forward, three times 2 ms backward; buckets of 1 ms: the last one is exposed."""
    took = predict(ledger(*buckets(1e6, 1e6, 1e6)))
    assert took.step_seconds == pytest.approx(8 * MS)
    assert took.kind_seconds[COLLECTIVE_WAIT] == pytest.approx(1 * MS)
    assert took.phase_seconds["backward"] == pytest.approx(7 * MS)
    communication = took.communication
    assert communication.exposed_seconds == pytest.approx(1 * MS)
    assert communication.seconds == pytest.approx(3 * MS)
    assert communication.sent_bytes == 3_000_000
    assert communication.alone_seconds == pytest.approx(7 * MS)


def test_collectives_of_one_communicator_queue() -> None:
    """Buckets of 5 ms, ready after 3, 5 and 7 ms: the last one ends at 3 + 15."""
    assert predict(ledger(*buckets(5e6, 5e6, 5e6))).step_seconds == pytest.approx(18 * MS)


def gathers(num: int, gather: float, compute: float) -> list[Event]:
    """Units whose weights are gathered one ahead of their computing."""
    events: list[Event] = [send(0, gather, follows=False)]
    for unit in range(num):
        if unit + 1 < num:
            events.append(send(unit + 1, gather, follows=False))
        events += [Awaited(unit), work(compute)]
    return [*events, PhaseEnded("forward", 1)]


def test_weights_are_gathered_while_the_unit_before_computes() -> None:
    """The host is ahead by a step: gathers take turns with nothing to wait for but each other."""
    slow_link = predict(ledger(*gathers(4, 3e6, 1e6)))
    assert slow_link.step_seconds == pytest.approx(12 * MS)
    slow_device = predict(ledger(*gathers(4, 1e6, 3e6)))
    assert slow_device.step_seconds == pytest.approx(12 * MS)
    assert COLLECTIVE_WAIT not in slow_device.kind_seconds


def test_weights_are_gathered_no_more_than_two_units_ahead() -> None:
    """Gathers of 4 ms, the first unit computes for 10. The second and third gather hide behind it;
    the fourth waits until the second unit has its weights (14 ms), and is there at 18."""
    events: list[Event] = []
    for unit, compute in enumerate((10e6, 1e6, 1e6, 1e6)):
        ahead = Sent(unit, "all_reduce", 4_000_000, "float32", "world", unit == 0)
        events += [ahead, Awaited(unit), work(compute)]
    took = predict(ledger(*events, PhaseEnded("forward", 1)))
    assert took.step_seconds == pytest.approx(19 * MS)
    assert took.kind_seconds[COLLECTIVE_WAIT] == pytest.approx(6 * MS)


def test_a_host_that_is_late_sends_late() -> None:
    """Each operation takes the host 4 ms: a gather is sent as late as what needs it."""
    took = predict(ledger(*gathers(2, 1e6, 1e6)), host_seconds=slow_host(4 * MS).host_seconds)
    assert took.step_seconds == pytest.approx(8 * MS)
    assert took.kind_seconds[HOST_WAIT] > 5 * MS


def test_computing_and_communicating_slow_each_other_down() -> None:
    """2 ms of backward beside a bucket of 1 ms: 1.25 ms for the first millisecond of both."""
    took = predict(ledger(*buckets(1e6, 0.001e6)), contention=1.25)
    assert took.step_seconds == pytest.approx((1 + 2 + 1.25 + 1 + 0.001) * MS)


def test_groups_have_communicators_of_their_own() -> None:
    """Two collectives at once over two groups, one after the other over one. Two copies share the
    network of a machine, and so take as long for half as much."""
    setting = TWO.model_copy(update={"parallelism": "hsdp", "world_size": 4, "nodes": 2})

    def seconds(first: Group, second: Group, num_bytes: float) -> float:
        events = [work(1e6), send(0, 2e6, group=first), send(1, num_bytes, group=second),
                  Awaited(0), Awaited(1), PhaseEnded("backward", 1)]  # fmt: skip
        return predict(ledger(*events), setting).step_seconds

    assert seconds("shard", "replicate", 1e6) == pytest.approx(3 * MS)
    assert seconds("shard", "shard", 2e6) == pytest.approx(5 * MS)


@pytest.mark.parametrize("accumulate", [2, 3, 8])
def test_without_sync_only_the_last_micro_batch_sends(accumulate: int) -> None:
    """Of 3 ms each, and 1 ms exposed at the end."""
    setting = TWO.model_copy(update={"accumulate": accumulate})
    quiet = [work(1e6), PhaseEnded("forward", 1), work(2e6), PhaseEnded("backward", 1)]
    took = predict(ledger(*quiet, *buckets(1e6)), setting)
    assert took.step_seconds == pytest.approx((3 * accumulate + 1) * MS)
    assert took.communication.sent_bytes == 1_000_000
    every = predict(ledger(*buckets(1e6), *buckets(1e6)), setting)
    assert every.step_seconds == pytest.approx(4 * accumulate * MS)
    assert every.communication.sent_bytes == accumulate * 1_000_000


def test_a_compiled_region_sends_as_it_returns() -> None:
    """Compiled as a whole, backward hands over all gradients at its end."""
    made = ledger(*buckets(1e6, 1e6, 1e6))
    compiled = TWO.model_copy(update={"compile": "default"})
    assert predict(made, compiled).kind_seconds[COLLECTIVE_WAIT] == pytest.approx(3 * MS)


def test_blocks_that_are_compiled_send_between_them() -> None:
    events = [work(1e6, "blocks.1"), PhaseEnded("forward", 1)]
    for handle, block in enumerate(("blocks.1", "blocks.0")):
        events += [work(1e6, block), send(handle, 1e6), work(1e6, block)]
    events += [Awaited(0), Awaited(1), PhaseEnded("backward", 1)]
    setting = TWO.model_copy(update={"compile": "default", "compile_scope": "blocks"})
    took = predict(ledger(*events), setting, region_seconds=0.0)
    assert took.kind_seconds[COLLECTIVE_WAIT] == pytest.approx(1 * MS)


def test_the_range_is_that_of_the_link() -> None:
    """A bucket of 1 ms that may take 1.5: a step of 4 ms may take 4.5."""
    took = predict(ledger(*buckets(1e6)), spread=0.5)
    assert took.uncertainty == pytest.approx(DEVICE.uncertainty_of(TWO, {}) + 0.5 / 4)
    assert took.communication.high_seconds == pytest.approx(4.5 * MS)
    assert took.communication.low_seconds == pytest.approx((3 + 1 / 1.5) * MS)


SIZES = st.lists(st.integers(0, 10**7), min_size=1, max_size=6)


@given(SIZES, st.floats(1.0, 1.5))
def test_a_step_takes_what_it_computes_and_what_is_exposed(sizes: list[int], slower: float) -> None:
    """No less than computing or communicating needs, no more than both after each other, slowed."""
    took = predict(ledger(*buckets(*sizes)), contention=slower)
    sending = sum(sizes) * 1e-9
    computing = (1 + 2 * len(sizes)) * MS
    assert took.step_seconds >= max(computing, sending) - 1e-9
    assert took.step_seconds <= slower * (computing + sending) + 1e-9
    assert took.step_seconds == pytest.approx(sum(part.seconds for part in took.parts))


def test_groups_lie_in_machines_one_after_the_other() -> None:
    eight = TrainSetting(world_size=16, nodes=2, parallelism="hsdp")
    assert group_layout(eight, "world") == (16, 2, 1)
    assert group_layout(eight, "shard") == (8, 1, 1)
    assert group_layout(eight, "replicate") == (2, 2, 8)
    plain = TrainSetting(world_size=16, nodes=2, parallelism="ddp")
    assert group_layout(plain, "replicate") == group_layout(plain, "shard") == (16, 2, 1)
    whole = TrainSetting(world_size=16, nodes=2, parallelism="fsdp")
    assert group_layout(whole, "shard") == (16, 2, 1)
