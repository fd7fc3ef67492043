"""Family *determinism*: what must be the same each time, on every rank, to the last bit."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.communicator import Communicator
from equipoise.hal.conformance.context import Bench, Play, demand, equal, told
from equipoise.hal.conformance.fixtures.collectives import (
    MOVES,
    SUMS,
    Call,
    Flight,
    Plain,
    bits,
    calls_of,
    expect,
    fly,
    given,
    noise,
    of_bytes,
)
from equipoise.hal.conformance.fixtures.strategies import by_size, calling, common
from equipoise.hal.conformance.program import Program, program
from equipoise.hal.conformance.property import Property, Ranks, Traits

FAMILY = "determinism"
SEVERAL = 4
MOST_CALLS = 3
MOST_MOVES = 6
ROWS = st.integers(2, 4).map(str)
AGAIN = 2
"""How often a sum is formed from the same inputs."""
EXPONENT = {
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float32: 0x7F800000,
    torch.float64: 0x7FF0000000000000,
    torch.float8_e4m3fn: 0x78,
    torch.float8_e5m2: 0x7C,
}
"""The bits of the exponent: where all of them are set, the element is no number."""


@lru_cache(maxsize=4096)
def wild(call: Call, giver: int, taker: int) -> Tensor:
    """Any bits that the dtype can hold: no numbers with a payload, huge counters, minus zero.

    Every other element of a floating type is no number; a truth value stays 0 or 1.
    """
    data = noise(call.nbytes, call.op, call.key, giver, taker)
    if call.dtype == torch.bool:
        return of_bytes(bytearray(byte & 1 for byte in data), call)
    width = call.dtype.itemsize
    special = EXPONENT.get(call.dtype, 0).to_bytes(width, "little")
    for start in range(0, len(data), 2 * width):
        for place, mask in enumerate(special):
            data[start + place] |= mask
    return of_bytes(data, call)


@lru_cache(maxsize=4096)
def brim(call: Call, giver: int, taker: int) -> Tensor:
    """Whole numbers, of which eight just fit into the type together: the low bits matter."""
    limit = torch.iinfo(call.dtype).max // 8
    drawn = noise(8 * torch.Size(call.shape).numel(), call.op, call.key, giver, taker)
    words = (int.from_bytes(drawn[k : k + 8], "little") for k in range(0, len(drawn), 8))
    sign = 1 if call.dtype == torch.uint8 else (-1) ** call.key
    numbers = [sign * (limit - word % (1 + limit // 64)) for word in words]
    return torch.tensor(numbers, dtype=call.dtype).view(call.shape)


@lru_cache(maxsize=4096)
def rough(call: Call, giver: int, taker: int) -> Tensor:
    """Numbers of both signs and of very different sizes: every order of adding them rounds."""
    drawn = noise(8 * torch.Size(call.shape).numel(), call.op, call.key, giver, taker)
    numbers = [
        math.ldexp(int.from_bytes(drawn[k : k + 7], "little", signed=True), drawn[k + 7] % 8 - 52)
        for k in range(0, len(drawn), 8)
    ]
    return torch.tensor(numbers, dtype=torch.float64).to(call.dtype).view(call.shape)


def _moves(traits: Traits) -> st.SearchStrategy[Program]:
    def sized(size: int) -> st.SearchStrategy[Program]:
        calls = calling(traits, ROWS, MOVES)
        return st.lists(calls, min_size=1, max_size=MOST_MOVES).map(lambda s: program(s, size))

    return by_size(common(traits), sized)


def _play_moves(bench: Bench, found: Program) -> Play:
    group = yield from bench.communicator()
    for call in calls_of(found):
        expect("D3", group, (yield from fly(bench, group, [call], Plain(bench), wild)), wild)


def _sums(traits: Traits) -> st.SearchStrategy[Program]:
    """Among several ranks, where there are as many: two numbers have one sum."""
    sizes = [SEVERAL] if SEVERAL in traits.sizes else [max(traits.sizes)]

    def sized(size: int) -> st.SearchStrategy[Program]:
        calls = calling(traits, ROWS, SUMS)
        return st.lists(calls, min_size=1, max_size=MOST_CALLS).map(lambda s: program(s, size))

    return by_size(sizes, sized)


def addends(call: Call, giver: int, taker: int) -> Tensor:
    """What puts a sum of this dtype to the test."""
    return (rough if call.dtype.is_floating_point else brim)(call, giver, taker)


def _play_sums(bench: Bench, found: Program) -> Play:
    group = yield from bench.communicator()
    calls = calls_of(found)
    first = yield from fly(bench, group, calls, Plain(bench), addends)
    for flight in first:
        _exact(group, flight)
    for _ in range(AGAIN):
        again = yield from fly(bench, group, calls, Plain(bench), addends)
        for one, other in zip(again, first, strict=True):
            what = f"rank {group.rank}, once more the same {one.call}"
            equal("D1", one.result, other.result, what)
    sums = [told(flight.result) for flight in first if flight.call.op == "all_reduce"]
    return [bits(total).tolist() for total in sums]


def _exact(group: Communicator, flight: Flight) -> None:
    """Whole numbers to the last bit; others within the bound of any order of adding."""
    if not flight.call.dtype.is_floating_point:
        expect("D1", group, [flight], addends)
        return
    parts = [given(flight.call, r, group.size, addends).double() for r in range(group.size)]
    if flight.call.op == "reduce_scatter":
        parts = [part[group.rank] for part in parts]
    columns = zip(*(part.flatten().tolist() for part in parts), strict=True)
    epsilon = torch.finfo(flight.call.dtype).eps
    for place, (column, seen) in enumerate(
        zip(columns, told(flight.result).double().flatten().tolist(), strict=True)
    ):
        most = group.size * epsilon * math.fsum(map(abs, column))
        off = abs(seen - math.fsum(column))
        what = f"rank {group.rank} after {flight.call}: element {place} is {off:g} off"
        demand("D1", off <= most, f"{what}, {most:g} is what rounding explains")


def _judge_sums(_: Program, answers: Sequence[Any]) -> None:
    for rank, answer in enumerate(answers):
        same = answer == answers[0]
        demand("D1", same, f"rank {rank} has sums {answer}, rank 0 has {answers[0]} (bytes)")


PROPERTIES = (
    Property(
        name="sums-are-the-same-bits-each-time-and-on-every-rank",
        family=FAMILY,
        clauses=("D1",),
        claim="Sums repeat to the bit; whole numbers are exact, others as near as rounding allows.",
        programs=_sums,
        play=_play_sums,
        judge=_judge_sums,
        ranks=Ranks.GROUP,
    ),
    Property(
        name="bits-survive-every-transport",
        family=FAMILY,
        clauses=("D3",),
        claim="What is no number, and counters beyond 2**53, arrive as they were sent.",
        programs=_moves,
        play=_play_moves,
        ranks=Ranks.GROUP,
    ),
)
