"""Which rank does what: every rank one thing, every layer and request somewhere."""

from hypothesis import given
from hypothesis import strategies as st

from equipoise.demo.grid import Grid

GRIDS = st.builds(
    lambda stages, data, tensor: Grid(stages * data * tensor, stages, tensor),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 4),
)


@given(GRIDS, st.integers(4, 9))
def test_stages_divide_the_layers_in_their_order(grid: Grid, layers: int) -> None:
    first_ranks = range(0, grid.ranks, grid.per_stage)
    parts = [grid.layers(rank, layers) for rank in first_ranks]
    assert [layer for part in parts for layer in part] == list(range(layers))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(GRIDS)
def test_a_rank_is_in_one_stage_one_column_and_one_group_of_slices(grid: Grid) -> None:
    every = range(grid.ranks)
    for groups in (grid.stage_ranks, grid.column, grid.slices):
        members = {groups(rank) for rank in every}
        assert sorted(rank for group in members for rank in group) == list(every)
        assert all(rank in groups(rank) for rank in every)
    assert all(len(grid.column(rank)) == grid.stages for rank in every)
    assert all(len(grid.slices(rank)) == grid.tensor for rank in every)


@given(GRIDS)
def test_columns_serve_the_same_requests_on_all_stages_and_slices_of_them(grid: Grid) -> None:
    for rank in range(grid.ranks):
        column, slices = grid.column(rank), grid.slices(rank)
        assert {grid.group(other) for other in (*column, *slices)} == {grid.group(rank)}
        assert [grid.stage(other) for other in column] == list(range(grid.stages))
        assert [grid.slice(other) for other in slices] == list(range(grid.tensor))
        assert {grid.slice(other) for other in column} == {grid.slice(rank)}
    groups = {grid.group(rank) for rank in grid.stage_ranks(0)}
    assert groups == set(range(grid.data))
