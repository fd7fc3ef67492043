"""The ranks among which experts are spread, at present."""

from collections.abc import Sequence
from dataclasses import dataclass

from equipoise.hal.errors import UsageError


@dataclass(frozen=True)
class EPGroup:
    """Who takes part.

    Attributes:
        ranks: numbers on the control plane, ascending. The slots of a layer are spread over them
            in this order.
        global_rank: this rank's number there.
        incarnation: how often the group has been made anew.
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
        """Where this rank stands among them."""
        return self.ranks.index(self.global_rank)

    def scoped_name(self, label: str) -> str:
        """A name that no other incarnation has used."""
        return f"{label}.{self.incarnation}" if self.incarnation else label

    def shrunk_to(self, active: Sequence[int]) -> "EPGroup":
        """The next incarnation, of `active` only. Raises `UsageError`."""
        strangers = sorted(set(active) - set(self.ranks))
        if strangers:
            raise UsageError(f"rank(s) {strangers} were no members: {self.ranks}")
        return EPGroup(tuple(sorted(active)), self.global_rank, self.incarnation + 1)
