"""What a worker of vLLM gets that changes no setting."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.experts.config import PlannerOptions
from equipoise.balancer.experts.open import split_staging
from equipoise.balancer.experts.weights.expert_weights import (
    LayerGroup,
    LayerTensors,
    TensorName,
    layer_groups,
    slot_tensor,
    strided,
)
from equipoise.integrations.vllm.eplb.config import balancer_config, node_count, staging_budget
from equipoise.integrations.vllm.settings import EplbSettings


def families(slots_per_rank: int, sizes: list[int]) -> tuple[LayerGroup, ...]:
    """One layer for each size of a slot, in bytes."""
    layers = []
    for number, size in enumerate(sizes):
        tensor = torch.empty((slots_per_rank, size), dtype=torch.uint8)
        tensor_name = TensorName("model", number, "w13")
        layers.append(
            LayerTensors(number, (slot_tensor(tensor_name, tensor, slots_per_rank, strided),))
        )
    return layer_groups(tuple(layers))


@given(st.integers(1, 40), st.lists(st.integers(1, 3000), min_size=1, max_size=6))
def test_default_staging_holds_all_slots_of_any_layer(slots: int, sizes: list[int]) -> None:
    tensor_families = families(slots, sizes)
    assert split_staging(tensor_families, staging_budget(EplbSettings(), tensor_families)) == (
        slots,
    ) * len(tensor_families)


@pytest.mark.parametrize(
    ("staging_bytes", "expected"), [(1 << 20, 1 << 20), ("1MiB", 1 << 20), (1, 3000), ("2k", 3000)]
)
def test_staging_setting_is_at_least_one_slot_of_each_family(
    staging_bytes: Any, expected: int
) -> None:
    tensor_families = families(4, [1000, 2000, 2000])
    assert staging_budget(EplbSettings(staging_bytes=staging_bytes), tensor_families) == expected


@pytest.mark.parametrize(
    ("settings", "headroom"),
    [(EplbSettings(), PlannerOptions().headroom), (EplbSettings(headroom=0), 0)],
)
def test_headroom_setting_reaches_the_planner(settings: EplbSettings, headroom: int) -> None:
    eplb_config = SimpleNamespace(
        window_size=12, step_interval=24, log_balancedness=False, log_balancedness_interval=1
    )
    assert balancer_config(settings, eplb_config, 0, 1, 1).planner.headroom == headroom


@pytest.mark.parametrize("steps", [64, 256])
def test_max_stalled_steps_setting_reaches_the_balancer(steps: int) -> None:
    eplb_config = SimpleNamespace(
        window_size=12, step_interval=24, log_balancedness=False, log_balancedness_interval=1
    )
    settings = EplbSettings(max_stalled_steps=steps)
    assert balancer_config(settings, eplb_config, 0, 1, 1).max_stalled_steps == steps


@given(st.integers(1, 9), st.integers(1, 9))
def test_node_count_of_equal_runs_of_neighbours_is_theirs(nodes: int, each: int) -> None:
    assert node_count([rank // each for rank in range(nodes * each)]) == nodes


@pytest.mark.parametrize("places", [[0, 1, 0, 1], [0, 0, 1], [0, 1, 1], [0, 0, 0, 1]])
def test_node_count_of_anything_else_is_one(places: list[int]) -> None:
    assert node_count(places) == 1
