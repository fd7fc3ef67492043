"""A stage's emulated compute, the same for every loop, and when it began and ended."""

from collections.abc import Callable

from emulated_device import Clock, now
from handover import Activations, Batch, Station
from pipeline_emulation import PREPARE
from stamps import stamp, wrong


class Compute:
    """Timed waits, by one thread.

    The system wakes a thread some 60 microseconds late, which a device does not. So the clock of
    compute advances by what it is asked for, and by what the thread does or waits for between two
    waits; not by how late it was woken, nor by stamps, nor by what the host does to send tokens
    back.

    Args:
        station: where.

    Attributes:
        began, ended: instants of every micro-batch.
        wrong: words that were not what they should be.
        cpu: seconds of the processor.
    """

    def __init__(self, station: Station) -> None:
        self._station = station
        self._clock = Clock()
        self._woken = 0.0
        self.began: list[float] = []
        self.ended: list[float] = []
        self.wrong = 0
        self.cpu = 0.0

    def _compute_on(self, batch: Batch, read: Callable[[], Activations]) -> None:
        """The host's preparation, the wait for activations, and what is computed on them."""
        self._spend(PREPARE * batch.seconds)
        taken = read()
        self._beside(lambda: self._look(taken, batch))
        self._spend((1.0 - PREPARE) * batch.seconds)

    def _look(self, taken: Activations, batch: Batch) -> None:
        for which, tensor in enumerate(taken):
            self.wrong += wrong(tensor, batch.step, self._station.rank - 1, which)

    def _stamp(self, output: Activations, batch: Batch) -> None:
        for which, tensor in enumerate(output):
            stamp(tensor, batch.step, self._station.rank, which)

    def _beside(self, work: Callable[[], None]) -> None:
        """What takes place within the time of compute: it is the same for all, and not judged."""
        began = now()
        work()
        self._woken += now() - began

    def _spend(self, seconds: float) -> None:
        """Compute: a timed wait, behind whatever the host did or waited for since the last one."""
        self._clock.free += now() - self._woken
        self._clock.spend(seconds)
        self._woken = now()
