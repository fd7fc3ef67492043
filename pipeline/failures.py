"""What ends an end of an edge, and errors of others as this project's own."""

from equipoise.hal.errors import ChannelClosed, ChannelError, EquipoiseError


def explained(failure: BaseException, what: str) -> EquipoiseError:
    """The error itself where it is one of this project; else one that says `what`, and why.

    Memory that cannot be had, an interrupt, an error of torch: they end what was under way as any
    other failure does, and whoever comes later is told.
    """
    if isinstance(failure, EquipoiseError):
        return failure
    told = ChannelError(f"{what}: {type(failure).__name__}: {failure}")
    told.__cause__ = failure
    return told


class Standing:
    """Whether an end of an edge may go on; the first thing that ends it stays.

    Args:
        name: of the edge.

    Attributes:
        failure: what has ended it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.failure: EquipoiseError | None = None

    def refuse_closed(self) -> None:
        """Raise `ChannelClosed`, with the cause, where the end is over."""
        if self.failure is not None:
            raise ChannelClosed(f"{self._name}: {self.failure}") from self.failure

    def fail(self, failure: BaseException) -> None:
        """Half of something may have happened."""
        self.failure = self.failure or explained(failure, "it failed amid a message")

    def close(self) -> None:
        """Refuse what comes from now on."""
        self.failure = self.failure or ChannelClosed("it was closed")
