"""The executor for one real device: hardware schedules, delays widen the races."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import torch
from torch import Tensor

from equipoise.hal.accelerator import Accelerator, Backend
from equipoise.hal.communicator import Communicator, Fabric
from equipoise.hal.conformance.bench import Bench, End
from equipoise.hal.conformance.hosts import play_hosts
from equipoise.hal.conformance.program import Case
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.conformance.subject import blame, judge
from equipoise.hal.conformance.usage import POLL, halted, usage
from equipoise.hal.errors import Unsupported
from equipoise.hal.stream import Stream

PATIENCE = 20.0
"""Seconds that a wait which must succeed may take."""
LONGEST = 0.002
"""Seconds of the longest delay on the host's processors."""
SIDE = 256
"""Rows and columns of the matrices that delay a device."""
SCRIBBLE = 0xA5
REMEMBERED = 64
"""How many sizes of dropped memory `churn` writes over."""


@dataclass
class RealSurroundings:
    """What a real device does for its bench.

    Attributes:
        accelerator: the device.
        schedule: what delays are taken from.
        fabric: the rank's connection to the others, if there are any.
        prefix: of the purposes that this case opens communicators for.
        holder: the process that holds the store, where it may be ended.
        sizes: of the memory that was handed out.
        taken: how many delays were taken from the schedule.
    """

    accelerator: Accelerator
    schedule: bytes
    fabric: Fabric | None = None
    prefix: str = ""
    holder: int | None = None
    sizes: list[int] = field(default_factory=list)
    taken: int = 0

    def empty(self, nbytes: int) -> Tensor:
        """Memory of the device, scribbled."""
        self.sizes = [*self.sizes[1 - REMEMBERED :], nbytes]
        flat = torch.empty(nbytes, dtype=torch.uint8, device=self.accelerator.device)
        return flat.fill_(SCRIBBLE)

    def churn(self) -> None:
        """Take blocks of the sizes used so far, scribble them, drop them."""
        blocks = [
            torch.full((size,), SCRIBBLE, dtype=torch.uint8, device=self.accelerator.device)
            for size in self.sizes
        ]
        del blocks

    def hold(self, stream: Stream) -> Callable[[], None]:
        """By a stream lock that nobody has signalled yet."""
        lock = self.accelerator.stream_lock(PATIENCE)
        lock.acquire(stream)
        return lambda: lock.signal(lock.epoch)

    def disturb(self, stream: Stream) -> None:
        """A delay that the schedule chooses: some work, or none."""
        if not self.schedule:
            return
        part = self.schedule[self.taken % len(self.schedule)] / 255
        self.taken += 1
        device = self.accelerator.device
        if device.type == "cpu":
            stream.launch(lambda: time.sleep(part * LONGEST))
        else:
            square = torch.ones(SIDE, SIDE, device=device)
            stream.launch(lambda: [square @ square for _ in range(int(part * 16))])

    def open(self, purpose: str, ranks: Sequence[int] | None) -> Communicator:
        """A communicator under a name of this case."""
        if self.fabric is None:
            raise Unsupported("a device by itself has no communicator")
        return self.fabric.open(f"{self.prefix}{purpose}", ranks)

    def end(self, how: End) -> None:
        """By a signal to the whole process."""
        os.kill(os.getpid(), signal.SIGKILL if how is End.KILL else signal.SIGSTOP)

    def lose_store(self, how: End) -> None:
        """By a signal to the process that holds it."""
        if self.holder is None:
            raise Unsupported("the store of this fabric may not be ended")
        os.kill(self.holder, signal.SIGKILL if how is End.KILL else signal.SIGSTOP)
        expiry = time.monotonic() + PATIENCE
        while not halted(self.holder) and time.monotonic() < expiry:
            time.sleep(POLL)

    def pause(self, seconds: float) -> None:
        """Stopped by somebody who then lets it go on."""
        script = f"kill -STOP {os.getpid()}; sleep {seconds:g}; kill -CONT {os.getpid()}"
        subprocess.run(["/bin/sh", "-c", script], check=True)

    def leftovers(self) -> Mapping[str, int]:
        """What of the process is counted."""
        held = usage()
        return {"threads": held.threads, "descriptors": held.descriptors}


class DeviceSubject:
    """One device of a backend, freshly opened for every case."""

    def __init__(self, backend: Backend, index: int = 0) -> None:
        self._backend = backend
        self._index = index
        self._traits = Traits(backend.capabilities, None, (1,), controlled=False)

    @property
    def name(self) -> str:
        """The backend's name."""
        return self._backend.name

    @property
    def traits(self) -> Traits:
        """As declared; one rank."""
        return self._traits

    def play(self, claim: Property, case: Case) -> str | None:
        """On the device as it schedules itself."""
        try:
            with closing(self._backend.open(self._index)) as accelerator:
                answers = play_alone(claim, case, self._backend, accelerator)
                return judge(claim, case, answers)
        except Exception as error:
            raise blame(claim, error) from error

    def close(self) -> None:
        """Nothing is held between cases."""


def play_alone(
    claim: Property, case: Case, backend: Backend, accelerator: Accelerator
) -> list[object]:
    """The answers of the hosts of a rank that needs no fabric."""
    bench = Bench(
        rank=0,
        size=1,
        host=0,
        backend=backend,
        accelerator=accelerator,
        fabric=None,
        deadline=PATIENCE,
        patience=PATIENCE,
        surroundings=RealSurroundings(accelerator, case.schedule),
    )
    return play_hosts(claim, case, bench)
