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
        shrink_count: how often the group has shrunk.
    """

    ranks: tuple[int, ...]
    global_rank: int
    shrink_count: int = 0

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
        """Returns a name that the group had at no other size."""
        return f"{label}.{self.shrink_count}" if self.shrink_count else label

    def shrunk_to(self, active: Sequence[int]) -> "EPGroup":
        """Returns the group of `active` only. Raises `UsageError`."""
        unknown = sorted(set(active) - set(self.ranks))
        if unknown:
            raise UsageError(f"rank(s) {unknown} were no members: {self.ranks}")
        return EPGroup(tuple(sorted(active)), self.global_rank, self.shrink_count + 1)
