"""Every collective against its definition, over MPI: clauses X4, S1, S3, D1, D3, A4, K1, K4, P2."""

from collections.abc import Callable
from typing import Any

import pytest
from helpers.processes.job import Job
from helpers.rank_programs import collectives, mpi
from helpers.rank_programs.patterns import DTYPES
from helpers.strategies.drawing import few
from hypothesis import given
from hypothesis import strategies as st

from equipoise.backends.mpi import BACKEND

FEW = few(25)
SUMMED = sorted(name for name, dtype in DTYPES.items() if dtype in BACKEND.capabilities.reductions)
GROUPS = st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True)
SHAPES = st.lists(st.integers(0, 3), max_size=3)
ROWS = st.lists(
    st.lists(st.sampled_from([0, 0, 1, 2, 5]), min_size=4, max_size=4), min_size=4, max_size=4
)
PAIR = st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from([0, 1, 3, 70000]))


def step(op: str, **parts: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"op": st.just(op), **parts})


MOVED = {"shape": SHAPES, "dtype": st.sampled_from(sorted(DTYPES))}
ADDED = {"shape": SHAPES, "dtype": st.sampled_from(SUMMED)}
STEPS = st.one_of(
    step("all_reduce", **ADDED),
    step("reduce_scatter", **ADDED),
    step("all_gather", **MOVED),
    step("broadcast", source=st.integers(0, 3), **MOVED),
    step("all_to_all", **MOVED),
    step("uneven", rows=ROWS, width=st.lists(st.integers(0, 3), max_size=2), dtype=MOVED["dtype"]),
    step("barrier"),
    step("exchange", rows=ROWS),
    step("messages", messages=st.lists(PAIR, max_size=6)),
)


@FEW
@given(GROUPS, st.lists(STEPS, min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_programs_among_any_ranks_equal_their_definitions_in_any_order_of_waiting(
    job: Callable[[int], Job], ranks_: list[int], program: list[dict[str, Any]], random: Any
) -> None:
    order = list(range(len(program)))
    random.shuffle(order)
    answers = job(4).run(mpi.play, ranks=ranks_, program=program, order=order)
    assert answers == [len(program) if rank in ranks_ else None for rank in range(4)]


@pytest.mark.parametrize("op", ["all_gather", "broadcast", "all_to_all"])
@pytest.mark.parametrize("size", [1, 3])
def test_every_declared_dtype_travels_at_any_size(
    job: Callable[[int], Job], op: str, size: int
) -> None:
    assert set(DTYPES.values()) == BACKEND.capabilities.dtypes
    shapes: list[list[int]] = [[], [0], [1], [2, 0, 3], [3, 2]]
    check(job(4), size, [(op, dtype, shape) for dtype in DTYPES for shape in shapes])


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("size", [1, 4])
def test_every_declared_reduction_is_exact_at_any_size(
    job: Callable[[int], Job], op: str, size: int
) -> None:
    shapes: list[list[int]] = [[], [0], [1], [2, 0], [3, 2]]
    check(job(4), size, [(op, dtype, shape) for dtype in SUMMED for shape in shapes])


def check(job: Job, size: int, steps: list[tuple[str, str, list[int]]]) -> None:
    program = [{"op": op, "dtype": dtype, "shape": s, "source": 2} for op, dtype, s in steps]
    order = list(range(len(program)))
    answers = job.run(mpi.play, ranks=list(range(size)), program=program, order=order)
    assert answers == [len(program)] * size + [None] * (job.size - size)


SPLITS = {
    "nothing at all": [[0] * 4] * 4,
    "only to oneself": [[5 * (a == b) for b in range(4)] for a in range(4)],
    "one rank gets everything": [[3 * (b == 1) for b in range(4)] for _ in range(4)],
    "one rank gives everything": [[3 * (a == 1) for _ in range(4)] for a in range(4)],
    "all to everybody": [[1 + a + b for b in range(4)] for a in range(4)],
}


@pytest.mark.parametrize("rows", SPLITS.values(), ids=SPLITS.keys())
def test_uneven_splits_with_rows_and_columns_of_zeros(
    job: Callable[[int], Job], rows: list[list[int]]
) -> None:
    program = [
        {"op": "uneven", "rows": rows, "width": width, "dtype": "bfloat16"}
        for width in ([], [3], [0])
    ]
    program.append({"op": "exchange", "rows": rows})
    assert job(4).run(collectives.play, program=program, order=[3, 2, 1, 0]) == [4] * 4


def test_an_overlap_of_source_and_destination_changes_nothing(job: Callable[[int], Job]) -> None:
    """Clause A3."""
    assert job(4).run(mpi.aliases) == [[True] * 4] * 4


def test_addresses_need_no_alignment(job: Callable[[int], Job]) -> None:
    """Clause S4."""
    assert job(2).run(mpi.misaligned) == [[True] * 10] * 2


@pytest.mark.parametrize("elements", [1, 1_000_000])
def test_a_ring_of_sends_before_receives_completes(
    job: Callable[[int], Job], elements: int
) -> None:
    """Clause P1: nothing but the progress thread moves the large ones."""
    assert job(4).run(mpi.ring, elements=elements) == [True] * 4


def test_groups_that_share_ranks_progress_independently_of_the_order_of_issue(
    job: Callable[[int], Job],
) -> None:
    """Clause P4."""
    answers = job(4).run(mpi.overlapping)
    assert answers[0] == {"0123": [0, 1111], "210": [2, 111]}
    assert answers[1] == {"0123": [1, 1111], "210": [1, 111], "13": [0, 1010]}
    assert answers[2] == {"0123": [2, 1111], "210": [0, 111]}
    assert answers[3] == {"0123": [3, 1111], "13": [1, 1010]}
