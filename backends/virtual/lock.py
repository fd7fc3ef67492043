"""The stream lock of the virtual device: two flags that streams wait for."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from equipoise.backends.virtual.scheduling import StreamTask
from equipoise.backends.virtual.stream import VirtualStream, VirtualStreamOp, own_stream
from equipoise.hal.errors import LockMisuse, LockPoisoned, StaleEpoch, StreamError, StreamTimeout
from equipoise.hal.stream import Stream

if TYPE_CHECKING:
    from equipoise.backends.virtual.device import VirtualDevice


class VirtualStreamLock:
    """Hand-over between a stream and a host that writes slots (clauses O5, L1 to L7).

    Whose turn it is follows from three bits, of which two are the words: `full` (an acquire may go
    on), `empty` (the writer may write), and `reading` (an acquire has taken the full word and no
    release has come). With none of them set the writer owns the slots.
    """

    def __init__(self, device: "VirtualDevice", deadline: float) -> None:
        self._device = device
        self._epoch = 0
        self._poisoned = False
        self._launched = 0
        self._full = self._empty = self._reading = False

    @property
    def epoch(self) -> int:
        """The epoch that runs."""
        return self._epoch

    def acquire(self, stream: Stream) -> None:
        """Let nothing launched from now on move before a signal of its own."""
        own_stream(stream).issue(VirtualStreamOp(self._launch_acquire))

    def release(self, stream: Stream) -> None:
        """Set the empty word when the stream comes here."""
        own_stream(stream).issue(VirtualStreamOp(self._launch_release))

    def wait(self, epoch: int, timeout: float) -> None:
        """Advance the world until the stream has released; then the writer owns the slots."""
        self._check_epoch(epoch)
        if self._writer_owns():
            raise LockMisuse("the writer waits for slots that it owns")
        self._device.world.until(lambda: self._is_released(epoch), timeout)
        self._check_epoch(epoch)
        if not self._empty:
            raise StreamTimeout(f"no release within {timeout:g} s")
        self._empty = False

    def signal(self, epoch: int) -> None:
        """Set the full word."""
        self._check_epoch(epoch)
        if not self._writer_owns():
            raise LockMisuse("the writer signals without owning the slots")
        self._full = True

    def poison(self) -> None:
        """Release every waiter of this epoch."""
        self._poisoned = True

    def check(self) -> None:
        """Raise `LockPoisoned` if this epoch was poisoned."""
        if self._poisoned:
            raise LockPoisoned(f"the stream lock was poisoned in epoch {self._epoch}")

    def drain(self, timeout: float) -> int:
        """Begin the next epoch, once nothing of this one is on its way (clause L3)."""
        if not self._device.world.until(self._drained, timeout):
            raise StreamTimeout(f"{self._launched} operations have not passed within {timeout:g} s")
        self._clear()
        self._poisoned = False
        self._epoch += 1
        return self._epoch

    def _clear(self) -> None:
        """The writer owns the slots."""
        self._full = self._empty = self._reading = False

    def _check_epoch(self, epoch: int) -> None:
        """Turn away a writer that comes late, and everybody once the epoch is poisoned."""
        if epoch != self._epoch:
            raise StaleEpoch(f"a writer of epoch {epoch} in epoch {self._epoch}")
        self.check()

    def _writer_owns(self) -> bool:
        """Whether the writer owns the slots."""
        return not (self._full or self._empty or self._reading)

    def _is_released(self, epoch: int) -> bool:
        return self._empty or self._poisoned or self._epoch != epoch

    def _drained(self) -> bool:
        return self._launched == 0

    def _passable(self) -> bool:
        return self._full or self._poisoned

    def _on_acquire(self) -> None:
        """On the stream: reset the full word."""
        if not self._poisoned:
            self._full, self._reading = False, True

    def _on_release(self) -> None:
        """On the stream: set the empty word. Without an acquire before it nothing is given."""
        if self._reading:
            self._empty, self._reading = True, False

    def _launch_acquire(self, on: VirtualStream) -> None:
        self._launch(
            StreamTask(on, self._pass(self._on_acquire), self._passable, self._skip, self._strike)
        )

    def _launch_release(self, on: VirtualStream) -> None:
        self._launch(StreamTask(on, self._release(), skip=self._skip))

    def _launch(self, task: StreamTask) -> None:
        self._launched += 1
        try:
            task.owner.submit(task)
        except StreamError:
            self._launched -= 1
            raise

    def _strike(self) -> bool:
        """The deadline of the acquire that waits passes (clause L6)."""
        self.poison()
        return True

    def _pass(self, step: Callable[[], None]) -> Iterator[None]:
        step()
        self._launched -= 1
        yield from ()

    def _release(self) -> Iterator[None]:
        """In two steps: a device sets the word, and reaches what comes after it later. The writer
        may see the one without the other, as it did on a GPU."""
        self._on_release()
        yield
        self._launched -= 1

    def _skip(self, _: BaseException) -> None:
        """The stream failed: what it had launched is not on its way any more."""
        self._launched -= 1
