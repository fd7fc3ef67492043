"""A communicator on which one message fares badly."""

from typing import Any

import torch
from exploration.channel.case import Fault
from torch import Tensor

from equipoise.hal.communicator import Communicator
from equipoise.hal.work import Work


class Meddling:
    """Sends as the communicator does, but for one message.

    Args:
        communicator: over which everything else goes.
        fault: what happens to the message.
        at: how many go before it.
    """

    def __init__(self, communicator: Communicator, fault: Fault, at: int) -> None:
        self._communicator = communicator
        self._fault = fault
        self._at = at
        self._send_count = 0
        self._previous: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._communicator, name)

    def isend(self, tensor: Tensor, destination: int) -> Work:
        number, self._send_count = self._send_count, self._send_count + 1
        previous, self._previous = self._previous, tensor.clone()
        if number != self._at:
            return self._communicator.isend(tensor, destination)
        if self._fault is Fault.LOST:
            return Vanished()
        if self._fault is Fault.GARBLED:
            tensor.view(torch.uint8)[17] ^= 4
        if (
            self._fault is Fault.AGAIN
            and previous is not None
            and previous.numel() == tensor.numel()
        ):
            return self._communicator.isend(previous, destination)
        return self._communicator.isend(tensor, destination)


class Vanished:
    """Handle of a message that is dropped: it seems to be sent."""

    def done(self) -> bool:
        return True

    def wait(self, stream: object) -> None:
        pass

    def result(self, timeout: float) -> None:
        pass

    def cancel(self) -> None:
        pass
