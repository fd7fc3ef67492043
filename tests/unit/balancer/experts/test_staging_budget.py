"""Staging bytes, divided among layer groups."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.balancer.experts.open import split_staging
from equipoise.balancer.experts.weights.expert_weights import ExpertModel
from equipoise.balancer.experts.weights.registry import ModelRegistry
from equipoise.hal.errors import EngineError


def model(widths: list[int], slots: int) -> ExpertModel:
    """A layer of each width, in float32."""
    registry = ModelRegistry("m", slots, 7)
    layers = [torch.zeros(slots, width) for width in widths]
    for number, layer in enumerate(layers):
        registry.register(number, w=layer)
    return registry.finalize([(f"w{number}", layer) for number, layer in enumerate(layers)])


models = st.builds(model, st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 5))


@given(models, st.integers(0, 4000))
def test_staging_budget_is_kept_and_gives_each_layer_group_a_buffer(
    expert_model: ExpertModel, more: int
) -> None:
    groups = expert_model.groups
    least = sum(group.slot_bytes for group in groups)
    buffers = split_staging(groups, least + more)
    staging_bytes = sum(n * group.slot_bytes for n, group in zip(buffers, groups, strict=True))
    assert staging_bytes <= least + more
    assert all(1 <= n <= len(f.slots) for n, f in zip(buffers, groups, strict=True))
    for wider, narrower in zip(split_staging(groups, least + more + 100), buffers, strict=True):
        assert wider >= narrower


@given(models)
def test_staging_budget_for_all_slots_stages_everything(
    expert_model: ExpertModel,
) -> None:
    groups = expert_model.groups
    budget = expert_model.nbytes + sum(group.slot_bytes for group in groups)
    assert split_staging(groups, budget) == tuple(len(group.slots) for group in groups)


@given(models)
def test_staging_budget_of_a_layer_each_leaves_no_layer_group_short(
    expert_model: ExpertModel,
) -> None:
    groups = expert_model.groups
    budget = sum(group.nbytes // len(group.layers) for group in groups)
    assert split_staging(groups, budget) == (expert_model.slots_per_rank,) * len(groups)
    if budget > sum(group.slot_bytes for group in groups):
        assert min(split_staging(groups, budget - 1)) == expert_model.slots_per_rank - 1


def test_staging_budget_beyond_a_layer_goes_to_larger_layer_group() -> None:
    expert_model = model([4, 4, 4, 8], 6)
    assert [group.slot_bytes for group in expert_model.groups] == [16, 32]
    many, few = split_staging(expert_model.groups, 6 * (16 + 32) + 100)
    assert (many, few) == (12, 6)


@given(models)
def test_staging_budget_below_one_buffer_per_layer_group_is_refused(
    expert_model: ExpertModel,
) -> None:
    least = sum(group.slot_bytes for group in expert_model.groups)
    with pytest.raises(
        EngineError, match=f"one slot of each of {len(expert_model.groups)} layer groups"
    ):
        split_staging(expert_model.groups, least - 1)
