"""Mutants of family *determinism*."""

from collections.abc import Sequence

import numpy as np
import torch
from conformance.mutants.mutant import Mutant
from conformance.mutants.subjects import network_with
from torch import Tensor

from equipoise.backends.virtual.arena import Bytes
from equipoise.backends.virtual.communicator import VirtualCommunicator
from equipoise.backends.virtual.network import Network
from equipoise.backends.virtual.transfer import SUM_DTYPES, Collective, Contribution
from equipoise.backends.virtual.work import VirtualWork

NARROWER: dict[torch.dtype, type[np.generic]] = {
    torch.float32: np.float16,
    torch.float64: np.float32,
}


class OwnPartFirst(Collective):
    """Each rank adds for itself, its own part first."""

    def addends(self, rank: int) -> Sequence[Contribution]:
        return [*self._shares[rank:], *self._shares[:rank]]


class InOrderOfArrival(Collective):
    """Adds the parts in the order in which the ranks have issued the operation."""

    def __init__(
        self, network: Network, ranks: tuple[int, ...], shares: Sequence[Contribution]
    ) -> None:
        super().__init__(network, ranks, shares)
        operations = list(network.pending)
        self._arrived = sorted(shares, key=lambda share: operations.index(share.native.operation))

    def addends(self, rank: int) -> Sequence[Contribution]:
        return self._arrived


def sum_as(shares: Sequence[Contribution], through: type[np.generic]) -> Bytes:
    """The sum of the contributions, computed in another dtype."""
    dtype = SUM_DTYPES[shares[0].dtype]
    total = np.sum([share.snapshot.view(dtype).astype(through) for share in shares], axis=0)
    summed_bytes: Bytes = total.astype(dtype).view(np.uint8)
    return summed_bytes


class CountsInDoubles(Collective):
    """Adds long integers as floating-point numbers."""

    def total(self, shares: Sequence[Contribution]) -> Bytes:
        if shares[0].dtype == torch.int64:
            return sum_as(shares, np.float64)
        return super().total(shares)


class AddsInNarrowTypes(Collective):
    """Adds floating-point numbers in the next narrower type, to save bandwidth."""

    def total(self, shares: Sequence[Contribution]) -> Bytes:
        narrower = NARROWER.get(shares[0].dtype)
        return super().total(shares) if narrower is None else sum_as(shares, narrower)


class CountersTravelAsDoubles(VirtualCommunicator):
    """Gathers long integers as floating-point numbers."""

    def all_gather(self, out: Tensor, tensor: Tensor) -> VirtualWork:
        if tensor.dtype == torch.int64 == out.dtype:
            tensor = tensor.double().long()
        return super().all_gather(out, tensor)


class PayloadsAreQuieted(VirtualCommunicator):
    """Sends floating-point numbers by value: what is no number becomes the usual one."""

    def isend(self, tensor: Tensor, destination: int) -> VirtualWork:
        if tensor.dtype in NARROWER:
            tensor = torch.where(tensor.isnan(), torch.full_like(tensor, torch.nan), tensor)
        return super().isend(tensor, destination)


SUMS = "sums-are-the-same-bits-each-time-and-on-every-rank"
BITS = "bits-survive-every-transport"

MUTANTS = (
    Mutant(
        name="each-rank-adds-its-own-part-first",
        clause="D1",
        broken="Ranks add in different orders, so that their sums differ in the last bits.",
        property=SUMS,
        subject=network_with(collective=OwnPartFirst),
    ),
    Mutant(
        name="sums-follow-the-order-of-arrival",
        clause="D1",
        broken="The same sum differs from one time to the next.",
        property=SUMS,
        subject=network_with(collective=InOrderOfArrival),
    ),
    Mutant(
        name="counters-are-added-as-doubles",
        clause="D1",
        broken="Sums of int64 lose what is below the 53rd bit.",
        property=SUMS,
        subject=network_with(collective=CountsInDoubles),
    ),
    Mutant(
        name="sums-are-formed-in-narrower-types",
        clause="D1",
        broken="Sums of float64 are as coarse as float32, those of float32 as float16.",
        property=SUMS,
        subject=network_with(collective=AddsInNarrowTypes),
    ),
    Mutant(
        name="counters-travel-as-doubles",
        clause="D3",
        broken="Counters beyond 2**53 are rounded on their way.",
        property=BITS,
        subject=network_with(communicator=CountersTravelAsDoubles),
    ),
    Mutant(
        name="payloads-are-quieted",
        clause="D3",
        broken="The payload of what is no number is lost on its way.",
        property=BITS,
        subject=network_with(communicator=PayloadsAreQuieted),
        # It draws every dtype, and numbers that are none.
        also=("collectives-equal-their-definitions-at-any-size",),
    ),
)
