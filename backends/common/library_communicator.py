"""What communicators over a library that is judged as it is have in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor

from equipoise.backends.common.library_errors import first_line, refusal_or_failure
from equipoise.hal.capabilities import CommunicatorCapabilities, Operation
from equipoise.hal.communicator import Rendezvous
from equipoise.hal.errors import CommunicatorFailed, Unsupported
from equipoise.hal.support.validation import check_links

GroupT = TypeVar("GroupT")
WorkT = TypeVar("WorkT")
SUMS = frozenset({Operation.ALL_REDUCE, Operation.REDUCE_SCATTER})


class LibraryCommunicator(ABC, Generic[GroupT, WorkT]):
    """A group of a library; a subclass has one call of the library for each operation.

    It checks that operations and dtypes are among those declared, and adds nothing else.

    Args:
        library: for errors.
        purpose: what it is for.
        ranks: numbers in the run of its ranks.
        where: this rank; the deadline becomes the library's own time-out.
        capabilities: what is declared.
        open_group: makes the library's group.

    Raises:
        CommunicatorFailed: the library made no group.
    """

    def __init__(
        self,
        library: str,
        purpose: str,
        ranks: Sequence[int],
        where: Rendezvous,
        capabilities: CommunicatorCapabilities,
        open_group: Callable[[], GroupT],
    ) -> None:
        self.purpose = purpose
        self.rank = ranks.index(where.rank)
        self.size = len(ranks)
        self.capabilities = capabilities
        self._deadline = where.deadline
        try:
            self._group: GroupT | None = open_group()
        except Exception as error:
            raise CommunicatorFailed(
                f"{library} made no group for {purpose!r}: {first_line(error)}"
            ) from error

    @abstractmethod
    def _new_work(self, native: Any, label: str) -> WorkT:
        """The work of what a call of the library returned."""

    @abstractmethod
    def _destroy(self, group: GroupT) -> None:
        """End the library's group; raises what the library raises."""

    def warm(self, links: Sequence[tuple[int, int]]) -> None:
        """Nothing: these libraries have no call that builds a link."""
        check_links(links, self.size)
        self._open_group("warm")

    def close(self) -> None:
        """Destroy the library's group."""
        group, self._group = self._group, None
        if group is None:
            return
        try:
            self._destroy(group)
        except Exception as error:
            raise CommunicatorFailed(
                f"destroying the group of {self.purpose!r} failed: {first_line(error)}"
            ) from error

    def _issue(
        self,
        operation: Operation,
        tensors: Sequence[Tensor],
        call: Callable[[GroupT], Any],
        what: str = "",
    ) -> WorkT:
        label = f"{what or operation.value} of {self.purpose!r}"
        if operation not in self.capabilities.operations:
            raise Unsupported(f"{label}: this library does not offer it")
        declared = self.capabilities.reductions if operation in SUMS else self.capabilities.dtypes
        for tensor in tensors:
            if tensor.dtype not in declared:
                raise Unsupported(f"{label}: {tensor.dtype} is not declared")
        group = self._open_group(label)
        try:
            native = call(group)
        except Exception as error:
            raise refusal_or_failure(label, error) from error
        return self._new_work(native, label)

    def _open_group(self, label: str) -> GroupT:
        if self._group is None:
            raise CommunicatorFailed(f"{label}: communicator {self.purpose!r} was closed")
        return self._group
