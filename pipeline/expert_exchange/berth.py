"""A room and its state: who has it, and behind what the next one may."""

from collections.abc import Callable

from torch import Tensor

from equipoise.hal.errors import ExchangeMisuse
from equipoise.hal.stream import Event, Stream
from equipoise.pipeline.expert_exchange.arrivals import Arrivals
from equipoise.pipeline.expert_exchange.batch import Batch
from equipoise.pipeline.expert_exchange.kernels import ExchangeKernels
from equipoise.pipeline.expert_exchange.room import Room
from equipoise.pipeline.expert_exchange.states import (
    Arrived,
    Idle,
    Returned,
    Returning,
    Sending,
    State,
)


class Berth:
    """One batch at a time, from its dispatch to its release.

    Args:
        kernels: whose room it is.
        room: the room.
        event: makes events.
    """

    def __init__(self, kernels: ExchangeKernels, room: Room, event: Callable[[], Event]) -> None:
        self._kernels = kernels
        self._room = room
        self._unpacked = event()
        self._returned = event()
        self._released = event()
        self._behind: dict[Event, None] = {}  # in one order in every run, as a set is not
        self._entered: tuple[Event, ...] = ()
        self._state: State = Idle()

    @property
    def state(self) -> State:
        """Where it is."""
        return self._state

    @property
    def words(self) -> Tensor:
        """The room's sticky words."""
        return self._room.words

    def dispatch(self, batch: Batch, ticket: int, stream: Stream) -> None:
        """Take the room for a batch. It is idle: the exchange has looked."""
        for event in self._behind:
            stream.wait(event)
        self._kernels.pack_rows(batch, self._room, stream)
        work = self._kernels.carry_rows(self._room, stream)
        self._behind.clear()  # not before: after an error the next batch has to wait as well
        self._state = Sending(ticket, batch.tokens, work)

    def arrive(self, ticket: int, stream: Stream) -> Arrivals:
        """Order `stream` behind the rows; the first to come lists the entries."""
        match self._own(ticket):
            case Sending(tokens=tokens, work=work):
                work.wait(stream)
                self._kernels.unpack_rows(self._room, stream)
                stream.record(self._unpacked)
                self._entered = (self._unpacked,)
                self._state = Arrived(ticket, tokens)
            case _:
                stream.wait(self._unpacked)
        return self._room.arrivals

    def combine(self, ticket: int, rows: Tensor, stream: Stream) -> None:
        """Send results back."""
        state = self._own(ticket)
        if not isinstance(state, Arrived):
            raise ExchangeMisuse(f"combine of a batch that is {_name(state)}, not arrived")
        self._kernels.pack_results(rows, self._room, stream)
        work = self._kernels.carry_results(self._room, stream)
        self._state = Returning(ticket, state.tokens, work)

    def deliver(self, ticket: int, stream: Stream) -> Tensor:
        """Order `stream` behind the results; the first to come puts them in place."""
        state = self._own(ticket)
        match state:
            case Returning(tokens=tokens, work=work):
                work.wait(stream)
                self._kernels.unpack_results(tokens, self._room, stream)
                stream.record(self._returned)
                self._state = Returned(ticket, tokens)
            case Returned(tokens=tokens):
                stream.wait(self._returned)
            case _:
                raise ExchangeMisuse(f"results of a batch that is {_name(state)}")
        return self._room.results[:tokens]

    def release(self, ticket: int, stream: Stream) -> None:
        """Whatever reads the results has been launched on `stream`."""
        state = self._own(ticket)
        if not isinstance(state, Returned):
            raise ExchangeMisuse(f"release of a batch that is {_name(state)}, not returned")
        stream.record(self._released)
        self.follow(self._released)
        self._state = Idle()

    def check_entered(self) -> None:
        """Raise `ExchangeMisuse` while there are words to come."""
        if isinstance(self._state, Sending):
            raise ExchangeMisuse("a dispatch has not been waited for: its headers are not read")

    def read_words(self, stream: Stream) -> None:
        """Order `stream` behind what enters words."""
        for event in self._entered:  # none before the first use
            stream.wait(event)

    def follow(self, event: Event) -> None:
        """The next batch comes behind `event`."""
        self._behind[event] = None

    def abandon(self, stream: Stream, timeout: float) -> None:
        """Wait until nothing of it is in flight, let nobody go on with it, and clear the words.

        Ranks may have come to different places of the step, so their words may differ.

        Raises:
            CommunicatorError: as `Work.result`.
        """
        if isinstance(self._state, Sending | Returning):
            self._state.work.result(timeout)
        self.read_words(stream)
        stream.launch(self._room.words.zero_)
        stream.record(self._released)
        self.follow(self._released)
        self._state = Idle()

    def _own(self, ticket: int) -> State:
        """The state, if `ticket` is who has the room."""
        if isinstance(self._state, Idle) or self._state.ticket != ticket:
            raise ExchangeMisuse(f"batch {ticket} is over: its room has been released")
        return self._state


def _name(state: State) -> str:
    return type(state).__name__.lower()
