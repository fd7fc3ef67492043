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
def test_grid_stages_divide_layers_in_order(grid: Grid, layers: int) -> None:
    first_ranks = range(0, grid.ranks, grid.ranks_per_stage)
    parts = [grid.layers(rank, layers) for rank in first_ranks]
    assert [layer for part in parts for layer in part] == list(range(layers))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(GRIDS)
def test_grid_groups_partition_ranks(grid: Grid) -> None:
    every = range(grid.ranks)
    for groups in (grid.stage_ranks, grid.column, grid.slices):
        members = {groups(rank) for rank in every}
        assert sorted(rank for group in members for rank in group) == list(every)
        assert all(rank in groups(rank) for rank in every)
    assert all(len(grid.column(rank)) == grid.stages for rank in every)
    assert all(len(grid.slices(rank)) == grid.tensor_parallel_size for rank in every)


@given(GRIDS)
def test_grid_columns_share_requests_over_all_stages(grid: Grid) -> None:
    for rank in range(grid.ranks):
        column, slices = grid.column(rank), grid.slices(rank)
        assert {grid.group(other) for other in (*column, *slices)} == {grid.group(rank)}
        assert [grid.stage(other) for other in column] == list(range(grid.stages))
        assert [grid.slice(other) for other in slices] == list(range(grid.tensor_parallel_size))
        assert {grid.slice(other) for other in column} == {grid.slice(rank)}
    groups = {grid.group(rank) for rank in grid.stage_ranks(0)}
    assert groups == set(range(grid.data_parallel_size))
