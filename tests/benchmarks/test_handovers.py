"""Stages in threads of one process: whoever hands activations over too carelessly is found out."""

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.processes.threads import Seat, on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.hal.communicator import Fabric
from equipoise.hal.errors import CommunicatorFailed, ResultPending

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
try:
    (
        blocking,
        coordinator,
        delayed,
        device,
        handover,
        place,
        stage,
        tokens,
        wire,
        word,
        channel,
    ) = (
        importlib.import_module(name)
        for name in (
            "handover_blocking",
            "handover_coordinator",
            "link_delayed",
            "emulated_device",
            "handover",
            "link_place",
            "pipeline_stage",
            "token_return",
            "wire",
            "handover_word",
            "handover_channel",
        )
    )
finally:
    sys.path.remove(str(BENCHMARKS))
DEADLINE, HIDDEN = 20.0, 512
Made = Callable[[Any], Any]
Held = Callable[[Fabric], AbstractContextManager[Any]]


@contextlib.contextmanager
def as_it_is(fabric: Fabric) -> Iterator[Fabric]:
    """Messages take the time that they take."""
    yield fabric


@contextlib.contextmanager
def slowly(fabric: Fabric) -> Iterator[Any]:
    """Messages are held back, by threads that end with it."""
    late = delayed.DelayedFabric(fabric, place.Asked(latency=1e-3, rate=50e6), DEADLINE)
    with contextlib.closing(late):
        yield late


class Forgetful(coordinator.Coordinator):  # type: ignore[misc, name-defined]
    """Writes its next output over what is still being sent, as before vLLM pull request 54962."""

    def begin(self, batch: Any) -> None:
        """Waits for nothing."""


class Hasty(coordinator.Coordinator):  # type: ignore[misc, name-defined]
    """Reads before anything has come."""

    def receive(self, batch: Any) -> Any:
        """Whose handles nobody waits for."""
        found = super().receive(batch)
        self._sent += found._handles
        found._handles = []
        return found


class Swapped(blocking.Blocking):  # type: ignore[misc, name-defined]
    """Sends the residual for the hidden states."""

    def send(self, batch: Any, output: Any) -> None:
        """In the wrong order."""
        super().send(batch, handover.Activations(output.residual, output.hidden))


class Stale(blocking.Blocking):  # type: ignore[misc, name-defined]
    """Hands out what came before."""

    def receive(self, batch: Any) -> Any:
        """Receives into tensors that nobody looks at."""
        found, kept = super().receive(batch), getattr(self, "_kept", None)
        if kept is None:
            self._kept = handover.Activations(*(tensor.clone() for tensor in found.read()))
        return blocking.There(self._kept.first(batch.rows))


def served(make: Made, seconds: tuple[float, float], steps: int, held: Held = as_it_is) -> int:
    """Wrong words of a run in which the two stages compute so long."""

    def serve(seat: Seat) -> int:
        with held(seat.fabric) as fabric:
            return pipelined(seat, fabric)

    def pipelined(seat: Seat, fabric: Any) -> int:
        station = handover.Station(
            rank=seat.rank,
            ranks=seat.size,
            wires=wire.HalWires(fabric, DEADLINE),
            fabric=fabric,
            accelerator=seat.accelerator,
            hidden=HIDDEN,
            most=8,
            label="run",
            deadline=DEADLINE,
        )
        returned = tokens.token_return(station)
        loop = stage.Stage(station, make(station), returned)
        spent = seconds[seat.rank]
        batches = [handover.Batch(n, 1 + n % 8, spent, steps - 1 - n) for n in range(steps)]
        loop.run(handover.scheduled(batches, station.in_flight))
        return int(loop.wrong)

    return sum(on_ranks(2, serve))


@pytest.mark.parametrize(
    "make", [blocking.Blocking, coordinator.Coordinator, channel.Channel, word.Word]
)
@pytest.mark.parametrize("seconds", [(0.0, 0.0), (0.0, 0.004), (0.004, 0.0)])
def test_every_hand_over_is_right_whoever_is_slower(
    make: Made, seconds: tuple[float, float]
) -> None:
    assert served(make, seconds, 24) == 0


@pytest.mark.parametrize(
    ("make", "seconds"),
    [
        (Forgetful, (0.0, 0.004)),
        (Hasty, (0.004, 0.0)),
        (Swapped, (0.0, 0.004)),
        (Stale, (0.0, 0.0)),
    ],
)
def test_a_careless_hand_over_has_wrong_words(make: Made, seconds: tuple[float, float]) -> None:
    """The one that forgets is slower than who sends; the hasty one is faster."""
    assert served(make, seconds, 24) > 0


@pytest.mark.parametrize("make", [blocking.Blocking, coordinator.Coordinator, channel.Channel])
def test_a_delay_in_the_hal_changes_no_word(make: Made) -> None:
    assert served(make, (0.0, 0.002), 12, slowly) == 0


class Sooner:
    """A message that ends when it is told to."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.failure: CommunicatorFailed | None = None

    def result(self, timeout: float) -> None:
        """See `Work`."""
        if not self.ended.wait(timeout):
            raise ResultPending("not yet")
        if self.failure is not None:
            raise self.failure


class TestDelay:
    @contextlib.contextmanager
    def lane(self, latency: float = 0.01) -> Iterator[Any]:
        with contextlib.closing(delayed.Lane("lane", 1e6, latency, DEADLINE)) as lane:
            yield lane

    @settings(max_examples=25)
    @given(sizes=st.lists(st.integers(1, 4000), min_size=1, max_size=6))
    def test_messages_end_in_order_and_no_earlier_than_on_a_serial_link(
        self, sizes: list[int]
    ) -> None:
        with self.lane() as lane:
            began = device.now()
            tensors = [torch.zeros(n, dtype=torch.uint8) for n in sizes]
            works = [lane.add(delayed.DelayedWork(Sooner(), tensor)) for tensor in tensors]
            for work in works:
                work.inner.ended.set()
            ends = []
            for number, work in enumerate(works):
                work.result(DEADLINE)
                ends.append(device.now() - began)
                assert work.done()
                assert ends[-1] >= sum(sizes[: number + 1]) / 1e6 + 0.01
            assert ends == sorted(ends)

    def test_a_message_keeps_its_tensor_until_it_has_ended(self) -> None:
        inner = Sooner()
        with self.lane(latency=0.05) as lane:
            work = lane.add(delayed.DelayedWork(inner, torch.zeros(8)))
            inner.ended.set()
            assert not work.done()
            assert work._tensor is not None
            work.result(DEADLINE)
            assert work._tensor is None

    def test_a_soft_wait_leaves_the_message_alive(self) -> None:
        inner = Sooner()
        with self.lane() as lane:
            work = lane.add(delayed.DelayedWork(inner, torch.zeros(8)))
            with pytest.raises(ResultPending):
                work.result(0.01)
            inner.ended.set()
            work.result(DEADLINE)
            assert work.done()

    def test_a_message_that_is_not_due_is_pending(self) -> None:
        inner = Sooner()
        with self.lane(latency=0.2) as lane:
            work = lane.add(delayed.DelayedWork(inner, torch.zeros(8)))
            inner.ended.set()
            with pytest.raises(ResultPending):
                work.result(0.02)
            assert not work.done()

    def test_a_failure_is_raised_every_time(self) -> None:
        inner = Sooner()
        with self.lane() as lane:
            inner.failure = CommunicatorFailed("gone")
            work = lane.add(delayed.DelayedWork(inner, torch.zeros(8)))
            inner.ended.set()
            for _ in range(2):
                with pytest.raises(CommunicatorFailed, match="gone"):
                    work.result(DEADLINE)
            assert work.done()

    def test_all_may_send_before_they_receive(self) -> None:
        def ring(seat: Seat) -> list[int]:
            sent, came = torch.full((4,), seat.rank), torch.zeros(4, dtype=torch.int64)
            with slowly(seat.fabric) as late:
                made, size = late.open("ring"), seat.size
                works = [made.isend(sent, (seat.rank + 1) % size)]
                works.append(made.irecv(came, (seat.rank - 1) % size))
                for work in works:
                    work.result(DEADLINE)
            return came.tolist()

        assert on_ranks(3, ring) == [[2] * 4, [0] * 4, [1] * 4]
