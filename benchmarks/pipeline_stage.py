"""One stage's loop: the same steps whoever hands the activations over."""

import time
from collections.abc import Callable

from emulated_device import Clock, now
from handover import Activations, Batch, Handover, Station
from pipeline_emulation import PREPARE
from stamps import stamp, wrong
from token_return import TokenReturn


class Stage:
    """Serves one run.

    Compute is a timed wait, and the system wakes a thread some 60 microseconds late, which a device
    does not. So the clock of compute advances by what it is asked for, and by what the thread does
    or waits for between two waits; not by how late it was woken, nor by stamps, nor by what the
    host does to send tokens back.

    Args:
        station: where.
        handover: how activations come and go.
        tokens: how sampled tokens return.
    """

    def __init__(self, station: Station, handover: Handover, tokens: TokenReturn) -> None:
        self._station = station
        self._handover = handover
        self._tokens = tokens
        self._clock = Clock()
        self._woken = 0.0
        self.began: list[float] = []
        self.ended: list[float] = []
        self.wrong = 0
        self.cpu = 0.0

    def run(self, batches: list[Batch]) -> None:
        """Every micro-batch, in order, until all has arrived everywhere."""
        spent = time.process_time()
        self._clock.free = self._woken = now()
        for batch in batches:
            self._step(batch)
        self._handover.drain()
        self.wrong += self._tokens.drain()
        self.cpu = time.process_time() - spent

    def _step(self, batch: Batch) -> None:
        self._handover.begin(batch)
        self.wrong += self._tokens.take()
        self._beside(lambda: self._tokens.expect(batch))
        self.began.append(now())
        if self._station.is_first:
            self._spend(batch.seconds)
        else:
            self._compute_on_what_comes(batch)
        self.ended.append(now())
        if self._station.is_last:
            self._beside(lambda: self._tokens.deliver(batch))
        else:
            self._send(batch)

    def _compute_on_what_comes(self, batch: Batch) -> None:
        received = self._handover.receive(batch)
        self._spend(PREPARE * batch.seconds)
        taken = received.read()
        self._beside(lambda: self._look(taken, batch))
        self._spend((1.0 - PREPARE) * batch.seconds)
        received.release()

    def _send(self, batch: Batch) -> None:
        output = self._handover.outgoing(batch)
        self._beside(lambda: self._stamp(output, batch))
        self._handover.send(batch, output)

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
