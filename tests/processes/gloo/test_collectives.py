"""Every collective against its definition: clauses X4, S1, S3, S5, D1, D3, A4, K1, K4, P1, P2.

The driver owns hypothesis; a case is a whole program, and a failure on any rank is gathered before
the next case starts.
"""

from typing import Any

import pytest
from helpers.processes.ranks import Ranks
from helpers.rank_programs import collectives
from helpers.rank_programs.patterns import DTYPES
from helpers.strategies.drawing import few
from hypothesis import given
from hypothesis import strategies as st

from equipoise.backends.cpu import GLOO

FEW = few(25)
SUMMED = sorted(name for name, dtype in DTYPES.items() if dtype in GLOO.capabilities.reductions)
SIZES = st.integers(1, 4)
SHAPES = st.lists(st.integers(0, 3), max_size=3)
ROWS = st.lists(
    st.lists(st.sampled_from([0, 0, 1, 2, 5]), min_size=4, max_size=4), min_size=4, max_size=4
)


def step(op: str, **parts: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"op": st.just(op), **parts})


MOVED = {"shape": SHAPES, "dtype": st.sampled_from(sorted(DTYPES))}
ADDED = {"shape": SHAPES, "dtype": st.sampled_from(SUMMED)}
PAIR = st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from([0, 1, 3, 70000]))
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
@given(SIZES, st.lists(STEPS, min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_programs_of_operations_equal_their_definitions_in_any_order_of_waiting(
    ranks: Ranks, size: int, program: list[dict[str, Any]], random: Any
) -> None:
    order = list(range(len(program)))
    random.shuffle(order)
    answers = ranks.run(collectives.play, size, program=program, order=order)
    assert answers == [len(program)] * size


@pytest.mark.parametrize("op", ["all_gather", "broadcast", "all_to_all"])
@pytest.mark.parametrize("size", [1, 3])
def test_every_declared_dtype_travels_at_any_size(ranks: Ranks, op: str, size: int) -> None:
    assert set(DTYPES.values()) == GLOO.capabilities.dtypes
    shapes: list[list[int]] = [[], [0], [1], [2, 0, 3], [3, 2]]
    program = [
        {"op": op, "dtype": dtype, "shape": shape, "source": 2}
        for dtype in DTYPES
        for shape in shapes
    ]
    order = list(range(len(program)))
    assert ranks.run(collectives.play, size, program=program, order=order) == [len(program)] * size


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("size", [1, 4])
def test_every_declared_reduction_is_exact_at_any_size(ranks: Ranks, op: str, size: int) -> None:
    shapes: list[list[int]] = [[], [0], [1], [2, 0], [3, 2]]
    program = [{"op": op, "dtype": dtype, "shape": shape} for dtype in SUMMED for shape in shapes]
    order = list(range(len(program)))
    assert ranks.run(collectives.play, size, program=program, order=order) == [len(program)] * size


SPLITS = {
    "nothing at all": [[0] * 4] * 4,
    "only to oneself": [[5 * (a == b) for b in range(4)] for a in range(4)],
    "one rank gets everything": [[3 * (b == 1) for b in range(4)] for _ in range(4)],
    "one rank gives everything": [[3 * (a == 1) for _ in range(4)] for a in range(4)],
    "all to everybody": [[1 + a + b for b in range(4)] for a in range(4)],
}


@pytest.mark.parametrize("rows", SPLITS.values(), ids=SPLITS.keys())
def test_uneven_splits_with_rows_and_columns_of_zeros(ranks: Ranks, rows: list[list[int]]) -> None:
    program = [
        {"op": "uneven", "rows": rows, "width": width, "dtype": "bfloat16"}
        for width in ([], [3], [0])
    ]
    program.append({"op": "exchange", "rows": rows})
    assert ranks.run(collectives.play, 4, program=program, order=[3, 2, 1, 0]) == [4] * 4


def test_groups_of_five_and_eight_work(ranks: Ranks) -> None:
    rows = [[(a * b) % 3 for b in range(8)] for a in range(8)]
    program: list[dict[str, Any]] = [
        {"op": "all_reduce", "dtype": "int64", "shape": [3]},
        {"op": "uneven", "rows": rows, "width": [2], "dtype": "float32"},
        {"op": "exchange", "rows": rows},
    ]
    for size in (5, 8):
        assert ranks.run(collectives.play, size, program=program, order=[2, 1, 0]) == [3] * size
