"""Collectives as data: what every rank gives, what it is due, and how one is issued.

What a rank gives is a function of the call and its own number, so that every rank can tell by
itself what must arrive from all the others.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from equipoise.hal.communicator import Communicator, Exchange, Parcel
from equipoise.hal.conformance.bench import NEXT, Bench, Guarded, Play, equal, finish, settled
from equipoise.hal.conformance.program import Program
from equipoise.hal.work import Work

MOVES = ("all_gather", "broadcast", "all_to_all", "shift", "exchange")
"""Operations that copy. *shift* sends to the next rank, *exchange* to every other one."""
SUMS = ("all_reduce", "reduce_scatter")
IN_PLACE = ("all_reduce", "broadcast")
PARTED = ("reduce_scatter", "all_to_all", "exchange")
"""Operations that are given a part for every rank."""
BETWEEN = ("shift", "exchange")
"""Operations between two different ranks: a group of one has none."""


@dataclass(frozen=True)
class Call:
    """One collective, as every rank of a group issues it.

    Attributes:
        op: one of `MOVES` or `SUMS`.
        dtype: of every element.
        shape: of the unit: what a rank gives to all, or to each (`PARTED`).
        source: whose tensor a broadcast copies.
        key: makes the data of calls that are otherwise equal differ.
    """

    op: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    source: int = 0
    key: int = 0

    def __str__(self) -> str:
        return f"{self.op} of {name_of(self.dtype)} {list(self.shape)}"

    @property
    def nbytes(self) -> int:
        """Bytes of the unit."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


PROBE = Call("all_gather", torch.uint8, (3,), key=-1)
"""Shows that a communicator still works, and that nothing is left over from what went before."""
Values = Callable[[Call, int, int], Tensor]
"""What a rank (second) gives to a rank (third): `shape` of `dtype`, on the host. Not to be
written to: it may be shared."""


def name_of(dtype: torch.dtype) -> str:
    """Its name, as a step holds it."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: object) -> torch.dtype:
    """The dtype of that name."""
    found: torch.dtype = getattr(torch, str(name))
    return found


def text_of(shape: Sequence[int]) -> str:
    """A shape, as a step holds it: 2x3, or nothing for a single element without dimensions."""
    return "x".join(map(str, shape))


def shape_of(text: object) -> tuple[int, ...]:
    """The shape that `text_of` was given."""
    return tuple(map(int, str(text).split("x"))) if text else ()


def noise(nbytes: int, *key: object) -> bytearray:
    """Bytes that look random, the same ones on every rank for the same key."""
    return bytearray(hashlib.shake_128(repr(key).encode()).digest(nbytes))


def of_bytes(data: bytearray, call: Call) -> Tensor:
    """These bytes as the unit of a call."""
    if not data:
        return torch.empty(call.shape, dtype=call.dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(call.dtype).view(call.shape)


@lru_cache(maxsize=4096)
def tame(call: Call, giver: int, taker: int) -> Tensor:
    """Small whole numbers: every dtype holds them, and no sum of eight of them rounds."""
    most = 1 if call.dtype.itemsize == 1 and call.dtype != torch.uint8 else 15
    count = torch.Size(call.shape).numel()
    drawn = noise(count, call.op, call.key, giver, taker)
    small = torch.tensor([byte & most for byte in drawn], dtype=torch.int32)
    return small.to(call.dtype).view(call.shape)


def bits(tensor: Tensor) -> Tensor:
    """Its bytes, in the order of its elements."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def given(call: Call, rank: int, size: int, values: Values) -> Tensor:
    """What `rank` puts in: the unit, or [size, *unit] for operations that are given parts."""
    if call.op in PARTED:
        return torch.stack([values(call, rank, taker) for taker in range(size)])
    return values(call, rank, 0)


def due(call: Call, rank: int, size: int, values: Values) -> Tensor:
    """What `rank` must find in the end: the definition of every operation (clause X4)."""
    if call.op == "broadcast":
        return values(call, call.source, 0)
    if call.op == "shift":
        return values(call, (rank - 1) % size, 0)
    taker = rank if call.op in PARTED else 0
    parts = torch.stack([values(call, giver, taker) for giver in range(size)])
    return _total(parts) if call.op in SUMS else parts


def _total(parts: Tensor) -> Tensor:
    """The sum over ranks; exact where every partial sum is a whole number below 2**53."""
    wide = torch.float64 if parts.dtype.is_floating_point else torch.int64
    return parts.to(wide).sum(0).to(parts.dtype)


class Buffers(Protocol):
    """Where operands lie."""

    def of(self, values: Tensor) -> Tensor:
        """Device memory with a copy of `values`."""
        ...

    def out(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Device memory for a result."""
        ...


@dataclass(frozen=True)
class Plain:
    """Operands that lie anywhere, by themselves."""

    bench: Bench

    def of(self, values: Tensor) -> Tensor:
        """Device memory with a copy of `values`."""
        return self.bench.of(values)

    def out(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Device memory for a result."""
        return self.bench.empty(shape, dtype)


class Fenced:
    """Operands between guard bands, so many bytes off the alignment."""

    def __init__(self, bench: Bench, offset: int) -> None:
        self._bench = bench
        self._offset = offset
        self._fences: list[Guarded] = []

    def of(self, values: Tensor) -> Tensor:
        """Device memory with a copy of `values`."""
        return settled(self.out(tuple(values.shape), values.dtype).copy_(values))

    def out(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Device memory for a result."""
        fence = self._bench.guarded(torch.Size(shape).numel() * dtype.itemsize, self._offset)
        self._fences.append(fence)
        return fence.data.view(dtype).view(tuple(shape))

    def intact(self) -> bool:
        """Whether every guard band is as it was made."""
        return all(fence.intact() for fence in self._fences)


@dataclass(frozen=True)
class Flight:
    """A call that was issued: its works, where its result will be, and what was given.

    What was given is held to the end: dropping it early is the business of family *keepalive* (K1).
    """

    call: Call
    works: tuple[Work, ...]
    result: Tensor
    operand: Tensor

    def land(self, bench: Bench) -> Play:
        """Wait until it ended; to be used with `yield from`."""
        for work in self.works:
            yield from finish(bench, work, str(self.call))


def start(group: Communicator, call: Call, buffers: Buffers, values: Values = tame) -> Flight:
    """Issue a call. Raises what the communicator raises."""
    tensor = buffers.of(given(call, group.rank, group.size, values))
    if call.op in IN_PLACE:
        return Flight(call, (_in_place(group, call, tensor),), tensor, tensor)
    shapes = {
        "all_gather": (group.size, *call.shape),
        "reduce_scatter": call.shape,
        "shift": call.shape,
    }
    out = buffers.out(shapes.get(call.op, (group.size, *call.shape)), call.dtype)
    return Flight(call, _out_of_place(group, call.op, out, tensor), out, tensor)


def _in_place(group: Communicator, call: Call, tensor: Tensor) -> Work:
    if call.op == "all_reduce":
        return group.all_reduce(tensor)
    return group.broadcast(tensor, call.source)


def _out_of_place(group: Communicator, op: str, out: Tensor, tensor: Tensor) -> tuple[Work, ...]:
    if op == "shift":
        return _shift(group, out, tensor)
    if op == "exchange":
        return (_exchange(group, out, tensor),)
    calls: dict[str, Callable[[Tensor, Tensor], Work]] = {
        "all_gather": group.all_gather,
        "reduce_scatter": group.reduce_scatter,
        "all_to_all": group.all_to_all,
    }
    return (calls[op](out, tensor),)


def _shift(group: Communicator, out: Tensor, tensor: Tensor) -> tuple[Work, ...]:
    """The operand of the stranger layout goes first: if it is refused, nothing is in flight."""
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    if not tensor.is_contiguous():
        return group.isend(tensor, after), group.irecv(out, before)
    return group.irecv(out, before), group.isend(tensor, after)


def _exchange(group: Communicator, out: Tensor, tensor: Tensor) -> Work:
    def parcels(rows: Tensor) -> tuple[Parcel, ...]:
        others = [peer for peer in range(group.size) if peer != group.rank]
        return tuple(Parcel(p, rows[p].reshape(-1).view(torch.uint8)) for p in others)

    out[group.rank].copy_(tensor[group.rank])
    return group.exchange(Exchange(parcels(tensor), parcels(out)))


def fly(
    bench: Bench,
    group: Communicator,
    calls: Sequence[Call],
    buffers: Buffers,
    values: Values = tame,
) -> Play:
    """Issue all, then wait for all; returns the flights. To be used with `yield from`."""
    flights = []
    for call in calls:
        flights.append(start(group, call, buffers, values))
        yield NEXT
    for flight in flights:
        yield from flight.land(bench)
    return flights


def calls_of(found: Program) -> list[Call]:
    """The calls that a program's steps stand for; each step's place makes its data differ."""
    return [
        Call(step.op, dtype_of(step.args[0]), shape_of(step.args[1]), int(step.args[2]), key)
        for key, step in enumerate(found.steps)
    ]


def expect(
    clause: str, group: Communicator, flights: Sequence[Flight], values: Values = tame
) -> None:
    """Demand that every result is what its definition says."""
    for flight in flights:
        wanted = due(flight.call, group.rank, group.size, values)
        equal(clause, flight.result, wanted, f"rank {group.rank} after {flight.call}")
