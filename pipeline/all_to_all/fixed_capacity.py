"""The states of a room: one frozen dataclass each.

Idle --dispatch--> Sending --wait--> Arrived --combine--> Returning --wait--> Returned
  ^                                                                              |
  +----------------------------------- release ----------------------------------+

A room and its state: who has it, and behind what the next one may.

The exchange of fixed capacity: dispatch and combine of several batches in flight.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from equipoise.hal.accelerator import Accelerator
from equipoise.hal.errors import ExchangeMisuse
from equipoise.hal.stream import Event, Stream
from equipoise.hal.work import Work
from equipoise.pipeline.all_to_all.formats import Batch, ExchangeFormat, ReceivedRows, check_rows
from equipoise.pipeline.all_to_all.kernels import BufferSet, ExchangeKernels
from equipoise.pipeline.all_to_all.status import StatusReadback, StatusReader


@dataclass(frozen=True)
class Idle:
    """Nobody has it; what may still be read of it is behind the room's events."""


@dataclass(frozen=True)
class Dispatching:
    """Rows are on their way."""

    ticket: int
    tokens: int
    work: Work


@dataclass(frozen=True)
class Dispatched:
    """A stream has waited for the rows and lists the entries."""

    ticket: int
    tokens: int


@dataclass(frozen=True)
class Combining:
    """Results are on their way."""

    ticket: int
    tokens: int
    work: Work


@dataclass(frozen=True)
class Combined:
    """A stream has waited for the results, and somebody reads them."""

    ticket: int
    tokens: int


BatchState = Idle | Dispatching | Dispatched | Combining | Combined
"""Where a room is."""


class BatchTracker:
    """One batch at a time, from its dispatch to its release.

    Args:
        kernels: whose room it is.
        room: the room.
        event: makes events.
    """

    def __init__(
        self, kernels: ExchangeKernels, room: BufferSet, event: Callable[[], Event]
    ) -> None:
        self._kernels = kernels
        self._buffers = room
        self._unpacked = event()
        self._returned = event()
        self._released = event()
        self._start_events: dict[Event, None] = {}  # in one order in every run, as a set is not
        self._merge_events: tuple[Event, ...] = ()
        self._state: BatchState = Idle()

    @property
    def state(self) -> BatchState:
        """Where it is."""
        return self._state

    @property
    def status(self) -> Tensor:
        """The room's sticky words."""
        return self._buffers.status

    def dispatch(self, batch: Batch, ticket: int, stream: Stream) -> None:
        """Take the room for a batch. It is idle: the exchange has looked."""
        for event in self._start_events:
            stream.wait(event)
        self._kernels.pack_rows(batch, self._buffers, stream)
        work = self._kernels.send_rows(self._buffers, stream)
        self._start_events.clear()  # not before: after an error the next batch has to wait as well
        self._state = Dispatching(ticket, batch.tokens, work)

    def wait_rows(self, ticket: int, stream: Stream) -> ReceivedRows:
        """Order `stream` behind the rows; the first to come lists the entries."""
        match self._own(ticket):
            case Dispatching(tokens=tokens, work=work):
                work.wait(stream)
                self._kernels.unpack_rows(self._buffers, stream)
                stream.record(self._unpacked)
                self._merge_events = (self._unpacked,)
                self._state = Dispatched(ticket, tokens)
            case _:
                stream.wait(self._unpacked)
        return self._buffers.received

    def combine(self, ticket: int, rows: Tensor, stream: Stream) -> None:
        """Send results back."""
        state = self._own(ticket)
        if not isinstance(state, Dispatched):
            raise ExchangeMisuse(f"combine of a batch that is {_name(state)}, not arrived")
        self._kernels.pack_results(rows, self._buffers, stream)
        work = self._kernels.send_results(self._buffers, stream)
        self._state = Combining(ticket, state.tokens, work)

    def wait_results(self, ticket: int, stream: Stream) -> Tensor:
        """Order `stream` behind the results; the first to come puts them in place."""
        state = self._own(ticket)
        match state:
            case Combining(tokens=tokens, work=work):
                work.wait(stream)
                self._kernels.unpack_results(tokens, self._buffers, stream)
                stream.record(self._returned)
                self._state = Combined(ticket, tokens)
            case Combined(tokens=tokens):
                stream.wait(self._returned)
            case _:
                raise ExchangeMisuse(f"results of a batch that is {_name(state)}")
        return self._buffers.results[:tokens]

    def release(self, ticket: int, stream: Stream) -> None:
        """Whatever reads the results has been launched on `stream`."""
        state = self._own(ticket)
        if not isinstance(state, Combined):
            raise ExchangeMisuse(f"release of a batch that is {_name(state)}, not returned")
        stream.record(self._released)
        self.start_after(self._released)
        self._state = Idle()

    def check_headers_merged(self) -> None:
        """Raise `ExchangeMisuse` while there are words to come."""
        if isinstance(self._state, Dispatching):
            raise ExchangeMisuse("a dispatch has not been waited for: its headers are not read")

    def wait_headers_merged(self, stream: Stream) -> None:
        """Order `stream` behind what enters words."""
        for event in self._merge_events:  # none before the first use
            stream.wait(event)

    def start_after(self, event: Event) -> None:
        """The next batch comes behind `event`."""
        self._start_events[event] = None

    def abandon(self, stream: Stream, timeout: float) -> None:
        """Wait until nothing of it is in flight, let nobody go on with it, and clear the words.

        Ranks may have come to different places of the step, so their words may differ.

        Raises:
            CommunicatorError: as `Work.result`.
        """
        if isinstance(self._state, Dispatching | Combining):
            self._state.work.result(timeout)
        self.wait_headers_merged(stream)
        stream.launch(self._buffers.status.zero_)
        stream.record(self._released)
        self.start_after(self._released)
        self._state = Idle()

    def _own(self, ticket: int) -> BatchState:
        """The state, if `ticket` is who has the room."""
        if isinstance(self._state, Idle) or self._state.ticket != ticket:
            raise ExchangeMisuse(f"batch {ticket} is over: its room has been released")
        return self._state


def _name(state: BatchState) -> str:
    return type(state).__name__.lower()


class FixedCapacityExchange:
    """Rows to the ranks that hold their experts and back, without a count on the host.

    Every method launches and returns. All ranks dispatch and combine in one order. Every misuse is
    refused before any side effect. Not for several threads.

    Args:
        form: the same on all ranks.
        kernels: pack, carry and unpack.
        accelerator: of all streams.
    """

    def __init__(
        self, form: ExchangeFormat, kernels: ExchangeKernels, accelerator: Accelerator
    ) -> None:
        self._form = form
        self._trackers = [
            BatchTracker(kernels, room, accelerator.event) for room in kernels.buffer_sets
        ]
        words = [berth.status for berth in self._trackers]
        self._status_reader = StatusReader(words, accelerator.pinned, accelerator.event())
        self._tickets = 0

    @property
    def form(self) -> ExchangeFormat:
        """What it carries."""
        return self._form

    def dispatch(self, batch: Batch, stream: Stream) -> "FixedDispatchHandle":
        """Send a batch, after what was launched on `stream`.

        The batch's tensors may be overwritten by what is launched on `stream` from now on.

        Raises:
            ExchangeError: it does not fit the format.
            ExchangeMisuse: every room is taken: release a batch first.
        """
        batch.check(self._form)
        berth = self._free()
        berth.dispatch(batch, self._tickets + 1, stream)
        self._tickets += 1
        return FixedDispatchHandle(self._form, berth, self._tickets)

    def read_status(self, stream: Stream) -> StatusReadback:
        """Read the sticky words behind the step, and clear them.

        Raises:
            ExchangeMisuse: a dispatch has not been waited for.
        """
        for berth in self._trackers:
            berth.check_headers_merged()
        for berth in self._trackers:
            berth.wait_headers_merged(stream)
        reading = self._status_reader.start_read(stream)
        for berth in self._trackers:
            berth.start_after(self._status_reader.event)
        return reading

    def abort_step(self, stream: Stream, timeout: float) -> None:
        """Give up the step, as after a forward that raised: its batches and its words.

        All ranks do it behind the same dispatch or combine. What read the batches has been launched
        on `stream`, or before.

        Raises:
            CommunicatorError: something in flight failed, or did not end within `timeout` seconds.
                Of an operation that failed the network may still write the buffers: an exchange
                whose communicator failed is over, and another is made.
        """
        for berth in self._trackers:
            berth.abandon(stream, timeout)

    def _free(self) -> BatchTracker:
        """The room that has been idle for longest, so that batches take turns."""
        count = len(self._trackers)
        for place in range(count):
            berth = self._trackers[(self._tickets + place) % count]
            if isinstance(berth.state, Idle):
                return berth
        raise ExchangeMisuse(f"all {count} rooms are taken: release a batch first")


class FixedDispatchHandle:
    """A batch whose rows were sent."""

    def __init__(self, form: ExchangeFormat, berth: BatchTracker, ticket: int) -> None:
        self._form = form
        self._tracker = berth
        self._ticket = ticket

    def wait(self, stream: Stream) -> ReceivedRows:
        """Order `stream` behind the rows of all ranks; any number of times, on any stream.

        What reads the arrivals is ordered before the combine; they last until the release.

        Raises:
            ExchangeMisuse: the batch was released.
        """
        return self._tracker.wait_rows(self._ticket, stream)

    def combine(self, rows: Tensor, stream: Stream) -> "FixedCombineHandle":
        """Send results back, after what was launched on `stream`.

        Args:
            rows: [entries, ...], one an entry of the arrivals; invalid ones are ignored.
            stream: on which they, and all that reads the arrivals, come before.

        Raises:
            ExchangeError: rows that do not fit the format.
            ExchangeMisuse: nobody has waited for the rows, or it was combined before.
        """
        check_rows("results", rows, self._form.max_entries, self._form.result)
        self._tracker.combine(self._ticket, rows, stream)
        return FixedCombineHandle(self._tracker, self._ticket)


class FixedCombineHandle:
    """A batch whose results were sent."""

    def __init__(self, berth: BatchTracker, ticket: int) -> None:
        self._tracker = berth
        self._ticket = ticket

    def wait(self, stream: Stream) -> Tensor:
        """Order `stream` behind the results of all ranks; any number of times, on any stream.

        Returns:
            [n, top_k, ...], a row a (token, choice), never summed; zeros where the slot was
            invalid. It lasts until the release.
        """
        return self._tracker.wait_results(self._ticket, stream)

    def release(self, stream: Stream) -> None:
        """Give the room back: all that reads the results has been launched on `stream`, or before.

        Raises:
            ExchangeMisuse: nobody has waited for the results, or it was released before.
        """
        self._tracker.release(self._ticket, stream)
