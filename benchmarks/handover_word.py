"""A yardstick, no contestant: a word travels in place of the activations.

It keeps the order of stages, and its receives are posted ahead: so it is what remains when bytes
cost nothing, on this link and under what the benchmark itself costs. A receiver finds the stamps
that it has written itself; only the word's own number is looked at.
"""

from collections import deque

import torch
from handover import Activations, Batch, Station
from handover_blocking import There
from stamps import stamp
from torch import Tensor
from wire import Handle


class Expected:
    """A word that was posted ahead. See `Received`.

    Args:
        handle: of its message.
        word: int64 [1].
        step: that it should hold.
        there: what stands for the activations.
    """

    def __init__(self, handle: Handle, word: Tensor, step: int, there: There) -> None:
        self._handle = handle
        self._word = word
        self._step = step
        self._there = there

    def read(self) -> Activations:
        """See `Received`. Raises `RuntimeError` where it is another step's word."""
        self._handle.result()
        if int(self._word.item()) != self._step:
            raise RuntimeError(f"step {self._step} has the word of step {int(self._word.item())}")
        return self._there.read()

    def release(self) -> None:
        """Nothing is held."""


class Word:
    """See `Handover`."""

    messages = 1

    def __init__(self, station: Station) -> None:
        self._station = station
        self._wire = station.wires.open("word")
        self._tensors = Activations.empty(station.most, station.hidden)
        self._posted: deque[tuple[Handle, Tensor]] = deque()
        self._sent: deque[Handle] = deque()

    def begin(self, batch: Batch) -> None:
        """Nothing is waited for but the oldest word of many."""
        if len(self._sent) == self._station.in_flight:
            self._sent.popleft().result()

    def receive(self, batch: Batch) -> Expected:
        """The oldest of the words that were posted, and post one more."""
        while len(self._posted) <= self._ahead(batch):
            self._post()
        handle, word = self._posted.popleft()
        taken = self._tensors.first(batch.rows)
        for which, tensor in enumerate(taken):
            stamp(tensor, batch.step, self._station.rank - 1, which)
        return Expected(handle, word, batch.step, There(taken))

    def _ahead(self, batch: Batch) -> int:
        return min(self._station.in_flight, batch.left)

    def _post(self) -> None:
        word = torch.zeros(1, dtype=torch.int64)
        self._posted.append((self._wire.irecv(word, self._station.rank - 1), word))

    def outgoing(self, batch: Batch) -> Activations:
        """What nobody will see."""
        return self._tensors.first(batch.rows)

    def send(self, batch: Batch, output: Activations) -> None:
        """The step's number."""
        word = torch.tensor([batch.step], dtype=torch.int64)
        self._sent.append(self._wire.isend(word, self._station.rank + 1))

    def drain(self) -> None:
        """See `Handover`."""
        while self._sent:
            self._sent.popleft().result()
