"""What crosses between the parent and the ranks of a world that times its collectives."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from planner.core.schema.link import LinkPoint
from planner.machine.links.plan import LinkPlan
from search.probe.protocol import AnyOutcome, Order, PhaseMessage, Request


class LinkRequest(Request):
    plan: LinkPlan


class LinkOrder(Order):
    request: LinkRequest


class LinkOutcome(AnyOutcome):
    """How a rank ended; the points and the versions are the same on all that measured."""

    status: Literal["measured", "out_of_memory", "timed_out", "crashed"]
    points: tuple[LinkPoint, ...] = ()
    versions: dict[str, str] = Field(default_factory=dict)


ANSWERS: TypeAdapter[PhaseMessage | LinkOutcome] = TypeAdapter(
    Annotated[PhaseMessage | LinkOutcome, Field(discriminator="type")]
)
