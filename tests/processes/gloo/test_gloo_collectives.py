"""Collectives among more ranks than a commit's conformance suite has: clauses X4, S3, X1."""

from typing import Any

from helpers.processes.rank_pool import Ranks
from helpers.rank_programs import collectives


def test_gloo_groups_of_five_and_eight_ranks(ranks: Ranks) -> None:
    rows = [[(a * b) % 3 for b in range(8)] for a in range(8)]
    program: list[dict[str, Any]] = [
        {"op": "all_reduce", "dtype": "int64", "shape": [3]},
        {"op": "uneven", "rows": rows, "width": [2], "dtype": "float32"},
        {"op": "exchange", "rows": rows},
    ]
    for size in (5, 8):
        assert ranks.run(collectives.play, size, program=program, order=[2, 1, 0]) == [3] * size
