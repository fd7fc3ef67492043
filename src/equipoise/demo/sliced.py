"""Experts for ranks that hold the same rows."""

import torch
from torch import Tensor

from equipoise.demo.model import MoeLayer
from equipoise.hal.communicator import Communicator
from equipoise.hal.stream import Stream


class SlicedMoe:
    """A `MoeLayer` of which every rank of a group computes a slice of the rows; all get all.

    A row's result does not depend on its company, so it is the same to the bit.

    Args:
        inner: computes a slice.
        communicator: of the ranks that hold the same rows; used for nothing else.
        stream: whose programs call.
    """

    def __init__(self, inner: MoeLayer, communicator: Communicator, stream: Stream) -> None:
        self._inner = inner
        self._communicator = communicator
        self._stream = stream

    def __call__(self, layer: int, x: Tensor, expert_ids: Tensor, gates: Tensor) -> Tensor:
        """See `MoeLayer`."""
        parts, rows = self._communicator.size, x.shape[0]
        share = -(-rows // parts)
        first = min(self._communicator.rank * share, rows)
        own = slice(first, min(first + share, rows))
        computed = self._inner(layer, x[own], expert_ids[own], gates[own])
        padded = torch.cat((computed, computed.new_zeros(share - computed.shape[0], x.shape[1])))
        every = padded.new_empty(parts, share, x.shape[1])
        self._communicator.all_gather(every, padded).wait(self._stream)
        return every.flatten(0, 1)[:rows]
