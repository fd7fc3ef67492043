"""Part of family *shapes*: all-to-all with as many rows a pair as a program says."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from equipoise.hal.conformance.bench import Bench, Play, equal, finish
from equipoise.hal.conformance.collectives import Call, dtype_of, name_of, tame
from equipoise.hal.conformance.program import Program, Step, program
from equipoise.hal.conformance.property import Property, Ranks, Traits
from equipoise.hal.conformance.strategies import by_size, common, movable

MOST_PAIRS = 8
MOST_ROWS = 4


def _programs(traits: Traits) -> st.SearchStrategy[Program]:
    """Pairs that are not named have no rows; a pair that is named twice has those of the last."""
    names = st.sampled_from([name_of(dtype) for dtype in movable(traits)])

    def sized(size: int) -> st.SearchStrategy[Program]:
        rank = st.integers(0, size - 1)
        pair = st.builds(_rows, rank, rank, st.integers(1, MOST_ROWS))
        pairs = st.lists(pair, max_size=MOST_PAIRS)
        return st.builds(
            lambda steps, dtype, width: program(steps, size, {"dtype": dtype, "width": width}),
            pairs,
            names,
            st.integers(2, 3),
        )

    return by_size(common(traits), sized)


def _rows(source: int, destination: int, rows: int) -> Step:
    return Step("rows", (destination, rows), source)


def counts(found: Program) -> list[list[int]]:
    """Rows by source and destination."""
    table = [[0] * found.size for _ in range(found.size)]
    for step in found.steps:
        table[step.rank][int(step.args[0])] = int(step.args[1])
    return table


def _block(found: Program, rows: int, giver: int, taker: int) -> Tensor:
    shape = (rows, found.number("width"))
    return tame(Call("rows", dtype_of(found.setting("dtype")), shape), giver, taker)


def _play(bench: Bench, found: Program) -> Play:
    group = yield from bench.communicator()
    table, rank, ranks = counts(found), group.rank, range(found.size)
    sends, receives = table[rank], [table[giver][rank] for giver in ranks]
    tensor = bench.of(torch.cat([_block(found, sends[r], rank, r) for r in ranks]))
    wanted = torch.cat([_block(found, receives[r], r, rank) for r in ranks])
    out = bench.empty(tuple(wanted.shape), wanted.dtype)
    work = group.all_to_all_uneven(out, tensor, receives, sends)
    yield from finish(bench, work, "all_to_all_uneven")
    equal("S3", out, wanted, f"rank {rank} after sends {sends}, receives {receives}")


UNEVEN = (
    Property(
        name="uneven-rows-arrive",
        family="shapes",
        clauses=("S3",),
        claim="All-to-all moves any number of rows between any two ranks, none and all included.",
        programs=_programs,
        play=_play,
        ranks=Ranks.GROUP,
    ),
)
