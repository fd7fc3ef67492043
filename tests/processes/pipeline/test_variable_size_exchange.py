"""Dispatch and combine against a dense reference: clauses G6, G7, S3 and the order of rows."""

import pytest
from helpers.processes.rank_pool import Ranks
from helpers.rank_programs import portable_exchange as exchange
from helpers.strategies.hypothesis_examples import few
from hypothesis import given
from hypothesis import strategies as st

FEW = few(30)
PAYLOADS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 3), max_size=2),
        st.sampled_from(["float32", "bfloat16", "uint8", "int64", "float16", "float8_e4m3fn"]),
    ),
    min_size=1,
    max_size=3,
)


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, exchange.Grids, int, int]:
    """Ranks, slot ids, top k, slots a rank; ids at or past the last slot are padding."""
    size, top_k, per_rank = (draw(st.integers(1, most)) for most in (4, 3, 3))
    ids = st.integers(0, size * per_rank + 1)
    token = st.lists(ids, min_size=top_k, max_size=top_k)
    grids = [draw(st.lists(token, max_size=6)) for _ in range(size)]
    return size, grids, top_k, per_rank


@FEW
@given(batches(), PAYLOADS)
def test_portable_exchange_round_trip_matches_dense_reference(
    ranks: Ranks,
    batch: tuple[int, exchange.Grids, int, int],
    payloads: list[tuple[list[int], str]],
) -> None:
    size, grids, top_k, per_rank = batch
    rows_received = ranks.run(
        exchange.round_trip, size, grids=grids, top_k=top_k, per_rank=per_rank, payloads=payloads
    )
    valid = sum(s < size * per_rank for grid in grids for token in grid for s in token)
    assert sum(rows_received) == valid


EXTREMES = {
    "no tokens anywhere": [[], [], []],
    "tokens on one rank only": [[], [[0, 3], [5, 1]], []],
    "everything to one slot": [[[4, 4]] * 5, [[4, 4]] * 2, [[4, 4]]],
    "nothing but padding": [[[6, 6]], [[7, 6]], [[6, 9]]],
    "everything to oneself": [[[0, 1]], [[2, 3]], [[4, 5]]],
}


@pytest.mark.parametrize("grids", EXTREMES.values(), ids=EXTREMES.keys())
def test_portable_exchange_delivers_lopsided_batches(ranks: Ranks, grids: exchange.Grids) -> None:
    rows_received = ranks.run(
        exchange.round_trip, 3, grids=grids, top_k=2, per_rank=2, payloads=[([4], "float32")]
    )
    assert sum(rows_received) == sum(s < 6 for grid in grids for token in grid for s in token)


@pytest.mark.parametrize("generations", [[0, 1], [3, 3, 4], [1, 0, 0], [0, 1, 2]])
def test_portable_exchange_generation_mismatch_raises_before_payload(
    ranks: Ranks, generations: list[int]
) -> None:
    """That the same ranks go on afterwards shows that nobody waits for a payload."""
    for rank, answer in enumerate(
        ranks.run(exchange.mismatch, len(generations), generations=generations)
    ):
        assert f"rank {rank} has {generations[rank]}" in answer["told"]
        assert sum(answer["receives"]) == (3 * len(generations) if rank == 0 else 0)
