"""What is served in a run: micro-batches of one size, or requests."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Protocol

from handover import Batch, scheduled
from pipeline_emulation import WARM, Point, count, message_bytes
from pipeline_requests import Serving


class Work(Protocol):
    """What a run serves; every stage works it out for itself."""

    @property
    def name(self) -> str:
        """For tables."""
        ...

    @property
    def hidden(self) -> int:
        """Elements of a row."""
        ...

    @property
    def gauged(self) -> int:
        """Rows of the message that compute is measured by."""
        ...

    def fields(self) -> dict[str, Any]:
        """For JSON; `work_of` makes it again."""
        ...

    def batches(self, seconds: Mapping[int, float], in_flight: int) -> list[Batch]:
        """Every micro-batch, in order; `seconds` of a transfer by bytes."""
        ...


class Steady:
    """Micro-batches of one size."""

    def __init__(self, point: Point) -> None:
        self.point = point
        self.name = point.name
        self.hidden = point.hidden
        self.gauged = point.tokens

    def fields(self) -> dict[str, Any]:
        """See `Work`."""
        return {"kind": "steady", **asdict(self.point)}

    def batches(self, seconds: Mapping[int, float], in_flight: int) -> list[Batch]:
        """See `Work`."""
        compute = self.point.compute(seconds[message_bytes(self.hidden, self.gauged)])
        steps = WARM + in_flight + count(compute)
        batches = [Batch(n, self.point.tokens, compute, steps - 1 - n) for n in range(steps)]
        return scheduled(batches, in_flight)


def work_of(fields: Mapping[str, Any]) -> Work:
    """The work that such fields describe."""
    given = {name: value for name, value in fields.items() if name != "kind"}
    return Steady(Point(**given)) if fields["kind"] == "steady" else Serving(**given)
