"""What a stage's model starts from, and which ranks route the same rows."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.integrations.vllm.eplb.model import initial_layout, ranks_sharing_rows

RANKS, TENSOR_PARALLEL = 8, 2


@given(st.integers(1, 4), st.integers(0, 3), st.integers(1, 6), st.integers(0, 14))
def test_initial_layout_repeats_first_experts_in_redundant_slots(
    here: int, elsewhere: int, experts: int, redundant: int
) -> None:
    model: Any = SimpleNamespace(
        moe_layers=[object()] * here,
        num_moe_layers=here + elsewhere,
        num_logical_experts=experts,
        num_physical_experts=experts + redundant,
    )
    placement = initial_layout(model).placement
    assert placement.shape == (here, experts + redundant)
    for row in placement.tolist():
        assert row == [slot % experts for slot in range(experts + redundant)]


@pytest.mark.parametrize(
    ("dp_size", "sequence_parallel", "alike"),
    [
        (1, False, RANKS),
        (1, True, TENSOR_PARALLEL),
        (2, False, TENSOR_PARALLEL),
        (2, True, TENSOR_PARALLEL),
    ],
)
def test_rows_alike_counts_ranks_that_share_rows(
    dp_size: int, sequence_parallel: bool, alike: int
) -> None:
    config = SimpleNamespace(dp_size=dp_size, is_sequence_parallel=sequence_parallel)
    model: Any = SimpleNamespace(moe_layers=[SimpleNamespace(moe_config=config)] * 2)
    assert ranks_sharing_rows(model, RANKS, TENSOR_PARALLEL) == alike
