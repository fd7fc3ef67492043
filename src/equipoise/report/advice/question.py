"""What is asked: everything that advice rests on."""

from collections.abc import Callable
from dataclasses import dataclass

from equipoise.balancer.formats.arrangement import Arrangement
from equipoise.balancer.formats.statistics import Statistics
from equipoise.report.advice.expert import Expert
from equipoise.report.advice.hardware import Hardware
from equipoise.report.advice.roofline import Roofline

Told = Callable[[str], None]
"""Hears what is planned next."""


def unheard(what: str) -> None:
    """Nobody hears of it."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """Recorded load, and where it is to be served.

    Attributes:
        statistics: what was recorded.
        ranks: that serve.
        slots: of a layer; None to be advised.
        installed: what runs now; None for experts in their order on consecutive ranks.
        target: imbalance, max/mean - 1 of the ranks, that is good enough.
        step_rows: rows of a layer in a step, over all ranks; None: a window is a step.
        expert: what an expert weighs; None where unknown.
        hardware: of a rank; None where unknown.
        link: that weights come over, a name of `hardware.LINKS`.
        latency: seconds from token to token; None where there is no aim.
        memory_share: part of a rank's memory that experts may take.
        moe_share: part of the latency that experts may take.
    """

    statistics: Statistics
    ranks: int
    slots: int | None = None
    installed: Arrangement | None = None
    target: float = 0.02
    step_rows: int | None = None
    expert: Expert | None = None
    hardware: Hardware | None = None
    link: str = "node"
    latency: float | None = None
    memory_share: float = 0.8
    moe_share: float = 0.5

    @property
    def roofline(self) -> Roofline | None:
        """Where the hardware and what an expert weighs are known."""
        if self.expert is None or self.hardware is None:
            return None
        return Roofline(self.expert, self.hardware)
