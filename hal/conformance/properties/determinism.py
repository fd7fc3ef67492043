"""Family *determinism*: results that must be equal each time, on every rank, to the last bit."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.communicator import Communicator
from equipoise.hal.conformance.context import Play, RankContext, require, require_equal, to_host
from equipoise.hal.conformance.fixtures.collectives import (
    COPY_OPS,
    REDUCE_OPS,
    CollectiveCall,
    InflightCall,
    PlainBuffers,
    calls_in,
    collective_input,
    expected_result,
    pseudorandom_bytes,
    raw_bytes,
    require_results,
    run_calls,
    unit_from_bytes,
)
from equipoise.hal.conformance.fixtures.strategies import (
    any_collective_step,
    common_sizes,
    offers_any,
    programs_by_size,
)
from equipoise.hal.conformance.program import Program, make_program
from equipoise.hal.conformance.property import Property, PropertyScope, Traits

FAMILY = "determinism"
SUM_RANKS = 4
MAX_SUMS = 3
MAX_COPIES = 6
ROWS = st.integers(2, 4).map(str)
REPEATS = 2
"""How often a sum is formed from the same inputs."""
EXPONENT_BITS = {
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float32: 0x7F800000,
    torch.float64: 0x7FF0000000000000,
    torch.float8_e4m3fn: 0x78,
    torch.float8_e5m2: 0x7C,
}
"""The bits of the exponent: where all of them are set, the element is no number."""


@lru_cache(maxsize=4096)
def arbitrary_bits(call: CollectiveCall, sender: int, receiver: int) -> Tensor:
    """Any bits that the dtype can hold: no numbers with a payload, huge counters, minus zero.

    Every other element of a floating type is no number; a truth value stays 0 or 1.
    """
    data = pseudorandom_bytes(call.nbytes, call.op, call.key, sender, receiver)
    if call.dtype == torch.bool:
        return unit_from_bytes(bytearray(byte & 1 for byte in data), call)
    width = call.dtype.itemsize
    special = EXPONENT_BITS.get(call.dtype, 0).to_bytes(width, "little")
    for start in range(0, len(data), 2 * width):
        for place, mask in enumerate(special):
            data[start + place] |= mask
    return unit_from_bytes(data, call)


@lru_cache(maxsize=4096)
def largest_integers(call: CollectiveCall, sender: int, receiver: int) -> Tensor:
    """Whole numbers, of which eight just fit into the type together: the low bits matter."""
    limit = torch.iinfo(call.dtype).max // 8
    random_data = pseudorandom_bytes(
        8 * torch.Size(call.shape).numel(), call.op, call.key, sender, receiver
    )
    words = (
        int.from_bytes(random_data[k : k + 8], "little") for k in range(0, len(random_data), 8)
    )
    sign = 1 if call.dtype == torch.uint8 else (-1) ** call.key
    numbers = [sign * (limit - word % (1 + limit // 64)) for word in words]
    return torch.tensor(numbers, dtype=call.dtype).view(call.shape)


@lru_cache(maxsize=4096)
def rounding_floats(call: CollectiveCall, sender: int, receiver: int) -> Tensor:
    """Numbers of both signs and of very different sizes: every order of adding them rounds."""
    random_data = pseudorandom_bytes(
        8 * torch.Size(call.shape).numel(), call.op, call.key, sender, receiver
    )
    numbers = [
        math.ldexp(
            int.from_bytes(random_data[k : k + 7], "little", signed=True),
            random_data[k + 7] % 8 - 52,
        )
        for k in range(0, len(random_data), 8)
    ]
    return torch.tensor(numbers, dtype=torch.float64).to(call.dtype).view(call.shape)


@lru_cache(maxsize=4096)
def unusual_floats(call: CollectiveCall, sender: int, receiver: int) -> Tensor:
    """Small numbers, with an infinity or what is no number here and there."""
    data = pseudorandom_bytes(torch.Size(call.shape).numel(), "unusual", call, sender, receiver)
    unusual = {0: math.inf, 1: -math.inf, 2: math.nan}
    numbers = [unusual.get(byte % 8, float(byte % 8)) for byte in data]
    return torch.tensor(numbers, dtype=torch.float64).to(call.dtype).view(call.shape)


def _copies(traits: Traits) -> st.SearchStrategy[Program]:
    def sized(size: int) -> st.SearchStrategy[Program]:
        calls = any_collective_step(traits, ROWS, COPY_OPS)
        return st.lists(calls, min_size=1, max_size=MAX_COPIES).map(lambda s: make_program(s, size))

    return programs_by_size(common_sizes(traits), sized)


def _play_copies(ctx: RankContext, program: Program) -> Play:
    comm = yield from ctx.communicator()
    for call in calls_in(program):
        require_results(
            "D3",
            comm,
            (yield from run_calls(ctx, comm, [call], PlainBuffers(ctx), arbitrary_bits)),
            arbitrary_bits,
        )


def _sums(traits: Traits) -> st.SearchStrategy[Program]:
    """Among several ranks, where there are as many: two numbers have one sum."""
    sizes = [SUM_RANKS] if SUM_RANKS in traits.group_sizes else [max(traits.group_sizes)]

    def sized(size: int) -> st.SearchStrategy[Program]:
        calls = any_collective_step(traits, ROWS, REDUCE_OPS)
        return st.lists(calls, min_size=1, max_size=MAX_SUMS).map(lambda s: make_program(s, size))

    return programs_by_size(sizes, sized)


def sum_inputs(call: CollectiveCall, sender: int, receiver: int) -> Tensor:
    """What puts a sum of this dtype to the test."""
    return (rounding_floats if call.dtype.is_floating_point else largest_integers)(
        call, sender, receiver
    )


def _play_sums(ctx: RankContext, program: Program) -> Play:
    comm = yield from ctx.communicator()
    calls = calls_in(program)
    first = yield from run_calls(ctx, comm, calls, PlainBuffers(ctx), sum_inputs)
    for issued in first:
        _require_sum(comm, issued)
    for _ in range(REPEATS):
        again = yield from run_calls(ctx, comm, calls, PlainBuffers(ctx), sum_inputs)
        for repeat, original in zip(again, first, strict=True):
            what = f"rank {comm.rank}, once more the same {repeat.call}"
            require_equal("D1", repeat.result, original.result, what)
    floats = [call for call in calls if call.dtype.is_floating_point]
    for issued in (yield from run_calls(ctx, comm, floats, PlainBuffers(ctx), unusual_floats)):
        _require_unusual_sum(comm, issued)
    sums = [to_host(issued.result) for issued in first if issued.call.op == "all_reduce"]
    return [raw_bytes(total).tolist() for total in sums]


def _require_sum(comm: Communicator, issued: InflightCall) -> None:
    """Whole numbers to the last bit; others within the bound of any order of adding."""
    if not issued.call.dtype.is_floating_point:
        require_results("D1", comm, [issued], sum_inputs)
        return
    parts = [
        collective_input(issued.call, r, comm.size, sum_inputs).double() for r in range(comm.size)
    ]
    if issued.call.op == "reduce_scatter":
        parts = [part[comm.rank] for part in parts]
    columns = zip(*(part.flatten().tolist() for part in parts), strict=True)
    epsilon = torch.finfo(issued.call.dtype).eps
    for place, (column, total) in enumerate(
        zip(columns, to_host(issued.result).double().flatten().tolist(), strict=True)
    ):
        most = comm.size * epsilon * math.fsum(map(abs, column))
        off = abs(total - math.fsum(column))
        what = f"rank {comm.rank} after {issued.call}: element {place} is {off:g} off"
        require("D1", off <= most, f"{what}, {most:g} is what rounding explains")


def _require_unusual_sum(comm: Communicator, issued: InflightCall) -> None:
    """An infinity, or what is no number, in any addend shows in the sum, as in IEEE 754."""
    expected = expected_result(issued.call, comm.rank, comm.size, unusual_floats).double()
    total = to_host(issued.result).double()
    same = (total == expected) | (total.isnan() & expected.isnan())
    what = f"rank {comm.rank} after {issued.call}: {total.tolist()}, not {expected.tolist()}"
    require("D1", bool(same.all()), what)


def _judge_sums(_: Program, answers: Sequence[Any]) -> None:
    for rank, answer in enumerate(answers):
        same = answer == answers[0]
        require("D1", same, f"rank {rank} has sums {answer}, rank 0 has {answers[0]} (bytes)")


PROPERTIES = (
    Property(
        name="sums-are-the-same-bits-each-time-and-on-every-rank",
        family=FAMILY,
        clauses=("D1",),
        claim="Sums repeat to the bit; whole numbers are exact, others as near as rounding allows, "
        "and what is no number stays none.",
        programs=_sums,
        play=_play_sums,
        judge=_judge_sums,
        needs=offers_any(*REDUCE_OPS),
        scope=PropertyScope.GROUP,
    ),
    Property(
        name="bits-survive-every-transport",
        family=FAMILY,
        clauses=("D3",),
        claim="What is no number, and counters beyond 2**53, arrive as they were sent.",
        programs=_copies,
        play=_play_copies,
        needs=offers_any(*COPY_OPS),
        scope=PropertyScope.GROUP,
    ),
)
