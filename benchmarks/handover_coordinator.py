"""The group coordinator's pattern of today's engines, written again from its description.

A step's message is: the length of the metadata, the metadata (a pickled list of names, dtypes and
shapes), then one message a tensor. The host of the receiver blocks until the metadata are there,
makes fresh tensors, and begins to receive into them; whoever first reads them waits. The sender
waits for its sends at the top of its next step, since vLLM pull request 54962: without that wait
the next forward wrote over what was still being sent.

Pickle is what is measured here, so it is used, here and nowhere else.
"""

import pickle
from collections.abc import Sequence

import torch
from handover import Activations, Batch, Station
from torch import Tensor
from wire import Handle

Described = list[tuple[str, torch.dtype, torch.Size]]


class Arriving:
    """Activations whose handles are waited for by whoever reads first. See `Received`."""

    def __init__(self, tensors: dict[str, Tensor], handles: Sequence[Handle]) -> None:
        self._tensors = tensors
        self._handles = list(handles)

    def read(self) -> Activations:
        """See `Received`."""
        while self._handles:
            self._handles[0].result()
            self._handles.pop(0)
        return Activations(self._tensors["hidden_states"], self._tensors["residual"])

    def release(self) -> None:
        """They go when nobody refers to them any more."""


class Coordinator:
    """See `Handover`."""

    messages = 4

    def __init__(self, station: Station) -> None:
        self._rank = station.rank
        self._told = station.wires.open("coordinator, metadata")
        self._wire = station.wires.open("coordinator")
        self._out = Activations.empty(station.most, station.hidden)
        self._sent: list[Handle] = []

    def begin(self, batch: Batch) -> None:
        """Wait for the sends of the step before: the forward writes to their tensors again."""
        self.drain()

    def receive(self, batch: Batch) -> Arriving:
        """Blocks for the metadata; the activations come later."""
        source = self._rank - 1
        tensors = {
            name: torch.empty(shape, dtype=dtype) for name, dtype, shape in self._described(source)
        }
        return Arriving(tensors, [self._wire.irecv(t, source) for t in tensors.values()])

    def _described(self, source: int) -> Described:
        length = torch.empty(1, dtype=torch.int64)
        self._told.irecv(length, source).result()
        content = torch.empty(int(length.item()), dtype=torch.uint8)
        self._told.irecv(content, source).result()
        described: Described = pickle.loads(content.numpy().tobytes())
        return described

    def outgoing(self, batch: Batch) -> Activations:
        """The forward's own output, the same tensors in every step."""
        return self._out.first(batch.rows)

    def send(self, batch: Batch, output: Activations) -> None:
        """Begins all messages of the step."""
        tensors = {"hidden_states": output.hidden, "residual": output.residual}
        described: Described = [(name, t.dtype, t.shape) for name, t in tensors.items()]
        content = torch.frombuffer(bytearray(pickle.dumps(described)), dtype=torch.uint8)
        length = torch.tensor([content.numel()], dtype=torch.int64)
        target = self._rank + 1
        self._sent += [self._told.isend(part, target) for part in (length, content)]
        self._sent += [self._wire.isend(tensor, target) for tensor in tensors.values()]

    def drain(self) -> None:
        """See `Handover`."""
        while self._sent:
            self._sent[0].result()
            self._sent.pop(0)
