"""A round of blobs as one call of the library's."""

from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.backends.devices.collectives.library import Group, Handle
from equipoise.hal.communicator import Exchange, Parcel


@dataclass(frozen=True)
class Round:
    """What one rank gives to a batch of messages: at most one block a peer and direction.

    Libraries go through the pairs in an order of their own, the same on every rank; the order here
    is only for the eye. Empty blobs do not travel.

    Attributes:
        ways: isend or irecv, for each.
        blobs: int8 [bytes].
        peers: whom it goes to or comes from.
    """

    ways: tuple[str, ...]
    blobs: tuple[Tensor, ...]
    peers: tuple[int, ...]

    def launch(self, group: Group) -> Handle:
        """One call, whatever the number of messages; it returns one handle for all of them."""
        return group.batch(self.ways, self.blobs, self.peers)


def round_of(plan: Exchange) -> Round:
    """Receives before sends, by peer."""
    arriving, leaving = _sorted(plan.receives), _sorted(plan.sends)
    return Round(
        ways=("irecv",) * len(arriving) + ("isend",) * len(leaving),
        blobs=tuple(parcel.blob.view(torch.int8) for parcel in (*arriving, *leaving)),
        peers=tuple(parcel.peer for parcel in (*arriving, *leaving)),
    )


def _sorted(parcels: tuple[Parcel, ...]) -> list[Parcel]:
    return sorted((p for p in parcels if p.blob.numel()), key=lambda parcel: parcel.peer)
