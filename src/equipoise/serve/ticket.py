"""A request as the proxy has it, between its client and the policy."""

import asyncio
from dataclasses import dataclass
from typing import TypeAlias

from equipoise.serve.scope import Interrupted, Reason, Scope


@dataclass(frozen=True)
class Held:
    """No worker has it: it waits in the policy."""


@dataclass(frozen=True, eq=False)
class Bound:
    """It is to be sent to `worker`, or has been, and nothing of an answer has been passed on.

    One object a binding: who has sent it by an earlier one can see that it is over.
    """

    worker: int


@dataclass(frozen=True)
class Running:
    """Something of an answer by `worker` has been passed on: it is moved no more."""

    worker: int


@dataclass(frozen=True)
class Gone:
    """It ended, and the policy has been told, or has said so itself."""


State: TypeAlias = Held | Bound | Running | Gone
HELD, GONE = Held(), Gone()


class Ticket:
    """Written by the desk; the request's own task reads it, and waits for it.

    Args:
        number: what the policy calls it.
        size: prompt tokens, known or estimated.
        wanted: the only worker that the client lets it go to; None: any.

    Attributes:
        state: see the types above.
        pin: the only worker that the policy may bind it to; None: any.
        told: tokens that the policy has been told of, or will be at the end of the loop's turn.
        scope: of the part of its task that a lost worker, or a shutdown, ends.
        bound_at: loop's time at which it was bound last.
    """

    def __init__(self, number: int, size: int, wanted: int | None) -> None:
        self.number = number
        self.size = size
        self.wanted = self.pin = wanted
        self.state: State = HELD
        self.told = 0
        self.scope: Scope | None = None
        self.bound_at: float | None = None
        self._binding: asyncio.Future[Bound] | None = None

    async def binding(self) -> Bound:
        """The worker that it is bound to, as soon as there is one.

        Raises: Interrupted where it is gone: the only worker for it was lost.
        """
        if isinstance(self.state, Bound):
            return self.state
        if isinstance(self.state, Gone):
            raise Interrupted(Reason.LOST)
        self._binding = asyncio.get_running_loop().create_future()
        return await self._binding

    def bind(self, worker: int, at: float) -> None:
        """The policy has decided."""
        bound = Bound(worker)
        self.state, self.bound_at = bound, at
        if self._binding is not None and not self._binding.done():
            self._binding.set_result(bound)

    def unbind(self) -> None:
        """Its worker was lost before the first token: the policy holds it again."""
        self.state, self.told = HELD, 0
        self.interrupt(Reason.UNBOUND)

    def interrupt(self, reason: Reason) -> None:
        """End what its task is at."""
        if self.scope is not None:
            self.scope.interrupt(reason)
