"""One stage's loop: the same steps whoever hands the activations over."""

import time

from emulated_device import now
from handover import Batch, Handover, Station
from pipeline_compute import Compute
from token_return import TokenReturn


class Stage(Compute):
    """Serves one run.

    Args:
        station: where.
        handover: how activations come and go.
        tokens: how sampled tokens return.
    """

    def __init__(self, station: Station, handover: Handover, tokens: TokenReturn) -> None:
        super().__init__(station)
        self.messages = handover.messages
        self._handover = handover
        self._tokens = tokens

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
        self._compute_on(batch, received.read)
        received.release()

    def _send(self, batch: Batch) -> None:
        output = self._handover.outgoing(batch)
        self._beside(lambda: self._stamp(output, batch))
        self._handover.send(batch, output)
