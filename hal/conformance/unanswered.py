"""Operations that nobody answers: what a peer that stays away looks like to all others."""

from collections.abc import Callable

import torch
from hypothesis import strategies as st

from equipoise.hal.communicator import Communicator, Exchange, Parcel
from equipoise.hal.conformance.bench import Bench
from equipoise.hal.conformance.collectives import Call, Plain, start
from equipoise.hal.conformance.program import Step
from equipoise.hal.work import Work

NBYTES = 8
POINTED = ("irecv", "isend", "exchange")
"""Operations with the next rank: when every rank issues the same one, nobody is answered."""
JOINT = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Operations that no rank can end while another stays away."""


def lonely_steps() -> st.SearchStrategy[Step]:
    """`lonely(operation, absent)`: every rank issues it in vain; of joint ones one stays away."""
    pointed = st.builds(lambda op: Step("lonely", (op, 0)), st.sampled_from(POINTED))
    joint = st.builds(
        lambda op, absent: Step("lonely", (op, absent)), st.sampled_from(JOINT), st.integers(0, 1)
    )
    return st.one_of(pointed, joint)


def lonely(bench: Bench, group: Communicator, step: Step) -> tuple[str, Work]:
    """This rank's part: which operation it issued, and its work."""
    op, absent = str(step.args[0]), step.args[1]
    if op in JOINT and group.rank == absent:
        op = "irecv"  # so that this rank, too, has something that fails
    return op, call(bench, group, op)


def call(bench: Bench, group: Communicator, op: str) -> Work:
    """Issue one operation, with the next rank or with all."""
    after = (group.rank + 1) % group.size
    calls: dict[str, Callable[[], Work]] = {
        "irecv": lambda: group.irecv(bench.empty((NBYTES,)), after),
        "isend": lambda: group.isend(bench.filled((NBYTES,), group.rank), after),
        "exchange": lambda: group.exchange(_one_sided(bench, after)),
        "barrier": group.barrier,
    }
    return calls[op]() if op in calls else _collective(bench, group, op)


def _one_sided(bench: Bench, source: int) -> Exchange:
    return Exchange((), (Parcel(source, bench.empty((NBYTES,))),))


def _collective(bench: Bench, group: Communicator, op: str) -> Work:
    dtype = torch.int32 if op in ("all_reduce", "reduce_scatter") else torch.uint8
    return start(group, Call(op, dtype, (NBYTES,)), Plain(bench)).works[0]
