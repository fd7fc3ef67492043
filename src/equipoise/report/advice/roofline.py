"""How long the experts of a layer take: the slowest rank, at the peak rates of its hardware."""

from dataclasses import dataclass

import numpy as np

from equipoise.balancer.formats.arrangement import Arrangement
from equipoise.balancer.formats.statistics import Statistics
from equipoise.report.advice.expert import Expert
from equipoise.report.advice.hardware import Hardware
from equipoise.report.spread import Reals, fitting_rows, parts


@dataclass(frozen=True)
class Roofline:
    """The roofline model (Williams, Waterman and Patterson, 2009) of a rank's experts.

    A rank takes the longer of two times: to read the weights of its active experts once, and to
    compute its rows. A slot with r rows a step in the mean is active with probability 1 - exp(-r).
    Activations, launches and the exchange are left out: no real layer is faster.
    """

    expert: Expert
    hardware: Hardware

    def seconds(self, rows: Reals, ranks: int) -> Reals:
        """(windows, ranks) from rows of slots in a step, (windows, slots)."""
        by_rank = rows.reshape(len(rows), ranks, -1)
        active = -np.expm1(-by_rank).sum(axis=2)
        reading = active * self.expert.size / self.hardware.bytes_per_second
        rate = self.hardware.operations_per_second(self.expert.precision)
        computing = by_rank.sum(axis=2) * self.expert.operations_per_row / rate
        longer: Reals = np.maximum(reading, computing)
        return longer

    def layers(self, statistics: Statistics, layout: Arrangement, scale: float) -> Reals:
        """(layers,): seconds of the slowest rank, mean over windows.

        `scale` is the rows of a step over those of a window.
        """
        part = parts(layout)
        found = []
        for place, row in enumerate(fitting_rows(statistics, layout)):
            rows = statistics.counts[:, place, layout.placement[row]] * part[row] * scale
            found.append(float(self.seconds(rows, layout.ranks).max(axis=1).mean()))
        return np.array(found)
