"""What a rank issued, in a form that can be compared with what its peers did."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Issued:
    """One operation of one rank.

    Attributes:
        epoch: as the rank's owner counts them.
        kind: the operation, with a root where it has one.
        elements: of the part that is equal on all ranks.
        dtype: of the elements.
        sends: rows or bytes to each rank of the group; empty for operations that divide evenly.
        receives: the same from each rank.
    """

    epoch: int
    kind: str
    elements: int
    dtype: str
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()

    def to_bytes(self) -> bytes:
        """As a ballot."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, ballot: bytes) -> "Issued":
        """From a ballot."""
        fields = json.loads(ballot)
        sends, receives = tuple(fields.pop("sends")), tuple(fields.pop("receives"))
        return cls(**fields, sends=sends, receives=receives)

    @property
    def common(self) -> tuple[int, str, int, str]:
        """What must be the same on every rank."""
        return self.epoch, self.kind, self.elements, self.dtype

    def __str__(self) -> str:
        text = f"{self.kind} of {self.elements} x {self.dtype} in epoch {self.epoch}"
        if self.sends or self.receives:
            text += f" (sends {list(self.sends)}, receives {list(self.receives)})"
        return text


def issued(epoch: int, kind: str, tensor: Tensor) -> Issued:
    """An operation on a tensor that is equally large on every rank."""
    return Issued(epoch=epoch, kind=kind, elements=tensor.numel(), dtype=str(tensor.dtype))


def agree(operations: Sequence[Issued]) -> bool:
    """Whether all ranks issued one operation, and each expects what its peers send."""
    if len({operation.common for operation in operations}) > 1:
        return False
    sent = [list(operation.sends) for operation in operations]
    expected = [list(operation.receives) for operation in operations]
    return sent == [list(column) for column in zip(*expected, strict=False)] or not any(
        (*sent, *expected)
    )


def describe(operations: Sequence[Issued], ranks: Sequence[int]) -> str:
    """Who issued what; `ranks` are numbers of the run."""
    said = (f"rank {rank} issued {o}" for rank, o in zip(ranks, operations, strict=True))
    return "; ".join(said)
