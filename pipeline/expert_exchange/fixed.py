"""The exchange of fixed capacity: dispatch and combine of several batches in flight."""

from torch import Tensor

from equipoise.hal.accelerator import Accelerator
from equipoise.hal.errors import ExchangeMisuse
from equipoise.hal.stream import Stream
from equipoise.pipeline.expert_exchange.arrivals import Arrivals
from equipoise.pipeline.expert_exchange.batch import Batch
from equipoise.pipeline.expert_exchange.berth import Berth
from equipoise.pipeline.expert_exchange.format import ExchangeFormat, check_rows
from equipoise.pipeline.expert_exchange.kernels import ExchangeKernels
from equipoise.pipeline.expert_exchange.reading import Ledger, Reading
from equipoise.pipeline.expert_exchange.states import Idle


class FixedExchange:
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
        self._berths = [Berth(kernels, room, accelerator.event) for room in kernels.rooms]
        words = [berth.words for berth in self._berths]
        self._ledger = Ledger(words, accelerator.pinned, accelerator.event())
        self._tickets = 0

    @property
    def form(self) -> ExchangeFormat:
        """What it carries."""
        return self._form

    def dispatch(self, batch: Batch, stream: Stream) -> "Dispatched":
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
        return Dispatched(self._form, berth, self._tickets)

    def read(self, stream: Stream) -> Reading:
        """Read the sticky words behind the step, and clear them.

        Raises:
            ExchangeMisuse: a dispatch has not been waited for.
        """
        for berth in self._berths:
            berth.check_entered()
        for berth in self._berths:
            berth.read_words(stream)
        reading = self._ledger.read(stream)
        for berth in self._berths:
            berth.follow(self._ledger.event)
        return reading

    def abandon(self, stream: Stream, timeout: float) -> None:
        """Give up the step, as after a forward that raised: its batches and its words.

        All ranks do it behind the same dispatch or combine. What read the batches has been launched
        on `stream`, or before.

        Raises:
            CommunicatorError: something in flight failed, or did not end within `timeout` seconds.
                Of an operation that failed the network may still write the buffers: an exchange
                whose communicator failed is over, and another is made.
        """
        for berth in self._berths:
            berth.abandon(stream, timeout)

    def _free(self) -> Berth:
        """The room that has been idle for longest, so that batches take turns."""
        count = len(self._berths)
        for place in range(count):
            berth = self._berths[(self._tickets + place) % count]
            if isinstance(berth.state, Idle):
                return berth
        raise ExchangeMisuse(f"all {count} rooms are taken: release a batch first")


class Dispatched:
    """A batch whose rows were sent."""

    def __init__(self, form: ExchangeFormat, berth: Berth, ticket: int) -> None:
        self._form = form
        self._berth = berth
        self._ticket = ticket

    def wait(self, stream: Stream) -> Arrivals:
        """Order `stream` behind the rows of all ranks; any number of times, on any stream.

        What reads the arrivals is ordered before the combine; they last until the release.

        Raises:
            ExchangeMisuse: the batch was released.
        """
        return self._berth.arrive(self._ticket, stream)

    def combine(self, rows: Tensor, stream: Stream) -> "Combined":
        """Send results back, after what was launched on `stream`.

        Args:
            rows: [entries, ...], one an entry of the arrivals; invalid ones are ignored.
            stream: on which they, and all that reads the arrivals, come before.

        Raises:
            ExchangeError: rows that do not fit the format.
            ExchangeMisuse: nobody has waited for the rows, or it was combined before.
        """
        check_rows("results", rows, self._form.entries, self._form.result)
        self._berth.combine(self._ticket, rows, stream)
        return Combined(self._berth, self._ticket)


class Combined:
    """A batch whose results were sent."""

    def __init__(self, berth: Berth, ticket: int) -> None:
        self._berth = berth
        self._ticket = ticket

    def wait(self, stream: Stream) -> Tensor:
        """Order `stream` behind the results of all ranks; any number of times, on any stream.

        Returns:
            [n, top_k, ...], a row a (token, choice), never summed; zeros where the slot was
            invalid. It lasts until the release.
        """
        return self._berth.deliver(self._ticket, stream)

    def release(self, stream: Stream) -> None:
        """Give the room back: all that reads the results has been launched on `stream`, or before.

        Raises:
            ExchangeMisuse: nobody has waited for the results, or it was released before.
        """
        self._berth.release(self._ticket, stream)
