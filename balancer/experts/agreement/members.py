"""The group of ranks among which experts are currently distributed."""

from collections.abc import Sequence
from dataclasses import dataclass

from equipoise.hal.errors import UsageError


@dataclass(frozen=True)
class EPGroup:
    """The ranks that hold experts.

    Attributes:
        ranks: numbers on the control plane, ascending. The slots of a layer are distributed over
            them in this order.
        global_rank: this rank's number on the control plane.
        incarnation: how often the group has shrunk.
    """

    ranks: tuple[int, ...]
    global_rank: int
    incarnation: int = 0

    def __post_init__(self) -> None:
        if list(self.ranks) != sorted(set(self.ranks)) or self.global_rank not in self.ranks:
            raise UsageError(
                f"rank {self.global_rank} is not one of the ascending ranks {self.ranks}"
            )

    @property
    def rank_in_group(self) -> int:
        """Position of this rank in `ranks`."""
        return self.ranks.index(self.global_rank)

    def scoped_name(self, label: str) -> str:
        """Returns a name that no other incarnation uses."""
        return f"{label}.{self.incarnation}" if self.incarnation else label

    def shrunk_to(self, active: Sequence[int]) -> "EPGroup":
        """Returns the next incarnation, of `active` only. Raises `UsageError`."""
        unknown = sorted(set(active) - set(self.ranks))
        if unknown:
            raise UsageError(f"rank(s) {unknown} were no members: {self.ranks}")
        return EPGroup(tuple(sorted(active)), self.global_rank, self.incarnation + 1)
