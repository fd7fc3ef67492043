"""Ways to break one rank: wrappers around what a balancer is put together from."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from helpers.harnesses.rebalancing_model import Break, Parts
from helpers.watchdog import WATCHDOG

from equipoise.hal.communicator import Exchange
from equipoise.hal.errors import BallotIncomplete, CommunicatorFailed, ControlPlaneLost
from equipoise.hal.stream import Stream

VICTIM = 1
Ranks = Sequence[int] | None


class Around:
    """Passes everything on to what it wraps."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class After(Around):
    """A work that does something once it has ended."""

    def __init__(self, inner: Any, then: Callable[[], object]) -> None:
        super().__init__(inner)
        self._then = then

    def result(self, timeout: float) -> None:
        self._inner.result(timeout)
        self._then()


class FalseLoads(Around):
    """Sums loads wrongly: `spoil` changes the sum, int64 [layers, experts], in place."""

    def __init__(self, inner: Any, spoil: Callable[[torch.Tensor], object]) -> None:
        super().__init__(inner)
        self._spoil = spoil

    def all_reduce(self, tensor: torch.Tensor) -> After:
        return After(self._inner.all_reduce(tensor), lambda: self._spoil(tensor))


def mirrored(loads: torch.Tensor) -> None:
    """Hot experts look cold."""
    loads.copy_(loads.flip(1))


def slightly_off(loads: torch.Tensor) -> None:
    """Enough for other shares, not for another placement."""
    loads[:, 0] += 3


def negative(loads: torch.Tensor) -> None:
    """No planner takes this."""
    loads[0, 0] = -1


OPENED_SUFFIX = "/opened"
"""What ranks ask each other before there is an engine ends so; it is none of the breakages'."""


class FlippedByte(Around):
    """Receives one wrong byte in every blob."""

    def exchange(self, round: Exchange) -> After:
        def spoil() -> None:
            for buffer in round.receives:
                bytes_here = (
                    buffer.blob.cpu()
                )  # whatever the device does with it later comes behind
                bytes_here[2] ^= 0x80  # halves or doubles the float32 there
                buffer.blob.copy_(bytes_here)

        return After(self._inner.exchange(round), spoil)


class FlippedOnce(FlippedByte):
    """The same in the first exchange only that brings something."""

    _sound = False

    def exchange(self, round: Exchange) -> Any:
        if self._sound or not round.receives:
            return self._inner.exchange(round)
        self._sound = True
        return super().exchange(round)


class NoExchange(Around):
    """Cannot exchange anything."""

    def exchange(self, round: Exchange) -> After:
        self._inner.exchange(round).result(WATCHDOG)  # the peers shall not suffer
        raise CommunicatorFailed("exchange of 'test.moves' lost its peer")


class LostOnce(Around):
    """Loses what it sends in its first exchange; its peers wait for it until their deadline."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._dropped = threading.Event()

    def exchange(self, round: Exchange) -> Any:
        if not round.sends or self._dropped.is_set():
            return self._inner.exchange(round)
        self._dropped.set()
        return self._inner.exchange(replace(round, sends=()))


class Slow(Around):
    """Takes a hundred times as long for whatever ranks do together, if that is not too long."""

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        return _dragged(attribute) if name in TOGETHER else attribute


TOGETHER = {"exchange", "all_reduce", "barrier", "cast", "collect", "decide"}
TOO_LONG = 0.1
"""Seconds more, at most, for each."""


def _dragged(call: Callable[..., Any]) -> Callable[..., Any]:
    def slower(*arguments: Any) -> Any:
        began = time.monotonic()

        def drag() -> None:
            time.sleep(min(TOO_LONG, 99 * (time.monotonic() - began)))

        result = call(*arguments)
        if hasattr(result, "result"):
            return After(result, drag)
        drag()
        return result

    return slower


class BrokenUntilBuilt(Around):
    """Fails at its first exchange, and says so until it is built again."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._state = "sound"

    def exchange(self, round: Exchange) -> Any:
        if self._state != "built again":
            self._state = "failed"
            raise CommunicatorFailed("exchange of 'test.moves' lost its peer")
        return self._inner.exchange(round)

    def rebuild(self, ranks: Sequence[int]) -> None:
        self._inner.rebuild(ranks)
        self._state = "built again"


class SerialGroup(Around):
    """Declares that groups do not progress independently; remembers which threads issue on it."""

    def __init__(self, inner: Any, issuers: set[str]) -> None:
        super().__init__(inner)
        self.capabilities = replace(inner.capabilities, independent_groups=False)
        self._issuers = issuers

    def exchange(self, round: Exchange) -> Any:
        self._issuers.add(threading.current_thread().name)
        return self._inner.exchange(round)


class SlowExchange(Around):
    """Is not through before the gate opens."""

    def __init__(self, inner: Any, gate: threading.Event) -> None:
        super().__init__(inner)
        self._gate = gate

    def exchange(self, round: Exchange) -> After:
        return After(self._inner.exchange(round), lambda: self._gate.wait(WATCHDOG))


class FabricWith(Around):
    """Wraps the communicators of one purpose, or the control plane."""

    def __init__(self, inner: Any, purpose: str, wrap: Callable[[Any], Any]) -> None:
        super().__init__(inner)
        self._purpose = purpose
        self._wrap = wrap

    def open(self, purpose: str, ranks: Sequence[int] | None = None) -> Any:
        communicator = self._inner.open(purpose, ranks)
        return self._wrap(communicator) if purpose.endswith(self._purpose) else communicator

    @property
    def control(self) -> Any:
        control = self._inner.control
        return self._wrap(control) if self._purpose == "control" else control


class MuteOnce(Around):
    """Loses its first ballot, but for one that only declines: that vote may not be held at all."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._dropped: set[str] = set()

    def cast(self, question: str, ballot: bytes) -> None:
        declines = b'"status": "failed"' in ballot
        if not self._dropped and not declines and not question.endswith(OPENED_SUFFIX):
            self._dropped.add(question)
            return
        self._inner.cast(question, ballot)


class BlindOnce(Around):
    """Does not see the ballots when all of them say `word` for the first time, `delay` s late."""

    def __init__(self, inner: Any, word: str, delay: float) -> None:
        super().__init__(inner)
        self._word = word.encode()
        self._delay = delay
        self._blind = threading.Event()

    def collect(self, question: str, timeout: float, ranks: Ranks = None) -> tuple[bytes, ...]:
        ballots: tuple[bytes, ...] = self._inner.collect(question, timeout, ranks)
        if all(self._word in ballot for ballot in ballots) and not self._blind.is_set():
            self._blind.set()
            time.sleep(self._delay)
            raise BallotIncomplete(question, (0,))
        return ballots


class SlowToDecide(Around):
    """Sees everything, but settles late."""

    def decide(self, question: str, value: bytes) -> bytes:
        time.sleep(0.3)
        decided: bytes = self._inner.decide(question, value)
        return decided


class NoStore(Around):
    """Has lost the store."""

    def collect(self, question: str, timeout: float, ranks: Ranks = None) -> tuple[bytes, ...]:
        if question.endswith(OPENED_SUFFIX):
            ballots: tuple[bytes, ...] = self._inner.collect(question, timeout, ranks)
            return ballots
        raise ControlPlaneLost("ballots unreadable: connection lost")


class DropsOneCopy(Around):
    """Commits all copies but the first of each rebalance."""

    def commit(self, copies: Sequence[tuple[int, int]], stream: Stream) -> None:
        self._inner.commit(copies[1:], stream)


def fabric(purpose: str, wrap: Callable[[Any], Any], rank: int = VICTIM) -> Break:
    """Break a communicator, or the control plane, of one rank."""

    def apply(parts: Parts) -> Parts:
        if parts.rank != rank:
            return parts
        return replace(parts, fabric=FabricWith(parts.fabric, purpose, wrap))

    return apply


def store(wrap: Callable[[Any], Any]) -> Break:
    """Break the slot store of the victim."""

    def apply(parts: Parts) -> Parts:
        if parts.rank != VICTIM:
            return parts
        return replace(parts, store=wrap(parts.store))

    return apply


def both(first: Break, second: Break) -> Break:
    """Two breakages at once."""
    return lambda parts: second(first(parts))


class From(Around):
    """What it wraps until a moment has come; from then on what is wrong with it."""

    def __init__(self, inner: Any, wrap: Callable[[Any], Any], moment: threading.Event) -> None:
        super().__init__(inner)
        self._wrapped = wrap(inner)
        self._moment = moment

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped if self._moment.is_set() else self._inner, name)


def once_come(purpose: str, wrap: Callable[[Any], Any]) -> Callable[[threading.Event], Break]:
    """As `fabric`, from a moment on that comes later; of all communicators and the control plane
    where `purpose` is empty."""

    def of(moment: threading.Event) -> Break:
        def wrapped(inner: Any) -> From:
            return From(inner, wrap, moment)

        if purpose:
            return fabric(purpose, wrapped)
        return both(fabric("", wrapped), fabric("control", wrapped))

    return of
