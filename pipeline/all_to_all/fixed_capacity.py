"""The exchange with fixed capacities: dispatch and combine with several batches in flight.

The host reads no counts, so everything but the sends may be captured in graphs. Each batch has a
buffer set, whose states are:

    Idle --dispatch--> Dispatching --wait--> Dispatched --combine--> Combining --wait--> Combined
      ^                                                                                     |
      +-------------------------------------- release --------------------------------------+
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
    """No batch. Streams may still read the buffers: the next batch waits for `_start_events`."""


@dataclass(frozen=True)
class Dispatching:
    """Rows are being sent."""

    batch_id: int
    tokens: int
    work: Work


@dataclass(frozen=True)
class Dispatched:
    """A stream has waited for the rows, and lists the entries."""

    batch_id: int
    tokens: int


@dataclass(frozen=True)
class Combining:
    """Results are being sent."""

    batch_id: int
    tokens: int
    work: Work


@dataclass(frozen=True)
class Combined:
    """A stream has waited for the results, which the caller reads."""

    batch_id: int
    tokens: int


BatchState = Idle | Dispatching | Dispatched | Combining | Combined
"""State of a buffer set."""


class BatchTracker:
    """Tracks the batch of one buffer set, from its dispatch to its release.

    A batch id identifies the batch, so that the handle of an earlier batch is refused.

    Args:
        kernels: that own the buffer set.
        buffers: the buffer set.
        event: creates events.
    """

    def __init__(
        self, kernels: ExchangeKernels, buffers: BufferSet, event: Callable[[], Event]
    ) -> None:
        self._kernels = kernels
        self._buffers = buffers
        self._unpacked = event()
        self._returned = event()
        self._released = event()
        # A dict used as an ordered set: iteration order must not vary from run to run.
        self._start_events: dict[Event, None] = {}
        self._merge_events: tuple[Event, ...] = ()
        self._state: BatchState = Idle()

    @property
    def state(self) -> BatchState:
        """The current state."""
        return self._state

    @property
    def status(self) -> Tensor:
        """The status of the buffer set."""
        return self._buffers.status

    def dispatch(self, batch: Batch, batch_id: int, stream: Stream) -> None:
        """Pack and send a batch; the caller has checked that the state is `Idle`."""
        for event in self._start_events:
            stream.wait(event)
        self._kernels.pack_rows(batch, self._buffers, stream)
        work = self._kernels.send_rows(self._buffers, stream)
        # Only now: if packing or sending has raised, the next batch still has to wait.
        self._start_events.clear()
        self._state = Dispatching(batch_id, batch.tokens, work)

    def wait_rows(self, batch_id: int, stream: Stream) -> ReceivedRows:
        """Make `stream` wait for the rows; the first caller launches the listing of entries."""
        match self._own(batch_id):
            case Dispatching(tokens=tokens, work=work):
                work.wait(stream)
                self._kernels.unpack_rows(self._buffers, stream)
                stream.record(self._unpacked)
                self._merge_events = (self._unpacked,)
                self._state = Dispatched(batch_id, tokens)
            case _:
                stream.wait(self._unpacked)
        return self._buffers.received

    def combine(self, batch_id: int, rows: Tensor, stream: Stream) -> None:
        """Pack and send the results."""
        state = self._own(batch_id)
        if not isinstance(state, Dispatched):
            raise ExchangeMisuse(f"combine of a batch that is {_name(state)}, not dispatched")
        self._kernels.pack_results(rows, self._buffers, stream)
        work = self._kernels.send_results(self._buffers, stream)
        self._state = Combining(batch_id, state.tokens, work)

    def wait_results(self, batch_id: int, stream: Stream) -> Tensor:
        """Make `stream` wait for the results; the first caller launches their unpacking."""
        state = self._own(batch_id)
        match state:
            case Combining(tokens=tokens, work=work):
                work.wait(stream)
                self._kernels.unpack_results(tokens, self._buffers, stream)
                stream.record(self._returned)
                self._state = Combined(batch_id, tokens)
            case Combined(tokens=tokens):
                stream.wait(self._returned)
            case _:
                raise ExchangeMisuse(f"results of a batch that is {_name(state)}")
        return self._buffers.results[:tokens]

    def release(self, batch_id: int, stream: Stream) -> None:
        """Free the buffer set; everything that reads the results was launched on `stream`."""
        state = self._own(batch_id)
        if not isinstance(state, Combined):
            raise ExchangeMisuse(f"release of a batch that is {_name(state)}, not combined")
        stream.record(self._released)
        self.start_after(self._released)
        self._state = Idle()

    def check_headers_merged(self) -> None:
        """Raise `ExchangeMisuse` if headers of a dispatch have not been merged into the status."""
        if isinstance(self._state, Dispatching):
            raise ExchangeMisuse("a dispatch has not been waited for: its headers are not merged")

    def wait_headers_merged(self, stream: Stream) -> None:
        """Make `stream` wait for the merging of headers."""
        for event in self._merge_events:  # none before the first use
            stream.wait(event)

    def start_after(self, event: Event) -> None:
        """Make the next batch wait for `event`."""
        self._start_events[event] = None

    def abandon(self, stream: Stream, timeout: float) -> None:
        """Wait until nothing is in flight, drop the batch, and clear the status.

        The status is cleared since ranks may have reached different points of the step.

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

    def _own(self, batch_id: int) -> BatchState:
        """Return the state if `batch_id` is the current batch. Raises `ExchangeMisuse`."""
        if isinstance(self._state, Idle) or self._state.batch_id != batch_id:
            raise ExchangeMisuse(f"batch {batch_id} is over: its buffers have been released")
        return self._state


def _name(state: BatchState) -> str:
    return type(state).__name__.lower()


class FixedCapacityExchange:
    """Sends rows to the ranks of their experts and back, without counts on the host.

    Every method launches work and returns. All ranks have to dispatch and combine in one order.
    Misuse is refused before any side effect. Not thread-safe.

    Args:
        form: of the exchange; equal on all ranks.
        kernels: pack, send and unpack.
        accelerator: of all streams.
    """

    def __init__(
        self, form: ExchangeFormat, kernels: ExchangeKernels, accelerator: Accelerator
    ) -> None:
        self._form = form
        self._trackers = [
            BatchTracker(kernels, buffers, accelerator.event) for buffers in kernels.buffer_sets
        ]
        status = [tracker.status for tracker in self._trackers]
        self._status_reader = StatusReader(status, accelerator.pinned, accelerator.event())
        self._last_batch_id = 0

    @property
    def form(self) -> ExchangeFormat:
        """The format."""
        return self._form

    def dispatch(self, batch: Batch, stream: Stream) -> "FixedDispatchHandle":
        """Send a batch, after what was launched on `stream`.

        Whatever is launched on `stream` later may overwrite the batch's tensors.

        Raises:
            ExchangeError: the batch does not fit the format.
            ExchangeMisuse: all buffer sets are in use: release a batch first.
        """
        batch.check(self._form)
        tracker = self._free()
        tracker.dispatch(batch, self._last_batch_id + 1, stream)
        # Only now: a dispatch that raised has taken no buffer set.
        self._last_batch_id += 1
        return FixedDispatchHandle(self._form, tracker, self._last_batch_id)

    def read_status(self, stream: Stream) -> StatusReadback:
        """Launch reading and clearing of the status, after the step.

        Raises:
            ExchangeMisuse: a dispatch has not been waited for.
        """
        # All are checked before anything is launched: misuse has no side effect.
        for tracker in self._trackers:
            tracker.check_headers_merged()
        for tracker in self._trackers:
            tracker.wait_headers_merged(stream)
        readback = self._status_reader.start_read(stream)
        for tracker in self._trackers:
            tracker.start_after(self._status_reader.event)
        return readback

    def abort_step(self, stream: Stream, timeout: float) -> None:
        """Drop the batches and the status of a step, after a forward pass that raised.

        All ranks have to call it after the same dispatch or combine. Everything that reads the
        batches must have been launched on `stream` or ordered before it.

        Raises:
            CommunicatorError: an operation in flight failed, or did not end within `timeout`
                seconds. The network may still write to its buffers, so the exchange must not be
                used any more: open another one.
        """
        for tracker in self._trackers:
            tracker.abandon(stream, timeout)

    def _free(self) -> BatchTracker:
        """Return the tracker that has been idle longest, so that buffer sets are used in turn."""
        count = len(self._trackers)
        for offset in range(count):
            tracker = self._trackers[(self._last_batch_id + offset) % count]
            if isinstance(tracker.state, Idle):
                return tracker
        raise ExchangeMisuse(f"all {count} buffer sets are in use: release a batch first")


class FixedDispatchHandle:
    """Handle of a dispatched batch."""

    def __init__(self, form: ExchangeFormat, tracker: BatchTracker, batch_id: int) -> None:
        self._form = form
        self._tracker = tracker
        self._batch_id = batch_id

    def wait(self, stream: Stream) -> ReceivedRows:
        """Make `stream` wait for the rows of all ranks; may be called repeatedly, on any stream.

        The received rows are valid until the release; order their readers before the combine.

        Raises:
            ExchangeMisuse: the batch was released.
        """
        return self._tracker.wait_rows(self._batch_id, stream)

    def combine(self, rows: Tensor, stream: Stream) -> "FixedCombineHandle":
        """Return results to the ranks of their tokens, after what was launched on `stream`.

        Args:
            rows: [entries, ...], one per entry of the received rows; invalid ones are ignored.
            stream: that computes `rows`; readers of the received rows are ordered before.

        Raises:
            ExchangeError: `rows` does not fit the format.
            ExchangeMisuse: the rows were not waited for, or the batch was combined before.
        """
        check_rows("results", rows, self._form.max_entries, self._form.result)
        self._tracker.combine(self._batch_id, rows, stream)
        return FixedCombineHandle(self._tracker, self._batch_id)


class FixedCombineHandle:
    """Handle of a combined batch."""

    def __init__(self, tracker: BatchTracker, batch_id: int) -> None:
        self._tracker = tracker
        self._batch_id = batch_id

    def wait(self, stream: Stream) -> Tensor:
        """Make `stream` wait for the results of all ranks; may be called repeatedly.

        Returns:
            [n, top_k, ...], one row per (token, choice), not summed; zeros if the slot was invalid.
            Valid until the release.
        """
        return self._tracker.wait_results(self._batch_id, stream)

    def release(self, stream: Stream) -> None:
        """Free the buffer set; readers of the results were launched on `stream`, or before.

        Raises:
            ExchangeMisuse: the results were not waited for, or the batch was released before.
        """
        self._tracker.release(self._batch_id, stream)
