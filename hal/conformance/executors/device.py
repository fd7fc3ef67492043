"""Plays cases on one real device; delays from the schedule widen races.

Each thread of a rank is a thread of the operating system.
"""

import dataclasses
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from equipoise.hal.accelerator import Accelerator, Backend, open_for_rank
from equipoise.hal.communicator import Communicator, Fabric
from equipoise.hal.conformance.context import Play, RankContext, Termination, sync_current_stream
from equipoise.hal.conformance.executors.leak_detector import (
    POLL_INTERVAL,
    all_threads_stopped,
    process_usage,
)
from equipoise.hal.conformance.executors.steering import Steer
from equipoise.hal.conformance.program import Case
from equipoise.hal.conformance.property import Property, Traits
from equipoise.hal.conformance.subject import NotJudgeable, compare_answers, to_violation
from equipoise.hal.errors import StreamTimeout, Unsupported, Violation
from equipoise.hal.stream import Role, Stream

WATCHDOG = 60.0
"""Seconds that the threads of a rank may take for one case."""


def play_threads(prop: Property, case: Case, ctx: RankContext) -> list[Any]:
    """What each thread returned. Raises the first error of a thread, or `Violation` of C8.

    The first in time: a thread that waits for one that failed fails, too, by its wait.
    """
    if prop.threads == 1:
        return [play_to_end(prop.play(ctx, case.program))]
    answers: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}

    def serve(number: int) -> None:
        try:
            own_ctx = dataclasses.replace(ctx, thread=number)
            answers[number] = play_to_end(prop.play(own_ctx, case.program))
        except BaseException as error:
            errors[number] = error

    threads = [threading.Thread(target=serve, args=(h,), daemon=True) for h in range(prop.threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WATCHDOG)
    if errors:
        raise next(iter(errors.values()))
    if len(answers) < prop.threads:
        raise Violation("C8", f"a host of {prop.name} did not end within {WATCHDOG:g} s")
    return [answers[number] for number in range(prop.threads)]


def play_to_end(play: Play) -> Any:
    """Play to the end: where it yields, the call that follows blocks by itself."""
    try:
        while True:
            next(play)
    except StopIteration as end:
        return end.value


WAIT_TIMEOUT = 20.0
"""Seconds that a wait which must succeed may take."""
MAX_HOST_DELAY = 0.002
"""Seconds of the longest delay on the host's processors."""
MATRIX_SIDE = 64
"""Rows and columns of the matrices that delay a device: small, since a simulated one multiplies
them on the host."""
MAX_PRODUCTS = 16
"""Maximum number of products."""
STANDSTILL_TIMEOUT = 5.0
"""Seconds after which a stream of a closed device stands still. Waited for after a violation."""
RECHECK_TIMEOUT = 0.1
"""Seconds that such a stream gets to show that it has drained since, before each later property."""
SCRIBBLE = 0xA5
MAX_REMEMBERED_SIZES = 64
"""How many sizes of dropped memory `scribble_freed_memory` overwrites."""


@dataclass
class DeviceEnvironment:
    """What a real device does for the context of a rank.

    Attributes:
        accelerator: the device.
        schedule: bytes that delays are taken from.
        fabric: the rank's connection to the others, if there are any.
        purpose_prefix: of the purposes that this case opens communicators for.
        store_pid: the process that holds the store, where it may be ended.
        allocated_sizes: of the memory that was handed out.
        delays_drawn: how many delays were taken from the schedule.
    """

    accelerator: Accelerator
    schedule: bytes
    fabric: Fabric | None = None
    purpose_prefix: str = ""
    store_pid: int | None = None
    allocated_sizes: list[int] = field(default_factory=list)
    delays_drawn: int = 0

    def empty(self, nbytes: int) -> Tensor:
        """Memory of the device, overwritten before any other stream can write to it."""
        self.allocated_sizes = [*self.allocated_sizes[1 - MAX_REMEMBERED_SIZES :], nbytes]
        flat = torch.empty(nbytes, dtype=torch.uint8, device=self.accelerator.device)
        return sync_current_stream(flat.fill_(SCRIBBLE))

    def empty_private(self, elements: int, dtype: torch.dtype, padding: int) -> Tensor:
        """One row of them; the device decides on the padding."""
        tensor = self.accelerator.empty_private((1, elements), dtype)
        sync_current_stream(self.accelerator.storage_bytes(tensor).fill_(SCRIBBLE))
        return tensor

    def storage_bytes(self, tensor: Tensor) -> Tensor:
        """As the device says."""
        return self.accelerator.storage_bytes(tensor)

    def scribble_freed_memory(self) -> None:
        """Take blocks of the sizes used so far, scribble them at once, drop them."""
        blocks = [
            torch.full((size,), SCRIBBLE, dtype=torch.uint8, device=self.accelerator.device)
            for size in self.allocated_sizes
        ]
        for block in blocks[-1:]:  # they were all filled on one stream
            sync_current_stream(block)

    def hold(self, stream: Stream) -> Callable[[], None]:
        """Holds it by a stream lock that was not signalled yet."""
        lock = self.accelerator.stream_lock(WAIT_TIMEOUT)
        lock.acquire(stream)
        return lambda: lock.signal(lock.epoch)

    def inject_delay(self, stream: Stream) -> None:
        """A delay that the schedule chooses: some work, or none."""
        if not self.schedule:
            return
        part = self.schedule[self.delays_drawn % len(self.schedule)] / 255
        self.delays_drawn += 1
        device = self.accelerator.device
        if device.type == "cpu":
            stream.launch(lambda: time.sleep(part * MAX_HOST_DELAY))
        else:
            stream.launch(lambda: _multiply(device, int(part * MAX_PRODUCTS)))

    def open(self, purpose: str, ranks: Sequence[int] | None) -> Communicator:
        """A communicator under a name of this case."""
        if self.fabric is None:
            raise Unsupported("a device by itself has no communicator")
        return self.fabric.open(self.fresh_purpose(purpose), ranks)

    def close(self, communicator: Communicator) -> None:
        """Raises what it raises."""
        communicator.close()

    def fresh_purpose(self, purpose: str) -> str:
        """A name of this case."""
        return f"{self.purpose_prefix}{purpose}"

    def end_rank(self, how: Termination) -> None:
        """By a signal to the whole process."""
        os.kill(os.getpid(), signal.SIGKILL if how is Termination.KILL else signal.SIGSTOP)

    def lose_store(self, how: Termination) -> None:
        """By a signal to the process that holds it."""
        if self.store_pid is None:
            raise Unsupported("the store of this fabric may not be ended")
        os.kill(self.store_pid, signal.SIGKILL if how is Termination.KILL else signal.SIGSTOP)
        expiry = time.monotonic() + WAIT_TIMEOUT
        while not all_threads_stopped(self.store_pid) and time.monotonic() < expiry:
            time.sleep(POLL_INTERVAL)

    def pause(self, seconds: float) -> None:
        """Stopped by another process, which then lets it continue."""
        script = f"kill -STOP {os.getpid()}; sleep {seconds:g}; kill -CONT {os.getpid()}"
        subprocess.run(["/bin/sh", "-c", script], check=True)

    def leftovers(self) -> Mapping[str, int]:
        """What of the process is counted."""
        usage = process_usage()
        return {"threads": usage.threads, "descriptors": usage.descriptors}


def _multiply(device: torch.device, count: int) -> None:
    """Keep the current stream busy; what it needs is made on that stream, and dies with it."""
    square = torch.ones(MATRIX_SIDE, MATRIX_SIDE, device=device)
    for _ in range(count):
        square = square @ square


class SteeredEnvironment(DeviceEnvironment):
    """The environment of a device whose schedule was chosen before the case began."""

    def inject_delay(self, stream: Stream) -> None:
        """Does nothing: the schedule already varies the interleaving."""


class DeviceSubject:
    """One device of a backend, freshly opened for every case.

    Where a case leaves a stream that does not drain any more, later cases may meet it again: pools
    of torch hand streams out in turn. So nothing else is played then, and the case is reported as
    it was drawn: any program would break the property, down to the empty one.

    Args:
        backend: of the device.
        steer: receives the schedule of each case before it is played, where the device has one that
            can be chosen; else the schedule is what delays are taken from.
    """

    def __init__(self, backend: Backend, steer: Steer | None = None) -> None:
        self._backend = backend
        self._steer = steer
        self._stuck: tuple[str, Accelerator] | None = None
        self._traits = Traits(
            backend.capabilities, None, (1,), controlled=False, steered=steer is not None
        )

    @property
    def name(self) -> str:
        """The backend's name."""
        return self._backend.name

    @property
    def traits(self) -> Traits:
        """As declared; one rank."""
        return self._traits

    def play(self, prop: Property, case: Case) -> str | None:
        """On the device, as it schedules itself or as the case says.

        Raises `UsageError` where the device cannot be steered; that breaks no clause.
        """
        self._check_standstill()
        if self._steer is not None:
            self._steer(case.schedule)
        began = time.monotonic()
        accelerator: Accelerator | None = None
        try:
            accelerator = open_for_rank(self._backend, 0)
            with closing(accelerator):
                return compare_answers(prop, case, self._answers(prop, case, accelerator))
        except Exception as error:
            violation = to_violation(prop, error)
            violation.expired = time.monotonic() - began >= WAIT_TIMEOUT
            if accelerator is not None and _stands_still(accelerator):
                self._stuck = prop.name, accelerator
                violation.ends_search = True
            raise violation from error

    def _check_standstill(self) -> None:
        """Raise `NotJudgeable` while a stream of an earlier case stands still."""
        if self._stuck is not None and _stands_still(self._stuck[1], RECHECK_TIMEOUT):
            raise NotJudgeable(f"a stream stands still since {self._stuck[0]} was played")
        self._stuck = None

    def _answers(self, prop: Property, case: Case, accelerator: Accelerator) -> list[object]:
        environment_type = DeviceEnvironment if self._steer is None else SteeredEnvironment
        environment = environment_type(accelerator, case.schedule)
        return play_on_device(prop, case, self._backend, environment)

    def close(self) -> None:
        """Nothing is held between cases."""


def _stands_still(accelerator: Accelerator, timeout: float = STANDSTILL_TIMEOUT) -> bool:
    """Whether a stream does not drain, although the accelerator was closed."""
    for role in Role:
        try:
            accelerator.stream(role).synchronize(timeout)
        except StreamTimeout:
            return True
        except Exception:  # it has drained, and says that it failed or was closed
            continue
    return False


def play_on_device(
    prop: Property, case: Case, backend: Backend, environment: DeviceEnvironment
) -> list[object]:
    """The answers of the threads of a rank that needs no fabric."""
    ctx = RankContext(
        rank=0,
        size=1,
        thread=0,
        backend=backend,
        accelerator=environment.accelerator,
        fabric=None,
        deadline=WAIT_TIMEOUT,
        timeout=WAIT_TIMEOUT,
        environment=environment,
    )
    return play_threads(prop, case, ctx)
